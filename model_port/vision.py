"""Parts that the families' vision towers share. A tower encodes patches as features and DeepStack feature maps."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model_port.architecture import VisionConfig
from model_port.attention import Attention, Layout
from model_port.inputs import VisionBatch
from model_port.layers import Compute, LayerNorm, RMSNorm, along_last, cast, normal, zeros
from model_port.lora import Projection
from model_port.rope import Rotation, rotate
from model_port.sharding import constrain


class Tower(Protocol):
    blocks: "VisionBlocks | nnx.List"  # or after `split`

    def __call__(self, batch: VisionBatch, compute: Compute) -> tuple[Float[Array, "B M D"], Float[Array, "n B M D"]]:
        """Returns each row's merged features, and the maps that are added to the first language layers."""
        ...


class PatchEmbed(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs, *, bias: bool = True):
        self.kernel_dc = normal(rngs, (config.width, config.patch_values), scale)
        if bias:
            self.bias = zeros((config.width,))

    def __call__(self, patches: Float[Array, "B P C"]) -> Float[Array, "B P D"]:
        """Multiplies flattened patches by the kernel, like the reference's convolution with stride = kernel size."""
        embedded = jnp.einsum("BPC,DC->BPD", patches, cast(self.kernel_dc, patches))
        return embedded + along_last(self.bias, patches) if hasattr(self, "bias") else embedded


class VisionAttention(nnx.Module):
    def __init__(self, config: VisionConfig, scale: float, rngs: nnx.Rngs):
        layers, width, heads, head_dim = config.num_layers, config.width, config.num_heads, config.head_dim
        self.qkv = Projection("cnhd", (layers, 3, heads, head_dim, width), scale, rngs, bias=True)
        self.o = Projection("dnh", (layers, width, heads, head_dim), scale, rngs, bias=True)

    def __call__(
        self, x: Float[Array, "B P D"], turn: Rotation, layout: Layout, attend: Attention
    ) -> Float[Array, "B P D"]:
        q, k, v = (constrain(part, "bpnh") for part in jnp.moveaxis(self.qkv(x), 2, 0))
        return self.o(attend(rotate(q, turn), rotate(k, turn), v, layout, False))


class VisionBlocks(nnx.Module):
    """All blocks, stacked along a leading layer axis. `norm` and `mlp` make the family's norm and MLP."""

    def __init__(
        self,
        config: VisionConfig,
        scale: float,
        rngs: nnx.Rngs,
        norm: Callable[[tuple[int, int]], LayerNorm | RMSNorm],
        mlp: Callable[[Any, float, nnx.Rngs], Callable[[Array], Array]],
    ):
        stack = (config.num_layers, config.width)
        self.attn_norm = norm(stack)
        self.attn = VisionAttention(config, scale, rngs)
        self.mlp_norm = norm(stack)
        self.mlp = mlp(config, scale, rngs)

    def __call__(
        self, x: Float[Array, "B P D"], turn: Rotation, layout: Layout, attend: Attention
    ) -> Float[Array, "B P D"]:
        x = x + self.attn(self.attn_norm(x), turn, layout, attend)
        return x + self.mlp(self.mlp_norm(x))


class Merger(nnx.Module):
    """Merges merge x merge patches into one language token. With `count`, it is a stack of mergers.

    `norm` is applied before patches are merged. The default is a LayerNorm, which a stack applies after merging.
    """

    def __init__(
        self,
        config: VisionConfig,
        scale: float,
        rngs: nnx.Rngs,
        count: int | None = None,
        norm: LayerNorm | RMSNorm | None = None,
    ):
        stack = () if count is None else (count,)
        merged = self.merged_width = config.width * config.merge_unit
        self.norm_after_merge = count is not None
        own = LayerNorm((*stack, merged if self.norm_after_merge else config.width))
        self.norm = own if norm is None else norm
        self.up = Projection("fd", (*stack, merged, merged), scale, rngs, bias=True)
        self.down = Projection("df", (*stack, config.out_width, merged), scale, rngs, bias=True)

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B M out"]:
        merged = (x.shape[0], -1, self.merged_width)
        x = self.norm(x.reshape(merged)) if self.norm_after_merge else self.norm(x).reshape(merged)
        return self.down(jax.nn.gelu(constrain(self.up(x), "bpf"), approximate=False))
