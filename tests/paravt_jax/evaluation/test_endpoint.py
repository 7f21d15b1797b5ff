"""Evaluations of a model behind an endpoint: certificates, kill and resume, and errors before the first sample."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import call
from async_tests import async_test
from fake_endpoint import MODEL, FakeEndpoint
from published import VIDEOS, make_copy

from paravt_jax.config import Config, EngineConfig, EvalCell, EvalConfig, load_config
from paravt_jax.data.splits import SPLITS
from paravt_jax.eval import run_eval
from paravt_jax.evaluation.provenance import changed_sections, settings_key
from paravt_jax.evaluation.results import refusal
from paravt_jax.sampling.endpoint import open_endpoint
from paravt_jax.view.episodes import convert
from paravt_jax.view.page import make_page
from rollout.endpoint import client as client_module
from rollout.endpoint.errors import EndpointError
from rollout.episode_config import EpisodeConfig
from rollout.video.encode import write_video

KEY = "sk-secret-0123456789"
ANSWER = "<think>\nIt is poured.</think><answer>B</answer>"
LOOK = f"<think>\nWhere?</think>{call(1, 2)}"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(client_module, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(client_module, "GIVE_UP_S", 0.3)
    monkeypatch.setitem(SPLITS, "longvideobench", replace(SPLITS["longvideobench"], num_samples=3))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Three questions, each about a video of three seconds."""
    root = make_copy("longvideobench", tmp_path_factory.mktemp("copy") / "longvideobench")
    for number, video in enumerate(VIDEOS["longvideobench"]):
        write_video(root / video, [np.full((64, 96, 3), 40 * number + 20 * n, np.uint8) for n in range(6)], fps=2)
    return root


def config_of(copy: Path, run_dir: Path, *overrides: str, urls: str = "http://127.0.0.1:9/v1") -> EvalConfig:
    settings = [f"run_dir={run_dir}", "data.split=longvideobench", f"data.validation={copy}", "engine.kind=openai"]
    settings += [f"engine.model={MODEL}", f"engine.urls=[{urls}]", "eval.frame_budgets=[2]", "video.num_workers=1"]
    return load_config(None, *settings, *overrides, schema=EvalConfig)


def evaluated(copy: Path, run_dir: Path, *endpoints: FakeEndpoint, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(endpoint)).url for endpoint in endpoints]
            (cell,) = await run_eval(config_of(copy, run_dir, *overrides, urls=",".join(urls)))
            return cell

    return asyncio.run(run())


def says(body: dict[str, Any]) -> str:
    texts = [message["content"] for message in body["messages"]]
    if isinstance(texts[0], str) and "looks closely" in texts[0]:
        return "A report."
    return LOOK if len(texts) == 2 else ANSWER


def test_a_certificate_names_the_model_and_hashes_all_requests_and_has_no_address(copy, tmp_path):
    endpoint = FakeEndpoint(says)
    cell = evaluated(copy, tmp_path / "run", endpoint)
    assert cell["model"]["path"] == MODEL and cell["engines"] == [{"kind": "openai", "serve_with": ""}]
    assert cell["headline"] == pytest.approx(1 / 3) and not refusal([cell])
    assert set(cell["hashes"]) == {"prompt", "schema", "scorer", "requests"}
    assert cell["metrics"]["tool_calls_mean"] == 1 and cell["crop_frames"]["min"] > 0
    assert cell["metrics"]["sampled_tokens_mean"] == 14  # as counted by the endpoint
    certificate = (tmp_path / "run" / "cell_parallel_2.json").read_text() + (tmp_path / "run" / "eval.json").read_text()
    assert "127.0.0.1" not in certificate
    assert len(endpoint.bodies) == 1 + 3 * 3  # one request checks the endpoint


