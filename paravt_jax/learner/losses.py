"""The loss over a step's sampled tokens; the losses of micro-batches add up to it.

    L = Σ_t weight_t · (w_t · loss_t + kl_coef · KL_t − likelihood_t · log π_t),  w_t = exp(prox − behavior)

The variant gives loss_t and weight_t (variants.py). For PARA-GRPO, with N loss tokens in the step,

    loss_t = −min(ratio_t · A_t, clip(ratio_t, 1 − clip_low, 1 + clip_high) · A_t),  weight_t = 1 / N

The sampler correction (w and its bounds) applies to the policy term; the KL term covers every loss token. With
advantage.credit=likelihood, likelihood_t is λ · w_fmt at structural tokens; that term has no ratio, clip or correction.
Masked and truncated tokens still count in N, so a correction that removes half of a step's tokens halves the update
instead of doubling the weight of the other half.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from paravt_jax.learner.settings import Correction, KlTerm, LossConfig
from paravt_jax.learner.variants import (
    TANGENT_FROM,
    Number,
    SampledTokens,
    Variant,
    bounded_exp,
    masked,
    segment_sums,
)


@dataclass(frozen=True)
class LossSpec:
    """The static part of a loss: equal specs share a compiled program."""

    variant: Variant
    correction: Correction
    kl: KlTerm | None  # None without kl_coef

    @classmethod
    def of(cls, config: LossConfig, variant: Variant) -> "LossSpec":
        return cls(variant, config.correction, config.kl if config.kl_coef else None)

    @property
    def kl_in_loss(self) -> bool:
        return self.kl in ("k2", "k3")


class LossCoefs(NamedTuple):
    """The coefficients of a loss. They are traced under jit, so a new value needs no recompilation."""

    params: Mapping[str, Number]  # the variant's keyword arguments
    min_weight: Number  # bounds of w
    max_weight: Number
    kl_coef: Number

    @classmethod
    def of(cls, config: LossConfig) -> "LossCoefs":
        bounds = config.all_bounds
        return cls(config.all_params, bounds.get("min_weight", 0.0), bounds.get("max_weight", math.inf), config.kl_coef)


class LossSums(NamedTuple):
    """Sums over the tokens in a call; adding the sums of all calls gives the step's sums."""

    loss: Float[Array, ""]
    policy: Float[Array, ""]  # the loss without its KL and likelihood terms
    kl_ref: Float[Array, ""]  # always the k3 estimate, so that runs are comparable; 0 without a reference
    behavior_kl: Float[Array, ""]  # k3 estimate of KL(behavior‖prox)
    num_tokens: Float[Array, ""]
    num_clipped_low: Float[Array, ""]
    num_clipped_high: Float[Array, ""]
    num_capped: Float[Array, ""]  # tokens with w out of bounds, masked or truncated


def policy_loss(spec: LossSpec, coefs: LossCoefs, tokens: SampledTokens) -> LossSums:
    """The loss of these tokens, and the sums to report."""
    if spec.kl_in_loss and tokens.ref_logp is None:
        raise ValueError("loss.kl_coef with a KL in the loss needs ref_logp; set loss.kl_coef=0")
    tokens, mask = tokens.masked(), tokens.loss_mask
    result = spec.variant(tokens, **coefs.params)
    correction, capped = _correction(spec, coefs, tokens)

    def weighted(values: Float[Array, "*t"]) -> Float[Array, ""]:
        return jnp.sum(masked(result.weight * values, mask))

    def count(counted: Bool[Array, "*t"] | None) -> Float[Array, ""]:
        return jnp.zeros_like(loss) if counted is None else jnp.sum(counted & mask, dtype=loss.dtype)

    policy = loss = weighted(correction * result.loss)
    if tokens.likelihood is not None:
        loss -= weighted(tokens.likelihood * tokens.policy_logp)
    kl_ref = jnp.zeros_like(loss)
    if tokens.ref_logp is not None:
        ref_minus_policy = tokens.ref_logp - tokens.policy_logp
        kl_ref = jnp.sum(k3(ref_minus_policy))
        if spec.kl_in_loss:
            # In expectation, k2 has the gradient of KL(policy‖ref), and k3 of KL(ref‖policy).
            kl = k3(ref_minus_policy) if spec.kl == "k3" else jnp.square(ref_minus_policy) / 2
            loss += coefs.kl_coef * weighted(kl)
    return LossSums(
        loss=loss,
        policy=policy,
        kl_ref=kl_ref,
        behavior_kl=jnp.sum(k3(tokens.prox_logp - tokens.behavior_logp)),
        num_tokens=count(mask),
        num_clipped_low=count(result.clipped_low),
        num_clipped_high=count(result.clipped_high),
        num_capped=count(capped),
    )


