"""Recipes for machines: they differ from the published recipe in the machine only, and fit by plan and compiler."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, starmap
from pathlib import Path

import jax
import pytest

from model_port.json_files import flattened
from paravt_jax.config import Config, MeshConfig, SftConfig, load_config, to_record
from paravt_jax.plan.devices import DEVICES, GIB, DeviceSpec
from paravt_jax.plan.meshes import mesh_shapes
from paravt_jax.plan.plan import Plan, make_plan, model_config, update_seconds
from paravt_jax.plan.remat import planned_memory, with_remat
from paravt_jax.plan.run import PlannedRl, PlannedSft, planned_run
from paravt_jax.plan.step_time import StepTime, step_time
from paravt_jax.plan.tables import render
from paravt_jax.plan.topology import check_compiler, topology

CONFIGS = Path(__file__).parents[3] / "configs"
LEARNERS = {  # the devices of each recipe
    "8b_8x80gb": "h100:8",
    "8b_8x80gb_embedded": "h100:8",
    "8b_2nodes": "h100:8",
    "8b_v5p8": "v5p:2x2x1",
    "8b_v6e16": "v6e:4x4",
    "8b_4x80gb": "h100:4",
    "32b_64": "h100:64",
    "30ba3b_64": "h100:64",
    "30ba3b_8x80gb_lora": "h100:8",
    "4b_1x80gb": "h100:1",
    "8b_lora_1x80gb": "h100:1",
    "2b_lora_24gb": "l4:1",
}
STARTS = {  # the devices of each cold start
    "sft_8b": "h100:8",
    "sft_32b_64": "h100:64",
    "sft_4b_1x80gb": "h100:1",
    "sft_8b_lora_1x80gb": "h100:1",
    "sft_2b_lora_24gb": "l4:1",
}
CONTRAST = {  # the devices of each recipe of Qwen2.5-VL, and the recipe of Qwen3-VL that has its settings
    "contrast/qwen25vl_7b_grpo": ("h100:8", "grpo_8b"),
    "contrast/qwen25vl_7b_paragrpo": ("h100:8", "paragrpo_8b"),
    "contrast/qwen25vl_3b_lora_paragrpo": ("h100:1", "8b_lora_1x80gb"),
    "contrast/qwen25vl_7b_sft": ("h100:8", "sft_8b"),
    "contrast/qwen25vl_3b_lora_sft": ("h100:1", "sft_8b_lora_1x80gb"),
}
DEVICES_OF = LEARNERS | STARTS | {name: devices for name, (devices, _) in CONTRAST.items()}
MACHINES = CONFIGS.parent / "docs" / "machines.md"
ESTIMATES = re.compile(
    r"--plan(?: --device \w+)? estimates (?:(\S+) s per update, )?(\S+(?: to \S+)?) s per step,? and (\S+) of (\S+) GiB"
)
RECIPE_ROW = re.compile(
    r"`configs/(\w+)\.yaml` \| (\S+) of (\S+) \| (\S+) \| (\S+ to \S+) \| ([^|]+) \|$", re.MULTILINE
)
START_ROW = re.compile(r"`configs/(sft_\w+)\.yaml ?([^`]*)` \| (\S+) of (\S+) \| (\S+) \|$", re.MULTILINE)
README_ROW = re.compile(r"`(\w+)` \| (\S+) of (\S+) \| (\S+ to \S+) \|$", re.MULTILINE)
# The docs have the figures of jax 0.10.2. Other versions keep slightly different tensors for the gradient.
SLACK = 0.0 if jax.__version__ == "0.10.2" else 0.01
METHOD_CONFIGS = sorted([*CONFIGS.glob("*grpo_8b*.yaml"), *(CONFIGS / "ablations").iterdir()])
H100 = DEVICES["h100"]
LORA_CHANGES = {"lora.rank", "optim.learning_rate", "rollout.max_context_tokens", "pack.row_tokens"}
MACHINE_SETTINGS = ("run_dir", "model.path", "model.remat", "mesh.", "engine.", "pack.num_rows", "optim.offload")


def named(names: Iterable[str]):
    """Marks the largest models, whose plans take longest, as nightly; test_plan.py has a small mixture."""
    return [pytest.param(each, marks=[pytest.mark.nightly] * each.startswith(("32b", "30ba3b"))) for each in names]


def config_of(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml")


def planned(config: Config | SftConfig) -> PlannedRl | PlannedSft:
    return planned_run(config, model_config(config.model.path)[0])


@cache
def plan_for(name: str) -> Plan:
    return make_plan(planned(start_of(name) if is_start(name) else config_of(name)), device_of(name))


def device_of(name: str) -> DeviceSpec:
    return DEVICES[DEVICES_OF[name].partition(":")[0]]


def is_start(name: str) -> bool:
    return "sft" in name


def start_of(name: str, *settings: str) -> SftConfig:
    return load_config(CONFIGS / f"{name}.yaml", *settings, schema=SftConfig)


def header_of(name: str) -> str:
    """Returns a file's header on one line; a bar ends each command."""
    lines = (CONFIGS / f"{name}.yaml").read_text().partition("\nrun_dir:")[0].splitlines()
    return "".join(f"{line[4:]} | " if line.startswith("#   ") else f"{line[2:]} " for line in lines)


