"""Qwen3-VL in Flax NNX: Hugging Face weights in and out, processing, sampling. Knows nothing of reinforcement learning.

Axis letters, used in annotations, einsum strings and parameter names alike:
B packed rows · T query tokens · S key tokens · D width · N query heads · K key/value heads · H head dim · F ffn ·
V vocab · P vision patches · R query heads per kv head (N = K·R) · L layers
"""

from model_port.config import ModelConfig, preset
from model_port.layers import Compute
from model_port.loading import load, logits
from model_port.model import Qwen3VL

__all__ = ["load", "logits", "Qwen3VL", "ModelConfig", "Compute", "preset"]
