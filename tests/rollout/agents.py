"""Episodes without videos and models: fake frames, and engines with scripted replies."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rollout.chat import Chat
from rollout.engine.protocol import Engine, Request
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent, EpisodeCallbacks
from rollout.episode_config import EpisodeConfig
from rollout.picture import Picture
from rollout.prompter import Frames, Task
from rollout.records import Episode
from rollout.video.box import Box
from rollout.video.errors import VideoError
from rollout.video.info import TimedPicture, VideoInfo

ANSWER = "It is red.</think><answer>A</answer><|im_end|>"
DRAWS = """
import numpy as np
from rollout.picture import Picture
from rollout.toolbox import Tool, ToolArgs
from rollout.tools import ToolSpec, make_schema

class Draws(Tool):
    spec = ToolSpec(make_schema("draws", "Draws."), usage="draws", effect="done")
    shows_pictures = True
    def check(self, arguments, videos): return ToolArgs()
    def run(self, args, context): return ["A drawing:", Picture.of(np.full((32, 32, 3), (9, 90, 200), np.uint8))]
"""


def call(start_s: float | str, end_s: float | str) -> str:
    arguments = f'{{"video_path": "video.mp4", "start_time": {start_s}, "end_time": {end_s}}}'
    return f'<tool_call>\n{{"name": "crop_video", "arguments": {arguments}}}\n</tool_call>'


def call_of(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class FakeFrames:
    """Fake videos with one frame per second. A path that contains "missing" cannot be opened."""

    def __init__(self, duration_s: float = 64.0, size_px: tuple[int, int] = (32, 32)):
        self.duration_s, self.size_px = duration_s, size_px
        self.requests: list[tuple[str, list[float]]] = []
        self.boxes: list[Box] = []

    async def info(self, path: str, deadline_s: float | int) -> VideoInfo:
        if "missing" in path:
            raise VideoError("the video cannot be opened")
        return VideoInfo(path, self.duration_s, int(self.duration_s), *self.size_px)

    async def frames(
        self, path: str, times_s: Sequence[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        if box is not None:  # a detail is twice as large
            self.boxes.append(box)
            pixels = self.pixels(int(times_s[0])).repeat(2, axis=0).repeat(2, axis=1)
            picture = Picture(f"{path}@{times_s[0]}{tuple(box)}", pixels)
            return [TimedPicture(float(int(times_s[0])), picture, path, box)]
        self.requests.append((path, list(times_s)))
        seconds = sorted({min(int(time_s), int(self.duration_s) - 1) for time_s in times_s})
        pictures = {second: Picture(f"{path}@{second}", self.pixels(second)) for second in seconds}
        return [TimedPicture(float(second), picture, path) for second, picture in pictures.items()]

    def fitted(self, picture: Picture) -> Picture:
        return picture.resized(*self.size_px)

    def pixels(self, second: int) -> np.ndarray:
        return np.random.default_rng(second).integers(0, 255, (*self.size_px, 3)).astype(np.uint8)


def is_subagent(chat: Chat, request: Request) -> bool:
    return "looks closely" in chat.decode(request.ids)


def script(
    chat: Chat,
    turns: Sequence[str],
    report: Callable[[str], str] | str = "A report.<|im_end|>",
    report_after_s: float = 0,
) -> ScriptedEngine:
    """Returns an engine that replies `turns` in order to each main agent, and `report` to each sub-agent."""
    num_turns: dict[str, int] = {}

    async def reply(request: Request) -> Sequence[int]:
        if is_subagent(chat, request):
            await asyncio.sleep(report_after_s)
            text = report if isinstance(report, str) else report(chat.decode(request.ids))
        else:
            number = num_turns.get(request.episode, 0)
            num_turns[request.episode] = number + 1
            text = turns[number]
        return chat.encode(text).tolist()

    return ScriptedEngine(reply)


def play(
    engine: Engine,
    chat: Chat,
    task: Task,
    frames: Frames | None = None,
    callbacks: EpisodeCallbacks | None = None,
    **config: Any,
) -> Episode:
    agent = Agent(engine, frames or FakeFrames(), chat, EpisodeConfig(**config))

    async def run() -> Episode:
        return await agent.run(await agent.overview(task), callbacks=callbacks)

    return asyncio.run(run())


def play_calls(
    chat: Chat, task: Task, *calls: str, report: str = "A report.<|im_end|>", **options: Any
) -> tuple[ScriptedEngine, Episode]:
    """Plays an episode whose first turn makes these calls and whose second turn answers, and checks its ledgers."""
    engine = script(chat, [f"I look.</think>{''.join(calls)}<|im_end|>", ANSWER], report)
    episode = play(engine, chat, task, **options)
    check_ledger(chat, engine, episode)
    return engine, episode


def check_ledger(chat: Chat, engine: ScriptedEngine, episode: Episode) -> None:
    """Checks that every sampled segment follows a request with exactly the ledger's earlier ids and pictures."""
    for ledger in episode.ledgers:
        ids, begin = ledger.ids, 0
        given = np.concatenate([s.ids for s in ledger.segments if s.kind != "sampled"])
        assert np.count_nonzero(given == chat.image_id) == len(ledger.pictures)
        for number, segment in enumerate(ledger.segments):
            if segment.kind == "sampled":
                asked = [r for r in engine.requests if np.array_equal(r.ids, ids[:begin])]
                assert asked, "the engine received other ids than the ledger has"
                shown = [p.key for s in ledger.segments[:number] for p in s.pictures]
                assert [p.key for p in asked[0].pictures] == shown
            begin += len(segment.ids)
    assert len(engine.requests) == len(episode.turns) + len(episode.ledgers) - 1
