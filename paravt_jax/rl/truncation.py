"""Episodes that were cut off, by the length of a turn or by the context, and what length costs."""

from paravt_jax.rewards.terms import LENGTH, OwnTerm
from rollout.episode import Episode

SOFT_FRAC = 0.2  # of a turn's tokens, in which soft takes effect; DAPO's 4096 of 20480 (arXiv 2503.14476)


def is_cut_off(episode: Episode) -> bool:
    return episode.finish != "done"


def length_term(episode: Episode, max_new_tokens: int) -> OwnTerm:
    """What an episode's length costs, as a term of its reward."""
    return OwnTerm(LENGTH, length_penalty(episode, max_new_tokens))


def length_penalty(episode: Episode, max_new_tokens: int) -> float:
    """DAPO's: from 0 down to −1 as the longest turn nears what a turn may have; −1 where the episode was cut off."""
    if is_cut_off(episode):
        return -1.0
    sampled = episode.ledger.sampled_mask
    longest = max((int(sampled[slice(*turn.token_span)].sum()) for turn in episode.turns), default=0)
    return -max(0.0, 1 - (max_new_tokens - longest) / (SOFT_FRAC * max_new_tokens))
