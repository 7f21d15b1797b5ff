"""model_port.convert that dies by a signal as soon as a function of a module has been called so often."""

import importlib
import os
import sys

from model_port import convert


def main() -> None:
    """Of the arguments the first four are the module, its function, how often, and the signal."""
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
