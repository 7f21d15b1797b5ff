"""Compiles the programs of an update ahead of the first batch.

The programs get the shapes of the update's arguments, so that the update finds them in the compilation cache.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from model_port.compiling import compiling
from model_port.sharding import on_mesh, placed
from paravt_jax.learner import programs
from paravt_jax.learner.losses import LossCoefs
from paravt_jax.learner.objectives import Objective, OldLogProbs, PolicyInputs
from paravt_jax.learner.optim import OptimNumbers
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.programs import Params, Structure, TrainState
from paravt_jax.learner.variants import StepCounts

COUNTS = StepCounts(1.0, 1.0, 1.0)  # any values: counts are traced, so they do not change the programs


class Compiled(NamedTuple):
    """A traced and compiled program."""

    name: str
    traced: Any
    executable: Any


@dataclass(eq=False)
class UpdateCompiler:
    """Compiles a learner's update programs from the shapes of its state. Another thread can run it."""

    structure: Structure
    state: TrainState
    ref: Params | None
    temperature: float
    numbers: OptimNumbers
    objective: Objective
    coefs: LossCoefs | None  # None: imitation
    train_vision: bool
    scores_before: bool  # the policy's log-probs are computed before the update
    mesh: Mesh | None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of the programs

    def compile(self, batch: TrainBatch) -> None:
        """Compiles the programs of an update for batches of this shape, several at a time."""
        own, ref, logp = self.state.params, self.ref, batch.behavior_logp  # all log-probs have this shape
        old = OldLogProbs(logp if self.scores_before else None, None if ref is None else logp)
        scoring = [own] * self.scores_before + ([] if ref is None else [ref])
        frozen = batch.vision is not None and not self.train_vision
        with ThreadPoolExecutor() as pool:
            applied = pool.submit(self.apply_gradients, batch, self.state.trainable)  # shaped as the gradients are
            visual = self.outputs(self.encode_vision(own, batch)) if frozen else None
            summed = pool.submit(self._sum_of_gradients, batch, visual, old)
            for params in scoring:
                self._logp(params, batch, visual)
        summed.result()
        applied.result()

    @property
    def num_programs(self) -> int:
        num_scores = self.scores_before + (self.ref is not None)
        return 3 + num_scores + (num_scores if self.train_vision else 1)

    def encode_vision(self, params: Params, batch: TrainBatch) -> Compiled:
        return self._compiled(batch, programs.encode_vision, self.structure, params, batch.vision)

    def score(self, params: Params, batch: TrainBatch, visual: Any) -> Compiled:
        return self._compiled(batch, programs.score, self.structure, params, batch, visual, self.temperature)

    def gradients(self, batch: TrainBatch, visual: Any, old: OldLogProbs) -> Compiled:
        inputs = 1.0 if self.coefs is None else PolicyInputs(self.coefs, COUNTS, old)
        return self._compiled(
            batch,
            programs.gradients,
            *(self.structure, self.state.params, batch, visual, self.temperature, inputs),
            objective=self.objective,
        )

    def apply_gradients(self, batch: TrainBatch, grads: nnx.State) -> Compiled:
        state = replace(self.state, frozen=nnx.State({}))  # frozen weights are not an argument
        return self._compiled(batch, programs.apply_gradients, state, grads, self.numbers)

    def outputs(self, compiled: Compiled) -> Any:
        """The shapes of a program's outputs. Without a mesh they have no sharding."""
        if self.mesh is None:
            return compiled.traced.out_info
        return jax.tree.map(placed, compiled.traced.out_info, compiled.executable.output_shardings)

    def _sum_of_gradients(self, batch: TrainBatch, visual: Any, old: OldLogProbs) -> Compiled:
        total = self.outputs(self.gradients(batch, visual, old))
        return self._compiled(batch, programs.add, total, total)

    def _logp(self, params: Params, batch: TrainBatch, visual: Any) -> Compiled:
        """Compiles scoring. If the vision tower is trained, it encodes the frames here, outside the gradient."""
        if self.train_vision:
            visual = self.outputs(self.encode_vision(params, batch))
        return self.score(params, batch, visual)

    def _compiled(self, batch: TrainBatch, function: Any, *arguments: Any, **options: Any) -> Compiled:
        rows, tokens = batch.text.tokens.shape
        purpose = f"update {next(self._numbers)} of {self.num_programs} ({rows} x {tokens} tokens)"
        with on_mesh(self.mesh), compiling(purpose):
            traced = function.trace(*arguments, **options)
            return Compiled(function.__name__, traced, traced.lower().compile())
