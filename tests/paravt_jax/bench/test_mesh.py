"""The mesh benchmark measures every shape, or estimates it for other devices."""

import argparse
import json
import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import forked
import pytest
from jax.errors import JaxRuntimeError

from model_port.tiny import make_tiny, tiny_config
from paravt_jax.bench import mesh, mesh_measured
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.bench.mesh_rows import MEASURED, benched_run
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.meshes import UNTIMED, estimate, mesh_shapes
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_time import Interval
from paravt_jax.plan.topology import check_compiler, topology
from paravt_jax.plan.workload import full_step
from paravt_jax.run.process import MEMORY_FRAC

CONFIGS = Path(__file__).parents[3] / "configs"
MESHES = ((1, 1, 1), (1, 8, 1), (2, 2, 2))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The command sets its own number of devices instead of the tests' eight.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return forked.run("paravt_jax.bench.__main__", "mesh", *arguments, deadline_s=280, XLA_FLAGS=" ".join(flags))


def test_shapes_are_all_ways_to_split_the_devices():
    shapes = list(mesh_shapes(12))
    assert len(shapes) == len(set(shapes)) == 18  # 12 = 2² · 3: C(4, 2) · C(3, 2) ordered triples
    assert {math.prod(shape) for shape in shapes} == {12}


@pytest.mark.nightly
def test_every_mesh_is_measured_and_compared_with_one_device(tmp_path):
    out = tmp_path / "mesh.json"
    run = bench("--devices", "2", "--row-tokens", "128", "--repeats", "1", "--price", "2", "--json", str(out))
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    rows = {tuple(row["mesh"]): row for row in result["rows"]}
    tokens = {(1, 1, 1): 128, (1, 2, 1): 256, (2, 1, 1): 256, (1, 1, 2): 128}
    assert {shape: row["tokens"] for shape, row in rows.items()} == tokens
    keys = {*estimated_rows("--mesh", "1,8,1")[1, 8, 1], *MEASURED}
    for row in rows.values():
        unknown = [name for name, value in row.items() if value is None]
        assert set(row) == keys and unknown == ["run_step_s", "problem", "run_price"]  # the config's mesh
    assert rows[1, 1, 1]["efficiency"] == 1 and list(rows)[-1] == (1, 1, 1)
    assert run.stdout.count("|\n") == len(rows) + 2 and run.stderr.count(" s measured\n") == 4
    lines = run.stderr.splitlines()
    assert "2 x 1 x 1: measuring" in lines and all(re.match(r"\d x ", line) for line in lines if "measured" in line)
    assert run.stdout.splitlines()[-1] == f"recommended: {' x '.join(map(str, result['rows'][0]['mesh']))}"


@pytest.mark.slow
def test_an_invalid_option_is_a_one_line_error():
    run = bench("--row-tokens", "10")
    assert (run.returncode, run.stdout) == (1, "") and run.stderr.startswith("error: --row-tokens 10 must be at least")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    mesh.add_arguments(parser)
    return parser.parse_args(arguments)


def result_of(*arguments: str) -> dict:
    return mesh.run(parse(*arguments))


