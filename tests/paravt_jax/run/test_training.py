"""The steps at which a run validates, the metrics of every step, and the last checkpoint."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from paravt_jax.config import LogConfig, ValidationConfig
from paravt_jax.run.compiles import Compiles
from paravt_jax.run.hosts import ALONE
from paravt_jax.run.log import RunLog
from paravt_jax.run.process import Stopping
from paravt_jax.run.training import RunDirectory, Training


@pytest.fixture
def training_at(tmp_path):
    """Makes a run of five steps that has done `step`, with only a log."""

    logs: list[RunLog] = []

    def training(step: int, directory: Path = tmp_path) -> Training:
        run = object.__new__(Training)
        run.step, run.num_steps = step, 5
        run.log = RunLog(directory, LogConfig(), num_steps=5, first_step=step, settings={})
        logs.append(run.log)
        return run

    yield training
    for log in logs:
        log.close()


def test_validation_is_due_at_the_start_periodically_and_at_the_end(training_at):
    settings = ValidationConfig(every_steps=2)
    due = [step for step in range(6) if training_at(step).validation_due(settings)]
    assert due == [0, 2, 4, 5]


@pytest.mark.parametrize("step", [0, 2])
def test_a_logged_validation_is_not_repeated_after_a_restart(step, training_at):
    settings = ValidationConfig(every_steps=2)
    first = training_at(step)
    assert first.validation_due(settings)
    first.log.validation(step, {"validation/loss": 1.0})
    assert not training_at(step).validation_due(settings)
    assert training_at(0).validation_due(settings) == (step != 0)  # a new start moves later steps aside


@pytest.mark.parametrize(("counted", "peak_gib"), [(({"peak_bytes_in_use": 3 * 2**30}, {}), 3.0), ((None, None), None)])
def test_a_step_has_the_peak_memory_of_the_devices_that_count_it(counted, peak_gib, training_at, monkeypatch):
    devices = [SimpleNamespace(memory_stats=lambda count=count: count) for count in counted]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(Training, "version", 1)
    run = training_at(0)
    run.began_step_s, run.compiles = 0.0, Compiles()
    assert run.step_metrics(10).get("perf/peak_gib") == peak_gib


@pytest.mark.parametrize(
    ("lost", "saved", "error"),
    [
        ("", [4], "the last checkpoint could not be written"),
        ("gs://bkt/x was taken over", [4, 5], "was taken over$"),
    ],
)
def test_a_run_whose_last_checkpoint_is_not_its_own_ends_with_an_error(
    lost, saved, error, training_at, tmp_path, monkeypatch
):
    monkeypatch.setattr(Training, "version", 5)
    run, lease = training_at(5), SimpleNamespace(lost=lost)
    run.directory = RunDirectory(tmp_path, Stopping(), 0, {}, {}, False, ALONE, lease=lease)
    run.first_progress, run.learner = {"visits": "a"}, None
    run.checkpoints = SimpleNamespace(save=lambda *_: None, wait=lambda: None, steps=saved, latest=None)
    with pytest.raises(RuntimeError, match=error):
        asyncio.run(run.finish({}))
