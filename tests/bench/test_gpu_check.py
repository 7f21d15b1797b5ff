"""The GPU check without a GPU: failures of parts, the page, and the FLOP counts."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model_port.config import preset
from paravt_jax.plan.devices import peak_flops
from scripts.bench import gpu_check, gpu_parts
from scripts.bench.gpu_parts import PARTS, at_depth, attention_time, model_flops
from scripts.bench.gpu_sizes import Check, failure

ROOT = Path(__file__).parents[2]


def result_of(**parts: dict) -> dict:
    return {"tiny": False, "date": "2026-11-22", "parts": parts, "violations": gpu_check.problems_of(parts)}


def test_the_page_has_every_part_and_lists_the_failed_ones():
    branches = {"rows": [{"way": "branches", "update_s": 0.5}], "problem": None}
    page = gpu_check.table(
        result_of(
            attention={"rows": [{"form": "scanned", "fp32_error": 2e-5, "problem": "beyond 1e-05"}], "problem": None},
            branches=branches,
            torch={"rows": [{"way": "torch", "note": "not compared: No module named 'torch'"}], "problem": None},
            rows={"rows": [{"way": "rows", "update_s": 1.25}], "problem": "timed out after 50 s"},
        )
    )
    assert "Problems: 2\n\n- attention: beyond 1e-05\n- rows: timed out after 50 s\n" in page
    assert "0.5 s; rows takes 2.50 x as long.\n" in page and "No module named 'torch'" in page
    assert "| form | fp32_error | problem |\n| --- | --- | --- |\n| scanned | 2e-05 | beyond 1e-05 |\n" in page
    assert all(f"## {gpu_check.TITLES[name]}\n" in page for name in ("attention", "branches", "torch", "rows"))
    assert "Problems" not in gpu_check.table(result_of(branches=branches))


def test_without_a_gpu_only_the_tiny_check_runs():
    gpu_check._check_gpu({"rows": [{"device": "NVIDIA H200", "platform": "gpu"}], "problem": None})
    with pytest.raises(RuntimeError, match=r"^no GPU found, jax has cpu; --tiny tests"):
        gpu_check._check_gpu({"rows": [{"device": "cpu", "platform": "cpu"}], "problem": None})
    with pytest.raises(RuntimeError, match="jax has ended with exit code 1: no plugin; "):
        gpu_check._check_gpu({"rows": [], "problem": "ended with exit code 1: no plugin"})


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--wrong"], 2), ([], 1)])
def test_a_rejected_command_keeps_the_measured_page(tmp_path, arguments, code):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    page = tmp_path / "docs" / "benchmarks" / "gpu_check.md"
    page.write_text("measured")
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["bash", script, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert list(page.parent.iterdir()) == [page] and page.read_text() == "measured"


@pytest.mark.parametrize(
    ("loss", "grad_norm", "name"),
    [(0.35, 1.0, "loss/total"), (0.25, math.nan, "optim/grad_norm"), (0.25, math.inf, "optim/grad_norm")],
)
def test_ways_with_different_or_infinite_results_are_a_violation(loss, grad_norm, name):
    ways = [{"way": "branches", "loss": 0.25, "grad_norm": 1.0}, {"way": "torch", "note": "no torch"}]
    assert gpu_check._disagreement(ways) == []
    (problem,) = gpu_check._disagreement([*ways, {"way": "rows", "loss": loss, "grad_norm": grad_norm}])
    assert f"the ways disagree on {name}" in problem


def test_a_form_with_nan_gradients_is_a_problem(monkeypatch, tmp_path):
    with_gradients = gpu_parts.with_gradients

    def with_nan(form):
        call = with_gradients(form)
        if form != "blocked":
            return call
        return lambda *inputs: (out := call(*inputs)) and (*out[:2], out[2] * math.nan, *out[3:])

    monkeypatch.setattr(gpu_parts, "forms", lambda: ["blocked"])
    monkeypatch.setattr(gpu_parts, "with_gradients", with_nan)
    (row,) = gpu_parts.attention(Check(tiny=True, folder=tmp_path))
    assert math.isnan(row["fp32_error"]) and "above 1e-05" in row["problem"]


def test_only_an_optional_size_without_memory_is_a_note():
    no_room = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert list(failure(no_room, may_lack_room=True)) == ["note"] and list(failure(no_room)) == ["problem"]
    assert failure(NotImplementedError("no such product")) == {"problem": "NotImplementedError: no such product"}
    assert list(failure(ValueError("illegal block"), may_lack_room=True)) == ["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "key"), [("cpu", "note"), ("gpu", "problem")])
def test_a_kernel_that_fails_on_a_gpu_is_a_problem(monkeypatch, tmp_path, platform, key):
    for module in ("model_port.sharding", "model_port.attention.choice"):
        monkeypatch.setattr(f"{module}.platform", lambda: platform)
    rows = [*attention_time(Check(tiny=True, folder=tmp_path))]
    (kernel,) = (row for row in rows if row["form"] == "kernel")
    assert key in kernel and "forward_backward_ms" not in kernel  # Pallas has no GPU here
    problems = gpu_check.problems_of({"attention_time": {"rows": rows, "problem": None}})
    assert len(problems) == (key == "problem")


def test_all_parts_have_a_title_and_end_within_ten_minutes():
    assert list(PARTS) == list(gpu_check.DEADLINES_S) == list(gpu_check.TITLES)
    assert sum(gpu_check.DEADLINES_S.values()) < 600


def test_flops_are_six_per_parameter_and_causal_attention():
    """Layers of the 8B: 36 · (2 · 40 · 128 · 4096 + 3 · 4096 · 12288) = 6.946e9; its head: 151936 · 4096."""
    layers, head, pairs = 6_945_767_424, 622_329_856, 8192**2 // 2
    assert model_flops(preset("8b"), 8192, 1024) == 6 * (layers * 8192 + head * 1024) + 12 * 36 * 4096 * pairs


def test_a_model_has_as_many_layers_as_fit_in_memory():
    depths = {gib: at_depth(preset("8b"), gib * 2.0**30).text.num_layers for gib in (71, 125, 400)}
    assert depths == {71: 6, 125: 18, 400: 36}
    with pytest.raises(RuntimeError, match="10 GiB are too little to train even 3 layers"):
        at_depth(preset("8b"), 10 * 2.0**30)


def test_the_peak_of_an_unlisted_device_is_none():
    assert (peak_flops("NVIDIA H200"), peak_flops("NVIDIA A100-SXM4-80GB")) == (989e12, 312e12)
    unlisted = ("NVIDIA GeForce RTX 4090", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert {peak_flops(kind) for kind in unlisted} == {None}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_whole_check_runs_on_tiny_models_without_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "scripts.bench", "gpu_check", "--tiny", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(PARTS) and all(each["rows"] for each in parts.values())
    assert {row["form"] for row in parts["attention"]["rows"]} >= {"xla", "blocked", "scanned"}
    assert [row["tokens"] for row in parts["update"]["rows"]] == [64, 128]
    assert "rows takes" in run.stdout and "torch takes" in run.stdout
