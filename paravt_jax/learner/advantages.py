"""Computes the advantages of a group: one part for every sampled token, one only for structural tokens.

    A_seq    = (R without the anchor − mean) / (std + ε)    at every sampled token
    A_anchor = (R_anchor − mean) / (std + ε)                added with weight λ · w_fmt at the tokens of struct(o)

DIFFERS on request: `advantage.credit=span` splits A_anchor by property of R_anchor, so that each property adds to its
own tokens; the splits sum to A_anchor. `advantage.credit=likelihood` has no A_anchor: the loss gets −λ · w_fmt · log π
at the tokens of struct(o) of every episode, regardless of its reward.

Mean and std cover the rollouts that have a reward. Every std divides by n, not n − 1, so the unit does not depend on
missing rollouts, and a group of two has advantages of ±1. DIFFERS on request: `advantage.normalise=tokens` follows the
release: a group's std divides by n − 1, and the advantages of all loss tokens of the step are normalized again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.terms import RewardTerms

EPSILON = 1e-6  # added to the std
TOKENS_EPSILON = 1e-5  # added to the std over all tokens, as in the release
MAX_TOKEN_KL = 10.0  # bound of each token's KL in the returns, as in the release
ROUNDING = 1e-8  # smaller differences between rewards are rounding


@dataclass(frozen=True, eq=False)
class GroupRewards:
    """The rewards of a group: the total without R_anchor, and R_anchor by property."""

    present: Bool[np.ndarray, " G"]  # False = missing
    total: Float[np.ndarray, " G"]  # with advantage.credit=sequence it includes the anchor
    anchors: Mapping[str, Float[np.ndarray, " G"]]
    anchor_scale: float  # λ · w_fmt

    def __post_init__(self) -> None:
        for name, values in (("R", self.total), *self.anchors.items()):
            if not np.isfinite(values[self.present]).all():
                raise ValueError(f"{name} must be finite in every episode with a reward, got {values.tolist()}")

    @property
    def anchor(self) -> Float[np.ndarray, " G"]:
        return sum(self.anchors.values(), np.zeros(len(self.present)))


@dataclass(frozen=True)
class EpisodeAdvantage:
    """The advantages of one episode's tokens."""

    sequence: float  # for every sampled token
    anchor: float = 0.0  # added at structural tokens
    properties: Mapping[str, float] = field(default_factory=dict)  # added at the tokens of each property
    likelihood: float = 0.0  # weight of the log-likelihood of structural tokens


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """The advantages of a group. Missing episodes and parts without spread have zero."""

    sequence: Float[np.ndarray, " G"]
    anchor: Float[np.ndarray, " G"]  # for all structural tokens, scaled by λ · w_fmt
    properties: Mapping[str, Float[np.ndarray, " G"]]  # the same for the tokens of each property
    keep: Bool[np.ndarray, " G"]  # True = the episode's tokens are loss tokens, which count in N
    has_spread: bool
    unit: float  # advantage per unit of reward above the group's mean
    likelihood: float = 0.0  # weight of the log-likelihood of structural tokens

    def of(self, number: int) -> EpisodeAdvantage:
        properties = {name: float(values[number]) for name, values in self.properties.items()}
        sequence, anchor = float(self.sequence[number]), float(self.anchor[number])
        return EpisodeAdvantage(sequence, anchor, properties, self.likelihood)


def group_rewards(
    terms_of: Sequence[RewardTerms | None], *, anchor_scale: float, config: AdvantageConfig
) -> GroupRewards:
    """Splits the reward terms of a group's episodes, None if missing. `anchor_scale` is λ · w_fmt.

    DIFFERS: the reward without the anchor is not R − λ · w_fmt · R_anchor. If R_fmt is at its bound of 1, that
    difference would punish the episodes with the best structure.
    """
    within = config.credit == "sequence"  # the anchor is part of R
    total, anchors = np.zeros(len(terms_of)), {}
    for number, earned in enumerate(terms_of):
        if earned is None:
            continue
        summands = earned.summands if within else earned.summands_without_anchor
        total[number] = min(config.max_reward, math.fsum(summand.reward for summand in summands))
        for anchor in earned.anchors:
            anchors.setdefault(anchor.name, np.zeros(len(terms_of)))[number] = anchor.value
    present = np.array([earned is not None and not earned.missing for earned in terms_of])
    return GroupRewards(present, total, anchors, 0.0 if within else anchor_scale)


