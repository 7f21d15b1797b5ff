"""The type checks that run in tests detect wrong shapes at every call."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from typechecks import CHECKED, checked, checks_of, defined

from model_port.processing import token_counts
from model_port.verify import log_softmax

ROW, TABLE = np.zeros(3, np.float32), np.zeros((3, 5), np.float32)


def outer(kind: Any, value: Any, found: Any) -> Any:
    @jaxtyped(typechecker=checked)
    def inner(x: kind) -> Float[np.ndarray, " n"]:
        return found

    return inner(value)


def test_a_nested_function_is_checked_at_every_definition():
    for _ in range(2):
        assert outer(Float[np.ndarray, " n"], ROW, ROW) is ROW
        with pytest.raises(TypeCheckError, match="parameters"):
            outer(Float[np.ndarray, " n"], TABLE, ROW)
        with pytest.raises(TypeCheckError, match="return value"):
            outer(Float[np.ndarray, " n"], ROW, TABLE)


def test_nested_functions_of_the_same_name_are_checked_by_their_own_types():
    assert outer(Float[np.ndarray, "m n"], TABLE, np.zeros(5, np.float32)) is not None
    with pytest.raises(TypeCheckError, match="parameters"):
        outer(Float[np.ndarray, "m n"], ROW, ROW)
    assert outer(int, 3, ROW) is ROW


@pytest.mark.parametrize("call", [lambda: token_counts(np.zeros(3, int), 2), lambda: log_softmax(TABLE)])
def test_a_wrong_shape_is_an_error_in_modules_that_state_shapes(call):
    with pytest.raises(TypeCheckError, match="parameters"):
        call()


def test_every_functions_types_can_be_checked():
    """Generates the checks of all functions, because tests call only some."""
    for name in CHECKED:
        import_module(name)
    assert len(defined) > 100
    for function in defined:
        checks_of(function)
