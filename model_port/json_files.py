"""Reads a model's JSON files. They are untrusted, so sizes are bounded, and errors name the file and the key.

Transformers writes null for unset values, so null counts as absent.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 64 * 2**20  # six times the published tokenizer.json, the largest of these files
MAX_DEPTH = 64
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_SHOWN = 60  # an error quotes at most this many characters of a wrong value


def read_bytes(path: Path) -> bytes:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes, more than {MAX_FILE_BYTES}; does it belong to the model?")
    content = path.read_bytes()
    check_not_pointer(path, content)
    return content


def check_not_pointer(path: Path, start: bytes) -> None:
    """Raises if a file is the pointer that `git clone` without Git LFS leaves in place of a large file."""
    if start.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` there, or `hf download`")


def read_object(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), path)


def parse_object(content: bytes, source: str | Path) -> dict[str, Any]:
    """Parses a JSON object of limited depth. `source` names the content in errors."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{source} is not valid JSON: {problem}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{source} must hold a JSON object, got {type(parsed).__name__}")
    level, depth = [parsed], 0
    while level := [inner for outer in level for inner in _values(outer) if isinstance(inner, dict | list)]:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ValueError(f"{source} is nested more than {MAX_DEPTH} deep")
    return parsed


def flattened(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: {"a": {"b": x}} becomes {"a.b": x}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def without_nan(value: Any) -> Any:
    """Replaces NaN and infinity by None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _values(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


@dataclass(frozen=True)
class Section:
    """A JSON object whose values are checked when they are read. Values without a default are required."""

    source: str  # the file
    values: Mapping[str, Any]
    prefix: str = ""  # of the keys in errors, for example "text_config."

    def wrong(self, key: str, expected: str) -> ValueError:
        return ValueError(f"{self.source}: {self.prefix}{key}={repr(self.values[key])[:MAX_SHOWN]} must be {expected}")

    def expect(self, key: str, supported: Any) -> None:
        """Raises unless the value is absent or equals `supported`, the only value that is implemented."""
        if self.has(key) and self.values[key] != supported:
            raise ValueError(
                f"{self.source}: {self.prefix}{key}={repr(self.values[key])[:MAX_SHOWN]} is not supported; "
                f"expected {supported!r}"
            )

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.source}: key '{self.prefix}{key}' is missing")
        return value

    def count(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, least: float | int, most: float | int, default: float | int | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not least <= value <= most:  # also rejects NaN
            raise self.wrong(key, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def counts(self, key: str, most: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self._value(key, default)
        if not isinstance(value, list | tuple) or not all(type(item) is int and 0 <= item <= most for item in value):
            raise self.wrong(key, f"a list of whole numbers from 0 to {most}")
        return tuple(value)

    def numbers(self, key: str, length: int, least: float | int, most: float | int) -> tuple[float, ...]:
        value = self._value(key, None)
        fits = isinstance(value, list) and len(value) == length
        if not fits or not all(type(item) in (int, float) and least <= item <= most for item in value):
            raise self.wrong(key, f"a list of {length} numbers from {least:g} to {most:g}")
        return tuple(map(float, value))

    def section(self, key: str, default: dict[str, Any] | None = None) -> "Section":
        value = self._value(key, default)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Section(self.source, value, f"{self.prefix}{key}.")
