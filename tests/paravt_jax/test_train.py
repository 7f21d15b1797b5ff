"""The trainer as a user runs it: from a config to metrics, checkpoints and plots."""

import asyncio
import json
import time
from functools import partial

import numpy as np
import pytest
from async_tests import async_test
from fake_server import FakeServer
from training import OPTIMISED, QUICK, ROOT, SMOKE, episodes_of, metrics_of, train, train_here, train_in_loop

import model_port
import paravt_jax
from model_port.export import export
from paravt_jax.config import load_config
from paravt_jax.rl import setup
from paravt_jax.rl.run import Run
from paravt_jax.rl.scheduler import RolloutScheduler
from paravt_jax.run import directory
from paravt_jax.run.hosts import ALONE
from paravt_jax.run.training import Training
from paravt_jax.sampling import engines
from rollout.engine.protocol import EngineError
from rollout.engine.sglang import SGLangSettings

pytestmark = pytest.mark.slow

PROMISED_METRICS = {
    *("rollout/format_reward", "rollout/parseable_frac", "rollout/tool_calls_mean", "rollout/tool_use_frac"),
    *("rollout/reward_mean", "rollout/accuracy_mean", "rollout/frame_budget_mean"),
    *("mismatch/behavior_kl", "mismatch/behavior_kl_structural", "loss/policy", "loss/kl_ref", "loss/clip_frac"),
    *("optim/grad_norm", "time/rollout_s", "time/update_s", "time/publish_s", "time/step_s", "perf/tokens_per_s"),
    *("perf/dummy_frac", "policy_version", "staleness_mean", "rollout/taught_frac", "rollout/missing_deadline"),
}


def sampled_versions(episodes: list[dict]) -> list[tuple[int, int]]:
    """Returns the step and policy version of every sampled segment."""
    segments = [(episode["step"], segment) for episode in episodes for segment in episode["segments"]]
    return [(step, segment["version"]) for step, segment in segments if segment["kind"] == "sampled"]


def num_sampled(episodes: list[dict]) -> int:
    """Counts the tokens sampled by main agents and by sub-agents."""
    calls = [call for episode in episodes for turn in episode["turns"] for call in turn["calls"]]
    segments = [segment for ledger in (*episodes, *calls) for segment in ledger["segments"] or ()]
    return sum(len(segment["ids"]) for segment in segments if segment["kind"] == "sampled")


@pytest.mark.timeout(600)
def test_the_smoke_run_writes_all_promised_files_and_metrics(tmp_path):
    validation = ("data.validation=synthetic", "validation.max_prompts=2")
    done = train(tmp_path / "run", *QUICK, *validation, **OPTIMISED)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attention: blocked (cpu, rows of 512 tokens)") == 1
    run_dir = tmp_path / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    entropies = [line.get("loss/entropy_structural") for line in lines]
    assert None in entropies and 0 not in entropies  # left out if a step sampled no token of this class
    for line in lines:
        assert not PROMISED_METRICS - set(line)
        episodes = [episode for episode in episodes_of(run_dir) if episode["step"] == line["step"]]
        assert line["perf/sampled_tokens_per_s"] * line["time/rollout_s"] == pytest.approx(num_sampled(episodes))
        trained_per_s = line["perf/num_trained_tokens"] / line["time/update_s"]  # on one device
        assert line["perf/trained_tokens_per_s_device"] == trained_per_s and "perf/mfu" not in line
        dialogues = line["perf/tokens_per_s"] * line["time/step_s"]  # with the prompt of each of the four episodes
        assert num_sampled(episodes) < line["perf/num_trained_tokens"] < dialogues / 2
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["mismatch/behavior_kl"] < 1e-6 for line in lines if line["perf/num_batches"])
    assert len(episodes_of(run_dir)) == 4 * 4
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["2", "4"]
    assert {path.stem for path in (run_dir / "plots").glob("*.png")} >= {"rewards", "learner", "machine"}
    settings = json.loads((run_dir / "config.json").read_text())
    assert settings["config"]["train"]["num_steps"] == 4
    assert settings["packages"]["jax"]
    assert [json.loads(line)["step"] for line in (run_dir / "validation.jsonl").read_text().splitlines()] == [0, 2, 4]
    export(run_dir / "checkpoints" / "4", tmp_path / "hf", "float32")
    first, trained = model_port.load(run_dir / "tiny"), model_port.load(tmp_path / "hf")
    ids = np.arange(5, 50)
    assert not np.array_equal(model_port.logits(first, ids), model_port.logits(trained, ids))


