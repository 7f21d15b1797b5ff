"""What an update makes smaller, given log-probs and entropies at a batch's scored tokens: of RL, or of imitation.

An objective is part of a compiled program, so it is a value that compares equal to its like; its numbers are traced.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.losses import ClassSums, LossSums, class_sums, policy_loss, ratio_counts
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.settings import LossConfig, check_names
from paravt_jax.learner.variants import VARIANTS, StepCounts, Variant
from rollout.user_code import call_user_code, load_function

Scalar = Float[Array, ""]
# The loss, and sums to report, of log-probs and entropies.
Objective = Callable[[Float[Array, "B A"], Float[Array, "B A"], TrainBatch, Any], tuple[Scalar, Any]]


def variant_of(loss: LossConfig) -> Variant:
    """The function of the loss that `loss.kind` names, shipped or the user's; what is wrong with that one is said."""
    if not loss.is_own:
        return VARIANTS[loss.kind]
    function = load_function("loss.kind", loss.kind)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    check_names(loss.kind, loss.numbers, [parameter.name for parameter in parameters])
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in loss.numbers:
            raise ValueError(f"loss.kind={loss.kind} needs loss.numbers.{parameter.name}: it has no default there")
    return _contained(function)


@cache  # equal losses share a compiled program
def _contained(function: Variant) -> Variant:
    """Without SystemExit and the like, which would end a run as if all were well."""
    return wraps(function)(lambda *arguments, **numbers: call_user_code(lambda: function(*arguments, **numbers)))


class Known(NamedTuple):
    """Log-probs of a batch's scored tokens, where they are known from before the update."""

    prox_logp: Float[Array, "B A"] | None = None
    ref_logp: Float[Array, "B A"] | None = None


class PolicyNumbers(NamedTuple):
    loss: LossConfig
    counts: StepCounts
    known: Known


class PolicySums(NamedTuple):
    """What a batch adds to what is reported of a step."""

    loss: LossSums
    by_class: ClassSums
    ratio_counts: Float[Array, " H"]


@dataclass(frozen=True)
class PolicyObjective:
    variant: Variant
    num_dialogues: int  # 0 where the loss looks at no dialogue as a whole

    def __call__(
        self, policy_logp: Float[Array, "B A"], entropy: Float[Array, "B A"], batch: TrainBatch, numbers: PolicyNumbers
    ) -> tuple[Scalar, PolicySums]:
        prox_logp, ref_logp = numbers.known
        if prox_logp is None:
            # In the first update on fresh rollouts, the log-probs from before it are those of this very pass.
            prox_logp = jax.lax.stop_gradient(policy_logp)
        behavior_logp, loss_mask = jnp.asarray(batch.behavior_logp), jnp.asarray(batch.loss_mask)
        sums = policy_loss(
            numbers.loss,
            self.variant,
            policy_logp=policy_logp,
            prox_logp=prox_logp,
            behavior_logp=behavior_logp,
            advantage=jnp.asarray(batch.advantage),
            loss_mask=loss_mask,
            counts=numbers.counts,
            ref_logp=ref_logp,
            sequence_ids=jnp.asarray(batch.dialogue),
            num_sequences=self.num_dialogues,
        )
        by_class = class_sums(
            prox_logp=prox_logp,
            behavior_logp=behavior_logp,
            entropy=entropy,
            loss_mask=loss_mask,
            token_class=jnp.asarray(batch.token_class),
            num_classes=len(CLASSES),
        )
        ratios = ratio_counts(policy_logp=policy_logp, prox_logp=prox_logp, loss_mask=loss_mask)
        return sums.loss, PolicySums(sums, by_class, ratios)


def imitation(
    policy_logp: Float[Array, "B A"], entropy: Float[Array, "B A"], batch: TrainBatch, denominator: Scalar
) -> tuple[Scalar, Scalar]:
    """Maximum likelihood of the scored tokens."""
    total = -jnp.where(jnp.asarray(batch.loss_mask), policy_logp, 0.0).sum()
    return total / denominator, total
