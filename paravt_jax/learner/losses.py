"""The loss of PARA-GRPO over sampled tokens, as sums that micro-batches add up and the caller divides by one N.

    L = − Σ_t w_t · min(ratio_t · A_t, clip(ratio_t, 1 − clip_low, 1 + clip_high) · A_t) / N + kl_coef · Σ_t KL_t / N
    ratio_t = exp(policy − prox),  w_t = exp(prox − behavior)

All arrays have one entry per token, in any shape; what `loss_mask` leaves out may hold anything, NaN included. Only
`policy_logp` is differentiated. What corrects for the sampler (w, its cap, the geometric mask) concerns the policy
term; the KL term covers every loss token.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from paravt_jax.learner.settings import Decision, Denominator, KlEstimator, LossConfig, MismatchConfig, Ratio

TANGENT_FROM = 10.0  # log-ratios go on along the tangent of exp: e^10 is absurd already, and squares stay finite

# Under jit the coefficients of a LossConfig are traced, so that no value of theirs compiles a program of its own.
COEFFICIENTS = tuple(field.name for field in fields(LossConfig) if type(field.default) is float)
KINDS = tuple(field.name for field in fields(LossConfig) if field.name not in COEFFICIENTS)


def _traced(kinds: tuple[Any, ...], coefficients: Any) -> LossConfig:
    config = object.__new__(LossConfig)  # its checks are for numbers, and have been made
    vars(config).update(zip((*KINDS, *COEFFICIENTS), (*kinds, *coefficients), strict=True))
    return config


jax.tree_util.register_pytree_node(
    LossConfig,
    lambda config: ([getattr(config, name) for name in COEFFICIENTS], tuple(getattr(config, name) for name in KINDS)),
    _traced,
)

SequenceMeans = Callable[[Float[Array, "*t"]], Float[Array, "*t"]]  # see _sequence_means


class LossSums(NamedTuple):
    """Sums over the loss tokens of one call. Divided by N, `loss` is L; counts go by the number of loss tokens."""

    loss: Float[Array, ""]
    policy: Float[Array, ""]
    kl_ref: Float[Array, ""]  # always k3, so that runs compare; 0 without a reference
    behavior_kl: Float[Array, ""]  # k3 estimate of KL(behavior‖prox)
    num_tokens: Float[Array, ""]
    num_clipped: Float[Array, ""]  # where the clip took the ratio's gradient away
    num_capped: Float[Array, ""]  # w above the cap: masked or truncated
    num_geometric_masked: Float[Array, ""]


def policy_loss(
    config: LossConfig,
    *,
    policy_logp: Float[Array, "*t"],
    prox_logp: Float[Array, "*t"],
    behavior_logp: Float[Array, "*t"],
    advantage: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    ref_logp: Float[Array, "*t"] | None = None,
    sequence_ids: Int[Array, "*t"] | None = None,
    num_sequences: int = 0,
) -> LossSums:
    """The sums of a call. For the first update on fresh rollouts `prox_logp` may be `policy_logp` itself.

    `sequence_ids` (0 … num_sequences − 1) are needed by `ratio: sequence` and `geometric_mask`, and every sequence must
    lie whole in one call, or splitting a step would change it. A number out of range makes the loss NaN.

    DIFFERS: the sequence ratio is that of GSPO-token: its value is the sequence's, its gradient the token's own. With
    one advantage per sequence that is GSPO exactly (arXiv 2507.18071); with the anchor's, credit stays on its token.
    """
    if config.needs_sequences and (sequence_ids is None or num_sequences < 1):
        raise ValueError("loss.ratio=sequence and loss.geometric_mask=true need sequence_ids and num_sequences")
    known = isinstance(config.kl_coef, float)  # traced, it is the learner's, which holds a reference for every other
    if ref_logp is None and known and config.kl_coef and config.kl_in == "loss":
        raise ValueError(f"loss.kl_coef={config.kl_coef} with loss.kl_in=loss needs ref_logp; set loss.kl_coef=0")
    policy = _kept(policy_logp, loss_mask)
    prox, behavior, advantage = (
        stop_gradient(_kept(values, loss_mask)) for values in (prox_logp, behavior_logp, advantage)
    )

    def sequence_means(values: Float[Array, "*t"]) -> Float[Array, "*t"]:
        assert sequence_ids is not None
        return _sequence_means(values, loss_mask, sequence_ids, num_sequences)

    ratio = _ratio(config.ratio, policy, prox, sequence_means)
    weight, capped, outside = _weight(config, prox - behavior, loss_mask, sequence_means)
    unclipped = ratio * advantage
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage
    policy_sum = -jnp.sum(weight * jnp.minimum(unclipped, clipped))
    loss, kl_ref = policy_sum, jnp.zeros_like(policy_sum)
    if ref_logp is not None:
        ref = stop_gradient(_kept(ref_logp, loss_mask))
        kl_ref = stop_gradient(jnp.sum(k3(ref - policy)))
        if config.kl_in == "loss":
            loss += config.kl_coef * jnp.sum(_kl(config.kl_estimator, ref - policy))
    return LossSums(
        loss=loss,
        policy=policy_sum,
        kl_ref=kl_ref,
        behavior_kl=jnp.sum(k3(prox - behavior)),
        num_tokens=_count(loss_mask, policy),
        num_clipped=_count(clipped < unclipped, policy),
        num_capped=_count(capped, policy),
        num_geometric_masked=_count(outside, policy),
    )


def _ratio(
    kind: Ratio, policy: Float[Array, "*t"], prox: Float[Array, "*t"], sequence_means: SequenceMeans
) -> Float[Array, "*t"]:
    """How much likelier the policy makes each token than the policy before the update did."""
    if kind == "token":
        return _exp(policy - prox)
    return _exp(stop_gradient(sequence_means(policy - prox)) + policy - stop_gradient(policy))


def _weight(
    config: LossConfig,
    log_weight: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    sequence_means: SequenceMeans,
) -> tuple[Float[Array, "*t"], Bool[Array, "*t"], Bool[Array, "*t"]]:
    """What corrects for the sampler; the tokens over the cap, and those of sequences outside the geometric bounds."""
    weight, capped, outside = _exp(log_weight), jnp.zeros_like(loss_mask), jnp.zeros_like(loss_mask)
    if config.behavior_correction == "none":
        weight = jnp.ones_like(weight)
    else:
        capped = weight > config.behavior_cap
        weight = jnp.where(capped, config.behavior_cap if config.behavior_correction == "truncate" else 0.0, weight)
    if config.geometric_mask:
        mean = _exp(sequence_means(log_weight))
        outside = loss_mask & ((mean < config.geometric_low) | (mean > config.geometric_high))
        weight = jnp.where(jnp.isnan(mean), mean, jnp.where(outside, 0.0, weight))
    return stop_gradient(weight), capped, outside


def loss_denominator(kind: Denominator, *, num_loss_tokens: int, num_episodes: int, max_new_tokens: int) -> float:
    """The N of a step, the same for all its micro-batches and hosts.

    `tokens`: the loss tokens of the whole step, capped and masked ones included. `constant`: the episodes that the step
    asked for (missing and filtered ones included) times the most tokens that one may sample, so that neither the length
    of an answer nor what happened to others changes what a token weighs.
    """
    denominator = num_loss_tokens if kind == "tokens" else num_episodes * max_new_tokens
    if num_loss_tokens < 1 or denominator < 1:
        raise ValueError(
            f"a step of {num_loss_tokens} loss tokens, {num_episodes} episodes and {max_new_tokens} tokens each has no "
            f"denominator: skip its update"
        )
    return float(denominator)


def kl_penalties(
    config: LossConfig,
    *,
    prox_logp: Float[Array, "*t"],
    ref_logp: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    sequence_ids: Int[Array, "*t"],
    num_sequences: int,
) -> Float[Array, " E"]:
    """kl_coef times the KL of each whole sequence, a sum over its tokens, to be subtracted from its reward.

    Parts of a step add up: a sequence has 0 where it has no tokens.
    """
    kl = _kl(config.kl_estimator, _kept(ref_logp, loss_mask) - _kept(prox_logp, loss_mask))
    return stop_gradient(config.kl_coef * _sequence_sums(kl, loss_mask, sequence_ids, num_sequences))


def k3(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """q/p − 1 − log(q/p) of log_ratio = log(q/p): never negative, and KL(p‖q) in expectation under p.

    As a loss on p its expected gradient is that of KL(q‖p), which agrees with that of KL(p‖q) to first order.
    """
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    slope = jnp.expm1(below)  # expm1, because the terms cancel where engine and learner almost agree
    return slope - below + slope * (log_ratio - below)


class MismatchSums(NamedTuple):
    """How engine and learner differ, summed per class of tokens; micro-batches add up."""

    num_tokens: Float[Array, " C"]
    behavior_kl: Float[Array, " C"]  # k3 estimate of KL(behavior‖prox)
    abs_difference: Float[Array, " C"]  # |prox − behavior|


def mismatch_sums(
    *,
    prox_logp: Float[Array, "*t"],
    behavior_logp: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    token_class: Int[Array, "*t"],
    num_classes: int,
) -> MismatchSums:
    """Sums for each of the classes 0 … num_classes − 1; tokens of another class are in none."""
    difference = stop_gradient(_kept(prox_logp, loss_mask) - _kept(behavior_logp, loss_mask))
    return MismatchSums(
        *(
            _sequence_sums(values, loss_mask, token_class, num_classes)
            for values in (jnp.ones_like(difference), k3(difference), jnp.abs(difference))
        )
    )


def mismatch_decision(behavior_kl: float, config: MismatchConfig) -> Decision:
    """What a step with this mean behavior KL calls for; one that is no finite number stops the run."""
    if not math.isfinite(behavior_kl) or behavior_kl >= config.stop_kl:
        return "stop"
    if behavior_kl >= config.geometric_mask_kl:
        return "geometric_mask"
    return "warn" if behavior_kl >= config.warn_kl else "ok"


def _kept(values: Float[Array, "*t"], mask: Bool[Array, "*t"]) -> Float[Array, "*t"]:
    """Zero outside the mask, before any arithmetic: a NaN there would come back through the gradient of a later one."""
    return jnp.where(mask, values, 0.0)


def _exp(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """exp, and its tangent from TANGENT_FROM on: a clamp would take the gradient away, exp itself overflows."""
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    return jnp.exp(below) * (1 + (log_ratio - below))


def _kl(estimator: KlEstimator, ref_minus_policy: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """KL(policy‖ref) per token (Schulman's estimators). In expectation k1's gradient is 0, and k2's that of the KL."""
    if estimator == "k1":
        return -ref_minus_policy
    return jnp.square(ref_minus_policy) / 2 if estimator == "k2" else k3(ref_minus_policy)


def _sequence_sums(
    values: Float[Array, "*t"], mask: Bool[Array, "*t"], ids: Int[Array, "*t"], num: int
) -> Float[Array, " E"]:
    return jax.ops.segment_sum(_kept(values, mask).ravel(), ids.ravel(), num)


def _sequence_means(
    values: Float[Array, "*t"], mask: Bool[Array, "*t"], ids: Int[Array, "*t"], num: int
) -> Float[Array, "*t"]:
    """At every loss token the mean over its sequence's loss tokens, elsewhere 0; NaN for a number out of range."""
    counts = _sequence_sums(jnp.ones_like(values), mask, ids, num)
    means = _sequence_sums(values, mask, ids, num) / jnp.maximum(counts, 1)
    return _kept(means.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False), mask)


def _count(mask: Bool[Array, "*t"], like: Float[Array, "*t"]) -> Float[Array, ""]:
    return jnp.sum(mask, dtype=like.dtype)
