"""A run's log through kills and resumes, on the terminal, and in TensorBoard and Weights & Biases."""

import errno
import math
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from terminals import a_terminal

import model_port.terminal
from paravt_jax.config import LogConfig
from paravt_jax.run.log import RunLog, load_jsonl, whole_file

METRICS = {
    "rollout/reward_mean": 1.617,
    "rollout/format_reward": 0.41,
    "rollout/parseable_frac": 0.25,
    "rollout/tool_calls_mean": 1.36,
    "perf/sampled_tokens_per_s": 812.3,
    "perf/trained_tokens_per_s_device": 3456.4,
    "perf/mfu": 0.308,
    "time/step_s": 248.04,
}


def open_log(run_dir: Path, first_step: int = 0, num_steps: int = 5, compiling=tuple, **config) -> RunLog:
    steps = {"num_steps": num_steps, "first_step": first_step}
    return RunLog(run_dir, LogConfig(**config), **steps, settings={"seed": 0}, compiling=compiling)


def log_steps(run_dir: Path, steps: range, **config) -> None:
    log = open_log(run_dir, steps[0] - 1, **config)
    for step in steps:
        log.step(step, {**METRICS, "loss/policy": step / 3}, [{"id": f"{step}/{n}"} for n in range(2)])
        log.validation(step, {"validation/accuracy_mean": step / 7})
    log.close()


def files_of(run_dir: Path) -> dict[str, bytes]:
    files = [path for path in run_dir.rglob("*.jsonl*") if path.is_file() and "superseded" not in path.parts]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def test_a_resumed_run_writes_the_files_of_an_uninterrupted_one(tmp_path):
    log_steps(tmp_path / "whole", range(1, 6))
    log_steps(tmp_path / "resumed", range(1, 5))
    log_steps(tmp_path / "resumed", range(3, 6))
    assert files_of(tmp_path / "resumed") == files_of(tmp_path / "whole")
    assert len(files_of(tmp_path / "whole")) == 2 + 5


def test_later_steps_are_moved_aside_and_stay_readable(tmp_path, capsys):
    log_steps(tmp_path / "two", range(1, 3))
    log_steps(tmp_path / "four", range(1, 5))
    files = files_of(tmp_path / "four")
    for number in (1, 2):
        capsys.readouterr()
        open_log(tmp_path / "four", first_step=2).close()
        assert files_of(tmp_path / "four") == files_of(tmp_path / "two")
        aside = tmp_path / "four" / "superseded" / f"after_step_2_{number}"
        assert f"the log after step 2 was moved to {aside}; these steps run again" in capsys.readouterr().err
        moved = {str(path.relative_to(aside)): path.read_bytes() for path in aside.rglob("*.jsonl")}
        assert all(content and files[name].endswith(content) for name, content in moved.items())
        assert {*moved} == {"metrics.jsonl", "validation.jsonl", "episodes/000003.jsonl", "episodes/000004.jsonl"}
        log_steps(tmp_path / "four", range(3, 5))


def test_lost_metrics_are_reported(tmp_path, capsys):
    log_steps(tmp_path, range(1, 4))
    (tmp_path / "metrics.jsonl").unlink()
    open_log(tmp_path, first_step=3).close()
    error = "metrics.jsonl ends at step 0: the log of the steps up to the checkpoint's, 3, is lost"
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
@pytest.mark.parametrize("num_lost_bytes", [1, 2, 20])
def test_a_line_cut_by_a_kill_is_removed(name, num_lost_bytes, tmp_path):
    log_steps(tmp_path, range(1, 4))
    files, path = files_of(tmp_path), tmp_path / name
    path.write_bytes(path.read_bytes()[:-num_lost_bytes])
    log_steps(tmp_path, range(3, 4))
    assert files_of(tmp_path) == files


def test_a_missing_end_of_line_is_restored(tmp_path):
    log_steps(tmp_path, range(1, 3))
    files, path = files_of(tmp_path), tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    open_log(tmp_path, first_step=2).close()
    assert files_of(tmp_path) == files


def test_invalid_json_in_the_middle_is_an_error_with_its_line(tmp_path):
    log_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\n" + lines[2])
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 is not valid JSON"):
        open_log(tmp_path, first_step=3)


def test_a_kill_while_writing_episodes_leaves_no_partial_file(tmp_path):
    run_dir, killed = tmp_path / "run", tmp_path / "killed"

    def episodes():
        yield {"id": "3/0"}
        shutil.copytree(run_dir, killed)  # the files after a kill at this moment
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


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half of\n", None])
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [b"before"]
    with path.open("rb") as reader:
        with whole_file(path) as file:
            file.write(b"after")
        assert (reader.read(), path.read_bytes()) == (b"before", b"after")


def test_the_error_of_a_file_that_cannot_be_written_names_the_file(tmp_path, monkeypatch):
    def refused(path: Path, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))  # there, also of a file that does not exist

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OSError, match="No such file") as problem, whole_file(tmp_path / "gone" / "file"):
        pass
    assert problem.value.filename == str(tmp_path / "gone" / "file")