@pytest.mark.slow
def test_equal_evaluations_have_equal_hashes_of_their_requests_and_others_do_not(copy, tmp_path):
    hashes = []
    for number, overrides in enumerate([(), (), ("rollout.max_new_tokens=99",)]):
        cell = evaluated(copy, tmp_path / f"run{number}", FakeEndpoint(says), overrides=overrides)
        hashes.append(cell["hashes"]["requests"])
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_a_sample_that_the_endpoint_rejects_is_missing_with_its_reason_and_retried(copy, tmp_path):
    cell = evaluated(copy, tmp_path / "run", FakeEndpoint(ANSWER, "ok", "filtered", "vllm context", "ok"))
    assert cell["n"]["missing"] == {"content_filter": 1, "context": 1} and cell["n"]["answered"] == 1
    assert cell["metrics"]["missing_engine"] == 2 and cell["headline"] is None
    lines = map(json.loads, (tmp_path / "run" / "samples_parallel_2.jsonl").read_text().splitlines())
    episodes = [episode for line in lines for episode in line["episodes"]]
    problems = {episode["reason"]: episode["problem"] for episode in episodes if episode["missing"]}
    assert "withheld the reply" in problems["content_filter"]
    again = FakeEndpoint(ANSWER)
    cell = evaluated(copy, tmp_path / "run", again)
    assert cell["n"]["answered"] == 3 and cell["headline"] == pytest.approx(1 / 3)
    assert len(again.bodies) == 1 + 2


@pytest.mark.slow
def test_another_address_resumes_and_another_model_does_not(copy, tmp_path):
    whole = evaluated(copy, tmp_path / "run", FakeEndpoint(ANSWER))
    samples = tmp_path / "run" / "samples_parallel_2.jsonl"
    samples.write_bytes(samples.read_bytes()[:-10])  # simulates a kill while the last line is written
    again = FakeEndpoint(ANSWER)
    assert evaluated(copy, tmp_path / "run", again) == whole
    assert len(again.bodies) == 1 + 1  # the check, and the unfinished sample
    evaluated(copy, tmp_path / "run", again)
    assert len(again.bodies) == 1 + 1
    with pytest.raises(ValueError, match=r"other settings \(engine\.model\)"):
        evaluated(copy, tmp_path / "run", again, overrides=("engine.model=other",))


def test_the_key_is_in_no_file_of_a_run(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    endpoint = FakeEndpoint(ANSWER, "ok", "forbidden", "500", "500", "500", "500", "500", "ok")
    endpoint.key = KEY
    evaluated(copy, tmp_path / "run", endpoint, overrides=("engine.api_key_env=ENDPOINT_KEY",))
    written = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert KEY not in written and KEY[:12] not in written and "ENDPOINT_KEY" in written
    assert any(headers.get("Authorization") == f"Bearer {KEY}" for headers in endpoint.headers)


@pytest.mark.parametrize(
    ("mode", "models", "message"),
    [
        ("ok", ["other"], r"does not serve engine\.model=fake/model; it serves other$"),
        ("vllm pictures", [MODEL], "is not a multimodal model"),
        ("openai key", [MODEL], "rejects the API key .* check the variable that engine.api_key_env names"),
    ],
)
def test_an_unusable_endpoint_is_a_one_line_error_before_the_first_sample(mode, models, message, copy, tmp_path):
    endpoint = FakeEndpoint(ANSWER, mode)
    endpoint.models = models
    with pytest.raises(EndpointError) as caught:
        evaluated(copy, tmp_path / "run", endpoint)
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("samples_*"))


def test_an_endpoint_that_is_down_is_a_one_line_error_before_the_first_sample(copy, tmp_path):
    with pytest.raises(EndpointError, match=r"^http://127\.0\.0\.1:9/v1 cannot be reached"):
        asyncio.run(run_eval(config_of(copy, tmp_path / "run")))


@pytest.mark.slow
def test_an_endpoint_that_dies_stops_the_evaluation_and_a_restart_resumes_it(copy, tmp_path, monkeypatch):
    monkeypatch.setattr("paravt_jax.evaluation.runner.MAX_IN_FLIGHT", 1)
    with pytest.raises(RuntimeError, match="failed 3 samples in a row"):
        evaluated(copy, tmp_path / "run", FakeEndpoint(ANSWER, "ok", "500"))
    assert evaluated(copy, tmp_path / "run", FakeEndpoint(ANSWER))["n"]["answered"] == 3