def group_advantages(
    group: GroupRewards, config: AdvantageConfig, step: Sequence[GroupRewards] = ()
) -> GroupAdvantages:
    """The advantages of a group. `step` has all groups of the step; only normalise=batch uses it.

    A group has spread if any part has: with equal rewards and different anchors the group still trains the structure.
    With credit=likelihood it trains the structure even without spread.
    """
    has_spread, peers = _has_spread(group, config), [group]
    if config.normalise == "batch" and step:
        peers = [peer for peer in step if _has_spread(peer, config) or not config.filter_zero_variance]
    scale = _divisor([(peer.present, peer.total) for peer in peers], config)
    sequence = _group_relative(group.total, group.present, scale, config)
    by_property, by_likelihood = config.credit == "span", config.credit == "likelihood"
    likelihood = group.anchor_scale if by_likelihood else 0.0
    anchor_unit = _divisor([(peer.present, peer.anchor) for peer in peers], config)

    def of_anchor(values: np.ndarray) -> np.ndarray:
        return group.anchor_scale * _group_relative(values, group.present, anchor_unit, config)

    return GroupAdvantages(
        sequence=sequence,
        anchor=of_anchor(np.zeros_like(sequence) if by_property or by_likelihood else group.anchor),
        properties={name: of_anchor(values) for name, values in group.anchors.items()} if by_property else {},
        keep=group.present & (has_spread or not config.filter_zero_variance or bool(likelihood)),
        has_spread=has_spread,
        unit=_leave_one_out(group.present, config) / scale,
        likelihood=likelihood,
    )


def relative_penalties(
    penalties: Float[np.ndarray, " e"], group: Int[np.ndarray, " e"], units: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " e"]:
    """The KL penalties of episodes relative to their group's mean, in units of advantage (`GroupAdvantages.unit`).

    `group` is the number of each episode's group. The penalty is a part of R, so its group mean is subtracted like the
    mean of R: a KL that all episodes of a group share favors none of them. The std excludes the penalty, because the
    std of penalized rewards would turn a KL of 1e-4 into an advantage of 1 if the rewards are equal.
    """
    means = np.bincount(group, penalties, len(units)) / np.maximum(np.bincount(group, minlength=len(units)), 1)
    return (penalties - means[group]) * units[group]


def with_kl_penalty(
    advantage: Float[np.ndarray, "*t"], loss_mask: Bool[np.ndarray, "*t"], penalty: Float[np.ndarray, "*t"] | float
) -> Float[np.ndarray, "*t"]:
    """Subtracts a KL penalty (see `relative_penalties`) from the advantages of loss tokens."""
    return np.where(loss_mask, advantage - np.float32(penalty), 0.0).astype(np.float32)


def kl_sums(
    kl: Float[np.ndarray, "*t"], loss_mask: Bool[np.ndarray, "*t"], dialogue: Int[np.ndarray, "*t"], num: int
) -> Float[np.ndarray, " E"]:
    """The KL of each dialogue 0 … num − 1, summed over its loss tokens."""
    return np.bincount(dialogue[loss_mask], kl[loss_mask], num).astype(np.float64)  # integers without loss tokens


