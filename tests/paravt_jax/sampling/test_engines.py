"""Each server of a run gets its own GPUs."""

import asyncio

import pytest

from model_port.layers import Compute
from model_port.processing import VisionContract
from paravt_jax.config import EngineConfig, VideoConfig
from paravt_jax.run.policy import Policy
from paravt_jax.sampling.engines import open_engine
from rollout.chat import Chat
from rollout.server import ServerFailed


def test_every_server_gets_its_own_gpus(tiny_hf, tmp_path, monkeypatch):
    python = tmp_path / "python"  # a server that logs its GPUs and arguments, and exits
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{tmp_path}/$$.seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PARAVT_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the learner's")
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute())
    engine, gpus = EngineConfig("sglang", num_servers=2, gpus=[1, 2, 4, 5]), [("1", "GPU-x"), ("4", "5")]
    sizes = {"max_context_tokens": 1024, "max_pixels": 50_176}
    with pytest.raises(ServerFailed, match="ended with exit code 1 before it was ready"):
        asyncio.run(open_engine(engine, policy, None, 0, lambda phase: None, dtype="bfloat16", gpus=gpus, **sizes))
    logs = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert {line.split()[0] for line in logs} <= {"1,GPU-x", "4,5"} and len(logs) == 2
    assert all("--tensor-parallel-size 2" in line for line in logs)


def test_the_largest_overview_with_and_without_budgets():
    assert VideoConfig(frame_budgets=[4, 128], overview_frames=32).most_frames == 128
    assert VideoConfig(frame_budgets=[], overview_frames=32).most_frames == 32
