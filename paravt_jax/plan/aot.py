"""Compiles an update's programs ahead of time, without the devices.

The programs take shapes instead of arrays: parameters, optimizer state, a batch. Nothing is loaded or computed.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_port.adapters import adapter_shapes, add_adapter
from model_port.attention import allow_kernel
from model_port.config import ModelConfig
from model_port.loading import abstract_model, abstract_params, with_params
from model_port.sharding import on_mesh
from model_port.text import Visual
from paravt_jax.learner import programs
from paravt_jax.learner.batch_shape import BatchShape, abstract_batch
from paravt_jax.learner.learner import opt_shardings, trained_filter
from paravt_jax.learner.losses import LossCoefs, LossSpec
from paravt_jax.learner.objectives import OldLogProbs, PolicyInputs, PolicyObjective, imitation, variant_of
from paravt_jax.learner.optim import numbers_at, optimizer
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.programs import Params, TrainState
from paravt_jax.learner.settings import HEAD_CHUNK_TOKENS
from paravt_jax.learner.variants import StepCounts
from paravt_jax.plan.collectives import Collective, collectives_of
from paravt_jax.plan.flops import product_flops
from paravt_jax.plan.workload import PlannedUpdate


class NoRoom(Exception):
    """The compiler rejects a program that needs more memory than a device has."""


@dataclass(frozen=True)
class Program:
    """A compiled program's memory, in bytes per device, and its work."""

    name: str
    argument_bytes: int
    output_bytes: int  # without outputs that alias an argument
    temporary_bytes: int
    beside_bytes: int  # resident on the device, but not an argument
    flops: float  # of its matrix products, over all devices
    collectives: list[Collective] | None  # None: the compiler cannot print this program
    compile_s: float

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temporary_bytes + self.beside_bytes


def compiled_update(update: PlannedUpdate, model: ModelConfig, shape: BatchShape, mesh: Mesh) -> list[Program]:
    """Compiles the programs of a step with such batches, two at a time."""
    learner, batch = _AbstractLearner(update, model, mesh), abstract_batch(shape, model, mesh)
    own, ref = learner.params, learner.ref_params
    moments, unread_ref = ((), ()) if update.optim.offload else (learner.opt_state, learner.ref)
    logp: Any = jax.ShapeDtypeStruct(batch.behavior_logp.shape, "float32", sharding=batch.behavior_logp.sharding)
    old = OldLogProbs(logp if update.scores_before else None, None if ref is None else logp)
    # Resident arrays that are not arguments: for programs of the policy, and for programs of the reference.
    # The gradients are those of earlier batches.
    beside_own, beside_ref = (learner.grads, moments, unread_ref), (learner.masters, learner.grads, moments)
    with _nothing_written_to_cache(), ThreadPoolExecutor(max_workers=2) as pool:
        applying, visual, ref_visual = pool.submit(learner.apply_gradients), None, None
        jobs: list[tuple[Future[_Compiled], Any]] = []
        if not update.optim.train_vision:
            jobs.append((pool.submit(learner.encode_vision, own, batch), beside_own))
            visual = ref_visual = jobs[0][0].result().outputs()
        elif ref is not None:
            jobs.append((pool.submit(learner.encode_vision, ref, batch), beside_ref))
            ref_visual = jobs[0][0].result().outputs()
        jobs.append((pool.submit(learner.gradients, batch, visual, old), beside_own))
        if update.scores_before:
            jobs.append((pool.submit(learner.score, own, batch, visual), beside_own))
        if ref is not None:
            jobs.append((pool.submit(learner.score, ref, batch, ref_visual), beside_ref))
        jobs.append((applying, (learner.frozen, unread_ref, batch, visual)))
        return [job.result().program(beside=beside) for job, beside in jobs]


