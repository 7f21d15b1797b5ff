"""Where the text comes from that replaces frames: a column of the row, or any OpenAI-compatible chat engine.

A text that cannot be had is a NoSummary, never an empty text. What an engine writes is shown to a model as what its
tool said: the thinking of the engine and every structural tag are taken out.
"""

import asyncio
import base64
import hashlib
import json
import mimetypes
import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import aiohttp

from paravt_jax.data.materialize import REMOTE
from paravt_jax.data.rows import BadRow, found_file
from paravt_jax.rewards import TAG
from rollout.prompts import Prompts
from rollout.video.errors import VideoError
from rollout.video.reader import FrameReader
from rollout.video.times import crop_times

CONNECT_DEADLINE_S = 10.0
MISCONFIGURED = (401, 403, 404, 405)  # every request would fail like this one
SHOWN_CHARS = 300
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
            found = next((value[key] for key in (str(answer.place), answer.place) if key in value), None)
        elif isinstance(value, list) and len(value) == answer.num_answers:
            found = value[answer.place]
        elif isinstance(value, list) and len(value) == answer.num_frame_answers:
            found = value[answer.frame_place]
        else:
            size = f"{len(value)} texts" if isinstance(value, list) else type(value).__name__
            raise NoSummary(NO_SUMMARY, f"column {self.name} has {size} for {answer.num_answers} tool messages")
        if not isinstance(found, str) or not found.strip():
            raise NoSummary(NO_SUMMARY, f"column {self.name} has no text for tool message {answer.place}")
        return found.strip()


@dataclass(frozen=True)
class EngineSettings:
    url: str  # up to and with /v1
    model: str
    api_key_env: str = ""  # name of the environment variable that holds the key
    attempt_deadline_s: float | int = 120.0
    max_attempts: int = 4
    backoff_s: float | int = 1.0  # before the second attempt; doubles, up to …
    max_backoff_s: float | int = 20.0
    max_concurrent: int = 16
    max_new_tokens: int = 512  # what a report of a sub-agent may take

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--summaries engine:{self.url} must be a URL that begins with http:// or https://")
        if not self.model:
            raise ValueError("--summaries engine:URL needs --model, the name of a model that it serves")
        for name in ("max_attempts", "max_concurrent", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if not 0 < self.attempt_deadline_s < float("inf"):
            raise ValueError(f"--deadline-s {self.attempt_deadline_s} must be positive and finite")


class _Failed(Exception):
    def __init__(self, message: str, final: bool = False, wait_s: float = 0.0):
        super().__init__(message)
        self.final, self.wait_s = final, wait_s


class Engine:
    """Use `async with Engine(settings, root, known) as engine`. Relative paths of frames begin from `root`.

    `known` is a file of JSON lines to which every summary is added at once: what was paid for is not asked for again.
    """

    def __init__(self, settings: EngineSettings, root: Path, known: Path, prompts: Prompts | None = None):
        self.settings, self.root, self.prompts = settings, root, prompts or Prompts()
        self._known_path, self._known = known, load_known(known)
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
        if settings.api_key_env and not self._key:
            raise ValueError(f"--api-key-env {settings.api_key_env} names an environment variable that is not set")
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._reader: FrameReader | None = None

    async def __aenter__(self) -> "Engine":
        timeout = aiohttp.ClientTimeout(total=self.settings.attempt_deadline_s, sock_connect=CONNECT_DEADLINE_S)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._known_file = self._stack.enter_context(self._known_path.open("a", encoding="utf-8"))
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def text(self, row: dict[str, Any], answer: Answer) -> str:
        settings = self.settings
        async with self._slots:
            try:
                body = {
                    "model": settings.model,
                    "messages": await self._messages(answer),
                    "temperature": 0,
                    "max_tokens": settings.max_new_tokens,
                }
            except (BadRow, VideoError, OSError) as problem:
                raise NoSummary(FAILED, f"{getattr(problem, 'reason', 'frames cannot be read')}: {problem}") from None
            key = await asyncio.to_thread(_key, body)
            if key in self._known:
                return self._known[key]
            for attempt in range(settings.max_attempts):
                try:
                    self._known[key] = await self._attempt(body)
                    print(json.dumps({"key": key, "text": self._known[key]}), file=self._known_file, flush=True)
                    return self._known[key]
                except _Failed as problem:
                    if problem.final or attempt == settings.max_attempts - 1:
                        raise NoSummary(FAILED, str(problem)) from None
                    backoff_s = settings.backoff_s * 2**attempt * random.uniform(0.5, 1.0)
                    await asyncio.sleep(min(max(backoff_s, problem.wait_s), settings.max_backoff_s))
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, body: dict[str, Any]) -> str:
        assert self._session is not None, "use it in `async with`"
        try:
            # No redirects: the key and the frames are for this server only.
            async with self._session.post(self._url, json=body, allow_redirects=False) as response:
                text = (await response.read()).decode(errors="replace")
        except TimeoutError:
            raise _Failed(f"{self._url} did not answer in {self.settings.attempt_deadline_s:g} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise _Failed(f"{self._url} cannot be reached: {problem or type(problem).__name__}") from None
        if self._key:  # some servers repeat it in their errors
            text = text.replace(self._key, "***")
        if response.status != 200:
            said = f"{self._url} answered {response.status}: {text[:SHOWN_CHARS]}"
            if response.status in MISCONFIGURED or 300 <= response.status < 400:
                raise RuntimeError(f"{said}; check the URL of --summaries, --model and --api-key-env")
            after = response.headers.get("Retry-After", "")
            wait_s = float(after) if after.isascii() and after.isdigit() else 0.0
            raise _Failed(said, response.status < 500 and response.status not in (408, 429), wait_s)
        try:
            choice = json.loads(text)["choices"][0]
            reply, finish = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            raise _Failed(f"{self._url} gave no chat completion: {text[:SHOWN_CHARS]}") from None
        summary = read_summary(reply)
        if not summary:
            raise _Failed(f"{self._url} gave an empty summary (finish_reason {finish})")
        return summary

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
        instruction = self.prompts.subagent_instruction.replace("{question}", "")
        system = {"role": "system", "content": self.prompts.subagent_system}
        return [system, {"role": "user", "content": [*parts, _text(f"\n{instruction}")]}]

    async def _image(self, url: str) -> list[dict[str, Any]]:
        if REMOTE.match(url):
            return [_image_part(url)]
        path = found_file(url, self.root)
        data = await asyncio.to_thread(Path(path).read_bytes)
        kind = mimetypes.guess_type(path)[0] or "image/jpeg"
        return [_image_part(f"data:{kind};base64,{base64.b64encode(data).decode()}")]

    async def _video(self, where: dict[str, Any], answer: Answer) -> list[dict[str, Any]]:
        """Frames of the window, each after its time; a cut of a video is shown whole."""
        path = found_file(where["url"], self.root)
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
    """Summaries by what was asked; a line that a kill cut short is left out, and ended so that the next is whole."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    known = {}
    for line in data.splitlines():
        try:
            found = json.loads(line)
            known[found["key"]] = read_summary(found["text"])
        except (ValueError, RecursionError, LookupError, TypeError):
            continue
    return {key: text for key, text in known.items() if isinstance(key, str) and text}


def _key(body: dict[str, Any]) -> str:
    """Of the model and all that it is shown, pictures included."""
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


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
