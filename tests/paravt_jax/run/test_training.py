"""What any run that trains does at which step."""

from pathlib import Path

import pytest

from paravt_jax.config import LogConfig, ValidationConfig
from paravt_jax.run.log import RunLog
from paravt_jax.run.training import Training


@pytest.fixture
def training_at(tmp_path):
    """A run of five steps that has done some of them, with a log and nothing else."""

    logs: list[RunLog] = []

    def training(step: int, directory: Path = tmp_path) -> Training:
        made = object.__new__(Training)
        made.step, made.num_steps = step, 5
        made.log = RunLog(directory, LogConfig(), num_steps=5, first_step=step, settings={})
        logs.append(made.log)
        return made

    yield training
    for log in logs:
        log.close()


def test_validation_is_due_before_the_first_step_every_so_many_and_after_the_last(training_at):
    settings = ValidationConfig(every_steps=2)
    due = [step for step in range(6) if training_at(step).validation_due(settings)]
    assert due == [0, 2, 4, 5]
    assert not training_at(0).validation_due(ValidationConfig(at_start=False, every_steps=2))


@pytest.mark.parametrize("step", [0, 2])
def test_a_validation_that_is_logged_is_not_repeated_after_a_restart(step, training_at):
    settings = ValidationConfig(every_steps=2)
    before = training_at(step)
    assert before.validation_due(settings)
    before.log.validation(step, {"validation/loss": 1.0})
    assert not training_at(step).validation_due(settings)
    assert training_at(0).validation_due(settings) == (step != 0)  # begun anew, what came later is put aside
