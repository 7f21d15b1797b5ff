"""The hosts benchmark compares the metrics of runs, and times publishing and a copy."""

import asyncio
import json
import math
from argparse import Namespace
from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx

import model_port
from model_port.layout import CHECKPOINTS_DIR, HF_DIR
from model_port.tiny import tiny_config
from paravt_jax.learner.learner import LANGUAGE
from paravt_jax.run.checkpoint_files import verify
from paravt_jax.run.hosts import ALONE
from scripts.bench import hosts, shared_checkpoint
from scripts.bench.publishing import By, copied_s, publish_times, receivers


def test_the_largest_difference_is_relative_over_shared_metrics():
    steps = [{"step": 1, "loss/policy": 2.0, "loss/kl": 1e-7, "time/step_s": 3.0}, {"step": 2, "loss/policy": 4.0}]
    others = [{"step": 1, "loss/policy": 2.0, "loss/kl": 2e-7, "time/step_s": 9.0}, {"step": 2, "loss/policy": 3.0}]
    assert hosts.largest_difference(steps, steps) == (0.0, "none")
    assert hosts.largest_difference(steps[:1], others[:1]) == (pytest.approx(1e-4), "loss/kl")
    assert hosts.largest_difference(steps, others) == (0.25, "loss/policy")
    del others[1]["loss/policy"]
    assert hosts.largest_difference(steps, others) == (math.inf, "loss/policy")
    others[1]["loss/policy"] = math.nan
    assert hosts.largest_difference(steps, others) == (math.inf, "loss/policy")


def test_the_times_of_a_run_are_medians_without_compilation(tmp_path):
    seconds = [90.0, 80.0, 1.0, 2.0, 4.0]
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        rows = [{"step": n, **{f"time/{time}": s for time in hosts.TIMES}} for n, s in enumerate(seconds, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    row = hosts.measured_in(tmp_path / "run", tmp_path / "other")
    assert row == {**dict.fromkeys(hosts.TIMES, 2.0), "differ_by": 0.0, "differ_in": "none"}
    runs = [{"processes": 2, "peaks_mib": [512.0, 640.0], **row}]
    publish = {"weights": "adapter", "servers": 4, "by": "network", "mib": 320, "sent_mib": 256.2}
    publishes = [publish | {"publish_s": 3.0, "paused_s": 1.0, "copy_s": 2.0}]
    saved = {"share_mib": 512.0, "saving_mib": 600.4, "restoring_mib": 700.6, "save_s": 8.12, "restore_s": 2.7}
    checkpoints = [{"processes": 2, **saved}]
    lines = hosts.table({"runs": runs, "checkpoints": checkpoints, "publishes": publishes}).splitlines()
    assert lines[2] == "| 2 | 2.00 | 2.00 | 2.00 | 2.00 | 640 | 0.0e+00, none |"
    assert "| 2 | 512 | 600 | 701 | 8.1, 2.7 |" in lines
    assert lines[-1] == "| adapter | 4 | network | 320 | 256 | 3.00 | 1.00 | 2.00 | 1.50 |"


@pytest.mark.slow
@pytest.mark.parametrize("by", get_args(By))
def test_receivers_read_published_weights(tiny_hf, by):
    row = published(versions := hosts.two_versions("all", model_port.load(tiny_hf)), by)
    assert row["publish_s"] > row["paused_s"] > 0 and row["copy_s"] > 0
    trained = sum(tensor.nbytes for name, tensor in versions[0].tensors() if "visual" not in name)
    assert row["sent_mib"] == pytest.approx(trained / 2**20, rel=0.01)  # with the headers of the files


@pytest.mark.slow
def test_receivers_read_an_adapter_alone_or_merged(tiny_hf):
    model = model_port.load(tiny_hf)
    alone, merged = (hosts.two_versions(weights, model) for weights in ("adapter", "merged"))
    assert alone[0].num_bytes / 2**20 == pytest.approx(published(alone, "network")["sent_mib"], abs=0.03)  # headers
    kernels = sum(tensor.nbytes for name, tensor in merged[0].tensors() if name.endswith("_proj.weight"))
    assert published(merged, "network")["sent_mib"] == pytest.approx(kernels / 2**20, rel=0.02)


def published(versions, by) -> dict[str, float]:
    async def work():
        async with receivers(2, 2 * versions[0].num_bytes) as urls:
            return await publish_times(urls, versions, 1, by)

    return asyncio.run(work())


@pytest.mark.slow
def test_a_process_saves_and_restores_its_share(tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_checkpoint, "sized_model", lambda num_weights: tiny_config())
    (tmp_path / HF_DIR).symlink_to(tiny_hf)
    row = shared_checkpoint.saved_and_restored(tmp_path, 1, 2, ALONE)
    _, *parts = nnx.split(model_port.load(tiny_hf, "float32"), LANGUAGE, ...)
    text, vision = (sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in parts)
    assert row["share_mib"] == pytest.approx((3 * text + vision) / 2**20, rel=0.01)  # with moments of trained weights
    assert list(verify(tmp_path / CHECKPOINTS_DIR)) == [(tmp_path / CHECKPOINTS_DIR / "0", "")]
    assert row["save_s"] > 0 and row["restore_s"] > 0


def test_every_target_of_a_copy_is_complete():
    source = np.random.default_rng(0).integers(0, 256, 5_000_011, np.uint8)
    targets = [np.zeros_like(source) for _ in range(3)]
    assert copied_s(source, targets) > 0
    assert all(np.array_equal(source, target) for target in targets)


def test_an_invalid_number_is_rejected_before_starting():
    with pytest.raises(ValueError, match=r"^--processes \[1, 0\] must be at least 1$"):
        hosts.run(Namespace(engine="jax", processes=[1, 0], steps=1, servers=[1], mib=1, repeats=1))
