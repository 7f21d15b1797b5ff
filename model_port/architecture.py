"""A model's dimensions, under our names. Fields that only one family has are in the family's folder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from model_port.json_files import Section


@dataclass(frozen=True)
class VisionConfig(ABC):
    """The dimensions that every family's vision tower has. A family adds its own in a subclass."""

    family: ClassVar[str]  # the `model_type` of config.json
    ffn_kernels: ClassVar[int] = 2  # number of kernels in a block's MLP

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    out_width: int
    _: KW_ONLY
    patch_px: int = 16
    merge: int = 2
    temporal_patch_frames: int = 2
    num_channels: int = 3
    rope_theta: float = 10_000.0
    tokens_per_second: int = 0  # temporal positions per second of video; 0 if prompts write frame times as text

    def __post_init__(self) -> None:
        require(
            self.width % self.num_heads == 0, f"vision width {self.width} does not split into {self.num_heads} heads"
        )
        require(self.head_dim % 4 == 0, f"vision head_dim {self.head_dim} must be a multiple of 4 for 2-D rotary")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def merge_unit(self) -> int:
        """The number of patches that become one language token."""
        return self.merge**2

    @property
    def patch_values(self) -> int:
        return self.num_channels * self.temporal_patch_frames * self.patch_px**2

    @property
    def num_deepstack(self) -> int:
        """The number of intermediate feature maps, which are added to the first language layers."""
        return 0

    @abstractmethod
    def patch_arrays(self, grid: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Returns the arrays that only this family's tower reads, for each patch of a frame in our order."""

    def merged_order(self, grid: tuple[int, int]) -> Int[np.ndarray, " M"] | None:
        """Returns our order of a frame's merged patches, as row-major numbers; None for the processor's order."""
        return None

    def attended(self, patches: int) -> float:
        """Returns to how many patches a patch attends in a frame of `patches`, averaged over the layers."""
        return float(patches)

    @abstractmethod
    def with_layers(self, num_layers: int) -> "VisionConfig":
        """Returns the config of a tower with fewer layers, for tracing a single layer."""


@dataclass(frozen=True)
class TextConfig:
    """The dimensions of the language tower, and how it differs between families."""

    num_layers: int
    width: int
    ffn_width: int  # in MoE models, of each expert
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936
    norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    mrope_sections: tuple[int, int, int] = (24, 20, 20)
    max_positions: int = 262_144
    interleaved_mrope: bool = True  # False: time, row and column have one chunk of frequencies each
    qk_norm: bool = True
    qkv_bias: bool = False
    num_experts: int = 0  # per layer; 0: a dense MLP
    token_experts: int = 0  # number of experts per token

    def __post_init__(self) -> None:
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
        )
        require(
            self.token_experts <= self.num_experts,
            f"num_experts_per_tok {self.token_experts} is more than num_experts {self.num_experts}",
        )
        require(
            len(self.mrope_sections) == 3 and sum(self.mrope_sections) == self.head_dim // 2,
            f"mrope_section {list(self.mrope_sections)} must be three numbers that sum to head_dim / 2",
        )


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of both towers, and the ids of the tokens that surround and replace frames."""

    text: TextConfig
    vision: VisionConfig
    tie_embeddings: bool
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        require(
            self.vision.out_width == self.text.width,
            f"vision out_hidden_size {self.vision.out_width} differs from text hidden_size {self.text.width}",
        )
        require(
            self.vision.num_deepstack <= self.text.num_layers,
            f"{self.vision.num_deepstack} DeepStack maps need as many text layers, not {self.text.num_layers}",
        )

    @property
    def family(self) -> str:
        return self.vision.family


TOKEN_IDS: dict[str, Any] = {each.name: each.default for each in fields(ModelConfig) if each.name.endswith("_token_id")}


@dataclass(frozen=True)
class Family:
    """How to read and write the files of a model family; each family's config.py defines one."""

    title: str
    from_hf: Callable[[Section], ModelConfig]  # reads a parsed config.json
    to_hf: Callable[[ModelConfig, str], dict[str, Any]]  # (config, dtype) -> config.json as published
    presets: Mapping[str, ModelConfig]  # published sizes, by the name for `--model`
    text_names: str  # prefix of the published names of the language tower's tensors
    vision_names: str  # prefix for the vision tower
    processor_class: str  # in transformers


TINY_WIDTH = 128  # of the language tower
TINY_VISION = {
    "num_layers": 4,
    "width": 32,  # enough for simple patches; the mergers' size is quadratic in it
    "ffn_width": 64,
    "num_heads": 2,
    "out_width": TINY_WIDTH,
}


@dataclass(frozen=True)
class Tiny:
    """The parts of tiny random models that depend on the family; each family's tiny.py defines one."""

    vision: VisionConfig
    mrope_sections: tuple[int, int, int]
    chat_template: str
    video_processor: str  # the class in transformers
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    pixel_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    absent_tokens: frozenset[str] = frozenset()  # Qwen3-VL's special tokens that this family lacks
    traits: Mapping[str, Any] = field(default_factory=dict)  # fields of the language tower's config


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
