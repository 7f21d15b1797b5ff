"""Where the text comes from that replaces frames: a column of the row, or any OpenAI-compatible chat engine.

A text that cannot be had is a NoSummary, never an empty text. What an engine writes is shown to a model as what its
tool said: the thinking of the engine and every structural tag are taken out.
"""

import asyncio
import base64
import hashlib
import json
import mimetypes
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from paravt_jax.data.materialize import REMOTE
from paravt_jax.data.rows import BadRow
from paravt_jax.rewards.chat_client import SHOWN_CHARS, ChatClient, ChatRequest, Endpoint, NoReply
from paravt_jax.rewards.grammar import TAG
from rollout.prompts import Prompts
from rollout.video.errors import VideoError
from rollout.video.reader import FrameReader
from rollout.video.times import crop_times

# Settings of the engine whose flag has another name.
FLAGS = {"url": "--summaries engine:URL", "attempt_deadline_s": "--deadline-s", "max_reply_tokens": "--max-new-tokens"}
MAX_FRAME_PIXELS = 50_176  # of a frame decoded here, as in the training recipe
SIDE_PX = 32

NO_SUMMARY = "no summary"
FAILED = "summary failed"


class NoSummary(Exception):
    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Answer:
    """A tool message that shows frames."""

    place: int  # among the tool messages of the row
    frame_place: int  # among those that show frames
    num_answers: int  # tool messages of the row
    num_frame_answers: int
    window_s: tuple[float, float] | None  # what the call asked for
    content: Sequence[Any]  # parts
    videos: frozenset[str]  # names of files that the user shows or the call names: whole videos, not cuts of one


@runtime_checkable
class Summaries(Protocol):
    async def text(self, row: dict[str, Any], answer: Answer) -> str:
        """Never empty; raises NoSummary."""
        ...


class Nothing:
    """No source of summaries: rows with frames stay as they are."""

    async def text(self, row: dict[str, Any], answer: Answer) -> str:
        raise NoSummary(NO_SUMMARY, "frames, and no --summaries to replace them")


