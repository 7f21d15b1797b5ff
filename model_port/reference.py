"""Runs transformers as the reference: logits, gradients and greedy ids of a Hugging Face directory.

Only this module imports torch, and only on use, because a learner's environment has no torch.
"""

import gc
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from model_port.config import ModelConfig, read_config
from model_port.weights import module_name, stored_dtype

SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # environment in which jax leaves GPU memory for torch


@dataclass(frozen=True)
class ProcessedPrompt:
    """A processor's output for a prompt. Without pictures, `pixels` and `grids` are empty."""

    ids: Int[np.ndarray, " T"]  # placeholders expanded
    pixels: Float[np.ndarray, "P C"]
    grids: Int[np.ndarray, "n 3"]

    @classmethod
    def of_text(cls, ids: Int[np.ndarray, " T"], config: ModelConfig) -> "ProcessedPrompt":
        return cls(ids, np.empty((0, config.vision.patch_values), np.float32), np.empty((0, 3), np.int64))

    @property
    def media(self) -> dict[str, np.ndarray]:
        """The pictures, by the names of transformers' arguments."""
        return {"pixel_values": self.pixels, "image_grid_thw": self.grids} if len(self.grids) else {}


def missing_torch() -> str:
    """Returns why this environment cannot run the reference, or ""."""
    try:
        import torch  # noqa: F401
        from transformers.models.auto.modeling_auto import AutoModelForImageTextToText  # noqa: F401
    except ImportError as missing:
        return str(missing)
    return ""


def as_published(name: str, tensor: np.ndarray) -> np.ndarray:
    """Transposes experts from transformers 5's outputs x inputs to the published files' inputs x outputs."""
    return tensor.swapaxes(1, 2) if ".experts." in name else tensor


def run_by_layer(model: Any) -> None:
    """Makes a model compute in float32, with 16-bit weights cast layer by layer and activations recomputed.

    Embedding and head count as layers.
    """
    from torch import nn
    from torch.func import functional_call
    from torch.utils.checkpoint import checkpoint

    class Holder(nn.Module):
        def __init__(self, layer: Any):
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **options: Any) -> Any:
            return type(self.layer).forward(self.layer, *args, **options)

    def widened(holder: Any, *args: Any, **options: Any) -> Any:
        weights = {name: parameter.float() for name, parameter in holder.named_parameters()}
        return functional_call(holder, weights, args, options)

    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [*(layer for stack in stacks for layer in stack), model.get_input_embeddings(), model.lm_head]
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    for layer in layers:
        layer.forward = partial(checkpoint, widened, Holder(layer), use_reentrant=False)
    for parameter in model.parameters():
        if parameter not in in_layers:
            parameter.data = parameter.data.float()


class Reference(AbstractContextManager["Reference"]):
    """A model in transformers, on the GPU if torch has one. The `with` block frees its memory at its end.

    In float32, 16-bit weights keep their stored dtype.
    """

    def __init__(self, hf_dir: str | Path, dtype: str = "float32"):
        import torch
        from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
        from transformers.utils import logging

        logging.disable_progress_bar()  # shown even without a terminal; our own progress shows the time
        torch.backends.cudnn.allow_tf32 = False  # otherwise a GPU rounds the inputs of float32 convolutions
        self._config = read_config(hf_dir)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = stored_dtype(Path(hf_dir)) if dtype == "float32" else dtype
        model: Any = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=getattr(torch, loaded))
        self._model = model.eval().to(self._device)
        if dtype == "float32":
            run_by_layer(self._model)

    def __exit__(self, *_: object) -> None:
        import torch

        del self._model
        gc.collect()
        torch.cuda.empty_cache()  # because jax cannot use torch's cache; does nothing without a GPU

    def logits(
        self, prompt: ProcessedPrompt, tokens: Int[np.ndarray, " rows"] | None = None
    ) -> Float[np.ndarray, "rows V"]:
        """Computes the logits of the tokens at these positions (default: all)."""
        import torch

        kept = 0 if tokens is None else torch.from_numpy(tokens).to(self._device)
        with torch.no_grad():
            return self._model(**self._inputs(prompt), logits_to_keep=kept).logits[0].float().cpu().numpy()

    def gradients(self, prompt: ProcessedPrompt, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Computes the gradients of the prompt's mean negative log-prob, for tensors with these published names."""
        import torch

        parameters = dict(self._model.named_parameters())
        chosen = {name: parameters[module_name(self._config, name)] for name in names}
        self._model.requires_grad_(False)
        for parameter in chosen.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        inputs = self._inputs(prompt)
        logits = self._model(**inputs, use_cache=False).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:]).backward()
        return {name: as_published(name, parameter.grad.cpu().numpy()) for name, parameter in chosen.items()}

    def greedy_ids(self, prompt: ProcessedPrompt, num_new: int) -> list[int]:
        """Samples `num_new` ids greedily; stop ids do not end the sampling."""
        self._model.generation_config.eos_token_id = None
        inputs = self._inputs(prompt)
        ids = self._model.generate(**inputs, do_sample=False, repetition_penalty=1.0, max_new_tokens=num_new)
        return ids[0, len(prompt.ids) :].tolist()

    def _inputs(self, prompt: ProcessedPrompt) -> dict[str, Any]:
        import torch

        tokens = torch.tensor(prompt.ids[None])
        kinds = (tokens == self._config.image_token_id).int()
        media = {name: torch.from_numpy(array) for name, array in prompt.media.items()}
        inputs = {"input_ids": tokens, "mm_token_type_ids": kinds, **media}
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}
