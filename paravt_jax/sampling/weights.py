"""The learner's parameters in the engines' format: Hugging Face names, one tensor at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from model_port.adapters import merged_tensors
from model_port.model import Qwen3VL
from model_port.output_dir import named
from model_port.safetensors_io import SINGLE_FILE, SafetensorsWriter
from model_port.sharding import on_host
from model_port.weights import num_params, rules
from paravt_jax.sampling.local_model import local_model


def sampling_model(model: Qwen3VL, dtype: str, mesh: Mesh | None = None, *, copied: bool) -> Qwen3VL:
    """The model that the embedded engine samples from on this host; `copied` if updates may donate the policy's arrays.

    Updates do not donate frozen base weights, so with adapters only the adapters are copied.
    """
    if not copied:
        return local_model(model, dtype, mesh)
    graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam if model.lora.rank else nnx.Param, ...)
    copy = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.dtype(dtype)), trained)
    return local_model(nnx.merge(graphdef, copy, frozen), dtype, mesh)


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
