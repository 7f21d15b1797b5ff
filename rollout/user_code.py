"""Loads and calls user code from files that settings name. No other user code is ever loaded.

A location has the form path/to/file.py:NAME. Errors name the `setting` that has it. Loading the same location again
returns the same object, unless `forget_files` was called and the file was edited, as between two runs of a notebook.

User code may raise exceptions that would end a task or the process: asynchronous HTTP clients raise CancelledError,
and scripts raise SystemExit. Such exceptions become a RuntimeError, which callers handle like any other error.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")


def is_location(name: str) -> bool:
    """Returns whether a setting's value is the location of user code, not the name of a built-in."""
    return ".py:" in name


def call_user_code(work: Callable[[], Result]) -> Result:
    """Calls user code. Other exceptions than Exception become a RuntimeError."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as problem:
        raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem


async def await_user_code(work: Awaitable[Result]) -> Result:
    """Like `call_user_code`, for awaitables. A cancellation of the awaiting task stays a cancellation."""
    task = asyncio.current_task()
    num_cancelled = task.cancelling() if task is not None else 0
    try:
        return await work
    except Exception:
        raise
    except BaseException as problem:
        cancelled = isinstance(problem, asyncio.CancelledError) and (task is None or task.cancelling() > num_cancelled)
        if cancelled or (isinstance(problem, GeneratorExit) and _running() is not task):  # the coroutine was closed
            raise
        raise RuntimeError(f"{type(problem).__name__}: {problem}") from problem


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop is running
        return None


def load_object(setting: str, location: str) -> Any:
    path, _, name = location.rpartition(":")
    label = f"{setting}={location}"
    module = _module_at(label, Path(path).expanduser().absolute())
    if not hasattr(module, name):
        raise ValueError(f"{label}: the file has no {name}")
    return getattr(module, name)


def load_function(setting: str, location: str) -> Callable[..., Any]:
    function = load_object(setting, location)
    if not callable(function):
        raise ValueError(f"{setting}={location} is not a function")
    return function


def forget_files() -> None:
    """Lets the next run load edited files again."""
    _module_at.cache_clear()


@cache  # so that a run keeps its code if a file is edited while its model loads
def _module_at(label: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{label}: there is no file {file}")
    if file.suffix != ".py":
        raise ValueError(f"{label}: {file} is not a Python file, its name must end in .py")
    try:
        return _module_of(label, file, file.read_bytes())
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{label} cannot be loaded: {type(problem).__name__}: {problem}") from problem


@cache  # so that equal losses of several runs share a compiled program
def _module_of(label: str, file: Path, source: bytes) -> ModuleType:
    """Executes the source of a file. `label` keeps apart the modules of different settings."""
    name = str(file.resolve())
    module = sys.modules[name] = ModuleType(name)  # dataclasses look up their module there
    module.__file__ = str(file)
    if (beside := str(file.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # for its imports, as if it were a script; last, so that it hides no package
    exec(compile(source, str(file), "exec"), vars(module))  # bytecode on disk may be older than an edit
    return module
