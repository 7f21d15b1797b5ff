"""The start line has the devices, and no large model trains on a CPU by mistake."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack

import jax
import pytest
from async_tests import async_test

from model_port.config import config_to_hf, preset
from model_port.tiny import make_tiny
from paravt_jax.config import EvalConfig, MeshConfig, SftConfig, load_config, to_record
from paravt_jax.evaluation import evaluation
from paravt_jax.rl.setup import open_run
from paravt_jax.run import start
from paravt_jax.run.policy import policy_of


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A 2B model with only a config.json, so that loading its weights fails."""
    directory = tmp_path_factory.mktemp("large") / "hf"
    make_tiny(directory)
    (directory / "config.json").write_text(json.dumps(config_to_hf(preset("2b"))))
    (directory / "model.safetensors").unlink()
    return directory


def policy(schema, model, run_dir, *settings):
    config = load_config(None, f"model.path={model}", f"run_dir={run_dir}", *settings, schema=schema)
    return asyncio.run(policy_of(config, run_dir))


def test_a_large_model_on_a_cpu_is_rejected_before_its_mesh_and_weights(large, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")  # nobody requested the CPU
    message = r"has 2\.13 billion parameters, and jax would train it on 8 x cpu.* or set JAX_PLATFORMS=cpu to train it"
    with pytest.raises(RuntimeError, match=message):
        policy(SftConfig, large, tmp_path, "data.train=t.jsonl", "mesh.fsdp=8", "mesh.tensor=64", "pack.num_rows=8")


def test_jax_platforms_allows_training_on_a_cpu_and_evaluations_always_run(large, tmp_path, monkeypatch):
    policy(SftConfig, large, tmp_path, "data.train=traces.jsonl")
    for platforms in ("", "cuda,cpu"):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        start.check_cpu_size("m", start.MAX_CPU_PARAMS, jax.devices())
        with pytest.raises(RuntimeError, match="set JAX_PLATFORMS=cpu"):
            start.check_cpu_size("m", start.MAX_CPU_PARAMS + 1, jax.devices())
    policy(EvalConfig, large, tmp_path, "data.validation=rows.jsonl")


@pytest.mark.parametrize(
    ("installed", "visible", "reason"),
    [
        (False, False, None),
        (False, True, "an NVIDIA GPU is visible, and jax's CUDA plugin is not installed (`pip install 'jax[cuda12]'"),
        (True, False, "jax's CUDA plugin is installed, but no NVIDIA GPU is visible"),
        (True, True, "an NVIDIA GPU is visible, but jax's CUDA plugin cannot use it"),
    ],
)
def test_an_unusable_gpu_is_reported_unless_a_cpu_is_requested(installed, visible, reason, monkeypatch):
    monkeypatch.setattr(start, "CUDA_PLUGINS", ("json",) if installed else ())
    monkeypatch.setattr(start, "NVIDIA_FILES", ("null",) if visible else ())
    assert start.describe_devices(jax.devices()) == "8 x cpu"
    monkeypatch.delenv("JAX_PLATFORMS")
    devices = start.describe_devices(jax.devices())
    assert devices == "8 x cpu" if reason is None else reason in devices


@pytest.mark.slow
def test_a_platform_without_devices_is_one_error_with_fixes(tmp_path):
    settings = ["--config", "configs/smoke_cpu.yaml", f"run_dir={tmp_path}/run"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "paravt_jax.train", *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: JAX_PLATFORMS=cuda, but jax finds no such device: ")
    assert "unset JAX_PLATFORMS" in done.stderr and "set JAX_PLATFORMS=cpu" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_start_line_has_devices_mesh_parameters_data_and_directory(tmp_path, capsys):
    config = load_config(None, "model.path=tiny", f"run_dir={tmp_path}", "mesh.fsdp=4", "pack.num_rows=4")
    asyncio.run(policy_of(config, tmp_path, data="18 prompts, 4 held out"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"devices: 8 x cpu | mesh: data=1 fsdp=4 tensor=1 | parameters: 1.04 million in bfloat16 | model: tiny | "
        f"data: 18 prompts, 4 held out | run_dir: {tmp_path}"
    )


def test_the_start_line_omits_empty_items():
    line = start.start_line("8 x NVIDIA H100", 8_767_123_696, "bfloat16", "bfloat16", mesh=MeshConfig(), data="")
    assert line == "devices: 8 x NVIDIA H100 | mesh: one device | parameters: 8.77 billion in bfloat16"


@pytest.mark.slow
@async_test
async def test_a_cpu_computes_in_float32_and_the_run_logs_and_records_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KEEP", "3")
    settings = ["model.dtype=bfloat16", f"run_dir={tmp_path}", "checkpoint.keep=${oc.decode:${oc.env:KEEP}}"]
    with pytest.raises(KeyError):
        async with open_run(load_config("configs/smoke_cpu.yaml", *settings)) as run:
            raise KeyError  # skips saving and plots
    record = json.loads((tmp_path / "config.json").read_text())["config"]
    assert run.training.learner.model.compute.dtype == record["model"]["dtype"] == "float32"
    assert "KEEP" in record["checkpoint"]["keep"]  # a ${…} stays unresolved
    log = capsys.readouterr().err
    assert "1.04 million in float32 (model.dtype=bfloat16 is slower and takes more memory on a CPU)" in log


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ([], "float32"),
        (["engine.kind=sglang", "engine.urls=[http://127.0.0.1:1]"], "bfloat16"),  # for any local device
        (["engine.kind=sglang"], "float32"),  # its servers start on this machine, which shows no GPU
    ],
)
@async_test
async def test_an_evaluation_computes_in_its_engines_dtype_and_records_the_setting(
    engine, dtype, tmp_path, monkeypatch
):
    """Shards may run on other machines than the merge."""

    async def computing_in(config, *_, **__):
        raise KeyError(config.model.dtype)

    monkeypatch.setattr(evaluation, "policy_of", computing_in)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = [f"run_dir={tmp_path}/run", "data.validation=rows.jsonl", *engine]
    config = load_config(None, *settings, schema=EvalConfig)
    async with AsyncExitStack() as stack:
        with pytest.raises(KeyError, match=dtype):
            await evaluation._open_worker(config, tmp_path, stack, [])
    assert to_record(config)["model"]["dtype"] == "bfloat16"
