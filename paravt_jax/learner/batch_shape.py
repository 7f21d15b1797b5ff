"""Random models and batches of a given shape, to measure, trace and compile an update."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from model_port.adapters import add_adapter, new_adapter
from model_port.config import NO_ADAPTERS, LoraConfig, ModelConfig
from model_port.inputs import NOT_VISUAL, TextBatch, empty_vision, no_experts
from model_port.layers import Compute
from model_port.loading import abstract_model, abstract_params, with_params
from model_port.model import VLModel
from model_port.sharding import flat_params
from paravt_jax.learner.learner import row_sharding
from paravt_jax.learner.packing import BatchShape, TrainBatch


def random_model(
    config: ModelConfig,
    compute: Compute,
    lora: LoraConfig = NO_ADAPTERS,
    mesh: Mesh | None = None,
    dtype: str = "float32",
) -> VLModel:
    """Makes a sharded model with random weights. With adapters, its weights are frozen and in compute's dtype."""
    model, dtype = abstract_model(config, compute), compute.dtype if lora.rank else dtype
    places = {path: leaf.sharding for path, leaf in abstract_params(model, dtype, mesh).items()}

    def random_params() -> dict[str, jax.Array]:
        params = nnx.state(VLModel(config, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))), nnx.Param)
        return {path: leaf.astype(dtype) for path, leaf in flat_params(params).items()}

    model = with_params(model, jax.jit(random_params, out_shardings=None if mesh is None else places)())
    if lora.rank:
        add_adapter(model, lora, new_adapter(config, lora, seed=0), mesh)
    return model


def make_batch(shape: BatchShape, model: ModelConfig) -> TrainBatch:
    """Makes a batch of full rows, each with a single sequence and its frames at the start."""
    random = np.random.default_rng(0)
    rows, actions = (shape.num_rows, shape.row_tokens), (shape.num_rows, shape.row_actions)
    patches = (shape.num_frame_rows, shape.row_patches)
    plain = min(model.image_token_id, model.vision_start_token_id)
    positions = np.broadcast_to(np.arange(shape.row_tokens, dtype=np.int32), rows)
    merged = shape.num_frame_rows * shape.row_patches // model.vision.merge_unit
    num_visual = merged // shape.num_rows
    row_of_part = np.arange(shape.num_rows, dtype=np.int32) % (shape.num_rows // shape.num_parts)
    visual = np.where(positions < num_visual, positions + num_visual * row_of_part[:, None], NOT_VISUAL)
    text = TextBatch(
        tokens=random.integers(0, plain, rows).astype(np.int32),
        positions=np.repeat(positions[..., None], 3, axis=-1),
        segment_ids=np.ones(rows, np.int32),
        branch_ids=np.zeros(rows, np.int32),
        visual_index=visual.astype(np.int32),
        experts=no_experts(rows, model.text),
    )
    vision = replace(
        empty_vision(model.vision, *patches),
        patches=random.standard_normal((*patches, model.vision.patch_values), np.float32),
        segment_ids=np.ones(patches, np.int32),
        num_parts=shape.num_parts,
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
        episode_tokens=np.ones(actions, np.int32),
        likelihood=np.zeros(actions, np.float32),
    )


def abstract_batch(shape: BatchShape, model: ModelConfig, mesh: Mesh | None) -> TrainBatch:
    """Makes the shapes of a batch from a single row."""
    batch = make_batch(replace(shape, num_rows=1, num_frame_rows=1, num_parts=1), model)
    frames: Any = jax.tree.map(partial(_abstract, mesh, shape.num_frame_rows), batch.vision)
    vision = replace(frames, num_parts=shape.num_parts)
    return replace(jax.tree.map(partial(_abstract, mesh, shape.num_rows), batch), vision=vision)


def shapes_of_batch(batch: TrainBatch, mesh: Mesh | None) -> TrainBatch:
    """Replaces the arrays of a batch of all hosts by their shapes."""
    return jax.tree.map(lambda array: _abstract(mesh, len(array), array), batch)


def _abstract(mesh: Mesh | None, num_rows: int, row: np.ndarray) -> Any:
    sharding = None if mesh is None else row_sharding(num_rows, mesh)
    return jax.ShapeDtypeStruct((num_rows, *row.shape[1:]), row.dtype, sharding=sharding)
