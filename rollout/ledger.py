"""An agent's dialogue as token ids, which the engine and the learner share.

Ids are appended and never rebuilt from text. The engine continues all ids so far, and the learner trains on the same
ids. Each segment records its source: the prompt, a prefix forced on the assistant, the policy (with log-probs and
version) or the environment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollout.engine.protocol import Generation
from rollout.picture import Picture

Kind = Literal["prompt", "forced", "sampled", "environment"]


@dataclass(frozen=True, eq=False)
class Segment:
    """Ids from one source. Sampled ids have log-probs and a policy version, others do not."""

    kind: Kind
    ids: np.ndarray  # int32; a picture is one placeholder
    pictures: tuple[Picture, ...] = ()
    behavior_logp: np.ndarray | None = None  # one for each sampled id
    version: int | None = None  # the policy version that sampled the ids

    def __post_init__(self) -> None:
        sampled = self.kind == "sampled"
        if sampled != (self.behavior_logp is not None) or sampled != (self.version is not None):
            raise ValueError(f"only sampled segments, and all of them, have log-probs and a version, got {self.kind}")
        if self.behavior_logp is not None and len(self.behavior_logp) != len(self.ids):
            raise ValueError(f"{len(self.ids)} sampled ids have {len(self.behavior_logp)} log-probs")

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": self.kind, "ids": self.ids.tolist()}
        if self.pictures:
            record["pictures"] = [{"key": picture.key, "size_px": picture.size_px} for picture in self.pictures]
        if self.behavior_logp is not None:
            record["behavior_logp"] = [float(f"{logp:.9g}") for logp in self.behavior_logp]
            record["version"] = self.version
        return record


@dataclass
class Ledger:
    """An agent's dialogue as segments, in order."""

    segments: list[Segment] = field(default_factory=list)
    num_reported: int = 0  # sampled tokens as counted by an endpoint, which returns no ids
    sent: str = ""  # a hash of all requests to an endpoint
    experts: np.ndarray | None = None  # from the last generation, for all tokens but its last

    def add(self, kind: Kind, ids: np.ndarray, pictures: Sequence[Picture] = ()) -> None:
        """Adds a segment, unless it has no ids."""
        if len(ids):
            self.segments.append(Segment(kind, np.asarray(ids, np.int32), tuple(pictures)))

    def add_sampled(self, generation: Generation) -> None:
        """Adds a segment for each run of consecutive tokens with the same policy version."""
        self.experts = generation.experts
        changes = np.flatnonzero(np.diff(generation.versions)) + 1
        pieces = (
            np.split(values, changes) for values in (generation.ids, generation.behavior_logp, generation.versions)
        )
        for ids, logp, versions in zip(*pieces, strict=True):
            if len(ids):
                self.segments.append(Segment("sampled", np.asarray(ids, np.int32), (), logp, int(versions[0])))

    @property
    def ids(self) -> np.ndarray:
        """All ids of the dialogue, int32."""
        return np.concatenate([np.zeros(0, np.int32), *(segment.ids for segment in self.segments)])

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures of all placeholders, in order."""
        return tuple(picture for segment in self.segments for picture in segment.pictures)

    @property
    def sampled(self) -> Iterator[Segment]:
        return (segment for segment in self.segments if segment.kind == "sampled")

    @property
    def num_sampled(self) -> int:
        """The number of sampled tokens, also of those that an endpoint only reported."""
        return self.num_reported + sum(len(segment.ids) for segment in self.sampled)

    @property
    def sampled_mask(self) -> np.ndarray:
        """True for ids that the policy sampled."""
        kinds = [np.full(len(segment.ids), segment.kind == "sampled") for segment in self.segments]
        return np.concatenate([np.zeros(0, bool), *kinds])

    @property
    def behavior_logp(self) -> np.ndarray:
        """The log-prob of each id; 0 for ids that the policy did not sample."""
        logps = [
            np.zeros(len(segment.ids)) if segment.behavior_logp is None else segment.behavior_logp
            for segment in self.segments
        ]
        return np.concatenate([np.zeros(0), *logps]).astype(np.float32)

    def num_tokens_each(self, image_id: int, token_px: int) -> np.ndarray:
        """Returns how many tokens each id expands to: several for a picture's placeholder, unless it was sampled."""
        counts = np.ones(len(self.ids), np.int64)
        is_picture = (self.ids == image_id) & ~self.sampled_mask
        counts[is_picture] = [picture.num_tokens(token_px) for picture in self.pictures]
        return counts

    def to_record(self) -> list[dict[str, Any]]:
        return [segment.to_record() for segment in self.segments]
