"""Rewards of a group into advantages: one part for every sampled token, one for the tokens of the structure alone.

    A_seq    = (R without the anchor − mean) / (std + ε)    at every sampled token
    A_anchor = (R_anchor − mean) / (std + ε)                added with weight λ · w_fmt at the tokens of struct(o)

Mean and std are those of the members that have a reward. Every std here is the population's (divided by n, not n − 1):
a part is then measured in the same unit whether or not members are missing, and a group of two has advantages of ±1.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from paravt_jax.learner.settings import AdvantageConfig

ROUNDING = 1e-8  # rewards closer than this are equal: the same credits added up in another order


@dataclass(frozen=True, eq=False)
class GroupAdvantages:
    """What each episode earned relative to its group; zero for a missing one and in a part without spread."""

    sequence: Float[np.ndarray, " G"]
    anchor: Float[np.ndarray, " G"]  # λ · w_fmt included
    keep: Bool[np.ndarray, " G"]  # True = its tokens are loss tokens; the others give no gradient and do not count in N
    num_missing: int
    has_spread: bool
    unit: float  # of advantage in a reward of 1


def group_advantages(
    rewards: Float[np.ndarray, " G"],
    rewards_without_anchor: Float[np.ndarray, " G"],
    anchors: Float[np.ndarray, " G"],
    *,
    anchor_scale: float,
    config: AdvantageConfig,
) -> GroupAdvantages:
    """The advantages of a group; NaN among `rewards` marks a missing episode; `anchor_scale` is λ · w_fmt.

    Under token credit a group is without spread when neither part has any: where all anchors differ but not the rest,
    it still teaches its structure.

    DIFFERS: the reward without the anchor is passed in, not formed as R − λ · w_fmt · R_anchor. The two differ where
    R_fmt has reached its bound of 1; there the difference would punish the episodes with the best structure.
    """
    present = ~np.isnan(rewards)
    by_token = config.credit == "token"
    base = rewards_without_anchor if by_token else rewards
    anchor_scale = anchor_scale if by_token else 0.0
    for name, values in (("rewards", base), ("anchors", anchors)):
        if not np.isfinite(values[present]).all():
            raise ValueError(f"{name} of episodes that have a reward must be finite, got {values[present].tolist()}")
    has_spread = _spread(base, present) or (anchor_scale != 0 and _spread(anchors, present))
    return GroupAdvantages(
        sequence=_relative(base, present, config),
        anchor=anchor_scale * _relative(anchors, present, config),
        keep=present & (has_spread or not config.filter_zero_variance),
        num_missing=int(np.count_nonzero(~present)),
        has_spread=has_spread,
        unit=1 / _scale(base, present, config),
    )


def with_kl_penalty(
    advantage: Float[np.ndarray, " n"], sampled_mask: Bool[np.ndarray, " n"], kl_penalty: float, unit: float
) -> Float[np.ndarray, " n"]:
    """The advantages of an episode whose reward is less by its KL, with its group's mean and std as they were.

    The KL of every episode is another, so a std of penalised rewards would blow up a KL of 1e-4 to an advantage of 1
    where the rewards themselves are equal.
    """
    return np.where(sampled_mask, advantage - np.float32(kl_penalty * unit), 0.0).astype(np.float32)


def token_advantages(
    sequence: float, anchor: float, sampled_mask: Bool[np.ndarray, " n"], struct_mask: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """The advantages of an episode's tokens; those that the policy did not sample have none."""
    return np.where(sampled_mask, sequence + anchor * struct_mask, 0.0).astype(np.float32)


@dataclass(frozen=True)
class TokenMoments:
    """Sums over loss tokens, which hosts and parts of a step add up before anyone normalises."""

    num_tokens: int
    total: float
    total_squared: float

    def __add__(self, other: "TokenMoments") -> "TokenMoments":
        return TokenMoments(
            self.num_tokens + other.num_tokens, self.total + other.total, self.total_squared + other.total_squared
        )


def token_moments(advantage: Float[np.ndarray, " n"], loss_mask: Bool[np.ndarray, " n"]) -> TokenMoments:
    """The moments of the advantages of the tokens that count."""
    kept = advantage[loss_mask].astype(np.float64)
    return TokenMoments(len(kept), float(kept.sum()), float(np.square(kept).sum()))


def batch_normalised(
    advantage: Float[np.ndarray, " n"], loss_mask: Bool[np.ndarray, " n"], moments: TokenMoments, epsilon: float
) -> Float[np.ndarray, " n"]:
    """(A − mean) / (std + ε) at loss tokens, zero elsewhere; `moments` are those of the whole step.

    The mean is over tokens, so that it is not zero where long episodes did better or worse than short ones. A group
    without spread therefore gets a gradient from it, unless its tokens are no loss tokens (`filter_zero_variance`).
    """
    if not moments.num_tokens:
        return np.zeros(advantage.shape, np.float32)
    mean = moments.total / moments.num_tokens
    std = math.sqrt(max(moments.total_squared / moments.num_tokens - mean**2, 0.0))
    return np.where(loss_mask, (advantage - mean) / (std + epsilon), 0.0).astype(np.float32)


def _spread(values: Float[np.ndarray, " G"], present: Bool[np.ndarray, " G"]) -> bool:
    return bool(present.any() and np.ptp(values[present]) > ROUNDING)


def _relative(
    values: Float[np.ndarray, " G"], present: Bool[np.ndarray, " G"], config: AdvantageConfig
) -> Float[np.ndarray, " G"]:
    """Each member against its group; exactly zero without spread, where the rest would be rounding over ε."""
    if not _spread(values, present):
        return np.zeros(values.shape)
    return np.where(present, (values - values[present].mean()) / _scale(values, present, config), 0.0)


def _scale(values: Float[np.ndarray, " G"], present: Bool[np.ndarray, " G"], config: AdvantageConfig) -> float:
    """What a distance from the mean is divided by: no spread, no std."""
    if config.normalise == "none" or not _spread(values, present):
        return 1.0
    return float(values[present].std()) + config.epsilon