def test_staleness_stays_within_its_maximum(tmp_path, monkeypatch):
    async def validation_of_a_second(run: Run) -> None:
        await asyncio.sleep(1.0)

    popped, pop_sampled = [], RolloutScheduler.pop_sampled
    monkeypatch.setattr(RolloutScheduler, "pop_sampled", lambda self: popped.append(pop_sampled(self)) or popped[-1])
    monkeypatch.setattr(Run, "validate_if_due", validation_of_a_second)
    start_s = time.monotonic()
    train_here(tmp_path / "run", *QUICK, "train.num_steps=4", "train.max_staleness=2", "optim.learning_rate=1e-5")
    run_s = time.monotonic() - start_s
    episodes = episodes_of(tmp_path / "run")
    assert len({episode["id"] for episode in episodes}) == len(episodes) == 4 * 4
    lines = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [line["perf/sampled_tokens_per_s"] for line in lines] == [num / seconds for num, seconds in popped]
    assert sum(num for num, _ in popped) == num_sampled(episodes)
    assert min(seconds for _, seconds in popped[1:]) >= 1.0  # rollouts also continue during validations
    assert sum(seconds for _, seconds in popped) <= run_s
    ages = [step - 1 - version for step, version in sampled_versions(episodes)]
    assert min(ages) >= 0
    assert 0 < max(ages) <= 2


def test_the_throughput_includes_aborted_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("paravt_jax.rl.scheduler.ABORT_GRACE_S", 60.0)
    plugin = f"reward.plugin={ROOT}/docs/examples/own_reward.py:reward"
    train_here(tmp_path / "run", *QUICK, "train.num_steps=1", "train.oversample=1", plugin)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    num, used_frac = line["perf/sampled_tokens_per_s"] * line["time/rollout_s"], 1 - line["rollout/aborted_tokens_frac"]
    assert used_frac < 1 and num * used_frac == pytest.approx(num_sampled(episodes_of(tmp_path / "run")))


