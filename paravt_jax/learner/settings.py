"""The learner's settings, in a module of plain dataclasses so that reading a config does not import jax."""

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Literal

from rollout.setting import setting

CreditKind = Literal["span", "token", "sequence"]
Normalise = Literal["std", "batch", "none", "loo"]
BehaviorCorrection = Literal["mask", "truncate", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]
Decision = Literal["ok", "warn", "stop"]
Schedule = Literal["constant", "cosine"]
HEAD_CHUNK_TOKENS = 256  # scored tokens per row in a chunk of logits


@dataclass(frozen=True)
class AdvantageConfig:
    credit: CreditKind = setting(
        "token",
        "token: the anchor reward goes to all structural tokens; span: each of its properties to its own "
        "tags; sequence: the anchor stays in the reward, as in the release",
    )
    normalise: Normalise = setting(
        "std",
        "divide by the std of the group (std) or of the step (batch); none: no division, as Dr. GRPO; "
        "loo: no division, against the mean of the other episodes",
    )
    terms: Literal["together", "apart"] = setting(
        "together", "apart: normalize each reward term, then weight and add them, so that small terms stay small"
    )
    filter_zero_variance: bool = setting(True, "leave out groups whose rewards are all equal; they only contribute KL")

    def __post_init__(self) -> None:
        if self.terms == "apart" and self.normalise in ("none", "loo"):
            raise ValueError(
                f"advantage.terms=apart does nothing with advantage.normalise={self.normalise}, which divides by "
                f"nothing; set std or batch"
            )


MAX_SEQUENCE_CLIP = 0.05  # our choice: far above GSPO's published bounds, far below any token clip


@dataclass(frozen=True)
class TokenClip:
    """Clips each token's ratio to between 1 - clip_low and 1 + clip_high."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"loss.params.clip_low={self.clip_low} must be above 0 and below 1: ratios are positive")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"loss.params.clip_high={self.clip_high} must be a finite number above 0")


@dataclass(frozen=True)
class ClipHigher(TokenClip):
    """A higher upper bound leaves rare tokens more room to grow than to shrink."""

    clip_high: float = 0.28  # published (arXiv 2503.14476)


@dataclass(frozen=True)
class SequenceClip(TokenClip):
    """Clips sequence ratios: geometric means over a sequence's tokens, and so much closer to 1."""

    clip_low: float = 3e-4  # published (arXiv 2507.18071)
    clip_high: float = 4e-4  # published (arXiv 2507.18071)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_low", "clip_high"):
            if getattr(self, name) > MAX_SEQUENCE_CLIP:
                raise ValueError(
                    f"loss.params.{name}={getattr(self, name)} is a clip for tokens, and with loss.name=gspo would "
                    f"clip nothing: the ratio of a sequence is a mean over its tokens. Published are 3e-4 and 4e-4; "
                    f"at most {MAX_SEQUENCE_CLIP}"
                )


@dataclass(frozen=True)
class RatioCap:
    max_ratio: float = 5.0  # from ScaleRL (arXiv 2510.13786); MiniMax-M1 does not publish a value

    def __post_init__(self) -> None:
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(
                f"loss.params.max_ratio={self.max_ratio} must be a finite number of at least 1, the ratio of a token "
                f"on which nothing has changed"
            )


PARAMS = {  # by loss, see `learner/variants.py`
    "para_grpo": TokenClip,
    "grpo": TokenClip,
    "dapo": ClipHigher,
    "dr_grpo": TokenClip,
    "gspo": SequenceClip,
    "cispo": RatioCap,
}
OF_SEQUENCES = ("grpo", "gspo")  # losses that need whole sequences
PARAM_NAMES = tuple(dict.fromkeys(param.name for params in PARAMS.values() for param in fields(params)))


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
    behavior_correction: BehaviorCorrection = setting(
        "mask",
        "what happens to tokens whose importance weight is above behavior_cap: mask them, truncate the "
        "weight, or ignore the weights (none)",
    )
    behavior_cap: float = setting(5.0, "largest importance weight between learner and engine; published")
    kl_coef: float = setting(0.01, "weight of the KL to the initial policy; published. 0: no reference model in memory")
    kl_estimator: KlEstimator = setting("k3", "k3 as in GRPO; k2 has the exact gradient of the KL")
    kl_in: KlIn = setting("loss", "where the KL is added: to the loss, or subtracted from the reward")

    def __post_init__(self) -> None:
        _ = self.all_params  # checks name and parameters
        if not self.behavior_cap >= 1:
            raise ValueError(
                f"loss.behavior_cap={self.behavior_cap} must be at least 1, the weight of a token on which engine and "
                f"learner agree; inf is no cap"
            )
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"loss.kl_coef={self.kl_coef} must be a finite number, 0 or more")
        if self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError(
                "loss.kl_estimator=k1 with loss.kl_in=loss pulls nowhere: the gradient of k1 is zero in expectation; "
                "use k2 or k3, or loss.kl_in=reward"
            )

    @cached_property
    def all_params(self) -> dict[str, float]:
        """All parameters of a shipped loss, with defaults; for your function, the ones that are set."""
        if self.is_own:
            return dict(self.params)
        if self.name not in PARAMS:
            raise ValueError(f"loss.name={self.name} is none of {', '.join(PARAMS)}, nor path/to/file.py:function")
        check_names(self.name, self.params, [param.name for param in fields(PARAMS[self.name])])
        return asdict(PARAMS[self.name](**self.params))

    @property
    def is_own(self) -> bool:
        """Whether `name` is the user's function."""
        return ".py:" in self.name

    @property
    def needs_sequences(self) -> bool:
        return self.name in OF_SEQUENCES or self.is_own

    def filled(self) -> "LossConfig":
        """A copy with every parameter filled in."""
        return replace(self, params=self.all_params)


def check_names(loss: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError for a name that is not a parameter of the loss."""
    for name in given:
        if name not in known:
            raise ValueError(
                f"loss.params.{name} is not a parameter of loss.name={loss}, which has {', '.join(known) or 'none'}"
            )


@dataclass(frozen=True)
class MismatchConfig:
    max_kl: float = setting(
        0.1,
        "largest mean KL between engine and learner in a step: above it the run stops, above a tenth of "
        "it a line in the log warns. inf: no check",
    )

    def __post_init__(self) -> None:
        if not self.max_kl > 0:
            raise ValueError(f"mismatch.max_kl={self.max_kl} must be above 0; inf turns the check off")

    @property
    def warn_kl(self) -> float:
        return self.max_kl / 10


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = setting(2e-6, "peak learning rate; published")
    schedule: Schedule = setting("constant", "cosine: decay to 0 at the last step")
    warmup_frac: float = setting(0.0, "fraction of the steps in which the learning rate rises from 0")
    weight_decay: float = setting(0.01, "AdamW's decoupled weight decay; published")
    max_grad_norm: float = setting(1.0, "longer gradients are scaled down to this norm; published")
    offload: bool = setting(
        False,
        "keep optimizer moments and reference in host memory during the backward pass; saves 10 bytes per parameter",
    )
    train_vision: bool = setting(False, "train the vision tower too; the published recipe does not")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be greater than 0")
        if not 0 <= self.warmup_frac < 1:
            raise ValueError(f"optim.warmup_frac={self.warmup_frac} must be 0 or more and below 1")
