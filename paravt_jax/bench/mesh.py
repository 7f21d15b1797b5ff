"""One update of the policy on every mesh of N devices: seconds, tokens, memory, beside a single device.

Every part of a mesh that rows are split over gets as many rows, so the work grows with data and fsdp. Efficiency is a
device's tokens a second against those of one device alone; the devices of a CPU share its cores. Memory is the
compiler's own analysis of the largest program, beside the plan's estimate of the same.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from model_port.config import PRESETS, ModelConfig, preset
from paravt_jax.bench.learner import MODELS

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from paravt_jax.config import Config
    from paravt_jax.learner.learner import Learner
    from paravt_jax.learner.packing import TrainBatch
    from paravt_jax.plan.memory import BatchShape
    from paravt_jax.plan.plan import Plan

CPU_DEVICES = 8  # by default, where there is no accelerator
PROGRAM_PHASES = ("backward pass, a layer", "backward pass, the head")  # of the plan: those of the largest program
FRAMES_OF_A_ROW = 4
MIB, GIB = 2**20, 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=[*MODELS, *PRESETS], default="tiny")
    parser.add_argument("--devices", type=int, metavar="N", help=f"default: all; on a CPU, {CPU_DEVICES}")
    parser.add_argument("--rows", type=int, default=1, help="for every part that rows are split over (default 1)")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--remat", choices=["none", "full", "dots", "attention", "offload"], default="full")
    parser.add_argument("--repeats", type=int, default=5, help="timed updates; the median counts")
    parser.add_argument("--plan-only", action="store_true", help="estimate, and run nothing")
    parser.add_argument("--device", default="h100", help="for --plan-only: the accelerator (default h100)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("devices", "rows", "row_tokens", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.row_tokens < 64:
        raise ValueError(f"--row-tokens {args.row_tokens} must be at least 64, the tokens of a frame and a few more")
    model = MODELS[args.model]() if args.model in MODELS else preset(args.model)
    settings = {name: getattr(args, name) for name in ("model", "rows", "row_tokens", "dtype", "remat")}
    if args.plan_only:
        return {**settings, "device": args.device, "rows_planned": _planned(args, model)}
    count = args.devices or CPU_DEVICES
    # Before jax starts a backend. The flag concerns CPUs only, and the last one counts.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    import jax

    devices = jax.devices()
    num_devices = args.devices or len(devices)
    if num_devices > len(devices):
        raise ValueError(f"--devices {num_devices}: there are {len(devices)} of {devices[0].device_kind}")
    rows = []
    for shape in dict.fromkeys([(1, 1, 1), *mesh_shapes(num_devices)]):
        rows.append({"mesh": shape, **_measured(args, model, shape)})
        if "update_s" in rows[-1]:
            rows[-1]["efficiency"] = rows[-1]["device_tokens_per_s"] / rows[0]["device_tokens_per_s"]
        print(_line(_cells(rows[-1])), file=sys.stderr, flush=True)
    return {**settings, "device": devices[0].device_kind, "rows_measured": rows}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    planned = "rows_planned" in result
    head = PLANNED_HEAD if planned else MEASURED_HEAD
    cells = [_planned_cells(row) for row in result["rows_planned"]] if planned else map(_cells, result["rows_measured"])
    title = (
        f"{result['model']}, {result['dtype']}, remat {result['remat']}, {result['rows']} x {result['row_tokens']} "
        f"tokens for each part of the rows, {result['device']}"
    )
    if planned:
        title += "; seconds are FLOPs at a part of the peak that is the same for every mesh"
    return "\n".join([title, "", _line(head), "|---" * len(head) + "|", *map(_line, cells)])


MEASURED_HEAD = (
    "data x fsdp x tensor",
    "tokens",
    "compile s",
    "update s",
    "tokens/s a device",
    "efficiency",
    "MiB",
    "MiB by plan",
)
PLANNED_HEAD = ("data x fsdp x tensor", "peak GiB", "always GiB", "fits", "longest row", "update s")


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: dict[str, Any]) -> list[str]:
    name = " x ".join(map(str, row["mesh"]))
    if "problem" in row:
        return [name, row["problem"], *[""] * (len(MEASURED_HEAD) - 2)]
    return [
        name,
        str(row["tokens"]),
        f"{row['compile_s']:.1f}",
        f"{row['update_s']:.3f}",
        f"{row['device_tokens_per_s']:.0f}",
        f"{row['efficiency']:.2f}",
        f"{row['compiled_bytes'] / MIB:.1f}",
        f"{row['planned_bytes'] / MIB:.1f}",
    ]


def _planned_cells(row: dict[str, Any]) -> list[str]:
    name = " x ".join(map(str, row["mesh"]))
    if "problem" in row:
        return [name, row["problem"], *[""] * (len(PLANNED_HEAD) - 2)]
    known = row["fits"] is not None
    return [
        name,
        f"{row['peak_bytes'] / GIB:.1f}",
        f"{row['resident_bytes'] / GIB:.1f}",
        ("yes" if row["fits"] else "no") if known else "",
        str(row["longest_row_tokens"] or "none") if known else "",
        "" if row["update_s"] is None else f"{row['update_s']:.2f}",
    ]


def mesh_shapes(num_devices: int) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) of so many devices."""
    for tensor in range(1, num_devices + 1):
        for data in range(1, num_devices // tensor + 1):
            if num_devices % (data * tensor) == 0:
                yield data, num_devices // (data * tensor), tensor


def config_of(
    shape: tuple[int, int, int],
    *,
    rows: int,
    row_tokens: int,
    dtype: Any = "float32",
    remat: Any = "full",
    **sections: Any,
) -> "Config":
    """A run whose batches have so many rows for every part of the mesh that rows are split over."""
    from paravt_jax.config import Config, EngineConfig, MeshConfig, PackConfig, PolicyConfig, TrainConfig, VideoConfig
    from paravt_jax.learner.settings import LossConfig
    from paravt_jax.rewards.settings import RewardConfig
    from rollout.episode import EpisodeConfig

    mesh = MeshConfig(*shape)
    num_rows = rows * mesh.num_row_parts
    given: dict[str, Any] = {
        "model": PolicyConfig(dtype=dtype, remat=remat),
        "mesh": mesh,
        "engine": EngineConfig(kind="sglang"),  # elsewhere
        "video": VideoConfig(frame_budgets=[FRAMES_OF_A_ROW]),
        "reward": RewardConfig(tool_reward=False),
        "rollout": EpisodeConfig(
            dispatch="none", max_context_tokens=row_tokens, max_new_tokens=max(1, row_tokens // 8)
        ),
        "loss": LossConfig(kl_coef=0.0),
        "pack": PackConfig(row_tokens, num_rows),
        "train": TrainConfig(prompts_per_step=num_rows, group_size=2),
    }
    return Config(**given | sections)


def _planned(args: argparse.Namespace, model: ModelConfig) -> list[dict[str, Any]]:
    from paravt_jax.plan.plan import DEVICES, make_plan

    if args.device not in DEVICES:
        raise ValueError(f"--device {args.device} is not known; known are {', '.join(DEVICES)}")
    rows = []
    for shape in mesh_shapes(args.devices or CPU_DEVICES):
        print(f"mesh {' x '.join(map(str, shape))}", file=sys.stderr, flush=True)
        config = config_of(shape, rows=args.rows, row_tokens=args.row_tokens, dtype=args.dtype, remat=args.remat)
        try:
            plan = make_plan(config, model, device=DEVICES[args.device])
        except ValueError as problem:
            rows.append({"mesh": shape, "problem": str(problem)})
            continue
        rows.append(
            {
                "mesh": shape,
                "peak_bytes": plan.memory.peak_bytes,
                "resident_bytes": sum(plan.memory.resident.values()),
                "fits": plan.fit.fits,
                "longest_row_tokens": plan.fit.row_tokens,
                "update_s": plan.update_s,
            }
        )
    return rows


def _measured(args: argparse.Namespace, model: ModelConfig, shape: tuple[int, int, int]) -> dict[str, Any]:
    from model_port.sharding import make_mesh
    from paravt_jax.learner.learner import StepPart
    from paravt_jax.learner.variants import StepCounts
    from paravt_jax.plan.plan import DEVICES, make_plan

    config = config_of(shape, rows=args.rows, row_tokens=args.row_tokens, dtype=args.dtype, remat=args.remat)
    try:
        plan = make_plan(config, model, device=DEVICES["cpu"])
    except ValueError as problem:
        return {"problem": str(problem)}
    mesh = make_mesh(*shape) if config.mesh.num_devices > 1 else None
    learner, batch = make_learner(config, model, mesh), make_batch(plan.batch, model, config.mesh.num_row_parts)
    start = time.perf_counter()
    programs = compiled_programs(learner, batch)
    compile_s = time.perf_counter() - start
    seconds = []
    for turn in range(args.repeats + 1):
        start = time.perf_counter()
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], config.pack.num_rows)
        if turn:  # the first warms up
            seconds.append(time.perf_counter() - start)
    tokens = batch.text.tokens.size
    update_s = statistics.median(seconds)
    return {
        "tokens": tokens,
        "compile_s": compile_s,
        "update_s": update_s,
        "device_tokens_per_s": tokens / update_s / config.mesh.num_devices,
        "compiled_bytes": max(map(program_bytes, programs.values())),
        "planned_bytes": planned_program_bytes(plan),
    }


