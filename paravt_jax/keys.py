"""The settings of nested dataclasses by their dotted keys: which there are, and which one is meant."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

MAX_HINTS = 3
MIN_LIKENESS = 0.7  # of a key that may be meant, by difflib's measure


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Those of settings, and of sections that may be null."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        kinds = (hints[field.name], *get_args(hints[field.name]))
        section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        if section is None or type(None) in kinds:
            yield prefix + field.name
        if section is not None:
            yield from keys_of(section, f"{prefix}{field.name}.")


def keys_in(layer: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    """The keys that a file or a command line sets."""
    for name, value in layer.items():
        yield from keys_in(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]


def unknown_key(key: str, known: list[str]) -> str:
    """What to say of a key that is none: the same name in another section goes before a similar one in this."""
    settings = [one for one in known if one.startswith(f"{key}.")]
    if settings:
        return f"{key} is a section; set {', '.join(settings[:MAX_HINTS])} and so on"
    meant = _in_other_sections(key, known) or get_close_matches(key, known, 1, MIN_LIKENESS)
    if not meant:
        names = [one.rpartition(".")[2] for one in known]
        meant = [
            one
            for name in get_close_matches(key.rpartition(".")[2], names, 1, MIN_LIKENESS)
            for one in _in_other_sections(name, known)
        ]
    hint = f"did you mean {' or '.join(meant[:MAX_HINTS])}?" if meant else "--show lists all"
    return f"{key} is no setting ({hint})"


def _in_other_sections(key: str, known: list[str]) -> list[str]:
    return [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]
