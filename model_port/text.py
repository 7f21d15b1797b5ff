"""The language tower of all families: grouped-query attention, M-RoPE, gated MLP or experts, DeepStack.

In long rows, the tokens of the residual stream are sharded over tensor; projections all-gather and reduce-scatter it.

Reference: transformers modeling_qwen3_vl.py (Qwen3VLTextModel). KV caching is the caller's responsibility: `attend`
gets a layer's queries, keys and values, and may read and write a cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from model_port.architecture import TextConfig
from model_port.experts import Experts
from model_port.inputs import NOT_VISUAL
from model_port.layers import LAYER_INPUT, Compute, Index, RMSNorm, cast, normal, only_if, run_layers
from model_port.lora import GatedMlp, Joined, Projection, project_all
from model_port.rope import Rotation, rotate, rotation, text_frequencies
from model_port.sharding import constrain

# The residual stream of longer rows is sharded over tensor, which divides its memory by the size of the tensor axis and
# adds a tenth of communication.
LONG_ROW_TOKENS = 32_768

# (q, k, v, layer index, cache) -> (mixed values, cache)
Attend = Callable[[Array, Array, Array, Index, Any], tuple[Array, Any]]


class Visual(NamedTuple):
    """The vision tower's output for the language tower, with one table row per merged patch.

    The rows of tokens are split into as many parts as there are tables, and each part indexes its own table.
    """

    table: Float[Array, "parts M D"]
    deepstack: Float[Array, "n parts M D"]


class VocabTable(nnx.Module):
    """A table with one row per token of the vocabulary: the embedding or the head."""

    def __init__(self, config: TextConfig, scale: float, rngs: nnx.Rngs):
        self.table_vd = normal(rngs, (config.vocab_size, config.width), scale)


class TextAttention(nnx.Module):
    def __init__(self, config: TextConfig, scale: float, rngs: nnx.Rngs):
        layers, width, head_dim = config.num_layers, config.width, config.head_dim
        q_shape, kv_shape = (config.num_heads, head_dim, width), (config.num_kv_heads, head_dim, width)
        self.q = Projection("nhd", (layers, *q_shape), scale, rngs, bias=config.qkv_bias)
        self.k = Projection("khd", (layers, *kv_shape), scale, rngs, bias=config.qkv_bias)
        self.v = Projection("khd", (layers, *kv_shape), scale, rngs, bias=config.qkv_bias)
        self.o = Projection("dnh", (layers, width, config.num_heads, head_dim), scale, rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm((layers, head_dim), config.norm_eps)
            self.k_norm = RMSNorm((layers, head_dim), config.norm_eps)

    def project(self, x: Float[Array, "B T D"], turn: Rotation) -> tuple[Array, Array, Array]:
        x = constrain(x, "btd")
        q, k, v = project_all(x, self.q, self.k, self.v)
        q, k, v = constrain(q, "btnh"), constrain(k, "btkh"), constrain(v, "btkh")
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, turn), rotate(k, turn), v

    def output(self, mixed: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return shard_residual(project_all(mixed, self.o)[0])


class TextLayers(nnx.Module):
    """All layers, stacked along a leading layer axis."""

    def __init__(self, config: TextConfig, scale: float, rngs: nnx.Rngs):
        self.input_norm = RMSNorm((config.num_layers, config.width), config.norm_eps)
        self.attn = TextAttention(config, scale, rngs)
        self.mlp_norm = RMSNorm((config.num_layers, config.width), config.norm_eps)
        self.mlp = (Experts if config.num_experts else GatedMlp)(config, scale, rngs)

    def join(self, tensor: int) -> None:
        """Joins the adapted projections of a single layer, in place, for sampling on a mesh of this `tensor`."""
        for group in self._by_input():
            Joined(group, tensor)

    def load_adapters(self, stacked: "TextLayers", index: int) -> None:
        """Takes the adapters of a joined layer from a stack. Earlier arrays of the joined kernels become invalid."""
        for group, adapted in zip(self._by_input(), stacked._by_input(), strict=True):
            joined = group[0].joined
            assert joined is not None
            joined.load(adapted, index)

    def _by_input(self) -> list[list[Projection]]:
        attn, mlp = self.attn, self.mlp
        groups = [[attn.q, attn.k, attn.v], [attn.o]]
        return groups if isinstance(mlp, Experts) else [*groups, [mlp.gate, mlp.up], [mlp.down]]


class TextTower(nnx.Module):
    """The embedding, the stacked language layers, and the head."""

    def __init__(self, config: TextConfig, tie_embeddings: bool, scale: float, rngs: nnx.Rngs):
        self.config = config
        self.embed = VocabTable(config, scale, rngs)
        self.layers: TextLayers | nnx.List = TextLayers(config, scale, rngs)  # or after `split`
        self.final_norm = RMSNorm((config.width,), config.norm_eps)
        if not tie_embeddings:
            self.head = VocabTable(config, scale, rngs)

    @property
    def head_kernel_vd(self) -> nnx.Param:
        return (self.head if hasattr(self, "head") else self.embed).table_vd

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T 3"],
        visual_index: Int[Array, "B T"],
        visual: Visual | None,
        attend: Attend,
        cache: Any,
        compute: Compute,
        experts: Int[Array, "B T L J"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Int[Array, "L B T J"] | None]:
        """Returns the hidden states after the final norm, the cache, and each token's experts (None for dense models).

        `experts` has the experts to replay.
        """
        replayed = None if experts is None else jnp.moveaxis(jnp.asarray(experts, jnp.int32), 2, 0)
        x = embed_tokens(self.embed.table_vd[...], tokens, compute)
        if visual is not None:
            x = jnp.where((visual_index != NOT_VISUAL)[..., None], gather_rows(visual.table, visual_index, x), x)
        turn = rotation(positions, text_frequencies(self.config))

        def step(layer: TextLayers, index: Index, carry: tuple[Array, Any]) -> tuple[tuple[Array, Any], Any]:
            x, cache = carry
            x = checkpoint_name(x, LAYER_INPUT)
            mixed, cache = attend(*layer.attn.project(layer.input_norm(x), turn), index, cache)
            x = x + layer.attn.output(mixed)
            normed, chosen = layer.mlp_norm(x), None
            if isinstance(layer.mlp, Experts):
                out, chosen = layer.mlp(normed, None if replayed is None else replayed[index])
            else:
                out = layer.mlp(normed)
            x = x + shard_residual(out)
            if visual is not None and len(visual.deepstack):
                add = partial(add_deepstack, index=index, visual=visual, visual_index=visual_index)
                x = only_if(index < len(visual.deepstack), add, x)
            return (shard_residual(x), cache), chosen

        (x, cache), chosen = run_layers(self.layers, step, (x, cache), compute)
        return self.final_norm(x), cache, chosen

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes the logits in at least float32."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        kernel = cast(self.head_kernel_vd, hidden)
        return constrain(jnp.einsum("BTD,VD->BTV", hidden, kernel, preferred_element_type=wide), "btv")


def embed_tokens(table: Float[Array, "V D"], tokens: Int[Array, "B T"], compute: Compute) -> Float[Array, "B T D"]:
    """Looks up the tokens' rows of the table. Each device gathers its part of the width, then devices exchange results.

    No device therefore holds the complete table or its gradient. The gradient is summed in the table's dtype.
    """
    rows = constrain(table[constrain(tokens, "et")].astype(compute.dtype), "etw")
    return shard_residual(rows)


def shard_residual(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return constrain(x, "bod" if x.shape[1] > LONG_ROW_TOKENS else "btd")


def gather_rows(
    tables: Float[Array, "parts M D"], visual_index: Int[Array, "B T"], like: Array
) -> Float[Array, "B T D"]:
    """Looks up each token's row in the table of its part; an arbitrary row for tokens that are not visual."""
    index = jnp.maximum(visual_index, 0).reshape(len(tables), -1, visual_index.shape[1])
    rows = jax.vmap(lambda table, index: table[index])(tables.astype(like.dtype), index)
    return rows.reshape(*visual_index.shape, -1)


def add_deepstack(
    x: Float[Array, "B T D"], index: Index, visual: Visual, visual_index: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Adds a layer's DeepStack feature map at the visual tokens."""
    features = gather_rows(visual.deepstack[index], visual_index, x)
    return x + jnp.where((visual_index != NOT_VISUAL)[..., None], features, 0)
