"""Each server of a run gets its own GPUs, and one that does not answer is reported before the model is loaded."""

import asyncio
import re
import socket
from contextlib import AsyncExitStack

import pytest
from async_tests import async_test
from fake_server import FakeServer

from model_port.layers import Compute
from model_port.processing import VisionContract
from paravt_jax.config import EngineConfig, EvalConfig, VideoConfig, load_config
from paravt_jax.evaluation import evaluation
from paravt_jax.rl import setup
from paravt_jax.run.policy import Policy
from paravt_jax.sampling.engines import open_engine, report_unreachable
from paravt_jax.train import train
from rollout.chat import Chat
from rollout.episode_config import EpisodeConfig
from rollout.server import ServerFailed

EPISODES = EpisodeConfig(max_new_tokens=512, max_context_tokens=1024)


def test_every_server_gets_its_own_gpus(tiny_hf, tmp_path, monkeypatch):
    python = tmp_path / "python"  # a fake server that logs its GPUs and arguments, and exits when both have
    python.write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{tmp_path}/$$.seen\n'
        f"while set -- {tmp_path}/*.seen; [ $# -lt 2 ]; do sleep 0.1; done\nexit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("PARAVT_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the learner's")
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute("bfloat16"))
    engine, gpus = EngineConfig("sglang", num_servers=2, gpus=[1, 2, 4, 5]), [("1", "GPU-x"), ("4", "5")]
    with pytest.raises(ServerFailed, match="ended with exit code 1 before it was ready"):
        asyncio.run(open_engine(engine, policy, EPISODES, None, 0, lambda phase: None, gpus=gpus))
    logs = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert {line.split()[0] for line in logs} <= {"1,GPU-x", "4,5"} and len(logs) == 2
    assert all("--tensor-parallel-size 2" in line and "--dtype bfloat16" in line for line in logs)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def unloaded(monkeypatch):
    """Replaces loading the model by an error."""

    async def policy_of(*_, **__):
        raise ValueError("now the model would be loaded")

    for module in (setup, evaluation):
        monkeypatch.setattr(module, "policy_of", policy_of)


def is_reported(url: str, text: str) -> bool:
    fix = r"if it is not starting, correct engine\.urls or start it: python -m rollout\.serve --model MODEL"
    return re.search(rf"^engine\.urls: {url}/model_info cannot be reached: .*; {fix}$", text, re.MULTILINE) is not None


@pytest.mark.usefixtures("unloaded")
def test_a_run_reports_an_unreachable_server_before_it_loads_its_model(tmp_path, free_port, capsys):
    url = f"http://127.0.0.1:{free_port}"
    config = load_config("smoke_cpu", f"run_dir={tmp_path / 'run'}", "engine.kind=sglang", f"engine.urls=[{url}]")
    with pytest.raises(ValueError, match="now the model"):
        asyncio.run(train(config))
    assert is_reported(url, capsys.readouterr().err)


@pytest.mark.usefixtures("unloaded")
@async_test
async def test_an_evaluation_reports_an_unreachable_server_before_it_loads_its_model(tmp_path, free_port, capsys):
    url = f"http://127.0.0.1:{free_port}"
    overrides = (f"run_dir={tmp_path}", "engine.kind=sglang", f"engine.urls=[{url}]")
    config = load_config("eval_smoke", *overrides, schema=EvalConfig)
    async with AsyncExitStack() as stack:
        with pytest.raises(ValueError, match="now the model"):
            await evaluation._open_worker(config, tmp_path, stack, ())
    assert is_reported(url, capsys.readouterr().err)


@async_test
async def test_a_starting_server_is_reported_and_awaited(tiny_hf, free_port, tmp_path, capsys):
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute())
    url, listed = f"http://127.0.0.1:{free_port}", tmp_path / "servers"
    settings = EngineConfig("sglang", [str(listed)])
    await report_unreachable(settings)  # a server list that does not exist yet
    listed.write_text(url)
    await report_unreachable(settings)
    opening = asyncio.create_task(open_engine(settings, policy, EPISODES, None, 0, lambda phase: None))
    await asyncio.sleep(0.5)
    async with FakeServer(free_port) as server:
        engine = await opening
        await report_unreachable(settings)
        await engine.close()
    assert "/model_info" in server.requests
    *lines, last = capsys.readouterr().err.splitlines()
    assert is_reported(url, last) and [f"'{listed}'" in line for line in lines] == [True]


def test_the_largest_overview_with_and_without_budgets():
    assert VideoConfig(frame_budgets=[4, 128], overview_frames=32).most_frames == 128
    assert VideoConfig(frame_budgets=[], overview_frames=32).most_frames == 32
