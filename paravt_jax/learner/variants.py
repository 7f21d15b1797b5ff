"""The loss variants: each maps the log-probs of sampled tokens to a loss and a weight per token.

    L = Σ_t weight_t · (w_t · loss_t + kl_coef · KL_t − likelihood_t · log π_t)

A variant returns loss_t and weight_t; losses.py adds the sampler correction w, the KL term and the likelihood, which
are the same for every variant. Weights are relative to the whole step (`StepCounts`), so the losses of micro-batches
add up to the loss of the step. Your own variant has the same signature:
`def mine(tokens: SampledTokens, *, params…) -> TokenLoss`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

Number = float | Float[Array, ""]

TANGENT_FROM = 10.0  # log-ratios beyond this follow the tangent of exp, so that their squares stay finite


class StepCounts(NamedTuple):
    """An update's denominators, equal for all its micro-batches and hosts."""

    num_tokens: Number  # loss tokens, including those that the sampler correction masks
    num_episodes: Number  # episodes that have loss tokens
    max_tokens: Number  # the most tokens that all episodes could sample, including missing and filtered episodes


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The tokens of a call, in any shape. Only `policy_logp` is differentiated.

    Where `loss_mask` is False, a variant's inputs are zero and its output is ignored. A sequence is one agent's
    dialogue and never split over two calls; an episode with trained sub-agents has several sequences. In losses that
    use sequences, a sequence id that is out of range makes the loss NaN.
    """

    policy_logp: Float[Array, "*t"]
    prox_logp: Float[Array, "*t"]  # the policy before the update; on fresh rollouts it may be `policy_logp` itself
    behavior_logp: Float[Array, "*t"]  # the sampler
    advantage: Float[Array, "*t"]
    loss_mask: Bool[Array, "*t"]
    counts: StepCounts
    ref_logp: Float[Array, "*t"] | None = None  # the policy at the start of training, if there is a KL term
    sequence_ids: Int[Array, "*t"] | None = None  # 0 … num_sequences − 1
    num_sequences: int = 0
    episode_tokens: Int[Array, "*t"] | None = None  # loss tokens of each token's episode, over all its sequences
    likelihood: Float[Array, "*t"] | None = None  # weight of each token's log-likelihood, if the loss has that term

    def masked(self) -> "SampledTokens":
        """Zeros values outside `loss_mask`, where they may be NaN, and stops all gradients but `policy_logp`'s."""

        def constant(values: Float[Array, "*t"]) -> Float[Array, "*t"]:
            return stop_gradient(masked(values, self.loss_mask))

        return replace(
            self,
            policy_logp=masked(self.policy_logp, self.loss_mask),
            prox_logp=constant(self.prox_logp),
            behavior_logp=constant(self.behavior_logp),
            advantage=constant(self.advantage),
            ref_logp=None if self.ref_logp is None else constant(self.ref_logp),
            likelihood=None if self.likelihood is None else constant(self.likelihood),
        )

    @property
    def ratio(self) -> Float[Array, "*t"]:
        return bounded_exp(self.policy_logp - self.prox_logp)

    @property
    def token_mean(self) -> Float[Array, "*t"]:
        """Weights of a mean over all tokens of the step."""
        return self._even(self.counts.num_tokens)

    @property
    def episode_mean(self) -> Float[Array, "*t"]:
        """Weights of a mean over episodes of the mean over each episode's tokens, sub-agents' included."""
        assert self.episode_tokens is not None
        lengths = jnp.maximum(self.episode_tokens, 1).astype(self.policy_logp.dtype)
        return self._even(self.counts.num_episodes) / lengths

    @property
    def constant_length(self) -> Float[Array, "*t"]:
        """Weights as if every episode had its maximum length, so that they do not depend on actual lengths."""
        return self._even(self.counts.max_tokens)

    def _even(self, count: Number) -> Float[Array, "*t"]:
        return masked(jnp.ones_like(self.policy_logp) / count, self.loss_mask)

    def sequence_sums(self, values: Float[Array, "*t"]) -> Float[Array, "*t"]:
        """At every token, the sum over its sequence; NaN if its sequence id is out of range."""
        assert self.sequence_ids is not None
        sums = segment_sums(values, self.loss_mask, self.sequence_ids, self.num_sequences)
        of_token = sums.at[self.sequence_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return masked(of_token, self.loss_mask)

    def sequence_means(self, values: Float[Array, "*t"]) -> Float[Array, "*t"]:
        """At every token, the mean over its sequence."""
        return self.sequence_sums(values) / jnp.maximum(self.sequence_sums(jnp.ones_like(values)), 1)


class TokenLoss(NamedTuple):
    """A variant's output."""

    loss: Float[Array, "*t"]
    weight: Float[Array, "*t"]
    clipped_low: Bool[Array, "*t"] | None = None  # tokens clipped because their ratio fell …
    clipped_high: Bool[Array, "*t"] | None = None  # … or rose


Variant = Callable[..., TokenLoss]


def para_grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number, dual_clip: Number) -> TokenLoss:
    """The published loss: clipped token ratios, averaged over all tokens of the step."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.token_mean, dual_clip)


def grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number, dual_clip: Number) -> TokenLoss:
    """The original GRPO (arXiv 2402.03300): every episode weighs the same, so a token of a long one weighs less."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.episode_mean, dual_clip)


