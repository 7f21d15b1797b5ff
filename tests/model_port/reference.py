"""transformers as the reference: tiny random models, inputs of every kind, and their forward and gradients."""

import json
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict
from on_use import torch, transformers
from safetensors.numpy import load_file

from model_port.config import FAMILIES, ModelConfig, TextConfig, config_to_hf
from model_port.qwen2_5_vl.config import TRAITS, Qwen25VisionConfig
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.qwen3_vl_moe.config import Qwen3MoeVisionConfig
from model_port.reference import as_published

IMAGE, VIDEO, START, END = 120, 121, 122, 123
SPECIAL = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
tied, untied = (partial(ModelConfig, tie_embeddings=tie, **SPECIAL) for tie in (True, False))

# Odd numbers of layers and heads, unusual DeepStack layers, tied and untied, 1, 2 and 7 query heads per KV head.
CONFIGS = {
    "tied": tied(
        TextConfig(5, 48, 56, 6, 3, head_dim=16, vocab_size=131, mrope_sections=(4, 2, 2), rope_theta=1e4),
        Qwen3VisionConfig(3, 36, 44, 3, 48, (0, 2), num_positions=49, patch_px=4),
    ),
    "untied": untied(
        TextConfig(3, 40, 72, 7, 1, head_dim=24, vocab_size=127, mrope_sections=(5, 4, 3)),
        Qwen3VisionConfig(5, 40, 36, 5, 40, (1, 3, 4), num_positions=25, patch_px=4),
    ),
    "one_map": tied(
        TextConfig(1, 24, 40, 2, 2, head_dim=12, vocab_size=124, mrope_sections=(2, 2, 2), norm_eps=1e-5),
        Qwen3VisionConfig(2, 24, 20, 1, 24, (1,), num_positions=36, patch_px=2, temporal_patch_frames=1),
    ),
    # 2 and 5 query heads per KV head; windows of 2 x 2 and 3 x 3 tokens, which do not divide the grids.
    "windows": tied(
        TextConfig(2, 48, 56, 6, 3, 8, vocab_size=131, mrope_sections=(2, 1, 1), rope_theta=1e4, **TRAITS),
        Qwen25VisionConfig(3, 36, 44, 3, 48, (1,), window_px=16, patch_px=4),
    ),
    "windows_untied": untied(
        TextConfig(3, 40, 72, 5, 1, 8, vocab_size=127, mrope_sections=(1, 2, 1), norm_eps=1e-5, **TRAITS),
        Qwen25VisionConfig(4, 40, 36, 5, 40, (0, 3), window_px=24, patch_px=4, tokens_per_second=3),
    ),
    # Top 3 of 7 experts, and top 2 of 3 with square gate and up tensors.
    "experts": untied(
        TextConfig(2, 48, 20, 6, 3, 16, 131, mrope_sections=(4, 2, 2), rope_theta=1e4, num_experts=7, token_experts=3),
        Qwen3MoeVisionConfig(3, 36, 44, 3, 48, (0, 2), num_positions=49, patch_px=4),
    ),
    "few_experts": tied(
        TextConfig(3, 40, 20, 5, 1, 12, 127, mrope_sections=(2, 2, 2), num_experts=3, token_experts=2),
        Qwen3MoeVisionConfig(2, 24, 20, 1, 40, (1,), num_positions=36, patch_px=2),
    ),
}
QWEN3 = ("tied", "untied", "one_map")

# Every sharded axis splits in four along fsdp and in two along tensor.
DIVISIBLE = untied(
    TextConfig(3, 48, 56, 4, 2, head_dim=16, vocab_size=132, mrope_sections=(4, 2, 2), rope_theta=1e4),
    Qwen3VisionConfig(3, 32, 44, 4, 48, (0, 2), num_positions=49, patch_px=4),
)
WINDOWS_DIVISIBLE = untied(
    TextConfig(3, 48, 56, 6, 2, 8, vocab_size=132, mrope_sections=(2, 1, 1), rope_theta=1e4, **TRAITS),
    Qwen25VisionConfig(3, 32, 44, 4, 48, (1,), window_px=16, patch_px=4),
)
EXPERTS_DIVISIBLE = replace(
    DIVISIBLE,
    text=replace(DIVISIBLE.text, ffn_width=20, num_experts=8, token_experts=3),
    vision=Qwen3MoeVisionConfig(**vars(DIVISIBLE.vision)),
)
NORMS = re.compile(r"(norm|ln_q).*weight$")


