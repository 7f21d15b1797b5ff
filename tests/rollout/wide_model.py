"""A tiny model with logits as wide as a trained model's.

Its largest logit is about 17 and its entropy 1.7 nats; the plain tiny model has 2 and 7.6. Attention is also sharper,
so that its inputs matter, and layers add little to the residual stream, as in trained models.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import model_port
from model_port.model import VLModel
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.sampling.weights import ModelWeights

LOGITS, ATTENTION = 15.0, 1.4  # factors of the norms' scales


def make_wide(directory: Path, seed: int = 0, dtype: str = "float32", **shape: int) -> Path:
    """Writes the model; `shape` overrides sizes of the tiny model's language tower."""
    config = tiny_config()
    text = replace(config.text, **shape)
    vision = replace(config.vision, out_width=text.width)
    scale = 0.03 * (128 / text.width) ** 0.5
    config = replace(config, text=text, vision=vision, tie_embeddings=False, initializer_range=scale)
    make_tiny(directory, seed, config, dtype)
    model = model_port.load(directory)
    attention = model.text.layers.attn
    for norm, scale in ((model.text.final_norm, LOGITS), (attention.q_norm, ATTENTION), (attention.k_norm, ATTENTION)):
        norm.scale[...] = scale * norm.scale[...]
    write_weights(model, directory, dtype)
    return directory


def with_layer_of(model: VLModel, other: VLModel) -> VLModel:
    """Returns the model with 3 % of the other model's kernels added to those of one layer."""

    def mixed(kernel: jax.Array, of_other: jax.Array) -> jax.Array:
        return kernel if kernel.ndim == 2 else kernel.at[2].set(kernel[2] + 0.03 * of_other[2])

    mixture = nnx.clone(model)
    nnx.update(mixture.text.layers, jax.tree.map(mixed, nnx.state(model.text.layers), nnx.state(other.text.layers)))
    return mixture


def write_weights(model: VLModel, directory: Path, dtype: str) -> None:
    ModelWeights(model, np.dtype(jnp.dtype(dtype))).write(directory)
