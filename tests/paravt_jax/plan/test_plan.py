"""The plan against the compiler, the sharding table and real arrays; and what it tells the user."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from update_programs import compiled_programs, planned_program_bytes, program_bytes

from model_port.attention import scanned
from model_port.config import LoraConfig, ModelConfig, TextConfig, VisionConfig, preset
from model_port.loading import abstract_model, abstract_params
from model_port.sampler import Sampler
from model_port.sharding import make_mesh, param_spec
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import Config, EngineConfig, MeshConfig, PackConfig, PolicyConfig, SftConfig, load_config
from paravt_jax.learner import programs
from paravt_jax.learner.learner import StepPart
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.plan.batch import make_batch
from paravt_jax.plan.flops import product_flops
from paravt_jax.plan.memory import memory_of, param_shapes, shard_values
from paravt_jax.plan.plan import DEVICES, make_plan, model_config
from paravt_jax.plan.tables import imitation_plan_of, plan_of
from paravt_jax.plan.update import update_of
from paravt_jax.plan.workload import batch_flops

# Of RL; those of the miniature begin from a checkpoint that is made first, those of machines have tests of their own.
CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))
    if path.stem.partition("_")[0] not in ("sft", "eval")
    and path.parent.name not in ("miniature", "reproduce", "launch")
    and not path.stem[0].isdigit()  # test_machines.py
]
H100, CPU = DEVICES["h100"], DEVICES["cpu"]
# Small enough to compile in seconds, and as at 8B activations outweigh weights.
MID = ModelConfig(
    TextConfig(6, 256, 768, 8, 4, head_dim=32, vocab_size=4096, mrope_sections=(6, 5, 5)),
    VisionConfig(4, 64, 128, 2, 256, (0, 1, 2), num_positions=256),
    tie_embeddings=False,
    image_token_id=4090,
    video_token_id=4091,
    vision_start_token_id=4092,
    vision_end_token_id=4093,
)
LARGE_VOCAB = replace(MID, text=replace(MID.text, num_layers=3, vocab_size=32_768))
CASES = {
    "full": (MID, (1, 2, 2), 512, "full", "blocked"),
    "none": (MID, (1, 2, 2), 512, "none", "blocked"),
    "dots": (MID, (2, 1, 2), 512, "dots", "blocked"),
    "full, xla": (MID, (2, 2, 1), 256, "full", "xla"),
    "full, scanned": (MID, (2, 2, 1), 256, "full", "scanned"),
    "head": (LARGE_VOCAB, (2, 2, 1), 256, "full", "blocked"),
    "trainable vision": (MID, (1, 4, 1), 256, "full", "blocked"),
    "adapters": (MID, (1, 2, 2), 512, "full", "scanned"),
    "adapters, none": (MID, (1, 2, 2), 512, "none", "blocked"),
}


def case(name: str) -> tuple[ModelConfig, Config]:
    model, mesh, row_tokens, remat, attention = CASES[name]
    rows = 2 if mesh[1] == 2 else 1
    policy = PolicyConfig(dtype="float32", remat=remat, attention=attention)
    optim = OptimConfig(train_vision=name == "trainable vision")
    lora = LoraConfig(rank=16 if name.startswith("adapters") else 0)
    return model, config_of(mesh, rows=rows, row_tokens=row_tokens, model=policy, optim=optim, lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_memory_of_an_update_is_what_the_compiler_says(name, monkeypatch):
    monkeypatch.setattr(scanned, "BLOCK_TOKENS", 128)
    model, config = case(name)
    plan = make_plan(config, model, device=CPU)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    programs = compiled_programs(make_learner(config, model, mesh), make_batch(plan.batch, model))
    compiled = max(map(program_bytes, programs.values()))
    assert planned_program_bytes(plan) == pytest.approx(compiled, rel=0.25)


@pytest.mark.parametrize(("name", "remat"), [("full", "none"), ("none", "full")])
def test_the_comparison_would_notice_the_wrong_remat(name, remat):
    model, config = case(name)
    other = replace(config, model=replace(config.model, remat=remat))
    one, another = (planned_program_bytes(make_plan(c, model, device=CPU)) for c in (config, other))
    assert max(one, another) > 2 * min(one, another)


@pytest.mark.slow
@pytest.mark.parametrize("trains", ["language", "vision", "adapters"])
def test_what_is_always_there_is_what_a_learner_holds(trains):
    config = config_of(
        (1, 2, 2),
        rows=1,
        row_tokens=256,
        loss=LossConfig(kl_coef=0.1),
        optim=OptimConfig(train_vision=trains == "vision"),
        lora=LoraConfig(rank=16 if trains == "adapters" else 0),
    )
    learner = make_learner(config, MID, make_mesh(1, 2, 2))
    held = {
        "masters, float32": learner.state.trainable,
        "frozen weights" if trains == "adapters" else "frozen vision tower, float32": learner.state.frozen,
        "Adam moments, float32": [part for part in jax.tree.leaves(learner.state.opt_state) if part.ndim],
        "reference": learner._ref,
    }
    sizes = {name: sum(_bytes_here(leaf) for leaf in jax.tree.leaves(tree)) for name, tree in held.items()}
    resident = make_plan(config, MID, device=CPU).memory.resident
    assert resident == {name: size for name, size in sizes.items() if size}


def _bytes_here(array: jax.Array) -> int:
    return array.addressable_shards[0].data.nbytes


@pytest.mark.slow
def test_the_cache_is_as_large_as_the_samplers():
    engine = EngineConfig(kind="jax", max_rows=8)
    config = config_of((2, 2, 2), rows=1, row_tokens=256, engine=engine)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        rows = Sampler(abstract_model(MID), max_rows=8, max_context_tokens=256)._rows
    planned = make_plan(config, MID, device=CPU).memory.resident["key/value cache"]
    assert planned == _bytes_here(rows.keys) + _bytes_here(rows.values)


@pytest.mark.slow
def test_parameters_of_8b_are_counted_exactly():
    params = make_plan(Config(), preset("8b")).params
    shapes = jax.tree.leaves(abstract_params(abstract_model(preset("8b")), "float32"))
    assert params.text + params.vision == sum(leaf.size for leaf in shapes) == 8_767_123_696
    assert params.trainable == params.text == 8_190_735_360


def test_masters_on_512_devices_are_the_sum_of_their_shards():
    mesh = AbstractMesh((1, 64, 8), ("data", "fsdp", "tensor"))
    shapes = param_shapes(preset("8b"))
    shards = [NamedSharding(mesh, param_spec(path, len(shape))).shard_shape(shape) for path, shape in shapes.items()]
    assert shard_values(shapes, MeshConfig(1, 64, 8)) == sum(int(np.prod(shard)) for shard in shards)


def test_a_mesh_that_does_not_divide_the_model_is_named():
    config = config_of((1, 1, 16), rows=1, row_tokens=1024)
    with pytest.raises(ValueError, match=r"mesh\.tensor=16 does not divide the model's num_kv_heads=8"):
        make_plan(config, preset("8b"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 16])
def test_flops_are_those_of_the_traced_update(rank, monkeypatch):
    config = config_of((1, 1, 1), rows=2, row_tokens=1024, lora=LoraConfig(rank))
    plan = make_plan(config, MID, device=CPU)
    counted = traced_flops(make_learner(config, MID, None), make_batch(plan.batch, MID), monkeypatch)
    planned = batch_flops(update_of(config), MID, plan.batch, "cpu")
    assert planned["update, frames"] == pytest.approx(counted["encode_vision"], rel=0.02)
    update = planned["update, forward and backward"] + planned["update, computed again"]
    assert update == pytest.approx(counted["add_gradients"], rel=0.05)


class Traced(Exception):
    pass


def traced_flops(learner, batch, monkeypatch) -> dict[str, float]:
    found = {}

    def spy(name, function):
        def call(*args, **kwargs):
            found[name] = product_flops(function.trace(*args, **kwargs).jaxpr.jaxpr)
            if name == "add_gradients":
                raise Traced
            return function.eval_shape(*args, **kwargs)

        return call

    for name in ("encode_vision", "add_gradients"):
        monkeypatch.setattr(programs, name, spy(name, getattr(programs, name)))
    with pytest.raises(Traced):
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], 2)
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_plan_for_a_narrow_terminal(path):
    text = plan_of(load_config(path), "h100")
    assert max(map(len, text.splitlines())) <= 100
    assert "peak" in text and "assumed" in text


def test_8b_on_one_h100_does_not_fit_and_the_advice_does():
    plan = make_plan(Config(), preset("8b"), device=H100)
    assert plan.fit.fits is False and plan.fit.row_tokens == 0 and plan.fit.num_rows == 0
    assert plan.memory.resident["masters, float32"] == 4 * 8_190_735_360
    *_, mesh_advice = plan.fit.advice
    settings, _, remark = mesh_advice.partition(", which takes ")
    assert settings.startswith("mesh.fsdp=") and remark.endswith(" devices")
    assert make_plan(load_config(None, *settings.split()), preset("8b"), device=H100).fit.fits


def test_the_largest_row_fits_and_a_longer_one_does_not():
    def plan(row_tokens: int):
        config = config_of((1, 8, 1), rows=1, row_tokens=row_tokens, dtype="bfloat16")
        return make_plan(config, preset("8b"), device=H100)

    largest = plan(8192).fit.row_tokens
    assert largest > 8192 and plan(largest).fit.fits and not plan(largest + 128).fit.fits


@pytest.mark.slow
def test_more_of_anything_needs_more():
    def peak(**changed) -> int:
        config = config_of((1, 8, 1), rows=1, row_tokens=4096, dtype="bfloat16")
        return make_plan(replace(config, **changed), preset("8b")).memory.peak_bytes

    policy = PolicyConfig(dtype="bfloat16", remat="full")
    assert peak() < peak(model=replace(policy, remat="attention")) < peak(model=replace(policy, remat="dots"))
    assert peak(model=replace(policy, remat="offload")) < peak() < peak(loss=LossConfig(kl_coef=0.01))
    assert (
        peak() < peak(pack=PackConfig(4096, 16)) < peak(pack=PackConfig(4096, 16), optim=OptimConfig(train_vision=True))
    )


def test_a_size_is_found_without_weights():
    assert model_config("Qwen/Qwen3-VL-8B-Instruct")[0] == preset("8b")
    assert model_config("runs/sft-32b.hf")[0] == preset("32b")
    assert model_config("tiny") == (tiny_config(), ())
    with pytest.raises(ValueError, match="its name has none of the sizes 2b, 4b, 8b, 32b"):
        model_config("Qwen/Qwen3-VL-235B-A22B")


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="--device v4 is unknown; choose one of h100, h200"):
        plan_of(Config(), "v4")


def test_an_engine_beside_the_update_takes_memory_in_every_phase():
    config = config_of((1, 1, 1), rows=1, row_tokens=512, engine=EngineConfig(kind="jax", max_rows=2))
    alone = make_plan(config, MID, device=CPU).memory
    beside = make_plan(replace(config, train=replace(config.train, max_staleness=1)), MID, device=CPU).memory
    assert set(beside.resident) - set(alone.resident) == {"copy for sampling"}
    assert beside.worst.num_bytes > alone.worst.num_bytes
    assert "publish" in {phase.name for phase in beside.phases}


def test_memory_needs_no_device():
    batch = make_plan(Config(), preset("8b")).batch
    config = load_config(None, "mesh.fsdp=64", "mesh.tensor=8", "pack.num_rows=64")
    memory = memory_of(update_of(config), preset("8b"), replace(batch, num_rows=64), None, "gpu")
    assert memory.peak_bytes > sum(memory.resident.values()) > 0


def test_a_plan_for_a_cpu_counts_float32_as_a_run_there_computes_in_and_says_so():
    said = "computed in float32: on a CPU bfloat16 is slower and takes more memory"
    for file, schema, plan in (("2b_lora_24gb", Config, plan_of), ("sft_2b_lora_24gb", SftConfig, imitation_plan_of)):
        planned = {}
        for dtype in ("float32", "bfloat16"):
            config = load_config(f"configs/{file}.yaml", "model.path=2b", f"model.dtype={dtype}", schema=schema)
            planned[dtype] = " ".join(plan(config, "cpu").split())
            assert (said in planned[dtype]) == (dtype == "bfloat16")
            assert said not in " ".join(plan(config, "h100").split())
        assert planned["bfloat16"].replace(f"{said} ", "") == planned["float32"]
