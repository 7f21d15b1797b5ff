"""The whole policy: vision tower, language tower, and the joint between them.

What is unusual about this model, and where it is done:
- Rows are packed: a row holds several sequences, a sequence may be a trunk with branches that share it (inputs.py).
- Interleaved M-RoPE: time, height and width take turns along a head's frequencies; text has all three equal (rope.py).
- DeepStack: features of three depths of the vision tower are added to the first layers of the language tower, at the
  tokens that show something (text.py).
- Vision positions are learned on one grid and interpolated to the grid of a frame; attention stays in the frame
  (vision.py).
- Queries and keys are normalised per head before they are turned (text.py).
- A patch covers two frames of a video, and an image twice; when that was is told as text before it (processing.py).
- The MLP of a vision block has the tanh GELU, the mergers the exact one, and a merger norms before it merges for the
  output, after it for DeepStack (vision.py).
- Kernels keep the memory order of the Hugging Face files, so conversion copies bytes (weights.py).
- All layers of a tower are one stacked parameter each and one scan; what the backward pass saves is chosen (layers.py).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model_port.attention import Layout, attention_of
from model_port.config import LoraConfig, ModelConfig
from model_port.inputs import TextBatch, VisionBatch
from model_port.layers import DEFAULT_COMPUTE, Compute, Index
from model_port.sharding import constrain
from model_port.text import TextTower, Visual
from model_port.vision import VisionTower


class Qwen3VL(nnx.Module):
    """Both towers; call it for logits, or `encode_vision`, `hidden` and `text.logits` for the steps in between."""

    lora: LoraConfig = LoraConfig()  # of the adapters that lora.py has put beside its kernels

    def __init__(self, config: ModelConfig, *, compute: Compute = DEFAULT_COMPUTE, rngs: nnx.Rngs):
        self.config = config
        self.compute = compute
        self.vision = VisionTower(config.vision, config.initializer_range, rngs)
        self.text = TextTower(config.text, config.tie_embeddings, config.initializer_range, rngs)

    def encode_vision(self, batch: VisionBatch) -> Visual:
        """The visual tables of a batch of frames; with a frozen tower, compute them once and stop their gradient."""
        features, maps = self.vision(batch, self.compute)
        tables = (batch.num_parts, -1, self.config.text.width)
        table, deepstack = features.reshape(tables), maps.reshape(len(maps), *tables)
        return Visual(constrain(table, "bpd"), constrain(deepstack, "lbpd"))

    def hidden(self, batch: TextBatch, visual: Visual | None = None) -> Float[Array, "B T D"]:
        """Hidden states of packed rows, ready for the head."""
        layout = row_layout(batch)
        attention = attention_of(self.compute.attention)

        def attend(q: Array, k: Array, v: Array, index: Index, cache: None) -> tuple[Array, None, None]:
            return attention(q, k, v, layout, True), None, None

        hidden, _, _ = self.text(
            batch.tokens, batch.positions, batch.visual_index, visual, attend, cache=None, compute=self.compute
        )
        return hidden

    def __call__(self, batch: TextBatch, frames: VisionBatch | None = None) -> Float[Array, "B T V"]:
        """Logits of every token. Training computes those of action tokens only, through `hidden`."""
        return self.text.logits(self.hidden(batch, None if frames is None else self.encode_vision(frames)))


def row_layout(batch: TextBatch) -> Layout:
    order = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    return Layout(jnp.asarray(batch.segment_ids), jnp.asarray(batch.branch_ids), order)
