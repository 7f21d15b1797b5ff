"""Reference losses and gradients of a step in float64, independent of the learner: numpy, verl 0.9.1 and TRL 1.16.

verl's and TRL's own functions run here. TRL computes the sampler's weights inside a long method, so `trl_weights`
repeats that formula. None means that a library has no such loss.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from paravt_jax.learner.settings import LossConfig

NO_BOUND = 1e-30  # verl's masking needs a lower bound above 0
NO_CLIP = 1e30  # verl's dual clip cannot be switched off


class LossAndGradient(NamedTuple):
    loss: float
    gradient: Float[np.ndarray, "E T"]  # with respect to the policy's log-probs


@dataclass(frozen=True)
class Case:
    """A loss and a step of E sequences, padded to T tokens."""

    loss: LossConfig
    policy: Float[np.ndarray, "E T"]
    prox: Float[np.ndarray, "E T"]
    behavior: Float[np.ndarray, "E T"]
    ref: Float[np.ndarray, "E T"]
    advantage: Float[np.ndarray, "E T"]
    mask: Bool[np.ndarray, "E T"]
    likelihood: Float[np.ndarray, "E T"]
    max_tokens: float

    @property
    def per_sequence(self) -> bool:
        """Whether every sequence has a single advantage."""
        return bool((self.advantage == self.advantage[:, :1]).all())

    @property
    def bounds(self) -> tuple[float, float]:
        bounds = self.loss.all_bounds
        return bounds.get("min_weight", 0.0), bounds.get("max_weight", math.inf)


def in_numpy(case: Case) -> LossAndGradient:
    """Computes the loss token by token as in the papers, with a hand-written derivative."""
    loss, gradient = 0.0, np.zeros(case.mask.shape)
    for e in range(len(case.mask)):
        positions = np.flatnonzero(case.mask[e])
        log_weights = [float(case.prox[e, t] - case.behavior[e, t]) for t in positions]
        log_ratios = [float(case.policy[e, t] - case.prox[e, t]) for t in positions]
        for t, log_weight, log_ratio in zip(positions, log_weights, log_ratios, strict=True):
            if case.loss.correction.startswith("sequence"):
                log_weight = math.fsum(log_weights)
            if case.loss.name == "gspo":
                log_ratio = math.fsum(log_ratios) / len(positions)
            value, slope = _objective(case, math.exp(log_ratio), case.advantage[e, t], case.policy[e, t])
            weight, share = _weight(case, math.exp(log_weight)), _share(case, len(positions))
            kl, kl_slope = _kl(case.loss.kl, case.ref[e, t] - case.policy[e, t])
            likelihood = case.likelihood[e, t]
            loss += share * (-weight * value + case.loss.kl_coef * kl - likelihood * case.policy[e, t])
            gradient[e, t] = share * (-weight * slope + case.loss.kl_coef * kl_slope - likelihood)
    return LossAndGradient(loss, gradient)


def _objective(case: Case, ratio: float, advantage: float, logp: float) -> tuple[float, float]:
    """Returns a token's objective and its derivative with respect to the log-prob."""
    params = case.loss.all_params
    if case.loss.name == "cispo":
        coefficient = min(ratio, params["max_ratio"]) * advantage
        return coefficient * logp, coefficient
    clipped = min(max(ratio, 1 - params["clip_low"]), 1 + params["clip_high"])
    used = min(ratio, clipped) if advantage > 0 else max(ratio, clipped)
    if advantage < 0 and params.get("dual_clip"):
        used = min(used, params["dual_clip"])
    return used * advantage, ratio * advantage if used == ratio else 0.0


def _weight(case: Case, weight: float) -> float:
    low, high = case.bounds
    if case.loss.correction == "none":
        return 1.0
    if low <= weight <= high:
        return weight
    return high if case.loss.correction.endswith("tis") else 0.0


def _share(case: Case, length: int) -> float:
    if case.loss.name in ("grpo", "gspo"):
        return 1 / (len(case.mask) * length)
    return 1 / (case.max_tokens if case.loss.name == "dr_grpo" else case.mask.sum())


def _kl(estimator: str, to_ref: float) -> tuple[float, float]:
    if estimator == "k2":
        return to_ref**2 / 2, -to_ref
    return math.exp(to_ref) - 1 - to_ref, 1 - math.exp(to_ref)


