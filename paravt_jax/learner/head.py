"""Log-probs and entropies of scored tokens under log_softmax(z / temperature), a chunk of logits at a time.

On a mesh, each pass all-gathers the head over fsdp once. The head's gradient is summed over all chunks in float32 and
reduced once. The vocabulary stays sharded over tensor. The backward pass recomputes each chunk's logits. It is written
by hand with its own sharding, because JAX's transpose of the forward pass would not know which sums to reduce.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model_port.sharding import gathered, max_over_tensor, per_device, sum_of_rows, sum_over_tensor, tensor_part
from paravt_jax.learner.optim import Number

Saved = tuple[Array, Array, Array, Number, Array]


def token_scores(
    hidden: Float[Array, "B A D"],
    head: Float[Array, "V D"],
    target: Int[Array, "B A"],
    temperature: Number,
    chunk_tokens: int,
) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
    """The log-prob of each target, and the entropy of its distribution (without a gradient).

    A chunk has at most `chunk_tokens` of every row.
    """
    num_chunks = -(-hidden.shape[1] // chunk_tokens)
    return _scores(hidden, head, target, jnp.asarray(temperature), num_chunks)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(hidden: Array, head: Array, target: Array, temperature: Array, num_chunks: int) -> tuple[Array, Array]:
    return _save(hidden, head, target, temperature, num_chunks)[0]


def _save(
    hidden: Array, head: Array, target: Array, temperature: Array, num_chunks: int
) -> tuple[tuple[Array, Array], Saved]:
    forward = per_device(partial(_forward, num_chunks=num_chunks), ("bad", "kernel_vd", "ba", ""), ("ba", "ba", "ba"))
    logp, entropy, normaliser = forward(hidden, head, target, temperature)
    return (logp, entropy), (hidden, head, target, temperature, normaliser)


def _differentiate(num_chunks: int, saved: Saved, d_out: tuple[Array, Array]) -> tuple[Array | None, ...]:
    hidden, head, target, temperature, normaliser = saved
    backward = per_device(
        partial(_backward, num_chunks=num_chunks), ("bad", "kernel_vd", "ba", "", "ba", "ba"), ("bad", "kernel_vd")
    )
    d_hidden, d_head = backward(hidden, head, target, jnp.asarray(temperature), normaliser, d_out[0])
    return d_hidden, d_head.astype(head.dtype), None, None


_scores.defvjp(_save, _differentiate)


def _forward(
    hidden: Float[Array, "B A D"],
    shard: Float[Array, "v d"],
    target: Int[Array, "B A"],
    temperature: Float[Array, ""],
    num_chunks: int,
) -> tuple[Float[Array, "B A"], Float[Array, "B A"], Float[Array, "B A"]]:
    """Log-probs, entropies, and the log-sum-exp of the logits for the backward pass."""
    head = gathered(shard.astype(hidden.dtype), "vd")

    def score(chunk: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden, target = chunk
        logits = _logits(hidden, head, temperature)
        peak = max_over_tensor(logits.max(axis=-1))
        normaliser = peak + jnp.log(sum_over_tensor(jnp.exp(logits - peak[:, None]).sum(axis=-1)))
        picked = sum_over_tensor(jnp.where(_is_target(target, logits), logits, 0.0).sum(axis=-1))
        mean = sum_over_tensor((jnp.exp(logits - normaliser[:, None]) * logits).sum(axis=-1))
        return picked - normaliser, normaliser - mean, normaliser

    scores = jax.lax.map(score, (_chunks(hidden, num_chunks), _chunks(target, num_chunks)))
    logp, entropy, normaliser = (_rows(score, *target.shape) for score in scores)
    return logp, entropy, normaliser


def _backward(
    hidden: Float[Array, "B A D"],
    shard: Float[Array, "v d"],
    target: Int[Array, "B A"],
    temperature: Float[Array, ""],
    normaliser: Float[Array, "B A"],
    d_logp: Float[Array, "B A"],
    num_chunks: int,
) -> tuple[Float[Array, "B A D"], Float[Array, "v d"]]:
    head, wide = gathered(shard.astype(hidden.dtype), "vd"), normaliser.dtype

    def add(d_head: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden, target, normaliser, d_logp = chunk
        logits = _logits(hidden, head, temperature)
        d_logits = _is_target(target, logits) - jnp.exp(logits - normaliser[:, None])
        d_logits = (d_logits * (d_logp / temperature)[:, None]).astype(hidden.dtype)
        d_head += jnp.einsum("cV,cD->VD", d_logits, hidden, preferred_element_type=wide)
        d_hidden = jnp.einsum("cV,VD->cD", d_logits, head, preferred_element_type=wide)
        return d_head, sum_over_tensor(d_hidden).astype(hidden.dtype)

    chunks = tuple(_chunks(x, num_chunks) for x in (hidden, target, normaliser, d_logp))
    d_head, d_hidden = jax.lax.scan(add, jnp.zeros(head.shape, wide), chunks)
    return _rows(d_hidden, *target.shape), sum_of_rows(d_head, "vd")


def _logits(hidden: Float[Array, "c D"], head: Float[Array, "v D"], temperature: Float[Array, ""]) -> Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("cD,VD->cV", hidden, head, preferred_element_type=wide) / temperature


def _is_target(target: Int[Array, " c"], logits: Float[Array, "c v"]) -> Bool[Array, "c v"]:
    """True at each target's logit, if this device's vocabulary shard has it."""
    first = tensor_part() * logits.shape[1]
    return target[:, None] == first + jnp.arange(logits.shape[1])[None]


def _chunks(x: Float[Array, "B A *D"] | Int[Array, "B A"], num_chunks: int) -> Array:
    """Splits the tokens of all rows into chunks of equal size and pads the last chunk."""
    flat = x.reshape(-1, *x.shape[2:])
    missing = -len(flat) % num_chunks
    return jnp.pad(flat, ((0, missing), *[(0, 0)] * (flat.ndim - 1))).reshape(num_chunks, -1, *flat.shape[1:])


def _rows(chunks: Float[Array, "n c *D"], num_rows: int, num_tokens: int) -> Array:
    flat = chunks.reshape(-1, *chunks.shape[2:])[: num_rows * num_tokens]
    return flat.reshape(num_rows, num_tokens, *flat.shape[1:])
