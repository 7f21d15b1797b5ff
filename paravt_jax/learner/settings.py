"""The learner's settings. This module has only dataclasses, so that reading a config does not import jax."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rollout.setting import setting
from rollout.user_code import is_location

CreditKind = Literal["span", "token", "sequence", "likelihood"]
Normalise = Literal["std", "batch", "tokens", "none", "loo"]
Correction = Literal["token_mis", "token_tis", "sequence_mis", "sequence_tis", "icepop", "none"]
KlTerm = Literal["k3", "k2", "reward", "returns"]
Schedule = Literal["constant", "cosine"]


@dataclass(frozen=True)
class AdvantageConfig:
    credit: CreditKind = setting(
        "token",
        "token: the anchor reward goes to all structural tokens; span: each property of the anchor to its own "
        "tags; sequence: the anchor stays in the reward, as in the release; likelihood: the log-likelihood of "
        "structural tokens instead of an anchor reward, the project page's equation",
    )
    normalise: Normalise = setting(
        "std",
        "divide by the std of the group (std) or of the step (batch); tokens: by the std of the group, then by mean "
        "and std over all loss tokens of the step, with rewards of at most 2.2, as in the release; none: no division, "
        "as in Dr. GRPO; loo: no division, and the mean is over the group's other episodes",
    )
    filter_zero_variance: bool = setting(
        True,
        "leave out groups whose rewards are all equal, which only contribute KL; with credit=likelihood they stay and "
        "train the structure",
    )

    @property
    def max_reward(self) -> float:
        """The bound of a reward: the release clips (R − 0.2) · 10 at 20; bias and scale cancel."""
        return 2.2 if self.normalise == "tokens" else math.inf


# The parameters of each loss and their defaults, see `learner/variants.py`.
_OFF = {"dual_clip": 0.0}  # verl's clip_ratio_c (default 3) and TRL's delta (default off); 0: off
PARAMS = {
    "para_grpo": {"clip_low": 0.2, "clip_high": 0.2, **_OFF},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, **_OFF},
    # arXiv 2503.14476: rare tokens have more room to grow than to shrink
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, **_OFF},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, **_OFF},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},  # arXiv 2507.18071: ratios are means over a sequence, close to 1
    "cispo": {"max_ratio": 5.0},  # from ScaleRL (arXiv 2510.13786); MiniMax-M1 does not publish a value
}
# Bounds of each correction of the sampler's mismatch, with defaults. MIS masks tokens out of bounds, TIS
# truncates their weight; IcePop masks on both sides.
CORRECTIONS: dict[Correction, dict[str, float]] = {
    "token_mis": {"max_weight": 5.0},  # published
    "token_tis": {"max_weight": 2.0},  # verl's default
    "sequence_mis": {"max_weight": 3.0},  # TRL's default
    "sequence_tis": {"max_weight": 2.0},  # verl's default
    "icepop": {"min_weight": 0.5, "max_weight": 5.0},  # arXiv 2510.18855
    "none": {},
}
MAX_SEQUENCE_CLIP = 0.05  # our choice: far above GSPO's published bounds, far below any token clip
OF_SEQUENCES = ("gspo",)  # losses that need whole sequences
BOUND_NAMES = ("min_weight", "max_weight")
PARAM_NAMES = tuple(dict.fromkeys(name for params in PARAMS.values() for name in params))


@dataclass(frozen=True)
class LossConfig:
    """The loss: a variant with its parameters, the sampler correction and the KL term."""

    name: str = setting(
        "para_grpo",
        "para_grpo, grpo, dapo, dr_grpo, gspo, cispo, or path/to/file.py:function for your own (docs/extend.md)",
    )
    params: dict[str, float] = setting(
        {},
        "the loss's parameters, such as {clip_low: 0.2, clip_high: 0.28}; the others keep their defaults",
        entries=PARAM_NAMES,
    )
    correction: Correction = setting(
        "token_mis",
        "importance weights between learner and engine. token_mis, published: masks tokens above a bound; token_tis: "
        "truncates the weight; sequence_mis, sequence_tis: the same with one weight per dialogue; icepop: masks tokens "
        "above and below bounds; none: no weights",
    )
    correction_bounds: dict[str, float] = setting(
        {}, "the correction's bounds, such as {max_weight: 5.0}; the others keep their defaults", entries=BOUND_NAMES
    )
    kl_coef: float = setting(0.01, "weight of the KL to the initial policy; published. 0: no reference model in memory")
    kl: KlTerm = setting(
        "k3",
        "where the KL penalty applies. k3, k2: in the loss, k3 as in GRPO, k2 with the exact gradient of the KL; "
        "reward: k1, subtracted from an episode's reward, relative to its group; returns: the sum of k1 over a token "
        "and all later tokens, subtracted from the token's advantage, as in the release",
    )

    def __post_init__(self) -> None:
        params = self.all_params  # checks the names
        if not self.is_own:
            _check_params(self.name, params)
        _check_bounds(self.correction, self.correction_bounds)
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"loss.kl_coef={self.kl_coef} must be a finite number, 0 or more")

    @cached_property
    def all_params(self) -> dict[str, float]:
        """All parameters of a shipped loss, with defaults; for your own function, only parameters that are set."""
        if self.is_own:
            return dict(self.params)
        if self.name not in PARAMS:
            raise ValueError(
                f"loss.name={self.name} is unknown, expected {', '.join(PARAMS)}, or your own path/to/file.py:function"
            )
        check_names(self.name, self.params, PARAMS[self.name])
        return PARAMS[self.name] | self.params

    @property
    def is_own(self) -> bool:
        """Whether `name` is the user's function."""
        return is_location(self.name)

    @property
    def penalizes_reward(self) -> bool:
        return self.kl == "reward"

    @property
    def penalizes_returns(self) -> bool:
        return self.kl == "returns"

    def scores_before(self, updates_per_step: int) -> bool:
        """Whether the policy's log-probs must be computed before the update."""
        return updates_per_step > 1 or self.penalizes_reward or self.penalizes_returns

    @property
    def all_bounds(self) -> dict[str, float]:
        """All bounds of the correction, with defaults."""
        return CORRECTIONS[self.correction] | self.correction_bounds

    @property
    def needs_sequences(self) -> bool:
        return self.name in OF_SEQUENCES or self.correction.startswith("sequence") or self.is_own

    def filled(self) -> "LossConfig":
        return replace(self, params=self.all_params, correction_bounds=self.all_bounds)


