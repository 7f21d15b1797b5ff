"""What a plan says of a cold start."""

import re
from dataclasses import replace

import pytest

from model_port.config import preset
from paravt_jax import sft
from paravt_jax.config import SftConfig, load_config
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.imitation import make_imitation_plan

H100 = DEVICES["h100"]


def said(capsys, command, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    command.main()
    return capsys.readouterr().out


def test_a_larger_batch_needs_more_and_a_larger_step_does_not():
    config = load_config("configs/sft_8b.yaml", schema=SftConfig)
    plan = make_imitation_plan(config, preset("8b"), H100)
    peaks = dict(plan.peaks)
    assert list(peaks) == [8, 16, 32] and sorted(peaks.values()) == list(peaks.values())
    assert peaks[8] == plan.memory.peak_bytes
    rows = replace(config, sft=replace(config.sft, rows_per_step=64))
    assert make_imitation_plan(rows, preset("8b"), H100).memory == plan.memory


def test_a_plan_of_imitation_has_seconds_by_rows(capsys, monkeypatch):
    out = said(capsys, sft, monkeypatch, "--plan", "--config", "configs/sft_8b.yaml")
    assert max(map(len, out.splitlines())) <= 100
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "262,144" in line or "524,288" in line}
    assert rows["32"][-1] == "sft.rows_per_step"
    assert float(rows["64"][4]) == pytest.approx(2 * float(rows["32"][4]), abs=0.1)
    assert "8 x 8,192 tokens fits" in out and "largest pack.row_tokens with pack.num_rows=8: " in out
    assert "decoding is not in the seconds: up to 2,048 frames of a step" in out  # 32 rows of a trace of 64


def test_a_plan_of_imitation_without_a_peak_has_no_seconds(capsys, monkeypatch):
    settings = ("model.path=tiny", "data.train=traces.jsonl", "model.dtype=float32")
    out = said(capsys, sft, monkeypatch, "--plan", "--device", "cpu", "--config", "configs/sft_8b.yaml", *settings)
    assert "not estimated" in out and "not checked: the memory of cpu is unknown" in out


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        (("model.path=32b", "sft.rows_per_step=8"), {"optim.offload", "mesh.fsdp"}),
        (("model.path=4b", "mesh.fsdp=1", "pack.num_rows=1"), {"optim.offload", "mesh.fsdp"}),
        (("pack.num_rows=32", "pack.row_tokens=32768"), {"pack.num_rows", "pack.row_tokens", "mesh.fsdp"}),
        (("mesh.fsdp=32", "pack.num_rows=32", "pack.row_tokens=262144"), {"pack.row_tokens", "mesh.fsdp"}),
    ],
)
def test_imitation_that_does_not_fit_is_told_what_does(capsys, monkeypatch, settings, ways):
    command = ("--plan", "--config", "configs/sft_8b.yaml", *settings)
    out = said(capsys, sft, monkeypatch, *command)
    advice = [line.removeprefix("  enough: ") for line in out.splitlines() if line.startswith("  enough: ")]
    assert "DOES NOT FIT" in out and {one.partition("=")[0] for one in advice} == ways
    for one in advice:
        changed = re.split("[,;]", one)[0].split()
        assert " DOES NOT FIT" not in said(capsys, sft, monkeypatch, *command, *changed)
