"""The compiled programs of an update: pure functions of model structure, arrays, batch and coefficients.

Static arguments are the model structure and the objective. Coefficients are traced, so learners
of the same model share programs, and a new coefficient needs no recompilation.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from model_port.inputs import VisionBatch
from model_port.model import VLModel
from model_port.sharding import constrain_params
from model_port.text import Visual
from paravt_jax.learner.head import token_scores
from paravt_jax.learner.objectives import Objective
from paravt_jax.learner.optim import Number, OptimNumbers, optimizer
from paravt_jax.learner.packing import TrainBatch

Structure = nnx.GraphDef[VLModel]


class Params(NamedTuple):
    trainable: nnx.State
    frozen: nnx.State


@flax.struct.dataclass
class TrainState:
    trainable: nnx.State  # float32 masters
    frozen: nnx.State
    opt_state: Any
    step: Int[Any, ""]  # number of updates, including skipped ones: the policy version
    num_bad: Int[Any, ""]  # consecutive skipped updates

    @property
    def params(self) -> Params:
        return Params(self.trainable, self.frozen)


@partial(jax.jit, static_argnums=0)
def encode_vision(structure: Structure, params: Params, vision: VisionBatch) -> Visual:
    return nnx.merge(structure, *params).encode_vision(vision)


@partial(jax.jit, static_argnums=0)
def score(
    structure: Structure, params: Params, batch: TrainBatch, visual: Visual | None, temperature: Number
) -> Float[Array, "B A"]:
    """Log-probs of the scored tokens."""
    return action_scores(nnx.merge(structure, *params), batch, visual, temperature)[0]


@partial(jax.jit, static_argnums=0, static_argnames="objective")
def gradients(
    structure: Structure,
    params: Params,
    batch: TrainBatch,
    visual: Visual | None,
    temperature: Number,
    inputs: Any,
    *,
    objective: Objective,
) -> tuple[nnx.State, Any]:
    """The batch's gradient, sharded like the parameters, with the objective's report and token counts of experts.

    `visual` is None if the vision tower runs inside the gradient, or if the batch has no frames.
    """

    def loss(trainable: nnx.State) -> tuple[Float[Array, ""], Any]:
        model = nnx.merge(structure, trainable, params.frozen)
        frames = model.encode_vision(batch.vision) if visual is None and batch.vision is not None else visual
        logp, entropy, expert_tokens = action_scores(model, batch, frames, temperature)
        value, report = objective(logp, entropy, batch, inputs)
        return value, (report, expert_tokens)

    grads, sums = jax.grad(loss, has_aux=True)(params.trainable)
    return constrain_params(grads), sums


@partial(jax.jit, donate_argnums=0)
def add(total: Any, own: Any) -> Any:
    """Adds two trees, reusing the arrays of the first."""
    return jax.tree.map(jnp.add, total, own)


@partial(jax.jit, donate_argnums=0)
def apply_gradients(state: TrainState, grads: nnx.State, numbers: OptimNumbers) -> tuple[TrainState, Float[Array, ""]]:
    """Takes an optimizer step; skips it if the gradient is not finite, so that a bad token cannot ruin the policy."""
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer(numbers).update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)

    def if_finite(new: Any, old: Any) -> Any:
        return jax.tree.map(partial(jnp.where, finite), new, old)

    state = replace(
        state,
        trainable=if_finite(trainable, state.trainable),
        opt_state=if_finite(opt_state, state.opt_state),
        step=state.step + 1,
        num_bad=jnp.where(finite, 0, state.num_bad + 1),
    )
    return state, grad_norm


def action_scores(
    model: VLModel, batch: TrainBatch, visual: Visual | None, temperature: Number
) -> tuple[Float[Array, "B A"], Float[Array, "B A"], Int[Array, "L X"] | None]:
    """Log-probs of scored tokens under log_softmax(z / temperature), their entropies, and token counts of experts."""
    hidden, expert_tokens = model.hidden_and_experts(batch.text, visual)
    chosen = jnp.take_along_axis(hidden, jnp.asarray(batch.source)[..., None], axis=1)
    head = model.text.head_kernel_vd[...]
    return *token_scores(chosen, head, jnp.asarray(batch.target), temperature), expert_tokens
