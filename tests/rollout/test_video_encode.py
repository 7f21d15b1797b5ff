"""Generated videos are byte-identical in every process, so that repeated runs see the same videos."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
WRITE_ALL = """
import hashlib
from pathlib import Path

from make_video import at_fps, write_video as write_clip
from paravt_jax.bench.camera import FPS, camera
from paravt_jax.data.synthetic import make_synthetic
from scripts.miniature.world import make_world
from rollout.video.encode import write_video

make_synthetic(Path("synthetic"))
make_world(Path("miniature"), seed=0, num_videos=8)
write_video(Path("bench.mp4"), camera(64, 32, 3), FPS)
write_video(Path("bench_360p.mp4"), camera(360, 640, 1), FPS)
for ending in ("mp4", "mkv"):
    write_clip(Path(f"clip.{ending}"), at_fps(30, 60), size_px=(480, 640))
for path in sorted(Path().rglob("*.m*")):
    print(path, hashlib.sha256(path.read_bytes()).hexdigest())
"""


def files_written(directory: Path, memory: int, first: str = "") -> list[str]:
    """Returns names and hashes; glibc fills allocated and freed memory with bytes derived from `memory`."""
    directory.mkdir()
    return subprocess.run(
        [sys.executable, "-c", f"{first}\n{WRITE_ALL}"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_PERTURB_": str(memory)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_written(tmp_path_factory.mktemp("once") / "made", memory=0)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [85, pytest.param(255, marks=pytest.mark.nightly)])
def test_a_file_does_not_depend_on_uninitialized_memory(files, tmp_path, memory):
    assert len(files) == 8 + 8 + 4
    assert files_written(tmp_path / "made", memory) == files


@pytest.mark.slow
def test_a_file_does_not_depend_on_the_number_of_cores(files, tmp_path):
    assert files_written(tmp_path / "made", memory=0, first=ONE_CORE) == files
