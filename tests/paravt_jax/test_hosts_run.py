"""A run on several hosts is the run of one: same episodes, same metrics, one directory; what ends one ends all."""

import json
import os
import shutil
import signal
import time

import hosts as several
import pytest
from training import QUICK, arguments, arrays_of, episodes_of, metrics_of

from model_port.tiny import make_tiny

pytestmark = pytest.mark.slow

STEPS = [
    *QUICK,
    "mesh.fsdp=2",
    "pack.num_rows=2",
    "train.prompts_per_step=3",  # two for one host, one for the other
    "train.num_steps=3",
    "checkpoint.every_steps=3",
    "data.validation=synthetic",
    "validation.max_prompts=3",
    "validation.every_steps=3",
]


def start(folder, run_dir, num=2):
    """A run on hosts that have two devices together."""
    return several.start_command(folder, "paravt_jax.train", arguments(run_dir, *STEPS), num, devices=2 // num)


def ended_well(started, code=0):
    ended = started.ended(280)
    assert [one.code for one in ended] == [code] * len(ended), "\n\n".join(one.said[-3000:] for one in ended)
    return ended


def send(started, host, number, after, deadline_s=200):
    """A signal to one host once host 0 says something."""
    give_up_s = time.monotonic() + deadline_s
    while after not in started.files[0].read_text() and time.monotonic() < give_up_s:
        time.sleep(0.1)
    os.kill(started.processes[host].pid, number)


def saved(run_dir):
    return sorted(int(entry.name) for entry in (run_dir / "checkpoints").iterdir() if entry.name.isdecimal())


def test_hosts_with_other_settings_end_with_one_sentence_before_anything_is_made(tmp_path):
    joint = [*STEPS, f"hosts.coordinator=127.0.0.1:{several.free_port()}", "hosts.num=2"]
    own = [[f"hosts.index={host}", f"train.max_missing_frac=0.{1 + host}"] for host in range(2)]
    each = [("paravt_jax.train", arguments(tmp_path / "run", *joint, *more), {}) for more in own]
    for ended in several.Started(tmp_path / "said", 2, 1, several.command, each).ended(100):
        assert ended.code == 1 and ended.said.count("error:") == 1
        assert "train.max_missing_frac is 0.2 there and 0.1 here; start all hosts with the same settings" in ended.said
    assert not (tmp_path / "run").exists()


def test_a_host_with_another_reward_of_its_user_ends_all_and_the_file_is_named(tmp_path):
    for number in range(2):
        (tmp_path / f"home{number}").mkdir()
        (tmp_path / f"home{number}" / "own.py").write_text(
            f"WEIGHT = {number}\n\n\ndef reward(**told):\n    return []\n"
        )
    homes = [{"HOME": str(tmp_path / f"home{number}")} for number in range(2)]
    told = arguments(tmp_path / "run", *STEPS, "reward.plugin=~/own.py:reward")
    for ended in several.start_command(tmp_path / "said", "paravt_jax.train", told, own=homes).ended(100):
        assert ended.code == 1 and ended.said.count("error:") == 1
        assert "~/own.py is " in ended.said and "start all hosts with the same settings and the same code" in ended.said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("theirs", "said"),
    [("nowhere", "nowhere"), ("other", "; give all hosts the same data and the same model")],
)
def test_a_host_with_another_model_or_none_ends_all_before_anything_is_trained(theirs, said, tiny_hf, tmp_path):
    make_tiny(tmp_path / "other", 1)
    models = [{"MODEL": str(tiny_hf)}, {"MODEL": str(tmp_path / theirs)}]
    told = arguments(tmp_path / "run", *STEPS, "model.path=${oc.env:MODEL}")
    for host, ended in enumerate(
        several.start_command(tmp_path / "said", "paravt_jax.train", told, own=models).ended(100)
    ):
        assert ended.code not in (0, None) and (said in ended.said or (theirs, host) == ("nowhere", 0))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def said_in(run_dir):
    """Every id of every episode, in the order of the data."""
    episodes = episodes_of(run_dir)
    return [(one["id"], one["visit"], [piece["ids"] for piece in one["segments"]]) for one in episodes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """On two hosts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended_well(start(folder / "said", folder / "run"))
    return folder / "run"


def test_every_step_says_which_host_took_longest_for_what(undisturbed):
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for what in ("rollout", "update", "devices", "publish"):
            most, least = (row[f"time/hosts/{what}_{of}_s"] for of in ("max", "min"))
            assert most >= least >= 0 and row[f"perf/hosts/{what}_slowest"] in (0, 1)
    assert len(rows) == 3


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Likewise, but one of them was told to stop after the first step; and how both ended."""
    folder = tmp_path_factory.mktemp("stopped")
    started = start(folder / "said", folder / "run")
    send(started, 1, signal.SIGTERM, "step 1/3")
    return folder / "run", ended_well(started, 128 + signal.SIGTERM)


def kill(started, victim, after):
    """One host, once host 0 says something; the other one ends too."""
    send(started, victim, signal.SIGKILL, after)
    ended = started.ended(100)
    assert ended[victim].code == -signal.SIGKILL and ended[1 - victim].code not in (0, None)


def test_sigterm_on_one_host_saves_on_all_which_exit_143(stopped):
    run_dir, ended = stopped
    steps = saved(run_dir)
    assert steps and len(metrics_of(run_dir)) == steps[-1] < 3
    assert all("stopping: a checkpoint follows" in one.said for one in ended)


@pytest.mark.timeout(600)
def test_a_run_that_was_stopped_and_whose_host_0_was_killed_goes_on_bit_for_bit(stopped, undisturbed, tmp_path):
    """Killed after a step that no checkpoint has, which is made again."""
    again = shutil.copytree(stopped[0], tmp_path / "run")
    num_saved = saved(again)[-1]
    kill(start(tmp_path / "said", again), 0, f"step {num_saved + 1}/3")
    assert len(metrics_of(again)) == num_saved + 1 and saved(again)[-1] == num_saved
    ended_well(start(tmp_path / "said again", again))
    assert metrics_of(again) == metrics_of(undisturbed) and said_in(again) == said_in(undisturbed)
    assert arrays_of(again, 3) and arrays_of(again, 3) == arrays_of(undisturbed, 3)
    assert (again / "validation.jsonl").read_text().count("\n") == 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_whose_host_was_killed_goes_on_with_one_as_with_two(stopped, undisturbed, tmp_path):
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    kill(start(tmp_path / "said", run_dir), 1, "going on after step")
    ended_well(start(tmp_path / "said again", run_dir, 1))
    assert said_in(run_dir) == said_in(undisturbed)
    for ours, theirs in zip(metrics_of(undisturbed), metrics_of(run_dir), strict=True):
        assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)  # sums of floats are added up in another order
