"""Renders traces with the same ids and pictures that a rollout of the same text would have.

A trace about videos gets an episode's prompt, or a sub-agent's prompt if it shows a window of a single video; only the
question comes from the row, unless rollout.prompts.row_messages is set. A tool message that consists of a video window
becomes the response of `crop_video` with that window. Other dialogues are rendered unchanged. The assistant's tokens
and turn ends are loss tokens.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from model_port.processing import VisionContract, settled_size
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.learner.credit import dialogue_of
from paravt_jax.learner.packing import Dialogue
from rollout.chat import Chat
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger, Segment
from rollout.parts import Part, content_of, pictures_of, with_times
from rollout.picture import IMAGES_AT_A_TIME, Picture, read_image
from rollout.prompter import Frames, ShownVideo, Task
from rollout.toolbox.crop_video import crop_parts
from rollout.tools import BadCall, Window, window_of
from rollout.video.errors import VideoError
from rollout.video.times import overview_times


@dataclass(frozen=True, eq=False)
class Rendered:
    """A trace rendered as an agent's dialogue."""

    trace: Trace
    ledger: Ledger
    dialogue: Dialogue  # the ledger for the learner
    videos: tuple[ShownVideo, ...]  # videos of the overview
    responses: tuple[tuple[tuple[Part, ...], ...], ...]  # responses after every turn but the last


class TraceRenderer:
    """Renders traces as dialogues of an agent: prompts by the prompter, turns by the chat template."""

    def __init__(self, frames: Frames, chat: Chat, contract: VisionContract, config: EpisodeConfig):
        self._chat, self._contract, self._config = chat, contract, config
        self._prompter = config.prompter(frames, chat)
        self._forced = chat.encode(config.forced_prefix)
        self._decoding = asyncio.Semaphore(IMAGES_AT_A_TIME)

    async def render(self, trace: Trace, frame_budget: int, number: int = 0) -> Rendered:
        """Renders a trace; `number` is the dialogue's.

        `frame_budget` is split over all videos of the overview, unless the trace sets the number of their frames.
        Raises VideoError if a video or image cannot be read.
        """
        ledger = Ledger()
        messages = list(trace.messages)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        prompt, pictures, videos = await self._prompt(trace, messages[: turns[0]], frame_budget)
        ledger.add("prompt", prompt, pictures)
        self._add_turn(ledger, messages[turns[0]].text)
        responses = []
        for before, turn in itertools.pairwise(turns):
            responses.append(await self._add_environment(ledger, messages[before + 1 : turn]))
            self._add_turn(ledger, messages[turn].text)
        advantage = ledger.sampled_mask.astype(np.float32)  # imitation is a policy gradient with advantage 1
        structural = np.zeros(len(ledger.ids), bool)
        dialogue = dialogue_of(ledger, number, advantage, structural, self._chat)
        return Rendered(trace, ledger, dialogue, videos, tuple(responses))

    async def _prompt(
        self, trace: Trace, messages: list[Message], frame_budget: int
    ) -> tuple[np.ndarray, tuple[Picture, ...], tuple[ShownVideo, ...]]:
        question = messages[-1]
        media, text = question.media, question.text.strip()
        if media and all(part.kind == "video" and part.window_s is None for part in media):
            paths, of_each = tuple(dict.fromkeys(part.path for part in media)), media[0].num_frames  # equal for all
            budget = frame_budget if of_each is None else of_each * len(paths)
            task = Task(trace.id, text, paths, budget, messages=tuple((each.role, each.text) for each in messages))
            overview = await self._prompter.overview(task)
            return overview.ids, overview.pictures, overview.shown_videos
        if len(media) == 1 and media[0].window_s is not None:
            closeup = await self._prompter.closeup(media[0].path, await self._window(media[0]), text)
            return closeup.ids, closeup.pictures, ()
        rendered, parts = await self._rendered(messages)
        pictures = pictures_of(itertools.chain(*parts))
        return self._chat.ids(rendered, len(pictures)), pictures, ()

    def _add_turn(self, ledger: Ledger, text: str) -> None:
        """Adds a turn, tokenized as if sampled after the forced prefix. Tokens of the prefix are loss tokens too."""
        prefix = self._config.forced_prefix
        ids = [self._chat.encode_turn(text)]
        if prefix and text.startswith(prefix):
            ids = [self._forced, self._chat.encode_turn(text.removeprefix(prefix))]
        turn = np.concatenate([*ids, [self._chat.turn_end_id]]).astype(np.int32)
        ledger.segments.append(Segment("sampled", turn, (), np.zeros(len(turn), np.float32), version=0))

    async def _add_environment(self, ledger: Ledger, messages: list[Message]) -> tuple[tuple[Part, ...], ...]:
        rendered, parts = await self._rendered(messages)
        ids = self._chat.after(ledger.ids, rendered)
        ledger.add("environment", ids, pictures_of(itertools.chain(*parts)))
        return tuple(parts)

    async def _rendered(self, messages: list[Message]) -> tuple[list[dict[str, Any]], list[tuple[Part, ...]]]:
        """Renders messages for the chat template; returns them with the parts of each."""
        parts = [await self._parts(message) for message in messages]
        pairs = zip(messages, parts, strict=True)
        return [
            {"role": message.role, "content": content_of(of_message, self._chat.escape)}
            for message, of_message in pairs
        ], parts

    async def _parts(self, message: Message) -> tuple[Part, ...]:
        part = message.parts[0] if message.role == "tool" and len(message.parts) == 1 else ""
        if isinstance(part, Media) and part.window_s is not None:
            parts = await crop_parts(self._prompter, part.path, await self._window(part))
        else:
            parts = list(itertools.chain(*[await self._media(part) for part in message.parts]))
        return with_times(parts, self._config.prompts)

    async def _media(self, part: str | Media) -> Sequence[Part]:
        if isinstance(part, str):
            return [part]
        if part.kind == "image":
            async with self._decoding:
                size_of = partial(settled_size, contract=self._contract)
                return [await asyncio.to_thread(read_image, part.path, size_of)]
        if part.window_s is not None:
            return await self._prompter.crop(part.path, await self._window(part))
        info = await self._prompter.info(part.path)
        max_frames = part.num_frames or self._config.subagent_max_frames
        times_s = overview_times(info.duration_s, info.num_frames, max_frames)
        return await self._prompter.frames_at(part.path, times_s)

    async def _window(self, part: Media) -> Window:
        assert part.window_s is not None
        start_s, end_s = part.window_s
        info = await self._prompter.info(part.path)
        try:
            return window_of({"start_time": start_s, "end_time": end_s}, info.duration_s)
        except BadCall as problem:
            raise VideoError(f"{part.path}: {problem}") from None
