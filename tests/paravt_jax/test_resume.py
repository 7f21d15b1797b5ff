"""A run that is killed, stopped, started again or replayed ends as if nothing had happened."""

import asyncio
import fcntl
import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import forked
import pytest
from training import (
    QUICK,
    ROOT,
    arguments,
    arrays_of,
    command,
    episodes_of,
    metrics_of,
    train,
    train_forked,
    train_here,
)

from paravt_jax import train as trainer
from paravt_jax.config import load_config
from paravt_jax.rl import setup
from paravt_jax.run import training

pytestmark = pytest.mark.slow

NUM_STEPS = 5
WHOLE = [*QUICK, f"train.num_steps={NUM_STEPS}", "checkpoint.every_steps=2", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train_forked(run_dir, *WHOLE)
    return run_dir


def test_one_seed_gives_one_run(whole, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    done = train(again, *WHOLE)  # in which sets of strings have another order
    assert done.returncode == 0, done.stderr
    assert metrics_of(again) == metrics_of(whole)
    train_forked(other, *WHOLE, "seed=1", "train.num_steps=1")
    assert metrics_of(other)[0] != metrics_of(whole)[0]


def kill_when(run_dir: Path, moment: str, after_s: float, deadline_s: float = 120.0) -> bool:
    """Starts the trainer and kills it `after_s` after it says `moment`; False when it came to its end before.

    On a terminal, where it says which phase of a step it is in.
    """
    terminal, theirs = pty.openpty()
    process = forked.start("paravt_jax.train", arguments(run_dir, *WHOLE), os.ttyname(theirs))
    said, give_up_s = b"", time.monotonic() + deadline_s
    try:
        while time.monotonic() < give_up_s:
            if select.select([terminal], [], [], 0.05)[0]:
                said += os.read(terminal, 2**16)
            if moment.encode() in said or (moment == "checkpoint" and any((run_dir / "checkpoints").glob(".*"))):
                time.sleep(after_s)
                break
            if not process.is_alive():
                break
        else:
            pytest.fail(f"the trainer never said {moment!r}: {said[-2000:].decode(errors='replace')}")
        finished = not process.is_alive()
        process.kill()
        process.join()
        assert not finished or process.exitcode == 0, said[-2000:].decode(errors="replace")
        return not finished
    finally:
        process.kill()
        os.close(theirs)
        os.close(terminal)


@pytest.mark.timeout(600)
def test_a_run_killed_at_ten_moments_ends_as_if_it_never_was(whole, tmp_path):
    run_dir, chance = tmp_path / "killed", random.Random(0)
    moments = (*("rollout", "update", "checkpoint", "publish") * 2, "rollout", "update")
    kills = [kill_when(run_dir, moment, chance.uniform(0, 0.6)) for moment in moments]
    assert sum(kills) >= 8
    train_forked(run_dir, *WHOLE)
    assert metrics_of(run_dir) == metrics_of(whole)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(whole, NUM_STEPS)
    ids = [(episode["step"], episode["id"]) for episode in episodes_of(run_dir)]
    assert sorted(ids) == sorted((episode["step"], episode["id"]) for episode in episodes_of(whole))
    assert len(set(ids)) == len(ids)


def test_sigterm_saves_and_exits_143_and_the_run_resumes_from_there(whole, tmp_path):
    run_dir = tmp_path / "stopped"
    with subprocess.Popen(
        command(run_dir, *WHOLE), stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | forked.ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1/5" in line:  # the first step is done, and every_steps=2 has saved nothing
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, rest
    saved = [int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
    assert saved
    assert len(metrics_of(run_dir)) == max(saved)
    train_forked(run_dir, *WHOLE)
    assert metrics_of(run_dir) == metrics_of(whole)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(whole, NUM_STEPS)


def test_a_finished_run_started_again_does_nothing(whole):
    before = {path: path.stat().st_mtime_ns for path in (whole / "episodes").iterdir()}
    train_forked(whole, *WHOLE)
    assert {path: path.stat().st_mtime_ns for path in (whole / "episodes").iterdir()} == before
    assert len(metrics_of(whole)) == NUM_STEPS


def test_a_run_with_more_steps_than_are_asked_for_now_is_done(whole, tmp_path):
    run_dir = tmp_path / "longer"
    shutil.copytree(whole, run_dir)
    train_forked(run_dir, *WHOLE, f"train.num_steps={NUM_STEPS - 2}")
    assert len(metrics_of(run_dir)) == NUM_STEPS


def settings_log(run_dir: Path) -> list[tuple[int, int]]:
    lines = map(json.loads, (run_dir / "settings.jsonl").read_text().splitlines())
    return [(line["after_step"], line["config"]["train"]["num_steps"]) for line in lines]


def test_what_was_set_otherwise_is_said_and_every_version_kept(whole, tmp_path):
    run_dir = shutil.copytree(whole, tmp_path / "changed")
    said = train_forked(run_dir, *WHOLE, f"train.num_steps={NUM_STEPS + 1}", "train.group_size=2")
    assert "train.group_size: 4 -> 2" in said and f"train.num_steps: {NUM_STEPS} -> {NUM_STEPS + 1}" in said
    assert settings_log(run_dir) == [(0, NUM_STEPS), (NUM_STEPS, NUM_STEPS + 1)]


def test_a_run_goes_on_with_another_seed_only_when_told_to(whole, tmp_path):
    run_dir = shutil.copytree(whole, tmp_path / "changed")
    other = (*WHOLE, f"train.num_steps={NUM_STEPS + 1}", "seed=1")
    with pytest.raises(ValueError, match=r"seed=1, and was 0 in the steps that .* --allow-changes"):
        train_here(run_dir, *other)
    assert settings_log(run_dir) == [(0, NUM_STEPS)]
    said = train_forked(run_dir, *other, "--allow-changes")
    assert len(metrics_of(run_dir)) == NUM_STEPS + 1
    assert "the data are others than before, and begin anew" in said


def test_a_log_without_the_checkpoints_it_needs_is_not_begun_anew(whole, tmp_path):
    run_dir = shutil.copytree(whole, tmp_path / "lost")
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(RuntimeError, match=f"has a log of {NUM_STEPS} steps and no checkpoint; put one back"):
        train_here(run_dir, *WHOLE)
    assert len(metrics_of(run_dir)) == NUM_STEPS


def replay(source: Path, run_dir: Path) -> str:
    """What the command said."""
    done = forked.run("paravt_jax.train", "--replay", source, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_replay_of_a_log_has_the_metrics_episodes_and_weights_of_its_run(whole, tmp_path):
    said = replay(whole, tmp_path / "replay")
    assert f"all {NUM_STEPS} steps have the same metrics as in {whole}" in said
    assert metrics_of(tmp_path / "replay") == metrics_of(whole)
    assert episodes_of(tmp_path / "replay") == episodes_of(whole)
    assert arrays_of(tmp_path / "replay", NUM_STEPS) == arrays_of(whole, NUM_STEPS)


def test_a_replay_of_the_end_of_a_log_begins_with_the_checkpoint_before_it(whole, tmp_path):
    source = shutil.copytree(whole, tmp_path / "source")
    for step in (1, 2):
        (source / "episodes" / f"{step:06d}.jsonl").unlink()
    said = replay(source, tmp_path / "replay")
    assert "replaying steps 3 to 5 of" in said and "all 3 steps have the same metrics" in said
    assert metrics_of(tmp_path / "replay") == metrics_of(whole)[2:]
    assert arrays_of(tmp_path / "replay", NUM_STEPS) == arrays_of(whole, NUM_STEPS)


def test_another_loss_has_other_metrics_on_the_same_episodes_and_no_engine_is_opened(
    whole, tmp_path, monkeypatch, capsys
):
    async def opened(*_, **__):
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(setup, "open_engine", opened)
    monkeypatch.setattr(training, "make_plots", lambda run_dir: [])
    changed = ("loss.kl_coef=0.05", "train.num_steps=2", f"run_dir={tmp_path}")
    config = load_config(whole / "config.json", *changed)
    asyncio.run(trainer.train(config, replay=whole))
    said = capsys.readouterr().err
    assert "loss.kl_coef: 0.01 in the run, 0.05 here" in said and "steps have other metrics than" in said
    before, now = metrics_of(whole)[:2], metrics_of(tmp_path)
    of_rollouts = [{key: row[key] for key in row if key.startswith("rollout/")} for row in (*before, *now)]
    assert of_rollouts[:2] == of_rollouts[2:]
    assert now[1]["loss/total"] != pytest.approx(before[1]["loss/total"], rel=1e-3)
    with pytest.raises(ValueError, match=f"has steps of a replay of {whole}, not of a run with episodes of its own"):
        asyncio.run(trainer.train(config))


def test_two_trainers_do_not_share_a_directory(whole):
    with (whole / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process trains in"):
            train_here(whole, *WHOLE)
