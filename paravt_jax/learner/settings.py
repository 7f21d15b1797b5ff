"""The learner's settings, in a module of plain dataclasses so that reading a config does not import jax."""

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

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
    # token: all structural tokens share the anchor's advantage; span: each property credits its tags, and a missing
    # tag the token at its position; sequence: the anchor stays inside R, as in the public release.
    credit: CreditKind = "token"
    # std: divide by the group's std, which favors groups that are nearly all right or all wrong; batch: by the step's
    # std; none: no division (Dr. GRPO); loo: no division, and the baseline is the mean of the other episodes.
    normalise: Normalise = "std"
    terms: Literal["together", "apart"] = "together"  # apart: normalize each term of R, then add them weighted
    filter_zero_variance: bool = True  # such groups have only a KL gradient, and would count in N

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

    # para_grpo | grpo | dapo | dr_grpo | gspo | cispo, or your path/to/file.py:function, see docs/training.md
    name: str = "para_grpo"
    # the loss's parameters, such as {clip_low: 0.2, clip_high: 0.28}; omitted ones keep their defaults
    params: dict[str, float] = field(default_factory=dict, hash=False, metadata={"entries": PARAM_NAMES})
    behavior_correction: BehaviorCorrection = "mask"  # truncate: min(w, cap); none: w = 1
    behavior_cap: float = 5.0  # published
    kl_coef: float = 0.01  # published
    kl_estimator: KlEstimator = "k3"  # GRPO's; k2 has the exact gradient of KL(policy‖ref)
    kl_in: KlIn = "loss"  # reward: see `kl_penalties`

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
    # Highest mean KL between engine and learner over a step's tokens. Above it the run stops; above a tenth of it the
    # run logs a warning. Our choice: two bf16 programs of the same weights differ by about 1e-3, and staleness adds.
    max_kl: float = 0.1

    def __post_init__(self) -> None:
        if not self.max_kl > 0:
            raise ValueError(f"mismatch.max_kl={self.max_kl} must be above 0; inf turns the check off")

    @property
    def warn_kl(self) -> float:
        return self.max_kl / 10


@dataclass(frozen=True)
class OptimConfig:
    learning_rate: float = 2e-6  # published; the schedule's peak
    schedule: Schedule = "constant"  # cosine: decays to 0 at the last step
    warmup_frac: float = 0.0  # fraction of the steps with linear warm-up from 0
    weight_decay: float = 0.01  # published; decoupled, as in AdamW
    max_grad_norm: float = 1.0  # published; larger gradients are scaled down to it
    offload: bool = False  # keep moments and reference in host memory during gradients; saves 10 bytes per parameter
    train_vision: bool = False  # the published recipe trains the language weights only

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must be greater than 0")
        if not 0 <= self.warmup_frac < 1:
            raise ValueError(f"optim.warmup_frac={self.warmup_frac} must be 0 or more and below 1")
