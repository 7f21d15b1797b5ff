"""The dense Qwen3-VL: its config.json, its published sizes, and the interpolation of its learned positions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

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
from model_port.patches import patch_positions

MODEL_TYPE = "qwen3_vl"


@dataclass(frozen=True)
class Qwen3VisionConfig(VisionConfig):
    family: ClassVar[str] = MODEL_TYPE

    deepstack_layers: tuple[int, ...]
    num_positions: int = 2304

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.side**2 == self.num_positions, f"num_positions {self.num_positions} is not a square")
        in_range = all(0 <= layer < self.num_layers for layer in self.deepstack_layers)
        ascending = list(self.deepstack_layers) == sorted(set(self.deepstack_layers))
        require(
            bool(self.deepstack_layers) and in_range and ascending,
            f"deepstack_visual_indexes {list(self.deepstack_layers)} must ascend within {self.num_layers} layers",
        )

    @property
    def side(self) -> int:
        """The number of positions along one edge of the square learned table."""
        return round(self.num_positions**0.5)

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)

    def patch_arrays(self, grid: tuple[int, int]) -> Mapping[str, np.ndarray]:
        index, weight = interpolation(grid, self)
        return {"interp_index": index, "interp_weight": weight}

    def with_layers(self, num_layers: int) -> "Qwen3VisionConfig":
        return replace(self, num_layers=num_layers, deepstack_layers=tuple(range(self.num_deepstack)))


@lru_cache(maxsize=256)
def interpolation(
    grid: tuple[int, int], config: Qwen3VisionConfig
) -> tuple[Int[np.ndarray, "P 4"], Float[np.ndarray, "P 4"]]:
    """Returns the corners and weights that interpolate the learned side x side table over the grid (align_corners)."""
    cells = patch_positions(grid, config.merge)
    spans = np.maximum(np.asarray(grid) - 1, 1)
    source = cells.astype(np.float32) * np.float32(config.side - 1) / spans.astype(np.float32)
    low = np.floor(source).astype(np.int32)
    high = np.minimum(low + 1, config.side - 1)
    toward_high = source - low
    index, weight = [], []
    for r, wr in ((low[:, 0], 1 - toward_high[:, 0]), (high[:, 0], toward_high[:, 0])):
        for c, wc in ((low[:, 1], 1 - toward_high[:, 1]), (high[:, 1], toward_high[:, 1])):
            index.append(r * config.side + c)
            weight.append(wr * wc)
    return np.stack(index, axis=1), np.stack(weight, axis=1).astype(np.float32)


def from_hf(root: Section) -> ModelConfig:
    text, vision = root.section("text_config"), root.section("vision_config")
    text.expect("attention_bias", False)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    language = text_config(text, rope_section(text, interleaved=True), sections=(24, 20, 20))
    return ModelConfig(
        text=language,
        vision=Qwen3VisionConfig(
            **vision_sizes(vision, patch_px=16),
            num_channels=vision.count("in_channels", 16, 3),
            deepstack_layers=vision.counts("deepstack_visual_indexes", MAX_LAYERS),
            num_positions=vision.count("num_position_embeddings", 2**20, 2304),
        ),
        tie_embeddings=root.flag("tie_word_embeddings", False),
        initializer_range=text.number("initializer_range", 0, 100, 0.02),
        **token_ids(root, language.vocab_size),
    )


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    text, vision = config.text, config.vision
    assert isinstance(vision, Qwen3VisionConfig)
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        **token_ids_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": dtype,
            "attention_bias": False,
            "tie_word_embeddings": config.tie_embeddings,  # transformers 4 reads it here
            **text_sizes_to_hf(config),
            "head_dim": text.head_dim,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": list(text.mrope_sections),
            },
        },
        "vision_config": {
            **vision_sizes_to_hf(config),
            "deepstack_visual_indexes": list(vision.deepstack_layers),
            "num_position_embeddings": vision.num_positions,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _vision_small(out_width: int) -> Qwen3VisionConfig:
    return Qwen3VisionConfig(24, 1024, 4096, 16, out_width, deepstack_layers=(5, 11, 17))


def _vision_large(out_width: int) -> Qwen3VisionConfig:
    return Qwen3VisionConfig(27, 1152, 4304, 16, out_width, deepstack_layers=(8, 16, 24))


# Dimensions of Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct on the Hugging Face hub.
PRESETS = {
    "2b": ModelConfig(TextConfig(28, 2048, 6144, 16, 8), _vision_small(2048), tie_embeddings=True),
    "4b": ModelConfig(TextConfig(36, 2560, 9728, 32, 8), _vision_small(2560), tie_embeddings=True),
    "8b": ModelConfig(TextConfig(36, 4096, 12288, 32, 8), _vision_large(4096), tie_embeddings=False),
    "32b": ModelConfig(TextConfig(64, 5120, 25600, 64, 8), _vision_large(5120), tie_embeddings=False),
}


FAMILY = Family(
    title="Qwen3-VL",
    from_hf=from_hf,
    to_hf=to_hf,
    presets=PRESETS,
    text_names="model.language_model.",
    vision_names="model.visual.",
    processor_class="Qwen3VLProcessor",
)
