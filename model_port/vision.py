"""The vision tower: patches to language-width features, and the DeepStack maps of intermediate layers.

Reference: transformers modeling_qwen3_vl.py (Qwen3VLVisionModel). Attention stays within a frame. The blocks' MLP uses
the tanh GELU, the mergers the exact one. The output merger normalizes before it merges, DeepStack's mergers after.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from model_port.attention import Attention, Layout, attention_of
from model_port.config import VisionConfig
from model_port.inputs import VisionBatch
from model_port.layers import (
    LAYER_INPUT,
    Compute,
    Index,
    LayerNorm,
    along_last,
    at_least_float32,
    cast,
    normal,
    only_if,
    run_layers,
    zeros,
)
from model_port.rope import Rotation, rotate, rotation, vision_frequencies
from model_port.sharding import constrain


class PatchEmbed(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        self.kernel_dc = normal(rngs, (config.width, config.patch_values), scale)
        self.bias = zeros((config.width,))

    def __call__(self, patches: Float[Array, "B P C"]) -> Float[Array, "B P D"]:
        """The reference's convolution has stride = kernel size, so it equals a product with flattened patches."""
        return jnp.einsum("BPC,DC->BPD", patches, cast(self.kernel_dc, patches)) + along_last(self.bias, patches)


class PositionTable(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        self.table_sd = normal(rngs, (config.num_positions, config.width), scale)

    def __call__(self, index: Int[Array, "B P 4"], weight: Float[Array, "B P 4"]) -> Float[Array, "B P D"]:
        table = constrain(at_least_float32(self.table_sd[...]), "sd")  # replicated: patches gather its full width
        weight = weight.astype(table.dtype)
        return sum(table[index[..., corner]] * weight[..., corner, None] for corner in range(4))  # pyright: ignore


class VisionAttention(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        layers, width, heads, head_dim = config.num_layers, config.width, config.num_heads, config.head_dim
        self.qkv_kernel_cnhd = normal(rngs, (layers, 3, heads, head_dim, width), scale)
        self.qkv_bias = zeros((layers, 3, heads, head_dim))
        self.o_kernel_dnh = normal(rngs, (layers, width, heads, head_dim), scale)
        self.o_bias = zeros((layers, width))

    def __call__(
        self, x: Float[Array, "B P D"], turn: Rotation, layout: Layout, attend: Attention
    ) -> Float[Array, "B P D"]:
        qkv = jnp.einsum("BPD,CNHD->CBPNH", x, cast(self.qkv_kernel_cnhd, x)) + cast(self.qkv_bias, x)[:, None, None]
        q, k, v = (constrain(part, "bpnh") for part in qkv)
        mixed = attend(rotate(q, turn), rotate(k, turn), v, layout, False)
        return jnp.einsum("BPNH,DNH->BPD", mixed, cast(self.o_kernel_dnh, x)) + along_last(self.o_bias, x)


class VisionMlp(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        layers, width, ffn = config.num_layers, config.width, config.ffn_width
        self.up_kernel_fd = normal(rngs, (layers, ffn, width), scale)
        self.up_bias = zeros((layers, ffn))
        self.down_kernel_df = normal(rngs, (layers, width, ffn), scale)
        self.down_bias = zeros((layers, width))

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        hidden = jnp.einsum("BPD,FD->BPF", x, cast(self.up_kernel_fd, x)) + along_last(self.up_bias, x)
        hidden = jax.nn.gelu(constrain(hidden, "bpf"), approximate=True)
        return jnp.einsum("BPF,DF->BPD", hidden, cast(self.down_kernel_df, x)) + along_last(self.down_bias, x)


class VisionBlocks(nnx.Module):
    """All blocks, stacked along a leading layer axis."""

    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        self.attn_norm = LayerNorm((config.num_layers, config.width))
        self.attn = VisionAttention(config, scale, rngs)
        self.mlp_norm = LayerNorm((config.num_layers, config.width))
        self.mlp = VisionMlp(config, scale, rngs)

    def __call__(
        self, x: Float[Array, "B P D"], turn: Rotation, layout: Layout, attend: Attention
    ) -> Float[Array, "B P D"]:
        x = x + self.attn(self.attn_norm(x), turn, layout, attend)
        return x + self.mlp(self.mlp_norm(x))


class Merger(nnx.Module):
    """Merges merge x merge patches to one language token; with `count`, a stack of mergers."""

    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs, count: int | None = None):
        stack = () if count is None else (count,)
        merged = config.width * config.merge_unit
        self.norm_after_merge = count is not None
        self.norm = LayerNorm((*stack, merged if self.norm_after_merge else config.width))
        self.up_kernel_fd = normal(rngs, (*stack, merged, merged), scale)
        self.up_bias = zeros((*stack, merged))
        self.down_kernel_df = normal(rngs, (*stack, config.out_width, merged), scale)
        self.down_bias = zeros((*stack, config.out_width))

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B M out"]:
        merged = (x.shape[0], -1, self.up_kernel_fd.shape[-1])
        x = self.norm(x.reshape(merged)) if self.norm_after_merge else self.norm(x).reshape(merged)
        hidden = jnp.einsum("BMD,FD->BMF", x, cast(self.up_kernel_fd, x)) + along_last(self.up_bias, x)
        hidden = jax.nn.gelu(constrain(hidden, "bpf"), approximate=False)
        return jnp.einsum("BMF,DF->BMD", hidden, cast(self.down_kernel_df, x)) + along_last(self.down_bias, x)


class VisionTower(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = PatchEmbed(config, scale, rngs)
        self.pos_embed = PositionTable(config, scale, rngs)
        self.blocks = VisionBlocks(config, scale, rngs)
        self.merger = Merger(config, scale, rngs)
        self.deepstack_mergers = Merger(config, scale, rngs, count=config.num_deepstack)

    def __call__(self, batch: VisionBatch, compute: Compute) -> tuple[Float[Array, "B M D"], Float[Array, "n B M D"]]:
        """Merged features and the DeepStack maps, for each row of the batch."""
        dtype = jnp.dtype(compute.dtype)
        x = self.patch_embed(jnp.asarray(batch.patches, dtype))
        x = constrain(x + self.pos_embed(batch.interp_index, batch.interp_weight).astype(dtype), "bpd")
        turn = rotation(batch.positions, vision_frequencies(self.config))
        unordered = jnp.zeros_like(batch.segment_ids)
        layout = Layout(batch.segment_ids, unordered, unordered)
        attend = attention_of(compute.attention)

        slot_of_layer = np.full(self.config.num_layers, -1, np.int32)
        slot_of_layer[list(self.config.deepstack_layers)] = np.arange(self.config.num_deepstack)

        def step(block: VisionBlocks, index: Index, carry: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            x, taps = carry
            x = constrain(block(checkpoint_name(x, LAYER_INPUT), turn, layout, attend), "bpd")
            slot = slot_of_layer[index] if isinstance(index, int) else jnp.asarray(slot_of_layer)[index]
            keep = bool(slot >= 0) if isinstance(index, int) else slot >= 0
            return (x, only_if(keep, lambda taps: taps.at[slot].set(x), taps)), None

        taps = jnp.zeros((self.config.num_deepstack, *x.shape), x.dtype)
        (x, taps), _ = run_layers(
            self.blocks, self.config.num_layers, step, (x, taps), replace(compute, lighter_layers=0)
        )

        graphdef, params = nnx.split(self.deepstack_mergers)
        maps = [
            nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params))(taps[i])
            for i in range(self.config.num_deepstack)
        ]
        return self.merger(x), jnp.stack(maps)
