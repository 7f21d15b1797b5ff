"""The loss of a step over its sampled tokens, in parts that micro-batches add up.

    L = Σ_t share_t · (w_t · loss_t + kl_coef · KL_t),  w_t = exp(prox − behavior)

loss_t and share_t are those of the kind of loss (variants.py); for PARA-GRPO, with N loss tokens in the step,

    loss_t = −min(ratio_t · A_t, clip(ratio_t, 1 − clip_low, 1 + clip_high) · A_t),  share_t = 1 / N

All arrays have one entry per token, in any shape; what `loss_mask` leaves out may hold anything, NaN included. Only
`policy_logp` is differentiated. What corrects for the sampler (w, its cap, the geometric mask) concerns the policy
term; the KL term covers every loss token. What is capped or masked still counts in N: a step of which the correction
takes half away moves the policy half as far, not its other half twice as far.
"""

import math
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from paravt_jax.learner.settings import Decision, KlEstimator, LossConfig, MismatchConfig
from paravt_jax.learner.variants import (
    TANGENT_FROM,
    SampledTokens,
    StepCounts,
    TokenLoss,
    Variant,
    bounded_exp,
    kept,
    segment_sums,
)

# Under jit the coefficients of a LossConfig are traced, so that no value of theirs compiles a program of its own.
COEFFICIENTS = tuple(field.name for field in fields(LossConfig) if type(field.default) is float)
KINDS = tuple(field.name for field in fields(LossConfig) if field.name not in (*COEFFICIENTS, "numbers"))
TRACED = (*COEFFICIENTS, "all_numbers")


def _traced(kinds: tuple[Any, ...], coefficients: Any) -> LossConfig:
    config = object.__new__(LossConfig)  # its checks are for numbers, and have been made
    vars(config).update(zip((*KINDS, *TRACED), (*kinds, *coefficients), strict=True))
    return config


jax.tree_util.register_pytree_node(
    LossConfig,
    lambda config: ([getattr(config, name) for name in TRACED], tuple(getattr(config, name) for name in KINDS)),
    _traced,
)


class LossSums(NamedTuple):
    """What one call adds to the step: to its loss, which is the sum over calls, and to its counts of tokens."""

    loss: Float[Array, ""]
    policy: Float[Array, ""]  # of it, without the KL term
    kl_ref: Float[Array, ""]  # a sum over tokens, always k3, so that runs compare; 0 without a reference
    behavior_kl: Float[Array, ""]  # likewise; k3 estimate of KL(behavior‖prox)
    num_tokens: Float[Array, ""]
    num_clipped_low: Float[Array, ""]  # where the kind held a ratio that fell …
    num_clipped_high: Float[Array, ""]  # … and one that rose
    num_capped: Float[Array, ""]  # w above the cap: masked or truncated
    num_geometric_masked: Float[Array, ""]


def policy_loss(
    config: LossConfig,
    variant: Variant,
    *,
    policy_logp: Float[Array, "*t"],
    prox_logp: Float[Array, "*t"],
    behavior_logp: Float[Array, "*t"],
    advantage: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    counts: StepCounts,
    ref_logp: Float[Array, "*t"] | None = None,
    sequence_ids: Int[Array, "*t"] | None = None,
    num_sequences: int = 0,
) -> LossSums:
    """What a call adds. For the first update on fresh rollouts `prox_logp` may be `policy_logp` itself.

    `sequence_ids` (0 … num_sequences − 1) are needed by kinds that look at sequences and by `geometric_mask`, and
    every sequence must lie whole in one call, or splitting a step would change it. A number out of range makes the
    loss NaN.
    """
    if config.needs_sequences and (sequence_ids is None or num_sequences < 1):
        raise ValueError(
            f"loss.kind={config.kind} with loss.geometric_mask={config.geometric_mask} needs sequence_ids and "
            f"num_sequences"
        )
    known = isinstance(config.kl_coef, float)  # traced, it is the learner's, which holds a reference for every other
    if ref_logp is None and known and config.kl_coef and config.kl_in == "loss":
        raise ValueError(f"loss.kl_coef={config.kl_coef} with loss.kl_in=loss needs ref_logp; set loss.kl_coef=0")
    prox, behavior, advantage = (
        stop_gradient(kept(values, loss_mask)) for values in (prox_logp, behavior_logp, advantage)
    )
    ref = None if ref_logp is None else stop_gradient(kept(ref_logp, loss_mask))
    policy = kept(policy_logp, loss_mask)
    tokens = SampledTokens(policy, prox, behavior, ref, advantage, loss_mask, counts, sequence_ids, num_sequences)
    found: TokenLoss = variant(tokens, **config.all_numbers)
    weight, capped, outside = _weight(config, tokens)

    def shared(values: Float[Array, "*t"]) -> Float[Array, ""]:
        return jnp.sum(kept(found.share * values, loss_mask))

    def count(mask: Bool[Array, "*t"] | None) -> Float[Array, ""]:
        return jnp.zeros_like(loss) if mask is None else jnp.sum(mask & loss_mask, dtype=policy.dtype)

    policy_part = loss = shared(weight * found.loss)
    kl_ref = jnp.zeros_like(loss)
    if ref is not None:
        kl_ref = stop_gradient(jnp.sum(k3(ref - policy)))
        if config.kl_in == "loss":
            loss += config.kl_coef * shared(_kl(config.kl_estimator, ref - policy))
    return LossSums(
        loss=loss,
        policy=policy_part,
        kl_ref=kl_ref,
        behavior_kl=jnp.sum(k3(prox - behavior)),
        num_tokens=count(loss_mask),
        num_clipped_low=count(found.clipped_low),
        num_clipped_high=count(found.clipped_high),
        num_capped=count(capped),
        num_geometric_masked=count(outside),
    )


