"""The gate before the first step: what it refuses, and what it leaves to the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from paravt_jax.config import EngineConfig
from paravt_jax.rl import setup
from paravt_jax.run.hosts import ALONE
from rollout.engine.protocol import EngineError


def gate(monkeypatch, servers):
    """Goes through it with these servers, each with what the comparison gives; what the run said."""
    said, asked = [], set()

    async def check(urls, scorer, chat, on_progress):
        (url,) = urls
        asked.add(url)
        async with asyncio.timeout(5):
            while asked != set(servers):  # the others are not kept waiting
                await asyncio.sleep(0)
        if isinstance(servers[url], EngineError):
            raise servers[url]
        return [SimpleNamespace(url=url, problems=servers[url])]

    monkeypatch.setattr(setup, "check", check)
    monkeypatch.setattr(setup, "table", lambda parities: f"compared {[parity.url for parity in parities]}")
    monkeypatch.setattr(setup, "LearnerScorer", lambda *_: None)
    log = SimpleNamespace(say=said.append, phase=lambda text: None)
    policy = SimpleNamespace(contract=None, chat=None, mesh=None, compute=SimpleNamespace(dtype="float32"))
    training, urls = SimpleNamespace(log=log, learner=SimpleNamespace(model=None)), list(servers)
    engine_settings = EngineConfig(kind="sglang", urls=["http://127.0.0.1:1"])
    run: Any = SimpleNamespace(training=training, policy=policy, hosts=ALONE, engine_settings=engine_settings)
    engine: Any = SimpleNamespace(urls=urls)
    asyncio.run(setup._check_parity(engine, run))
    return said


def test_a_server_that_is_down_at_the_gate_does_not_end_the_run(monkeypatch):
    said = gate(monkeypatch, {"a": EngineError("a cannot be reached"), "b": []})
    assert said == ["a was not compared with the learner: a cannot be reached", "compared ['b']"]


def test_a_server_that_computes_something_else_ends_it(monkeypatch):
    with pytest.raises(RuntimeError, match=r"so the run did not start: b: they differ"):
        gate(monkeypatch, {"a": [], "b": ["they differ"]})


def test_without_any_server_to_compare_with_nothing_is_trained(monkeypatch):
    with pytest.raises(RuntimeError, match=r"no server could be compared with the learner.*a is gone"):
        gate(monkeypatch, {"a": EngineError("a is gone")})