def make_learner(config: "Config", model: ModelConfig, mesh: "Mesh | None") -> "Learner":
    """Of random weights, made where they belong."""
    import jax
    from flax import nnx

    from model_port.adapters import add_adapter, new_adapter
    from model_port.layers import Compute
    from model_port.loading import abstract_model, abstract_params, with_params
    from model_port.model import Qwen3VL
    from model_port.sharding import flat_params
    from paravt_jax.learner.learner import Learner

    policy = abstract_model(model, Compute(config.model.dtype, config.model.attention, remat=config.model.remat))
    dtype = config.model.dtype if config.lora.rank else "float32"
    places = {path: leaf.sharding for path, leaf in abstract_params(policy, dtype, mesh).items()}

    def random_params() -> dict[str, jax.Array]:
        made = flat_params(nnx.state(Qwen3VL(model, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))), nnx.Param))
        return {path: leaf.astype(dtype) for path, leaf in made.items()}

    params = jax.jit(random_params, out_shardings=None if mesh is None else places)()
    policy = with_params(policy, params)
    if config.lora.rank:
        add_adapter(policy, config.lora, new_adapter(model, config.lora, seed=0), mesh)
    return Learner(
        policy,
        config.optim,
        config.loss,
        temperature=config.rollout.temperature,
        mesh=mesh,
    )


