"""The learner's parameters as the engines take them: under their Hugging Face names, one tensor at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from model_port.model import Qwen3VL
from model_port.safetensors_io import SINGLE_FILE, SafetensorsWriter
from model_port.sharding import flat_params
from model_port.weights import Rule, num_params, rules


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The weights of a model as it is now. `dtype` is what is sent, by default that of the model's computations."""

    model: Qwen3VL
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return num_params(self.model.config) * self.dtype.itemsize

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        params = flat_params(nnx.state(self.model))
        for rule in self._rules:
            for layer, name in enumerate(rule.hf_names):
                stacked = params[rule.path]
                ours = stacked if rule.count is None else stacked[layer]
                yield name, np.asarray(jax.device_get(ours)).reshape(rule.hf_shape).astype(self.dtype, copy=False)

    def write(self, directory: Path) -> None:
        shapes = {name: (self.dtype, rule.hf_shape) for rule in self._rules for name in rule.hf_names}
        with SafetensorsWriter(directory / SINGLE_FILE, shapes) as file:
            for _, tensor in self.tensors():
                file.write(tensor)

    @property
    def _rules(self) -> list[Rule]:
        return rules(self.model.config)
