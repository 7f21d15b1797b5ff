"""The values that hosts exchange, as bytes: JSON, followed by the arrays as they are in memory.

Unlike a pickle, a message names no code: it holds numbers, texts, lists, tuples, dicts, arrays of numbers, and records
of the classes that the reader allows. So a stranger at the coordinator's port can send wrong values, but run nothing.
Like a pickle, it holds an object once that occurs twice.

A JSON array is a node: 0 and the items of a list, 1 and those of a tuple, 2 and the keys and values of a dict, 3 and
dtype, shape and offset of an array, 4 and the number of a node before, or the name of a class and the fields.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

LIST, TUPLE, DICT, ARRAY, AGAIN = range(5)
SCALARS = frozenset((str, int, float, bool, type(None)))
NUMBERS = re.compile(r"[<>|][biuf]\d{1,2}")  # dtypes of arrays
PREFIX_BYTES = 8  # at the start: the length of the JSON
SHOWN_CHARS = 200  # of an error


class WireError(ValueError):
    """Bytes that no host of this run has sent."""


@dataclass(frozen=True)
class Form:
    """How a record is sent: its parts, and what makes a record of them."""

    take: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]


@dataclass(frozen=True)
class Wire:
    """Which records may be in a value; they are sent by all their fields, except those that `forms` names."""

    records: Sequence[type] = ()
    forms: Mapping[type, Form] = field(default_factory=dict)

    def encode(self, value: Any) -> bytes:
        return _encode(value, self._forms())

    def decode(self, data: bytes) -> Any:
        """The value again; raises WireError where the bytes are not of one with these records."""
        try:
            return _decode(data, {kind.__name__: form.make for kind, form in self._forms().items()})
        except Exception as problem:  # a record's own check may raise anything
            raise WireError(f"{type(problem).__name__}: {problem}"[:SHOWN_CHARS]) from None

    def _forms(self) -> dict[type, Form]:
        return {kind: Form(attrgetter(*_names(kind)), kind) for kind in self.records} | dict(self.forms)


PLAIN = Wire()  # no records


def _encode(value: Any, forms: Mapping[type, Form]) -> bytes:
    num_bytes, arrays = 0, list[np.ndarray]()
    numbers: dict[int, int] = {}  # of nodes that may occur again, by the ids of their values
    taken: list[Any] = []  # parts of records may exist only here, and their ids must not be used again

    def nodes(values: Iterable[Any]) -> list[Any]:
        return [value if type(value) in SCALARS else node(value) for value in values]

    def node(value: Any) -> Any:
        nonlocal num_bytes
        kind = type(value)
        if kind is list:
            return [LIST, *nodes(value)]
        if kind is dict:
            return [DICT, *nodes(chain.from_iterable(value.items()))]
        if (number := numbers.get(id(value))) is not None:
            return [AGAIN, number]
        if (form := forms.get(kind)) is not None:
            taken.append(parts := form.take(value))
            found = [kind.__name__, *nodes(parts)]
        elif kind is tuple:
            found = [TUPLE, *nodes(value)]
        elif kind is np.ndarray and NUMBERS.fullmatch(value.dtype.str):
            found = [ARRAY, value.dtype.str, value.shape, num_bytes]
            arrays.append(value)
            num_bytes += value.nbytes
        elif isinstance(value, np.generic):
            return value.item()
        else:
            raise TypeError(f"a {kind.__name__} cannot be sent to other hosts")
        numbers[id(value)] = len(numbers)
        return found

    text = json.dumps(nodes([value]), separators=(",", ":")).encode()
    memory = (np.ascontiguousarray(one).data for one in arrays)
    return b"".join([len(text).to_bytes(PREFIX_BYTES, "little"), text, *memory])


def _decode(data: bytes, makers: Mapping[str, Callable[..., Any]]) -> Any:
    first = PREFIX_BYTES + int.from_bytes(data[:PREFIX_BYTES], "little")  # byte of the arrays
    before: list[Any] = []

    def values(nodes: list[Any]) -> list[Any]:
        return [value(node) if type(node) is list else node for node in nodes]

    def value(node: list[Any]) -> Any:
        kind = node[0]
        if kind == AGAIN:
            return before[node[1]]
        if kind == ARRAY:
            found: Any = _array(data, first, *node[1:])
        else:
            parts = values(node[1:])
            if kind == LIST:
                return parts
            if kind == DICT:
                return dict(zip(parts[::2], parts[1::2], strict=True))
            found = tuple(parts) if kind == TUPLE else makers[kind](*parts)
        before.append(found)
        return found

    return values(json.loads(data[PREFIX_BYTES:first]))[0]


def _array(data: bytes, first: int, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    if not NUMBERS.fullmatch(dtype) or min(offset, *shape, 0) < 0:  # numpy takes lengths below 0
        raise ValueError(f"no array of numbers: {dtype} {shape} at {offset}")
    return np.ndarray(shape, dtype, data, first + offset).copy()  # the message need not stay for it


def _names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple: two or more, or attrgetter gives no tuple."""
    return getattr(kind, "_fields", None) or tuple(one.name for one in fields(kind))
