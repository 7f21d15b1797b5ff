"""Declares a setting: a dataclass field with its default and the help text that `--show` prints."""

from copy import copy
from dataclasses import field
from typing import Any, TypeVar

Value = TypeVar("Value")


def setting(default: Value, help: str, **metadata: Any) -> Value:
    """Declares a setting. A default that is a list or dict is copied for every instance."""
    metadata["help"] = help
    declared: Any
    if isinstance(default, list | dict):
        declared = field(default_factory=lambda: copy(default), hash=False, metadata=metadata)
    else:
        declared = field(default=default, metadata=metadata)
    return declared