def same_figures(written: Sequence[str], estimated: Sequence[float | StepTime], slack: float = SLACK) -> bool:
    """Compares figures with the number of digits in the text."""
    return all(
        text == str(value.seconds)
        if isinstance(value, StepTime)
        else abs(float(text) - value) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + slack * value
        for text, value in zip(written, estimated, strict=True)
    )


def figures_of(plan: Plan) -> list[float | StepTime]:
    """Returns seconds of an update and, for RL, of a step; GiB needed per device, and usable GiB."""
    assert plan.update_s is not None
    steps = [] if plan.step is None else [plan.step]
    return [plan.update_s, *steps, plan.memory.peak_bytes / GIB, plan.device.usable_bytes / GIB]


def differing_keys(published: Config | SftConfig, own: Config | SftConfig) -> set[str]:
    """Returns the settings that differ, except those of the machine."""
    old, new = flattened(to_record(published)), flattened(to_record(own))
    return {key for key in old if old[key] != new[key] and not key.startswith(MACHINE_SETTINGS)}


def other_settings(name: str) -> set[str]:
    """Returns the settings that differ from the published recipe, except the embedded engine's staleness of 0."""
    config = config_of(name)
    alternates = config.engine.kind == "jax" and config.train.max_staleness == 0
    differ = differing_keys(load_config(CONFIGS / "paragrpo_8b.yaml"), config)
    return differ - ({"train.max_staleness"} if alternates else set())


def test_every_recipe_for_a_machine_is_tested():
    assert {path.stem for path in CONFIGS.glob("[0-9]*b_*.yaml")} == set(LEARNERS)
    assert {path.stem for path in CONFIGS.glob("sft_*.yaml")} == {*STARTS, "sft_smoke"}
    assert {f"contrast/{path.stem}" for path in CONFIGS.glob("contrast/*.yaml")} == set(CONTRAST)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_recipe_differs_from_the_published_one_in_the_machine_only(name):
    assert other_settings(name) == (LORA_CHANGES if "lora" in name else set())


def test_a_recipe_that_changes_the_method_is_detected(monkeypatch):
    monkeypatch.setitem(globals(), "MACHINE_SETTINGS", ("run_dir",))
    assert {"engine.gpus", "mesh.fsdp", "pack.num_rows"} <= other_settings("8b_8x80gb")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRAST)