def dr_grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number, dual_clip: Number) -> TokenLoss:
    """Dr. GRPO (arXiv 2503.20783): a token's weight does not depend on response lengths."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.constant_length, dual_clip)


def gspo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """GSPO (arXiv 2507.18071): the sequence's geometric mean ratio, and a mean over episodes.

    DIFFERS: this is GSPO-token, where the ratio has the value of the sequence and the gradient of the token. With one
    advantage per sequence, value and gradient equal GSPO's; with token credit, each token keeps its credit.
    """
    log_ratio = tokens.policy_logp - tokens.prox_logp
    own = tokens.policy_logp - stop_gradient(tokens.policy_logp)
    ratio = bounded_exp(stop_gradient(tokens.sequence_means(log_ratio)) + own)
    return _clipped(tokens, ratio, clip_low, clip_high, tokens.episode_mean)


def cispo(tokens: SampledTokens, *, max_ratio: Number) -> TokenLoss:
    """CISPO of MiniMax-M1 (arXiv 2506.13585): REINFORCE times a capped ratio, so that no token loses its gradient."""
    ratio = stop_gradient(tokens.ratio)
    loss = -jnp.minimum(ratio, max_ratio) * tokens.advantage * tokens.policy_logp
    return TokenLoss(loss, tokens.token_mean, clipped_high=ratio > max_ratio)


VARIANTS: dict[str, Variant] = {
    "para_grpo": para_grpo,
    "grpo": grpo,
    "dapo": para_grpo,  # DAPO (arXiv 2503.14476) differs only in its defaults: a higher clip_high
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
}


def _clipped(
    tokens: SampledTokens,
    ratio: Float[Array, "*t"],
    clip_low: Number,
    clip_high: Number,
    weight: Float[Array, "*t"],
    dual_clip: Number = 0.0,
) -> TokenLoss:
    """PPO's clipped loss: no gradient once a ratio has moved past the bound in the direction of its advantage.

    The dual clip (arXiv 1912.09729; 0: off) also bounds high ratios of negative advantages, which PPO's clip does not.
    """
    unclipped = ratio * tokens.advantage
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * tokens.advantage
    is_dual = (tokens.advantage < 0) & (ratio > dual_clip) & jnp.greater(dual_clip, 0)
    is_clipped = (clipped < unclipped) | is_dual
    loss = -jnp.where(is_dual, dual_clip * tokens.advantage, jnp.minimum(unclipped, clipped))
    return TokenLoss(loss, weight, is_clipped & (ratio < 1), is_clipped & (ratio > 1))


def bounded_exp(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """exp, continued by its tangent from TANGENT_FROM: a clamp would have no gradient, and exp would overflow."""
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    return jnp.exp(below) * (1 + (log_ratio - below))


def masked(values: Float[Array, "*t"], mask: Bool[Array, "*t"]) -> Float[Array, "*t"]:
    """Zeros values outside the mask. Mask before any arithmetic: after it, NaNs would still reach the gradient."""
    return jnp.where(mask, values, 0.0)


def segment_sums(
    values: Float[Array, "*t"], mask: Bool[Array, "*t"], ids: Int[Array, "*t"], num: int
) -> Float[Array, " E"]:
    """The sum of the values of each id 0 … num − 1."""
    return jax.ops.segment_sum(masked(values, mask).ravel(), ids.ravel(), num)
