"""Converts the learner's parameters for engines: Hugging Face names, one tensor at a time."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from model_port.adapters import AdapterInfo, merged_tensors, write_adapter
from model_port.config import FAMILIES
from model_port.model import VLModel
from model_port.output_dir import named
from model_port.safetensors_io import SINGLE_FILE, safetensors_writer
from model_port.sharding import flat_params, on_host
from model_port.weights import Rule, adapter_rules, num_params, rules
from rollout.engine.publishing import ADAPTER_INFO


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The model's current weights with adapters merged, sent as `dtype`."""

    model: VLModel
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
        with named(path), safetensors_writer(path, shapes) as write:
            for _, tensor in self.tensors():
                write(tensor)


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """Only the model's current adapter, for servers that merge it into their own copy of the base."""

    model: VLModel
    info: AdapterInfo

    @property
    def num_bytes(self) -> int:
        return np.dtype(np.float32).itemsize * sum(math.prod(r.hf_shape) * (r.count or 1) for r in self._rules)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the matrices, and a tensor of JSON with the data that servers need to merge them.

        Names are like PEFT's, but with the names of kernels in the model's files, because servers have no transformers
        modules.
        """
        yield ADAPTER_INFO, np.frombuffer(json.dumps(self._merging()).encode(), np.uint8)
        params = self._params()
        for rule in self._rules:
            for layer, name in enumerate(rule.hf_names):
                yield name, on_host(rule.tensor(params, layer))

    def write(self, directory: Path) -> None:
        """Writes the adapter in PEFT's format."""
        params = {path: on_host(array) for path, array in self._params().items()}
        write_adapter(directory, self.model.config, self.info, params)

    def _params(self) -> dict[str, jax.Array]:
        return flat_params(nnx.state(self.model, nnx.LoRAParam))

    def _merging(self) -> dict[str, object]:
        base, names = self.info.base, [name for rule in rules(self.model.config) for name in rule.hf_names]
        return {"scale": self.info.lora.scale, "base": base.name, "dtype": base.dtype, "sum": base.sum, "names": names}

    @property
    def _rules(self) -> list[Rule]:
        config = self.model.config
        pairs = adapter_rules(config, self.info.lora.rank, FAMILIES[config.family].text_names)
        return [rule for pair in pairs.values() for rule in pair]
