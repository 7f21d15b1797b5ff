"""Names the purpose of programs while they are compiled, so that log lines can show it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_purpose: ContextVar[str] = ContextVar("purpose", default="")


def purpose() -> str:
    """Returns the purpose of a program that this thread compiles, or ""."""
    return _purpose.get()


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Sets the purpose of programs that this thread compiles in the context, unless an outer context has set it."""
    token = _purpose.set(_purpose.get() or name)
    try:
        yield
    finally:
        _purpose.reset(token)