@async_test
async def test_requests_wait_for_local_servers_that_restart(tmp_path, monkeypatch):
    """vLLM takes minutes to start; only its start is replaced here."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(FakeEndpoint(ANSWER))
        started = asyncio.sleep(0, ([endpoint.url], lambda: 1800.0))
        monkeypatch.setattr("paravt_jax.sampling.endpoint.start_endpoints", lambda *_: started)
        settings = EngineConfig("openai", serve_with="vllm")
        rollout = EpisodeConfig(max_context_tokens=4096, temperature=0.0)
        client = await open_endpoint(settings, MODEL, tmp_path, stack, rollout, gpus=[], dtype="bfloat16")
        await endpoint.die()
        message = {"role": "user", "content": "Who?"}
        asked = asyncio.create_task(client.complete([message], max_tokens=9, temperature=0.0, deadline_s=30.0))
        await asyncio.sleep(4 * client_module.GIVE_UP_S)
        await endpoint.__aenter__()
        assert (await asked).text == ANSWER


def test_training_with_an_endpoint_is_a_one_line_error():
    with pytest.raises(ValueError, match=r"^engine\.kind=openai is for evaluation only: an endpoint returns text"):
        load_config(None, "engine.kind=openai", "engine.urls=[http://h/v1]", "engine.model=m", schema=Config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either engine.urls and engine.model, or engine.serve_with"),
        ({"urls": ["http://h/v1"]}, "needs either engine.urls and engine.model"),
        ({"urls": ["http://h/v1"], "model": "m", "serve_with": "vllm"}, "needs either"),
        ({"urls": ["h:8000"], "model": "m"}, "h:8000, which is not a URL; write http://h:8000"),
        ({"urls": ["http://h:99999/v1"], "model": "m"}, "engine.urls is not a URL"),
        ({"urls": ["http://h:port/v1"], "model": "m"}, "engine.urls is not a URL"),
        ({"urls": ["http://h/v1?key=secret"], "model": "m"}, "without a query"),
        ({"urls": ["http://me:secret@h/v1"], "model": "m"}, "contains a user name or password"),
    ],
)
def test_invalid_endpoint_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        EngineConfig("openai", **settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["model", "api_key_env", "serve_with"])
def test_settings_of_an_endpoint_have_no_effect_elsewhere(name):
    with pytest.raises(ValueError, match=rf"engine\.{name}=vllm has no effect without engine\.kind=openai"):
        EngineConfig("jax", **{name: "vllm"})


def test_only_an_endpoints_model_name_is_part_of_the_settings_hash():
    record = {"eval": {"mode": "agentic", "num_samples": 1}, "data": {"split": ""}, "seed": 0}
    engines = [("jax", ""), ("sglang", ""), ("openai", "a"), ("openai", "b")]
    jax, sglang, first, second = (record | {"engine": {"kind": kind, "model": model}} for kind, model in engines)
    keys = [settings_key(each, EvalCell("none", 4)) for each in (jax, sglang, first, second)]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert not changed_sections(jax, sglang) and changed_sections(first, second) == ["engine.model"]


@pytest.mark.slow
def test_the_page_of_a_run_shows_episodes_without_ids(copy, tmp_path):
    evaluated(copy, tmp_path / "run", FakeEndpoint(says))
    records = map(json.loads, (tmp_path / "run" / "samples_parallel_2.jsonl").read_text().splitlines())
    for episode in (convert(record["episodes"][0], "", 10_000) for record in records):
        assert [turn["num_sampled"] for turn in episode["turns"]] == [7, 7]
        assert [call["num_tokens"] for turn in episode["turns"] for call in turn["calls"]] == [7]
    assert b"It is poured." in make_page([tmp_path / "run"], 10, frames=True)
