"""Names the work that programs are compiled for, so that a log line can show it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_purpose: ContextVar[str] = ContextVar("purpose", default="")


def purpose() -> str:
    """The purpose of a program that this thread compiles; empty if none is set."""
    return _purpose.get()


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Names the purpose of the programs that the thread compiles in this context, unless an outer context has."""
    token = _purpose.set(_purpose.get() or name)
    try:
        yield
    finally:
        _purpose.reset(token)
