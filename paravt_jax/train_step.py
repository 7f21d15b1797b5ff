"""What the learner computes on a mesh: so far the log-probs of the scored tokens of a packed batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from model_port.model import Qwen3VL
from model_port.sharding import ACTIVATION_AXES
from model_port.text import Visual
from paravt_jax.packing import TrainBatch


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