def kl_to_go(
    kl: Float[np.ndarray, "*t"], loss_mask: Bool[np.ndarray, "*t"], dialogue: Int[np.ndarray, "*t"]
) -> Float[np.ndarray, "*t"]:
    """For each loss token, the KL summed from this token to the end of its dialogue.

    This is a return with discount 1. A dialogue's tokens are in order, but may be interleaved with other dialogues.
    """
    order = np.argsort(dialogue, axis=None, kind="stable")
    values = np.where(loss_mask, np.clip(kl, -MAX_TOKEN_KL, MAX_TOKEN_KL), 0.0).ravel()[order]
    from_here = np.append(np.cumsum(values[::-1], dtype=np.float64)[::-1], 0.0)  # sums to the end of the last dialogue
    ids = dialogue.ravel()[order]
    to_go = np.zeros(kl.size)
    to_go[order] = from_here[:-1] - from_here[np.searchsorted(ids, ids, side="right")]
    return np.where(loss_mask, to_go.reshape(kl.shape), 0.0)


class Moments(NamedTuple):
    """The number of values, their mean, and the sum of squared distances from the mean. Moments can be merged."""

    num: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " n"]) -> "Moments":
        mean = float(values.mean(dtype=np.float64)) if len(values) else 0.0
        return cls(float(len(values)), mean, float(np.square(values - mean, dtype=np.float64).sum()))

    @classmethod
    def of_all(cls, parts: Sequence["Moments"]) -> "Moments":
        num = math.fsum(part.num for part in parts)
        mean = math.fsum(part.num * part.mean for part in parts) / max(num, 1.0)
        return cls(num, mean, math.fsum(part.squares + part.num * (part.mean - mean) ** 2 for part in parts))

    def normalised(
        self, advantage: Float[np.ndarray, "*t"], loss_mask: Bool[np.ndarray, "*t"]
    ) -> Float[np.ndarray, "*t"]:
        """Normalizes advantages to mean 0 and std 1 over all loss tokens of the step; the std divides by n − 1."""
        std = math.sqrt(self.squares / max(self.num - 1, 1.0))
        return np.where(loss_mask, (advantage - self.mean) / (std + TOKENS_EPSILON), 0.0).astype(np.float32)


def token_advantages(
    sequence: float, anchor: Float[np.ndarray, " n"], sampled_mask: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The advantages of an episode's tokens; 0 for tokens that were not sampled."""
    return np.where(sampled_mask, sequence + anchor, 0.0).astype(np.float32)


def _has_spread(group: GroupRewards, config: AdvantageConfig) -> bool:
    parts = [group.total]
    if group.anchor_scale and config.credit != "likelihood":
        parts += [*group.anchors.values()] if config.credit == "span" else [group.anchor]
    return any(_spread(values, group.present) for values in parts)


def _spread(values: Float[np.ndarray, " G"], present: Bool[np.ndarray, " G"]) -> bool:
    return bool(present.any() and np.ptp(values[present]) > ROUNDING)


def _group_relative(
    values: Float[np.ndarray, " G"], present: Bool[np.ndarray, " G"], scale: float, config: AdvantageConfig
) -> Float[np.ndarray, " G"]:
    """Values minus the group's mean, scaled. Exactly zero without spread, where only rounding errors would remain."""
    if not _spread(values, present):
        return np.zeros(values.shape)
    return np.where(present, _leave_one_out(present, config) * (values - values[present].mean()) / scale, 0.0)


def _leave_one_out(present: Bool[np.ndarray, " G"], config: AdvantageConfig) -> float:
    """The factor that turns distances from the group's mean into distances from the mean of the other episodes."""
    num_present = np.count_nonzero(present)
    return num_present / (num_present - 1) if config.normalise == "loo" and num_present > 1 else 1.0


def _divisor(groups: Sequence[tuple[np.ndarray, np.ndarray]], config: AdvantageConfig) -> float:
    """The divisor of advantages: the std of distances from the group mean over these groups.

    It is 1 without normalization, and if no group has a spread.
    """
    if config.normalise in ("none", "loo"):
        return 1.0
    distances = [values[present] - values[present].mean() for present, values in groups if present.any()]
    joined = np.concatenate([np.zeros(0), *distances])
    if not np.any(np.abs(joined) > ROUNDING):
        return 1.0
    return float(joined.std(ddof=int(config.normalise == "tokens"))) + EPSILON
