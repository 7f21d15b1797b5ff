"""Which episodes an update used: read from its packed rows, without the code that packed them, and held to the log."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paravt_jax.learner.learner import StepPart


class Learnt(NamedTuple):
    """The sampled tokens of one dialogue, as a batch or the log has them."""

    ids: bytes  # int32
    logps: bytes  # float32, under the policy that sampled them

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


def unaccounted(
    step: int,
    episodes: Iterable[Mapping[str, Any]],
    parts: Iterable[StepPart],
    visual_ids: Collection[int],
    subagents: bool,
) -> list[str]:
    """Dialogues of a step that the update left out, used twice, or that the log does not have.

    A dialogue ends for the learner with the first of `visual_ids` that was sampled: it shows nothing.
    """
    names: dict[Learnt, str] = {}
    wanted: Counter[Learnt] = Counter()
    for name, one in _in_log(episodes, visual_ids, subagents):
        names[one] = name
        wanted[one] += 1
    used = Counter(one for part in parts for one in _in_batches(part))
    return [
        f"step {step}: the update used {used[one]} times the {one.num_tokens} tokens of "
        f"{names.get(one, 'a dialogue that the log does not have')}, expected {wanted[one]}"
        for one in {**wanted, **used}
        if used[one] != wanted[one]
    ]


def _in_log(
    episodes: Iterable[Mapping[str, Any]], visual_ids: Collection[int], subagents: bool
) -> Iterator[tuple[str, Learnt]]:
    for episode in episodes:
        if episode["advantage"]["keep"]:
            reports = [call["segments"] for turn in episode["turns"] for call in turn["calls"] if call["segments"]]
            for segments in [episode["segments"], *(reports if subagents else [])]:
                sampled = [segment for segment in segments if segment["kind"] == "sampled"]
                ids = [number for segment in sampled for number in segment["ids"]]
                logps = [logp for segment in sampled for logp in segment["behavior_logp"]]
                end = next((place + 1 for place, number in enumerate(ids) if number in visual_ids), len(ids))
                if ids:
                    yield episode["id"], _learnt(ids[:end], logps[:end])


def _in_batches(part: StepPart) -> Iterator[Learnt]:
    for batch in part.batches:
        source, target, mask, logp, dialogue = (
            np.asarray(array)
            for array in (batch.source, batch.target, batch.loss_mask, batch.behavior_logp, batch.dialogue)
        )
        for row, number in sorted(set(zip(np.nonzero(mask)[0].tolist(), dialogue[mask].tolist(), strict=True))):
            own = np.flatnonzero(mask[row] & (dialogue[row] == number))
            own = own[np.argsort(source[row, own], kind="stable")]
            yield _learnt(target[row, own], logp[row, own])


def _learnt(ids: Sequence[int] | np.ndarray, logps: Sequence[float] | np.ndarray) -> Learnt:
    return Learnt(np.asarray(ids, np.int32).tobytes(), np.asarray(logps, np.float32).tobytes())
