"""Code of the user's own, from the file that a setting names. Nothing else is ever loaded, and nothing by itself."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def object_at(setting: str, place: str) -> Any:
    """What `place`, path/to/file.py:NAME, names; the same object for as long as the process lives.

    `setting` is what errors call it by. Whatever is wrong with the file is said in one sentence.
    """
    path, _, name = place.rpartition(":")
    told = f"{setting}={place}"
    if not Path(path).is_file():
        raise ValueError(f"{told}: there is no file {Path(path).absolute()}")
    spec = importlib.util.spec_from_file_location(str(Path(path).resolve()), path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{told}: {path} is no Python file, its name must end in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{told} cannot be loaded: {type(problem).__name__}: {problem}") from problem
    if not hasattr(module, name):
        raise ValueError(f"{told}: the file has no {name}")
    return getattr(module, name)
