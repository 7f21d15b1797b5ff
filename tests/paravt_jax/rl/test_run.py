"""The validation of an RL run, and the check of its engine in every step."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from agents import FakeFrames

from paravt_jax.config import LogConfig, load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.learner.settings import MismatchConfig
from paravt_jax.rl.episodes import MAX_IN_FLIGHT, RolloutWorker, evaluate
from paravt_jax.rl.metrics import rollout_metrics
from paravt_jax.rl.run import Run
from paravt_jax.run.hosts import ALONE
from paravt_jax.run.log import RunLog
from paravt_jax.run.process import Stopping
from paravt_jax.run.training import RunDirectory, Training
from rollout.chat import Chat
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

HELD_OUT = [
    Prompt("m", "Which? A or B", ("/a.mp4",), "A", "mcq"),
    Prompt("lost", "Which? A or B", ("/missing.mp4",), "A", "mcq"),
    Prompt("o", "What is it?", ("/b.mp4",), "a dog", "oe"),
]


def validated(tiny_hf, run_dir, stopping: Stopping, reply_s: float = 0.0, prompts=HELD_OUT) -> list[dict]:
    """Returns the log of a validation before the first step."""
    config, chat = load_config(None), Chat.from_hf(tiny_hf)

    async def reply(request):
        asyncio.get_running_loop().call_soon(lambda: stopping.stop(15) if reply_s else None)
        await asyncio.sleep(reply_s)
        return chat.encode("I have looked.</think><answer>A</answer><|im_end|>").tolist()

    training: Any = object.__new__(Training)
    training.step, training.num_steps = 0, 5
    training.log = RunLog(run_dir, LogConfig(), num_steps=5, first_step=0, settings={})
    training.directory = RunDirectory(run_dir, stopping, 0, {}, {}, False, ALONE)
    training.learner = SimpleNamespace(state=SimpleNamespace(step=0))
    run: Any = object.__new__(Run)
    run.held_out, run.training, run.hosts = prompts, training, ALONE
    run.validation, run.validation_frames = config.validation, 3
    agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
    run.greedy = RolloutWorker(agent, config.reward, None, 0)
    try:
        asyncio.run(run.validate_if_due())
    finally:
        training.log.close()
        stopping.cancel_grace()
    path = run_dir / "validation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_validation_shows_an_example_of_its_missing_episodes(tiny_hf, tmp_path, capsys):
    validated(tiny_hf, tmp_path, Stopping())
    lost = "validation: 1 of 3 episodes are missing; for example validation-lost/0: /missing.mp4: VideoError: the video"
    assert lost in capsys.readouterr().err


def test_validation_logs_metrics_by_question_type(tiny_hf, tmp_path):
    (row,) = validated(tiny_hf, tmp_path, Stopping())
    assert (row["step"], row["policy_version"], row["validation/accuracy_mean"]) == (0, 0, 0.5)
    assert (row["validation/accuracy_mean_mcq"], row["validation/accuracy_mean_oe"]) == (1.0, 0.0)
    assert (row["validation/num_episodes"], row["validation/num_missing"]) == (2, 1)


def test_a_validation_without_a_single_score_ends_the_run(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(ALONE, "all_failed", False)
    lost = r"validation: 1 of 1 episodes are missing; for example validation-lost/0: /missing.mp4: VideoError"
    with pytest.raises(RuntimeError, match=lost):
        validated(tiny_hf, tmp_path, Stopping(), prompts=HELD_OUT[1:2])
    assert not (tmp_path / "validation.jsonl").exists() and ALONE.all_failed


def test_a_validation_queues_only_episodes_that_finish_within_their_deadlines(chat):
    config, running, most = load_config(None), 0, 0

    async def reply(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return chat.encode("I have looked.</think><answer>A</answer><|im_end|>").tolist()

    agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
    prompts = [replace(HELD_OUT[0], id=str(number)) for number in range(MAX_IN_FLIGHT + 8)]
    rollouts = asyncio.run(evaluate(RolloutWorker(agent, config.reward, None, 0), prompts, 3))
    assert [rollout.id for rollout in rollouts] == [f"validation-{prompt.id}/0" for prompt in prompts]
    assert most == MAX_IN_FLIGHT
    assert rollout_metrics(rollouts)["accuracy_mean"] == 1 and all(rollout.episode is None for rollout in rollouts)


@pytest.mark.timeout(30)
def test_a_stopped_validation_is_not_logged(tiny_hf, tmp_path):
    assert validated(tiny_hf, tmp_path, Stopping(), reply_s=60.0) == []


@pytest.mark.parametrize(("kl", "num_warnings"), [(0.0099, 0), (0.01, 1), (0.0999, 1)])
def test_a_run_warns_at_a_tenth_of_the_kl_that_stops_it(kl, num_warnings):
    assert len(warnings_at(kl, max_kl=0.1)) == num_warnings


@pytest.mark.parametrize(("kl", "max_kl"), [(0.1, 0.1), (math.nan, 0.1), (math.inf, 0.1), (math.nan, math.inf)])
def test_an_engine_that_differs_too_much_stops_the_run(kl, max_kl, monkeypatch):
    monkeypatch.setattr(ALONE, "all_failed", False)
    with pytest.raises(RuntimeError, match=f"mean KL of {kl:.3g} over the tokens of step 1, more than mismatch.max_kl"):
        warnings_at(kl, max_kl)
    assert ALONE.all_failed


def warnings_at(kl: float, max_kl: float) -> list[str]:
    run: Any = object.__new__(Run)
    warnings: list[str] = []
    run.training = SimpleNamespace(step=0, log=SimpleNamespace(say=warnings.append))
    run.mismatch, run.hosts = MismatchConfig(max_kl), ALONE
    run._check_mismatch({"mismatch/behavior_kl": kl})
    return warnings
