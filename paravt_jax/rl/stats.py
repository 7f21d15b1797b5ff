"""Statistics of a step's episodes, which hosts exchange; tokens, texts and frames stay on the host that sampled them.

With these records every host knows all groups of a step, so it normalizes, decides and logs as a single host would.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paravt_jax.rewards.terms import RewardTerms
from rollout.episode import Episode


@dataclass(frozen=True)
class EpisodeStats:
    """An episode's statistics for metrics, as JSON values. Reward terms are None without a score."""

    num_turns: int
    num_sampled: int
    cut_off: bool
    outcomes: Mapping[str, int]  # number of calls
    versions: Mapping[str, int]  # sampled tokens, sub-agents' included, by policy version
    total: float | None = None
    accuracy: float | None = None
    anchor: float | None = None
    tool: float | None = None
    parseable: bool | None = None
    own: tuple[tuple[str, float], ...] = ()  # plugin terms and the length penalty

    @property
    def num_executed(self) -> int:
        return self.outcomes.get("ok", 0)

    @classmethod
    def of(cls, episode: Episode, terms: RewardTerms | None) -> "EpisodeStats":
        versions = Counter[str]()
        for segment in (segment for ledger in episode.ledgers for segment in ledger.sampled):
            if segment.version is not None:
                versions[str(segment.version)] += len(segment.ids)
        stats: dict[str, Any] = {
            "num_turns": len(episode.turns),
            "num_sampled": episode.ledger.num_sampled,
            "cut_off": episode.finish != "done",
            "outcomes": dict(Counter(episode.outcomes)),
            "versions": dict(versions),
        }
        if terms is not None:
            stats |= {name: getattr(terms, name) for name in ("total", "accuracy", "anchor", "tool", "parseable")}
            stats["own"] = tuple((term.name, term.value) for term in terms.own)
        return cls(**stats)


def with_arrays(message: Any) -> Any:
    """Turns the lists in a message into arrays."""
    if isinstance(message, Mapping):
        return {name: with_arrays(value) for name, value in message.items()}
    return np.array(message) if isinstance(message, list) else message
