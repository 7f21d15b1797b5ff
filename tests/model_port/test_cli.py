"""What a command says when it fails."""

import errno
import os

import pytest

from model_port.cli import one_line


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ValueError("two\n lines"), "two lines"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a", None, "b"), "a: b: No space left on device"),
        (ExceptionGroup("of a task", [ExceptionGroup("of another", [ValueError("why")]), KeyError()]), "why"),
        (KeyError("key"), "KeyError 'key' (unexpected: --debug shows where)"),
    ],
)
def test_an_error_is_one_line_that_says_why(problem, said):
    assert one_line(problem) == said
