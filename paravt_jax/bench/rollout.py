"""Measures episodes on a real SGLang server: parallel and sequential crops, throughput, caches, publishing.

The main agent's turns are scripted, because a random model calls no tools; decoding, frame store, sub-agents and server
are real. All reports have the same number of tokens, so that times are comparable.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import model_port
from model_port.layout import check_has_config
from model_port.processing import VisionContract, settled_size
from model_port.terminal import markdown_table, say
from model_port.tiny import make_tiny
from paravt_jax.bench.camera import FPS, camera
from paravt_jax.config import TINY, EngineConfig
from paravt_jax.run.gpu_assignment import place_servers
from paravt_jax.run.start import size_of, start_line
from paravt_jax.sampling.weights import ModelWeights
from rollout.chat import Chat
from rollout.engine.protocol import Generation, Request
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.records import Episode
from rollout.server import DTYPES, ServerSettings
from rollout.video.encode import write_video
from rollout.video.reader import FrameReader

CROPS = (1, 2, 4, 8)
VIDEO_S = 240
VIDEO_PX = (360, 640)
WINDOW_FRAMES = 16
WINDOW_S = WINDOW_FRAMES - 0.1  # a frame per second
MAX_REPEATS = 13  # with more, windows would have frames of earlier ones
FRAME_BUDGET = 16
CROPS_OF_AN_EPISODE = 3
ANSWER = "The reports say it.</think><answer>A</answer><|im_end|>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="Hugging Face directory (default: a tiny random model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of the servers (default cpu)")
    parser.add_argument("--servers", type=int, default=1, help="number of servers (default 1)")
    parser.add_argument("--episodes", type=int, default=16, help="concurrent episodes (default 16)")
    parser.add_argument("--report-tokens", type=int, default=128, help="tokens per report (default 128)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="measurements of each latency; the median is reported (default 5)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("servers", "episodes", "report_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.repeats > MAX_REPEATS:
        raise ValueError(f"--repeats {args.repeats} must be at most {MAX_REPEATS}, so that no frame is in the cache")
    if args.model:
        check_has_config(Path(args.model))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model) if args.model else Path(folder) / "tiny"
        if not args.model:
            make_tiny(model)
        video = Path(folder) / "video.mp4"
        write_video(video, camera(*VIDEO_PX, VIDEO_S), FPS)
        return asyncio.run(_measure(args, model, str(video)))


def table(result: dict[str, Any]) -> str:
    columns = ("crops in one turn", "parallel s", "sequential s", "sequential / parallel", "parallel / one crop")
    single_s, rows = result["crops"][0]["parallel_s"], []
    for row in result["crops"]:
        parallel_s, sequential_s = row["parallel_s"], row["sequential_s"]
        numbers = (parallel_s, sequential_s, sequential_s / parallel_s, parallel_s / single_s)
        rows.append([str(row["crops"]), *(f"{number:.2f}" for number in numbers)])
    summary = [(name, str(value)) for name, value in result["summary"].items()]
    return f"{markdown_table(columns, rows)}\n\n{markdown_table(('', ''), summary)}"


class _Scripted:
    """Scripts the main agent's turns; the engine samples the sub-agents' reports at a fixed length.

    If `num_sampled` is not 0, the engine also prefills the main agent's prompts, and samples this number of tokens.
    """

    def __init__(self, engine: SGLangEngine, chat: Chat, turns: list[str], num_sampled: int = 0):
        self._engine, self._chat, self._turns, self._num_sampled = engine, chat, turns, num_sampled
        self._num_turns: dict[str, int] = {}

    async def generate(self, request: Request) -> Generation:
        if "looks closely" in self._chat.decode(request.ids[:40]):
            return await self._engine.generate(replace(request, sampling=replace(request.sampling, stop_ids=())))
        number = self._num_turns.get(request.episode, 0)
        self._num_turns[request.episode] = number + 1
        ids = self._chat.encode(self._turns[number])
        scripted = Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")
        if not self._num_sampled:
            return scripted
        sampling = replace(request.sampling, stop_ids=(), max_new_tokens=self._num_sampled)
        real = await self._engine.generate(replace(request, sampling=sampling))
        return replace(scripted, num_prompt_tokens=real.num_prompt_tokens, num_cached_tokens=real.num_cached_tokens)


async def _measure(args: argparse.Namespace, model: Path, video: str) -> dict[str, Any]:
    chat, contract = Chat.from_hf(model), VisionContract.from_hf(model)
    numbers = list(range(args.servers)) if args.device == "cuda" else []
    engine_config = EngineConfig("sglang", num_servers=args.servers, gpus=numbers)
    gpus = (place_servers(engine_config, 0) if numbers else ()) or [()] * args.servers
    servers = [ServerSettings(model, args.device, context_length=8192, gpus=server_gpus) for server_gpus in gpus]
    dtype = DTYPES[args.device]
    engine_name = f"{args.servers} SGLang servers on {args.device}"
    data = f"{args.episodes} episodes"
    say(start_line(engine_name, size_of(model), dtype, dtype, model=args.model or TINY, data=data))
    engine = await SGLangEngine.launch(servers, SGLangSettings("bench"))
    config = EpisodeConfig(
        max_parallel=max(CROPS), max_turns=1, subagent_new_tokens=args.report_tokens, max_context_tokens=8192
    )
    try:
        async with FrameReader(lambda height, width: settled_size(height, width, contract)) as frames:
            bench, crops = _Bench(args, engine, frames, chat, config, video), []
            await bench.turn(1)  # the first turn compiles
            for number in CROPS:
                crops.append({"crops": number, **await bench.latencies(number)})
                say(f"{number} crops: {crops[-1]}")
            episodes, seconds = await bench.episodes()
            num_cached = sum(episode.num_cached_tokens for episode in episodes)
            num_prompt = max(sum(episode.num_prompt_tokens for episode in episodes), 1)
            publish_s = await _publish_times(args, engine, model)
            summary = {
                "concurrent episodes": args.episodes,
                "episodes per second": round(len(episodes) / seconds, 2),
                "prompt tokens found in the prefix cache": f"{num_cached / num_prompt:.0%}",
                "frames found in memory": f"{frames.metrics()['video/memory_hit_frac']:.0%}",
                **{name: f"{value:.3f}" for name, value in publish_s.items()},
            }
            return {"crops": crops, "summary": summary}
    finally:
        await engine.close()


def window_starts_s() -> Iterator[float]:
    """Yields the starts of windows that share no frames with each other or with those of `_Bench.episodes`."""
    for number in range(1, FPS):
        for start_s in range(0, VIDEO_S - WINDOW_FRAMES, WINDOW_FRAMES):
            yield start_s + (number + 0.25) / FPS  # a call's time has two decimals


@dataclass(frozen=True)
class _Bench:
    """Times episodes about a video."""

    args: argparse.Namespace
    engine: SGLangEngine
    frames: FrameReader
    chat: Chat
    config: EpisodeConfig
    video: str
    starts_s: Iterator[float] = field(default_factory=window_starts_s)

    async def latencies(self, number: int) -> dict[str, float]:
        """Measures parallel and sequential calls alternately, always over windows that no earlier call has decoded."""
        latencies: dict[str, list[float]] = {"parallel_s": [], "sequential_s": []}
        one_by_one = replace(self, config=replace(self.config, dispatch="sequential"))
        for _ in range(self.args.repeats):
            latencies["parallel_s"].append(await self.turn(number))
            latencies["sequential_s"].append(await one_by_one.turn(number))
        return {name: statistics.median(values) for name, values in latencies.items()}

    async def turn(self, number: int) -> float:
        """Runs a turn with this number of calls; returns the seconds from the first call to the last report."""
        starts_s = list(itertools.islice(self.starts_s, number))
        calls = list(map(_call, starts_s))
        turns = [f"I look.</think>{''.join(calls)}<|im_end|>"]
        if self.config.dispatch == "sequential":
            turns = [f"I look.</think>{call}" for call in calls]
        written = _Scripted(self.engine, self.chat, [*turns, ANSWER])
        _, seconds = await self._timed(written, f"turn-{starts_s[0]}", num_calls=number)
        return seconds

    async def episodes(self) -> tuple[list[Episode], float]:
        """Runs a group whose rollouts crop the same windows."""
        calls = "".join(_call(n * 60.0) for n in range(CROPS_OF_AN_EPISODE))
        turns = [f"I look.</think>{calls}<|im_end|>", ANSWER]
        written = _Scripted(self.engine, self.chat, turns, num_sampled=self.args.report_tokens)
        return await self._timed(written, "group", CROPS_OF_AN_EPISODE, self.args.episodes)

    async def _timed(
        self, written: _Scripted, name: str, num_calls: int, num_episodes: int = 1
    ) -> tuple[list[Episode], float]:
        agent = Agent(written, self.frames, self.chat, self.config)  # type: ignore[arg-type]
        overview = await agent.overview(Task(name, "What happens?", (self.video,), FRAME_BUDGET))
        started_s = time.perf_counter()
        episodes = await asyncio.gather(*(agent.run(overview, number) for number in range(num_episodes)))
        seconds = time.perf_counter() - started_s
        for episode in episodes:
            if episode.outcomes != ["ok"] * num_calls:
                raise RuntimeError(f"calls failed: {[(call.outcome, call.problem) for call in episode.calls]}")
        return episodes, seconds


async def _publish_times(args: argparse.Namespace, engine: SGLangEngine, model: Path) -> dict[str, float]:
    dtype = DTYPES[args.device]
    weights = ModelWeights(model_port.load(model, dtype), np.dtype(dtype))
    own, times_s = await SGLangEngine.connect(engine.urls, SGLangSettings("bench")), []
    try:
        for _ in range(args.repeats):
            started_s = time.perf_counter()
            await own.publish(weights, own.version + 1)
            times_s.append(time.perf_counter() - started_s)
    finally:
        await own.close()
    await engine.adopt(own.version)
    return {f"publishing {weights.num_bytes / 2**20:.0f} MiB, s": statistics.median(times_s)}


def _call(start_s: float) -> str:
    return f"<tool_code>crop_video(start_time={start_s:.2f}, end_time={start_s + WINDOW_S:.2f})</tool_code>"
