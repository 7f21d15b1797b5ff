"""The trainer as a user runs it: from a config to metrics, checkpoints and plots, through kills and restarts."""

import fcntl
import itertools
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

import numpy as np
import pytest
from training import QUICK, ROOT, arrays_of, command, environment, episodes_of, metrics_of, train, train_here

import model_port
from model_port.export import export

pytestmark = pytest.mark.slow

MUST_BE_THERE = {
    *("rollout/format_reward", "rollout/parseable_frac", "rollout/tool_calls_mean", "rollout/tool_use_frac"),
    *("rollout/reward_mean", "rollout/accuracy_mean", "rollout/frame_budget_mean"),
    *("mismatch/behavior_kl", "mismatch/behavior_kl_structural", "loss/policy", "loss/kl_ref", "loss/clip_frac"),
    *("optim/grad_norm", "time/rollout_s", "time/update_s", "time/publish_s", "time/step_s", "perf/tokens_per_s"),
    *("perf/dummy_frac", "policy_version", "staleness_mean"),
}
NUM_STEPS = 5
WHOLE = [*QUICK, f"train.num_steps={NUM_STEPS}", "checkpoint.every_steps=2", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = train(run_dir, *WHOLE)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_the_smoke_run_leaves_everything_that_is_promised(tmp_path):
    done = train(tmp_path / "run", "rollout.max_new_tokens=64")
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not MUST_BE_THERE - set(lines[0])
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["mismatch/behavior_kl"] < 1e-6 for line in lines if line["perf/num_batches"])
    assert len(episodes_of(run_dir)) == 4 * 2 * 8
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4"]
    assert {path.stem for path in (run_dir / "plots").glob("*.png")} >= {"reward_terms", "format_and_calls", "mismatch"}
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings["config"]["train"]["num_steps"] == 4
    assert settings["packages"]["jax"]
    assert [json.loads(line)["step"] for line in (run_dir / "validation.jsonl").read_text().splitlines()] == [2, 4]
    export(run_dir / "checkpoints" / "4", tmp_path / "hf", "float32")
    before, after = model_port.load(run_dir / "tiny"), model_port.load(tmp_path / "hf")
    ids = np.arange(5, 50)
    assert not np.array_equal(model_port.logits(before, ids), model_port.logits(after, ids))


def test_one_seed_gives_one_run(whole, tmp_path):
    again, other = tmp_path / "again", tmp_path / "other"
    assert train(again, *WHOLE).returncode == 0
    assert metrics_of(again) == metrics_of(whole)
    assert train(other, *WHOLE, "seed=1", "train.num_steps=1").returncode == 0
    assert metrics_of(other)[0] != metrics_of(whole)[0]


