"""What hosts send each other arrives as it was, and bytes of somebody else are refused without running anything."""

import json
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.run.wire import PLAIN, PREFIX_BYTES, Form, Wire, WireError


class Place(NamedTuple):
    turn: int
    start: int


@dataclass(frozen=True)
class Record:
    name: str
    places: tuple[Place, ...] = ()
    said: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a record has a name")


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


WIRE = Wire((Record, Place))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_arrive_with_their_types(value):
    again = PLAIN.decode(PLAIN.encode(value))
    assert again == value and repr(again) == repr(value)


@pytest.mark.parametrize("dtype", ["float32", "float16", ">i4", "uint8", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 7)])
def test_arrays_arrive_with_their_dtype_and_shape(dtype, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for sent in (array, array.T):
        (again, _) = PLAIN.decode(PLAIN.encode([sent, "more"]))
        assert again.dtype == sent.dtype and again.shape == sent.shape and (again == sent).all()


def test_records_arrive_and_one_that_occurs_twice_is_one():
    record = Record("a", (Place(1, 2), Place(0, 0)), {"value": math.inf})
    logp = np.full(1000, -np.inf, np.float32)
    sent = WIRE.encode([record, (logp, logp), {"again": record}])
    first, (one, other), last = WIRE.decode(sent)
    assert first == record and last["again"] is first and type(first.places[0]) is Place
    assert one is other and np.isneginf(one).all() and len(sent) < logp.nbytes + 200


def test_a_number_of_numpy_arrives_as_a_number():
    assert PLAIN.decode(PLAIN.encode((np.float32(0.5), np.int64(3)))) == (0.5, 3)


def test_of_a_record_its_form_is_sent():
    wire = Wire((Place,), {Record: Form(lambda record: (record.name,), Record)})
    assert wire.decode(wire.encode(Record("a", (Place(1, 2),)))) == Record("a")


@pytest.mark.parametrize("value", [{1}, b"bytes", np.array([object()]), Record("a"), len, ValueError("a")])
def test_nothing_else_is_sent(value):
    with pytest.raises(TypeError, match="cannot be sent to other hosts"):
        PLAIN.encode([value])


def crafted(tree, more=b""):
    text = json.dumps(tree).encode()
    return len(text).to_bytes(PREFIX_BYTES, "little") + text + more


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        crafted([["Path", "/"]]),
        crafted([["Record", ""]]),
        crafted([["Record", "a", [], {}, 4]]),
        crafted([["__init__", 3]]),
        crafted([[4, 0]]),
        crafted([[]]),
        crafted([[2, "key"]]),
        crafted([[2, [0], 1]]),
        crafted([]),
        crafted([[3, "|O", [1], 0]], b"12345678"),
        crafted([[3, "<f4", [3], 0]], b"12345678"),
        crafted([[3, "<f4", [10**12], 0]], b"12345678"),
        crafted([[3, "<f4", [-1], 0]], b"12345678"),
        crafted([[3, "<f4", [1], 5]], b"12345678"),
        crafted([[3, "<f4", [1], -900]], b"12345678"),
        PREFIX_BYTES * b"\xff" + b"[",
        (10**6).to_bytes(PREFIX_BYTES, "little") + b"[" * 10**6,
    ],
    ids=lambda data: repr(data[PREFIX_BYTES : PREFIX_BYTES + 30]),
)
def test_bytes_of_somebody_else_are_refused(data):
    with pytest.raises(WireError):
        WIRE.decode(data)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    for data in (bomb, crafted([["Bomb", str(tmp_path / "ran")]]), len(bomb).to_bytes(PREFIX_BYTES, "little") + bomb):
        with pytest.raises(WireError):
            WIRE.decode(data)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists(), "the test has no teeth"
