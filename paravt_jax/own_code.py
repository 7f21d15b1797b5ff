"""Functions of the user's own, from the file that a setting names; no other code is ever loaded."""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def function_at(setting: str, place: str) -> Callable[..., Any]:
    """The function that `place`, path/to/file.py:function, names; the same one for as long as the process lives.

    `setting` is what errors call it by. Whatever is wrong with the file is said in one sentence.
    """
    path, _, name = place.rpartition(":")
    told, file = f"{setting}={place}", Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{told}: there is no file {file.absolute()}")
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        said = " ".join(str(problem).split())
        raise ValueError(f"{told} cannot be loaded: {type(problem).__name__}: {said}") from problem
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{told}: the file has no function {name}")
    return function
