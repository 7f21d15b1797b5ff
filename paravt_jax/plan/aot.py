"""Compiles an update's programs ahead of time, without the devices.

The programs get shapes of parameters, optimizer state and batch instead of arrays. Nothing is loaded or computed.
"""

import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_port.adapters import adapter_shapes, add_adapter
from model_port.attention import allow_kernel
from model_port.config import ModelConfig
from model_port.loading import abstract_model, abstract_params, with_params
from model_port.sharding import placed
from paravt_jax.learner.ahead import Compiled, UpdateCompiler
from paravt_jax.learner.batch_shape import abstract_batch
from paravt_jax.learner.learner import opt_shardings, trained_filter
from paravt_jax.learner.losses import LossCoefs
from paravt_jax.learner.objectives import OldLogProbs, PolicyObjective, imitation, variant_of
from paravt_jax.learner.optim import numbers_at, optimizer
from paravt_jax.learner.packing import BatchShape
from paravt_jax.learner.programs import Params, TrainState
from paravt_jax.plan.collectives import Collective, collectives_of
from paravt_jax.plan.devices import DEVICES_OF_A_HOST
from paravt_jax.plan.flops import product_flops
from paravt_jax.plan.workload import PlannedUpdate


class NoRoom(Exception):
    """Raised if the compiler rejects a program because a device has too little memory."""


@dataclass(frozen=True)
class Program:
    """A compiled program's memory, in bytes per device, and its work."""

    name: str
    argument_bytes: int
    output_bytes: int  # without outputs that alias an argument
    temporary_bytes: int
    beside_bytes: int  # arrays on the device that are not arguments
    flops: float  # FLOPs of its matrix products, over all devices
    collectives: list[Collective] | None  # None: the compiler cannot print this program

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temporary_bytes + self.beside_bytes


def compiled_update(update: PlannedUpdate, model: ModelConfig, shape: BatchShape, mesh: Mesh) -> list[Program]:
    """Compiles the programs of a step with batches of this shape, two at a time."""
    learner, batch = abstract_learner(update, model, mesh), abstract_batch(shape, model, mesh)
    own, ref, masters = learner.state.params, learner.ref, learner.state.trainable
    moments, unread_ref = ((), ()) if update.optim.offload else (learner.state.opt_state, ref and ref.trainable)
    logp: Any = jax.ShapeDtypeStruct(batch.behavior_logp.shape, "float32", sharding=batch.behavior_logp.sharding)
    old = OldLogProbs(logp if update.scores_before else None, None if ref is None else logp)
    # Resident arrays that are not arguments, for programs with the policy's or the reference's parameters. In each, one
    # `masters` stands for the accumulated gradients, which have the same shapes.
    beside_own, beside_ref = (masters, moments, unread_ref), (masters, masters, moments)
    scored = [(own, beside_own)] * update.scores_before + ([] if ref is None else [(ref, beside_ref)])
    encoded = scored if update.optim.train_vision else [(own, beside_own)]
    with _cache_disabled(), ThreadPoolExecutor(max_workers=2) as pool:

        def start(function: Callable[..., Compiled], *arguments: Any) -> Future[Compiled]:
            return pool.submit(_with_room, function.__name__, lambda: function(*arguments))

        applying = start(learner.apply_gradients, batch, masters)
        jobs: list[tuple[Future[Compiled], Any]] = [
            (start(learner.encode_vision, params, batch), beside) for params, beside in encoded
        ]
        visuals = [learner.outputs(job.result()) for job, _ in jobs]
        visual, of_scores = (None, visuals) if update.optim.train_vision else (visuals[0], visuals * len(scored))
        jobs.append((start(learner.gradients, batch, visual, old), beside_own))
        for (params, beside), frames in zip(scored, of_scores, strict=True):
            jobs.append((start(learner.score, params, batch, frames), beside))
        jobs.append((applying, (own.frozen, unread_ref, batch, visual)))
        programs = [_program(job.result(), update.host_devices, beside=beside) for job, beside in jobs]
    # The learner encodes frames with a frozen tower twice: for old log-probs and for the gradients.
    return programs[:1] * (update.scores_before and not update.optim.train_vision) + programs


@contextmanager
def _cache_disabled() -> Iterator[None]:
    """Disables the compilation cache, because JAX cannot read programs back that were compiled without devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    min_s = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, min_s)


def abstract_learner(update: PlannedUpdate, model: ModelConfig, mesh: Mesh) -> UpdateCompiler:
    """Makes the sharded shapes of a learner's state."""
    settings, lora, loss = update.policy, update.lora, update.loss
    policy = abstract_model(model, update.compute(allow_kernel(settings.attention)))
    policy = with_params(policy, abstract_params(policy, settings.dtype if lora.rank else "float32", mesh))
    pairs = {path: jax.ShapeDtypeStruct(s, "float32") for path, s in adapter_shapes(model, lora.rank).items()}
    add_adapter(policy, lora, pairs, mesh)
    structure, masters, frozen = nnx.split(policy, trained_filter(policy, update.optim), ...)
    numbers = numbers_at(update.optim, 0, 1)
    adam = optimizer(numbers)
    opt_state = jax.tree.map(placed, jax.eval_shape(adam.init, masters), opt_shardings(adam, masters, mesh))
    ref_dtype = jnp.dtype(settings.dtype)
    ref = jax.tree.map(lambda leaf: leaf.update(dtype=ref_dtype), masters)
    count: Any = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, PartitionSpec()))
    return UpdateCompiler(
        structure,
        TrainState(masters, frozen, opt_state, count, count),
        Params(ref, frozen) if update.reads_reference else None,
        update.temperature,
        numbers,
        # Statistics per dialogue are small, so their number does not matter here.
        imitation if loss is None else PolicyObjective.of(loss, variant_of(loss), num_dialogues=1),
        None if loss is None else LossCoefs.of(loss),
        train_vision=update.optim.train_vision,
        scores_before=update.scores_before,
        mesh=mesh,
    )


def _program(compiled: Compiled, host_devices: int, *, beside: Any) -> Program:
    """Measures a compiled program. `beside` has arrays on the device that are not arguments."""
    memory = compiled.executable.memory_analysis()
    return Program(
        name=compiled.name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        beside_bytes=sum(map(_bytes_per_device, jax.tree.leaves(beside))),
        flops=product_flops(compiled.traced.jaxpr.jaxpr),
        collectives=_collectives(compiled.executable, host_devices),
    )


def _with_room(name: str, compile: Callable[[], Any]) -> Any:
    try:
        return compile()
    except JaxRuntimeError as problem:
        used = re.search(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm", str(problem))
        if used is None:
            raise
        raise NoRoom(f"{name} needs {used[1]} of {used[3]} {used[4]}iB, according to the compiler") from None


def _collectives(compiled: Any, host_devices: int) -> list[Collective] | None:
    try:
        return collectives_of(compiled.as_text(), host_devices or DEVICES_OF_A_HOST)
    except JaxRuntimeError:
        return None


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
