"""Episodes that are cut off, by a turn's length or by the context, and the length penalty of `train.truncated=soft`."""

from rollout.records import Episode

SOFT_FRAC = 0.2  # the last part of a turn's tokens, which is penalized; DAPO has 4096 of 20480 (arXiv 2503.14476)


def is_cut_off(episode: Episode) -> bool:
    return episode.finish != "done"


def length_penalty(episode: Episode, max_new_tokens: int) -> float:
    """DAPO's: falls from 0 to −1 as the longest turn approaches `max_new_tokens`; −1 for a cut-off episode."""
    if is_cut_off(episode):
        return -1.0
    sampled = episode.ledger.sampled_mask
    longest = max((int(sampled[slice(*turn.token_span)].sum()) for turn in episode.turns), default=0)
    return -max(0.0, 1 - (max_new_tokens - longest) / (SOFT_FRAC * max_new_tokens))
