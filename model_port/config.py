"""The architecture of a dense Qwen3-VL, read from a Hugging Face `config.json` or taken from a preset.

Both spellings of the rotary settings are read: `rope_scaling` + `rope_theta` (the published files) and
`rope_parameters` (transformers 5). Settings that this port does not implement raise an error here, by name, before any
weight is read.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes  # noqa: F401 (numpy learns bfloat16 from it)
import numpy as np

from model_port.json_files import MAX_SHOWN, Section, read_object

DTYPES = ("float32", "bfloat16", "float16")  # of parameters
SUPPORTED_MODEL_TYPE = "qwen3_vl"
MAX_LAYERS, MAX_WIDTH, MAX_HEAD_DIM, MAX_THETA = 1024, 2**17, 2**13, 1e15
TOKEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's dimensions, under our names."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    out_width: int
    deepstack_layers: tuple[int, ...]
    num_positions: int = 2304
    patch_px: int = 16
    merge: int = 2
    temporal_patch_frames: int = 2
    num_channels: int = 3
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        _require(
            self.width % self.num_heads == 0, f"vision width {self.width} does not split into {self.num_heads} heads"
        )
        _require(self.head_dim % 4 == 0, f"vision head_dim {self.head_dim} must be a multiple of 4 for 2-D rotary")
        _require(self.side**2 == self.num_positions, f"num_positions {self.num_positions} is not a square")
        in_range = all(0 <= layer < self.num_layers for layer in self.deepstack_layers)
        ascending = list(self.deepstack_layers) == sorted(set(self.deepstack_layers))
        _require(
            bool(self.deepstack_layers) and in_range and ascending,
            f"deepstack_visual_indexes {list(self.deepstack_layers)} must ascend within {self.num_layers} layers",
        )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def side(self) -> int:
        """Positions along one edge of the square learned table."""
        return round(self.num_positions**0.5)

    @property
    def merge_unit(self) -> int:
        """Patches that become one language token."""
        return self.merge**2

    @property
    def patch_values(self) -> int:
        return self.num_channels * self.temporal_patch_frames * self.patch_px**2

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)


@dataclass(frozen=True)
class TextConfig:
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936
    norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    mrope_sections: tuple[int, int, int] = (24, 20, 20)
    max_positions: int = 262_144

    def __post_init__(self) -> None:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
        )
        _require(
            len(self.mrope_sections) == 3 and sum(self.mrope_sections) == self.head_dim // 2,
            f"mrope_section {list(self.mrope_sections)} must be three numbers that sum to head_dim / 2",
        )


@dataclass(frozen=True)
class ModelConfig:
    text: TextConfig
    vision: VisionConfig
    tie_embeddings: bool
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _require(
            self.vision.out_width == self.text.width,
            f"vision out_hidden_size {self.vision.out_width} differs from text hidden_size {self.text.width}",
        )
        _require(
            self.vision.num_deepstack <= self.text.num_layers,
            f"{self.vision.num_deepstack} DeepStack maps need as many text layers, there are {self.text.num_layers}",
        )


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters on the projections of the language layers. With adapters, only they are trained."""

    rank: int = field(default=0, metadata={"help": "rank of every adapter; 0: no adapters, all weights are trained"})
    alpha: float = field(
        default=32.0, metadata={"help": "adapters are scaled by alpha / rank, so one learning rate suits all ranks"}
    )

    def __post_init__(self) -> None:
        _require(self.rank >= 0, f"lora.rank={self.rank} must be 0 or more")
        _require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha} must be a finite number above 0")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def config_from_hf(hf: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """The config of a parsed Hugging Face `config.json`; `source` names it in errors."""
    model_type = hf.get("model_type")
    if model_type != SUPPORTED_MODEL_TYPE:
        architectures = hf.get("architectures") or "no architectures listed"
        listed = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
        raise ValueError(
            f"{source}: model_type {repr(model_type)[:MAX_SHOWN]} ({listed[:MAX_SHOWN]}) is not supported; "
            f"supported is {SUPPORTED_MODEL_TYPE!r}, the dense Qwen3-VL ({', '.join(PRESETS)})"
        )
    root = Section(source, hf)
    try:
        return _parse(root, root.section("text_config"), root.section("vision_config"))
    except ValueError as problem:  # of values that are possible alone, and not together
        raise ValueError(str(problem) if str(problem).startswith(source) else f"{source}: {problem}") from None


def _parse(root: Section, text: Section, vision: Section) -> ModelConfig:
    """Every size has a bound far above published models, so that nothing is built from a number that is a mistake."""
    text.expect("hidden_act", "silu")
    text.expect("attention_bias", False)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    rope = text.section("rope_parameters", {})
    if not rope.values:
        rope = text.section("rope_scaling", {})
        rope = replace(rope, values={"rope_theta": text.values.get("rope_theta"), **rope.values}, prefix="text_config.")
    rope.expect("rope_type", "default")
    if not rope.has("rope_type"):
        rope.expect("type", "default")
    rope.expect("mrope_interleaved", True)
    vision_rope = vision.section("rope_parameters", {})
    vision_rope.expect("rope_type", "axial")
    num_heads, vocab_size = text.count("num_attention_heads", 1024), text.count("vocab_size", 2**22)
    width = text.count("hidden_size", MAX_WIDTH)
    token = {key: root.count(key, vocab_size - 1, usual, least=0) for key, usual in TOKEN_IDS.items()}
    sections = rope.counts("mrope_section", MAX_HEAD_DIM, (24, 20, 20))
    if len(sections) != 3:
        raise rope.wrong("mrope_section", "three numbers that sum to head_dim / 2")
    return ModelConfig(
        text=TextConfig(
            num_layers=text.count("num_hidden_layers", MAX_LAYERS),
            width=width,
            ffn_width=text.count("intermediate_size", 2**20),
            num_heads=num_heads,
            num_kv_heads=text.count("num_key_value_heads", 1024, num_heads),
            head_dim=text.count("head_dim", MAX_HEAD_DIM, width // num_heads),
            vocab_size=vocab_size,
            norm_eps=text.number("rms_norm_eps", 0, 1, 1e-6),
            rope_theta=rope.number("rope_theta", 1, MAX_THETA),
            mrope_sections=cast(tuple[int, int, int], sections),
            max_positions=text.count("max_position_embeddings", 2**30, 128_000),
        ),
        vision=VisionConfig(
            num_layers=vision.count("depth", MAX_LAYERS),
            width=vision.count("hidden_size", MAX_WIDTH),
            ffn_width=vision.count("intermediate_size", 2**20),
            num_heads=vision.count("num_heads", 1024),
            out_width=vision.count("out_hidden_size", MAX_WIDTH),
            deepstack_layers=vision.counts("deepstack_visual_indexes", MAX_LAYERS),
            num_positions=vision.count("num_position_embeddings", 2**20, 2304),
            patch_px=vision.count("patch_size", 256, 16),
            merge=vision.count("spatial_merge_size", 16, 2),
            temporal_patch_frames=vision.count("temporal_patch_size", 16, 2),
            num_channels=vision.count("in_channels", 16, 3),
            rope_theta=vision_rope.number("rope_theta", 1, MAX_THETA, 10_000.0),
        ),
        tie_embeddings=root.flag("tie_word_embeddings", False),
        initializer_range=text.number("initializer_range", 0, 100, 0.02),
        **token,
    )


def config_to_hf(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """A `config.json` in the spelling of the published checkpoints, which transformers 4.57 and later read."""
    text, vision = config.text, config.vision
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": SUPPORTED_MODEL_TYPE,
        "dtype": dtype,
        "image_token_id": config.image_token_id,
        "video_token_id": config.video_token_id,
        "vision_start_token_id": config.vision_start_token_id,
        "vision_end_token_id": config.vision_end_token_id,
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": dtype,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": text.width,
            "intermediate_size": text.ffn_width,
            "initializer_range": config.initializer_range,
            "max_position_embeddings": text.max_positions,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads,
            "head_dim": text.head_dim,
            "rms_norm_eps": text.norm_eps,
            "rope_theta": text.rope_theta,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": list(text.mrope_sections),
            },
            "use_cache": True,
            "vocab_size": text.vocab_size,
        },
        "vision_config": {
            "model_type": SUPPORTED_MODEL_TYPE,
            "depth": vision.num_layers,
            "hidden_size": vision.width,
            "intermediate_size": vision.ffn_width,
            "num_heads": vision.num_heads,
            "out_hidden_size": vision.out_width,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
            "num_position_embeddings": vision.num_positions,
            "patch_size": vision.patch_px,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.temporal_patch_frames,
            "in_channels": vision.num_channels,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": config.initializer_range,
        },
    }


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory, or an error about the directory."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json, so it is not a Hugging Face model directory")
    return read_object(path)


def read_config(directory: str | Path) -> ModelConfig:
    """The config of a Hugging Face directory."""
    return config_from_hf(read_hf_config(directory), source=f"{directory}/config.json")


def parse_dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(name)


def preset(name: str) -> ModelConfig:
    """The published dimensions of a size, by the name that `--model` takes."""
    if name.lower() not in PRESETS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name.lower()]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _vision_small(out_width: int) -> VisionConfig:
    return VisionConfig(24, 1024, 4096, 16, out_width, deepstack_layers=(5, 11, 17))


def _vision_large(out_width: int) -> VisionConfig:
    return VisionConfig(27, 1152, 4304, 16, out_width, deepstack_layers=(8, 16, 24))


# Dimensions of Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct on the Hugging Face hub.
PRESETS = {
    "2b": ModelConfig(TextConfig(28, 2048, 6144, 16, 8), _vision_small(2048), tie_embeddings=True),
    "4b": ModelConfig(TextConfig(36, 2560, 9728, 32, 8), _vision_small(2560), tie_embeddings=True),
    "8b": ModelConfig(TextConfig(36, 4096, 12288, 32, 8), _vision_large(4096), tie_embeddings=False),
    "32b": ModelConfig(TextConfig(64, 5120, 25600, 64, 8), _vision_large(5120), tie_embeddings=False),
}


NO_ADAPTERS = LoraConfig()
