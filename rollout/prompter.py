"""Builds an agent's initial prompt: its ids and pictures.

Rollouts and demonstrations share this code, so both training stages use the same format.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollout.picture import IMAGES_AT_A_TIME, Picture, read_image
from rollout.prompts import (
    IMAGE_PLACEHOLDER,
    PLACEHOLDER,
    PastTurn,
    Prompts,
    closeup_messages,
    main_messages,
    row_messages,
    subagent_messages,
)
from rollout.threads import in_daemon_thread
from rollout.tools import ToolSpec, Window
from rollout.video.box import Box
from rollout.video.errors import ImageError
from rollout.video.info import TimedPicture, VideoInfo
from rollout.video.times import crop_times, num_frames_at, overview_times

TOOLS_TAG = "<tools>"  # a system text with this tag already describes the tools


@dataclass(frozen=True)
class Task:
    id: str
    question: str
    videos: tuple[str, ...]  # paths; if empty, the agent gets no tools
    frame_budget: int  # frames of the overview, over all videos
    subtitles: tuple[str, ...] = ()  # for each video, the path of its subtitles or ""
    messages: tuple[tuple[str, str], ...] = ()  # roles and texts of the row, for rollout.prompts.row_messages
    history: tuple[PastTurn, ...] = ()  # turns before the question
    images: tuple[str, ...] = ()  # paths

    def __post_init__(self) -> None:
        if self.frame_budget < len(self.videos):
            raise ValueError(f"task {self.id}: frame_budget {self.frame_budget} is less than one frame per video")


@dataclass(frozen=True)
class ShownVideo:
    name: str  # the name that the model may use
    path: str
    duration_s: float | int
    frames_s: tuple[float | int, ...]  # start time of each frame


@dataclass(frozen=True, eq=False)
class Overview:
    """The prompt that a group of episodes shares, with its frames decoded once."""

    task: Task
    videos: dict[str, VideoInfo]  # by path
    names: dict[str, str]  # every name that the model may use -> path
    ids: np.ndarray
    pictures: tuple[Picture, ...]
    shown_videos: tuple[ShownVideo, ...]
    seconds: float  # time to build it
    messages: Sequence[dict[str, Any]] = ()  # the messages that `ids` encode, without tools
    tools: list[dict[str, Any]] | None = None  # the tools that the chat template adds to the messages


@dataclass(frozen=True, eq=False)
class Closeup:
    """A sub-agent's initial prompt."""

    ids: np.ndarray
    frames: tuple[TimedPicture, ...]
    messages: Sequence[dict[str, Any]] = ()  # the messages that `ids` encode

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(frame.picture for frame in self.frames)

    @property
    def frames_s(self) -> tuple[float | int, ...]:
        """The start time of each frame."""
        return tuple(frame.time_s for frame in self.frames)


@runtime_checkable
class Frames(Protocol):
    """A source of frames, such as `rollout.video.reader.FrameReader`."""

    async def info(self, path: str, deadline_s: float) -> VideoInfo: ...

    async def frames(
        self, path: str, times_s: Sequence[float], deadline_s: float, box: Box | None = None
    ) -> list[TimedPicture]: ...

    def fitted(self, picture: Picture) -> Picture:
        """Resizes a picture that is not a frame to a size that no image processor changes."""
        ...


class PromptEncoder(Protocol):
    """Escapes texts and encodes messages: `rollout.chat.Chat`, or `EndpointEncoder`, which returns no ids."""

    def escape(self, text: str) -> str: ...

    def escape_control(self, text: str) -> str: ...

    def ids(
        self, messages: list[dict[str, Any]], num_pictures: int, tools: list[dict[str, Any]] | None = None
    ) -> np.ndarray: ...


