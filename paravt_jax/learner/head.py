"""Log-probs and entropies of scored tokens under log_softmax(z / temperature), a block of the vocabulary at a time.

On a mesh, each pass all-gathers a block of the head over fsdp, and the backward pass reduce-scatters its gradient at
once, so no device holds the whole head or its gradient. The vocabulary stays sharded over tensor. The backward pass
recomputes each block's logits. It is written by hand with its own sharding, because JAX's transpose of the forward pass
would not know which sums to reduce.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model_port.sharding import (
    gathered,
    max_over_tensor,
    per_device,
    scattered,
    sum_over_data,
    sum_over_tensor,
    tensor_part,
)
from paravt_jax.learner.optim import Number

Saved = tuple[Array, Array, Array, Number, Array]
WHOLE_TOKENS = 256  # a block has as many logits as this many scored tokens per row have over the whole vocabulary
MULTIPLE = 64  # of a block's tokens of the vocabulary, because accelerators multiply other widths slowly


def block_size(vocab_size: int, row_actions: int) -> int:
    """The number of vocabulary tokens in a block. The last block is as large, and overlaps the block before it."""
    num_blocks = -(-row_actions // WHOLE_TOKENS)
    return min(vocab_size, -(-vocab_size // (num_blocks * MULTIPLE)) * MULTIPLE)


def token_scores(
    hidden: Float[Array, "B A D"], head: Float[Array, "V D"], target: Int[Array, "B A"], temperature: Number
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    """The log-prob of each target, and the entropy of its distribution (without a gradient)."""
    return _scores(hidden, head, target, jnp.asarray(temperature))


@jax.custom_vjp
def _scores(hidden: Array, head: Array, target: Array, temperature: Array) -> tuple[Array, Array]:
    return _save(hidden, head, target, temperature)[0]


def _save(hidden: Array, head: Array, target: Array, temperature: Array) -> tuple[tuple[Array, Array], Saved]:
    forward = per_device(_forward, ("bad", "kernel_vd", "ba", ""), ("ba", "ba", "ba"))
    logp, entropy, normaliser = forward(hidden, head, target, temperature)
    return (logp, entropy), (hidden, head, target, temperature, normaliser)


def _differentiate(saved: Saved, d_out: tuple[Array, Array]) -> tuple[Array | None, ...]:
    hidden, head, target, temperature, normaliser = saved
    backward = per_device(_backward, ("bad", "kernel_vd", "ba", "", "ba", "ba"), ("bad", "kernel_vd"))
    d_hidden, d_head = backward(hidden, head, target, jnp.asarray(temperature), normaliser, d_out[0])
    return d_hidden, d_head.astype(head.dtype), None, None


_scores.defvjp(_save, _differentiate)


def _forward(
    hidden: Float[Array, "B A D"],
    shard: Float[Array, "v d"],
    target: Int[Array, "B A"],
    temperature: Float[Array, ""],
) -> tuple[Float[Array, "B A"], Float[Array, "B A"], Float[Array, "B A"]]:
    """Log-probs, entropies, and the log-sum-exp of the logits for the backward pass."""
    block, starts = _blocks(hidden, shard, target, temperature)

    def add(sums: tuple[Array, ...], start: Array) -> tuple[tuple[Array, ...], None]:
        peak, total, weighted, picked = sums
        _, logits, is_new, is_target = block(start)
        higher = jnp.maximum(peak, logits.max(axis=-1))
        weights = jnp.where(is_new, jnp.exp(logits - higher[:, None]), 0.0)
        total, weighted = (part * jnp.exp(peak - higher) for part in (total, weighted))
        picked += jnp.where(is_target, logits, 0.0).sum(axis=-1)
        return (higher, total + weights.sum(axis=-1), weighted + (weights * logits).sum(axis=-1), picked), None

    zeros = jnp.zeros(target.size, jnp.promote_types(hidden.dtype, jnp.float32))
    (peak, total, weighted, picked), _ = jax.lax.scan(add, (zeros - jnp.inf, zeros, zeros, zeros), starts)
    highest = max_over_tensor(peak)
    total, weighted = (sum_over_tensor(part * jnp.exp(peak - highest)) for part in (total, weighted))
    normaliser = highest + jnp.log(total)
    scores = sum_over_tensor(picked) - normaliser, normaliser - weighted / total, normaliser
    logp, entropy, normaliser = (score.reshape(target.shape) for score in scores)
    return logp, entropy, normaliser


def _backward(
    hidden: Float[Array, "B A D"],
    shard: Float[Array, "v d"],
    target: Int[Array, "B A"],
    temperature: Float[Array, ""],
    normaliser: Float[Array, "B A"],
    d_logp: Float[Array, "B A"],
) -> tuple[Float[Array, "B A D"], Float[Array, "v d"]]:
    block, starts = _blocks(hidden, shard, target, temperature)
    flat, wide = hidden.reshape(-1, hidden.shape[-1]), normaliser.dtype

    def add(sums: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        d_hidden, d_shard = sums
        rows, logits, is_new, is_target = block(start)
        d_logits = is_target - jnp.where(is_new, jnp.exp(logits - normaliser.reshape(-1, 1)), 0.0)
        d_logits = (d_logits * (d_logp / temperature).reshape(-1, 1)).astype(hidden.dtype)
        d_hidden += jnp.einsum("tV,VD->tD", d_logits, rows, preferred_element_type=wide)
        d_rows = scattered(jnp.einsum("tV,tD->VD", d_logits, flat, preferred_element_type=wide), "vd")
        d_rows += jax.lax.dynamic_slice_in_dim(d_shard, start, len(rows))
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_shard, d_rows, start, axis=0)), None

    zeros = jnp.zeros(flat.shape, wide), jnp.zeros(shard.shape, wide)
    (d_hidden, d_shard), _ = jax.lax.scan(add, zeros, starts)
    return sum_over_tensor(d_hidden).astype(hidden.dtype).reshape(hidden.shape), sum_over_data(d_shard)


def _blocks(
    hidden: Float[Array, "B A D"],
    shard: Float[Array, "v d"],
    target: Int[Array, "B A"],
    temperature: Float[Array, ""],
) -> tuple[Callable[[Array], tuple[Array, ...]], Int[Array, " n"]]:
    """A function that computes a block's logits, and the first token of each block in this device's vocabulary."""
    vocab_size, wide = len(shard), jnp.promote_types(hidden.dtype, jnp.float32)
    size = block_size(vocab_size, target.shape[1])
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1, 1) - tensor_part() * vocab_size

    def block(
        start: Int[Array, ""],
    ) -> tuple[Float[Array, "c D"], Float[Array, "t c"], Bool[Array, "1 c"], Bool[Array, "t c"]]:
        """The rows of the head, the logits, whether no earlier block has them, and whether they are the targets'."""
        rows = gathered(jax.lax.dynamic_slice_in_dim(shard, start, size).astype(hidden.dtype), "vd")
        logits = jnp.einsum("tD,VD->tV", flat, rows, preferred_element_type=wide) / temperature
        tokens = (jnp.minimum(start, vocab_size - size) + jnp.arange(size))[None]
        is_new = tokens >= start
        return rows, logits, is_new, is_new & (targets == tokens)

    return block, jnp.arange(0, vocab_size, size)
