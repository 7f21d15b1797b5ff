"""Renders chat templates as transformers does (utils/chat_template_utils.py).

A template comes with a model, so it runs in Jinja's sandbox, which denies it files, modules and private attributes.
"""

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2.sandbox
from jinja2.ext import loopcontrols

MAX_PROBLEM_CHARS = 300


def render(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **settings: Any) -> str:
    """Renders a dialogue. A ValueError names the template's problem."""
    try:
        return _compiled(template).render(messages=messages, tools=tools, **settings)
    except Exception as problem:  # a template can raise anything
        kind = "" if isinstance(problem, jinja2.TemplateError | ValueError) else f"{type(problem).__name__}: "
        raise ValueError(f"{kind}{problem}"[:MAX_PROBLEM_CHARS]) from None


@cache
def _compiled(chat_template: str) -> jinja2.Template:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    functions = {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    return environment.from_string(chat_template, functions)
