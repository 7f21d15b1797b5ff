"""Qwen3-VL (dense and MoE) and Qwen2.5-VL in Flax NNX: weights, processing and sampling, but no training.

Annotations, einsum strings and parameter names use the same axis letters:
B packed rows · T query tokens · S key tokens · D width · N query heads · K key/value heads · H head dim · F ffn ·
V vocab · P vision patches · R query heads per kv head (N = K·R) · L layers · Z rank of an adapter · X experts ·
J experts per token
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_port.config import ModelConfig, preset
    from model_port.layers import Compute
    from model_port.loading import load, logits, one_sequence
    from model_port.model import VLModel
    from model_port.sharding import make_mesh
else:

    def __getattr__(name: str) -> Any:
        """Imports the names in HOMES on first use, so that a command's --help does not wait for jax."""
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)


# python -m imports the package before the command. A command of the user's that imports it keeps its own Ctrl-C.
if sys.argv[:1] == ["-m"] and __name__ in {word.partition(".")[0] for word in sys.orig_argv}:
    from model_port.cli import exit_on_interrupt

    exit_on_interrupt()

__all__ = ["load", "make_mesh", "logits", "one_sequence", "VLModel", "ModelConfig", "Compute", "preset"]

HOMES = {
    "load": "loading",
    "make_mesh": "sharding",
    "logits": "loading",
    "one_sequence": "loading",
    "VLModel": "model",
    "ModelConfig": "config",
    "Compute": "layers",
    "preset": "config",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
