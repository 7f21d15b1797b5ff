"""Each server of a run gets its own GPUs; a run warns about videos that are slow to decode."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from make_video import at_fps, write_video

from model_port.layers import Compute
from model_port.processing import VisionContract
from paravt_jax.config import EngineConfig, VideoConfig
from paravt_jax.run.policy import Policy
from paravt_jax.sampling import engines
from paravt_jax.sampling.engines import frame_reader, open_engine, warn_of_large
from rollout.chat import Chat
from rollout.server import ServerFailed


def test_every_server_gets_its_own_gpus(tiny_hf, tmp_path, monkeypatch):
    python = tmp_path / "python"  # a server that logs its GPUs and arguments, and exits
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{tmp_path}/$$.seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PARAVT_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the learner's")
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute())
    engine, gpus = EngineConfig("sglang", num_servers=2, gpus=[1, 2, 4, 5]), [("1", "GPU-x"), ("4", "5")]
    sizes = {"max_context_tokens": 1024, "max_pixels": 50_176}
    with pytest.raises(ServerFailed, match="ended with exit code 1 before it was ready"):
        asyncio.run(open_engine(engine, policy, None, 0, lambda phase: None, dtype="bfloat16", gpus=gpus, **sizes))
    logs = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert {line.split()[0] for line in logs} <= {"1,GPU-x", "4,5"} and len(logs) == 2
    assert all("--tensor-parallel-size 2" in line for line in logs)


def warnings_of(videos, contract, wait=True) -> list[str]:
    lines: list[str] = []

    async def body() -> None:
        async with AsyncExitStack() as stack:
            frames = await stack.enter_async_context(frame_reader(VideoConfig(num_workers=1), contract))
            warn_of_large(frames, map(str, videos), 8, lines.append, stack)
            while wait and not lines:
                await asyncio.sleep(0.01)

    asyncio.run(body())
    return lines


def test_slow_videos_are_counted_and_the_slowest_named(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "DECODED_PX_PER_S", 1000.0)
    small = write_video(tmp_path / "small.mp4", at_fps(30, 20), size_px=(16, 16))  # 8 frames of 256 pixels: 2 s
    large = [write_video(tmp_path / f"{n}.mp4", at_fps(30, 20), size_px=(128 + n, 128)) for n in (0, 2, 4, 6)]
    (warning,) = warnings_of([small, *large, tmp_path / "gone.mp4", large[0]], VisionContract.from_hf(tiny_hf))
    assert warning.startswith("4 of 6 videos are slow to decode: an overview of 8 frames takes more than 60 s")
    assert "for example 6.mp4 (" in warning and "2.mp4 (" in warning and "0.mp4 (" not in warning


def test_the_end_of_a_run_stops_the_search_for_slow_videos(tiny_hf, tmp_path):
    video = write_video(tmp_path / "a.mp4", at_fps(30, 20))
    assert warnings_of([video] * 3, VisionContract.from_hf(tiny_hf), wait=False) == []


def test_the_largest_overview_with_and_without_budgets():
    assert VideoConfig(frame_budgets=[4, 128], overview_frames=32).most_frames == 128
    assert VideoConfig(frame_budgets=[], overview_frames=32).most_frames == 32
