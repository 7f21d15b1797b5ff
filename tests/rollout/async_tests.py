"""Decorators for tests that are coroutines, with resources opened in the same event loop."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

Work = Callable[..., Coroutine[Any, Any, Any]]
Decorator = Callable[[Work], Callable[..., None]]


def make_test(work: Work, num_given: int, run: Callable[..., object]) -> Callable[..., None]:
    """Makes a test of a coroutine. `run` passes its first `num_given` arguments; the others are fixtures."""

    def test(**fixtures: Any) -> None:
        run(partial(work, **{name: fixtures[name] for name in own}), *(fixtures[name] for name in needed))

    parameters = enumerate(inspect.signature(work).parameters.values())
    own = [each.name for number, each in parameters if number >= num_given or each.kind is each.KEYWORD_ONLY]
    _, *needed = [name for name, each in inspect.signature(run).parameters.items() if each.kind is not each.VAR_KEYWORD]
    fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys([*own, *needed])]
    test.__name__, test.__signature__ = work.__name__, inspect.Signature(fixtures)  # type: ignore[attr-defined]
    return test


def async_test(work: Work) -> Callable[..., None]:
    """Makes a test of a coroutine whose arguments are all fixtures."""
    return make_test(work, 0, lambda work: asyncio.run(work()))


def given(num_given: int, start: Callable[[AsyncExitStack], Awaitable[Sequence[Any]]]) -> Decorator:
    """Returns a decorator for tests whose first arguments `start` creates, and which the stack closes."""

    async def run(work: Work) -> None:
        async with AsyncExitStack() as stack:
            await work(*await start(stack))

    return lambda work: make_test(work, num_given, lambda work: asyncio.run(run(work)))


async def until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.01)
