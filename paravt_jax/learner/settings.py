"""The settings of the learner. They stand apart from what they set, so that reading a config loads no jax."""

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, get_args

Anchor = Literal["closings", "openings", "turn_end"]
ANCHORS = get_args(Anchor)
CreditKind = Literal["span", "token", "sequence"]
Normalise = Literal["std", "batch", "none", "loo"]
BehaviorCorrection = Literal["mask", "truncate", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]
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


MAX_SEQUENCE_CLIP = 0.05  # ours: far above what GSPO publishes, far below any clip of tokens


@dataclass(frozen=True)
class TokenClip:
    """Ratios of tokens from 1 - clip_low to 1 + clip_high move the policy, beyond it is clipped."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"loss.numbers.clip_low={self.clip_low} must be above 0 and below 1: ratios are positive")
        if not 0 < self.clip_high < math.inf:
            raise ValueError(f"loss.numbers.clip_high={self.clip_high} must be a finite number above 0")


@dataclass(frozen=True)
class ClipHigher(TokenClip):
    """Rare tokens have more room to grow than to shrink."""

    clip_high: float = 0.28  # published (arXiv 2503.14476)


@dataclass(frozen=True)
class SequenceClip(TokenClip):
    """Of ratios of whole sequences, which are geometric means over their tokens and so far closer to 1."""

    clip_low: float = 3e-4  # published (arXiv 2507.18071)
    clip_high: float = 4e-4  # likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_low", "clip_high"):
            if getattr(self, name) > MAX_SEQUENCE_CLIP:
                raise ValueError(
                    f"loss.numbers.{name}={getattr(self, name)} is a clip for tokens, and with loss.kind=gspo would "
                    f"clip nothing: the ratio of a sequence is a mean over its tokens. Published are 3e-4 and 4e-4; "
                    f"at most {MAX_SEQUENCE_CLIP}"
                )


@dataclass(frozen=True)
class RatioCap:
    max_ratio: float = 5.0  # of ScaleRL (arXiv 2510.13786); MiniMax-M1 does not say its own

    def __post_init__(self) -> None:
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(
                f"loss.numbers.max_ratio={self.max_ratio} must be a finite number of at least 1, the ratio of a token "
                f"on which nothing has changed"
            )


NUMBERS = {  # of each kind of loss, see `learner/variants.py`
    "para_grpo": TokenClip,
    "grpo": TokenClip,
    "dapo": ClipHigher,
    "dr_grpo": TokenClip,
    "gspo": SequenceClip,
    "cispo": RatioCap,
}
OF_SEQUENCES = ("grpo", "gspo")  # kinds that look at whole sequences
NAMES = tuple(dict.fromkeys(number.name for numbers in NUMBERS.values() for number in fields(numbers)))


@dataclass(frozen=True)
class LossConfig:
    """What is made smaller: the objective of a kind, and what every kind has beside it."""

    # para_grpo | grpo | dapo | dr_grpo | gspo | cispo, or path/to/file.py:function of your own, see docs/training.md
    kind: str = "para_grpo"
    # of the kind, such as {clip_low: 0.2, clip_high: 0.28}, or of your function; what is left out has its default
    numbers: dict[str, float] = field(default_factory=dict, hash=False, metadata={"entries": NAMES})
    behavior_correction: BehaviorCorrection = "mask"  # truncate: min(w, cap); none: w = 1
    behavior_cap: float = 5.0  # published
    geometric_mask: bool = False  # leaves out sequences whose geometric mean of w is outside the bounds
    geometric_low: float = 0.9  # ours: a tenth per token, over a whole sequence, is another policy
    geometric_high: float = 1.1  # likewise
    kl_coef: float = 0.01  # published
    kl_estimator: KlEstimator = "k3"  # GRPO's; k2 has the exact gradient of KL(policy‖ref)
    kl_in: KlIn = "loss"  # reward: see `kl_penalties`

    def __post_init__(self) -> None:
        _ = self.all_numbers  # which checks kind and numbers
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

    @cached_property
    def all_numbers(self) -> dict[str, float]:
        """Those of the kind, the ones left out at their defaults; of one's own function, those that are set."""
        if self.is_own:
            return dict(self.numbers)
        if self.kind not in NUMBERS:
            raise ValueError(f"loss.kind={self.kind} is none of {', '.join(NUMBERS)}, nor path/to/file.py:function")
        check_names(self.kind, self.numbers, [number.name for number in fields(NUMBERS[self.kind])])
        return asdict(NUMBERS[self.kind](**self.numbers))

    @property
    def is_own(self) -> bool:
        """Is it a function of the user's?"""
        return ".py:" in self.kind

    @property
    def needs_sequences(self) -> bool:
        return self.kind in OF_SEQUENCES or self.is_own or self.geometric_mask

    def filled(self) -> "LossConfig":
        """The same, every number said."""
        return replace(self, numbers=self.all_numbers)


def check_names(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Are these numbers of the loss?"""
    for name in given:
        if name not in known:
            raise ValueError(
                f"loss.numbers.{name} is no number of loss.kind={kind}, which has {', '.join(known) or 'none'}"
            )


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
    offload: bool = False  # moments and reference to the host's memory while gradients are made, 10 bytes a parameter
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