def _weight(
    config: LossConfig, tokens: SampledTokens
) -> tuple[Float[Array, "*t"], Bool[Array, "*t"], Bool[Array, "*t"]]:
    """What corrects for the sampler; the tokens over the cap, and those of sequences outside the geometric bounds."""
    log_weight, loss_mask = tokens.prox_logp - tokens.behavior_logp, tokens.loss_mask
    weight, capped, outside = bounded_exp(log_weight), jnp.zeros_like(loss_mask), jnp.zeros_like(loss_mask)
    if config.behavior_correction == "none":
        weight = jnp.ones_like(weight)
    else:
        capped = weight > config.behavior_cap
        weight = jnp.where(capped, config.behavior_cap if config.behavior_correction == "truncate" else 0.0, weight)
    if config.geometric_mask:
        mean = bounded_exp(tokens.sequence_means(log_weight))
        outside = loss_mask & ((mean < config.geometric_low) | (mean > config.geometric_high))
        weight = jnp.where(jnp.isnan(mean), mean, jnp.where(outside, 0.0, weight))
    return stop_gradient(weight), capped, outside


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
    kl = _kl(config.kl_estimator, kept(ref_logp, loss_mask) - kept(prox_logp, loss_mask))
    return stop_gradient(config.kl_coef * segment_sums(kl, loss_mask, sequence_ids, num_sequences))


def k3(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """q/p − 1 − log(q/p) of log_ratio = log(q/p): never negative, and KL(p‖q) in expectation under p.

    As a loss on p its expected gradient is that of KL(q‖p), which agrees with that of KL(p‖q) to first order.
    """
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    slope = jnp.expm1(below)  # expm1, because the terms cancel where engine and learner almost agree
    return slope - below + slope * (log_ratio - below)


class ClassSums(NamedTuple):
    """What is watched by class of tokens, summed; micro-batches add up."""

    num_tokens: Float[Array, " C"]
    behavior_kl: Float[Array, " C"]  # k3 estimate of KL(behavior‖prox)
    entropy: Float[Array, " C"]  # of the distribution that each token was drawn from


def class_sums(
    *,
    prox_logp: Float[Array, "*t"],
    behavior_logp: Float[Array, "*t"],
    entropy: Float[Array, "*t"],
    loss_mask: Bool[Array, "*t"],
    token_class: Int[Array, "*t"],
    num_classes: int,
) -> ClassSums:
    """Sums for each of the classes 0 … num_classes − 1; tokens of another class are in none."""
    behavior_kl = k3(stop_gradient(kept(prox_logp, loss_mask) - kept(behavior_logp, loss_mask)))
    watched = (jnp.ones_like(behavior_kl), behavior_kl, stop_gradient(entropy))
    return ClassSums(*(segment_sums(values, loss_mask, token_class, num_classes) for values in watched))


# Bins of log-ratios, ten to every tenfold of their distance from 0; what is nearer to it than the first edge is 0.
POSITIVE_EDGES = np.geomspace(1e-5, 10.0, 61)
RATIO_EDGES = np.concatenate([-POSITIVE_EDGES[::-1], POSITIVE_EDGES])


def ratio_counts(
    *, policy_logp: Float[Array, "*t"], prox_logp: Float[Array, "*t"], loss_mask: Bool[Array, "*t"]
) -> Float[Array, " H"]:
    """How many tokens have their ratio of policy to prox in each bin; micro-batches add up."""
    log_ratio = stop_gradient(kept(policy_logp, loss_mask) - kept(prox_logp, loss_mask))
    bins = jnp.searchsorted(jnp.asarray(RATIO_EDGES, log_ratio.dtype), log_ratio, side="right")
    return segment_sums(jnp.ones_like(log_ratio), loss_mask, bins, len(RATIO_EDGES) + 1)


def ratio_quantile(counts: Float[np.ndarray, " H"], quantile: float) -> float:
    """The middle of the bin in which that part of all tokens is reached; its distance from 1 is right to an eighth."""
    reached = int(np.searchsorted(np.cumsum(counts), quantile * counts.sum()))
    inner = np.sign(RATIO_EDGES[1:]) * np.sqrt(np.abs(RATIO_EDGES[1:] * RATIO_EDGES[:-1]))
    inner[len(POSITIVE_EDGES) - 1] = 0.0
    return float(np.exp([RATIO_EDGES[0], *inner, RATIO_EDGES[-1]][reached]))


def mismatch_decision(behavior_kl: float, config: MismatchConfig) -> Decision:
    """What a step with this mean behavior KL calls for; one that is no finite number stops the run."""
    if not math.isfinite(behavior_kl) or behavior_kl >= config.stop_kl:
        return "stop"
    if behavior_kl >= config.geometric_mask_kl:
        return "geometric_mask"
    return "warn" if behavior_kl >= config.warn_kl else "ok"


def _kl(estimator: KlEstimator, ref_minus_policy: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """KL(policy‖ref) per token (Schulman's estimators). In expectation k1's gradient is 0, and k2's that of the KL."""
    if estimator == "k1":
        return -ref_minus_policy
    return jnp.square(ref_minus_policy) / 2 if estimator == "k2" else k3(ref_minus_policy)
