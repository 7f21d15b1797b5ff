"""The attention kernels, compiled for chips that this machine lacks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled_kernel.py")
TOKENS = 2048
KERNELS = 3  # forward, gradient of the queries, gradients of keys and values


def compiled(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=280, env=environment
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


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
    program = compiled(name, heads, kv_heads, head_dim, kind, TOKENS)
    if "missing" in program:
        pytest.skip(program["missing"])
    call = "tpu_custom_call" if name.startswith("v") else "triton"
    assert len(re.findall(rf"custom_call @[\w$.]*{call}", program["text"])) == KERNELS
    float32_scores_bytes = 4 * heads // 2 * TOKENS**2
    assert program["temp_bytes"] < float32_scores_bytes
