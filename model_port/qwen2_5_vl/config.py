"""Qwen2.5-VL: its config.json, its published sizes, and the windows of its vision tower.

It reads three formats of config.json: with the language tower's keys at the root (the published files), in
`text_config`, and with `rope_parameters` (transformers 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from model_port.architecture import Family, ModelConfig, TextConfig, VisionConfig, require
from model_port.config_json import (
    MAX_LAYERS,
    rope_section,
    text_config,
    text_sizes_to_hf,
    token_ids,
    token_ids_to_hf,
    vision_sizes,
    vision_sizes_to_hf,
)
from model_port.json_files import Section

MODEL_TYPE = "qwen2_5_vl"
TRAITS = {"interleaved_mrope": False, "qk_norm": False, "qkv_bias": True}


@dataclass(frozen=True)
class Qwen25VisionConfig(VisionConfig):
    family: ClassVar[str] = MODEL_TYPE
    ffn_kernels: ClassVar[int] = 3

    full_layers: tuple[int, ...]  # layers that attend to the whole frame; the others attend to a window
    window_px: int = 112
    patch_px: int = field(default=14, kw_only=True)
    tokens_per_second: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range = all(0 <= layer < self.num_layers for layer in self.full_layers)
        require(in_range, f"fullatt_block_indexes {list(self.full_layers)} must be within {self.num_layers} layers")
        token_px = self.patch_px * self.merge
        require(self.window_px >= token_px, f"window_size {self.window_px} is smaller than a token's {token_px} px")

    @property
    def window_merged(self) -> int:
        """The number of merged patches along one side of a window."""
        return self.window_px // self.merge // self.patch_px

    def patch_arrays(self, grid: tuple[int, int]) -> Mapping[str, np.ndarray]:
        return {"window_ids": windows(self._merged(grid), self.window_merged)[1].repeat(self.merge_unit)}

    def merged_order(self, grid: tuple[int, int]) -> Int[np.ndarray, " M"] | None:
        """Orders the patches window by window, so that each window is contiguous."""
        return windows(self._merged(grid), self.window_merged)[0]

    def attended(self, patches: int) -> float:
        in_window = min(patches, self.merge_unit * self.window_merged**2)
        return in_window + (patches - in_window) * len(self.full_layers) / self.num_layers

    def with_layers(self, num_layers: int) -> "Qwen25VisionConfig":
        return replace(self, num_layers=num_layers, full_layers=(0,))

    def _merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        return grid[0] // self.merge, grid[1] // self.merge


@lru_cache(maxsize=256)
def windows(grid: tuple[int, int], side: int) -> tuple[Int[np.ndarray, " M"], Int[np.ndarray, " M"]]:
    """Returns the numbers of the merged patches, ordered by window, and the window of each in this order.

    Patches are numbered row by row. Windows at the lower and right edges may be smaller.
    """
    rows, columns = (np.arange(size, dtype=np.int32) // side for size in grid)
    window_ids = (rows[:, None] * (columns[-1] + 1) + columns).reshape(-1)
    order = np.argsort(window_ids, kind="stable").astype(np.int32)
    return order, window_ids[order]


def from_hf(root: Section) -> ModelConfig:
    text, vision = root.section("text_config", {}), root.section("vision_config")
    if not text.values:
        text = root
    vision.expect("hidden_act", "silu")
    rope = rope_section(text, interleaved=False, other_name="mrope")  # before transformers 4.50
    language = text_config(
        text, rope, sections=(16, 24, 24), norm_eps=1e-5, rope_theta=1e6, max_positions=32_768, **TRAITS
    )
    require(
        language.head_dim * language.num_heads == language.width,
        f"head_dim {language.head_dim} must be hidden_size {language.width} / {language.num_heads} heads",
    )
    return ModelConfig(
        text=language,
        vision=Qwen25VisionConfig(
            **vision_sizes(vision, patch_px=14),
            num_channels=vision.count("in_channels", 16, vision.count("in_chans", 16, 3)),
            full_layers=vision.counts("fullatt_block_indexes", MAX_LAYERS, (7, 15, 23, 31)),
            window_px=vision.count("window_size", 2**16, 112),
            tokens_per_second=vision.count("tokens_per_second", 1000, 4),
        ),
        tie_embeddings=root.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False),
        initializer_range=text.number("initializer_range", 0, 100, 0.02),
        **token_ids(root, language.vocab_size),
    )


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    text, vision = config.text, config.vision
    assert isinstance(vision, Qwen25VisionConfig)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "torch_dtype": dtype,
        **token_ids_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        **text_sizes_to_hf(config),
        "rope_scaling": {"type": "mrope", "mrope_section": list(text.mrope_sections)},
        "use_sliding_window": False,
        "vision_config": {
            **vision_sizes_to_hf(config),
            "fullatt_block_indexes": list(vision.full_layers),
            "window_size": vision.window_px,
            "spatial_patch_size": vision.patch_px,
            "tokens_per_second": vision.tokens_per_second,
            "in_chans": vision.num_channels,
            "hidden_act": "silu",
        },
    }


def _published(
    layers: int, width: int, ffn: int, heads: int, kv_heads: int, vision_ffn: int, vocab_size: int = 152_064
) -> ModelConfig:
    return ModelConfig(
        TextConfig(
            *(layers, width, ffn, heads, kv_heads),
            vocab_size=vocab_size,
            rope_theta=1e6,
            mrope_sections=(16, 24, 24),
            max_positions=128_000,
            **TRAITS,
        ),
        Qwen25VisionConfig(32, 1280, vision_ffn, 16, width, full_layers=(7, 15, 23, 31)),
        tie_embeddings=layers == 36,
    )


# Dimensions of Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct on the Hugging Face hub.
PRESETS = {
    "qwen2.5-vl-3b": _published(36, 2048, 11_008, 16, 2, 3420, vocab_size=151_936),
    "qwen2.5-vl-7b": _published(28, 3584, 18_944, 28, 4, 3420),
    "qwen2.5-vl-32b": _published(64, 5120, 27_648, 40, 8, 3456),
    "qwen2.5-vl-72b": _published(80, 8192, 29_568, 64, 8, 3456),
}

FAMILY = Family(
    title="Qwen2.5-VL",
    from_hf=from_hf,
    to_hf=to_hf,
    presets=PRESETS,
    text_names="model.",
    vision_names="visual.",
    processor_class="Qwen2_5_VLProcessor",
)
