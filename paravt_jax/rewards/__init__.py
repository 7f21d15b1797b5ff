"""Rewards: the terms of R, answer comparison, the judge for open answers, and your own terms."""

from paravt_jax.rewards.grammar import Place
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import OwnTerm, RewardTerms, reward_terms

__all__ = ["OwnTerm", "Place", "RewardConfig", "RewardTerms", "reward_terms"]
