"""The bench of meshes measures every shape beside one device, and estimates where nothing can run."""

import argparse
import json
import math
import os
import subprocess
import sys

import pytest

from paravt_jax.bench import mesh


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paravt_jax.bench", "mesh", *arguments]
    # Not the eight devices of the tests: the command makes its own.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def test_shapes_are_all_ways_to_split_the_devices():
    shapes = list(mesh.mesh_shapes(12))
    assert len(shapes) == len(set(shapes)) == 18  # 12 = 2² · 3: C(4, 2) · C(3, 2) ordered triples
    assert {math.prod(shape) for shape in shapes} == {12}


@pytest.mark.slow
def test_every_mesh_is_measured_beside_one_device(tmp_path):
    out = tmp_path / "mesh.json"
    run = bench("--devices", "2", "--row-tokens", "128", "--repeats", "1", "--json", str(out))
    assert run.returncode == 0, run.stderr
    rows = json.loads(out.read_text())["rows_measured"]
    assert [row["mesh"] for row in rows] == [[1, 1, 1], [1, 2, 1], [2, 1, 1], [1, 1, 2]]
    assert [row["tokens"] for row in rows] == [128, 256, 256, 128]
    assert rows[0]["efficiency"] == 1 and all(row["update_s"] > 0 for row in rows)
    assert all(row["compiled_bytes"] > 0 and row["planned_bytes"] > 0 for row in rows)
    assert run.stdout.count("|\n") == len(rows) + 2 and run.stderr.count("| 1 x ") == 3


@pytest.mark.slow
def test_a_large_model_is_estimated_on_every_mesh(tmp_path):
    out = tmp_path / "mesh.json"
    options = ("--plan-only", "--model", "8b", "--devices", "16", "--dtype", "bfloat16", "--row-tokens", "8192")
    run = bench(*options, "--json", str(out))
    assert run.returncode == 0, run.stderr
    rows = {tuple(row["mesh"]): row for row in json.loads(out.read_text())["rows_planned"]}
    assert set(rows) == set(mesh.mesh_shapes(16))
    assert rows[1, 16, 1]["fits"] and not rows[16, 1, 1]["fits"]
    assert "does not divide" in rows[1, 1, 16]["problem"]
    assert "| 1 x 16 x 1 |" in run.stdout


def test_a_bad_option_is_one_line_and_a_failure():
    run = bench("--row-tokens", "10")
    assert (run.returncode, run.stdout) == (1, "") and run.stderr.startswith("error: --row-tokens 10 must be at least")


def test_an_unknown_accelerator_is_named():
    parser = argparse.ArgumentParser()
    mesh.add_arguments(parser)
    with pytest.raises(ValueError, match="--device v4 is not known; known are h100"):
        mesh.run(parser.parse_args(["--plan-only", "--device", "v4"]))
