"""Runs blocking work in threads that can be abandoned, so that it does not block the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollout.user_code import call_user_code

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, but work that never ends blocks neither other work nor the exit of the process."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call_user_code(work))
        except Exception as problem:
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
