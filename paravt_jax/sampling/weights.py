"""The learner's parameters in the engines' format: Hugging Face names, one tensor at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_port.adapters import merged_tensors
from model_port.model import Qwen3VL
from model_port.output_dir import named
from model_port.safetensors_io import SINGLE_FILE, SafetensorsWriter
from model_port.sharding import on_host
from model_port.weights import num_params, rules


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The model's current weights with adapters merged, sent as `dtype`."""

    model: Qwen3VL
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return num_params(self.model.config) * self.dtype.itemsize

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in merged_tensors(self.model):
            yield name, on_host(tensor.astype(self.dtype))  # cast before the transfer

    def write(self, directory: Path) -> None:
        path, table = directory / SINGLE_FILE, rules(self.model.config)
        shapes = {name: (self.dtype, rule.hf_shape) for rule in table for name in rule.hf_names}
        with named(path), SafetensorsWriter(path, shapes) as file:
            for _, tensor in self.tensors():
                file.write(tensor)
