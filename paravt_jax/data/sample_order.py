"""In what order prompts or traces are visited, and which visits are still to be made.

A visit is one of them in one epoch, and has a number. The number alone says which one that is, in every process and
without what came before, so all that a resume needs is the numbers of the visits that were not finished.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import grain

from rollout.seeds import derived_seed


@runtime_checkable
class Visitable(Protocol):
    """What can be visited: a prompt, or a trace."""

    @property
    def id(self) -> str: ...

    @property
    def videos(self) -> tuple[str, ...]: ...


Item = TypeVar("Item", bound=Visitable)


@dataclass(frozen=True)
class PromptSample(Generic[Item]):
    number: int
    epoch: int
    item: Item


class SampleOrder(Generic[Item]):
    """Endless: every epoch has every item once, in an order of its own."""

    def __init__(self, items: Sequence[Item], seed: int):
        if not items:
            raise ValueError("there is nothing to visit")
        self.num_items = len(items)
        # Grain adds the epoch to the seed: of neighbouring seeds, one would repeat the other's epochs.
        order_seed = derived_seed("visits", seed) % 2**32
        self.fingerprint = f"{derived_seed(seed, [item.id for item in items]):016x}"  # equal: equal visits
        self._items = grain.MapDataset.source(items).shuffle(order_seed).repeat()

    def __getitem__(self, number: int) -> PromptSample[Item]:
        if number < 0:
            raise IndexError(f"visit {number} does not exist, the first is 0")
        item = self._items[number]
        assert item is not None  # only grain's filters leave gaps
        return PromptSample(number, number // self.num_items, item)


class Cursor:
    """Hands out the numbers of visits: every one is done once, in whichever order they are finished.

    A visit is open from `take` to `done`. The record counts open ones as still to be made, so it must be written
    together with what the visits that are done have led to.
    """

    def __init__(self) -> None:
        self._next = 0  # never taken, like all from here on
        self._again: list[int] = []  # were open when the record was written
        self._open: set[int] = set()

    def take(self, num: int) -> list[int]:
        assert num >= 0, num
        again, self._again = self._again[:num], self._again[num:]
        new = range(self._next, self._next + num - len(again))
        self._next = new.stop
        self._open.update(again, new)
        return [*again, *new]

    def take_these(self, numbers: Iterable[int]) -> None:
        """Opens the visits that a log has; those that it passes over are still to be made."""
        numbers = set(numbers)
        first_new = max(self._next, *(number + 1 for number in numbers))
        left = {*self._again, *range(self._next, first_new)}
        if not numbers <= left:
            raise ValueError(f"visits {sorted(numbers - left)} were made before, or are open")
        self._next, self._again = first_new, sorted(left - numbers)
        self._open |= numbers

    def give_back(self, numbers: Iterable[int]) -> None:
        """These are to be made again, before new ones."""
        numbers = set(numbers)
        self.done(numbers)
        self._again = sorted({*self._again, *numbers})

    def done(self, numbers: Iterable[int]) -> None:
        numbers = set(numbers)
        if not numbers <= self._open:
            raise ValueError(f"visits {sorted(numbers - self._open)} are not open; open are {sorted(self._open)}")
        self._open -= numbers

    @property
    def num_again(self) -> int:
        """How many were taken before and are to be made again; `take` gives them first."""
        return len(self._again)

    def to_record(self) -> dict[str, Any]:
        return {"next": self._next, "again": sorted([*self._again, *self._open])}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Cursor":
        first_new: Any = record.get("next")
        again: Any = record.get("again")
        whole = isinstance(first_new, int) and isinstance(again, list) and all(isinstance(n, int) for n in again)
        if not whole or len(set(again)) < len(again) or not all(0 <= number < first_new for number in again):
            raise ValueError(f'{record} is no cursor, expected {{"next": n, "again": [different numbers below n]}}')
        cursor = cls()
        cursor._next, cursor._again = first_new, sorted(again)
        return cursor
