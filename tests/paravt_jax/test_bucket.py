"""Runs with checkpoints in a bucket resume on a fresh disk, also on several hosts."""

import os
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import forked
import hosts as several
import pytest
from training import QUICK, arguments, arrays_of, metrics_of, train_forked

from paravt_jax.run.lease import OWNER

pytestmark = pytest.mark.slow
ADDRESS, PREFIX = "gs://bkt/runs/x", "bkt/runs/x/"
THREE_STEPS = [*QUICK, "train.num_steps=3", "checkpoint.every_steps=1", "checkpoint.keep=9"]


def arrays_in(gcs, step) -> dict[str, bytes]:
    """Returns the bytes of a checkpoint's array files in the bucket."""
    names = gcs.names(f"{PREFIX}checkpoints/{step}/")
    return {
        name: gcs.objects[f"{PREFIX}checkpoints/{step}/{name}"][1]
        for name in sorted(names)
        if name.startswith(("params/", "optimizer/")) and name.rpartition("/")[2][0].isdigit()
    }


def start(directory: Path, url: str) -> ForkServerProcess:
    directory.mkdir()
    words, output = arguments(ADDRESS, *THREE_STEPS), str(directory / "output")
    environment = {"TENSORSTORE_GCS_HTTP_URL": url, "XDG_CACHE_HOME": str(directory / "cache")}
    return forked.start("paravt_jax.train", words, output, cwd=str(directory), **environment)


@pytest.mark.nightly
def test_a_killed_run_resumes_from_the_bucket_on_a_fresh_disk(gcs, tmp_path):
    train_forked(tmp_path / "undisturbed", *THREE_STEPS)
    first = start(tmp_path / "first", gcs.url)
    forked.wait_until(lambda: f"{PREFIX}checkpoints/1/state.json" in gcs.objects, first, tmp_path / "first" / "output")
    first.kill()
    first.join()
    del gcs.objects[f"{PREFIX}{OWNER}"]  # simulates an expired lease
    second = start(tmp_path / "second", gcs.url)
    second.join(200)
    log = (tmp_path / "second" / "output").read_text()
    assert second.exitcode == 0 and "resuming after step" in log, log
    run_dir = tmp_path / "second" / "runs" / "x"
    assert metrics_of(run_dir) == metrics_of(tmp_path / "undisturbed") and not (run_dir / "checkpoints").exists()
    assert arrays_in(gcs, 3) == arrays_of(tmp_path / "undisturbed", 3)
    assert gcs.objects[f"{PREFIX}metrics.jsonl"][1] == (run_dir / "metrics.jsonl").read_bytes()
    assert {"config.json", "settings.jsonl", "episodes/000003.jsonl"} <= gcs.names(PREFIX)
    assert f"{PREFIX}{OWNER}" not in gcs.objects


def command_on_disk(module: str, words: list[str], environment: dict[str, str]) -> None:
    os.chdir(environment["DISK"])
    several.command(module, words, environment)


def train_on_two(folder: Path, url: str, num_steps: int) -> list[several.HostExit]:
    settings = [f"train.num_steps={num_steps}", "mesh.fsdp=2", "pack.num_rows=2", "train.prompts_per_step=2"]
    disks = [folder / f"disk{host}" for host in range(2)]
    for disk in disks:
        disk.mkdir(parents=True)
    own = [{"DISK": str(disk), "TENSORSTORE_GCS_HTTP_URL": url} for disk in disks]
    words = arguments(ADDRESS, *THREE_STEPS, *settings)
    return several.start_command(folder / "output", "paravt_jax.train", words, own=own, work=command_on_disk).wait()


@pytest.mark.nightly
def test_a_run_on_two_hosts_without_a_shared_disk_resumes_from_the_bucket(gcs, tmp_path):
    for number, steps in enumerate((1, 2)):
        ended = train_on_two(tmp_path / str(number), gcs.url, steps)
        assert [host.code for host in ended] == [0, 0], "\n\n".join(host.output[-3000:] for host in ended)
    assert "resuming after step 1 of 2" in ended[0].output
    assert len(metrics_of(tmp_path / "1" / "disk0" / "runs" / "x")) == 2
    assert {name.split("/")[1] for name in gcs.names(PREFIX) if name.startswith("checkpoints/")} == {"1", "2"}
