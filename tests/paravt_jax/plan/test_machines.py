"""A recipe for each machine: only the machine differs, and it fits, by the plan and by the compiler's own figures."""

from dataclasses import replace
from itertools import starmap
from pathlib import Path

import pytest

from model_port.sharding import make_mesh
from paravt_jax.config import Config, MeshConfig, load_config, to_record
from paravt_jax.keys import flat
from paravt_jax.plan.ahead import compiled_update
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.meshes import compiled_bytes, mesh_shapes
from paravt_jax.plan.plan import Plan, make_plan, model_config, planned_memory, update_seconds
from paravt_jax.plan.tables import render
from paravt_jax.plan.topology import Topology, check_compiler, topology
from paravt_jax.plan.update import update_of
from paravt_jax.plan.workload import largest_batch, typical_step

CONFIGS = Path(__file__).parents[3] / "configs"
LEARNERS = {  # what each learner computes on
    "8b_8x80gb": "h100:4",
    "8b_8x80gb_embedded": "h100:8",
    "8b_2nodes": "h100:8",
    "8b_v5p8": "v5p:2x2x1",
    "8b_v6e16": "v6e:4x4",
    "32b_64": "h100:64",
    "4b_1x80gb": "h100:1",
    "8b_lora_1x80gb": "h100:1",
    "2b_lora_24gb": "l4:1",
}
OF_THE_METHOD = sorted([*CONFIGS.glob("*grpo_8b*.yaml"), *(CONFIGS / "ablations").iterdir()])
H100 = DEVICES["h100"]
SHORTER = {"lora.rank", "optim.learning_rate", "rollout.max_context_tokens", "pack.row_tokens"}
OF_THE_MACHINE = ("run_dir", "model.path", "model.remat", "mesh.", "engine.", "pack.num_rows", "optim.offload")


def config_of(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml")


def plan_for(name: str) -> Plan:
    config = config_of(name)
    model, _ = model_config(config.model.path)
    return make_plan(config, model, device=DEVICES[LEARNERS[name].partition(":")[0]])


def other_settings(name: str) -> set[str]:
    """Where it is not the published recipe, beyond the machine; an engine on the learner's devices takes turns."""
    published, own = (flat(to_record(one)) for one in (load_config(CONFIGS / "paragrpo_8b.yaml"), config_of(name)))
    differ = {key for key in published if published[key] != own[key] and not key.startswith(OF_THE_MACHINE)}
    takes_turns = own["engine.kind"] == "jax" and own["train.max_staleness"] == 0
    return differ - ({"train.max_staleness"} if takes_turns else set())


def test_every_recipe_of_a_machine_is_compiled_for_it():
    assert {path.stem for path in CONFIGS.glob("[0-9]*b_*.yaml")} == set(LEARNERS)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_recipe_of_a_machine_is_the_published_one_but_for_the_machine(name):
    assert other_settings(name) == (SHORTER if "lora" in name else set())


def test_a_recipe_that_changes_the_method_is_noticed(monkeypatch):
    monkeypatch.setitem(globals(), "OF_THE_MACHINE", ("run_dir",))
    assert {"engine.gpus", "mesh.fsdp", "pack.num_rows"} <= other_settings("8b_8x80gb")


@pytest.mark.parametrize("name", LEARNERS)
def test_the_mesh_of_a_recipe_is_its_machine_and_the_plan_says_that_it_fits(name):
    config, plan = config_of(name), plan_for(name)
    assert config.mesh.num_devices == topology(LEARNERS[name]).num_devices
    assert plan.fit.fits, render(plan)
    assert max(map(len, render(plan).splitlines())) <= 100


def test_a_box_of_eight_is_shared_out_whole():
    engine, mesh = config_of("8b_8x80gb").engine, config_of("8b_8x80gb").mesh
    assert len(engine.gpus) + mesh.num_devices == 8 and len(engine.gpus) == engine.num_servers


@pytest.mark.parametrize("path", OF_THE_METHOD, ids=lambda path: path.stem)
def test_no_mesh_of_eight_gpus_that_fits_is_quicker_than_that_of_the_method(path):
    config = load_config(path)
    model, _ = model_config(config.model.path)
    seconds = {}
    for mesh in starmap(MeshConfig, mesh_shapes(8)):
        fewest = replace(config, mesh=mesh, pack=replace(config.pack, num_rows=mesh.num_row_parts))
        if planned_memory(fewest, model, H100).peak_bytes <= H100.usable_bytes:
            estimated = update_seconds(update_of(fewest), model, H100, typical_step(fewest, model))
            assert estimated is not None
            seconds[mesh] = estimated.total
    assert min(seconds, key=lambda mesh: seconds[mesh]) == config.mesh


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_recipe_fits_its_machine_by_the_figures_of_the_compiler(name):
    config, learner = config_of(name), with_compiler(LEARNERS[name])
    model, _ = model_config(config.model.path)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, learner.devices())
    programs = compiled_update(config, model, largest_batch(config, model), mesh)
    assert compiled_bytes(programs, plan_for(name).memory) <= learner.device.usable_bytes, programs


def with_compiler(name: str) -> Topology:
    found = topology(name)
    try:
        check_compiler(found.device.platform)
    except ValueError as missing:
        pytest.skip(str(missing))
    return found
