"""Servers of a run are told by their environment which GPUs are theirs; large videos are named at the start."""

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


def test_every_server_is_started_on_gpus_of_its_own(tiny_hf, tmp_path, monkeypatch):
    python = tmp_path / "python"  # a server that notes what it sees and what it is told, and ends
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{tmp_path}/$$.seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PARAVT_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the learner's")
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute())
    engine, gpus = EngineConfig("sglang", num_servers=2, gpus=[1, 2, 4, 5]), [("1", "GPU-x"), ("4", "5")]
    sizes = {"max_context_tokens": 1024, "max_pixels": 50_176}
    with pytest.raises(ServerFailed, match="ended with exit code 1 before it was ready"):
        asyncio.run(open_engine(engine, policy, None, 0, lambda phase: None, dtype="bfloat16", gpus=gpus, **sizes))
    seen = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert {line.split()[0] for line in seen} <= {"1,GPU-x", "4,5"} and len(seen) == 2
    assert all("--tensor-parallel-size 2" in line for line in seen)


def said_of(videos, contract, patience=True) -> list[str]:
    said: list[str] = []

    async def body() -> None:
        async with AsyncExitStack() as stack:
            frames = await stack.enter_async_context(frame_reader(VideoConfig(num_workers=1), contract))
            warn_of_large(frames, map(str, videos), 8, said.append, stack)
            while patience and not said:
                await asyncio.sleep(0.01)

    asyncio.run(body())
    return said


def test_videos_that_take_long_are_counted_and_the_largest_named_once(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "DECODED_PX_PER_S", 1000.0)
    small = write_video(tmp_path / "small.mp4", at_fps(30, 20), size_px=(16, 16))  # 8 frames of 256 pixels: 2 s
    large = [write_video(tmp_path / f"{n}.mp4", at_fps(30, 20), size_px=(128 + n, 128)) for n in (0, 2, 4, 6)]
    (said,) = said_of([small, *large, tmp_path / "gone.mp4", large[0]], VisionContract.from_hf(tiny_hf))
    assert said.startswith("4 of 6 videos are too large to be shown soon: an overview of 8 frames takes more than 60 s")
    assert "such as 6.mp4 (" in said and "2.mp4 (" in said and "0.mp4 (" not in said


def test_a_run_that_ends_stops_looking_for_large_videos(tiny_hf, tmp_path):
    video = write_video(tmp_path / "a.mp4", at_fps(30, 20))
    assert said_of([video] * 3, VisionContract.from_hf(tiny_hf), patience=False) == []


def test_the_largest_overview_is_known_with_and_without_budgets():
    assert VideoConfig(gating=True, frame_budgets=[4, 128], overview_frames=32).most_frames == 128
    assert VideoConfig(gating=False, frame_budgets=[4, 128], overview_frames=32).most_frames == 32
