"""How one parameter of ours is made of Hugging Face tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_port.architecture import VisionConfig

LAYER = "{i}"


@dataclass(frozen=True)
class Rule:
    """HF tensors `hf` (one, or `count` with {i} = 0, 1, …) of shape `hf_shape` make up our parameter `path`."""

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
        """A layer's tensor, from parameters by path."""
        ours = params[self.path] if self.count is None else params[self.path][layer]
        return ours.reshape(self.hf_shape)


def vision_attention_rules(c: VisionConfig, hf: str, ours: str) -> list[Rule]:
    """The attention of a vision tower's blocks; `hf` and `ours` start their names."""
    return [
        Rule(hf + "attn.qkv.weight", ours + "attn.qkv_kernel_cnhd", (3 * c.width, c.width), c.num_layers),
        Rule(hf + "attn.qkv.bias", ours + "attn.qkv_bias", (3 * c.width,), c.num_layers),
        Rule(hf + "attn.proj.weight", ours + "attn.o_kernel_dnh", (c.width, c.width), c.num_layers),
        Rule(hf + "attn.proj.bias", ours + "attn.o_bias", (c.width,), c.num_layers),
    ]