def check_names(loss: str, names: Iterable[str], expected: Collection[str]) -> None:
    """Raises ValueError for a name that is not a parameter of the loss."""
    for name in names:
        if name not in expected:
            raise ValueError(
                f"loss.params.{name} is not a parameter of loss.name={loss}, which has {', '.join(expected) or 'none'}"
            )


def _check_bounds(correction: Correction, bounds: Mapping[str, float]) -> None:
    """Raises ValueError for a bound that the correction does not have, or that excludes the weight 1."""
    for name, value in bounds.items():
        if name not in CORRECTIONS[correction]:
            raise ValueError(
                f"loss.correction_bounds.{name} is not a bound of loss.correction={correction}, which has "
                f"{', '.join(CORRECTIONS[correction]) or 'none'}"
            )
        if not (value >= 1 if name == "max_weight" else 0 <= value <= 1):
            side = "at least 1" if name == "max_weight" else "from 0 to 1"
            raise ValueError(
                f"loss.correction_bounds.{name}={value} must be {side}, because engine and learner agree on a token "
                f"of weight 1; inf and 0 disable a bound"
            )


def _check_params(loss: str, params: Mapping[str, float]) -> None:
    """Raises ValueError for a parameter of a shipped loss that is out of range."""
    if not 0 < params.get("clip_low", 0.2) < 1:
        raise ValueError(f"loss.params.clip_low={params['clip_low']} must be above 0 and below 1: ratios are positive")
    if not 0 < params.get("clip_high", 0.2) < math.inf:
        raise ValueError(f"loss.params.clip_high={params['clip_high']} must be a finite number above 0")
    if params.get("dual_clip", 0.0) != 0 and not params["dual_clip"] > 1:
        raise ValueError(
            f"loss.params.dual_clip={params['dual_clip']} must be above 1, the ratio of an unchanged token; 0 "
            f"disables it"
        )
    if not 1 <= params.get("max_ratio", 1.0) < math.inf:
        raise ValueError(
            f"loss.params.max_ratio={params['max_ratio']} must be a finite number of at least 1, the ratio of an "
            f"unchanged token"
        )
    for name, value in params.items() if loss == "gspo" else ():
        if value > MAX_SEQUENCE_CLIP:
            raise ValueError(
                f"loss.params.{name}={value} is a clip for tokens, and with loss.name=gspo would clip nothing: the "
                f"ratio of a sequence is a mean over its tokens. The published values are 3e-4 and 4e-4; the maximum "
                f"is {MAX_SEQUENCE_CLIP}"
            )


@dataclass(frozen=True)
class MismatchConfig:
    max_kl: float = setting(
        0.1,
        "largest mean KL between engine and learner in a step: above it the run stops, above a tenth of it the run "
        "logs a warning. inf: no check",
    )

    def __post_init__(self) -> None:
        if not self.max_kl > 0:
            raise ValueError(f"mismatch.max_kl={self.max_kl} must be above 0; inf disables the check")

    @property
    def warn_kl(self) -> float:
        return self.max_kl / 10


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = setting(2e-6, "peak learning rate; published")
    schedule: Schedule = setting(
        "constant",
        "cosine: the learning rate rises from 0 over 5 % of the steps, then falls and is almost 0 at the last one",
    )
    weight_decay: float = setting(0.01, "AdamW's decoupled weight decay; published")
    max_grad_norm: float = setting(1.0, "gradients with a larger norm are scaled down to it; published")
    offload: bool = setting(
        False,
        "keep optimizer moments and reference in host memory during the backward pass; saves 8 bytes per trained "
        "parameter for the moments and 2 for a reference, which loss.kl_coef above 0 needs",
    )
    train_vision: bool = setting(False, "train the vision tower too; the published recipe does not")

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"optim.learning_rate={self.learning_rate} must be a finite number above 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"optim.max_grad_norm={self.max_grad_norm} must be above 0; inf disables clipping")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optim.weight_decay={self.weight_decay} must be a finite number, 0 or more")
