"""The order of prompts or traces, their frame budgets, and the samples that remain.

A sample is one prompt or trace in one epoch. Its number determines both, in every process and without state, so a
resume only needs the numbers of unfinished samples. Its frame budget, nFrames gating with K ~ Uniform(frame_budgets),
is a hash of the seed, the epoch and the prompt. With 64 bits of hash, the modulus favors no budget by more than one
part in 2^61.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grain

from paravt_jax.config import VideoConfig
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.traces import Trace
from rollout.seeds import derived_seed

Item = TypeVar("Item", bound=Prompt | Trace)


@dataclass(frozen=True)
class PromptSample(Generic[Item]):
    number: int
    epoch: int
    item: Item


class SampleOrder(Generic[Item]):
    """An endless sequence of samples. Every epoch has every item once, in a new order."""

    def __init__(self, items: Sequence[Item], seed: int):
        if not items:
            raise ValueError("there are no prompts or traces; set data.train")
        self.num_items = len(items)
        # Grain adds the epoch to the seed, so that adjacent seeds would share epochs. A hash separates them.
        order_seed = derived_seed("visits", seed) % 2**32
        self.fingerprint = f"{derived_seed(seed, [item.id for item in items]):016x}"  # equal for equal samples
        self._items = grain.MapDataset.source(items).shuffle(order_seed).repeat()

    def __getitem__(self, number: int) -> PromptSample[Item]:
        item = self._items[number]
        assert item is not None  # only grain's filters return None
        return PromptSample(number, number // self.num_items, item)


def spread(items: Sequence[Item], num: int) -> Sequence[Item]:
    """At most `num` items, spread evenly: a file may be sorted by question type or source."""
    return [items[number * len(items) // num] for number in range(num)] if num < len(items) else items


def frame_budget(seed: int, epoch: int, prompt_id: str, budgets: Sequence[int]) -> int:
    return budgets[derived_seed("frame budget", seed, epoch, prompt_id) % len(budgets)]


def budgets_of(samples: Sequence[PromptSample[Item]], video: VideoConfig, seed: int) -> list[int]:
    budgets = [video.overview_frames] * len(samples)
    if video.frame_budgets:
        budgets = [frame_budget(seed, sample.epoch, sample.item.id, video.frame_budgets) for sample in samples]
    return [shown_frames(budget, sample.item.videos) for budget, sample in zip(budgets, samples, strict=True)]


def shown_frames(budget: int, videos: Sequence[str]) -> int:
    """The number of overview frames of a question: at least one per video; 0 without a video."""
    return max(budget, len(videos)) if videos else 0


class Cursor:
    """Hands out sample numbers, so that every sample is done once, in any order.

    A sample is open from `take` to `done`. The record counts open samples as not done, so write the record together
    with the results of finished samples.
    """

    def __init__(self) -> None:
        self._next = 0  # the first number that was never taken
        self._again: list[int] = []  # numbers that were given back, which come first
        self._open: set[int] = set()

    def take(self, num: int) -> list[int]:
        assert num >= 0, num
        numbers = self.peek(num)
        num_repeated = min(num, len(self._again))
        self._again, self._next = self._again[num_repeated:], self._next + num - num_repeated
        self._open.update(numbers)
        return numbers

    def peek(self, num: int) -> list[int]:
        """The numbers that `take` would return, without taking them."""
        repeated = self._again[:num]
        return [*repeated, *range(self._next, self._next + num - len(repeated))]

    def take_these(self, numbers: Iterable[int]) -> None:
        """Opens the samples of a log. Samples that the log skips remain."""
        numbers = set(numbers)
        first_new = max([self._next, *(number + 1 for number in numbers)])
        remaining = {*self._again, *range(self._next, first_new)}
        if not numbers <= remaining:
            raise ValueError(f"samples {sorted(numbers - remaining)} are already done or open")
        self._next, self._again = first_new, sorted(remaining - numbers)
        self._open |= numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """Closes open samples so that `take` returns them again, before new ones."""
        numbers = set(numbers)
        self.done(numbers)
        self._again = sorted({*self._again, *numbers})

    def done(self, numbers: Iterable[int]) -> None:
        numbers = set(numbers)
        if not numbers <= self._open:
            raise ValueError(f"samples {sorted(numbers - self._open)} are not open; open are {sorted(self._open)}")
        self._open -= numbers

    @property
    def num_again(self) -> int:
        """How many samples `take` repeats before new ones."""
        return len(self._again)

    def to_record(self) -> dict[str, Any]:
        return {"next": self._next, "again": sorted([*self._again, *self._open])}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Cursor":
        cursor = cls()
        cursor._next, cursor._again = record["next"], sorted(record["again"])
        return cursor
