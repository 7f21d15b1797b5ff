"""Changes to the files of a model or an adapter, for tests that need others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Sets dotted keys of a JSON file, which need not exist."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        section[last] = value
    path.write_text(json.dumps(content))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Does `change` to the tensors by name."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
