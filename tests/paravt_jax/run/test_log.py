"""The run directory through kills and resumes, and what a human and TensorBoard get to see of it."""

import contextlib
import fcntl
import math
import os
import pty
import shutil
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paravt_jax.config import LogConfig
from paravt_jax.run.log import RunLog, load_jsonl, whole_file

METRICS = {
    "rollout/reward_mean": 1.617,
    "rollout/format_reward": 0.41,
    "rollout/tool_calls_mean": 1.36,
    "perf/tokens_per_s": 1234.4,
    "time/step_s": 248.04,
}


def open_log(run_dir: Path, first_step: int = 0, num_steps: int = 5, **config) -> RunLog:
    return RunLog(run_dir, LogConfig(**config), num_steps=num_steps, first_step=first_step, settings={"seed": 0})


def log_steps(run_dir: Path, steps: range, **config) -> None:
    log = open_log(run_dir, steps[0] - 1, **config)
    for step in steps:
        log.step(step, {**METRICS, "loss/policy": step / 3}, [{"id": f"{step}/{n}"} for n in range(2)])
        log.validation(step, {"validation/accuracy_mean": step / 7})
    log.close()


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in sorted(run_dir.rglob("*.jsonl*"))
        if path.is_file() and "superseded" not in path.parts
    }


def test_a_resumed_run_leaves_the_files_of_one_that_was_not_stopped(tmp_path):
    log_steps(tmp_path / "whole", range(1, 6))
    log_steps(tmp_path / "resumed", range(1, 5))
    log_steps(tmp_path / "resumed", range(3, 6))
    assert files_of(tmp_path / "resumed") == files_of(tmp_path / "whole")
    assert len(files_of(tmp_path / "whole")) == 2 + 5


def test_later_steps_are_out_of_the_way_before_the_first_one_is_done_again_and_kept(tmp_path, capsys):
    log_steps(tmp_path / "two", range(1, 3))
    log_steps(tmp_path / "four", range(1, 5))
    whole = files_of(tmp_path / "four")
    for number in (1, 2):
        capsys.readouterr()
        open_log(tmp_path / "four", first_step=2).close()
        assert files_of(tmp_path / "four") == files_of(tmp_path / "two")
        aside = tmp_path / "four" / "superseded" / f"after_step_2_{number}"
        assert f"what was logged after step 2 is now in {aside}" in capsys.readouterr().err
        kept = {str(path.relative_to(aside)): path.read_bytes() for path in aside.rglob("*.jsonl")}
        assert all(content and whole[name].endswith(content) for name, content in kept.items())
        assert {*kept} == {"metrics.jsonl", "validation.jsonl", "episodes/000003.jsonl", "episodes/000004.jsonl"}
        log_steps(tmp_path / "four", range(3, 5))


def test_metrics_that_were_lost_are_missed(tmp_path, capsys):
    log_steps(tmp_path, range(1, 4))
    (tmp_path / "metrics.jsonl").unlink()
    open_log(tmp_path, first_step=3).close()
    assert "metrics.jsonl ends at step 0, the checkpoint at step 3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
@pytest.mark.parametrize("num_lost_bytes", [1, 2, 20])
def test_a_line_cut_by_a_kill_is_taken_out(name, num_lost_bytes, tmp_path):
    log_steps(tmp_path, range(1, 4))
    before, path = files_of(tmp_path), tmp_path / name
    path.write_bytes(path.read_bytes()[:-num_lost_bytes])
    log_steps(tmp_path, range(3, 4))
    assert files_of(tmp_path) == before


def test_a_line_that_only_lost_its_end_of_line_is_kept_and_mended(tmp_path):
    log_steps(tmp_path, range(1, 3))
    before, path = files_of(tmp_path), tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    open_log(tmp_path, first_step=2).close()
    assert files_of(tmp_path) == before


def test_a_broken_line_in_the_middle_is_an_error_that_says_where(tmp_path):
    log_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\n" + lines[2])
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is no JSON"):
        open_log(tmp_path, first_step=3)


