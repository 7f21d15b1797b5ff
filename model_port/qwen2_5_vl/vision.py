"""The vision tower of Qwen2.5-VL: encodes patches as features of the language tower's width.

Reference: transformers modeling_qwen2_5_vl.py (Qwen2_5_VisionTransformerPretrainedModel). Most layers attend within a
window of the frame, the others within the whole frame. The host orders a frame's patches by window (`merged_order`),
and the language tower's index into the features restores the original order.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from model_port.attention import Layout, attention_of
from model_port.inputs import VisionBatch
from model_port.layers import LAYER_INPUT, Compute, Index, RMSNorm, run_layers
from model_port.lora import GatedMlp
from model_port.qwen2_5_vl.config import Qwen25VisionConfig
from model_port.rope import rotation, vision_frequencies
from model_port.sharding import constrain
from model_port.vision import Merger, PatchEmbed, VisionBlocks

MAX_WINDOWS = 2**16  # per frame
NORM_EPS = 1e-6


class Qwen25VisionTower(nnx.Module):
    """Encodes patches, ordered by window, as features of the language tower's width."""

    def __init__(self, config: Qwen25VisionConfig, scale: float, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = PatchEmbed(config, scale, rngs, bias=False)
        norm, mlp = partial(RMSNorm, eps=NORM_EPS), partial(GatedMlp, bias=True)
        self.blocks: VisionBlocks | nnx.List = VisionBlocks(config, scale, rngs, norm, mlp)
        self.merger = Merger(config, scale, rngs, norm=RMSNorm((config.width,), NORM_EPS))

    def __call__(self, batch: VisionBatch, compute: Compute) -> tuple[Float[Array, "B M D"], Float[Array, "n B M D"]]:
        x = constrain(self.patch_embed(jnp.asarray(batch.patches, jnp.dtype(compute.dtype))), "bpd")
        turn = rotation(batch.positions, vision_frequencies(self.config))
        unordered, attend = jnp.zeros_like(batch.segment_ids), attention_of(compute.attention)
        frames = jnp.asarray(batch.segment_ids)
        windows = frames * MAX_WINDOWS + batch.extra["window_ids"]  # 0 = padding, as in `frames`
        is_full = np.isin(np.arange(self.config.num_layers), self.config.full_layers)

        def step(block: VisionBlocks, index: Index, x: Array) -> tuple[Array, None]:
            full = is_full[index] if isinstance(index, int) else jnp.asarray(is_full)[index]
            layout = Layout(jnp.where(full, frames, windows), unordered, unordered)
            return constrain(block(checkpoint_name(x, LAYER_INPUT), turn, layout, attend), "bpd"), None

        x, _ = run_layers(self.blocks, step, x, replace(compute, lighter_layers=0))
        merged = self.merger(x)
        return merged, jnp.zeros((0, *merged.shape), merged.dtype)
