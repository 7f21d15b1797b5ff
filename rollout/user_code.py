"""Code of the user's own, from the file that a setting names. Nothing else is ever loaded, and nothing by itself.

A place is path/to/file.py:NAME, `setting` what errors call it by. Whatever is wrong with the file is one sentence, and
one place gives the same object for as long as the process lives.

User code may raise what Python means for a task or a process: asynchronous HTTP clients raise CancelledError, scripts
SystemExit. It ends neither here: it becomes a RuntimeError, which the caller handles as any other error.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")


def call_user_code(work: Callable[[], Result]) -> Result:
    """Calls user code, whose errors are then Exceptions."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as problem:
        raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem


async def await_user_code(work: Awaitable[Result]) -> Result:
    """Awaits user code, whose errors are then Exceptions. A cancellation of the task that awaits it stays one."""
    task = asyncio.current_task()
    num_cancelled = task.cancelling() if task is not None else 0
    try:
        return await work
    except Exception:
        raise
    except BaseException as problem:
        cancelled = isinstance(problem, asyncio.CancelledError) and (task is None or task.cancelling() > num_cancelled)
        if cancelled or (isinstance(problem, GeneratorExit) and _running() is not task):  # or the coroutine is closed
            raise
        raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def load_object(setting: str, place: str) -> Any:
    path, _, name = place.rpartition(":")
    module = _module_at(setting, place, path)
    if not hasattr(module, name):
        raise ValueError(f"{setting}={place}: the file has no {name}")
    return getattr(module, name)


def load_function(setting: str, place: str) -> Callable[..., Any]:
    path, _, name = place.rpartition(":")
    found = getattr(_module_at(setting, place, path), name, None)
    if not callable(found):
        raise ValueError(f"{setting}={place}: the file has no function {name}")
    return found


@cache
def _module_at(setting: str, place: str, path: str) -> ModuleType:
    told, file = f"{setting}={place}", Path(path).expanduser().absolute()
    if not file.is_file():
        raise ValueError(f"{told}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(str(file.resolve()), file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{told}: {file} is no Python file, its name must end in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{told} cannot be loaded: {type(problem).__name__}: {problem}") from problem
    return module