@dataclass
class Inputs:
    """One sequence as a processor returns it."""

    ids: np.ndarray
    media: dict[str, np.ndarray]  # keyed by transformers' argument names

    @property
    def arguments(self) -> "dict[str, torch.Tensor]":
        """The arguments of a transformers model."""
        ids = torch.from_numpy(self.ids)[None]
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        media = {name: torch.from_numpy(value) for name, value in self.media.items()}
        return {"input_ids": ids, "mm_token_type_ids": kinds, **media}


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
        """Adds frames separated by their times, or in one block if the model encodes times in positions."""
        in_positions = self.config.vision.tokens_per_second > 0
        for _ in range(1 if in_positions else num_frames):
            count = (num_frames if in_positions else 1) * down * across // 4
            self.text(2).ids.extend([START, *[VIDEO] * count, END])
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
        if self.grids[VIDEO] and self.config.vision.tokens_per_second:
            media["second_per_grid_ts"] = np.array([2.3, 0.4][: len(self.grids[VIDEO])], np.float32)
        return Inputs(np.array(self.ids), media)


def prompts(config: ModelConfig) -> dict[str, Inputs]:
    """Returns inputs of every kind, with unequal grids, odd token counts and non-constant content."""
    mixed = Prompt(config, 5).text(2).image(10, 2).video(4, 4, 6)
    mixed.text(3).image(2, 2).video(3, 2, 8).image(6, 6).text(13)
    return {
        "text": Prompt(config, 1).text(23).build(),
        "image": Prompt(config, 2).text(3).image(4, 6).text(5).build(),
        "images": Prompt(config, 3).image(6, 4).text(7).image(2, 10).image(8, 8).text(11).build(),
        "video": Prompt(config, 4).text(5).video(5, 6, 10).text(9).build(),
        "mixed": mixed.build(),
    }


def make_reference(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> "transformers.PreTrainedModel":
    """Returns a transformers model in which every parameter is random, including norms and biases."""
    torch.manual_seed(seed)
    hf = config_to_hf(config, "float32")
    hf_config = transformers.AutoConfig.for_model(hf.pop("model_type"), **hf)
    hf_config._attn_implementation = "eager"
    for part in (hf_config.text_config, hf_config.vision_config):
        part._attn_implementation = part._experts_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(hf_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            experts = ".experts." in name
            fan_in = parameter.shape[-1] if experts else parameter[0].numel() if parameter.ndim > 1 else 100
            noise = torch.randn_like(parameter) * fan_in**-0.5
            parameter.copy_(1 + noise if NORMS.search(name) else noise)
    return model.to(getattr(torch, dtype))


def save_reference(
    model: "transformers.PreTrainedModel", path: Path, max_shard_size: str = "50KB"
) -> dict[str, np.ndarray]:
    """Saves a model with transformers in several shards. Returns its tensors."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tensors = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(shard))
    assert json.loads((path / "config.json").read_text())["model_type"] in FAMILIES
    return tensors


def save_by_orbax(directory: Path, params: dict[str, jax.Array]) -> None:
    """Writes DIRECTORY/params with plain orbax."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", unflatten_dict(params, sep="."))


def reference_gradients(
    model: "transformers.PreTrainedModel", inputs: Inputs, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the gradients of sum(logits * weights) that transformers computes."""
    model.zero_grad()
    (reference_logits(model, inputs) * torch.from_numpy(weights)).sum().backward()
    return {name: as_published(name, p.grad.numpy()) for name, p in model.named_parameters() if p.grad is not None}


def reference_logits(model: "transformers.PreTrainedModel", inputs: Inputs) -> "torch.Tensor":
    return model(**inputs.arguments, use_cache=False).logits[0]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(got) - np.float64(expected)) / np.linalg.norm(np.float64(expected)))
