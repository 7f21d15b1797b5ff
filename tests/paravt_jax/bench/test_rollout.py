"""The rollout benchmark measures every crop with frames that no earlier crop has put into the cache."""

import argparse
import asyncio

import pytest

from paravt_jax.bench import rollout
from paravt_jax.bench.camera import FPS
from rollout.episode_config import EpisodeConfig
from rollout.tools import find_calls, window_of
from rollout.video.times import crop_times


@pytest.mark.parametrize("rounded", [int, round], ids=["down", "to the nearest"])
def test_no_window_has_a_frame_of_another(monkeypatch, rounded):
    windows = []

    async def timed(self, written, name, num_calls, num_episodes=1):
        calls = [call for text in written._turns for call in find_calls(text)]
        windows.extend(window_of(call.arguments, rollout.VIDEO_S) for call in calls)
        return [], 1.0

    monkeypatch.setattr(rollout._Bench, "_timed", timed)
    args = argparse.Namespace(repeats=rollout.MAX_REPEATS, episodes=1, report_tokens=1)
    bench = rollout._Bench(args, None, None, None, EpisodeConfig(), "video.mp4")

    async def run() -> None:
        await bench.turn(1)
        for number in rollout.CROPS:
            await bench.latencies(number)
        await bench.episodes()

    asyncio.run(run())
    frames = [rounded(time_s * FPS) for window in windows for time_s in crop_times(window.start_s, window.end_s)]
    assert len(windows) == 1 + 2 * rollout.MAX_REPEATS * sum(rollout.CROPS) + rollout.CROPS_OF_AN_EPISODE
    assert len(set(frames)) == len(frames) == rollout.WINDOW_FRAMES * len(windows)
