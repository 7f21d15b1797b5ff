"""A run that is killed, stopped, restarted or replayed has the same results as an undisturbed run."""

import asyncio
import errno
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
from itertools import cycle, islice
from pathlib import Path

import forked
import pytest
from async_tests import async_test
from training import (
    QUICK,
    ROOT,
    SMOKE,
    arguments,
    arrays_of,
    command,
    episodes_of,
    metrics_of,
    train_forked,
    train_here,
    train_in_loop,
)

from model_port.tiny import make_tiny
from paravt_jax import train as trainer
from paravt_jax.config import load_config
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.sample_order import SampleOrder
from paravt_jax.rl import setup
from paravt_jax.run import training
from paravt_jax.run.process import Stopping

pytestmark = pytest.mark.slow

NUM_STEPS = 5
FIVE_STEPS = [*QUICK, f"train.num_steps={NUM_STEPS}", "checkpoint.every_steps=2", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    train_forked(run_dir, *FIVE_STEPS)
    return run_dir


@pytest.fixture
def finished(undisturbed, tmp_path):
    """A copy of the run, which a test may change."""
    return shutil.copytree(undisturbed, tmp_path / "finished")


def open_run(run_dir: Path, *overrides: str):
    return setup.open_run(load_config(SMOKE, f"run_dir={run_dir}", *FIVE_STEPS, *overrides))


def kill_when(run_dir: Path, moment: str, after_s: float, deadline_s: float = 120.0) -> bool:
    """Starts the trainer and kills it `after_s` after its progress shows `moment`; False if it ended first.

    On a terminal, where the progress shows the phase of a step.
    """
    terminal, child_end = pty.openpty()
    process = forked.start("paravt_jax.train", arguments(run_dir, *FIVE_STEPS), os.ttyname(child_end))
    output, give_up_s = b"", time.monotonic() + deadline_s
    try:
        while time.monotonic() < give_up_s:
            if select.select([terminal], [], [], 0.05)[0]:
                output += os.read(terminal, 2**16)
            is_written = moment == "checkpoint" and any((run_dir / "checkpoints").glob(".*"))
            if is_written or f"| {moment}".encode() in output:  # the bar begins with the phase
                time.sleep(after_s)
                break
            if not process.is_alive():
                break
        else:
            pytest.fail(f"the trainer never printed {moment!r}: {output[-2000:].decode(errors='replace')}")
        finished = not process.is_alive()
        process.kill()
        process.join()
        assert not finished or process.exitcode == 0, output[-2000:].decode(errors="replace")
        return not finished
    finally:
        process.kill()
        os.close(child_end)
        os.close(terminal)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_run_killed_several_times_equals_an_undisturbed_run(num_kills, undisturbed, tmp_path):
    run_dir, chance = tmp_path / "killed", random.Random(0)
    moments = islice(cycle(("checkpoint", "update", "rollout", "publish")), num_kills)
    kills = [kill_when(run_dir, moment, chance.uniform(0, 0.6)) for moment in moments]
    assert sum(kills) >= 0.75 * num_kills
    train_forked(run_dir, *FIVE_STEPS)
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(undisturbed, NUM_STEPS)
    ids = [(episode["step"], episode["id"]) for episode in episodes_of(run_dir)]
    assert sorted(ids) == sorted((episode["step"], episode["id"]) for episode in episodes_of(undisturbed))
    assert len(set(ids)) == len(ids)


@pytest.mark.nightly
def test_sigterm_saves_and_exits_143_and_the_run_resumes_from_there(undisturbed, tmp_path):
    """Its first steps are from a new process, where sets of strings have another order, and equal the other run's."""
    run_dir = tmp_path / "stopped"
    with subprocess.Popen(
        command(run_dir, *FIVE_STEPS), stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | forked.ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1/5" in line:  # the first step is done, and every_steps=2 has saved nothing
                break
        process.send_signal(signal.SIGTERM)
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, errors
    saved = [int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
    assert saved
    assert len(metrics_of(run_dir)) == max(saved)
    printed = (run_dir / "log.txt").read_text()
    assert "stopping: saving a checkpoint" in printed and "1/5" in printed
    train_forked(run_dir, *FIVE_STEPS)
    resumed = (run_dir / "log.txt").read_text().removeprefix(printed)
    assert f"resuming after step {max(saved)} of 5" in resumed and "5 of 5 steps are done" in resumed
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(undisturbed, NUM_STEPS)


@pytest.mark.parametrize(("steps_left", "validation_stopped", "code"), [(1, False, 143), (0, False, 0), (0, True, 143)])
@async_test
async def test_a_signal_before_the_end_is_in_the_exit_code(finished, monkeypatch, steps_left, validation_stopped, code):
    order = []
    monkeypatch.setattr(Stopping, "cancel_grace", lambda _: order.append("the grace period ends"))
    monkeypatch.setattr(training, "make_plots", lambda _: order.append("plots"))
    monkeypatch.setattr("threading.Timer.start", lambda _: None)
    async with open_run(finished, f"train.num_steps={NUM_STEPS + steps_left}") as run:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.collect() is None
        await run.training.directory.stopping.wait()
        run.training.validation_stopped = validation_stopped
    assert run.training.exit_code == code
    assert order[:2] == ["the grace period ends", "plots"]  # with the checkpoint: servers may take longer to end


def test_a_run_that_stops_in_its_first_step_starts_again_with_any_model(tmp_path, capsys):
    """A checkpoint would give a run with another model.path the weights of the first one."""

    async def first_weights(name: str) -> float:
        make_tiny(tmp_path / name, seed=len(name))
        config = load_config(SMOKE, f"run_dir={tmp_path / 'run'}", *QUICK, f"model.path={tmp_path / name}")
        async with setup.open_run(config) as run:
            return float(run.training.learner.model.text.embed.table_vd[...].sum())

    assert asyncio.run(first_weights("a")) != asyncio.run(first_weights("other"))
    assert not [*(tmp_path / "run" / "checkpoints").iterdir()]
    assert capsys.readouterr().err.count("0 of 4 steps are done; the same command resumes the run") == 2


@pytest.mark.parametrize("num_steps", [NUM_STEPS, pytest.param(NUM_STEPS - 2, marks=pytest.mark.nightly)])
def test_restarting_a_finished_run_does_nothing(num_steps, finished):
    times = {path: path.stat().st_mtime_ns for path in (finished / "episodes").iterdir()}
    settings = (finished / "config.json").read_bytes()
    log = train_forked(finished, *FIVE_STEPS, f"train.num_steps={num_steps}", "optim.learning_rate=0.5")
    assert f"{NUM_STEPS} of {NUM_STEPS} steps are done" in log
    assert (finished / "config.json").read_bytes() == settings  # no step had that learning rate
    (line,) = [line for line in (finished / "log.txt").read_text().splitlines() if "no step is left" in line]
    ignored = f"no step is left of {num_steps} in {finished}; the settings stay as they were, without "
    assert ignored in line and "optim.learning_rate: " in line
    assert {path: path.stat().st_mtime_ns for path in (finished / "episodes").iterdir()} == times
    assert len(metrics_of(finished)) == NUM_STEPS


def test_a_run_without_room_for_plots_is_finished(finished, monkeypatch, capsys):
    def make_plots(run_dir: Path) -> list[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir / "plots"))

    monkeypatch.setattr(training, "make_plots", make_plots)
    run = asyncio.run(trainer.train(load_config(SMOKE, f"run_dir={finished}", *FIVE_STEPS)))
    assert run.training.exit_code == 0
    *_, plots, last = capsys.readouterr().err.splitlines()
    assert plots.startswith("no plots: [Errno 28] No space left on device: ") and "5 of 5 steps are done" in last
    assert last.endswith("/checkpoints/5")


@async_test
async def test_a_finished_run_compiles_no_update(finished):
    async with open_run(finished) as run:
        assert run.training.ahead is None


def settings_log(run_dir: Path) -> list[tuple[int, int]]:
    lines = map(json.loads, (run_dir / "settings.jsonl").read_text().splitlines())
    return [(line["after_step"], line["config"]["train"]["num_steps"]) for line in lines]


def test_changed_settings_are_one_line_and_another_seed_needs_allow_changes(finished):
    other = (*FIVE_STEPS, f"train.num_steps={NUM_STEPS + 1}", "train.group_size=2", "seed=1")
    with pytest.raises(ValueError, match=r"seed=1, but was 0 in the earlier steps of .* --allow-changes"):
        train_here(finished, *other)
    assert settings_log(finished) == [(0, NUM_STEPS)]
    log = train_forked(finished, *other, "--allow-changes")
    resumed = f"resuming after step {NUM_STEPS} of {NUM_STEPS + 1} in {finished}; "
    (line,) = [line for line in log.splitlines() if " -> " in line]
    assert line.startswith(resumed) and f"train.num_steps: {NUM_STEPS} -> {NUM_STEPS + 1}" in line
    assert "train.group_size: 4 -> 2" in line
    assert settings_log(finished) == [(0, NUM_STEPS), (NUM_STEPS, NUM_STEPS + 1)]
    assert len(metrics_of(finished)) == NUM_STEPS + 1
    assert "the data changed and start from the beginning" in log
    first, last = ([e["id"] for e in episodes_of(finished) if e["step"] == step] for step in (1, NUM_STEPS + 1))
    assert first != last


@pytest.mark.parametrize("updates", [1, 2])
@async_test
async def test_the_learning_rates_schedule_ends_with_the_run_after_another_number_of_updates(updates, finished):
    changed = ("train.num_steps=10", "train.prompts_per_step=2", f"train.updates_per_step={updates}")
    async with open_run(finished, *changed) as run:
        assert run.training.version == NUM_STEPS
        assert run.training.learner.num_steps == NUM_STEPS + (10 - NUM_STEPS) * updates


@async_test
async def test_a_resumed_run_reports_a_changed_reward(finished, tmp_path, capsys):
    own = tmp_path / "own.py"
    for weight in (1, 2):
        own.write_text(f"def reward(**episode):\n    return {weight} * []\n")
        async with open_run(finished, "train.num_steps=9", f"reward.plugin={own}:reward"):
            pass
    assert len(settings_log(finished)) == 3
    resumed = [line for line in capsys.readouterr().err.splitlines() if f"resuming after step {NUM_STEPS} of 9" in line]
    assert ["checksum of" in line for line in resumed] == [False, True]
    assert f"; checksum of {own}: '" in resumed[1] and not any("lost files" in line for line in resumed)


def test_other_rows_of_the_same_file_need_allow_changes(finished):
    rows, record = finished / "synthetic" / "fewer.jsonl", finished / "config.json"
    rows.write_text("".join((rows.parent / "train.jsonl").read_text().splitlines(keepends=True)[1:]))
    record.write_text(record.read_text().replace('"train": "synthetic"', f'"train": "{rows}"'))
    message = rf"^data\.train={rows} or seed=0 changed since .* files of .* --allow-changes$"
    with pytest.raises(ValueError, match=message):
        train_here(finished, *FIVE_STEPS, f"data.train={rows}", f"train.num_steps={NUM_STEPS + 1}")


def test_other_weights_under_the_same_path_need_allow_changes(finished):
    """With all weights trained, the checkpoint has the policy, but the reference would be another model."""
    shutil.rmtree(finished / "tiny")
    make_tiny(finished / "tiny", seed=1)
    more = (*FIVE_STEPS, f"train.num_steps={NUM_STEPS + 1}")
    with pytest.raises(ValueError, match=r"^the weights of model\.path=tiny have changed since .* --allow-changes to"):
        train_here(finished, *more)
    train_forked(finished, *more, "--allow-changes")
    assert len(metrics_of(finished)) == NUM_STEPS + 1


def test_a_run_that_lost_a_video_resumes_at_its_position(finished, monkeypatch, caplog):
    rows = finished / "synthetic" / "train.jsonl"
    order = SampleOrder(load_prompts(rows, video_root="", max_bad_frac=0.0).prompts, seed=0)
    (kept,), (lost,) = order[NUM_STEPS].item.videos, order[NUM_STEPS + 1].item.videos
    assert kept != lost
    monkeypatch.setattr("paravt_jax.data.synthetic.write_atomic", lambda *_: None)  # else it is made again
    Path(lost).unlink()
    more = ("data.max_bad_frac=0.5", "train.prompts_per_step=2", f"train.num_steps={NUM_STEPS + 1}")
    train_here(finished, *FIVE_STEPS, *more)
    assert "rows are dropped (missing file: 3, for example" in caplog.text and Path(lost).name in caplog.text
    assert "; rows with lost files keep their place" in (finished / "log.txt").read_text()
    episodes = [episode for episode in episodes_of(finished) if episode["step"] == NUM_STEPS + 1]
    samples = [order[NUM_STEPS], order[NUM_STEPS + 1]]
    names = [f"{sample.number:06d}-{sample.item.id}" for sample in samples for _ in range(4)]
    assert [episode["id"].partition("/")[0] for episode in episodes] == names
    assert [episode.get("reason") for episode in episodes] == 4 * [None] + 4 * ["video"]


@async_test
async def test_a_log_without_its_checkpoints_is_not_started_over(finished):
    shutil.rmtree(finished / "checkpoints")
    with pytest.raises(RuntimeError, match=f"has a log of {NUM_STEPS} steps but no checkpoint; restore one"):
        await train_in_loop(finished, *FIVE_STEPS)
    assert len(metrics_of(finished)) == NUM_STEPS
    log = finished / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    async with open_run(finished) as run:  # the first checkpoint may be written until the second one is due
        assert run.training.step == 0


def replay(source: Path, run_dir: Path) -> str:
    """Returns the log."""
    done = forked.run("paravt_jax.train", "--replay", source, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_replay_of_a_log_has_the_metrics_episodes_and_weights_of_its_run(undisturbed, tmp_path):
    log = replay(undisturbed, tmp_path / "replay")
    assert f"all {NUM_STEPS} steps have the same metrics as in {undisturbed}" in log
    assert metrics_of(tmp_path / "replay") == metrics_of(undisturbed)
    assert "perf/sampled_tokens_per_s" not in (tmp_path / "replay" / "metrics.jsonl").read_text()
    assert episodes_of(tmp_path / "replay") == episodes_of(undisturbed)
    assert arrays_of(tmp_path / "replay", NUM_STEPS) == arrays_of(undisturbed, NUM_STEPS)


@pytest.mark.nightly
def test_a_replay_of_the_end_of_a_log_starts_from_the_checkpoint_before_it(undisturbed, finished, tmp_path):
    for step in (1, 2):
        (finished / "episodes" / f"{step:06d}.jsonl").unlink()
    log = replay(finished, tmp_path / "replay")
    assert "replaying steps 3 to 5 of" in log and "all 3 steps have the same metrics" in log
    assert metrics_of(tmp_path / "replay") == metrics_of(undisturbed)[2:]
    assert arrays_of(tmp_path / "replay", NUM_STEPS) == arrays_of(undisturbed, NUM_STEPS)


def test_a_replay_with_another_loss_has_other_metrics_and_opens_no_engine(undisturbed, tmp_path, monkeypatch, capsys):
    async def open_engine(*_, **__):
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(setup, "open_engine", open_engine)
    changed = ("loss.kl_coef=0.05", "train.num_steps=2", f"run_dir={tmp_path}")
    config = load_config(undisturbed / "config.json", *changed)
    asyncio.run(trainer.train(config, replay=undisturbed))
    log = capsys.readouterr().err
    assert "loss.kl_coef: 0.01 -> 0.05" in log and "steps have other metrics than" in log
    rows = [*metrics_of(undisturbed)[:2], *metrics_of(tmp_path)]
    of_rollouts = [{key: row[key] for key in row if key.startswith("rollout/")} for row in rows]
    assert of_rollouts[:2] == of_rollouts[2:]
    assert rows[3]["loss/total"] != pytest.approx(rows[1]["loss/total"], rel=1e-3)
    with pytest.raises(ValueError, match=f"has steps of a replay of {undisturbed}, which a normal run cannot continue"):
        asyncio.run(trainer.train(config))


def test_two_trainers_do_not_share_a_directory(undisturbed):
    with (undisturbed / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process uses"):
            train_here(undisturbed, *FIVE_STEPS)