@dataclass(eq=False)
class Prompter:
    """Builds prompts for the main agent and its sub-agents."""

    frames: Frames
    chat: PromptEncoder
    prompts: Prompts
    calls_per_turn: int  # 0: no tools are offered
    subagent_max_frames: int
    deadline_s: float  # bounds the decoding of a video's frames
    overview_fps: float
    tools: Sequence[ToolSpec]

    def __post_init__(self) -> None:
        self._reading = asyncio.Semaphore(IMAGES_AT_A_TIME)

    async def overview(self, task: Task) -> Overview:
        """Builds the main agent's prompt, with a task's images and evenly spaced frames of its videos."""
        began_s = time.monotonic()
        videos = dict(zip(task.videos, await asyncio.gather(*(self.info(path) for path in task.videos)), strict=True))
        images = await asyncio.gather(*map(self._image, task.images))
        share, extra = divmod(task.frame_budget, max(1, len(task.videos)))
        clips = await asyncio.gather(
            *(
                self.frames_at(path, self.overview_times(videos[path], share + (number < extra)))
                for number, path in enumerate(task.videos)
            )
        )
        default_names = ["video.mp4"] if len(task.videos) == 1 else [f"video_{n}.mp4" for n in range(len(task.videos))]
        names = dict(zip(default_names, task.videos, strict=True))
        shown_videos = tuple(
            ShownVideo(name, path, videos[path].duration_s, tuple(frame.time_s for frame in frames))
            for (name, path), frames in zip(names.items(), clips, strict=True)
        )
        messages, tools = self._main_messages(task, shown_videos)
        pictures = tuple(_in_order(task.history, images, clips))
        ids = self.chat.ids(messages, len(pictures), tools)
        all_names = names | _dataset_names(task.videos) | names  # the prompt's names come first and take precedence
        seconds = time.monotonic() - began_s
        return Overview(task, videos, all_names, ids, pictures, shown_videos, seconds, messages, tools)

    def _main_messages(
        self, task: Task, videos: Sequence[ShownVideo]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Returns the main agent's messages, and the tools that the chat template adds to them."""
        in_template = videos and self.calls_per_turn and not self.prompts.system_has_tools
        tools = [tool.schema for tool in self.tools] if in_template else None
        if self.prompts.row_messages and task.messages:
            times_s, escape = [video.frames_s for video in videos], self.chat.escape_control
            has_tools = any(role == "system" and TOOLS_TAG in text for role, text in task.messages)
            messages = row_messages(self.prompts, task.messages, times_s, len(task.images), escape)
            return messages, None if has_tools else tools
        messages = main_messages(
            self.prompts,
            [(video.name, video.duration_s, video.frames_s) for video in videos],
            self._escaped(task.question.replace(IMAGE_PLACEHOLDER, "") if task.images else task.question),
            self.calls_per_turn if videos else 0,
            self.tools,
            [replace(turn, text=self._escaped(turn.text)) for turn in task.history],
            len(task.images),
        )
        return messages, tools

    def _escaped(self, text: str) -> str:
        return self.chat.escape(text.replace(PLACEHOLDER, "").strip())

    async def closeup(self, path: str, window: Window, question: str) -> Closeup:
        """Builds a sub-agent's prompt with the frames of a window and the question."""
        frames = await self.crop(path, window)
        times_s = [frame.time_s for frame in frames]
        return self._closeup(frames, subagent_messages(self.prompts, window, times_s, self.chat.escape(question)))

    def closeup_of(self, frames: Sequence[TimedPicture], intro: str, instruction: str) -> Closeup:
        """Builds a sub-agent's prompt with the given frames and trusted texts."""
        times_s = [frame.time_s for frame in frames]
        return self._closeup(frames, closeup_messages(self.prompts, intro, times_s, instruction))

    def _closeup(self, frames: Sequence[TimedPicture], messages: list[dict[str, Any]]) -> Closeup:
        return Closeup(self.chat.ids(messages, len(frames)), tuple(frames), messages)

    async def crop(self, path: str, window: Window) -> list[TimedPicture]:
        return await self.frames_at(path, crop_times(window.start_s, window.end_s, self.subagent_max_frames))

    async def _image(self, path: str) -> Picture:
        async with self._reading:
            return await in_daemon_thread(lambda: self._fitted(path))

    def _fitted(self, path: str) -> Picture:
        picture = read_image(path)
        try:
            return self.frames.fitted(picture)
        except ValueError as problem:
            raise ImageError(f"{path} cannot be shown: {problem}") from None

    async def info(self, path: str) -> VideoInfo:
        return await self.frames.info(path, self.deadline_s)

    def overview_times(self, info: VideoInfo, max_frames: int) -> list[float]:
        """Returns the times of the frames in a video's overview."""
        num_frames = num_frames_at(self.overview_fps, info.duration_s, info.num_frames, max_frames)
        return overview_times(info.duration_s, info.num_frames, num_frames)

    async def frames_at(self, path: str, times_s: Sequence[float], box: Box | None = None) -> list[TimedPicture]:
        """Returns the distinct frames at these times. With `box`, that part of each, enlarged to a crop's pixels."""
        boxes = () if box is None else (box,)
        return await self.frames.frames(path, times_s, self.deadline_s, *boxes)


def _in_order(
    history: Sequence[PastTurn], images: Sequence[Picture], clips: Sequence[Sequence[TimedPicture]]
) -> Iterator[Picture]:
    """Yields the pictures turn by turn, images before frames of videos. The last turn has the rest."""
    images_left, clips_left = iter(images), iter(clips)
    for turn in history:
        yield from islice(images_left, turn.num_images)
        yield from (frame.picture for frames in islice(clips_left, turn.num_videos) for frame in frames)
    yield from (*images_left, *(frame.picture for frames in clips_left for frame in frames))


def _dataset_names(paths: Sequence[str]) -> dict[str, str]:
    """Maps names from the dataset, which the model may have learned, to paths: the path, or a unique file name."""
    file_names = [Path(path).name for path in paths]
    unique = {name: path for name, path in zip(file_names, paths, strict=True) if file_names.count(name) == 1}
    return unique | {path: path for path in paths}
