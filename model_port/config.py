"""Reads a Hugging Face `config.json`. Its `model_type` selects the model family; each family has a folder.

Settings that this port does not implement raise an error with their name before any weight is read.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers bfloat16 with numpy)
import numpy as np

from model_port.architecture import Family, ModelConfig, TextConfig, VisionConfig, require
from model_port.json_files import MAX_SHOWN, Section, read_object
from model_port.layout import check_has_config
from model_port.qwen2_5_vl import config as qwen2_5_vl
from model_port.qwen3_vl import config as qwen3_vl
from model_port.qwen3_vl_moe import config as qwen3_vl_moe

__all__ = ["ModelConfig", "TextConfig", "VisionConfig"]

DTYPES = ("float32", "bfloat16", "float16")  # supported dtypes of parameters
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # older files of compressed-tensors use the second
FAMILIES: dict[str, Family] = {  # by model_type
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
}
PRESETS = {name: config for family in FAMILIES.values() for name, config in family.presets.items()}


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters on the projections of the language layers, but not on experts. No other weights are trained."""

    rank: int = field(default=0, metadata={"help": "rank of every adapter; 0: no adapters, all weights are trained"})
    alpha: float = field(
        default=32.0, metadata={"help": "adapters are scaled by alpha / rank, so one learning rate suits all ranks"}
    )

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"lora.rank={self.rank} must be 0 or more")
        require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha} must be a finite number above 0")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


NO_ADAPTERS = LoraConfig()


def config_from_hf(hf: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Converts a parsed Hugging Face `config.json`; `source` names the file in errors."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        architectures = hf.get("architectures") or "no architectures listed"
        listed = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
        *supported, last = (f"{name!r} ({family.title})" for name, family in FAMILIES.items())
        raise ValueError(
            f"{source}: model_type {repr(model_type)[:MAX_SHOWN]} ({listed[:MAX_SHOWN]}) is not supported; "
            f"supported are {', '.join(supported)} and {last}"
        )
    root = Section(source, hf)
    for part in (root, root.section("text_config", {}), root.section("vision_config", {})):
        for key in filter(part.has, QUANTIZATION_KEYS):
            raise ValueError(
                f"{source}: {part.prefix}{key}: quantized weights are not supported; use the original model"
            )
    try:
        return FAMILIES[model_type].from_hf(root)
    except ValueError as problem:  # for example for values that conflict with each other
        raise ValueError(str(problem) if str(problem).startswith(source) else f"{source}: {problem}") from None


def config_to_hf(config: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Converts to a `config.json` in the published checkpoints' format, which transformers 4.57 and later read."""
    return FAMILIES[config.family].to_hf(config, dtype)


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Reads and parses the `config.json` of a Hugging Face directory. Raises if it is not such a directory."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    check_has_config(directory)
    return read_object(directory / "config.json")


def read_config(directory: str | Path) -> ModelConfig:
    """Reads the `config.json` of a Hugging Face directory. Raises ValueError if this port cannot compute the model."""
    return config_from_hf(read_hf_config(directory), source=f"{directory}/config.json")


def parse_dtype(name: str) -> np.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return np.dtype(name)


def preset(name: str) -> ModelConfig:
    """Returns the dimensions of a published size, by its name for `--model`."""
    if name.lower() not in PRESETS:
        raise ValueError(f"unknown model {name!r}; use one of {', '.join(PRESETS)}")
    return PRESETS[name.lower()]
