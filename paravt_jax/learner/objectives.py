"""The objectives of an update: the policy loss of RL, or maximum likelihood for imitation.

An objective is static under jit, so equal objectives must compare equal; its inputs are traced.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.losses import (
    ClassSums,
    LossCoefs,
    LossSpec,
    LossSums,
    class_sums,
    policy_loss,
    ratio_counts,
)
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.learner.settings import LossConfig, check_names
from paravt_jax.learner.variants import VARIANTS, Number, SampledTokens, StepCounts, TokenLoss, Variant
from rollout.user_code import call_user_code, load_function

Scalar = Float[Array, ""]
# (log-probs, entropies, batch, inputs) → (loss, sums to report)
Objective = Callable[[Float[Array, "B A"], Float[Array, "B A"], TrainBatch, Any], tuple[Scalar, Any]]


def variant_of(loss: LossConfig) -> Variant:
    """Returns the loss function that `loss.name` names. Raises ValueError if the user's own function is invalid."""
    if not loss.is_own:
        return VARIANTS[loss.name]
    function = load_function("loss.name", loss.name)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    check_names(loss.name, loss.params, [parameter.name for parameter in parameters])
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in loss.params:
            raise ValueError(f"loss.name={loss.name} needs loss.params.{parameter.name}: it has no default there")
    return _guarded(function)


@cache  # so that equal losses share a compiled program
def _guarded(function: Variant) -> Variant:
    """Turns exceptions such as SystemExit into errors, because they would end the run with exit code 0."""

    @wraps(function)
    def guarded(tokens: SampledTokens, **params: Number) -> TokenLoss:
        result = call_user_code(lambda: function(tokens, **params))
        if not isinstance(result, TokenLoss) or jnp.shape(result.loss) != tokens.loss_mask.shape:
            raise ValueError(f"loss.name: expected a TokenLoss with a loss for each token, got {result!r}")
        return result

    return guarded


class OldLogProbs(NamedTuple):
    """Log-probs of a batch's scored tokens that were computed before the update."""

    prox_logp: Float[Array, "B A"] | None = None
    ref_logp: Float[Array, "B A"] | None = None


class PolicyInputs(NamedTuple):
    coefs: LossCoefs
    counts: StepCounts
    old: OldLogProbs


class PolicySums(NamedTuple):
    """A batch's contribution to the metrics of a step."""

    loss: LossSums
    by_class: ClassSums
    ratio_counts: Float[Array, " H"]


def sampled_tokens(
    policy_logp: Float[Array, "B A"], old: OldLogProbs, batch: TrainBatch, counts: StepCounts, num_dialogues: int
) -> SampledTokens:
    """The scored tokens of a batch. In the first update of a step, prox is the policy itself."""
    return SampledTokens(
        policy_logp=policy_logp,
        prox_logp=policy_logp if old.prox_logp is None else old.prox_logp,
        behavior_logp=jnp.asarray(batch.behavior_logp),
        advantage=jnp.asarray(batch.advantage),
        loss_mask=jnp.asarray(batch.loss_mask),
        counts=counts,
        ref_logp=old.ref_logp,
        sequence_ids=jnp.asarray(batch.dialogue),
        num_sequences=num_dialogues,
        episode_tokens=jnp.asarray(batch.episode_tokens),
        likelihood=jnp.asarray(batch.likelihood),
    )


@dataclass(frozen=True)
class PolicyObjective:
    spec: LossSpec
    num_dialogues: int  # 0 if the loss needs no sequences

    @classmethod
    def of(cls, loss: LossConfig, variant: Variant, num_dialogues: int) -> "PolicyObjective":
        return cls(LossSpec.of(loss, variant), num_dialogues if loss.needs_sequences else 0)

    def __call__(
        self, policy_logp: Float[Array, "B A"], entropy: Float[Array, "B A"], batch: TrainBatch, inputs: PolicyInputs
    ) -> tuple[Scalar, PolicySums]:
        tokens = sampled_tokens(policy_logp, inputs.old, batch, inputs.counts, self.num_dialogues)
        sums = policy_loss(self.spec, inputs.coefs, tokens)
        by_class = class_sums(tokens, entropy, jnp.asarray(batch.token_class), len(CLASSES))
        return sums.loss, PolicySums(sums, by_class, ratio_counts(tokens))


def imitation(
    policy_logp: Float[Array, "B A"], entropy: Float[Array, "B A"], batch: TrainBatch, denominator: Scalar
) -> tuple[Scalar, Scalar]:
    """The negative log-likelihood of the scored tokens."""
    total = -jnp.where(jnp.asarray(batch.loss_mask), policy_logp, 0.0).sum()
    return total / denominator, total
