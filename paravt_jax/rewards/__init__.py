"""Text into rewards: the terms of R, the comparison of answers, the judge of open ones."""

from paravt_jax.rewards.terms import RewardConfig, RewardTerms, reward_terms

__all__ = ["RewardConfig", "RewardTerms", "reward_terms"]
