"""The bench of meshes measures every shape beside one device, and estimates where nothing can run."""

import argparse
import json
import math
import os
import re
import subprocess
from pathlib import Path

import forked
import pytest

from paravt_jax.bench import mesh
from paravt_jax.plan.meshes import mesh_shapes
from paravt_jax.plan.topology import check_compiler, topology

CONFIGS = Path(__file__).parents[3] / "configs"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Not the eight devices of the tests: the command makes its own.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return forked.run("paravt_jax.bench.__main__", "mesh", *arguments, deadline_s=280, XLA_FLAGS=" ".join(flags))


def test_shapes_are_all_ways_to_split_the_devices():
    shapes = list(mesh_shapes(12))
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
def test_a_bad_option_is_one_line_and_a_failure():
    run = bench("--row-tokens", "10")
    assert (run.returncode, run.stdout) == (1, "") and run.stderr.startswith("error: --row-tokens 10 must be at least")


def found(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    mesh.add_arguments(parser)
    return mesh.run(parser.parse_args(arguments))


def planned(*arguments: str) -> dict[tuple[int, int, int], dict]:
    """Rows by mesh, in their order."""
    return {tuple(row["mesh"]): row for row in found("--topology", "h100:8", "--plan-only", *arguments)["rows"]}


@pytest.mark.slow
def test_rows_of_any_length_have_seconds_of_their_own_in_any_dtype():
    def step_s(row_tokens: int, *arguments: str) -> float:
        options = ("--model", "2b", "--mesh", "1,8,1", "--row-tokens", str(row_tokens), *arguments)
        return planned(*options)[1, 8, 1]["est_step_s"]

    assert 2 * step_s(8192) < step_s(16384) and 2 * step_s(16384) < step_s(32768)  # float32, as by default
    assert step_s(8192, "--dtype", "bfloat16") < step_s(8192)


def test_meshes_that_fit_come_first_and_the_fastest_of_them_is_taken():
    result = found(
        "--topology", "h100:16", "--plan-only", "--model", "8b", "--dtype", "bfloat16", "--row-tokens", "8192"
    )
    rows = result["rows"]
    assert {tuple(row["mesh"]) for row in rows} == set(mesh_shapes(16))
    fitting = [row for row in rows if row["fits"]]
    assert rows[: len(fitting)] == fitting and len(fitting) > 3
    assert fitting == sorted(fitting, key=lambda row: -row["tokens_per_s"])
    lines = mesh.table(result).splitlines()
    assert lines[-1] == f"take {' x '.join(map(str, fitting[0]['mesh']))}"
    refused = {line.partition(",")[0]: line for line in lines if line.startswith("refused: ")}
    assert "GiB lie there always, of 71.2 usable" in refused["refused: 16 x 1 x 1"]
    assert "mesh.tensor=16 does not divide the model's num_kv_heads=8" in refused["refused: 1 x 1 x 16"]


@pytest.mark.slow
def test_fewer_rows_are_not_a_faster_mesh():
    shared, split = (next(iter(planned("--model", "2b", "--mesh", mesh).values())) for mesh in ("1,1,8", "1,8,1"))
    assert shared["est_step_s"] < split["est_step_s"]  # an eighth of the rows
    assert shared["tokens_per_s"] < split["tokens_per_s"]


def test_a_million_tokens_cost_what_the_devices_cost_meanwhile():
    row = planned("--model", "2b", "--mesh", "1,8,1", "--price", "2.5")[1, 8, 1]
    assert row["price_per_mtokens"] == pytest.approx(8 * 2.5 * 1e6 / row["tokens_per_s"] / 3600)


@pytest.mark.slow
def test_a_config_is_the_run_that_will_start_with_rows_for_every_part():
    config = ("--config", f"{CONFIGS}/paragrpo_8b.yaml", "model.path=2b", "pack.num_rows=2")
    rows = planned(*config)
    assert {shape: row["num_rows"] for shape, row in rows.items() if row["num_rows"]}[1, 8, 1] == 8
    assert rows[1, 2, 4]["num_rows"] == 2
    without = planned(*config, "loss.kl_coef=0")[1, 8, 1]
    assert without["hbm_gib"] < rows[1, 8, 1]["hbm_gib"] and without["est_step_s"] < rows[1, 8, 1]["est_step_s"]


def test_imitation_has_meshes_too():
    row = planned("--config", f"{CONFIGS}/sft_8b.yaml", "model.path=2b", "--mesh", "1,8,1")[1, 8, 1]
    assert row["fits"] and row["est_step_s"] > 0 and row["unknown"]["collective_bytes"] == "nothing is compiled"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--plan-only", "--plan-only needs --topology"),
        ("--config configs/sft_8b.yaml", "--config needs --topology"),
        ("--topology v4:8 --plan-only", "--topology v4:8 is not known; there are h100:8"),
        ("--topology h100:8 --devices 2", "--devices does nothing with --topology"),
        ("--topology h100:8 --plan-only --mesh 8,1", "--mesh 8,1 is not data,fsdp,tensor of 8 devices, as 1,8,1"),
        ("--topology h100:8 --config configs/sft_8b.yaml --rows 2", "--rows does nothing with --config"),
        ("--topology h100:8 a.b=c", "a.b=c changes a setting of --config FILE, and there is none"),
        ("--topology h100:8 --price 0", "--price 0.0 must be above 0"),
    ],
)
def test_what_cannot_be_asked_is_named(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        found(*arguments.split())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("h100:8", "1,4,2"), ("v5p:2x2x2", "1,4,2"), ("v6e:4x4", "1,8,2")])
def test_an_update_is_compiled_for_devices_that_are_not_here(name, shape, tmp_path):
    try:
        check_compiler(topology(name).device.platform)
    except ValueError as missing:
        pytest.skip(str(missing))
    out = tmp_path / "mesh.json"
    run = bench("--topology", name, "--mesh", shape, "--row-tokens", "128", "--json", str(out))
    assert run.returncode == 0, run.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["fits"] and row["compile_s"] > 0 and 0 < row["hbm_gib"] < 1
    assert row["compiled_flops"] > row["model_flops"] > 0
    assert row["collective_bytes"] or "collective_bytes" in row["unknown"]
    assert run.stdout.splitlines()[-1] == f"take {shape.replace(',', ' x ')}"
