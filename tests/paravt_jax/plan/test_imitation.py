"""The plan of a cold start."""

import re
from dataclasses import replace

import pytest

from model_port.config import preset
from paravt_jax import sft
from paravt_jax.config import SftConfig, load_config
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.imitation import make_imitation_plan
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.run import PlannedSft

H100 = DEVICES["h100"]


def plan_text(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["sft", "--plan", "--config", "configs/sft_8b.yaml", *arguments])
    sft.main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_larger_batch_needs_more_memory_and_a_larger_step_does_not():
    run = PlannedSft.of(load_config("configs/sft_8b.yaml", "model.remat=full", schema=SftConfig), preset("8b"))
    plan = make_imitation_plan(run, H100)
    peaks = [planned_memory(run.resized(num_rows=num_rows), H100).peak_bytes for num_rows in (8, 16, 32)]
    assert plan.memory.peak_bytes == peaks[0] < peaks[1] < peaks[2]
    assert make_imitation_plan(replace(run, rows_per_step=64), H100).memory == plan.memory


def test_the_plan_has_seconds_by_number_of_rows(capsys, monkeypatch):
    out = plan_text(capsys, monkeypatch)
    assert max(map(len, out.splitlines())) <= 100
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "262,144" in line or "524,288" in line}
    assert rows["32"][-1] == "sft.rows_per_step"
    assert float(rows["64"][4]) == pytest.approx(2 * float(rows["32"][4]), abs=0.1)
    assert "8 x 8,192 tokens fits" in out and "largest pack.row_tokens with pack.num_rows=8: " in out
    assert "decoding is not included: the up to 2,048 frames of a step" in out  # 32 rows of a trace with 64 frames


def test_a_device_without_a_data_sheet_has_no_seconds(capsys, monkeypatch):
    settings = ("model.path=tiny", "data.train=traces.jsonl", "model.dtype=float32")
    out = plan_text(capsys, monkeypatch, "--device", "cpu", *settings)
    assert "not estimated" in out and "not checked: the memory of cpu is unknown" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "changed_keys"),
    [
        (("pack.num_rows=32", "pack.row_tokens=32768"), {"pack.num_rows", "pack.row_tokens", "mesh.fsdp"}),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                (("model.path=32b", "sft.rows_per_step=8"), {"optim.offload", "mesh.fsdp"}),
                (("model.path=4b", "mesh.fsdp=1", "pack.num_rows=1"), {"optim.offload", "mesh.fsdp"}),
                (("mesh.fsdp=32", "pack.num_rows=32", "pack.row_tokens=262144"), {"pack.row_tokens", "mesh.fsdp"}),
            )
        ),
    ],
)
def test_a_cold_start_that_does_not_fit_gets_advice_that_does(capsys, monkeypatch, settings, changed_keys):
    out = plan_text(capsys, monkeypatch, *settings)
    advice = re.findall(r"^  would fit: ([^,;\n]+)", out, re.MULTILINE)
    assert "DOES NOT FIT" in out and {change.partition("=")[0] for change in advice} == changed_keys
    for change in advice:
        assert " DOES NOT FIT" not in plan_text(capsys, monkeypatch, *settings, *change.split())
