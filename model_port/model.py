"""The policy: vision tower, language tower, and their connection.

Unusual features of this model, and the files that implement them:

- Rows are packed: a row has several sequences; a sequence may be a trunk with branches that share it (inputs.py).
- M-RoPE: time, row and column rotate different frequencies of a head; all three are equal for text (rope.py).
- DeepStack in Qwen3-VL: features from three layers of the vision tower are added to the first layers of the language
  tower, at the visual tokens (text.py).
- Qwen3-VL's vision positions are learned on a fixed grid and interpolated to a frame's grid (qwen3_vl/). Patches attend
  within their frame.
- Qwen3-VL's queries and keys are normalized per head before rotation (text.py).
- In MoE models, a router sends each token to a few of a layer's experts (experts.py).
- A patch covers two frames of a video, or one image twice (processing.py). In Qwen3-VL, its time precedes it as text.
- The mergers use the exact GELU. The output merger normalizes before it merges; DeepStack's do so after (vision.py).
- Kernels keep the memory order of the Hugging Face files, so conversion copies bytes (weights.py).
- A tower's layers are stacked parameters and one scan; you can choose the saved activations (layers.py).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model_port.attention import Layout, attention_of
from model_port.config import LoraConfig, ModelConfig
from model_port.experts import tokens_of_experts
from model_port.inputs import TextBatch, VisionBatch
from model_port.layers import DEFAULT_COMPUTE, Compute, Index
from model_port.qwen2_5_vl import vision as qwen2_5_vl
from model_port.qwen3_vl import vision as qwen3_vl
from model_port.sharding import constrain, replicate
from model_port.text import TextTower, Visual
from model_port.vision import Tower

TOWERS: dict[str, Callable[[Any, float, nnx.Rngs], Tower]] = {
    "qwen3_vl": qwen3_vl.Qwen3VisionTower,
    "qwen3_vl_moe": qwen3_vl.Qwen3VisionTower,
    "qwen2_5_vl": qwen2_5_vl.Qwen25VisionTower,
}


class VLModel(nnx.Module):
    """Both towers. Call it for logits, or call `encode_vision`, `hidden` and `text.logits` for the single steps."""

    lora: LoraConfig = LoraConfig()  # the adapters' settings

    def __init__(self, config: ModelConfig, *, compute: Compute = DEFAULT_COMPUTE, rngs: nnx.Rngs):
        self.config = config
        self.compute = compute
        self.vision = TOWERS[config.family](config.vision, config.initializer_range, rngs)
        self.text = TextTower(config.text, config.tie_embeddings, config.initializer_range, rngs)

    def encode_vision(self, batch: VisionBatch) -> Visual:
        """Computes the visual tables of a batch of frames.

        If the tower is frozen, callers may compute them once and stop their gradient.
        """
        features, maps = self.vision(batch, self.compute)
        table = features.reshape(batch.num_parts, -1, self.config.text.width)
        deepstack = maps.reshape(len(maps), *table.shape)
        return Visual(constrain(table, "bpd"), constrain(deepstack, "lbpd"))

    def hidden(self, batch: TextBatch, visual: Visual | None = None) -> Float[Array, "B T D"]:
        """Computes the hidden states of packed rows, the input of the head."""
        return self.hidden_and_experts(batch, visual)[0]

    def hidden_and_experts(
        self, batch: TextBatch, visual: Visual | None
    ) -> tuple[Float[Array, "B T D"], Int[Array, "L X"] | None]:
        """Like `hidden`, but also returns the number of tokens of each layer's experts; None for dense models."""
        order = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
        layout = Layout(jnp.asarray(batch.segment_ids), jnp.asarray(batch.branch_ids), order)
        attention = attention_of(self.compute.attention)

        def attend(q: Array, k: Array, v: Array, index: Index, cache: None) -> tuple[Array, None]:
            return attention(q, k, v, layout, True), None

        hidden, _, chosen = self.text(
            batch.tokens,
            batch.positions,
            batch.visual_index,
            visual,
            attend,
            cache=None,
            compute=self.compute,
            experts=batch.experts,
        )
        if chosen is None:
            return hidden, None
        segment_ids = jnp.asarray(batch.segment_ids)
        return hidden, replicate(tokens_of_experts(chosen, segment_ids, self.config.text.num_experts))

    def __call__(self, batch: TextBatch, frames: VisionBatch | None = None) -> Float[Array, "B T V"]:
        """Computes the logits of all tokens. Training uses `hidden` and only computes logits of action tokens."""
        return self.text.logits(self.hidden(batch, None if frames is None else self.encode_vision(frames)))
