"""The trainer: data, rewards, packing, losses, steps, checkpoints, evaluation and benchmarks."""

import sys
from importlib import import_module
from typing import Any

# python -m and `paravt` import the package before the command. A user's command that imports it keeps its own Ctrl-C.
_as_module = sys.argv[:1] == ["-m"] and __name__ in {word.partition(".")[0] for word in sys.orig_argv}
if _as_module or "".join(sys.argv[:1]).endswith("/paravt"):
    from model_port.cli import exit_on_interrupt

    exit_on_interrupt()

COMMANDS = ("train", "sft")  # modules that can be called from Python


def __getattr__(name: str) -> Any:
    """Imports the callable modules on first use, so that `paravt_jax.train(config)` needs no other import.

    The version is looked up on use, because a clone on PYTHONPATH that is not installed has no version.
    """
    if name == "__version__":
        from importlib.metadata import version  # slow to import

        return version("paravt_jax")
    if name in COMMANDS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *COMMANDS})
