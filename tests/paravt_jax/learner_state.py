"""Learners with random states, for checkpoint tests."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, base_checksum, new_adapter
from model_port.config import LoraConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.settings import LossConfig, OptimConfig


def make_learner(tiny_hf, mesh=None, **optim) -> Learner:
    model = model_port.load(tiny_hf, mesh=mesh)
    settings = OptimConfig(learning_rate=1e-3, **optim)
    return Learner(model, settings, LossConfig(kl_coef=0.0), temperature=0.7, mesh=mesh)


def adapted(tiny_hf, seed) -> tuple[Learner, AdapterInfo]:
    model, lora = model_port.load(tiny_hf), LoraConfig(rank=3, alpha=6.0)
    info = AdapterInfo(lora, AdapterBase(str(tiny_hf), "float32", base_checksum(model, "float32")))
    add_adapter(model, lora, new_adapter(model.config, lora, seed))
    return Learner(model, OptimConfig(learning_rate=1e-3), LossConfig(kl_coef=0.0), temperature=0.7), info


def flip(path: Path, at: int = -1) -> None:
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def set_state(learner: Learner, step: int, *, finite: bool = True) -> Learner:
    """Sets a random state, equal on every mesh; if not `finite`, with all kinds of NaNs."""
    leaves, tree = jax.tree.flatten(learner.state)

    def draw(number, leaf):
        if leaf.ndim == 0:
            return jax.numpy.array(step, leaf.dtype)
        bits = np.random.default_rng([step, number]).integers(0, 2 ** (30 if finite else 32), leaf.shape, np.uint32)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: bits.view(np.float32)[index])

    state = jax.tree.unflatten(tree, [draw(number, leaf) for number, leaf in enumerate(leaves)])
    learner.state = replace(state, num_bad=jax.numpy.array(2))
    return learner


def bits(learner: Learner) -> dict[str, tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(learner.state)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()) for path, leaf in leaves}
