"""Rotary positions. Every frequency rotates with one axis of the position: time, row or column.

Text (M-RoPE): each axis has a chunk of the frequencies, or the axes interleave as t h w t h w …, starting at the
fastest frequency, until the row and column sections are used up; the remaining frequencies rotate with time. Vision:
the first half of the frequencies rotates with rows, the second half with columns.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from model_port.architecture import TextConfig, VisionConfig
from model_port.layers import at_least_float32

Rotation = tuple[Float[Array, "B T F"], Float[Array, "B T F"]]  # cos and sin for every frequency


def text_frequencies(config: TextConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the radians per position and the position axis of each of the head_dim / 2 frequencies."""
    count = config.head_dim // 2
    axis = np.repeat(np.arange(3, dtype=np.int32), config.mrope_sections)
    if config.interleaved_mrope:
        axis = np.zeros(count, np.int32)
        for which in (1, 2):
            axis[which : 3 * config.mrope_sections[which] : 3] = which
    return _radians(config.rope_theta, count), axis


def vision_frequencies(config: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    count = config.head_dim // 4
    return np.tile(_radians(config.rope_theta, count), 2), np.repeat(np.arange(2, dtype=np.int32), count)


def _radians(theta: float, count: int) -> Float32[np.ndarray, " count"]:
    """Rounds to float32 as often as transformers and SGLang, because one bit turns distant tokens by 0.02 radians."""
    exponents = np.arange(count, dtype=np.float32) / np.float32(count)
    return 1 / (theta ** exponents.astype(np.float64)).astype(np.float32)


def rotation(positions: Int[Array, "B T A"], frequencies: tuple[np.ndarray, np.ndarray]) -> Rotation:
    """Computes cos and sin of the angles, always in float32, because bf16 cannot represent all positions above 256."""
    radians, axis = frequencies
    angles = positions[..., axis].astype(jnp.float32) * radians[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T N H"], turn: Rotation) -> Float[Array, "B T N H"]:
    """Rotates the pair (x[i], x[i + H/2]) by the angle of frequency i."""
    cos, sin = (part[:, :, None, :] for part in turn)
    first, second = jnp.split(at_least_float32(x), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
