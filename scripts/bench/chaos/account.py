"""Compares the packed rows of an update with the log, without the code that packed them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paravt_jax.learner.learner import StepPart


class UsedTokens(NamedTuple):
    """The sampled tokens of a dialogue, from a batch or from the log."""

    ids: bytes  # int32
    logps: bytes  # float32, under the policy that sampled them

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4


def accounting_problems(
    step: int,
    episodes: Iterable[Mapping[str, Any]],
    parts: Iterable[StepPart],
    visual_ids: Collection[int],
    subagents: bool,
) -> list[str]:
    """Lists a step's dialogues that the update left out, used twice, or that are missing from the log.

    The learner cuts a dialogue after the first sampled token of `visual_ids`, which has no image.
    """
    names: dict[UsedTokens, str] = {}
    expected: Counter[UsedTokens] = Counter()
    for name, tokens in _in_log(episodes, visual_ids, subagents):
        names[tokens] = name
        expected[tokens] += 1
    used = Counter(tokens for part in parts for tokens in _in_batches(part))
    return [
        f"step {step}: the update used {used[tokens]} times the {tokens.num_tokens} tokens of "
        f"{names.get(tokens, 'a dialogue that is not in the log')}, expected {expected[tokens]}"
        for tokens in {**expected, **used}
        if used[tokens] != expected[tokens]
    ]


def _in_log(
    episodes: Iterable[Mapping[str, Any]], visual_ids: Collection[int], subagents: bool
) -> Iterator[tuple[str, UsedTokens]]:
    for episode in episodes:
        if episode["advantage"]["keep"]:
            reports = [call["segments"] for turn in episode["turns"] for call in turn["calls"] if call["segments"]]
            for segments in [episode["segments"], *(reports if subagents else [])]:
                sampled = [segment for segment in segments if segment["kind"] == "sampled"]
                ids = [number for segment in sampled for number in segment["ids"]]
                logps = [logp for segment in sampled for logp in segment["behavior_logp"]]
                end = next((index + 1 for index, number in enumerate(ids) if number in visual_ids), len(ids))
                if ids:
                    yield episode["id"], _used_tokens(ids[:end], logps[:end])


def _in_batches(part: StepPart) -> Iterator[UsedTokens]:
    for batch in part.batches:
        source, target, mask, logp, dialogue = (
            np.asarray(array)
            for array in (batch.source, batch.target, batch.loss_mask, batch.behavior_logp, batch.dialogue)
        )
        for row, number in sorted(set(zip(np.nonzero(mask)[0].tolist(), dialogue[mask].tolist(), strict=True))):
            own = np.flatnonzero(mask[row] & (dialogue[row] == number))
            own = own[np.argsort(source[row, own], kind="stable")]
            yield _used_tokens(target[row, own], logp[row, own])


def _used_tokens(ids: Sequence[int] | np.ndarray, logps: Sequence[float] | np.ndarray) -> UsedTokens:
    return UsedTokens(np.asarray(ids, np.int32).tobytes(), np.asarray(logps, np.float32).tobytes())