VERL_MODES = {"grpo": "seq-mean-token-mean", "gspo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def in_verl(case: Case) -> LossAndGradient | None:
    """Computes verl's policy loss with its rollout-correction weights, plus its KL; verl has no likelihood term."""
    if case.likelihood.any():
        return None
    core_algos = import_module("verl.trainer.ppo.core_algos")
    params, (policy, prox, behavior, ref, advantage, mask) = case.loss.all_params, _tensors(case)
    mode, factor = VERL_MODES.get(case.loss.name, "token-mean"), case.max_tokens / len(case.mask)
    is_cispo = case.loss.name == "cispo"
    config = import_module("verl.workers.config").FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=1.0 if is_cispo else params["clip_low"],  # 1: no lower bound
        clip_ratio_high=params["max_ratio"] - 1 if is_cispo else params["clip_high"],
        clip_ratio_c=params.get("dual_clip") or NO_CLIP,
    )
    config.global_batch_info["loss_scale_factor"] = factor
    weights = None
    if case.loss.correction != "none":
        low, high = case.bounds
        level = "sequence" if case.loss.correction.startswith("sequence") else "token"
        bounds = high if case.loss.correction.endswith("tis") else f"{low or NO_BOUND}_{high}"
        helper = import_module("verl.trainer.ppo.rollout_corr_helper")
        weights, _ = helper.compute_rollout_correction_weights(prox - behavior, mask, level, bounds)
    kinds = {"gspo": core_algos.compute_policy_loss_gspo, "cispo": core_algos.compute_policy_loss_cispo}
    compute = kinds.get(case.loss.name, core_algos.compute_policy_loss_vanilla)
    loss, _ = compute(prox, policy, advantage, mask, mode, config, weights)
    if case.loss.kl_coef:
        kl = core_algos.kl_penalty(policy, ref, case.loss.kl)
        loss = loss + case.loss.kl_coef * core_algos.agg_loss(kl, mask, mode, loss_scale_factor=factor)
    return _differentiated(loss, policy)


TRL_KINDS = {"para_grpo": "dapo", "gspo": "grpo"}  # the other modes have the same name


def in_trl(case: Case) -> LossAndGradient | None:
    """Computes TRL's loss; TRL has no k2 and no likelihood term.

    Its sequence ratio is differentiated as a whole, so GSPO compares where all tokens of a sequence weigh the same.
    """
    is_gspo, is_token = case.loss.name == "gspo", case.loss.correction in ("token_mis", "token_tis", "icepop")
    if case.likelihood.any() or (case.loss.kl_coef and case.loss.kl == "k2"):
        return None
    if is_gspo and (is_token or not case.per_sequence):
        return None
    policy, prox, behavior, ref, advantage, mask = _tensors(case)
    trainer = _trl_trainer(case, policy)
    ids = mask.long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage[:, 0] if case.per_sequence else advantage,
        "old_per_token_logps": prox,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": trl_weights(case, (prox - behavior) * mask),
        "num_items_in_batch": mask.sum(),
    }
    trl = import_module("trl.trainer.grpo_trainer")
    return _differentiated(trl.GRPOTrainer._compute_loss(trainer, None, inputs), policy)


def trl_weights(case: Case, log_weights: Any) -> Any:
    """Returns the ratio as TRL's vllm_importance_sampling_mode defines it."""
    import torch

    if case.loss.correction.startswith("sequence"):
        log_weights = log_weights.sum(-1, keepdim=True)
    weights, (low, high) = torch.exp(log_weights), case.bounds
    if case.loss.correction.endswith("tis"):
        return torch.clamp(weights, max=high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def _trl_trainer(case: Case, policy: Any) -> Any:
    """Returns a stand-in with the GRPOTrainer attributes that its loss reads."""
    import torch

    params, is_cispo = case.loss.all_params, case.loss.name == "cispo"
    same = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    scored = (policy, torch.zeros_like(policy), None)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: scored,
        _metrics={"eval": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=same,
        args=SimpleNamespace(delta=params.get("dual_clip") or None, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=case.loss.kl_coef,
        epsilon_low=0.0 if is_cispo else params["clip_low"],
        epsilon_high=params["max_ratio"] if is_cispo else params["clip_high"],
        importance_sampling_level="sequence" if case.loss.name == "gspo" else "token",
        loss_type=TRL_KINDS.get(case.loss.name, case.loss.name),
        max_completion_length=case.max_tokens / len(case.mask),
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=case.loss.correction != "none",
    )


def _tensors(case: Case) -> tuple[Any, ...]:
    import torch

    arrays = (case.policy, case.prox, case.behavior, case.ref, case.advantage, case.mask.astype(float))
    policy, *others = map(torch.tensor, arrays)
    return policy.requires_grad_(), *others


def _differentiated(loss: Any, policy: Any) -> LossAndGradient:
    loss.backward()
    return LossAndGradient(loss.item(), policy.grad.numpy())
