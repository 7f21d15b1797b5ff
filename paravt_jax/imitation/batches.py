"""Prepares the batches of each SFT step: renders and packs traces until the rows of the step are full.

Batches are prepared ahead, so that frames are decoded while the learner is busy. The number of a step's first sample
determines its traces, so a checkpoint stores only that number and the batch sizes so far. Batches never get smaller,
and the first batches have room for extra frames, so that usually a single update program is compiled.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model_port.config import ModelConfig
from model_port.inputs import Frame, frame_rows
from model_port.processing import VisionContract
from paravt_jax.config import ImitationConfig, PackConfig, VideoConfig
from paravt_jax.data.sample_order import PromptSample, SampleOrder, budgets_of
from paravt_jax.data.traces import Trace
from paravt_jax.imitation.render import Rendered, TraceRenderer
from paravt_jax.learner.packing import BatchShape, PromptGroup, TrainBatch, num_batches, pack
from paravt_jax.sampling.frames import frame_of
from rollout.video.errors import VideoError

STEPS_AHEAD = 2  # steps to prepare while the learner computes
RENDERED_AHEAD = 32  # traces to decode concurrently
RECENT = 64  # traces; as in RL, the run ends if more than half of them cannot be read
HEADROOM = 1.75  # patch rows of the first step, relative to its need: more rows later would recompile the update


class LeftOut(NamedTuple):
    problem: str
    is_unreadable: bool  # else it is too long


@dataclass(frozen=True)
class Position:
    """The position of a run: the number of its next sample, and the largest batch sizes so far."""

    next_visit: int = 0
    min_actions: int = 1
    min_frame_rows: int = 0  # rows of patches, over all parts of the mesh


@dataclass(frozen=True, eq=False)
class TraceBatch:
    """The batches of a step, and the position after it."""

    batches: list[TrainBatch]
    sample: Rendered  # the step's first trace
    num_traces: int
    num_tokens: int  # tokens of all traces, counting shared prompts every time
    num_loss_tokens: int
    after: Position
    num_left_out: int  # traces that could not be rendered or did not fit
    problems: list[str]  # their problems, except reported ones, because traces return in every epoch


class TraceBatches:
    """Prepares the batches of each step, some steps ahead."""

    def __init__(
        self,
        renderer: TraceRenderer,
        order: SampleOrder[Trace],
        first: Position,
        model: ModelConfig,
        contract: VisionContract,
        *,
        pack: PackConfig,
        video: VideoConfig,
        imitation: ImitationConfig,
        num_row_parts: int,
        most_frame_rows: int,
        seed: int,
    ):
        """Sets up the queue. A mesh part gets at most `most_frame_rows` rows of patches, unless traces need more."""
        self._renderer, self._order, self._seed = renderer, order, seed
        self._pack, self._video, self._rows_per_step = pack, video, imitation.rows_per_step
        self._model, self._contract = model, contract
        self._num_row_parts, self._most_frame_rows = num_row_parts, most_frame_rows
        self._rendered: deque[asyncio.Task[Rendered | LeftOut]] = deque()  # starts at sample `_next`
        self._row_patches = contract.max_patches(video.max_pixels)
        self._next, self._sizes = first.next_visit, first
        self._num_skipped = 0  # consecutive skipped traces
        self._unreadable = deque[bool](maxlen=RECENT)
        self._reported: set[str] = set()  # problems of skipped traces
        self._steps: deque[asyncio.Task[TraceBatch]] = deque()  # the next steps, prepared in order
        self._preparing = asyncio.Lock()

    async def peek_batch(self) -> TraceBatch:
        """Waits for the batch that the next call of `next_batch` returns."""
        self._prepare_ahead()
        return await asyncio.shield(self._steps[0])

    async def next_batch(self) -> TraceBatch:
        batch = await self.peek_batch()
        self._steps.popleft()
        self._prepare_ahead()
        return batch

    async def batches_of(self, traces: Sequence[Trace], problems: list[str]) -> AsyncIterator[list[TrainBatch]]:
        """Yields batches of these traces, a few at a time; adds problems of left-out traces to `problems`."""
        samples = [PromptSample(number, 0, trace) for number, trace in enumerate(traces)]
        for first in range(0, len(samples), RENDERED_AHEAD):
            rendered = await asyncio.gather(*map(self._render, samples[first : first + RENDERED_AHEAD]))
            problems += [trace.problem for trace in rendered if isinstance(trace, LeftOut)]
            if usable := [trace for trace in rendered if isinstance(trace, Rendered)]:
                yield await asyncio.to_thread(self._batches, usable, Position())

    async def close(self) -> None:
        tasks = [*self._rendered, *self._steps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _prepare_ahead(self) -> None:
        while len(self._steps) <= STEPS_AHEAD:
            self._steps.append(asyncio.create_task(self._prepare()))

    async def _prepare(self) -> TraceBatch:
        async with self._preparing:
            return await self._next_step()

    async def _next_step(self) -> TraceBatch:
        """Takes samples in order while they fit into the step's rows; the next sample starts the next step."""
        traces: list[Rendered] = []
        placed: list[PromptGroup] = []
        first, problems = self._next, list[str]()
        while True:
            self._render_ahead()
            trace = await asyncio.shield(self._rendered[0])
            if isinstance(trace, LeftOut):
                self._skip(problems, trace)
                continue
            placed.append(PromptGroup(0, [len(trace.dialogue.ids)]))
            if num_batches(placed, self._pack.row_tokens, self._rows_per_step) > 1:
                break
            traces.append(trace)
            self._advance()
            self._num_skipped = 0
        return await asyncio.to_thread(self._packed, traces, self._next - first - len(traces), problems)

    def _skip(self, problems: list[str], trace: LeftOut) -> None:
        """Records a skipped trace. Raises if few can be read, or if none is usable and the search would never end."""
        problem = trace.problem
        if problem not in self._reported:
            self._reported.add(problem)
            problems.append(problem)
        self._advance(trace.is_unreadable)
        self._num_skipped += 1
        if sum(self._unreadable) > RECENT / 2:
            frac = f"{sum(self._unreadable)} of the last {len(self._unreadable)}"
            raise RuntimeError(f"{frac} traces cannot be read; the last: {problem}")
        if self._num_skipped > 2 * (self._order.num_items - 1):  # two epochs of all traces but one
            raise RuntimeError(f"{self._num_skipped} consecutive traces cannot be used; the last: {problem}")

    def _advance(self, is_unreadable: bool = False) -> None:
        self._unreadable.append(is_unreadable)
        self._rendered.popleft()
        self._next += 1

    def _render_ahead(self) -> None:
        while len(self._rendered) < RENDERED_AHEAD:
            self._rendered.append(asyncio.create_task(self._render(self._order[self._next + len(self._rendered)])))

    async def _render(self, sample: PromptSample[Trace]) -> Rendered | LeftOut:
        """Renders a trace for the learner; returns the reason if the trace is unusable."""
        (budget,) = budgets_of([sample], self._video, self._seed)
        try:
            rendered = await self._renderer.render(sample.item, budget, sample.number)
        except VideoError as error:
            problem, is_unreadable = str(error), True
        else:
            num_tokens = len(rendered.dialogue.ids)
            if num_tokens <= self._pack.row_tokens:
                return rendered
            problem = f"{num_tokens} tokens are more than pack.row_tokens={self._pack.row_tokens}"
            is_unreadable = False
        return LeftOut(f"{', '.join([sample.item.id, *sample.item.files])}: {problem}", is_unreadable)

    def _packed(self, traces: list[Rendered], num_left_out: int, problems: list[str]) -> TraceBatch:
        batches = self._batches(traces, self._sizes, is_first=self._sizes == Position())
        first = batches[0]
        num_frame_rows = 0 if first.vision is None else len(first.vision.patches)
        self._sizes = Position(self._next, first.source.shape[1], num_frame_rows)
        num_tokens = sum(len(trace.dialogue.ids) for trace in traces)
        num_loss_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
        counts = len(traces), num_tokens, num_loss_tokens
        return TraceBatch(batches, traces[0], *counts, self._sizes, num_left_out, problems)

    def _with_room(self, frames: Sequence[Frame]) -> int:
        """Patch rows per part with room for later steps; `frames` are the first step's frames."""
        num_parts = self._rows_per_step // self._pack.num_rows * self._num_row_parts
        num_rows = math.ceil(HEADROOM * len(frame_rows(frames, self._row_patches)) / num_parts)
        return min(num_rows, self._most_frame_rows)

    def _batches(self, traces: list[Rendered], sizes: Position, is_first: bool = False) -> list[TrainBatch]:
        dialogues = [trace.dialogue for trace in traces]
        pictures = {picture.key: picture for trace in traces for picture in trace.ledger.pictures}
        frames = {key: frame_of(picture, self._contract) for key, picture in pictures.items()}
        settings = self._pack
        of_part = -(-sizes.min_frame_rows // self._num_row_parts)
        frame_rows = self._with_room([*frames.values()]) if is_first else of_part
        shape = BatchShape(
            settings.num_rows,
            settings.row_tokens,
            self._row_patches,
            self._num_row_parts,
            min(sizes.min_actions, settings.row_tokens),  # earlier rows may have been longer
            self._num_row_parts * frame_rows,
        )
        return pack(dialogues, frames, self._model, shape)
