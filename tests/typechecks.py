"""Beartype, as jaxtyping asks for it in the tests: functions inside others are checked by what was made for the first.

Such a function is defined again at every call of the outer one, and to make its checks takes milliseconds.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_made: dict[tuple[object, ...], Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """jaxtyping gives the signature alone, with a body that does nothing. Its checks are made at the first call."""
    made = None

    def check(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if made is None:
            made = _checks_of(function)
        return made(*args, **kwargs)

    return check


def _checks_of(function: Callable[..., Any]) -> Callable[..., Any]:
    names, types = function.__code__.co_varnames, repr(function.__annotations__)
    key = (function.__module__, function.__qualname__, names, types)
    if key not in _made:
        _made[key] = beartype(function)
    return _made[key]
