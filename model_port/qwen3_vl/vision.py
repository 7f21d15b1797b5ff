"""The vision tower of Qwen3-VL: encodes patches as features, and intermediate layers as DeepStack maps.

Reference: transformers modeling_qwen3_vl.py (Qwen3VLVisionModel). Patches attend within their frame. The blocks' MLPs
use the tanh GELU, but the mergers use the exact GELU. The output merger normalizes before it merges patches;
DeepStack's mergers normalize after.
"""

from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from model_port.attention import Layout, attention_of
from model_port.inputs import VisionBatch
from model_port.layers import (
    LAYER_INPUT,
    Compute,
    Index,
    LayerNorm,
    at_least_float32,
    normal,
    only_if,
    run_layers,
)
from model_port.lora import Projection
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.rope import rotation, vision_frequencies
from model_port.sharding import constrain
from model_port.vision import Merger, PatchEmbed, VisionBlocks


class PositionTable(nnx.Module):
    def __init__(self, config: Qwen3VisionConfig, scale: float, rngs: nnx.Rngs):
        self.table_sd = normal(rngs, (config.num_positions, config.width), scale)

    def __call__(self, index: Int[Array, "B P 4"], weight: Float[Array, "B P 4"]) -> Float[Array, "B P D"]:
        table = constrain(at_least_float32(self.table_sd[...]), "sd")  # replicated, because patches gather full rows
        weight = weight.astype(table.dtype)
        corners = (table[index[..., corner]] * weight[..., corner, None] for corner in range(4))
        return reduce(jnp.add, corners)


class Qwen3VisionMlp(nnx.Module):
    def __init__(self, config: Qwen3VisionConfig, scale: float, rngs: nnx.Rngs):
        layers, width, ffn = config.num_layers, config.width, config.ffn_width
        self.up = Projection("fd", (layers, ffn, width), scale, rngs, bias=True)
        self.down = Projection("df", (layers, width, ffn), scale, rngs, bias=True)

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        return self.down(jax.nn.gelu(constrain(self.up(x), "bpf"), approximate=True))


class Qwen3VisionTower(nnx.Module):
    """Encodes patches as features of the language tower's width, and as DeepStack maps."""

    def __init__(self, config: Qwen3VisionConfig, scale: float, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = PatchEmbed(config, scale, rngs)
        self.pos_embed = PositionTable(config, scale, rngs)
        self.blocks: VisionBlocks | nnx.List = VisionBlocks(config, scale, rngs, LayerNorm, Qwen3VisionMlp)
        self.merger = Merger(config, scale, rngs)
        self.deepstack_mergers = Merger(config, scale, rngs, count=config.num_deepstack)

    def __call__(self, batch: VisionBatch, compute: Compute) -> tuple[Float[Array, "B M D"], Float[Array, "n B M D"]]:
        dtype = jnp.dtype(compute.dtype)
        x = self.patch_embed(jnp.asarray(batch.patches, dtype))
        x = constrain(
            x + self.pos_embed(batch.extra["interp_index"], batch.extra["interp_weight"]).astype(dtype), "bpd"
        )
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
        (x, taps), _ = run_layers(self.blocks, step, (x, taps), replace(compute, lighter_layers=0))

        graphdef, params = nnx.split(self.deepstack_mergers)
        maps = [
            nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params))(taps[i])
            for i in range(self.config.num_deepstack)
        ]
        return self.merger(x), jnp.stack(maps)
