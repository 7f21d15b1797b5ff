"""A run on several hosts equals a run on one: same episodes and metrics, one directory. A failure ends all hosts.

Every episode looks at a part of its video, whose frames are in the dialogue, another number for each.
"""

import json
import os
import shutil
import signal

import forked
import hosts as several
import pytest
from training import QUICK, arguments, arrays_of, episodes_of, metrics_of

from model_port.tiny import make_tiny
from rollout import episode
from rollout.tools import ToolCall

pytestmark = pytest.mark.slow

STEPS = [
    *(*QUICK, "rollout.max_context_tokens=1024", "pack.row_tokens=1024", "mesh.fsdp=2", "pack.num_rows=2"),
    *("rollout.crop_returns=frames", "rollout.max_turns=1"),
    "train.prompts_per_step=3",  # two for one host, one for the other
    *("train.num_steps=3", "checkpoint.every_steps=3"),
    *("data.validation=synthetic", "validation.max_prompts=3", "validation.every_steps=3"),
]


def start(folder, run_dir, num=2):
    """Starts a run on hosts with two devices in total."""
    words = arguments(run_dir, *STEPS)
    return several.start_command(folder, "paravt_jax.train", words, num, devices=2 // num, work=train_with_calls)


def train_with_calls(*command):
    """Trains with forced calls, because a random model makes none."""

    def find_calls(text, signatures):
        window = {"video_path": "video.mp4", "start_time": 0, "end_time": len(text) % 3 + 1}
        return [ToolCall((0, 1), "crop_video", window)]

    episode.find_calls = find_calls
    several.command(*command)


def ended_well(started, code=0):
    ended = started.wait(280)
    assert [host.code for host in ended] == [code] * len(ended), "\n\n".join(host.output[-3000:] for host in ended)
    return ended


def send(started, host, number, after):
    """Sends a signal to one host once host 0 prints this text."""
    output = started.files[0]
    forked.wait_until(lambda: after in output.read_text(), started.processes[0], output)
    os.kill(started.processes[host].pid, number)


def saved(run_dir):
    return sorted(int(entry.name) for entry in (run_dir / "checkpoints").iterdir() if entry.name.isdecimal())


def test_other_settings_and_another_user_reward_on_one_host_end_both_before_creating_files(tmp_path):
    joint = [*STEPS, f"hosts.coordinator=127.0.0.1:{several.free_port()}", "hosts.num=2"]
    each = []
    for host in range(2):
        home = tmp_path / f"home{host}"
        home.mkdir()
        (home / "own.py").write_text(f"WEIGHT = {host}\n\n\ndef reward(**context):\n    return []\n")
        own = [f"hosts.index={host}", f"train.max_missing_frac=0.{1 + host}", "reward.plugin=~/own.py:reward"]
        each.append(("paravt_jax.train", arguments(tmp_path / "run", *joint, *own), {"HOME": str(home)}))
    for ended in several.RunningHosts(tmp_path / "output", 2, 1, several.command, each).wait(100):
        assert ended.code == 1 and ended.output.count("error:") == 1
        assert "train.max_missing_frac is 0.2, not 0.1; ~/own.py is " in ended.output
        assert "start all hosts with the same settings and the same code" in ended.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("theirs", "message"), [("nowhere", "nowhere"), ("other", "; give all hosts the same data and the same model")]
)
def test_a_different_or_missing_model_on_one_host_ends_all_before_training(theirs, message, tiny_hf, tmp_path):
    make_tiny(tmp_path / "other", 1)
    models = [{"MODEL": str(tiny_hf)}, {"MODEL": str(tmp_path / theirs)}]
    options = arguments(tmp_path / "run", *STEPS, "model.path=${oc.env:MODEL}")
    hosts = several.start_command(tmp_path / "output", "paravt_jax.train", options, own=models)
    for host, ended in enumerate(hosts.wait(100)):
        assert ended.code not in (0, None) and (message in ended.output or (theirs, host) == ("nowhere", 0))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def ids_in(run_dir):
    """Returns every episode's token ids and pictures, in the order of the data."""
    episodes = episodes_of(run_dir)
    return [(e["id"], e["visit"], [(s.get("ids"), s.get("pictures")) for s in e["segments"]]) for e in episodes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An undisturbed run on two hosts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended_well(start(folder / "output", folder / "run"))
    return folder / "run"


@pytest.mark.nightly
def test_frames_of_calls_are_in_the_episodes_of_both_hosts(undisturbed):
    calls = [call for e in episodes_of(undisturbed) for turn in e["turns"] for call in turn["calls"]]
    assert 2 * len(calls) > len(episodes_of(undisturbed)) and {call["outcome"] for call in calls} == {"ok"}
    assert len({len(call["shown"]) for call in calls}) > 1 and all(call["segments"] is None for call in calls)


@pytest.mark.nightly
def test_every_step_logs_the_slowest_host_of_each_part(undisturbed):
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for part in ("rollout", "update", "devices", "publish"):
            assert row[f"time/hosts/{part}_max_s"] >= row[f"time/hosts/{part}_min_s"] >= 0
            assert row[f"perf/hosts/{part}_slowest"] in (0, 1)
    assert len(rows) == 3


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run stopped by SIGTERM to one host after the first step, and how both hosts ended."""
    folder = tmp_path_factory.mktemp("stopped")
    started = start(folder / "output", folder / "run")
    send(started, 1, signal.SIGTERM, "step 1/3")
    return folder / "run", ended_well(started, 128 + signal.SIGTERM)


def kill(started, victim, after):
    """Kills one host once host 0 prints this text; the other one ends too."""
    send(started, victim, signal.SIGKILL, after)
    ended = started.wait(100)
    assert ended[victim].code == -signal.SIGKILL and ended[1 - victim].code not in (0, None)


@pytest.mark.nightly
def test_sigterm_on_one_host_saves_on_all_and_they_exit_143(stopped):
    run_dir, ended = stopped
    steps = saved(run_dir)
    assert steps and len(metrics_of(run_dir)) == steps[-1] < 3
    assert all("stopping: saving a checkpoint" in host.output for host in ended)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_resumes_bit_for_bit_after_a_stop_and_a_kill_of_host_0(stopped, undisturbed, tmp_path):
    """The kill is after a step that no checkpoint has, which runs again."""
    resumed = shutil.copytree(stopped[0], tmp_path / "run")
    num_saved = saved(resumed)[-1]
    kill(start(tmp_path / "output", resumed), 0, f"step {num_saved + 1}/3")
    assert len(metrics_of(resumed)) == num_saved + 1 and saved(resumed)[-1] == num_saved
    ended_well(start(tmp_path / "output again", resumed))
    assert metrics_of(resumed) == metrics_of(undisturbed) and ids_in(resumed) == ids_in(undisturbed)
    assert arrays_of(resumed, 3) and arrays_of(resumed, 3) == arrays_of(undisturbed, 3)
    assert (resumed / "validation.jsonl").read_text().count("\n") == 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_of_two_hosts_resumes_on_one_after_a_kill(stopped, undisturbed, tmp_path):
    run_dir = shutil.copytree(stopped[0], tmp_path / "run")
    kill(start(tmp_path / "output", run_dir), 1, "resuming after step")
    (run_dir / "episodes" / ".000003.host1.part").touch()  # of a host that was killed
    ended_well(start(tmp_path / "output again", run_dir, 1))
    assert not list((run_dir / "episodes").glob(".*"))
    assert ids_in(run_dir) == ids_in(undisturbed)
    for ours, theirs in zip(metrics_of(undisturbed), metrics_of(run_dir), strict=True):
        assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)  # float sums have another order
