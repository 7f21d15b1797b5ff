"""transformers as the reference: tiny random models, inputs of every kind, and their forward and gradients."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import torch
from safetensors.numpy import load_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from model_port.checkpoint import nested
from model_port.config import ModelConfig, TextConfig, VisionConfig, config_to_hf
from model_port.weights import rules

IMAGE, VIDEO, START, END = 120, 121, 122, 123
SPECIAL = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)

# Odd layers and heads, DeepStack at unusual places, tied and untied, grouped heads 1:1, 2:1 and 7:1.
CONFIGS = {
    "tied": ModelConfig(
        TextConfig(5, 48, 56, 6, 3, head_dim=16, vocab_size=131, mrope_sections=(4, 2, 2), rope_theta=1e4),
        VisionConfig(3, 36, 44, 3, 48, (0, 2), num_positions=49, patch_px=4),
        tie_embeddings=True,
        **SPECIAL,
    ),
    "untied": ModelConfig(
        TextConfig(3, 40, 72, 7, 1, head_dim=24, vocab_size=127, mrope_sections=(5, 4, 3)),
        VisionConfig(5, 40, 36, 5, 40, (1, 3, 4), num_positions=25, patch_px=4),
        tie_embeddings=False,
        **SPECIAL,
    ),
    "one_map": ModelConfig(
        TextConfig(1, 24, 40, 2, 2, head_dim=12, vocab_size=124, mrope_sections=(2, 2, 2), norm_eps=1e-5),
        VisionConfig(2, 24, 20, 1, 24, (1,), num_positions=36, patch_px=2, temporal_patch_frames=1),
        tie_embeddings=True,
        **SPECIAL,
    ),
}

# Every sharded axis splits in four along fsdp and in two along tensor.
DIVISIBLE = ModelConfig(
    TextConfig(3, 48, 56, 4, 2, head_dim=16, vocab_size=132, mrope_sections=(4, 2, 2), rope_theta=1e4),
    VisionConfig(3, 32, 44, 4, 48, (0, 2), num_positions=49, patch_px=4),
    tie_embeddings=False,
    **SPECIAL,
)


@dataclass
class Inputs:
    """One sequence as a processor gives it."""

    ids: np.ndarray
    pixel_values: np.ndarray | None = None
    image_grid_thw: np.ndarray | None = None
    pixel_values_videos: np.ndarray | None = None
    video_grid_thw: np.ndarray | None = None

    @property
    def media(self) -> dict[str, np.ndarray]:
        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class Prompt:
    """Builds a sequence piece by piece."""

    config: ModelConfig
    seed: int
    ids: list[int] = field(default_factory=list)
    grids: dict[int, list[list[int]]] = field(default_factory=lambda: {IMAGE: [], VIDEO: []})

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def text(self, count: int) -> "Prompt":
        self.ids += self.random.integers(0, 119, count).tolist()
        return self

    def image(self, down: int, across: int) -> "Prompt":
        self.ids += [START, *[IMAGE] * (down * across // 4), END]
        self.grids[IMAGE].append([1, down, across])
        return self

    def video(self, num_frames: int, down: int, across: int) -> "Prompt":
        for _ in range(num_frames):
            self.text(2).ids.extend([START, *[VIDEO] * (down * across // 4), END])
        self.grids[VIDEO].append([num_frames, down, across])
        return self

    def build(self) -> Inputs:
        media = {}
        for token, pixels, grid in (
            (IMAGE, "pixel_values", "image_grid_thw"),
            (VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            if self.grids[token]:
                media[grid] = np.array(self.grids[token])
                shape = (int(media[grid].prod(1).sum()), self.config.vision.patch_values)
                media[pixels] = self.random.standard_normal(shape).astype(np.float32)
        return Inputs(np.array(self.ids), **media)


def prompts(config: ModelConfig) -> dict[str, Inputs]:
    """Inputs of every kind, with unequal grids, odd token counts and content that is never constant."""
    return {
        "text": Prompt(config, 1).text(23).build(),
        "image": Prompt(config, 2).text(3).image(4, 6).text(5).build(),
        "images": Prompt(config, 3).image(6, 4).text(7).image(2, 10).image(8, 8).text(11).build(),
        "video": Prompt(config, 4).text(5).video(5, 6, 10).text(9).build(),
        "mixed": Prompt(config, 5)
        .text(2)
        .image(10, 2)
        .video(4, 4, 6)
        .text(3)
        .image(2, 2)
        .video(3, 2, 8)
        .image(6, 6)
        .text(13)
        .build(),
    }


def make_reference(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Qwen3VLForConditionalGeneration:
    """A transformers model in which no parameter is at its trivial initial value."""
    torch.manual_seed(seed)
    hf_config = Qwen3VLConfig(**config_to_hf(config, "float32"))
    hf_config._attn_implementation = "eager"
    for part in (hf_config.text_config, hf_config.vision_config):
        part._attn_implementation = "eager"
    model = Qwen3VLForConditionalGeneration(hf_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            noise = torch.randn_like(parameter) * fan_in**-0.5
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return model.to(dtype)


def save_reference(
    model: Qwen3VLForConditionalGeneration, path: Path, max_shard_size: str = "50KB"
) -> dict[str, np.ndarray]:
    """Writes it as transformers does, in several shards, and gives its tensors back."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tensors = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(shard))
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3_vl"
    return tensors


def save_by_orbax(directory: Path, params: dict[str, jax.Array]) -> None:
    """Writes DIRECTORY/params as a program with plain orbax does."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", nested(params))


def reference_gradients(
    model: Qwen3VLForConditionalGeneration, inputs: Inputs, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of sum(logits * weights), every one present."""
    model.zero_grad()
    (reference_logits(model, inputs) * torch.from_numpy(weights)).sum().backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def reference_logits(model: Qwen3VLForConditionalGeneration, inputs: Inputs) -> torch.Tensor:
    ids = torch.from_numpy(inputs.ids)[None]
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    media = {name: torch.from_numpy(value) for name, value in inputs.media.items()}
    return model(input_ids=ids, mm_token_type_ids=kinds, **media, use_cache=False).logits[0]


def as_hf(config: ModelConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters (or their gradients) under the names and shapes of Hugging Face."""
    tensors = {}
    for rule in rules(config):
        value = np.asarray(params[rule.path])
        parts = [value] if rule.count is None else list(value)
        tensors.update({name: part.reshape(rule.hf_shape) for name, part in zip(rule.hf_names, parts, strict=True)})
    return tensors


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(got) - np.float64(expected)) / np.linalg.norm(np.float64(expected)))
