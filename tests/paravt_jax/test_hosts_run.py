"""A run on several hosts is the run of one: same episodes, same metrics, one directory; what ends one ends all."""

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
    "train.prompts_per_step=3",  # two for one host, one for the other; none for some of many
    "train.num_steps=3",
    "checkpoint.every_steps=1",
    "data.validation=synthetic",
    "validation.max_prompts=3",
    "validation.every_steps=3",
]


def start(folder, run_dir, num):
    """A run on so many hosts, each with a device and a part of everything."""
    mesh = [f"mesh.fsdp={num}", f"pack.num_rows={num}"]
    return several.start_command(folder, "paravt_jax.train", arguments(run_dir, *STEPS, *mesh), num)


def go_on(folder, run_dir, num):
    """A copy of a run, which so many hosts end."""
    again = shutil.copytree(run_dir, folder / "run")
    ended_well(start(folder / "said", again, num))
    return again


def ended_well(started):
    ended = started.ended(400)
    assert [one.code for one in ended] == [0] * len(ended), "\n\n".join(one.said[-3000:] for one in ended)
    return ended


def send(started, host, number, when, deadline_s=200):
    """A signal to one host once something is so."""
    give_up_s = time.monotonic() + deadline_s
    while not when() and time.monotonic() < give_up_s:
        time.sleep(0.05)
    os.kill(started.processes[host].pid, number)


def saved(run_dir):
    return sorted(int(entry.name) for entry in (run_dir / "checkpoints").glob("*") if entry.name.isdecimal())


def test_hosts_with_other_settings_end_with_one_sentence_before_anything_is_made(tmp_path):
    joint = [*STEPS, f"hosts.coordinator=127.0.0.1:{several.free_port()}", "hosts.num=2"]
    own = [[f"hosts.index={host}", f"train.max_missing_frac=0.{1 + host}"] for host in range(2)]
    each = [("paravt_jax.train", arguments(tmp_path / "run", *joint, *more), {}) for more in own]
    for ended in several.Started(tmp_path / "said", 2, 1, several.command, each).ended(100):
        assert ended.code == 1 and ended.said.count("error:") == 1
        assert "train.max_missing_frac is 0.2 there and 0.1 here; start all hosts with the same settings" in ended.last
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("theirs", "said"),
    [("nowhere", "nowhere"), ("other", "; give all hosts the same data and the same model")],
)
def test_a_host_with_another_model_or_none_ends_all_before_anything_is_trained(theirs, said, tiny_hf, tmp_path):
    make_tiny(tmp_path / "other", 1)
    models = [{"MODEL": str(tiny_hf)}, {"MODEL": str(tmp_path / theirs)}]
    told = arguments(tmp_path / "run", *STEPS, "model.path=${oc.env:MODEL}")
    for ended in several.start_command(tmp_path / "said", "paravt_jax.train", told, own=models).ended(100):
        assert ended.code == 1 and ended.said.count("error:") == 1 and said in ended.last
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def said_in(run_dir):
    """Every id of every episode, in the order of the data."""
    episodes = episodes_of(run_dir)
    return [(one["id"], one["visit"], [piece["ids"] for piece in one["segments"]]) for one in episodes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """On one host."""
    folder = tmp_path_factory.mktemp("whole")
    ended_well(start(folder / "said", folder / "run", 1))
    return folder / "run"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """On four hosts, one of which was killed after the first checkpoint; and how all ended."""
    folder = tmp_path_factory.mktemp("begun")
    started = start(folder / "said", folder / "run", 4)
    send(started, 3, signal.SIGKILL, lambda: saved(folder / "run"))
    return folder / "run", started.ended(120)


@pytest.fixture(scope="module")
def stopped(begun, tmp_path_factory):
    """The same on two hosts, of which one was told to stop after a step, and how both ended."""
    folder = tmp_path_factory.mktemp("stopped")
    run_dir = shutil.copytree(begun[0], folder / "run")
    started = start(folder / "said", run_dir, 2)
    send(started, 1, signal.SIGTERM, lambda: "step 2/3" in started.files[0].read_text())
    return run_dir, ended_well(started)


def test_a_killed_host_ends_all_others_with_a_sentence_that_names_it(begun):
    run_dir, (*others, victim) = begun
    assert victim.code == -signal.SIGKILL and saved(run_dir)[0] == 1
    for other in others:
        assert other.code == 1 and "Traceback" not in other.said
        assert other.last.startswith("error: host 3 (") and "is lost" in other.last


@pytest.mark.timeout(600)
def test_sigterm_on_one_host_saves_on_all_and_the_end_is_bit_for_bit_that_of_two_hosts(begun, stopped, tmp_path):
    run_dir, ended = stopped
    assert saved(run_dir)[-1] == 2 and len(metrics_of(run_dir)) == 2
    assert all("stopping: a checkpoint follows" in one.said for one in ended)
    again = go_on(tmp_path / "again", run_dir, 2)
    undisturbed = go_on(tmp_path / "undisturbed", begun[0], 2)
    assert metrics_of(again) == metrics_of(undisturbed) and said_in(again) == said_in(undisturbed)
    assert arrays_of(again, 3) and arrays_of(again, 3) == arrays_of(undisturbed, 3)


@pytest.mark.timeout(600)
def test_a_run_on_four_then_two_then_eight_hosts_is_that_of_one(stopped, whole, tmp_path):
    run_dir = go_on(tmp_path, stopped[0], 8)
    assert (run_dir / "validation.jsonl").read_text().count("\n") == 2
    assert said_in(run_dir) == said_in(whole)
    for ours, theirs in zip(metrics_of(whole), metrics_of(run_dir), strict=True):
        assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)  # sums of floats are added up in another order
