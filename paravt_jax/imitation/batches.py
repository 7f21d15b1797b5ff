"""One step of imitation after another: traces shown, and packed until the rows of a step are full.

Steps are made ahead, in the order of the visits, so that frames are decoded while the learner is at an earlier step.
Which traces a step holds follows from the number of its first visit alone: that is all that a resume needs.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model_port.config import ModelConfig
from model_port.processing import VisionContract
from paravt_jax.config import SftConfig
from paravt_jax.data.budget import budgets_of
from paravt_jax.data.traces import Trace
from paravt_jax.data.visits import Visit, Visits
from paravt_jax.imitation.ledgers import Demonstrator
from paravt_jax.learner.packing import Dialogue, Shape, TrainBatch, pack
from paravt_jax.sampling.frames import frame_of
from rollout.picture import Picture
from rollout.video.errors import VideoError

SHOWN_AHEAD = 32  # traces whose frames are decoded at the same time


class Shown(NamedTuple):
    """A trace as it will be packed, and what it shows."""

    dialogue: Dialogue
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, eq=False)
class Lesson:
    """The batches of one step. The next one begins with the visit `next`."""

    batches: list[TrainBatch]
    num_traces: int
    num_tokens: int  # of all traces, as if nothing were shared
    num_loss_tokens: int
    next: int
    problems: list[str]  # traces that could not be shown, or did not fit


class Lessons:
    def __init__(
        self,
        demonstrator: Demonstrator,
        visits: Visits[Trace],
        first: int,
        model: ModelConfig,
        contract: VisionContract,
        config: SftConfig,
    ):
        """`first` is the number of the first visit."""
        self._demonstrator, self._visits, self._config = demonstrator, visits, config
        self._model, self._contract = model, contract
        self._shown: deque[asyncio.Task[Shown]] = deque()  # from visit `_next` on
        self._next = first
        self._num_left_out = 0  # in a row
        self._made: asyncio.Queue[Lesson] = asyncio.Queue(config.sft.steps_ahead)
        self._maker: asyncio.Task[None] | None = None

    async def take(self) -> Lesson:
        if self._maker is None:
            self._maker = asyncio.create_task(self._make_all())
        taking = asyncio.create_task(self._made.get())
        try:
            await asyncio.wait({taking, self._maker}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                self._maker.result()  # raises why it ended
            return await taking
        finally:
            taking.cancel()

    async def of(self, traces: Sequence[Trace]) -> AsyncIterator[list[TrainBatch]]:
        """Batches of these traces, a few traces at a time; those that cannot be shown are left out."""
        visits = [Visit(number, 0, trace) for number, trace in enumerate(traces)]
        for first in range(0, len(visits), SHOWN_AHEAD):
            found = await asyncio.gather(*map(self._show, visits[first : first + SHOWN_AHEAD]), return_exceptions=True)
            for problem in found:
                if isinstance(problem, BaseException) and not isinstance(problem, VideoError):
                    raise problem
            fitting = [
                shown
                for shown in found
                if isinstance(shown, Shown) and len(shown.dialogue.ids) <= self._config.pack.row_tokens
            ]
            if fitting:
                yield await asyncio.to_thread(self._batches, fitting)

    async def close(self) -> None:
        tasks = [*self._shown, *([self._maker] if self._maker is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make_all(self) -> None:
        while True:
            await self._made.put(await self._make())

    async def _make(self) -> Lesson:
        """Takes visits in order, until one has no room in any row; that one begins the next step."""
        row_tokens = self._config.pack.row_tokens
        rooms = [row_tokens] * self._config.sft.rows_per_step
        taken: list[Shown] = []
        problems: list[str] = []
        while True:
            visit = self._visits[self._next]
            self._show_ahead()
            try:
                shown = await asyncio.shield(self._shown[0])
            except VideoError as problem:
                self._problem(problems, f"{visit.prompt.id}: {problem}")
                continue
            length = len(shown.dialogue.ids)
            if length > row_tokens:
                self._problem(
                    problems, f"{visit.prompt.id}: {length} tokens are more than pack.row_tokens={row_tokens}"
                )
                continue
            row = next((number for number, room in enumerate(rooms) if room >= length), None)
            if row is None:
                break
            rooms[row] -= length
            taken.append(shown)
            self._pass()
            self._num_left_out = 0
        return await asyncio.to_thread(self._lesson, taken, problems)

    def _problem(self, problems: list[str], problem: str) -> None:
        """A run in which no trace can be shown must not look for one forever."""
        problems.append(problem)
        self._pass()
        self._num_left_out += 1
        if self._num_left_out >= self._visits.num_prompts:
            raise RuntimeError(f"not one of {self._num_left_out} traces in a row can be used; the last one: {problem}")

    def _pass(self) -> None:
        self._shown.popleft()
        self._next += 1

    def _show_ahead(self) -> None:
        while len(self._shown) < SHOWN_AHEAD:
            self._shown.append(asyncio.create_task(self._show(self._visits[self._next + len(self._shown)])))

    async def _show(self, visit: Visit[Trace]) -> Shown:
        (budget,) = budgets_of([visit], self._config.video, self._config.seed)
        ledger = await self._demonstrator.ledger(visit.prompt, budget)
        return Shown(self._demonstrator.dialogue(ledger, visit.number), ledger.pictures)

    def _lesson(self, taken: list[Shown], problems: list[str]) -> Lesson:
        batches = self._batches(taken)
        num_tokens = sum(len(shown.dialogue.ids) for shown in taken)
        num_loss_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        return Lesson(batches, len(taken), num_tokens, num_loss_tokens, self._next, problems)

    def _batches(self, taken: list[Shown]) -> list[TrainBatch]:
        dialogues = [shown.dialogue for shown in taken]
        pictures = {picture.key: picture for shown in taken for picture in shown.pictures}
        frames = {key: frame_of(picture, self._contract) for key, picture in pictures.items()}
        settings = self._config.pack
        row_patches = self._config.video.max_pixels // self._contract.patch_px**2
        shape = Shape(settings.num_rows, settings.row_tokens, row_patches, settings.sizes_per_doubling)
        return pack(dialogues, frames, self._model, shape)
