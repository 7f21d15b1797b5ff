"""Runs work in threads beside the event loop, and cancels it on a stop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, but a cancellation waits for the work: an update must not stop half-way."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise


async def unless_stopped(stopping: asyncio.Event, work: Awaitable[Result]) -> Result | None:
    """Returns the result of `work`, or cancels it and returns None as soon as the run must stop."""
    working, stopped = asyncio.ensure_future(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stopping.is_set():
        working.cancel()
        await asyncio.wait({working})
        return None
    return working.result()
