"""The keys of nested settings dataclasses, their help texts, and suggestions for unknown keys."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

MAX_HINTS = 3
MAX_SHOWN = 100  # characters of a changed value
MIN_LIKENESS = 0.7  # difflib similarity for a suggested key


def section_of(kind: Any) -> type | None:
    """The dataclass in a field's type, which may be optional; None if the type has no dataclass."""
    return next((part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)), None)


@cache
def types_of(schema: type) -> dict[str, Any]:
    """A dataclass's resolved type hints. Cached, because resolving them takes most of the time to read a config."""
    return get_type_hints(schema)


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    hints = types_of(schema)
    for field in fields(schema):
        section = section_of(hints[field.name])
        if section is None:
            yield prefix + field.name
        else:
            yield from keys_of(section, f"{prefix}{field.name}.")


def mappings_of(schema: type, prefix: str = "") -> dict[str, list[str]]:
    """The settings that are mappings, each with its predefined entries. Users may add others."""
    mappings: dict[str, list[str]] = {}
    for field in fields(schema):
        key, section = prefix + field.name, section_of(types_of(schema)[field.name])
        if "entries" in field.metadata:
            mappings[key] = [f"{key}.{name}" for name in field.metadata["entries"]]
        mappings |= mappings_of(section, f"{key}.") if section is not None else {}
    return mappings


def change_text(key: str, old: Any, new: Any) -> str:
    """Formats a changed setting for a log line; only the key if its values are long."""
    old, new = repr(old), repr(new)
    return key if max(len(old), len(new)) > MAX_SHOWN else f"{key}: {old} -> {new}"


def unknown_key(key: str, valid_keys: list[str]) -> str:
    """The error for an unknown key. It suggests the same name in another section first, then similar names."""
    settings = [valid for valid in valid_keys if valid.startswith(f"{key}.")]
    if settings:
        return f"{key} is a section; set {', '.join(settings[:MAX_HINTS])} and so on"
    suggestions = _suggestions(key, valid_keys)
    hint = f"did you mean {' or '.join(suggestions[:MAX_HINTS])}?" if suggestions else "--show lists all"
    return f"{key} is not a setting ({hint})"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _suggestions(key: str, valid_keys: list[str]) -> list[str]:
    """Keys with the same name or a prefix of it; else with the name as a word or as initials; else similar names."""
    section, name = key.removesuffix(_name(key)), _name(key)
    same = [valid for valid in valid_keys if _name(valid) == name or key.startswith(f"{valid}.")]
    word = [valid for valid in valid_keys if valid.startswith(section) and name in _words(_name(valid))]
    close = get_close_matches(name, dict.fromkeys(map(_name, valid_keys)), 1, MIN_LIKENESS)
    similar = [valid for valid in valid_keys if _name(valid) in close]
    return sorted(same or word or similar, key=lambda valid: not valid.startswith(section))


def _words(name: str) -> list[str]:
    words = name.split("_")
    return [*words, "".join(word[:1] for word in words)] if len(words) > 1 else words


@cache
def helps_of(schema: type) -> dict[str, str]:
    """Each field's choices and help text."""
    hints = types_of(schema)
    return {
        field.name: "; ".join(filter(None, [_choices(hints[field.name]), field.metadata.get("help", "")]))
        for field in fields(schema)
    }


def _choices(kind: Any) -> str:
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return " | ".join(choice or "''" for literal in literals for choice in get_args(literal))