@pytest.fixture
def own_environment(monkeypatch):
    """Restores the environment that a benchmark sets."""
    for name in ("XLA_FLAGS", MEMORY_FRAC, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.delenv(MEMORY_FRAC)


def estimated_rows(*arguments: str) -> dict[tuple[int, int, int], dict]:
    """Returns estimated rows by mesh, in their order."""
    return {tuple(row["mesh"]): row for row in result_of("--topology", "h100:8", "--plan-only", *arguments)["rows"]}


def test_every_part_of_a_mesh_has_the_frames_of_its_rows():
    batches = [PlannedRl.of(config_of(mesh, rows=2, row_tokens=1024), tiny_config()).largest_batch() for mesh in MESHES]
    assert {batch.num_frame_rows // batch.num_parts for batch in batches} == {2 * 4}


@pytest.mark.slow
def test_estimated_seconds_depend_on_row_length_and_dtype():
    def step_s(row_tokens: int, *arguments: str) -> float:
        options = ("--model", "2b", "--mesh", "1,8,1", "--row-tokens", str(row_tokens), *arguments)
        return estimated_rows(*options)[1, 8, 1]["est_step_s"]

    assert 2 * step_s(8192) < step_s(16384) and 2 * step_s(16384) < step_s(32768)  # float32, as by default
    assert step_s(8192, "--dtype", "bfloat16") < step_s(8192)


@pytest.mark.slow
def test_meshes_that_fit_come_first_and_the_fastest_is_recommended():
    options = ("--model", "8b", "--dtype", "bfloat16", "--row-tokens", "8192")
    rows = (result := result_of("--topology", "h100:16", "--plan-only", *options))["rows"]
    assert {tuple(row["mesh"]) for row in rows} == set(mesh_shapes(16))
    fitting = [row for row in rows if row["fits"]]
    assert rows[: len(fitting)] == fitting and len(fitting) > 3
    assert fitting == sorted(fitting, key=lambda row: -row["tokens_per_s"])
    lines = mesh.table(result).splitlines()
    assert lines[-1] == f"recommended: {' x '.join(map(str, fitting[0]['mesh']))}"
    assert lines[2].startswith("| data x fsdp x tensor | rows | GiB | update s |")  # nothing was compiled
    rejected = {line.partition(",")[0]: line for line in lines if line.startswith("rejected: ")}
    assert "GiB are always resident, of 71.2 usable" in rejected["rejected: 16 x 1 x 1"]
    assert "does not split over 2 hosts: each host has its own rows, and tensor=16" in rejected["rejected: 1 x 1 x 16"]


@pytest.mark.slow
def test_devices_too_small_for_any_mesh_have_reasons():
    result = result_of("--topology", "h100:1", "--plan-only", "--model", "8b")
    lines = mesh.table(result).splitlines()
    assert lines[2].startswith("rejected: 1 x 1 x 1, ") and not any(line.startswith(("|", "recomm")) for line in lines)
    shape = re.fullmatch(r"no mesh of 1 x .* fits; 1 x (\d+) x 1 with \1 rows would, or .*", result["problem"])
    assert shape, result["problem"]
    enough = f"h100:{shape[1]}", "--mesh", f"1,{shape[1]},1"
    assert result_of("--topology", *enough, "--plan-only", "--model", "8b")["problem"] is None


@pytest.mark.slow
def test_the_command_fails_with_advice_if_no_mesh_fits(tmp_path):
    config, out = CONFIGS / "paragrpo_8b.yaml", tmp_path / "mesh.json"
    run = bench("--topology", "h100:1", "--plan-only", "--config", str(config), "--json", str(out))
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and last.startswith("error: no mesh of 1 x "), run.stderr
    assert last.endswith("rows would, or see the changes that --plan of the run lists")
    assert f"error: {json.loads(out.read_text())['problem']}" == last and "rejected: 1 x 1 x 1" in run.stdout


@pytest.mark.nightly
def test_a_mesh_without_memory_is_rejected_and_the_others_are_measured(own_environment, monkeypatch):
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], memory_gib=0.02))  # too little for one device
    result = result_of("--devices", "2", "--row-tokens", "128", "--repeats", "1")
    rows = {tuple(row["mesh"]): row for row in result["rows"]}
    assert {shape for shape, row in rows.items() if row["fits"]} == {(1, 2, 1), (1, 1, 2)}
    assert all(row["efficiency"] is None and (row["update_s"] is not None) == row["fits"] for row in rows.values())
    lines = mesh.table(result).splitlines()
    assert "rejected: 2 x 1 x 1, 0.0 GiB of 0.0 usable" in lines
    assert lines[-1] in ("recommended: 1 x 2 x 1", "recommended: 1 x 1 x 2")
    assert os.environ[MEMORY_FRAC] == "0.90"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        ("smoke_cpu.yaml", "loss.kl_coef=0.1", "train.updates_per_step=2", "pack.row_tokens=1024"),
        ("sft_8b.yaml", "model.path=tiny", "model.dtype=float32", "mesh.tensor=1", "pack.row_tokens=512"),
        ("sft_8b.yaml", "model.path=qwen25", "model.dtype=float32", "mesh.tensor=1", "pack.row_tokens=512"),
    ],
    ids=["rl", "imitation", "qwen2_5_vl"],
)
def test_the_run_of_a_config_is_measured_on_the_requested_mesh(own_environment, settings, tmp_path, monkeypatch):
    file, *overrides = settings
    monkeypatch.chdir(tmp_path)
    make_tiny("qwen25", config=tiny_config("qwen2_5_vl"))
    small = ("video.max_pixels=1024", "video.overview_frames=2")
    arguments = ("--devices", "2", "--mesh", "1,2,1", "--repeats", "1", "--config", f"{CONFIGS}/{file}")
    result = result_of(*arguments, *overrides, *small)
    (row,) = result["rows"]
    assert row["mesh"] == (1, 2, 1) and row["fits"] and row["update_s"] > 0 and row["efficiency"] is None
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["update_s"])
    assert mesh.table(result).splitlines()[-1] == "recommended: 1 x 2 x 1"


