"""Beartype, as jaxtyping asks for it in the tests: functions inside others are checked by what was made for the first.

Such a function is defined again at every call of the outer one, and to make its checks takes milliseconds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import beartype

# Modules that state shapes. Checking more is for pyrefly, and would make many tests twice as long.
ROOT = Path(__file__).parents[1]
SOURCES = [path for package in ("model_port", "paravt_jax", "scripts") for path in (ROOT / package).rglob("*.py")]
CHECKED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in SOURCES
    if "from jaxtyping import" in path.read_text()
]

_made: dict[tuple[object, ...], Callable[..., Any]] = {}
defined: list[Callable[..., Any]] = []  # functions of modules


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """jaxtyping gives the signature alone, with a body that does nothing. Its checks are made at the first call."""
    made = None
    if "<locals>" not in function.__qualname__:
        defined.append(function)

    def check(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if made is None:
            made = checks_of(function)
        return made(*args, **kwargs)

    return check


def checks_of(function: Callable[..., Any]) -> Callable[..., Any]:
    names, types = function.__code__.co_varnames, repr(function.__annotations__)
    key = (function.__module__, function.__qualname__, names, types)
    if key not in _made:
        _made[key] = beartype(function)
    return _made[key]


def check_shapes_only() -> None:
    """Leaves functions and dataclasses without shapes as they are, because jaxtyping makes each call slower."""

    def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
        decorate = every(typechecker=typechecker)
        return lambda item: decorate(item) if _has_shapes(item) else item

    every, jaxtyping.jaxtyped = jaxtyping.jaxtyped, jaxtyped


def _has_shapes(item: Any) -> bool:
    function = item.__init__ if isinstance(item, type) else item
    return "jaxtyping." in repr(getattr(function, "__annotations__", {}))
