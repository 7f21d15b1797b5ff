"""The attention kernels and the sampler, compiled for chips that this machine lacks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from model_port.config import PRESETS
from paravt_jax.config import load_config
from paravt_jax.config.schema import MeshConfig
from paravt_jax.plan.memory import values_on
from paravt_jax.plan.plan import model_config
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.topology import topology
from paravt_jax.plan.workload import BF16_BYTES, cached_bytes, decoded_bytes

FOLDER = Path(__file__).parent
TOKENS = 2048
KERNELS = 3  # forward, gradient of the queries, gradients of keys and values


def compiled(script, *arguments):
    """Returns a script's output. Skips the test if the compiler is missing."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, FOLDER / script, *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    if "missing" in result:
        pytest.skip(result["missing"])
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kind"), [(16, 4, 128, "causal"), (4, 4, 72, "whole")], ids=["text", "vision"]
)
@pytest.mark.parametrize(
    "name",
    [
        "h100:8",
        "v5p:2x2x2",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("l4:8", "a100:8", "b200:8", "v5e:4x4", "v6e:4x4")),
    ],
)
def test_auto_attention_compiles_the_kernel_of_the_target_chip(name, heads, kv_heads, head_dim, kind):
    program = compiled("compiled_kernel.py", name, heads, kv_heads, head_dim, kind, TOKENS)
    call = "tpu_custom_call" if name.startswith("v") else "triton"
    assert len(re.findall(rf"custom_call @[\w$.]*{call}", program["text"])) == KERNELS
    float32_scores_bytes = 4 * heads // 2 * TOKENS**2
    assert program["temp_bytes"] < float32_scores_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name", "tensor", "stacking"),
    [
        ("8b_8x80gb_embedded", "h100:8", 8, "split"),
        ("8b_v5p8", "v5p:2x2x1", 4, "stacked"),
        ("8b_lora_1x80gb", "h100:1", 1, "split"),
    ],
)
def test_the_planned_memory_of_the_sampler_is_within_5_percent_of_the_compilers(recipe, name, tensor, stacking):
    config = load_config(f"configs/{recipe}.yaml")
    model, _ = model_config(config.model.path)
    sizes = config.engine.sampler_sizes(config.rollout.max_context_tokens, num_hosts=1)
    memory = planned_memory(PlannedRl.of(config, model), topology(name).device)
    held = memory.engine | {part: memory.resident[part] for part in memory.resident if part == "frozen weights"}
    rollout = memory.phases["rollout"]
    planned = sum(held.values()) + sum(rollout.values())
    if "frozen weights" in held:  # of which the copy repeats the layers
        planned -= 2 * values_on(MeshConfig(), model, "text.layers.")
    arguments = name, "8b", tensor, *sizes.values(), stacking, "bfloat16", config.lora.rank
    program = compiled("compiled_sampler.py", *arguments)
    assert planned == pytest.approx(program["held_bytes"] + max(program["temp_bytes"]), rel=0.05)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_sampler_compiles_in_float32_for_the_chip_with_the_least_shared_memory():
    sizes = {"tensor": 1, "rows": 2, "context_tokens": 1024, "cache_tokens": 2048}
    assert compiled("compiled_sampler.py", "l4:1", "2b", *sizes.values(), "split", "float32")["temp_bytes"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_sampled_token_moves_little_more_than_the_weights_and_pages():
    """The 8B in bfloat16 on eight GPUs, with 64 requests of 2,560 tokens."""
    rows, context_tokens, devices = 64, 2560, 8
    model = PRESETS["8b"]
    program = compiled(
        "compiled_sampler.py", "h100:8", "8b", devices, rows, context_tokens, rows * context_tokens, "split"
    )
    pages = rows * context_tokens * cached_bytes(model, BF16_BYTES) / devices
    weights = decoded_bytes(model, BF16_BYTES) / devices
    assert 1.0 < (program["moved_bytes"] + pages) / (weights + pages) <= 1.3
