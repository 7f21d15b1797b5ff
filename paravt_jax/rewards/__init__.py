"""Text into rewards: the terms of R, the comparison of answers, the judge of open ones, terms of your own."""

from paravt_jax.rewards.grammar import Place
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import OwnTerm, RewardTerms, reward_terms

__all__ = ["OwnTerm", "Place", "RewardConfig", "RewardTerms", "reward_terms"]
