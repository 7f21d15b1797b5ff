"""The keys of nested settings dataclasses, their help texts, and suggestions for unknown keys."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

MAX_HINTS = 3
MIN_LIKENESS = 0.7  # difflib similarity for a suggested key


def section_of(kind: Any) -> type | None:
    """The dataclass in a field's type, which may be optional; None if there is none."""
    return next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and is_dataclass(one)), None)


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
    found: dict[str, list[str]] = {}
    for field in fields(schema):
        key, section = prefix + field.name, section_of(types_of(schema)[field.name])
        if "entries" in field.metadata:
            found[key] = [f"{key}.{name}" for name in field.metadata["entries"]]
        found |= mappings_of(section, f"{key}.") if section is not None else {}
    return found


def flat(layer: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted keys."""
    found: dict[str, Any] = {}
    for name, value in layer.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def unknown_key(key: str, known: list[str]) -> str:
    """The error for an unknown key. It suggests the same name in another section before a similar name in this one."""
    settings = [one for one in known if one.startswith(f"{key}.")]
    if settings:
        return f"{key} is a section; set {', '.join(settings[:MAX_HINTS])} and so on"
    meant = _meant(key, known)
    hint = f"did you mean {' or '.join(meant[:MAX_HINTS])}?" if meant else "--show lists all"
    return f"{key} is not a setting ({hint})"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _meant(key: str, known: list[str]) -> list[str]:
    """Suggests keys with the same name or a prefix of it, else with it as word or initials, else with similar names."""
    section, name = key.removesuffix(_name(key)), _name(key)
    same = [one for one in known if _name(one) == name or key.startswith(f"{one}.")]
    word = [one for one in known if one.startswith(section) and name in _words(_name(one))]
    similar = get_close_matches(name, dict.fromkeys(map(_name, known)), 1, MIN_LIKENESS)
    meant = same or word or [one for one in known if _name(one) in similar]
    return sorted(meant, key=lambda one: not one.startswith(section))


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
    return " | ".join(str(choice) for literal in literals for choice in get_args(literal))