def test_a_kill_while_episodes_are_written_leaves_no_half_file(tmp_path):
    run_dir, killed = tmp_path / "run", tmp_path / "killed"

    def episodes():
        yield {"id": "3/0"}
        shutil.copytree(run_dir, killed)  # what a kill at this moment leaves behind
        yield {"id": "3/1"}

    log_steps(run_dir, range(1, 3))
    log = open_log(run_dir, first_step=2)
    log.step(3, METRICS, episodes())
    log.close()
    assert sorted(path.name for path in (killed / "episodes").glob("*.jsonl")) == ["000001.jsonl", "000002.jsonl"]
    assert [row["step"] for row in load_jsonl(killed / "metrics.jsonl")] == [1, 2]
    log_steps(killed, range(3, 4))
    assert [row["id"] for row in load_jsonl(killed / "episodes" / "000003.jsonl")] == ["3/0", "3/1"]
    assert not list((killed / "episodes").glob(".*"))


def test_who_reads_while_a_file_is_replaced_sees_the_old_one_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with path.open("rb") as reader:
        with whole_file(path) as file:
            file.write(b"after")
        assert reader.read() == b"before"
    assert path.read_bytes() == b"after"


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    lines = iter([b"half of\n", None])
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines(lines)
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"before"]


def test_episodes_are_there_when_their_metrics_are_not_yet(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(ValueError, match="metric loss/policy is a ndarray, expected a number"):
        log.step(1, {**METRICS, "loss/policy": np.zeros(2)}, [{"id": "1/0"}])
    log.close()
    assert (tmp_path / "episodes" / "000001.jsonl").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_numbers_come_back_exactly_and_those_json_has_not_as_null(tmp_path):
    log = open_log(tmp_path)
    exact = {"a": 0.1 + 0.2, "b": float(np.float32(0.1)), "c": 5e-324, "d": 2**60 + 1}
    logps = [-0.5, math.nan, {"deep": (math.inf, 1.0)}]
    log.step(1, {**exact, "nan": math.nan, "inf": -math.inf}, [{"segments": logps}])
    log.close()
    assert list(load_jsonl(tmp_path / "metrics.jsonl")) == [{"step": 1, **exact, "nan": None, "inf": None}]
    assert list(load_jsonl(tmp_path / "episodes" / "000001.jsonl")) == [{"segments": [-0.5, None, {"deep": [None, 1]}]}]


def test_the_order_of_keys_does_not_depend_on_who_wrote_them(tmp_path):
    for name, metrics in (("one", METRICS), ("other", dict(reversed(METRICS.items())))):
        log = open_log(tmp_path / name)
        log.step(1, metrics, [])
        log.close()
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")
    assert files_of(tmp_path / "one")["metrics.jsonl"].startswith(b'{"step": 1, ')


def test_text_of_a_model_stays_one_line_and_no_path(tmp_path):
    said = "\u2028\n../../x\ud83d\x00"  # half a surrogate pair included
    log = open_log(tmp_path)
    log.step(1, METRICS, [{"id": said, "text": said}])
    log.close()
    assert [row["text"] for row in load_jsonl(tmp_path / "episodes" / "000001.jsonl")] == [said]
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["000001.jsonl"]


@pytest.mark.parametrize("step", [2, 4])
def test_a_step_twice_or_left_out_is_an_error(step, tmp_path):
    log = open_log(tmp_path, first_step=2)
    with pytest.raises(ValueError, match=f"step {step} was logged after step 2, expected 3"):
        log.step(step, METRICS, [])
    log.close()


def test_without_a_terminal_every_step_is_one_plain_line(tmp_path, capsys, monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    log = open_log(tmp_path, num_steps=5)
    for step, took_s in ((1, 900.0), (2, 250.0), (3, 350.0)):
        log.phase("update")
        clock.now_s += took_s
        log.step(step, METRICS, [])
    log.say("checkpoint 3 is saved")
    log.close()
    lines = capsys.readouterr().err.splitlines()
    shown = "reward 1.62  f_tau 0.41  kappa 1.36  1234 tok/s  248.0 s"
    assert lines == [
        f"step 1/5  {shown}  ETA 1:00:00",  # 4 · 900 s, all that is known
        f"step 2/5  {shown}  ETA 12:30",  # 3 · 250 s: the first step compiled
        f"step 3/5  {shown}  ETA 10:00",  # 2 · 300 s
        "checkpoint 3 is saved",
    ]


def test_a_long_step_says_where_it_is_and_since_when(tmp_path, monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    log = open_log(tmp_path, num_steps=5)
    assert log.where() == ""
    log.phase("rollout 3/8")
    clock.now_s += 95
    assert log.where() == "rollout 3/8, 01:35 since step 0/5 (the first one compiles)"
    log.step(1, METRICS, [])
    assert log.where() == ""  # between steps nothing is said twice
    log.phase("update")
    clock.now_s += 3_700
    assert log.where() == "update, 1:01:40 since step 1/5"
    log.close()


def test_a_step_without_the_usual_metrics_is_shown_without_them(tmp_path, capsys):
    log = open_log(tmp_path)
    log.step(1, {"rollout/reward_mean": math.nan}, [])
    log.close()
    assert capsys.readouterr().err.startswith("step 1/5  reward nan  0.0 s  ETA 00:0")


@pytest.mark.parametrize("rows_and_columns", [(30, 100), (0, 0)])
def test_a_terminal_shows_the_phase_and_messages_do_not_break_the_bar(rows_and_columns, tmp_path, monkeypatch):
    """Also one without a size, as containers have it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *rows_and_columns, 0, 0))
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        log = open_log(tmp_path, first_step=1)
        log.phase("rollout 12/56")
        log.step(2, METRICS, [])
        log.phase("update")
        log.say("checkpoint 2 is saved")
        log.close()
    said = everything_of(ours)
    assert "rollout 12/56" in said.split("\r2/5 ")[0]
    assert "reward 1.62 f_tau 0.41 kappa 1.36 1234 tok/s ETA 00:0" in said
    assert "update" in said
    before, after = said.split("checkpoint 2 is saved")
    assert before.endswith(" \r")  # the bar's line was cleared
    assert after.startswith("\r\n\r2/5 ")


def everything_of(terminal: int) -> str:
    """What was said on a pseudo terminal whose other end is closed."""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        said = b""
        with contextlib.suppress(OSError):  # how Linux says that it is closed
            while more := file.read(2**16):
                said += more
    return said.decode()


def events_of(run_dir: Path) -> list:
    """Every event of every file, in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (num_bytes,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + num_bytes]))
            data = data[16 + num_bytes :]
    return events


def test_tensorboard_has_every_metric_at_once_and_is_told_where_a_resume_begins(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        log.step(step, {**METRICS, "loss/policy": math.nan}, [])
    log.validation(3, {"validation/accuracy_mean": 0.5})
    scalars = [
        (event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events_of(tmp_path)
    ]
    assert [step for step, values in scalars if "rollout/reward_mean" in values] == [1, 2, 3]  # before close
    assert scalars[-1] == (3, {"validation/accuracy_mean": 0.5})
    assert scalars[-2][1]["rollout/reward_mean"] == pytest.approx(1.617)
    log.close()
    open_log(tmp_path, first_step=2).close()  # within the same second
    events = events_of(tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [event.step for event in events if event.HasField("session_log")] == [1, 3]
    assert events[-1].session_log.status == events[-1].session_log.START


def test_wandb_that_is_not_installed_is_said_before_anything_is_touched(tmp_path, monkeypatch):
    log_steps(tmp_path, range(1, 3))
    before = files_of(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"log.wandb_project=video needs .* pip install wandb,"):
        open_log(tmp_path, wandb_project="video")
    assert files_of(tmp_path) == before


def test_wandb_goes_on_with_the_same_run_unless_it_begins_anew(tmp_path, monkeypatch):
    begun, logged = [], []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)), finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **settings: begun.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (range(1, 3), range(3, 5), range(1, 2)):
        log_steps(tmp_path, steps, wandb_project="video")
    first, resumed, anew = (settings["id"] for settings in begun)
    assert first == resumed != anew
    assert begun[0]["config"] == {"seed": 0}
    assert logged[0] == (1, {**METRICS, "loss/policy": 1 / 3})


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    log = open_log(tmp_path, first_step=0)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        log.step(1, METRICS, None)
    log.close()