def _correction(
    spec: LossSpec, coefs: LossCoefs, tokens: SampledTokens
) -> tuple[Float[Array, "*t"], Bool[Array, "*t"]]:
    """w limited to its bounds, and a mask of tokens out of bounds. A sequence's w is the product over its tokens."""
    log_weight = tokens.prox_logp - tokens.behavior_logp
    if spec.correction == "none":
        return jnp.ones_like(log_weight), jnp.zeros_like(tokens.loss_mask)
    if spec.correction.startswith("sequence"):
        log_weight = tokens.sequence_sums(log_weight)
    weight = bounded_exp(log_weight)
    outside = (weight < coefs.min_weight) | (weight > coefs.max_weight)
    bounded = jnp.where(outside, coefs.max_weight if spec.correction.endswith("tis") else 0.0, weight)
    return bounded, outside


def k3(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """q/p − 1 − log(q/p) of log_ratio = log(q/p): never negative, and KL(p‖q) in expectation under p.

    As a loss on p, its expected gradient equals the gradient of KL(q‖p), and to first order the gradient of KL(p‖q).
    """
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    slope = jnp.expm1(below)  # expm1 because the terms cancel when engine and learner almost agree
    return slope - below + slope * (log_ratio - below)


class ClassSums(NamedTuple):
    """Sums by token class; micro-batches add up."""

    num_tokens: Float[Array, " C"]
    behavior_kl: Float[Array, " C"]  # k3 estimate of KL(behavior‖prox)
    entropy: Float[Array, " C"]  # of the distribution that each token was sampled from


def class_sums(
    tokens: SampledTokens, entropy: Float[Array, "*t"], token_class: Int[Array, "*t"], num_classes: int
) -> ClassSums:
    """Sums for the classes 0 … num_classes − 1; tokens of any other class are ignored."""
    tokens = tokens.masked()
    behavior_kl = k3(tokens.prox_logp - tokens.behavior_logp)
    summed = (jnp.ones_like(behavior_kl), behavior_kl, entropy)
    return ClassSums(*(segment_sums(values, tokens.loss_mask, token_class, num_classes) for values in summed))


# Bins of log-ratios, ten per decade of their distance from 0; anything closer to 0 than the first edge counts as 0.
POSITIVE_EDGES = np.geomspace(1e-5, 10.0, 61)
RATIO_EDGES = np.concatenate([-POSITIVE_EDGES[::-1], POSITIVE_EDGES])


def ratio_counts(tokens: SampledTokens) -> Float[Array, " H"]:
    """A histogram of the tokens' ratios of policy to prox; micro-batches add up."""
    tokens = tokens.masked()
    log_ratio = tokens.policy_logp - tokens.prox_logp
    bins = jnp.searchsorted(jnp.asarray(RATIO_EDGES, log_ratio.dtype), log_ratio, side="right")
    return segment_sums(jnp.ones_like(log_ratio), tokens.loss_mask, bins, len(RATIO_EDGES) + 1)


def ratio_quantile(counts: Float[np.ndarray, " H"], quantile: float) -> float:
    """The middle of the bin that contains this quantile. Its logarithm has an error of about an eighth, within ±10."""
    reached = int(np.searchsorted(np.cumsum(counts), quantile * counts.sum()))
    inner = np.sign(RATIO_EDGES[1:]) * np.sqrt(np.abs(RATIO_EDGES[1:] * RATIO_EDGES[:-1]))
    inner[len(POSITIVE_EDGES) - 1] = 0.0
    return float(np.exp([RATIO_EDGES[0], *inner, RATIO_EDGES[-1]][reached]))
