"""Mixture of experts: the router selects for each token the experts with the highest probabilities.

No token is dropped. Each device sorts its pairs of a token and an expert by expert, and fills them into blocks of rows,
each for a single expert, so that one batched matrix product computes all blocks. A device computes its own rows with
all experts, whose weights it gathers over fsdp like a dense layer's. The experts' ffn axis is split over tensor.

DIFFERS: `jax.lax.ragged_dot` would need no blocks, but with jax 0.10 XLA computes every row with every expert, always
on GPUs and in the gradient of the weights on TPUs.

Reference: transformers modeling_qwen3_vl_moe.py (Qwen3VLMoeTextTopKRouter, Qwen3VLMoeTextExperts).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model_port.architecture import TextConfig
from model_port.inputs import NOT_REPLAYED
from model_port.layers import at_least_float32, cast, gated_silu, normal
from model_port.sharding import constrain, gathered, per_device, sum_over_tensor

FEW_TOKENS = 1024  # up to here every expert has one block of all tokens: more FLOPs, but no copies of weights
BLOCKS_OF_EXPERT = 2  # average per expert; more blocks have less padding, but need more copies of weights
ROWS_STEP = 8  # the number of rows of a block is a multiple of this


class Experts(nnx.Module):
    """The stacked MLPs of all layers: routers, and the experts' kernels in the memory order of the published files."""

    def __init__(self, config: TextConfig, scale: float, rngs: nnx.Rngs):
        layers, experts, width, ffn = config.num_layers, config.num_experts, config.width, config.ffn_width
        self.token_experts = config.token_experts
        self.router_kernel_xm = normal(rngs, (layers, experts, width), scale)
        self.gate_up_kernel_xmcf = normal(rngs, (layers, experts, width, 2, ffn), scale)
        self.down_kernel_xfm = normal(rngs, (layers, experts, ffn, width), scale)

    def __call__(
        self, x: Float[Array, "B T D"], replayed: Int[Array, "B T J"] | None = None
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T J"]]:
        """Returns the output and the indices of each token's experts, replayed where `replayed` is not NOT_REPLAYED."""
        x = constrain(x, "btd")
        logits = jnp.einsum("BTD,XD->BTX", x, cast(self.router_kernel_xm, x))
        weights, chosen = route(logits, self.token_experts, replayed)
        mixed = per_device(mix, ("btd", "btj", "btj", "kernel_xmcf", "kernel_xfm"), ("btd",))
        (out,) = mixed(x, weights, chosen, cast(self.gate_up_kernel_xmcf, x), cast(self.down_kernel_xfm, x))
        return out, chosen


def route(
    logits: Float[Array, "B T X"], count: int, replayed: Int[Array, "B T J"] | None = None
) -> tuple[Float[Array, "B T J"], Int[Array, "B T J"]]:
    """Returns the probabilities of the `count` likeliest experts, normalized to sum to one, and their indices."""
    probs = jax.nn.softmax(at_least_float32(logits), axis=-1)
    weights, chosen = jax.lax.top_k(probs, count)
    if replayed is not None:
        chosen = jnp.where(replayed == NOT_REPLAYED, chosen, replayed)
        weights = jnp.take_along_axis(probs, chosen, axis=-1)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(logits.dtype), chosen


def mix(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T J"],
    chosen: Int[Array, "B T J"],
    gate_up: Float[Array, "part D 2 F"],
    down: Float[Array, "part F D"],
) -> tuple[Float[Array, "B T D"]]:
    """Computes the weighted sum of the chosen experts' outputs, from a device's rows and its part of every kernel."""
    gate_up, down = gathered(gate_up, "xmcf"), gathered(down, "xfm")
    num_experts, width, _, ffn = gate_up.shape
    blocks = fill_blocks(chosen.reshape(-1, chosen.shape[-1]), num_experts)
    pairs = jnp.broadcast_to(x[:, :, None], (*chosen.shape, width)).reshape(-1, width)
    rows = pairs.at[blocks.pairs].get(mode="fill", fill_value=0, unique_indices=True)
    hidden = product(rows, gate_up.reshape(num_experts, width, 2 * ffn), blocks.experts)
    hidden = product(gated_silu(hidden[..., :ffn], hidden[..., ffn:]), down, blocks.experts)
    outputs = hidden.reshape(-1, width).at[blocks.slots].get(mode="promise_in_bounds", unique_indices=True)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    outputs = outputs.reshape(*chosen.shape, width)
    out = jnp.einsum("BTJD,BTJ->BTD", outputs, weights, preferred_element_type=wide)
    return (sum_over_tensor(out.astype(x.dtype)),)


def tokens_of_experts(
    chosen: Int[Array, "L B T J"], segment_ids: Int[Array, "B T"], num_experts: int
) -> Int[Array, "L X"]:
    """Counts the tokens of every expert, without padding tokens."""
    counted = jnp.where((segment_ids > 0)[None, ..., None], chosen, num_experts)
    return jax.nn.one_hot(counted, num_experts, dtype=jnp.int32).sum(axis=(1, 2, 3))


class Blocks(NamedTuple):
    """The assignment of pairs (a token and one of its experts) to the rows of blocks; each block has one expert."""

    experts: Int[Array, " M"] | None  # the expert of each block; None: block i has expert i
    pairs: Int[Array, "M rows"]  # the pair in each row; past the last pair for padding
    slots: Int[Array, " pairs"]  # the row of each pair, counted over all blocks


def block_shape(num_tokens: int, num_experts: int, token_experts: int) -> tuple[int, int]:
    """Returns the number of blocks, enough for any choice of experts, and the number of rows of each block."""
    num_pairs = num_tokens * token_experts
    rows = -(-num_pairs // (BLOCKS_OF_EXPERT * num_experts * ROWS_STEP)) * ROWS_STEP
    if num_tokens <= max(rows, FEW_TOKENS):  # no expert has a token twice, so a block can hold all tokens
        return num_experts, num_tokens
    return num_pairs // rows + num_experts, rows


def fill_blocks(chosen: Int[Array, "tokens J"], num_experts: int) -> Blocks:
    num_blocks, rows = block_shape(len(chosen), num_experts, chosen.shape[1])
    order = jnp.argsort(chosen.reshape(-1))  # of pairs, expert by expert
    owners = chosen.reshape(-1)[order]
    sizes = jnp.bincount(owners, length=num_experts)
    ends = jnp.cumsum(-(-sizes // rows))  # in blocks
    experts, first_block = None, jnp.arange(num_experts)
    if num_blocks != num_experts:
        experts = jnp.minimum(jnp.searchsorted(ends, jnp.arange(num_blocks), side="right"), num_experts - 1)
        first_block = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    rank = jnp.arange(len(order)) - (jnp.cumsum(sizes) - sizes)[owners]
    sorted_slots = first_block[owners] * rows + rank
    pairs = len(order) + jnp.arange(num_blocks * rows)
    pairs = pairs.at[sorted_slots].set(order, unique_indices=True).reshape(num_blocks, rows)
    return Blocks(experts, pairs, jnp.zeros_like(order).at[order].set(sorted_slots, unique_indices=True))


def product(
    rows: Float[Array, "M rows D"], kernel: Float[Array, "X D F"], experts: Int[Array, " M"] | None
) -> Float[Array, "M rows F"]:
    """Multiplies each block by its expert's kernel."""
    return jnp.einsum("MRD,MDF->MRF", rows, kernel if experts is None else kernel[experts])