def test_a_recipe_of_qwen2_5_vl_differs_from_its_counterpart_in_the_model_only(name):
    counterpart, load = CONTRAST[name][1], start_of if is_start(name) else config_of
    old, new = (flattened(to_record(load(each))) for each in (counterpart, name))
    assert {key for key in old if old[key] != new[key]} == {"run_dir", "model.path"}
    assert f"Otherwise the same as configs/{counterpart}.yaml" in header_of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", named(LEARNERS))
def test_the_mesh_of_a_recipe_uses_the_whole_machine_and_fits_by_the_plan(name):
    config, plan = config_of(name), plan_for(name)
    assert config.mesh.num_devices == len(topology(LEARNERS[name]).without_gpus(config.engine.gpus))
    assert len(config.engine.gpus) in (0, config.engine.num_servers) and plan.fit.fits, render(plan)
    assert max(map(len, render(plan).splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", named(name for name in LEARNERS if config_of(name).mesh.num_devices > 1))
def test_no_mesh_that_fits_has_a_step_more_than_one_percent_faster(name):
    device, seconds = device_of(name), {}
    run = planned(config_of(name)).on_device(device)
    for shape in mesh_shapes(run.num_devices):
        with suppress(ValueError):  # a mesh that does not divide the model or the hosts
            other = run.on_mesh(MeshConfig(*shape))
            if planned_memory(other, device).peak_bytes <= device.usable_bytes:
                step = step_time(other, device, _update_s(other, device))
                seconds[shape] = 0.0 if step is None else step.seconds.middle
    mesh = run.update.mesh
    assert len(seconds) > 1 and seconds[mesh.data, mesh.fsdp, mesh.tensor] <= 1.01 * min(seconds.values()), seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", named([*LEARNERS, *(name for name in CONTRAST if not is_start(name))]))
def test_the_commands_of_a_recipe_make_its_policy_on_its_machine(name):
    commands = header_of(name)
    start, settings = re.findall(r"paravt_jax\.sft --config configs/([\w/]+)\.yaml ([^|]*)\|", commands)[0]
    src, dst = re.findall(r"model_port\.export --src (\S+) --dst (\S+)", commands)[0]
    recipe, config, device = config_of(name), start_of(start, *settings.split()), device_of(name)
    assert (src, dst) == (f"{config.run_dir}/checkpoints/{config.sft.num_steps}", recipe.model.path)
    assert config.mesh.num_devices == recipe.mesh.num_devices + len(recipe.engine.gpus)
    assert make_plan(planned(config), device).fit.fits
    is_plain = name.endswith("_grpo")  # forces no prefix, also after a cold start with one
    assert recipe.rollout.forced_prefix == ("" if is_plain else config.rollout.forced_prefix)
    assert config.lora == recipe.lora
    assert model_config(config.model.path)[0] == model_config(recipe.model.path)[0]


@pytest.mark.parametrize("name", STARTS)
def test_a_cold_start_differs_from_the_published_one_in_the_machine_only(name):
    allowed = {"lora.rank", "optim.learning_rate"} if "lora" in name else set()
    assert differing_keys(start_of("sft_8b"), start_of(name)) == allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", named(DEVICES_OF))
def test_the_figures_in_a_header_match_the_plan(name):
    written = ESTIMATES.search(header_of(name))
    assert written is not None
    figures = [*[None] * is_start(name), *figures_of(plan_for(name))]
    assert (written[1] is None) == (is_start(name) or name in CONTRAST)
    pairs = [(text, figure) for text, figure in zip(written.groups(), figures, strict=True) if text is not None]
    assert same_figures(*zip(*pairs, strict=True)), figures


@pytest.mark.slow
@pytest.mark.parametrize("name", named(LEARNERS))
def test_the_table_of_recipes_matches_the_plan(name):
    rows = {row[0]: row[1:] for row in RECIPE_ROW.findall(MACHINES.read_text())}
    _, usable, update_s, step_s, bound_by = rows[name]
    update, step, _, usable_gib = figures_of(plan_for(name))
    assert same_figures((update_s, step_s, usable), (update, step, usable_gib)), plan_for(name)
    assert bound_by == step.bound_by


@pytest.mark.slow
@pytest.mark.parametrize("row", START_ROW.findall(MACHINES.read_text()), ids=lambda row: " ".join(row[:2]))
def test_the_table_of_cold_starts_matches_the_plan(row):
    name, settings, gib, usable, step_s = row
    command = f"configs/{name}.yaml {settings}".strip()
    device = next(device_of(recipe) for recipe in [*LEARNERS, *STARTS] if command in header_of(recipe))
    plan = make_plan(planned(start_of(name, *settings.split())), device)
    assert same_figures((step_s, gib, usable), figures_of(plan))


@pytest.mark.slow
def test_the_seconds_of_a_step_on_the_page_are_printed_by_the_plan():
    shown = re.findall(r"^```\n(seconds per step.*?)^```", MACHINES.read_text(), re.MULTILINE | re.DOTALL)
    assert len(shown) == 1 and shown[0] in render(plan_for("8b_8x80gb"))


def test_the_tables_have_every_recipe_and_every_cold_start():
    text = MACHINES.read_text()
    assert {row[0] for row in RECIPE_ROW.findall(text)} == set(LEARNERS)
    assert {row[0] for row in START_ROW.findall(text)} == set(STARTS)


def test_the_readme_has_the_figures_of_every_recipe():
    rows = RECIPE_ROW.findall(MACHINES.read_text())
    figures = {(name, gib, usable, step_s) for name, gib, usable, _, step_s, _ in rows}
    assert set(README_ROW.findall((CONFIGS.parent / "README.md").read_text())) == figures


def test_a_wrong_last_digit_is_detected():
    assert same_figures(["3.8", "25"], [3.84, 24.6], 0.0) and not same_figures(["3.9", "25"], [3.84, 24.6], 0.0)


@pytest.mark.slow
def test_the_mesh_of_the_method_configs_is_the_fastest_for_all_of_them_that_fits_eight_gpus():
    """They share a mesh, because an ablation changes nothing but the ablated setting."""
    runs, seconds = [planned(load_config(path)) for path in METHOD_CONFIGS], {}
    for mesh in starmap(MeshConfig, mesh_shapes(8)):
        resized = [run.resized(mesh=mesh, num_rows=mesh.num_row_parts) for run in runs]
        if planned_memory(resized[0], H100).peak_bytes <= H100.usable_bytes:
            seconds[mesh] = sum(_update_s(run) for run in resized)
    assert {run.update.mesh for run in runs} == {min(seconds, key=lambda mesh: seconds[mesh])}


def _update_s(run: PlannedRl, device: DeviceSpec = H100) -> float:
    run = with_remat(run, device)
    estimated = update_seconds(run.update, run.model, device, run.typical_step())
    assert estimated is not None
    return estimated.total


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", DEVICES_OF)
def test_a_recipe_fits_its_machine_by_the_compilers_figures(name, tmp_path):
    """A process for each recipe, because a TPU compiler takes 4 GiB and aborts on the tests' XLA flags."""
    skip_without_compiler(DEVICES_OF[name])
    config, results = CONFIGS / f"{name}.yaml", tmp_path / "meshes.json"
    mesh = (start_of(name) if is_start(name) else config_of(name)).mesh
    options = {"--topology": DEVICES_OF[name], "--mesh": f"{mesh.data},{mesh.fsdp},{mesh.tensor}", "--json": results}
    command = [sys.executable, "-m", "paravt_jax.bench", "mesh", "--config", config, *chain(*options.items())]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(results.read_text())["rows"]
    assert row["fits"] and row["compile_s"] > 0, row


def skip_without_compiler(name: str) -> None:
    try:
        check_compiler(topology(name).device.platform)
    except ValueError as missing:
        pytest.skip(str(missing))
