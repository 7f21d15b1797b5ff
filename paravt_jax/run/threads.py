"""Runs work in threads next to the event loop, and cancels work when a run stops."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs work like asyncio.to_thread, but a cancellation waits for the work, because updates must not stop midway."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise


async def unless_stopped(stopping: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """Returns the result of `work`, or cancels it and returns None when the run must stop."""
    working, stopped = asyncio.ensure_future(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stopping.is_set():
        working.cancel()
        await asyncio.wait({working})
        return None
    return working.result()