@dataclass(frozen=True)
class Column:
    """Texts in the row itself: a list, one for each tool message or one for each that shows frames; or a mapping from
    the number of the tool message, counted from 0. Either may be given as its JSON.
    """

    name: str

    async def text(self, row: dict[str, Any], answer: Answer) -> str:
        value = row.get(self.name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise NoSummary(NO_SUMMARY, f"column {self.name} is no JSON") from None
        if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
            value = dict(value)  # a map, as pyarrow reads it
        if isinstance(value, dict):
            summary = next((value[key] for key in (str(answer.place), answer.place) if key in value), None)
        elif isinstance(value, list) and len(value) == answer.num_answers:
            summary = value[answer.place]
        elif isinstance(value, list) and len(value) == answer.num_frame_answers:
            summary = value[answer.frame_place]
        else:
            size = f"{len(value)} texts" if isinstance(value, list) else type(value).__name__
            raise NoSummary(NO_SUMMARY, f"column {self.name} has {size} for {answer.num_answers} tool messages")
        if not isinstance(summary, str) or not summary.strip():
            raise NoSummary(NO_SUMMARY, f"column {self.name} has no text for tool message {answer.place}")
        return summary.strip()


@dataclass(frozen=True)
class SummarizerSettings(Endpoint):
    attempt_deadline_s: float = 120.0
    max_reply_tokens: int = 512  # what a report of a sub-agent may take

    def spelled(self, name: str) -> str:
        return FLAGS.get(name, f"--{name.replace('_', '-')}")


class Summarizer:
    """Use `async with Summarizer(settings, find, known) as engine`. `find` says where the file is that a row names.

    `known` is a file of JSON lines to which every summary is added at once: what was paid for is not asked for again.
    """

    def __init__(
        self, settings: SummarizerSettings, find: Callable[[str], str], known: Path, prompts: Prompts | None = None
    ):
        self.settings, self.prompts = settings, prompts or Prompts()
        self._find = find
        self._known_path, self._known = known, load_known(known)
        self._client = ChatClient(settings)
        self._slots = asyncio.Semaphore(settings.max_concurrent)  # of frames kept at once
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._reader: FrameReader | None = None

    async def __aenter__(self) -> "Summarizer":
        self._known_file = self._stack.enter_context(self._known_path.open("a", encoding="utf-8"))
        await self._stack.enter_async_context(self._client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def text(self, row: dict[str, Any], answer: Answer) -> str:
        async with self._slots:
            try:
                messages = await self._messages(answer)
            except (BadRow, VideoError, OSError) as problem:
                raise NoSummary(FAILED, f"{getattr(problem, 'reason', 'frames cannot be read')}: {problem}") from None
            key = await asyncio.to_thread(_key, self._client.body(messages))
            if key not in self._known:
                try:
                    self._known[key] = await self._client.complete(lambda: ChatRequest(messages, _summary))
                except NoReply as problem:
                    raise NoSummary(FAILED, str(problem)) from None
                print(json.dumps({"key": key, "text": self._known[key]}), file=self._known_file, flush=True)
            return self._known[key]

    async def _messages(self, answer: Answer) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        num_frames = 0
        for part in answer.content:
            kind = str(part.get("type")).removesuffix("_url") if isinstance(part, dict) else ""
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append(_text(part["text"]))
                continue
            where = part.get(part["type"]) if kind in ("image", "video") else None
            where = {"url": where} if isinstance(where, str) else where
            if not isinstance(where, dict) or not isinstance(where.get("url"), str):
                raise BadRow("wrong schema", f"a part of a tool message is {str(part)[:SHOWN_CHARS]}")
            shown = await (self._image(where["url"]) if kind == "image" else self._video(where, answer))
            num_frames += sum(one["type"] == "image_url" for one in shown)
            parts += shown
        if answer.window_s is not None:
            start_s, end_s = answer.window_s
            intro = self.prompts.subagent_intro.format(start_s=start_s, end_s=end_s, num_frames=num_frames)
            parts.insert(0, _text(f"{intro}\n"))
        instruction = self.prompts.subagent_instruction.format(question="")
        system = {"role": "system", "content": self.prompts.subagent_system.format()}
        return [system, {"role": "user", "content": [*parts, _text(f"\n{instruction}")]}]

    async def _image(self, url: str) -> list[dict[str, Any]]:
        if REMOTE.match(url):
            return [_image_part(url)]
        path = self._find(url)
        data = await asyncio.to_thread(Path(path).read_bytes)
        kind = mimetypes.guess_type(path)[0] or "image/jpeg"
        return [_image_part(f"data:{kind};base64,{base64.b64encode(data).decode()}")]

    async def _video(self, where: dict[str, Any], answer: Answer) -> list[dict[str, Any]]:
        """Frames of the window, each after its time; a cut of a video is shown whole."""
        path = self._find(where["url"])
        own: Any = (where.get("start_time"), where.get("end_time"))
        reader, deadline_s = await self._frame_reader(), self.settings.attempt_deadline_s
        info = await reader.info(path, deadline_s)
        start_s, end_s = 0.0, float(info.duration_s)
        if all(isinstance(time, int | float) for time in own):
            start_s, end_s = float(own[0]), float(own[1])
        elif answer.window_s is not None and Path(where["url"]).name in answer.videos:
            start_s, end_s = answer.window_s
        end_s = min(end_s, float(info.duration_s))
        if not 0 <= start_s < end_s:
            raise BadRow("bad window", f"{start_s:g} to {end_s:g} s of {path}")
        parts: list[dict[str, Any]] = []
        for frame in await reader.frames(path, crop_times(start_s, end_s), deadline_s):
            png = await asyncio.to_thread(lambda picture=frame.picture: picture.png_base64)
            parts += [_text(f"<{frame.time_s:.1f} seconds>"), _image_part(f"data:image/png;base64,{png}")]
        return parts

    async def _frame_reader(self) -> FrameReader:
        async with self._opening:  # few traces show videos, and its workers are processes
            if self._reader is None:
                self._reader = await self._stack.enter_async_context(FrameReader(frame_size))
        return self._reader


def load_known(path: Path) -> dict[str, str]:
    """Summaries by what was asked; a line that a kill cut short is left out, and ended so that the next is whole.

    A file with whole lines of which none is a summary is not ours to add to.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    known = {}
    for line in data.splitlines():
        try:
            entry = json.loads(line)
            known[entry["key"]] = read_summary(entry["text"])
        except (ValueError, RecursionError, LookupError, TypeError):
            continue
    if b"\n" in data and not known:
        raise ValueError(f"{path} holds no summaries, so none are added to it; move it away, or choose another --dst")
    if data and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    return {key: text for key, text in known.items() if isinstance(key, str) and text}


def _key(body: dict[str, Any]) -> str:
    """Of the model and all that it is shown, pictures included."""
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _summary(reply: Any) -> str:
    summary = read_summary(reply)
    if not summary:
        raise NoReply("the engine gave an empty summary")
    return summary


def read_summary(reply: Any) -> str:
    """What a reply says, without the engine's thinking and without anything that looks like a tag of ours."""
    if not isinstance(reply, str):
        return ""
    said = reply.rsplit("</think>", 1)[-1]
    if "<think>" in said:  # cut off while it thought
        return ""
    while TAG.search(said):  # taking one out can make another
        said = TAG.sub("", said)
    return said.encode(errors="ignore").decode().strip()


def frame_size(height: int, width: int) -> tuple[int, int]:
    """At most the pixels of the recipe, its sides multiples of what a token shows."""
    scale = min(1.0, (MAX_FRAME_PIXELS / (height * width)) ** 0.5)
    shown = [max(SIDE_PX, int(side * scale) // SIDE_PX * SIDE_PX) for side in (height, width)]
    return shown[0], shown[1]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
