"""Builds the benchmarked case: a run's config from a few flags, its learner, and a training step."""

import argparse
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from model_port.config import ModelConfig
from paravt_jax.config import Config, EngineConfig, MeshConfig, PackConfig, PolicyConfig, TrainConfig, VideoConfig
from paravt_jax.learner.batch_shape import random_model
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.settings import LossConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.plan.meshes import mesh_shapes
from paravt_jax.plan.workload import PlannedUpdate, Step
from paravt_jax.rewards.settings import RewardConfig
from rollout.episode_config import EpisodeConfig

FRAMES_OF_A_ROW = 4


def shapes_of(args: argparse.Namespace, num_devices: int) -> list[tuple[int, int, int]]:
    """The mesh of --mesh, or all meshes."""
    if args.mesh is None:
        return list(mesh_shapes(num_devices))
    shapes = [shape for shape in mesh_shapes(num_devices) if ",".join(map(str, shape)) == args.mesh]
    if not shapes:
        raise ValueError(
            f"--mesh {args.mesh} must be data,fsdp,tensor with a product of {num_devices}, the learner's devices, for "
            f"example 1,{num_devices},1"
        )
    return shapes


def name_of(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def config_of(
    shape: tuple[int, int, int],
    *,
    rows: int,
    row_tokens: int,
    dtype: Any = "float32",
    remat: Any = "full",
    **sections: Any,
) -> Config:
    """The config of a run with `rows` rows per data and fsdp shard of the mesh."""
    mesh = MeshConfig(*shape)
    num_rows = rows * mesh.num_row_parts
    defaults: dict[str, Any] = {
        "model": PolicyConfig(dtype=dtype, remat=remat),
        "mesh": mesh,
        "engine": EngineConfig(kind="sglang"),  # the engine is on other devices
        "video": VideoConfig(frame_budgets=[], overview_frames=FRAMES_OF_A_ROW),
        "reward": RewardConfig(tool="none"),
        "rollout": EpisodeConfig(
            dispatch="none", max_context_tokens=row_tokens, max_new_tokens=max(1, row_tokens // 8)
        ),
        "loss": LossConfig(kl_coef=0.0),
        "pack": PackConfig(row_tokens, num_rows),
        "train": TrainConfig(prompts_per_step=rows, group_size=2),  # so that a part may have the frames of all episodes
    }
    return Config(**defaults | sections)


def make_learner(update: PlannedUpdate, model: ModelConfig, mesh: Mesh | None) -> Learner:
    """Makes a learner with random weights."""
    policy = random_model(model, update.compute(update.policy.attention), update.lora, mesh)
    loss = update.loss or LossConfig(kl_coef=0.0)
    return Learner(policy, update.optim, loss, temperature=update.temperature, mesh=mesh)


def take_step(learner: Learner, update: PlannedUpdate, batch: TrainBatch, step: Step) -> None:
    """Runs a training step: old log-probs if the run computes them, then the updates."""
    batches = [batch] * step.num_batches
    if update.loss is None:
        learner.imitate(batches, float(batch.loss_mask.sum()) * step.num_batches)
        return
    old = [learner.old_log_probs(each) for each in batches] if update.scores_before else None
    parts = []
    for first in range(step.num_updates):
        old_logp = None if old is None else old[first :: step.num_updates]
        parts.append(StepPart(batches[first :: step.num_updates], StepCounts(1.0, 1.0, 1.0), old_logp))
    learner.update(parts, len(batch.text.tokens))
