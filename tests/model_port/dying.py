"""Runs model_port.convert, and kills it with a signal at the n-th call of a function."""

import importlib
import os
import sys

from model_port import convert


def main() -> None:
    """The first four arguments are the module, its function, the number of calls, and the signal."""
    module, name, num_calls, number = sys.argv[1:5]
    del sys.argv[1:5]
    owner, left = importlib.import_module(module), int(num_calls)
    original = getattr(owner, name)

    def dies(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), int(number))
        return original(*args, **kwargs)

    setattr(owner, name, dies)
    convert.main()
