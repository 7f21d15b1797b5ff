"""Servers and learner get separate GPUs, or nothing starts; tested without a GPU."""

import asyncio
from dataclasses import replace

import pytest

from paravt_jax.config import EngineConfig, load_config
from paravt_jax.run.gpu_assignment import place_servers, split_gpus, visible_gpus
from paravt_jax.run.process import claim_memory
from paravt_jax.train import train

BOX = [f"GPU-{letter}" for letter in "abcdefgh"]


def engine(*gpus: int, num_servers: int = 1) -> EngineConfig:
    return EngineConfig("sglang", num_servers=num_servers, gpus=list(gpus))


def test_servers_get_the_listed_gpus_and_the_learner_all_others():
    servers, learner = split_gpus(engine(6, 7, 1, 0, num_servers=2), 4, BOX)
    assert servers == (("GPU-g", "GPU-h"), ("GPU-b", "GPU-a"))
    assert learner == ("GPU-c", "GPU-d", "GPU-e", "GPU-f")


@pytest.mark.parametrize(
    ("config", "num_learner", "message"),
    [
        (engine(), 8, r"engine\.gpus is empty, but the 1 servers .* some of the 8 visible GPUs"),
        (engine(7, 8, num_servers=2), 6, r"engine\.gpus=\[7, 8\]: there is no GPU 8; 8 GPUs are visible"),
        (engine(4, 5, 6, 7), 8, r"mesh\.data x mesh\.fsdp x mesh\.tensor = 8, and .* leaves 4 of 8 GPUs to the"),
        (engine(7), 1, r" = 1, and engine\.gpus=\[7\] leaves 7 of 8 GPUs"),
    ],
)
def test_missing_gpus_and_meshes_of_another_size_are_rejected(config, num_learner, message):
    with pytest.raises(ValueError, match=message):
        split_gpus(config, num_learner, BOX)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, ("2", "0")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-4f2c,MIG-91,7"}, ("GPU-4f2c", "MIG-91", "7")),
        ({"CUDA_VISIBLE_DEVICES": "3,-1,4"}, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
    ],
)
def test_cuda_visible_devices_limits_the_visible_gpus(environment, gpus):
    assert visible_gpus(environment, 3) == gpus


def test_the_learner_sees_the_visible_gpus_without_the_servers():
    environment = {"CUDA_VISIBLE_DEVICES": "5,GPU-x,2,GPU-y"}
    assert place_servers(engine(1, 3, num_servers=2), 2, environment) == (("GPU-x",), ("GPU-y",))
    assert environment == {"CUDA_VISIBLE_DEVICES": "5,2"}


@pytest.mark.parametrize("config", [EngineConfig(), EngineConfig("sglang", urls=["http://a"])])
def test_without_servers_on_gpus_all_gpus_stay_visible(config):
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert place_servers(config, 8, environment) == () and environment == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_without_visible_gpus_servers_start_on_the_cpu_unless_their_gpus_are_listed():
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    for config in (engine(), EngineConfig("openai", serve_with="vllm", num_servers=2)):
        assert place_servers(config, 0, environment) == ()
    with pytest.raises(ValueError, match=r"engine\.gpus=\[1\]: there is no GPU 1; 0 GPUs are visible"):
        place_servers(engine(1), 0, environment)


def test_jax_preallocates_the_planned_memory_unless_the_user_sets_a_fraction():
    planned, current, older = (
        {"XLA_CLIENT_MEM_FRACTION": "0.90"},
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
    )
    for given, expected in (({}, planned), (current, current), (older, older)):
        claim_memory(environment := dict(given))
        assert environment == expected


def test_servers_without_gpus_are_rejected_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = ("engine.kind=sglang", "engine.gpus=[2]", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(ValueError, match=r"engine\.gpus=\[2\]: there is no GPU 2"):
        asyncio.run(train(load_config("configs/smoke_cpu.yaml", *settings)))
    assert not (tmp_path / "run").exists()


def test_evaluation_servers_get_a_gpu_each_unless_gpus_are_listed():
    visible = {"CUDA_VISIBLE_DEVICES": "3,5,7"}
    engine = EngineConfig("openai", serve_with="vllm", num_servers=2)
    assert place_servers(engine, 0, dict(visible)) == (("3",), ("5",))
    assert place_servers(replace(engine, gpus=[1, 2], num_servers=1), 0, dict(visible)) == (("5", "7"),)
    assert place_servers(EngineConfig("openai", ["http://h/v1"], model="m"), 0, dict(visible)) == ()
    with pytest.raises(ValueError, match=r"there is no GPU 3; 3 GPUs are visible"):
        place_servers(replace(engine, num_servers=4), 0, dict(visible))