@pytest.mark.nightly
def test_every_option_of_the_update_runs(tmp_path):
    options = [
        *("train.num_steps=2", "train.prompts_per_step=2", "train.updates_per_step=2", "train.truncated=soft"),
        *(
            "train.subagent_loss=true",
            "train.max_resamples=1",
            "train.oversample=1",
            "loss.name=grpo",
            "loss.kl=reward",
        ),
        *("advantage.normalise=batch", "advantage.credit=span", "reward.tool=needed", "reward.format=strict"),
        *("optim.train_vision=true", "mesh.fsdp=2", "mesh.tensor=2", "pack.num_rows=2"),
        f"reward.plugin={ROOT}/docs/examples/own_reward.py:reward",
    ]
    train_here(tmp_path / "run", *QUICK, *options)
    lines = metrics_of(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [2, 4]
    assert all(0 <= line["rollout/reward_brief_mean"] <= 1 for line in lines)
    assert lines[0]["rollout/num_groups_aborted"] == 1 and len(episodes_of(tmp_path / "run")) == 2 * 2 * 4


def test_python_trains_in_a_notebook_and_gets_the_run(tmp_path):
    config = load_config(SMOKE, *QUICK, f"run_dir={tmp_path}", "train.num_steps=1")

    async def cell():
        return paravt_jax.train(config)

    run = asyncio.run(cell())
    assert run.training.step == 1 and metrics_of(tmp_path)[0]["policy_version"] == 1
    assert repr(run) == f"Run(Training(step=1, num_steps=1, path='{tmp_path}'))"  # as the value of a cell
    ids = np.array([1, 2, 3])
    trained, saved = run.training.learner.model, model_port.load(tmp_path / "checkpoints" / "1", dtype="float32")
    np.testing.assert_array_equal(model_port.logits(trained, ids), model_port.logits(saved, ids))


OWN = """
from paravt_jax.rewards import OwnTerm
from rollout.toolbox import Tool
from rollout.tools import ToolSpec, make_schema

def reward(**_):
    return [OwnTerm("mine", VALUE, weight=1.0)]

class Look(Tool):
    spec = ToolSpec(make_schema("look", "Looks."), usage="look VALUE times", effect="you see more")
"""


def test_the_next_run_of_a_notebook_uses_the_edited_files(tmp_path):
    own = tmp_path / "own.py"
    files = [f"reward.plugin={own}:reward", f"rollout.tools=[{own}:Look]", "rollout.prompts.system_has_tools=false"]
    for value in ("0.25", "0.75"):
        own.write_text(OWN.replace("VALUE", value))
        run_dir = tmp_path / value
        config = load_config(SMOKE, *QUICK, *files, f"run_dir={run_dir}", "train.num_steps=1")
        run = asyncio.run(paravt_jax.train.train(config))
        assert metrics_of(run_dir)[0]["rollout/reward_mine_mean"] == float(value)
        assert run.greedy.agent.tools["look"].spec.usage == f"look {value} times"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=/nowhere"], "/nowhere is neither a directory nor a hub id"),
        (["data.train=/nowhere.parquet"], "/nowhere.parquet"),
        (["loss.name=/nowhere.py:mine"], r"loss\.name=/nowhere\.py:mine: there is no file /nowhere\.py"),
        (["reward.plugin=/nowhere.py:reward"], "reward.plugin=/nowhere.py:reward: there is no file"),
        (["mesh.data=16", "pack.num_rows=16"], "needs 16 devices"),
    ],
)
def test_an_impossible_run_is_rejected_before_it_logs(overrides, message, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        train_here(tmp_path / "run", *overrides)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.nightly
def test_sglang_servers_sample_with_every_version(tmp_path):
    run_dir = tmp_path / "run"
    rows = ("rollout.max_context_tokens=1024", "pack.row_tokens=1024")  # the parity gate has an episode of 563 tokens
    train_here(run_dir, *QUICK, *rows, "engine.kind=sglang", "train.num_steps=2")
    lines = metrics_of(run_dir)
    assert len(lines) == 2
    assert all(line["mismatch/behavior_kl"] < 1e-6 for line in lines)
    versions = sampled_versions(episodes_of(run_dir))
    assert versions and all(version == step - 1 for step, version in versions)


@pytest.fixture
def without_gate(monkeypatch):
    """Skips the parity gate, which fake servers would not pass."""

    async def check_parity(*_): ...

    monkeypatch.setattr(setup, "_check_parity", check_parity)


class LeavingServer(FakeServer):
    """A server that stops answering after the first step's weights, and calls `leave`."""

    def leave(self) -> None: ...

    async def _generate(self, request, body):
        if self.version.endswith("/1"):
            self.leave()
            await asyncio.sleep(60)
        return await super()._generate(request, body)


@pytest.mark.usefixtures("without_gate")
@async_test
async def test_servers_can_be_replaced_between_steps(tmp_path, monkeypatch):
    url_file, run_dir = tmp_path / "servers", tmp_path / "run"
    monkeypatch.setattr(engines, "SGLangSettings", partial(SGLangSettings, probe_every_s=0.05))
    settings = ("train.num_steps=3", "engine.kind=sglang", f"engine.urls=[{url_file}]", "mismatch.max_kl=.inf")
    async with LeavingServer() as first, FakeServer() as second:
        url_file.write_text(first.url)
        first.leave = lambda: url_file.write_text(second.url)
        await train_in_loop(run_dir, *QUICK, *settings)
    run_id = directory.run_id(run_dir, ALONE)
    assert (first.version, second.version) == (f"{run_id}/1", f"{run_id}/3")
    assert second.requests["/generate"] == 2 * 4
    episodes = episodes_of(run_dir)
    assert set(sampled_versions(episodes)) == {(1, 0), (2, 1), (3, 2)}
    assert not any(episode["missing"] for episode in episodes)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert all(0 < line["perf/changed_weights_frac"] < 1 for line in lines)


def test_servers_that_do_not_answer_end_a_run_before_it_compiles(tmp_path, monkeypatch):
    """The end of a run waits for a program that is being compiled."""

    async def connect(*_):
        raise EngineError("no server answers")

    compiled = []
    monkeypatch.setattr(engines.SGLangEngine, "connect", connect)
    monkeypatch.setattr(Training, "compile_ahead", lambda self, work, stack: compiled.append(work.close()))
    with pytest.raises(EngineError, match="no server answers"):
        train_here(tmp_path / "run", *QUICK, "engine.kind=sglang", "engine.urls=[http://127.0.0.1:9]")
    assert not compiled


class TakenServer(FakeServer):
    """A server that another run takes over after the first step's weights."""

    async def _generate(self, request, body):
        if self.version.endswith("/1"):
            self.version = "other-run/5"
        return await super()._generate(request, body)


@pytest.mark.usefixtures("without_gate")
@async_test
async def test_a_run_ends_if_another_run_takes_over_its_server(tmp_path):
    async with TakenServer() as server:
        settings = ("engine.kind=sglang", f"engine.urls=[{server.url}]", "mismatch.max_kl=.inf")
        with pytest.raises(RuntimeError, match=r"no server is left: .*taken over by another run, other-run, and"):
            await train_in_loop(tmp_path / "run", *QUICK, *settings)
        assert (server.version, server.requests["/update_weights_from_disk"]) == ("other-run/5", 2)
    assert len(metrics_of(tmp_path / "run")) == 1
