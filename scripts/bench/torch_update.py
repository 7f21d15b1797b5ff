"""A plain PARA-GRPO update in torch: transformers' model, one padded row per dialogue, autograd, AdamW.

Tests compare gradients with this update, and benchmarks compare time. The loss is the published one: token ratios,
masking of tokens above the cap, k3. Every row passes all its frames, as from a processor, to policy and reference.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model_port.inputs import Frame
from paravt_jax.learner.optim import BETAS, EPSILON
from paravt_jax.learner.packing import Dialogue
from paravt_jax.learner.settings import LossConfig, OptimConfig


class TorchLearner:
    """A learner with float32 weights and moments; the reference is the initial policy, or `ref_folder`."""

    def __init__(
        self,
        folder: Path,
        optim: OptimConfig,
        loss: LossConfig,
        *,
        temperature: float,
        dtype: str = "float32",
        rows_at_once: int = 1,
        ref_folder: Path | None = None,
        device: str = "cpu",
    ):
        import torch

        self.optim, self.loss, self.device = optim, loss, device
        self.temperature, self.dtype, self.rows_at_once = temperature, dtype, rows_at_once
        self.model = load_reference(folder).to(device).train()  # no dropout anywhere in this architecture
        self.model.model.visual.requires_grad_(False)
        ref = load_reference(ref_folder or folder) if loss.kl_coef else None
        self.ref = None if ref is None else ref.to(device).requires_grad_(False)
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self.trainable, optim.learning_rate, BETAS, EPSILON, optim.weight_decay)

    def update(
        self, dialogues: Sequence[Dialogue], frames: Mapping[str, Frame], denominator: float
    ) -> dict[str, float]:
        import torch

        loss = self.add_gradients(dialogues, frames, denominator)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.trainable, self.optim.max_grad_norm).item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss/total": loss, "optim/grad_norm": grad_norm}

    def add_gradients(self, dialogues: Sequence[Dialogue], frames: Mapping[str, Frame], denominator: float) -> float:
        """Accumulates gradients in the parameters and returns the loss."""
        import torch

        total = 0.0
        for first in range(0, len(dialogues), self.rows_at_once):
            with torch.device(self.device):
                loss = self._loss_sum(dialogues[first : first + self.rows_at_once], frames) / denominator
            loss.backward()
            total += loss.item()
        return total

    def _loss_sum(self, dialogues: Sequence[Dialogue], frames: Mapping[str, Frame]) -> Any:
        import torch

        longest = max(len(dialogue.ids) for dialogue in dialogues)

        def padded(name: str, dtype: Any = torch.float32) -> Any:
            rows = torch.zeros(len(dialogues), longest, dtype=dtype)
            for row, dialogue in zip(rows, dialogues, strict=True):
                row[: len(dialogue.ids)] = torch.from_numpy(np.asarray(getattr(dialogue, name)))
            return rows

        ids, loss_mask = padded("ids", torch.long), padded("loss_mask", torch.bool)
        behavior_logp, advantage = padded("behavior_logp"), padded("advantage")
        lengths = torch.tensor([len(dialogue.ids) for dialogue in dialogues])
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
            "mm_token_type_ids": (ids == self.model.config.image_token_id).int(),
        }
        all_frames = [frames[key] for dialogue in dialogues for key in dialogue.frames]
        if all_frames:
            patches = np.concatenate([frame.patches for frame in all_frames])
            inputs["pixel_values"] = torch.from_numpy(patches).to(self.device)
            inputs["image_grid_thw"] = torch.tensor([[1, *frame.grid] for frame in all_frames])

        # Skips the prompt's logits: the first needed logit predicts the first scored token.
        begin = max(int(loss_mask.any(dim=0).int().argmax()), 1)
        scored = loss_mask[:, begin:]
        behavior_logp, advantage = behavior_logp[:, begin:][scored], advantage[:, begin:][scored]
        policy_logp = self._logp(self.model, inputs, begin)[scored]
        prox_logp = policy_logp.detach()  # the first update on fresh rollouts, so old log-probs are the current ones
        ratio = (policy_logp - prox_logp).exp()
        numbers = self.loss.all_params
        clipped = ratio.clamp(1 - numbers["clip_low"], 1 + numbers["clip_high"])
        weight = (prox_logp - behavior_logp).exp()
        weight = weight.where(weight <= self.loss.all_bounds["max_weight"], 0.0)
        per_token = -weight * torch.minimum(ratio * advantage, clipped * advantage)
        if self.ref is not None:
            with torch.no_grad():
                ref_logp = self._logp(self.ref, inputs, begin)[scored]
            to_ref = ref_logp - policy_logp
            per_token = per_token + self.loss.kl_coef * (to_ref.exp() - to_ref - 1)
        return per_token.sum()

    def _logp(self, model: Any, inputs: dict[str, Any], begin: int) -> Any:
        """Returns log-probs of the tokens from column `begin`, under log_softmax(z / temperature)."""
        import torch

        targets = inputs["input_ids"][:, begin:]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = model(**inputs, use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1]
        logp = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        return logp.gather(-1, targets[..., None])[..., 0]


def load_reference(folder: Path) -> Any:
    """Loads transformers' model of a Hugging Face directory in float32."""
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
