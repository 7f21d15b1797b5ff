"""Rules that map Hugging Face tensors to our parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_port.architecture import VisionConfig

LAYER = "{i}"


@dataclass(frozen=True)
class Rule:
    """Maps the HF tensor `hf`, or `count` tensors with {i} = 0, 1, …, of shape `hf_shape` to our parameter `path`."""

    hf: str
    path: str
    hf_shape: tuple[int, ...]
    count: int | None = None

    def __post_init__(self) -> None:
        assert (LAYER in self.hf) == (self.count is not None), self.hf

    @property
    def hf_names(self) -> list[str]:
        return [self.hf] if self.count is None else [self.hf.replace(LAYER, str(i)) for i in range(self.count)]

    def tensor(self, params: Mapping[str, Any], layer: int) -> Any:
        """Returns a layer's HF tensor from our parameters by path."""
        ours = params[self.path] if self.count is None else params[self.path][layer]
        return ours.reshape(self.hf_shape)


def linear_rules(hf: str, ours: str, axes: str, shape: tuple[int, ...], count: int | None = None) -> list[Rule]:
    """Returns the rules of a projection's kernel and bias.

    Our kernel's name ends in its `axes`, such as "fd". `shape` is the HF tensor's.
    """
    kernel = Rule(f"{hf}.weight", f"{ours}_kernel_{axes}", shape, count)
    return [kernel, Rule(f"{hf}.bias", f"{ours}_bias", shape[:1], count)]


def layer_norm_rules(hf: str, ours: str, width: int, count: int | None = None) -> list[Rule]:
    return [
        Rule(f"{hf}.weight", f"{ours}.scale", (width,), count),
        Rule(f"{hf}.bias", f"{ours}.bias", (width,), count),
    ]


def vision_attention_rules(c: VisionConfig, hf: str, ours: str) -> list[Rule]:
    """Returns the rules of the attention in a vision tower's blocks. `hf` and `ours` are prefixes of their names."""
    return [
        *linear_rules(hf + "attn.qkv", ours + "attn.qkv", "cnhd", (3 * c.width, c.width), c.num_layers),
        *linear_rules(hf + "attn.proj", ours + "attn.o", "dnh", (c.width, c.width), c.num_layers),
    ]
