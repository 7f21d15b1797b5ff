"""One update of the policy on a mesh: log-probs of the scored tokens, gradients added up over batches, one step of Adam.

The masters are float32, activations what the model computes in. Only what trains has gradients and moments: with the
vision tower frozen its output is computed once per distinct frame and shared by policy and reference. Every sum is over
the whole step and divided once, so that how it is cut into batches changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from model_port.model import Qwen3VL
from model_port.sharding import ACTIVATION_AXES
from model_port.text import Visual
from paravt_jax.packing import TrainBatch


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = 2e-6
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    train_vision: bool = False  # the published recipe changes language weights only
    head_chunk_tokens: int = 256  # scored tokens of a row whose logits exist at a time
    max_bad_steps: int = 5  # updates in a row that may be skipped for gradients that are not finite

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be greater than 0")
        if self.head_chunk_tokens < 1:
            raise ValueError(f"optim.head_chunk_tokens={self.head_chunk_tokens} must be at least 1")


@flax.struct.dataclass
class TrainState:
    trainable: nnx.State  # float32 masters
    frozen: nnx.State
    opt_state: Any
    step: Int[Any, ""]  # updates done, which is the policy version
    num_bad: Int[Any, ""]  # updates skipped in a row


def action_logp(
    model: Qwen3VL, batch: TrainBatch, visual: Visual | None, temperature: float, chunk_tokens: int
) -> Float[Array, "B A"]:
    """Log-probs of the scored tokens under log_softmax(z / temperature), a chunk of logits at a time."""
    hidden = model.hidden(batch.text, visual)
    source, target = jnp.asarray(batch.source), jnp.asarray(batch.target)
    chosen = jnp.take_along_axis(hidden, source[..., None], axis=1)
    num_rows, num_actions, width = chosen.shape
    num_chunks = -(-num_actions // min(chunk_tokens, num_actions))
    missing = -num_actions % num_chunks
    chosen = jnp.pad(chosen, ((0, 0), (0, missing), (0, 0))).reshape(num_rows, num_chunks, -1, width)
    target = jnp.pad(target, ((0, 0), (0, missing))).reshape(num_rows, num_chunks, -1)

    @jax.checkpoint
    def score(chunk: tuple[Float[Array, "B c D"], Int[Array, "B c"]]) -> Float[Array, "B c"]:
        hidden, target = chunk
        logits = model.text.logits(hidden) / temperature
        picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return picked - jax.nn.logsumexp(logits, axis=-1)

    logp = jax.lax.map(score, (jnp.moveaxis(chosen, 1, 0), jnp.moveaxis(target, 1, 0)))
    return jnp.moveaxis(logp, 0, 1).reshape(num_rows, -1)[:, :num_actions]


def placed(batch: TrainBatch, mesh: Mesh | None) -> TrainBatch:
    """The batch on its devices, rows split over the axes that batches split over where they divide."""
    if mesh is None:
        return jax.device_put(batch)
    axes = ACTIVATION_AXES["b"]
    assert isinstance(axes, tuple)
    num_parts = int(np.prod([mesh.shape[axis] for axis in axes]))

    def place(array: np.ndarray) -> jax.Array:
        spec = PartitionSpec(axes) if array.shape[0] % num_parts == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(place, batch)
