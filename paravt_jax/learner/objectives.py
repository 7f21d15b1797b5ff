"""What an update makes smaller, given the log-probs of a batch's scored tokens: PARA-GRPO's loss, or that of imitation.

An objective is part of a compiled program, so it is a value that compares equal to its like; its numbers are traced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.losses import LossSums, MismatchSums, mismatch_sums, policy_loss
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.settings import LossConfig

Scalar = Float[Array, ""]
Objective = Callable[[Float[Array, "B A"], TrainBatch, Any], tuple[Scalar, Any]]  # the loss, and sums to report


class Known(NamedTuple):
    """Log-probs of a batch's scored tokens, where they are known from before the update."""

    prox_logp: Float[Array, "B A"] | None = None
    ref_logp: Float[Array, "B A"] | None = None


class PolicyNumbers(NamedTuple):
    loss: LossConfig
    denominator: float
    known: Known


@dataclass(frozen=True)
class PolicyObjective:
    num_dialogues: int  # 0 where the loss looks at no dialogue as a whole

    def __call__(
        self, policy_logp: Float[Array, "B A"], batch: TrainBatch, numbers: PolicyNumbers
    ) -> tuple[Scalar, tuple[LossSums, MismatchSums]]:
        prox_logp, ref_logp = numbers.known
        if prox_logp is None:
            # In the first update on fresh rollouts, the log-probs from before it are those of this very pass.
            prox_logp = jax.lax.stop_gradient(policy_logp)
        behavior_logp, loss_mask = jnp.asarray(batch.behavior_logp), jnp.asarray(batch.loss_mask)
        sums = policy_loss(
            numbers.loss,
            policy_logp=policy_logp,
            prox_logp=prox_logp,
            behavior_logp=behavior_logp,
            advantage=jnp.asarray(batch.advantage),
            loss_mask=loss_mask,
            ref_logp=ref_logp,
            sequence_ids=jnp.asarray(batch.dialogue),
            num_sequences=self.num_dialogues,
        )
        mismatch = mismatch_sums(
            prox_logp=prox_logp,
            behavior_logp=behavior_logp,
            loss_mask=loss_mask,
            token_class=jnp.asarray(batch.token_class),
            num_classes=len(CLASSES),
        )
        return sums.loss / numbers.denominator, (sums, mismatch)


def imitation(policy_logp: Float[Array, "B A"], batch: TrainBatch, denominator: Scalar) -> tuple[Scalar, Scalar]:
    """Maximum likelihood of the scored tokens."""
    total = -jnp.where(jnp.asarray(batch.loss_mask), policy_logp, 0.0).sum()
    return total / denominator, total
