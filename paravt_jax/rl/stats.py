"""The numbers of a step's episodes, as hosts exchange them; tokens, texts and frames stay on the host that samples.

With these records every host knows all groups of a step: it normalizes, decides and logs as a single host would.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paravt_jax.learner.advantages import GroupAdvantages, GroupRewards
from paravt_jax.rewards.terms import RewardTerms
from rollout.episode import Episode


@dataclass(frozen=True)
class EpisodeStats:
    """An episode's numbers for metrics, as JSON values; reward terms are None without a score."""

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


def advantages_record(advantages: GroupAdvantages) -> dict[str, Any]:
    """A group's advantages for other hosts; the advantages of tags stay on the host that samples."""
    return {
        "sequence": advantages.sequence.tolist(),
        "keep": advantages.keep.tolist(),
        "num_missing": advantages.num_missing,
        "has_spread": advantages.has_spread,
        "unit": advantages.unit,
    }


def advantages_from_record(record: Mapping[str, Any]) -> GroupAdvantages:
    sequence, keep = np.array(record["sequence"], float), np.array(record["keep"], bool)
    numbers = {name: record[name] for name in ("num_missing", "has_spread", "unit")}
    return GroupAdvantages(sequence=sequence, anchor=np.zeros_like(sequence), properties={}, keep=keep, **numbers)


def rewards_record(rewards: GroupRewards) -> dict[str, Any]:
    anchors = {name: values.tolist() for name, values in rewards.anchors.items()}
    present, total = rewards.present.tolist(), rewards.total.tolist()
    return {"present": present, "total": total, "anchors": anchors, "anchor_scale": rewards.anchor_scale}


def rewards_from_record(record: Mapping[str, Any]) -> GroupRewards:
    anchors = {name: np.array(values, float) for name, values in record["anchors"].items()}
    present, total = np.array(record["present"], bool), np.array(record["total"], float)
    return GroupRewards(present, total, anchors, record["anchor_scale"])
