"""Edits files of a model or an adapter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Sets dotted keys of a JSON file, and creates the file if it is missing."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        section[last] = value
    path.write_text(json.dumps(content))


def change_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Applies `change` to a model's tensors, given by name."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
