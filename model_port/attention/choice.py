"""Which form of attention is taken, by name or by what the machine and the length of a row call for."""

from collections.abc import Callable
from typing import Literal

import jax

from model_port.attention.blocked import blocked_attention
from model_port.attention.flash import Attention
from model_port.attention.plain import xla_attention
from model_port.attention.rule import Layout
from model_port.attention.scanned import scanned_attention
from model_port.sharding import platform_in_scope

Form = Literal["auto", "xla", "blocked", "scanned"]

# Rows up to here are `blocked`: a CPU is faster so, as long as the scores of a layer fit; elsewhere memory counts.
SHORT_ROW_TOKENS = {"cpu": 4096}
SHORT_ROW_ELSEWHERE = 1024


def attention_of(form: Form) -> Attention:
    return FORMS[form]


def form_of(form: Form, num_tokens: int, platform: str) -> Form:
    """What `auto` is for rows of so many tokens; any other is what it is."""
    if form != "auto":
        return form
    return "blocked" if num_tokens <= SHORT_ROW_TOKENS.get(platform, SHORT_ROW_ELSEWHERE) else "scanned"


def _auto(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout, causal: bool) -> jax.Array:
    return FORMS[form_of("auto", q.shape[1], platform_in_scope())](q, k, v, layout, causal)


def _of_rows(attend: Callable[..., jax.Array]) -> Attention:
    """Of rows that attend to themselves."""
    return lambda q, k, v, layout, causal: attend(q, k, v, layout, layout, causal)


FORMS: dict[Form, Attention] = {
    "auto": _auto,
    "xla": _of_rows(xla_attention),
    "blocked": _of_rows(blocked_attention),
    "scanned": scanned_attention,
}
