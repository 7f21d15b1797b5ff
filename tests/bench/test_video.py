"""The video benchmark reads the right frames and names missing packages."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.video.encode import write_video
from scripts.bench import video as bench


def test_our_side_reads_the_frames_of_every_window(tmp_path):
    write_video(tmp_path / "video.mp4", bench.camera(96, 160, 2), bench.FPS)
    windows = [[(0, 59, 4)], [(0, 29, 3), (30, 59, 2)]]
    times = asyncio.run(bench._ours(tmp_path / "video.mp4", windows, 1))
    assert [pixels.shape for pixels in times["pixels"]] == [(count, 96, 160, 3) for count in (4, 3, 2)]
    assert 0 < times["warm"] < times["cold"]


@pytest.mark.slow
def test_split_and_whole_overviews_are_compared_without_the_originals_packages(tmp_path):
    write_video(tmp_path / "video.mp4", bench.camera(96, 160, 3), bench.FPS)
    row = {"video": "tiny", **bench._split_row(tmp_path / "video.mp4", 90, 1, 2)}
    assert (row["frames"], row["decoders"]) == (bench.OVERVIEW_FRAMES, 2) and row["whole_s"] > 0 < row["split_s"]
    head, rule, line = bench.table({"rows": [row]}).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == 8


def test_missing_packages_of_the_original_are_named(monkeypatch):
    monkeypatch.setenv("FORCE_QWENVL_VIDEO_READER", "")
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    with pytest.raises(RuntimeError, match="pip install --no-deps --target DIR qwen-vl-utils torchvision"):
        bench._make_original(None)


def test_a_video_too_short_for_the_crops_is_a_one_line_error():
    command = [sys.executable, "-m", "scripts.bench", "video", "--seconds", "10"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (run.returncode, run.stdout) == (1, "") and run.stderr == "error: --seconds 10 must be at least 80\n"
