"""The checks before the first step."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from data_rows import rl_row, write_lines

from paravt_jax.config import DataConfig, EngineConfig, load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.rl import setup
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.train import train
from rollout.engine.protocol import EngineError


def test_a_row_with_more_images_than_an_overview_has_frames_is_rejected():
    prompts = [Prompt(f"p{num}", "Which?", (), "A", "mcq", images=("/a.png",) * num) for num in (0, 3)]
    setup._check_num_images(prompts, "rl.jsonl", 3)
    with pytest.raises(ValueError, match=r"the row p3 has 3 images, more than the 2 frames .*video\.overview_frames"):
        setup._check_num_images(prompts, "rl.jsonl", 2)


def test_remarks_on_a_file_for_both_training_and_validation_are_logged_once(tmp_path, caplog):
    rows = [rl_row(question="Which?", videos=[]), {}]
    path = str(write_lines(tmp_path / "rl.jsonl", rows))
    data = DataConfig(train=path, validation=path, max_bad_frac=0.5)
    assert len(setup._prompts(data, tmp_path, 0, 9, None)[2]) == len(caplog.records) == 1


def test_a_missing_wandb_ends_a_run_before_it_has_a_directory(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = load_config("smoke_cpu", f"run_dir={tmp_path / 'run'}", "log.wandb_project=video")
    with pytest.raises(ValueError, match=r"log.wandb_project=video needs .* pip install wandb,"):
        asyncio.run(train(config))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["train.max_staleness=1"], r"max_staleness=1 with engine\.kind=jax would .* different order on each host"),
        (["train.oversample=1"], r"oversample=1 aborts the slowest groups, and no host knows all groups; set it to 0"),
        (["engine.kind=sglang", "hosts.coordinator=auto"], r"auto starts jax before the servers .* get their GPUs"),
    ],
)
def test_settings_that_need_a_single_host_are_rejected_on_several(settings, reason, tmp_path):
    config = load_config("smoke_cpu", f"run_dir={tmp_path / 'run'}", *settings)
    with pytest.raises(ValueError, match=reason):
        asyncio.run(train(config, hosts=Hosts(0, 2)))


def gate(monkeypatch, servers):
    """Runs the gate with the given servers and results. Returns the log."""
    messages, requested, ready = [], set(), set()

    async def wait_for(url):
        await asyncio.sleep(0)
        ready.add(url)

    async def check(urls, scorer, chat, on_progress):
        (url,) = urls
        assert url in ready  # it has the learner's weights
        requested.add(url)
        async with asyncio.timeout(5):
            while requested != set(servers):  # servers are compared concurrently
                await asyncio.sleep(0)
        if isinstance(servers[url], EngineError):
            raise servers[url]
        return [SimpleNamespace(url=url, problems=servers[url])]

    monkeypatch.setattr(setup, "check", check)
    monkeypatch.setattr(setup, "table", lambda parities: f"compared {[parity.url for parity in parities]}")
    monkeypatch.setattr(setup, "LearnerScorer", lambda *_: None)
    monkeypatch.setattr(setup, "LocalCopy", lambda *_: SimpleNamespace(mesh=None, of=lambda model: model))
    log = SimpleNamespace(say=messages.append, phase=lambda text: None)
    policy = SimpleNamespace(contract=None, chat=None, mesh=None, compute=SimpleNamespace(dtype="float32"))
    training, urls = SimpleNamespace(log=log, learner=SimpleNamespace(model=None)), list(servers)
    engine_settings = EngineConfig(kind="sglang", urls=["http://127.0.0.1:1"])
    run: Any = SimpleNamespace(training=training, policy=policy, hosts=ALONE, engine_settings=engine_settings)
    engine: Any = SimpleNamespace(urls=urls, wait_for=wait_for)
    asyncio.run(setup._check_parity(engine, run))
    return messages


def test_a_server_that_is_down_does_not_end_the_run(monkeypatch):
    messages = gate(monkeypatch, {"a": EngineError("a cannot be reached"), "b": []})
    assert messages == ["a was not compared with the learner: a cannot be reached", "compared ['b']"]


def test_a_server_that_disagrees_with_the_learner_ends_the_run(monkeypatch):
    with pytest.raises(RuntimeError, match=r"so the run did not start: b: they differ"):
        gate(monkeypatch, {"a": [], "b": ["they differ"]})


def test_the_run_ends_if_no_server_can_be_compared(monkeypatch):
    with pytest.raises(RuntimeError, match=r"no server could be compared with the learner.*a is gone"):
        gate(monkeypatch, {"a": EngineError("a is gone")})
