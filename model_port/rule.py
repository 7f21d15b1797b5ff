"""How one parameter of ours is made of Hugging Face tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
