"""Servers that a run starts are told by their environment which GPUs are theirs."""

import asyncio

import pytest

from model_port.layers import Compute
from model_port.processing import VisionContract
from paravt_jax.config import EngineConfig
from paravt_jax.run.policy import Policy
from paravt_jax.sampling.opening import open_engine
from rollout.chat import Chat
from rollout.server import ServerFailed


def test_every_server_is_started_on_gpus_of_its_own(tiny_hf, tmp_path, monkeypatch):
    python = tmp_path / "python"  # a server that notes what it sees and what it is told, and ends
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >{tmp_path}/$$.seen\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setenv("PARAVT_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "the learner's")
    policy = Policy(None, VisionContract.from_hf(tiny_hf), Chat.from_hf(tiny_hf), tiny_hf, tiny_hf, Compute())
    engine, gpus = EngineConfig("sglang", num_servers=2, gpus=[1, 2, 4, 5]), [("1", "GPU-x"), ("4", "5")]
    sizes = {"max_context_tokens": 1024, "max_pixels": 50_176}
    with pytest.raises(ServerFailed, match="ended with exit code 1 before it was ready"):
        asyncio.run(open_engine(engine, policy, None, 0, lambda phase: None, dtype="bfloat16", gpus=gpus, **sizes))
    seen = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert {line.split()[0] for line in seen} <= {"1,GPU-x", "4,5"} and len(seen) == 2
    assert all("--tensor-parallel-size 2" in line for line in seen)