@contextmanager
def _nothing_written_to_cache() -> Iterator[None]:
    """JAX cannot read back programs that it compiled without their devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    min_s = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, min_s)


class _AbstractLearner:
    """A learner's state as sharded shapes, and its programs compiled for them."""

    def __init__(self, update: PlannedUpdate, model: ModelConfig, mesh: Mesh):
        self.update, self.mesh, settings, lora = update, mesh, update.policy, update.lora
        policy = abstract_model(model, update.compute(allow_kernel(settings.attention)))
        policy = with_params(policy, abstract_params(policy, settings.dtype if lora.rank else "float32", mesh))
        pairs = {path: jax.ShapeDtypeStruct(s, "float32") for path, s in adapter_shapes(model, lora.rank).items()}
        add_adapter(policy, lora, pairs, mesh)
        self.structure, self.masters, self.frozen = nnx.split(policy, trained_filter(policy, update.optim), ...)
        adam = optimizer(numbers_at(update.optim, 0, 1))
        places = opt_shardings(adam, self.masters, mesh)
        self.opt_state = jax.tree.map(_placed, jax.eval_shape(adam.init, self.masters), places)
        ref_dtype = jnp.dtype(settings.dtype)
        ref = jax.tree.map(lambda leaf: leaf.update(dtype=ref_dtype), self.masters)
        self.ref = ref if update.reads_reference else None

    @property
    def params(self) -> Params:
        return Params(self.masters, self.frozen)

    @property
    def ref_params(self) -> Params | None:
        return None if self.ref is None else Params(self.ref, self.frozen)

    @property
    def grads(self) -> nnx.State:
        return self.masters

    def encode_vision(self, params: Params, batch: TrainBatch) -> "_Compiled":
        return _compiled(self.mesh, programs.encode_vision, self.structure, params, batch.vision)

    def score(self, params: Params, batch: TrainBatch, visual: Visual | None) -> "_Compiled":
        arguments = (self.structure, params, batch, visual, self.update.temperature)
        return _compiled(self.mesh, programs.score, *arguments, chunk_tokens=HEAD_CHUNK_TOKENS)

    def gradients(self, batch: TrainBatch, visual: Visual | None, old: OldLogProbs) -> "_Compiled":
        objective, numbers = imitation, 1.0
        if (loss := self.update.loss) is not None:
            num_rows = len(batch.source)
            # Statistics per dialogue are a few numbers each, so their count does not matter here.
            spec = LossSpec.of(loss, variant_of(loss))
            objective = PolicyObjective(spec, num_rows if spec.needs_sequences else 0)
            numbers = PolicyInputs(LossCoefs.of(loss), StepCounts(1.0, 1.0, 1.0), old)
        return _compiled(
            self.mesh,
            programs.gradients,
            *(self.structure, self.params, batch, visual, self.update.temperature, numbers),
            objective=objective,
            chunk_tokens=HEAD_CHUNK_TOKENS,
        )

    def apply_gradients(self) -> "_Compiled":
        count = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(self.mesh, PartitionSpec()))
        state = TrainState(
            self.masters, nnx.State({}), self.opt_state, count, count
        )  # frozen parameters are not an argument
        return _compiled(self.mesh, programs.apply_gradients, state, self.grads, numbers_at(self.update.optim, 0, 1))


class _Compiled(NamedTuple):
    name: str
    traced: Any
    executable: Any
    compile_s: float

    def program(self, *, beside: Any) -> Program:
        """`beside`: arrays resident on the device that are not arguments."""
        memory = self.executable.memory_analysis()
        return Program(
            name=self.name,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            beside_bytes=sum(map(_bytes_per_device, jax.tree.leaves(beside))),
            flops=product_flops(self.traced.jaxpr.jaxpr),
            collectives=_collectives(self.executable),
            compile_s=self.compile_s,
        )

    def outputs(self) -> Any:
        """The program's outputs, as shapes with the compiler's shardings."""
        return jax.tree.map(_placed, self.traced.out_info, self.executable.output_shardings)


def _compiled(mesh: Mesh, function: Any, *args: Any, **kwargs: Any) -> _Compiled:
    name, start_s = function.__name__, time.perf_counter()
    with on_mesh(mesh):
        traced = function.trace(*args, **kwargs)
        executable = _with_room(name, traced.lower().compile)
    return _Compiled(name, traced, executable, time.perf_counter() - start_s)


def _with_room(name: str, compile: Callable[[], Any]) -> Any:
    try:
        return compile()
    except JaxRuntimeError as problem:
        used = re.search(r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm", str(problem))
        if used is None:
            raise
        raise NoRoom(f"{name} needs {used[1]} of {used[3]} {used[4]}iB, according to the compiler") from None


def _collectives(compiled: Any) -> list[Collective] | None:
    try:
        return collectives_of(compiled.as_text())
    except JaxRuntimeError:
        return None


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
