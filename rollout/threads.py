"""Work beside the event loop that may be given up, although no thread can be ended."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def abandonable(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, but work that never ends keeps no other from beginning, and the process from ending."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as problem:
            future.set_exception(problem)
        except BaseException as problem:  # SystemExit, which must not end more than the work
            future.set_exception(RuntimeError(f"{type(problem).__name__}: {problem}"))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
