"""Compiles the programs of an update before there is a batch.

The programs get the same arguments as in the update, as shapes, so that the update finds them compiled.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from model_port.compiling import compiling
from model_port.sharding import on_mesh
from paravt_jax.learner import programs
from paravt_jax.learner.losses import LossCoefs
from paravt_jax.learner.objectives import OldLogProbs, PolicyInputs, PolicyObjective
from paravt_jax.learner.optim import OptimNumbers
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.programs import Params, Structure, TrainState
from paravt_jax.learner.settings import HEAD_CHUNK_TOKENS
from paravt_jax.learner.variants import StepCounts

COUNTS = StepCounts(1.0, 1.0, 1.0)  # traced: programs are the same with any counts


def shapes_of(tree: Any, memory: str | None = None) -> Any:
    """The tree with shapes instead of arrays, in another memory of their devices if given."""

    def shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = array.sharding if memory is None else array.sharding.with_memory_kind(memory)
        return _placed(array, sharding if array.committed else None)

    return jax.tree.map(shape_of, tree)


@dataclass(eq=False)
class UpdateCompiler:
    """The shapes of a learner's state, and the settings of its updates. It can compile in another thread."""

    structure: Structure
    state: TrainState
    ref: Params | None
    temperature: float
    numbers: OptimNumbers
    objective: PolicyObjective
    coefs: LossCoefs
    num_penalized: int  # dialogues, with KL in the reward; otherwise 0
    train_vision: bool
    scores_before: bool  # the policy's log-probs are computed before the update
    mesh: Mesh | None
    _num_done: int = 0

    def compile(self, batch: TrainBatch) -> None:
        """Compiles the programs of an update for batches of this shape."""
        own, ref = self.state.params, self.ref
        with on_mesh(self.mesh):
            visual = None if self.train_vision else self._vision(own, batch)
            old = OldLogProbs(
                self._score(own, batch, visual) if self.scores_before else None,
                None if ref is None else self._score(ref, batch, visual),
            )
            if self.num_penalized:
                self._penalties(batch, old)
            total = self._outputs(
                *self._compiled(
                    batch,
                    programs.gradients,
                    *(self.structure, own, batch, visual, self.temperature, PolicyInputs(self.coefs, COUNTS, old)),
                    objective=self.objective,
                    chunk_tokens=HEAD_CHUNK_TOKENS,
                )
            )
            self._compiled(batch, programs.add, total, total)
            state = replace(self.state, frozen=nnx.State({}))
            self._compiled(batch, programs.apply_gradients, state, total[0], self.numbers)

    @property
    def num_programs(self) -> int:
        num_scores = self.scores_before + (self.ref is not None)
        return 3 + num_scores + (num_scores if self.train_vision else 1) + (self.num_penalized > 0)

    def _vision(self, params: Params, batch: TrainBatch) -> Any:
        return self._outputs(*self._compiled(batch, programs.encode_vision, self.structure, params, batch.vision))

    def _score(self, params: Params, batch: TrainBatch, visual: Any) -> Any:
        visual = self._vision(params, batch) if self.train_vision else visual
        arguments = (self.structure, params, batch, visual, self.temperature)
        return self._outputs(*self._compiled(batch, programs.score, *arguments, chunk_tokens=HEAD_CHUNK_TOKENS))

    def _penalties(self, batch: TrainBatch, old: OldLogProbs) -> None:
        arguments = (self.coefs, old, replace(batch, vision=None), COUNTS)
        self._compiled(batch, programs.penalties, *arguments, num_dialogues=self.num_penalized)

    def _compiled(self, batch: TrainBatch, function: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """A program, lowered and compiled."""
        self._num_done += 1
        rows, tokens = batch.text.tokens.shape
        with compiling(f"update {self._num_done} of {self.num_programs} ({rows} x {tokens} tokens)"):
            lowered = function.lower(*arguments, **options)
            return lowered, lowered.compile()

    def _outputs(self, lowered: Any, compiled: Any) -> Any:
        """The shapes of a program's outputs. Without a mesh, arrays are not bound to a device."""
        if self.mesh is None:
            return lowered.out_info
        return jax.tree.map(_placed, lowered.out_info, compiled.output_shardings)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
