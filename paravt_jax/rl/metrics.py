"""What a step's episodes were like, in numbers: those of the paper, by one fixed rule for every run."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paravt_jax.rewards.terms import OUTCOMES, RewardTerms
from paravt_jax.rl.rollouts import Group, Member
from rollout.chat import Chat
from rollout.ledger import Ledger


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    members = [member for group in groups for member in group.members]
    budgets = [group.frame_budget for group in groups]
    return {
        **{f"rollout/{name}": value for name, value in member_metrics(members).items()},
        "rollout/frame_budget_mean": float(np.mean(budgets)),
        "rollout/num_groups": float(len(groups)),
        "rollout/num_groups_without_spread": float(sum(not group.advantages.has_spread for group in groups)),
    }


def member_metrics(members: Sequence[Member]) -> dict[str, float]:
    """f_tau is `format_reward`, kappa `tool_calls_mean`. Missing episodes count in `num_missing` and nowhere else."""
    whole = [member for member in members if not member.missing]
    terms = [member.terms for member in whole if member.terms is not None]
    episodes = [member.episode for member in whole if member.episode is not None]

    def mean_term(of: Callable[[RewardTerms], float | None]) -> float:
        return _mean(value for value in map(of, terms) if value is not None)

    metrics = {
        "num_episodes": float(len(whole)),
        "num_missing": float(len(members) - len(whole)),
        "reward_mean": mean_term(lambda term: term.total),
        "reward_std": float(np.std([term.total for term in terms if term.total is not None])) if terms else 0.0,
        "accuracy_mean": mean_term(lambda term: term.accuracy),
        "anchor_mean": mean_term(lambda term: term.anchor),
        "tool_reward_mean": mean_term(lambda term: term.tool),
        "format_reward": _mean(member.format_reward for member in whole),
        "parseable_frac": mean_term(lambda term: float(term.parseable)),
        "tool_calls_mean": _mean(len(episode.calls) for episode in episodes),
        "tool_use_frac": _mean("ok" in episode.outcomes for episode in episodes),
        "turns_mean": _mean(len(episode.turns) for episode in episodes),
        "sampled_tokens_mean": _mean(episode.ledger.num_sampled for episode in episodes),
        "cut_off_frac": _mean(episode.finish != "done" for episode in episodes),
    }
    own: dict[str, list[float]] = {}  # of a plugin, and of the length
    for term in (term for of_episode in terms for term in of_episode.own):
        own.setdefault(f"reward_{term.name}_mean", []).append(term.value)
    metrics |= {name: _mean(values) for name, values in own.items()}
    outcomes = Counter(outcome for episode in episodes for outcome in episode.outcomes)
    return metrics | {f"calls_{outcome}": float(outcomes[outcome]) for outcome in OUTCOMES}


def staleness_mean(groups: Sequence[Group], version: int) -> float:
    """Of the sampled tokens: how many versions older than the policy that learns from them."""
    return _mean(
        version - segment.version
        for ledger in _ledgers(groups)
        for segment in ledger.sampled
        if segment.version is not None
        for _ in range(len(segment.ids))
    )


def num_tokens(groups: Sequence[Group], chat: Chat, token_px: int) -> int:
    """Tokens of all dialogues, sub-agents' included, as if nothing were shared."""
    return sum(int(ledger.num_tokens_each(chat.image_id, token_px).sum()) for ledger in _ledgers(groups))


def _ledgers(groups: Sequence[Group]) -> Iterable[Ledger]:
    for group in groups:
        for member in group.members:
            if member.episode is not None:
                yield from member.episode.ledgers


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else 0.0
