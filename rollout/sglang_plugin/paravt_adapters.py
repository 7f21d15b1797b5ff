"""Loads a LoRA adapter into an SGLang server by merging it into the model that the server was started with.

A learner writes the adapter's tensors and calls /update_weights_from_disk with `adapter:DIRECTORY` as the model path
(rollout/engine/publishing.py). For such a path this plugin replaces SGLang's iterator over the weights: it reads the
server's own model again and yields W + scale · B A. Running requests continue with the new weights. SGLang's own
adapters do not allow this, because they bind a request to one adapter.

SGLang finds the plugin by its entry point if this directory is in PYTHONPATH. Without the plugin, SGLang rejects the
path.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

SCHEME = "adapter:"
INFO = "adapter"  # a tensor of JSON: the adapter's scale and the base model's dtype, checksum and tensor names
PREFIX, A, B = "base_model.model.", "lora_A.weight", "lora_B.weight"  # PEFT's names for a kernel's two factors


def register() -> None:
    target = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"
    HookRegistry.register(target, _Model().weights, HookType.AROUND)


@dataclass
class _Model:
    """The model that this process was started with."""

    source: Any = None  # SGLang's description of the model's files
    checksum: str = ""  # of the base model whose frozen tensors are in use

    def weights(self, original: Callable[..., Any], loader: Any, source: Any, **options: Any) -> Any:
        """Replaces `DefaultModelLoader._get_weights_iterator`."""
        if source.model_or_path.startswith(SCHEME):
            return self._merged_weights(loader, Path(source.model_or_path.removeprefix(SCHEME)))
        self.source, self.checksum = self.source or source, ""
        return original(loader, source, **options)

    def _merged_weights(self, loader: Any, adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Checks everything before it yields the first tensor, because SGLang exits if loading fails midway."""
        if self.source is None:
            raise ValueError("the server's own model was not loaded from files")
        parts: dict[str, torch.Tensor] = {}
        for path in adapter.glob("*.safetensors"):
            parts |= load_file(path)
        info = json.loads(parts.pop(INFO).numpy().tobytes())
        files = _files(loader, self.source)
        _check_shapes(parts, files)
        if self.checksum != info["sum"] != _checksum(files, info):
            raise ValueError(f"{self.source.model_or_path} has other weights than the adapter's base, {info['base']}")
        return self._merge(parts, info, files)

    def _merge(
        self, parts: Mapping[str, torch.Tensor], info: Mapping[str, Any], files: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the adapted kernels, and the other tensors if they are not in use yet."""
        dtype, has_frozen = getattr(torch, info["dtype"]), self.checksum == info["sum"]
        for name in files:
            a, b = (parts.get(f"{PREFIX}{name.removesuffix('weight')}{side}") for side in (A, B))
            if a is not None and b is not None:
                yield name, _merged(files[name].get_tensor(name).to(dtype), a, b, info["scale"])
            elif not has_frozen:
                yield name, files[name].get_tensor(name).to(dtype)
        self.checksum = info["sum"]


def _merged(kernel: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes W + scale · B A on the server's device, in full float32 precision."""
    device, precision = get_server_args().device, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        wide = torch.addmm(kernel.to(device).float(), b.to(device), a.to(device), alpha=scale)
    finally:
        torch.set_float32_matmul_precision(precision)
    return wide.to(kernel.dtype)


def _checksum(files: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Computes the model's checksum in the learner's dtype, as model_port.adapters does; "" if a tensor is missing."""
    current, dtype = xxhash.xxh3_128(), getattr(torch, info["dtype"])
    if not files.keys() >= set(info["names"]):
        return ""
    for name in info["names"]:
        current.update(files[name].get_tensor(name).to(dtype).contiguous().flatten().view(torch.uint8).numpy())
    return current.hexdigest()


def _files(loader: Any, source: Any) -> dict[str, Any]:
    """Opens a model's safetensors files. Maps each tensor's name to the file that has it."""
    options = (source.revision, source.fall_back_to_pt, source.allow_patterns_overrides)
    _, paths, _ = loader._prepare_weights(source.model_or_path, *options)
    return {name: file for file in (safe_open(path, "pt") for path in paths) for name in file.keys()}  # noqa: SIM118


def _check_shapes(parts: Mapping[str, torch.Tensor], files: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the parts are pairs of factors, each of which fits a kernel of the model."""
    for name, part in parts.items():
        side = A if name.endswith(A) else B
        kernel = f"{name.removeprefix(PREFIX).removesuffix(side)}weight"
        other = parts.get(f"{name.removesuffix(side)}{B if side == A else A}")
        if kernel not in files or other is None:
            raise ValueError(f"{name} is not one of a pair of factors for a kernel of this model")
        a, b = (part, other) if side == A else (other, part)
        shape = files[kernel].get_slice(kernel).get_shape()
        if [*b.shape, *a.shape] != [shape[0], a.shape[0], a.shape[0], shape[1]]:
            raise ValueError(f"{name} does not fit {kernel}, whose shape is {shape}")