def test_episodes_are_written_before_their_metrics(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(ValueError, match="metric loss/policy is a ndarray, expected a number"):
        log.step(1, {**METRICS, "loss/policy": np.zeros(2)}, [{"id": "1/0"}])
    log.close()
    assert (tmp_path / "episodes" / "000001.jsonl").exists()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_numbers_are_stored_exactly_by_sorted_key_and_nan_as_null(tmp_path):
    log = open_log(tmp_path)
    exact = {"c": 5e-324, "d": 2**60 + 1, "b": float(np.float32(0.1)), "a": 0.1 + 0.2}
    logps = [-0.5, math.nan, {"deep": (math.inf, 1.0)}]
    log.step(1, {**exact, "nan": math.nan, "inf": -math.inf}, [{"segments": logps}])
    log.close()
    (row,) = load_jsonl(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, **exact, "nan": None, "inf": None}
    assert [*row] == ["step", "a", "b", "c", "d", "inf", "nan"]
    assert list(load_jsonl(tmp_path / "episodes" / "000001.jsonl")) == [{"segments": [-0.5, None, {"deep": [None, 1]}]}]


def test_model_output_stays_on_one_line_and_is_not_a_path(tmp_path):
    text = "\u2028\n../../x\ud83d\x00"  # half a surrogate pair included
    log = open_log(tmp_path)
    log.step(1, METRICS, [{"id": text, "text": text}])
    log.close()
    assert [row["text"] for row in load_jsonl(tmp_path / "episodes" / "000001.jsonl")] == [text]
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["000001.jsonl"]


@pytest.mark.parametrize("step", [2, 4])
def test_a_repeated_or_skipped_step_is_an_error(step, tmp_path):
    log = open_log(tmp_path, first_step=2)
    with pytest.raises(ValueError, match=f"step {step} was logged after step 2, expected 3"):
        log.step(step, METRICS, [])
    log.close()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    return clock


def test_without_a_terminal_every_step_is_one_line(tmp_path, capsys, clock):
    log = open_log(tmp_path, num_steps=5)
    for step, took_s in ((1, 900.0), (2, 250.0), (3, 350.0)):
        log.phase("update")
        clock.now_s += took_s
        log.step(step, METRICS, [])
    log.validation(3, {"validation/accuracy_mean": 0.525, "validation/tool_calls_mean": 1.0, "policy_version": 3.0})
    log.say("checkpoint 3 is saved")
    log.close()
    lines = capsys.readouterr().err.splitlines()
    values = "reward 1.62  f_tau 0.41  parseable 0.25  kappa 1.36  sampled 812/s  trained 3456/s  MFU 31 %  248.0 s"
    assert lines == [
        f"step 1/5  {values}",  # it compiled
        f"step 2/5  {values}  ETA 12:30",  # 3 · 250 s
        f"step 3/5  {values}  ETA 10:00",  # 2 · 300 s
        "held-out prompts after step 3:  accuracy 0.53  kappa 1.00",
        "checkpoint 3 is saved",
    ]


def test_a_long_step_reports_its_phase_and_time(tmp_path, clock):
    programs = ["prefill", "encode"]
    log = open_log(tmp_path, compiling=lambda: programs)
    assert log.where() == ""
    log.phase("rollout 3/8")
    clock.now_s += 95
    assert log.where() == "rollout 3/8, compiling prefill, compiling encode, 01:35 since step 0/5"
    programs.clear()
    log.step(1, METRICS, [])
    assert log.where() == ""  # nothing between steps
    log.phase("update")
    clock.now_s += 3_700
    assert log.where() == "update, 1:01:40 since step 1/5"
    log.close()


@pytest.mark.usefixtures("clock")
def test_missing_metrics_are_omitted_from_the_line(tmp_path, capsys):
    log = open_log(tmp_path)
    log.step(1, {"rollout/reward_mean": math.nan}, [])
    log.close()
    assert capsys.readouterr().err == "step 1/5  reward nan  0.0 s\n"


@pytest.mark.parametrize("rows_and_columns", [(30, 100), (0, 0)])
def test_a_terminal_shows_the_phase_and_messages_do_not_break_the_bar(rows_and_columns, tmp_path, monkeypatch):
    """Also a terminal without a size, as in containers."""
    monkeypatch.setenv("COLUMNS", "100")
    with a_terminal(monkeypatch, "stderr", rows_and_columns=rows_and_columns) as read_screen:
        log = open_log(tmp_path, first_step=1)
        log.phase("rollout 12/56")
        log.step(2, METRICS, [])
        log.phase("update")
        log.say("checkpoint 2 is saved")
        log.end()
        log.say("1 of 5 steps are done")
        log.phase("nothing is drawn after the end")
        log.close()
        output = read_screen()
    assert "rollout 12/56" in output.split("\r2/5 ")[0]
    assert " reward 1.62 f_tau 0.41 parseable 0.25 kappa 1.36 sampled 812/s trained 3456/s" in output
    assert "| update, reward 1.62" in output  # the phase first: a narrow terminal cuts off the end
    start, end = output.split("checkpoint 2 is saved")
    assert start.endswith(" \r")  # the bar's line was cleared
    assert end.startswith("\n\r2/5 ")
    *_, bar, last, rest = end.split("\n")
    assert bar.split("\r")[-1].startswith("2/5 ") and "update" not in bar.split("\r")[-1]
    assert (last, rest) == ("1 of 5 steps are done", "")


def test_the_bar_shows_programs_while_they_are_compiled_and_lines_of_others_go_above_it(tmp_path, monkeypatch):
    monkeypatch.setattr("paravt_jax.run.log.REFRESH_S", 0.001)
    programs: list[str] = []
    draws: list[None] = []

    def compiling() -> list[str]:
        draws.append(None)
        return [*programs]

    def wait_until_drawn() -> None:
        """A second drawing begins when the first one is done."""
        num_before = len(draws)
        while len(draws) < num_before + 2:
            time.sleep(0.001)

    with a_terminal(monkeypatch, "stderr", rows_and_columns=(30, 100)) as read_screen:
        log = open_log(tmp_path, compiling=compiling)
        log.phase("update")
        programs.append("gradients")
        wait_until_drawn()
        programs.clear()
        wait_until_drawn()
        model_port.terminal.say("compiled gradients in 27 s")
        log.close()
        output = read_screen()
    before, after = output.split("compiled gradients in 27 s\n")
    assert "| update, compiling gradients\r" in before and before.endswith(" \r")
    assert "| update" in after and "compiling" not in after


def test_a_run_that_fails_clears_the_bar(tmp_path, monkeypatch):
    with a_terminal(monkeypatch, "stderr", rows_and_columns=(30, 100)) as read_screen:
        log = open_log(tmp_path, first_step=1)
        log.phase("update")
        log.close()
        print("error: no space left", file=sys.stderr)
        output = read_screen()
    assert "1/5 " in output and output.endswith(" \rerror: no space left\n")


def events_of(run_dir: Path) -> list:
    """Returns all events in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    events = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (num_bytes,) = struct.unpack("<Q", data[:8])
            event, end = data[12 : 12 + num_bytes], 12 + num_bytes
            checksums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[end : end + 4])
            assert checksums == (masked_crc32c(data[:8]), masked_crc32c(event))
            events.append(Event.FromString(event))
            data = data[end + 4 :]
    return events


def test_tensorboard_has_metrics_immediately_and_the_start_of_a_resume(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2, 3):
        log.step(step, {**METRICS, "loss/policy": math.nan}, [])
    log.validation(3, {"validation/accuracy_mean": 0.5})
    summaries = [(event.step, event.summary.value) for event in events_of(tmp_path)]
    scalars = [(step, {value.tag: value.simple_value for value in values}) for step, values in summaries]
    assert [step for step, values in scalars if "rollout/reward_mean" in values] == [1, 2, 3]  # before close
    assert scalars[-1] == (3, {"validation/accuracy_mean": 0.5})
    assert scalars[-2][1]["rollout/reward_mean"] == pytest.approx(1.617)
    log.close()
    open_log(tmp_path, first_step=2).close()  # within the same second
    events = events_of(tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [event.step for event in events if event.HasField("session_log")] == [1, 3]
    assert events[-1].session_log.status == events[-1].session_log.START


def test_a_log_loads_neither_torch_nor_tensorflow(tmp_path):
    script = """
import sys
from pathlib import Path
from paravt_jax.config import LogConfig
from paravt_jax.run.log import RunLog
RunLog(Path(sys.argv[1]), LogConfig(), num_steps=1, first_step=0, settings={}).close()
assert not {"torch", "tensorflow", "tensorboardX"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)


def test_wandb_resumes_its_run_unless_the_run_starts_over(tmp_path, monkeypatch):
    inits, logged, exit_codes = [], [], []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics)), finish=exit_codes.append)
    wandb = SimpleNamespace(init=lambda **settings: inits.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (range(1, 3), range(3, 5), range(1, 2)):
        log_steps(tmp_path, steps, wandb_project="video")
    first, resumed, anew = (settings["id"] for settings in inits)
    assert first == resumed != anew
    own = {"project": "video", "name": tmp_path.name, "dir": str(tmp_path), "resume": "allow"}
    assert inits[0] == own | {"id": first, "config": {"seed": 0}}  # entity and tags are the environment's
    assert logged[0] == (1, {**METRICS, "loss/policy": 1 / 3})
    open_log(tmp_path, first_step=1, wandb_project="video").close(failed=True)
    assert exit_codes == [0, 0, 0, 1]  # otherwise W&B shows a crashed run as finished


def test_a_full_disk_is_an_error_with_the_file(tmp_path):
    log = open_log(tmp_path, first_step=0)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        log.step(1, METRICS, None)
    log.close()