def make_batch(shape: "BatchShape", model: ModelConfig, num_parts: int = 1) -> "TrainBatch":
    """Full rows of one sequence each, which begin with as many frames as there are for a row."""
    from model_port.inputs import NOT_VISUAL, TextBatch, VisionBatch
    from paravt_jax.learner.packing import TrainBatch

    random = np.random.default_rng(0)
    rows, actions = (shape.num_rows, shape.row_tokens), (shape.num_rows, shape.row_actions)
    patches = (shape.num_frame_rows, shape.row_patches)
    plain = min(model.image_token_id, model.vision_start_token_id)
    place = np.broadcast_to(np.arange(shape.row_tokens, dtype=np.int32), rows)
    merged = shape.num_frame_rows * shape.row_patches // model.vision.merge_unit
    shown = merged // shape.num_rows
    row_of_part = np.arange(shape.num_rows, dtype=np.int32) % (shape.num_rows // num_parts)
    visual = np.where(place < shown, place + shown * row_of_part[:, None], NOT_VISUAL)
    text = TextBatch(
        tokens=random.integers(0, plain, rows).astype(np.int32),
        positions=np.repeat(place[..., None], 3, axis=-1),
        segment_ids=np.ones(rows, np.int32),
        branch_ids=np.zeros(rows, np.int32),
        visual_index=visual.astype(np.int32),
    )
    vision = VisionBatch(
        patches=random.standard_normal((*patches, model.vision.patch_values), np.float32),
        segment_ids=np.ones(patches, np.int32),
        positions=np.zeros((*patches, 2), np.int32),
        interp_index=np.zeros((*patches, 4), np.int32),
        interp_weight=np.full((*patches, 4), 0.25, np.float32),
        num_parts=num_parts,
    )
    return TrainBatch(
        text=text,
        vision=vision,
        source=np.sort(random.integers(0, shape.row_tokens, actions)).astype(np.int32),
        target=random.integers(0, plain, actions).astype(np.int32),
        loss_mask=np.ones(actions, bool),
        behavior_logp=np.full(actions, -np.log(model.text.vocab_size), np.float32),
        advantage=random.standard_normal(actions, np.float32),
        token_class=np.zeros(actions, np.int32),
        dialogue=np.broadcast_to(np.arange(shape.num_rows, dtype=np.int32)[:, None], actions),
    )


def compiled_programs(learner: "Learner", batch: "TrainBatch") -> dict[str, Any]:
    """The programs of one update by their names in learner.programs; the update is made on the way."""
    import jax

    from paravt_jax.learner import programs
    from paravt_jax.learner.learner import StepPart
    from paravt_jax.learner.variants import StepCounts

    compiled: dict[str, Any] = {}

    def watched(name: str, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            compiled[name] = function.lower(*args, **kwargs).compile()
            return function(*args, **kwargs)

        return call

    functions = {name: value for name, value in vars(programs).items() if isinstance(value, jax.stages.Wrapped)}
    for name, function in functions.items():
        setattr(programs, name, watched(name, function))
    try:
        learner.update([StepPart([batch], StepCounts(1.0, 1.0, 1.0))], len(batch.text.tokens))
    finally:
        for name, function in functions.items():
            setattr(programs, name, function)
    return compiled


def program_bytes(program: Any) -> int:
    """What a compiled program needs on a device, its arguments included."""
    memory = program.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes


def planned_program_bytes(plan: "Plan") -> int:
    """The plan's estimate of the same for the largest program, which has the weights and no moments."""
    phases = [phase.num_bytes for phase in plan.memory.phases if phase.name in PROGRAM_PHASES]
    resident = plan.memory.resident
    return resident["masters, float32"] + resident.get("frozen weights", 0) + max(phases)
