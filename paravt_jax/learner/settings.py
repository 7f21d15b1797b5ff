"""The settings of the learner. They stand apart from what they set, so that reading a config loads no jax."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Anchor = Literal["closings", "openings", "turn_end"]
ANCHORS = get_args(Anchor)
CreditKind = Literal["span", "token", "sequence"]
Normalise = Literal["std", "batch", "none", "loo"]
Ratio = Literal["token", "sequence"]
BehaviorCorrection = Literal["mask", "truncate", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]
Denominator = Literal["tokens", "constant"]
Decision = Literal["ok", "warn", "geometric_mask", "stop"]
Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class AdvantageConfig:
    # token: the anchor is of all structural tokens; span: each of its properties is of its own tags, and a missing one
    # of the token that stands in its place; sequence: the anchor stays inside R, as in the public release.
    credit: CreditKind = "token"
    # std: of the group, which weighs up groups that are nearly all right or all wrong; batch: of the step; none: Dr.
    # GRPO; loo: none, and the mean is that of the others.
    normalise: Normalise = "std"
    terms: Literal["together", "apart"] = "together"  # apart: each term of R is normalised, then weighted and added
    epsilon: float = 1e-6  # far below the std of any group with spread
    filter_zero_variance: bool = True  # such groups have nothing to say but KL, and would count in N

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"advantage.epsilon={self.epsilon} must be a finite number above 0, such as 1e-6")
        if self.terms == "apart" and self.normalise in ("none", "loo"):
            raise ValueError(
                f"advantage.terms=apart does nothing with advantage.normalise={self.normalise}, which divides by "
                f"nothing; set std or batch"
            )


@dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2  # ratios from 1 - clip_low to 1 + clip_high move the policy, beyond it is clipped
    clip_high: float = 0.2  # above clip_low: clip-higher (DAPO), which leaves rare tokens room to grow
    ratio: Ratio = "token"  # sequence: GSPO
    denominator: Denominator = "tokens"  # constant: Dr. GRPO, see `loss_denominator`
    behavior_correction: BehaviorCorrection = "mask"  # truncate: min(w, cap); none: w = 1
    behavior_cap: float = 5.0  # published
    geometric_mask: bool = False  # leaves out sequences whose geometric mean of w is outside the bounds
    geometric_low: float = 0.9  # ours: a tenth per token, over a whole sequence, is another policy
    geometric_high: float = 1.1  # likewise
    kl_coef: float = 0.01  # published
    kl_estimator: KlEstimator = "k3"  # GRPO's; k2 has the exact gradient of KL(policy‖ref)
    kl_in: KlIn = "loss"  # reward: see `kl_penalties`

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"loss.clip_low={self.clip_low} must be above 0 and below 1: ratios are positive")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"loss.clip_high={self.clip_high} must be a finite number above 0")
        if not self.behavior_cap >= 1:
            raise ValueError(
                f"loss.behavior_cap={self.behavior_cap} must be at least 1, the weight of a token on which engine and "
                f"learner agree; inf is no cap"
            )
        if not 0 < self.geometric_low < 1 < self.geometric_high < math.inf:
            raise ValueError(
                f"loss.geometric_low={self.geometric_low} and loss.geometric_high={self.geometric_high} must enclose "
                f"1, the mean of a sequence on which engine and learner agree"
            )
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"loss.kl_coef={self.kl_coef} must be a finite number, 0 or more")
        if self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError(
                "loss.kl_estimator=k1 with loss.kl_in=loss pulls nowhere: the gradient of k1 is zero in expectation; "
                "use k2 or k3, or loss.kl_in=reward"
            )

    @property
    def needs_sequences(self) -> bool:
        return self.ratio == "sequence" or self.geometric_mask


@dataclass(frozen=True)
class MismatchConfig:
    """Means of the behavior KL over loss tokens, each the first value at which its step is taken. The numbers are ours:

    two bf16 programs of the same weights differ by about 1e-3, and staleness adds to it.
    """

    warn_kl: float = 0.01  # from here on it is said
    geometric_mask_kl: float = 0.03  # the next step leaves out whole sequences that are far off
    stop_kl: float = 0.1  # the run ends

    def __post_init__(self) -> None:
        if not 0 < self.warn_kl <= self.geometric_mask_kl <= self.stop_kl:
            raise ValueError(
                f"mismatch.warn_kl={self.warn_kl}, mismatch.geometric_mask_kl={self.geometric_mask_kl} and "
                f"mismatch.stop_kl={self.stop_kl} must be above 0 and in this order; inf turns one off"
            )


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = 2e-6  # published; of the schedule, its highest
    schedule: Schedule = "constant"  # cosine: down to 0 at the last step
    warmup_frac: float = 0.0  # of the steps, in which the rate rises from 0
    weight_decay: float = 0.01  # published; AdamW's, apart from the gradient
    beta1: float = 0.9  # of the mean of gradients
    beta2: float = 0.999  # of the mean of their squares
    eps: float = 1e-8  # beside its root
    max_grad_norm: float = 1.0  # published; a longer gradient is scaled down to it
    train_vision: bool = False  # the published recipe changes language weights only
    head_chunk_tokens: int = 256  # scored tokens of a row whose logits exist at the same time
    max_bad_steps: int = 5  # updates in a row that are skipped for gradients that are not finite, then the run stops

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be greater than 0")
        for name in ("head_chunk_tokens", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.warmup_frac < 1:
            raise ValueError(f"optim.warmup_frac={self.warmup_frac} must be 0 or more and below 1")
