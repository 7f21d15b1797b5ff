"""The plan against the compiler, the sharding table and real arrays, and its text."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from update_programs import compiled_programs, planned_program_bytes, program_bytes

from model_port.attention import scanned
from model_port.config import LoraConfig, ModelConfig, TextConfig, preset
from model_port.inputs import Frame
from model_port.loading import abstract_model, abstract_params
from model_port.qwen2_5_vl.config import TRAITS, Qwen25VisionConfig
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.qwen3_vl_moe.config import Qwen3MoeVisionConfig
from model_port.sampler import Sampler
from model_port.sharding import make_mesh, param_spec
from model_port.tiny import tiny_config
from paravt_jax import sft
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import Config, EngineConfig, MeshConfig, PackConfig, PolicyConfig, SftConfig, load_config
from paravt_jax.learner import packing, programs
from paravt_jax.learner.batch_shape import make_batch
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import BatchShape, Dialogue, PromptGroup, pack
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.plan.devices import DEVICES, DeviceSpec
from paravt_jax.plan.flops import product_flops
from paravt_jax.plan.memory import param_shapes, shard_values
from paravt_jax.plan.plan import Plan, make_plan, model_config, next_power_of_two, on_fitting_mesh
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.run import PlannedRl, PlannedSft
from paravt_jax.plan.tables import plan_of
from paravt_jax.plan.workload import batch_flops, packed_rows

# RL configs whose model is a name. Recipes for machines are in test_machines.py.
CONFIGS = [
    path
    for path in sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))
    if not {"sft", "eval"} & set(path.stem.split("_"))
    and path.parent.name not in ("miniature", "reproduce", "proprietary", "launch")
    and not path.stem[0].isdigit()
]
H100, CPU = DEVICES["h100"], DEVICES["cpu"]
# Compiles in seconds. Activations are larger than weights, as in the 8B.
MID = ModelConfig(
    TextConfig(6, 256, 768, 8, 4, head_dim=32, vocab_size=4096, mrope_sections=(6, 5, 5)),
    Qwen3VisionConfig(4, 64, 128, 2, 256, (0, 1, 2), num_positions=256),
    tie_embeddings=False,
    image_token_id=4090,
    video_token_id=4091,
    vision_start_token_id=4092,
    vision_end_token_id=4093,
)
WINDOWED = Qwen25VisionConfig(4, 64, 128, 2, 256, full_layers=(3,))
WINDOWS = replace(MID, text=replace(MID.text, mrope_sections=(4, 6, 6), **TRAITS), vision=WINDOWED)
SPARSE = replace(MID.text, ffn_width=128, num_experts=8, token_experts=2)
EXPERTS = replace(MID, text=SPARSE, vision=Qwen3MoeVisionConfig(**vars(MID.vision)))
EIGHT_B = preset("8b")
LARGE_VOCAB = replace(MID, text=replace(MID.text, num_layers=3, vocab_size=16_384))
CASES = {
    "full": (MID, (1, 2, 2), 512, "full", "blocked"),
    "none": (MID, (1, 2, 2), 512, "none", "blocked"),
    "dots": (MID, (2, 1, 2), 512, "dots", "blocked"),
    "full, xla": (MID, (2, 2, 1), 256, "full", "xla"),
    "full, scanned": (MID, (2, 2, 1), 256, "full", "scanned"),
    "head": (LARGE_VOCAB, (2, 2, 1), 256, "full", "blocked"),
    "trainable vision": (MID, (1, 4, 1), 256, "full", "blocked"),
    "windows": (WINDOWS, (1, 2, 2), 512, "full", "blocked"),
    "experts": (EXPERTS, (1, 2, 2), 1024, "full", "blocked"),
    "experts, dots": (EXPERTS, (1, 2, 2), 1024, "dots", "blocked"),
    "adapters": (MID, (1, 2, 2), 512, "full", "scanned"),
    "adapters, none": (MID, (1, 2, 2), 512, "none", "blocked"),
}


def plan_of_config(config: Config, model: ModelConfig = EIGHT_B, device: DeviceSpec = CPU) -> Plan:
    return make_plan(PlannedRl.of(config, model), device)


def case(name: str) -> tuple[ModelConfig, Config]:
    model, mesh, row_tokens, remat, attention = CASES[name]
    rows = 2 if mesh[1] == 2 else 1
    policy = PolicyConfig(dtype="float32", remat=remat, attention=attention)
    optim = OptimConfig(train_vision=name == "trainable vision")
    lora = LoraConfig(rank=16 if name.startswith("adapters") else 0)
    return model, config_of(mesh, rows=rows, row_tokens=row_tokens, model=policy, optim=optim, lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "full")) for name in CASES])
def test_planned_memory_matches_the_compiler(name, monkeypatch):
    monkeypatch.setattr(scanned, "BLOCK_TOKENS", 128)
    model, config = case(name)
    plan = plan_of_config(config, model)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    batch = make_batch(plan.run.largest_batch(), model)
    programs = compiled_programs(learner_of(config, model, mesh), batch)
    num_bytes = {name: program_bytes(program) for name, program in programs.items()}
    if not config.optim.train_vision:  # the frames are then not an argument of the gradients, but stay on the device
        frames = sum(array.nbytes for array in jax.tree.leaves(batch.vision))
        num_bytes["gradients"] += frames // config.mesh.num_row_parts
    assert planned_program_bytes(plan) == pytest.approx(max(num_bytes.values()), rel=0.2)


@pytest.mark.slow
def test_the_comparison_detects_the_wrong_remat():
    full, none = (planned_program_bytes(plan_of_config(config, model)) for model, config in map(case, ("full", "none")))
    assert none > 2 * full


@pytest.mark.slow
def test_frames_in_responses_are_planned_in_the_main_agents_context_and_the_update():
    reports = PlannedRl.of(load_config(None), EIGHT_B)
    frames = replace(reports, rollout=replace(reports.rollout, crop_returns="frames"))
    shown = 16 * reports.frame_tokens  # frames of a call
    assert frames.work.shown_tokens == shown and frames.work.response_tokens == reports.work.response_tokens + shown
    assert frames.work.own_tokens == reports.work.own_tokens + reports.work.report_tokens  # no sub-agent samples
    assert (frames.work.report_tokens, frames.work.call_prompt_tokens) == (0, 0)
    num_calls = frames.work.num_calls
    assert frames.work.num_call_frames == num_calls * 16 and reports.work.num_call_frames == 0
    per_batch = [run.typical_step().shape.num_frame_rows * run.work.num_batches for run in (reports, frames)]
    assert per_batch[1] - per_batch[0] == pytest.approx(num_calls * 16, rel=0.1)
    assert frames.work.with_calls(2).response_tokens == frames.work.response_tokens + shown
    flops = [plan_of_config(load_config(None, f"rollout.crop_returns={kind}")).flops for kind in ("report", "frames")]
    assert flops[1]["update, vision"] > flops[0]["update, vision"]


@pytest.mark.slow
def test_trained_sub_agents_are_in_the_update():
    """Of 56 episodes with a call: 16 frames, their text and a report each; at most three times five calls."""
    configs = [load_config(None, f"train.subagent_loss={value}") for value in ("false", "true")]
    without, own = (PlannedRl.of(config, EIGHT_B) for config in configs)
    calls = 7 * 8
    assert own.work.shared_tokens - without.work.shared_tokens == calls * (16 * own.frame_tokens + 500 + 256)
    frames, actions = (
        [getattr(run.typical_step().shape, name) * rows(run) for run in (without, own)]
        for name, rows in (
            ("num_frame_rows", lambda run: run.work.num_batches),
            ("row_actions", lambda run: run.work.num_batches * run.pack.num_rows),
        )
    )
    assert frames[1] - frames[0] == pytest.approx(calls * 16, rel=0.1)
    assert actions[1] - actions[0] == pytest.approx(calls * 256, rel=0.1)
    assert own.step_frames - without.step_frames == 7 * 8 * 15 * 16


def test_rows_of_patches_have_room_for_a_zoomed_detail():
    """As many pixels as the 16 frames of a crop, so that such a row has 16 frames of an overview."""
    tools = ("rollout.tools=[crop_video]", "rollout.tools=[crop_video,zoom_frame]")
    crops, zooms = (PlannedRl.of(load_config("configs/paragrpo_8b.yaml", each), EIGHT_B) for each in tools)
    for shape_of in (PlannedRl.largest_batch, lambda run: run.typical_step().shape):
        crop, zoom = shape_of(crops), shape_of(zooms)
        assert (crop.row_patches, zoom.row_patches) == (196, 16 * 196)
        assert crop.num_frame_rows / 16 <= zoom.num_frame_rows < crop.num_frame_rows / 2
    assert zooms.row_patches == crops.row_patches  # of a frame


def test_the_largest_batch_has_room_for_all_frames_of_a_step_in_one_part():
    """Two groups with an overview of 8 frames fit into a row, so that the other part of the mesh has none."""
    settings = ("train.prompts_per_step=2", "train.group_size=2", "pack.row_tokens=8192", "pack.num_rows=2")
    sizes = ("video.frame_budgets=[2,8]", "video.overview_frames=8", "video.max_pixels=1024")
    sizes += ("rollout.max_context_tokens=8192",)
    run = PlannedRl.of(load_config(None, *settings, *sizes, "mesh.data=2"), MID)
    planned, dialogues = run.largest_batch(), [dialogue_with_frames(group, 8) for group in range(2)]
    frame = Frame(np.zeros((4, MID.vision.patch_values), np.float32), (2, 2))
    frames = {key: frame for each in dialogues for key in each.frames}
    (packed,) = pack(dialogues, frames, MID, BatchShape(2, 8192, planned.row_patches, num_parts=2))
    assert packed.vision.patches.shape[:2] == (planned.num_frame_rows, planned.row_patches) == (2 * 16, 4)
    assert not packed.loss_mask[1].any()


def dialogue_with_frames(group: int, num_frames: int) -> Dialogue:
    ids = np.array([MID.vision_start_token_id, MID.image_token_id, 1] * num_frames + 30 * [2])
    numbers, kinds = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
    frames = tuple(f"{group}/{number}" for number in range(num_frames))
    return Dialogue(ids, frames, 3, 1, np.arange(len(ids)) >= len(ids) - 5, numbers, numbers, kinds, group)


def test_every_update_of_a_step_has_batches_of_its_own():
    updates = ("train.updates_per_step=1", "train.updates_per_step=7")
    configs = [load_config("configs/grpo_8b.yaml", "train.max_staleness=0", each) for each in updates]
    one, seven = (PlannedRl.of(config, MID) for config in configs)
    assert one.typical_step().num_batches < 7 <= seven.typical_step().num_batches
    assert seven.typical_step().num_updates == 7 and one.work.shared_tokens == seven.work.shared_tokens


@pytest.mark.parametrize(("num_hosts", "busiest"), [(1, [7]), (1, [3, 2, 2]), (4, [2]), (2, [2, 1, 1])])
def test_planned_rows_are_those_of_the_busiest_host(num_hosts, busiest):
    """Seven groups are two on the busiest of four hosts, or of three updates three, two and two."""
    group, lengths = PromptGroup(1000, 8 * (512,)), packing.row_lengths(32_768)
    needed = [
        sum(packing.num_batches(number * [group], length, 16 // num_hosts) for number in busiest) for length in lengths
    ]
    row_tokens, batches = packed_rows(7 * (group,), PackConfig(32_768, 16), len(busiest), num_hosts)
    assert row_tokens == packing.best_row_tokens(lengths, needed) and batches == needed[lengths.index(row_tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("trains", ["language", "vision", "adapters"])
def test_resident_memory_matches_the_learners_arrays(trains):
    config = config_of(
        (1, 2, 2),
        rows=1,
        row_tokens=256,
        loss=LossConfig(kl_coef=0.1),
        optim=OptimConfig(train_vision=trains == "vision"),
        lora=LoraConfig(rank=16 if trains == "adapters" else 0),
    )
    learner = learner_of(config, MID, make_mesh(1, 2, 2))
    arrays = {
        "masters, float32": learner.state.trainable,
        "frozen weights" if trains == "adapters" else "frozen vision tower, float32": learner.state.frozen,
        "Adam moments, float32": [part for part in jax.tree.leaves(learner.state.opt_state) if part.ndim],
        "reference": learner._ref,
    }
    sizes = {name: sum(map(device_bytes, jax.tree.leaves(tree))) for name, tree in arrays.items()}
    resident = plan_of_config(config, MID).memory.resident
    assert resident == {name: size for name, size in sizes.items() if size}


def device_bytes(array: jax.Array) -> int:
    return array.addressable_shards[0].data.nbytes


@pytest.mark.parametrize("model", [MID, WINDOWS], ids=["maps", "windows"])
def test_planned_inputs_have_the_size_of_a_batch(model):
    plan = plan_of_config(config_of((1, 1, 1), rows=2, row_tokens=256), model)
    (inputs,) = {parts["batch"] for parts in plan.memory.phases.values() if "batch" in parts}
    assert inputs == sum(array.nbytes for array in jax.tree.leaves(make_batch(plan.run.largest_batch(), model)))


@pytest.mark.slow
def test_the_planned_cache_has_the_size_of_the_samplers():
    engine = EngineConfig(kind="jax", max_rows=8)
    config = config_of((2, 2, 2), rows=1, row_tokens=256, engine=engine)
    sizes = engine.sampler_sizes(config.rollout.max_context_tokens, num_hosts=1)
    with jax.set_mesh(make_mesh(4, 1, 2)):  # the vision tower has two heads
        sampler = Sampler(abstract_model(MID), **sizes)
    resident = plan_of_config(config, MID).memory.resident
    assert resident["key/value cache"] == sum(map(device_bytes, jax.tree.leaves(sampler._cache)))
    assert resident["encoded frames"] == sum(map(device_bytes, jax.tree.leaves(sampler._frames)))


@pytest.mark.slow
def test_parameters_of_8b_are_counted_exactly():
    params = plan_of_config(Config()).params
    shapes = jax.tree.leaves(abstract_params(abstract_model(EIGHT_B), "float32"))
    assert params.text + params.vision == sum(leaf.size for leaf in shapes) == 8_767_123_696
    assert params.trainable == params.text == 8_190_735_360


def test_masters_on_512_devices_have_the_size_of_their_shards():
    mesh = AbstractMesh((1, 64, 8), ("data", "fsdp", "tensor"))
    shapes = param_shapes(EIGHT_B)
    shards = [NamedSharding(mesh, param_spec(path, len(shape))).shard_shape(shape) for path, shape in shapes.items()]
    assert shard_values(shapes, MeshConfig(1, 64, 8)) == sum(int(np.prod(shard)) for shard in shards)


def test_a_mesh_that_does_not_divide_the_model_is_rejected():
    config = config_of((1, 1, 16), rows=1, row_tokens=1024)
    with pytest.raises(ValueError, match=r"mesh\.tensor=16 does not divide the model's num_kv_heads=8"):
        plan_of_config(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rank", "remat", "lighter_layers"),
    [
        *((MID, 0, "full", 0), (MID, 16, "dots", 0), (MID, 0, "attention", 4)),
        *((WINDOWS, 0, "full", 0), (EXPERTS, 0, "attention", 0)),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in ((MID, 16, "full", 0), (MID, 0, "dots", 0), (EXPERTS, 0, "full", 0), (EXPERTS, 16, "full", 0))
        ),
    ],
)
def test_planned_flops_match_the_traced_update(model, rank, remat, lighter_layers, monkeypatch):
    config = config_of((1, 1, 1), rows=2, row_tokens=1024, remat=remat, lora=LoraConfig(rank))
    run = PlannedRl.of(config, model).with_update(lighter_layers=lighter_layers)
    batch = run.largest_batch()
    traced = traced_flops(make_learner(run.update, model, None), make_batch(batch, model), monkeypatch)
    planned = batch_flops(run.update, model, batch, "cpu")
    assert planned["update, vision"] == pytest.approx(traced["encode_vision"], rel=0.02)
    update = planned["update, forward and backward"] + planned["update, recomputation"]
    assert update == pytest.approx(traced["gradients"], rel=0.05)


class Traced(Exception):
    pass


def learner_of(config: Config, model: ModelConfig, mesh: Mesh | None) -> Learner:
    return make_learner(PlannedRl.of(config, model).update, model, mesh)


def traced_flops(learner, batch, monkeypatch) -> dict[str, float]:
    flops = {}

    def spy(name, function):
        def call(*args, **kwargs):
            flops[name] = product_flops(function.trace(*args, **kwargs).jaxpr.jaxpr)
            if name == "gradients":
                raise Traced
            return function.eval_shape(*args, **kwargs)

        return call

    for name in ("encode_vision", "gradients"):
        monkeypatch.setattr(programs, name, spy(name, getattr(programs, name)))
    with pytest.raises(Traced):
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], 2)
    return flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] * ("3b_lora" in path.stem), id=path.stem) for path in CONFIGS],
)
def test_the_plan_of_every_config_fits_100_columns(path):
    text = plan_of(load_config(path), "h100")
    assert max(map(len, text.splitlines())) <= 100
    assert "peak" in text and "assumptions" in text


@pytest.mark.slow
def test_8b_on_one_h100_does_not_fit_and_the_advice_does():
    plan = plan_of_config(Config(), device=H100)
    assert plan.fit.fits is False and plan.fit.row_tokens == 0 and plan.fit.num_rows == 0
    assert plan.memory.resident["masters, float32"] == 4 * 8_190_735_360
    *_, mesh_advice = plan.fit.advice
    settings, _, remark = mesh_advice.partition(", on ")
    assert settings.startswith("mesh.fsdp=") and remark.endswith(" devices")
    assert plan_of_config(load_config(None, *settings.split()), device=H100).fit.fits
    replicas = ("mesh.data=2", "pack.num_rows=2")
    *_, mesh_advice = plan_of_config(load_config(None, *replicas), device=H100).fit.advice
    settings, _, remark = mesh_advice.partition(", on ")
    advised = plan_of_config(load_config(None, *replicas, *settings.split()), device=H100)
    assert advised.fit.fits and remark == f"{advised.run.num_devices} devices"


@pytest.mark.slow
def test_the_largest_row_fits_and_a_longer_one_does_not():
    def plan(row_tokens: int):
        config = config_of((1, 8, 1), rows=1, row_tokens=row_tokens, dtype="bfloat16")
        return plan_of_config(config, device=H100)

    largest = plan(8192).fit.row_tokens
    assert largest > 8192 and plan(largest).fit.fits and not plan(largest + 128).fit.fits


@pytest.mark.slow
def test_long_rows_that_fit_are_found_though_shorter_ones_do_not():
    """Rows above 32,768 tokens are split over tensor between products, so they take less memory than these."""
    run = PlannedRl.of(config_of((1, 1, 8), rows=1, row_tokens=32768, dtype="bfloat16"), EIGHT_B)
    short, long = (planned_memory(run.resized(row_tokens=n), H100).peak_bytes for n in (32768, 36864))
    assert long < short
    plan = make_plan(run, replace(H100, memory_gib=1.01 * long / H100.usable_bytes * H100.memory_gib))
    assert not plan.fit.fits and plan.fit.row_tokens >= 36864
    assert any(line.startswith(f"pack.row_tokens={plan.fit.row_tokens};") for line in plan.fit.advice)


def test_the_largest_number_of_rows_fits_and_more_do_not():
    run = PlannedRl.of(config_of((1, 2, 1), rows=1, row_tokens=128, dtype="bfloat16"), MID)
    plan = make_plan(run, H100)
    peaks = [planned_memory(run.resized(num_rows=plan.fit.num_rows + more), H100).peak_bytes for more in (0, 2)]
    assert plan.fit.num_rows > 2 * 64 and peaks[0] <= H100.usable_bytes < peaks[1]


@pytest.mark.slow
def test_less_recomputation_a_reference_and_larger_batches_need_more_memory():
    def peak(**changed) -> int:
        config = config_of((1, 8, 1), rows=1, row_tokens=4096, dtype="bfloat16")
        return plan_of_config(replace(config, **changed), device=H100).memory.peak_bytes

    policy = PolicyConfig(dtype="bfloat16", remat="full")
    assert peak() < peak(model=replace(policy, remat="attention")) < peak(model=replace(policy, remat="dots"))
    assert peak(model=replace(policy, remat="offload")) < peak() < peak(loss=LossConfig(kl_coef=0.01))
    larger = {"pack": PackConfig(4096, 16)}
    assert peak() < peak(**larger) < peak(**larger, optim=OptimConfig(train_vision=True))


def test_the_size_of_a_model_follows_from_its_name():
    assert model_config("Qwen/Qwen3-VL-8B-Instruct")[0] == preset("8b")
    assert model_config("runs/sft-32b.hf")[0] == preset("32b")
    model, (remark,) = model_config("Qwen/Qwen2.5-VL-7B-Instruct")
    assert model == preset("qwen2.5-vl-7b") and "dimensions of Qwen2.5-VL 7B, by its name" in remark
    assert model_config("tiny") == (tiny_config(), ())
    with pytest.raises(ValueError, match="its name has none of the sizes 2b, 4b, 8b, 32b"):
        model_config("Qwen/Qwen3-VL-Next-80B")


@pytest.mark.slow
@pytest.mark.parametrize(("frames", "is_named"), [(512, False), (1024, True)])
def test_an_overview_that_fills_the_context_is_named(frames, is_named):
    """Frames have 60 tokens, and the context has 32,768."""
    plan = plan_of_config(load_config(None, f"video.frame_budgets=[4,{frames}]"))
    warning = f"{frames} frames of 60 tokens do not fit rollout.max_context_tokens=32768; such an episode has no answer"
    assert (warning in plan.assumptions) is is_named


@pytest.mark.slow
def test_a_slice_is_planned_for_its_device():
    config = load_config(None, "model.path=tiny")
    assert plan_of(config, "v5p-8") == plan_of(config, "v5p") != plan_of(config, "v5e")


def test_an_unknown_device_is_rejected():
    with pytest.raises(ValueError, match="--device v4 is unknown; choose one of h100, h200"):
        plan_of(Config(), "v4")


def test_sampling_during_the_update_takes_memory_in_every_phase():
    config = config_of((1, 1, 1), rows=1, row_tokens=512, engine=EngineConfig(kind="jax", max_rows=2))
    alone = plan_of_config(config, MID).memory
    beside = plan_of_config(replace(config, train=replace(config.train, max_staleness=1)), MID).memory
    assert set(beside.resident) - set(alone.resident) == {"copy for sampling"}  # a device without a mesh needs none
    assert max(beside.phase_bytes.values()) > max(alone.phase_bytes.values())
    assert "publish" in beside.phases


@pytest.mark.slow
def test_a_plan_for_a_cpu_assumes_float32_and_prints_it():
    remark = "computed in float32: on a CPU bfloat16 is slower and takes more memory"
    for file, schema in (("2b_lora_24gb", Config), ("sft_2b_lora_24gb", SftConfig)):
        planned = {}
        for dtype in ("float32", "bfloat16"):
            settings = "model.path=2b", "model.remat=full", f"model.dtype={dtype}"
            config = load_config(f"configs/{file}.yaml", *settings, schema=schema)
            planned[dtype] = " ".join(plan_of(config, "cpu").split())
            assert (remark in planned[dtype]) == (dtype == "bfloat16")
        assert remark not in " ".join(plan_of(config, "h100").split())
        assert planned["bfloat16"].replace(f"{remark} ", "") == planned["float32"]


def sft_plan_text(capsys, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["sft", "--plan", "--config", "configs/sft_8b.yaml", *arguments])
    sft.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(("num_devices", "least"), [(3, 4), (6, 8), (8, 16), (12, 16)])
def test_advice_is_a_mesh_of_more_devices_that_divides_the_model(num_devices, least):
    config = load_config("configs/sft_8b.yaml", "mesh.fsdp=1", "pack.num_rows=1", schema=SftConfig)
    run = PlannedSft.of(config, EIGHT_B)
    larger = on_fitting_mesh(run, DEVICES["b200"], next_power_of_two(num_devices))
    assert larger is not None and larger.update.mesh == MeshConfig(1, least, 1)
    advised = on_fitting_mesh(run, DEVICES["b200"], num_devices)
    assert advised is not None and num_devices <= advised.num_devices <= least


def test_a_cold_start_with_several_frame_budgets_is_planned_for_the_most_frames_and_traces_of_a_row():
    """A trace has 60 tokens a frame and 1,012 others. So 8,192 tokens hold traces of 64 and 32 frames, or six of 4."""

    def planned(*settings: str) -> PlannedSft:
        return PlannedSft.of(load_config("configs/sft_8b.yaml", *settings, schema=SftConfig), EIGHT_B)

    one, several = planned(), planned("video.frame_budgets=[64,4,8,16,32]")
    assert (one.max_frames, one.max_row_actions, one.needed_row_tokens) == (8 * 64, 512, 64 * 60 + 1012)
    assert (several.max_frames, several.max_row_actions) == (8 * 96, 6 * 512)
    assert several.needed_row_tokens == one.needed_row_tokens
    assert planned("video.frame_budgets=[33,40]", "pack.row_tokens=9000").max_frames == 8 * 3 * 33  # not 2 * 40
    assert "4 to 64 frames (video.frame_budgets)" in make_plan(several, DEVICES["cpu"]).assumptions[0]


@pytest.mark.slow
def test_a_larger_batch_of_sft_needs_more_memory_and_a_larger_step_does_not():
    run = PlannedSft.of(load_config("configs/sft_8b.yaml", "model.remat=full", schema=SftConfig), EIGHT_B)
    plan = make_plan(run, H100)
    peaks = [planned_memory(run.resized(num_rows=num_rows), H100).peak_bytes for num_rows in (8, 16, 32)]
    assert plan.memory.peak_bytes == peaks[0] < peaks[1] < peaks[2]
    assert make_plan(replace(run, rows_per_step=64), H100).memory == plan.memory


@pytest.mark.slow
def test_the_plan_of_sft_has_the_tokens_and_seconds_of_a_step(capsys, monkeypatch):
    out = sft_plan_text(capsys, monkeypatch)
    assert max(map(len, out.splitlines())) <= 100 and "per host" not in out
    assert re.search(r"tokens computed, in 32 rows of 8,192 +262,144\n", out)  # sft.rows_per_step=32
    assert "8 x 8,192 tokens fits" in out and "largest pack.row_tokens with pack.num_rows=8: " in out
    assert "decoding is not included: the up to 2,048 frames of a step" in out  # 32 rows of a trace with 64 frames


@pytest.mark.slow
def test_a_device_without_a_data_sheet_has_no_seconds(capsys, monkeypatch):
    settings = ("model.path=tiny", "data.train=traces.jsonl", "model.dtype=float32")
    out = sft_plan_text(capsys, monkeypatch, "--device", "cpu", *settings)
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
    out = sft_plan_text(capsys, monkeypatch, *settings)
    advice = re.findall(r"^  would fit: ([^,;\n]+)", out, re.MULTILINE)
    assert "DOES NOT FIT" in out and {change.partition("=")[0] for change in advice} == changed_keys
    for change in advice:
        assert " DOES NOT FIT" not in sft_plan_text(capsys, monkeypatch, *settings, *change.split())
