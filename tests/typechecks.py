"""Beartype for jaxtyping in the tests, with the checks of nested functions cached.

A nested function is defined again at every call of the outer function, and generating its checks takes milliseconds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
from beartype import beartype

# Modules with jaxtyping annotations. pyrefly checks the others; checking them here would double the time of many tests.
ROOT = Path(__file__).parents[1]
SOURCES = [path for package in ("model_port", "paravt_jax", "scripts") for path in (ROOT / package).rglob("*.py")]
CHECKED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in SOURCES
    if "from jaxtyping import" in path.read_text()
]

_made: dict[tuple[object, ...], Callable[..., Any]] = {}
defined: list[Callable[..., Any]] = []  # module-level functions


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a signature, which jaxtyping passes as an empty function, with checks made at its first call."""
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
    """Makes jaxtyping skip functions and dataclasses without shapes, because it slows down each call."""

    def jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
        decorate = every(typechecker=typechecker)
        return lambda item: decorate(item) if _has_shapes(item) else item

    every, jaxtyping.jaxtyped = jaxtyping.jaxtyped, jaxtyped


def _has_shapes(item: Any) -> bool:
    function = item.__init__ if isinstance(item, type) else item
    return "jaxtyping." in repr(getattr(function, "__annotations__", {}))