def on_a_terminal(run_dir: Path):
    """The trainer on a pseudo terminal, where it says which phase of a step it is in."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(run_dir, *WHOLE), stderr=theirs, stdout=theirs, stdin=theirs, cwd=ROOT, env=environment(COLUMNS="200")
    )
    os.close(theirs)
    return process, ours


def kill_when(run_dir: Path, moment: str, after_s: float, deadline_s: float = 120.0) -> bool:
    """Starts the trainer and kills it `after_s` after it says `moment`; False when it came to its end before."""
    process, terminal = on_a_terminal(run_dir)
    said, give_up_s = b"", time.monotonic() + deadline_s
    try:
        while time.monotonic() < give_up_s:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    said += os.read(terminal, 2**16)
                except OSError:  # its end of the terminal is closed
                    break
            if moment.encode() in said or (moment == "checkpoint" and any((run_dir / "checkpoints").glob(".*"))):
                time.sleep(after_s)
                break
        else:
            pytest.fail(f"the trainer never said {moment!r}: {said[-2000:].decode(errors='replace')}")
        finished = process.poll() is not None
        process.kill()
        code = process.wait()
        assert not finished or code == 0, said[-2000:].decode(errors="replace")
        return not finished
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.timeout(600)
def test_a_run_killed_at_ten_moments_ends_as_if_it_never_was(whole, tmp_path):
    run_dir, chance = tmp_path / "killed", random.Random(0)
    moments = [
        "rollout",
        "update",
        "checkpoint",
        "publish",
        "rollout",
        "update",
        "publish",
        "checkpoint",
        "rollout",
        "update",
    ]
    kills = [kill_when(run_dir, moment, chance.uniform(0, 0.6)) for moment in moments]
    assert sum(kills) >= 8
    done = train(run_dir, *WHOLE)
    assert done.returncode == 0, done.stderr
    assert metrics_of(run_dir) == metrics_of(whole)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(whole, NUM_STEPS)
    ids = [(episode["step"], episode["id"]) for episode in episodes_of(run_dir)]
    assert sorted(ids) == sorted((episode["step"], episode["id"]) for episode in episodes_of(whole))
    assert len(set(ids)) == len(ids)


def test_sigterm_saves_and_ends_well_and_the_run_goes_on_from_there(whole, tmp_path):
    run_dir = tmp_path / "stopped"
    with subprocess.Popen(command(run_dir, *WHOLE), stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "1/5" in line:  # the first step is done, and every_steps=2 has saved nothing
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    saved = [int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()]
    assert saved
    assert len(metrics_of(run_dir)) == max(saved)
    assert train(run_dir, *WHOLE).returncode == 0
    assert metrics_of(run_dir) == metrics_of(whole)
    assert arrays_of(run_dir, NUM_STEPS) == arrays_of(whole, NUM_STEPS)


def test_a_finished_run_started_again_does_nothing(whole):
    before = {path: path.stat().st_mtime_ns for path in (whole / "episodes").iterdir()}
    assert train(whole, *WHOLE).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (whole / "episodes").iterdir()} == before
    assert len(metrics_of(whole)) == NUM_STEPS


def test_a_run_with_more_steps_than_are_asked_for_now_is_done(whole, tmp_path):
    run_dir = tmp_path / "longer"
    shutil.copytree(whole, run_dir)
    done = train(run_dir, *WHOLE, f"train.num_steps={NUM_STEPS - 2}")
    assert done.returncode == 0, done.stderr
    assert len(metrics_of(run_dir)) == NUM_STEPS


def test_rollouts_ahead_of_the_update_are_never_staler_than_allowed(tmp_path):
    train_here(tmp_path / "run", *QUICK, "train.num_steps=6", "train.max_staleness=2", "optim.learning_rate=1e-5")
    episodes = episodes_of(tmp_path / "run")
    assert len({episode["id"] for episode in episodes}) == len(episodes) == 6 * 4
    ages = [
        episode["step"] - 1 - segment["version"]
        for episode in episodes
        for segment in episode["segments"]
        if segment["kind"] == "sampled"
    ]
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2


def test_every_option_of_the_update_runs(tmp_path):
    train_here(
        tmp_path / "run",
        *QUICK,
        "train.num_steps=2",
        "train.updates_per_step=2",
        "train.subagent_loss=true",
        "train.max_resamples=1",
        "loss.kl_in=reward",
        "loss.geometric_mask=true",
        "advantage.batch_normalise=true",
        "optim.train_vision=true",
        "video.stratified=true",
        "mesh.fsdp=2",
        "mesh.tensor=2",
        "pack.num_rows=2",
    )
    assert [line["policy_version"] for line in metrics_of(tmp_path / "run")] == [2, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/nowhere"], "/nowhere is not a directory"),
        (["data.train=/nowhere.parquet"], "/nowhere.parquet"),
        (["rollout.token_px=28"], "rollout.token_px=28, but a token of .* shows 32 px"),
        (["mesh.data=16", "pack.num_rows=16"], "needs 16 devices"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_logged(overrides, message, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        train_here(tmp_path / "run", *overrides)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_error_is_one_line_and_no_success(tmp_path):
    done = train(tmp_path / "run", "train.num_step=3")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: train.num_step is no setting (did you mean train.num_steps?)")


def test_a_run_does_not_go_on_with_other_prompts(whole):
    with pytest.raises(ValueError, match="seed=1 are not what the run in"):
        train_here(whole, *WHOLE, "seed=1")


def test_two_trainers_do_not_share_a_directory(whole):
    with (whole / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process trains in"):
            train_here(whole, *WHOLE)


def test_servers_serve_the_rollouts_and_get_every_version(tmp_path):
    """The same run with real SGLang servers: started, checked against the learner, given new weights, stopped."""
    run_dir = tmp_path / "run"
    done = train(
        run_dir,
        *QUICK,
        "engine.kind=sglang",
        "train.num_steps=2",
        deadline_s=280,
    )
    assert done.returncode == 0, done.stderr
    lines = metrics_of(run_dir)
    assert len(lines) == 2
    assert all(line["mismatch/behavior_kl"] < 1e-6 for line in lines)
    versions = [
        (episode["step"], segment["version"])
        for episode, segment in itertools.chain.from_iterable(
            ((e, s) for s in e["segments"] if s["kind"] == "sampled") for e in episodes_of(run_dir)
        )
    ]
    assert versions
    assert all(version == step - 1 for step, version in versions)