def test_the_rates_of_a_tpu_are_those_of_its_measured_devices():
    v5e = DEVICES["v5e"]
    first, _ = mesh_measured._assumed(v5e, "bfloat16", v5e.rates("bfloat16"), 4)
    assert "collectives at 75 GB/s per device" in first  # two of four links


def test_only_an_out_of_memory_error_rejects_a_mesh():
    full = JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nat 3")
    assert mesh_measured.no_room(full).endswith("9 bytes")
    with pytest.raises(JaxRuntimeError, match="illegal address"):
        mesh_measured.no_room(JaxRuntimeError("INTERNAL: illegal address"))


@pytest.mark.slow
def test_a_device_without_a_data_sheet_has_no_estimated_seconds():
    run = PlannedRl.of(config_of((1, 1, 1), rows=1, row_tokens=128), tiny_config())
    row = estimate(run, full_step(run.largest_batch()), DEVICES["cpu"], None)
    assert row.fits and row.est_step_s is None and row.tokens_per_s is None
    assert {row.unknown[name] for name in UNTIMED} == {"cpu has no data sheet"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [f"{CONFIGS}/8b_8x80gb.yaml", "8b_8x80gb", "configs/8b_8x80gb.yaml"])
def test_a_mesh_excludes_the_gpus_of_servers(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # recipes are also found by name
    config = ("--config", config, "model.path=2b")
    result = result_of("--topology", "h100:8", "--plan-only", "--mesh", "1,4,1", *config)
    assert result["num_devices"] == 4 and mesh.table(result).splitlines()[-1] == "recommended: 1 x 4 x 1"
    assert "engine.gpus=[4, 5, 6, 7] are for servers; 4 devices remain for the learner" in result["assumed"]
    message = r"--mesh 1,8,1 must be .* a product of 4, the learner's devices, for example 1,4,1"
    with pytest.raises(ValueError, match=message):
        result_of("--topology", "h100:8", "--plan-only", "--mesh", "1,8,1", *config)


@pytest.mark.slow
def test_the_learner_is_on_every_host_beside_its_servers():
    """Eight devices of two hosts, four on each."""
    config = ("--config", f"{CONFIGS}/8b_8x80gb.yaml", "model.path=2b")
    result = result_of("--topology", "h100:16", "--plan-only", *config)
    rows = {tuple(row["mesh"]): row for row in result["rows"]}
    assert "does not split over 2 hosts" in rows[1, 1, 8]["problem"]
    on_one = result_of("--topology", "h100:8", "--plan-only", "--mesh", "1,4,1", *config)["rows"][0]
    assert rows[2, 4, 1]["run_step_s"] < on_one["run_step_s"]  # twice the servers, half the prompts on each host


def test_gpus_of_servers_are_hidden_before_measuring(own_environment, monkeypatch):
    run = benched_run(parse("--config", f"{CONFIGS}/8b_8x80gb.yaml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    (remark,) = mesh_measured._prepare(run, 2)
    assert remark.endswith("are for servers; 4 devices remain for the learner")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3" and os.environ[MEMORY_FRAC] == "0.90"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    all_gpus = benched_run(parse("--config", f"{CONFIGS}/8b_8x80gb.yaml", "engine.gpus=[0,1,2,3,4,5,6,7]"))
    with pytest.raises(ValueError, match="leaves no device for the learner"):
        mesh_measured._prepare(all_gpus, 2)


@pytest.mark.slow
def test_fewer_rows_are_not_a_faster_mesh():
    meshes = [estimated_rows("--model", "2b", "--mesh", mesh) for mesh in ("1,1,8", "1,8,1")]
    shared, split = meshes[0][1, 1, 8], meshes[1][1, 8, 1]
    assert shared["est_step_s"] < split["est_step_s"]  # an eighth of the rows
    assert shared["tokens_per_s"] < split["tokens_per_s"]


@pytest.mark.slow
def test_the_price_of_a_run_has_all_steps_on_learner_and_servers():
    arguments = ("--topology", "h100:8", "--plan-only", "--price", "2.5", "--mesh", "1,4,1")
    result = result_of(*arguments, "--config", f"{CONFIGS}/8b_8x80gb.yaml", "train.num_steps=100")
    (row,) = result["rows"]
    low, high = (2.5 * 8 / 3600 * 100 * seconds for seconds in row["run_step_s"])  # four of eight GPUs are servers'
    assert row["run_price"] == [pytest.approx(low), pytest.approx(high)]
    assert "price of 100 steps |\n|" in mesh.table(result) and f"| {Interval(low, high)} |" in mesh.table(result)


@pytest.mark.slow
def test_the_price_of_a_cold_start_has_all_updates():
    row = estimated_rows("--price", "2.5", "--mesh", "1,8,1", "--config", f"{CONFIGS}/sft_8b.yaml")[1, 8, 1]
    assert row["run_price"] == 2 * [pytest.approx(2.5 * 8 / 3600 * 500 * row["est_step_s"])]


@pytest.mark.slow
def test_meshes_with_indistinguishable_step_times_are_listed():
    arguments = ("--topology", "h100:8", "--plan-only", "--config", f"{CONFIGS}/8b_8x80gb_embedded.yaml")
    result = result_of(*arguments)
    fitting = [row for row in result["rows"] if row["fits"]]
    middle = [Interval(*row["run_step_s"]).middle for row in fitting]
    similar = [row for row, seconds in zip(fitting, middle, strict=True) if seconds <= 1.01 * middle[0]]
    assert middle == sorted(middle) and 1 < len(similar) < len(fitting)
    names = ", ".join(" x ".join(map(str, row["mesh"])) for row in similar[1:])
    assert f"within 1% of the fastest step: {names}" == mesh.table(result).splitlines()[-2]


@pytest.mark.slow
def test_the_price_of_a_million_tokens_follows_from_the_rate():
    row = estimated_rows("--model", "2b", "--mesh", "1,8,1", "--price", "2.5")[1, 8, 1]
    assert row["price_per_mtokens"] == pytest.approx(8 * 2.5 * 1e6 / row["tokens_per_s"] / 3600)


@pytest.mark.slow
def test_a_config_is_the_run_that_will_start_with_rows_for_every_part():
    config = ("--config", f"{CONFIGS}/paragrpo_8b.yaml", "model.path=2b")
    rows = estimated_rows(*config, "mesh.fsdp=2", "mesh.tensor=4", "pack.num_rows=2")
    assert {shape: row["num_rows"] for shape, row in rows.items() if row["num_rows"]}[1, 8, 1] == 8
    assert rows[1, 2, 4]["num_rows"] == 2
    without = estimated_rows(*config, "loss.kl_coef=0")[1, 8, 1]
    assert without["hbm_gib"] < rows[1, 8, 1]["hbm_gib"] and without["est_step_s"] < rows[1, 8, 1]["est_step_s"]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "is_named"), [("paragrpo_8b", True), ("8b_8x80gb", False)])
def test_servers_that_have_no_price_are_named(recipe, is_named):
    config = ("--config", f"{CONFIGS}/{recipe}.yaml", "model.path=2b", "--price", "2.5", "--mesh", "1,4,1")
    assumed = result_of("--topology", "h100:4" if is_named else "h100:8", "--plan-only", *config)["assumed"]
    assert any("servers of engine.urls use other devices" in line for line in assumed) is is_named


def test_meshes_of_an_sft_config_are_estimated():
    row = estimated_rows("--config", f"{CONFIGS}/sft_8b.yaml", "model.path=2b", "--mesh", "1,8,1")[1, 8, 1]
    assert row["fits"] and row["est_step_s"] > 0 and row["unknown"]["collective_bytes"] == "nothing is compiled"
    assert row["compiled_flops"] is None and row["unknown"]["compiled_flops"] == "nothing is compiled"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--plan-only", "--plan-only needs --topology"),
        ("--calibrate runs/x", "--calibrate needs --config FILE"),
        ("--config configs/8b_2nodes.yaml hosts.coordinator=auto", "hosts.coordinator=auto needs several hosts"),
        ("--topology h100:4 --config configs/8b_8x80gb.yaml", "a host of --topology h100:4 has no GPU 4; it has"),
        ("--topology v5p:2x2x2 --config configs/8b_8x80gb.yaml", "v5p:2x2x2 has no GPU 4; it has 0, counted from 0"),
        ("--topology v4:8 --plan-only", "--topology v4:8 is unknown; choose from h100:8"),
        ("--topology h100:8 --devices 2", "--devices has no effect with --topology"),
        ("--topology h100:8 --plan-only --mesh 8,1", "--mesh 8,1 must be data,fsdp,tensor with a product of 8"),
        ("--topology h100:8 --config configs/sft_8b.yaml --rows 2", "--rows has no effect with --config"),
        ("--topology h100:8 a.b=c", "a.b=c needs --config FILE"),
        ("--topology h100:8 --price 0", "--price 0.0 must be above 0"),
    ],
)
def test_an_invalid_option_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        result_of(*arguments.split())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("h100:8", "1,4,2"), ("v5p:2x2x2", "1,4,2"), ("v6e:4x4", "1,8,2")])
def test_an_update_is_compiled_for_other_devices(name, shape, tmp_path):
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
    assert "Error" not in run.stderr
    assert run.stdout.splitlines()[-1] == f"recommended: {shape.replace(',', ' x ')}"
