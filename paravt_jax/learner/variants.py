"""The kinds of loss that `loss.kind` names: each a function of what is known of the sampled tokens, and of its numbers.

    L = Σ_t share_t · (w_t · loss_t + kl_coef · KL_t)

A kind says loss_t and share_t, the part of the step's loss that a token stands for; w and KL are those of every kind
(losses.py). Shares are of the whole step (`StepCounts`), so that micro-batches add up to exactly its loss. A function
of one's own has the same form: `def mine(tokens: SampledTokens, *, numbers…) -> TokenLoss`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

Number = float | Float[Array, ""]

TANGENT_FROM = 10.0  # log-ratios go on along the tangent of exp: e^10 is absurd already, and squares stay finite


class StepCounts(NamedTuple):
    """What the tokens of one update share its loss by, the same for all its micro-batches and hosts."""

    num_tokens: Number  # loss tokens, capped and masked ones included
    num_sequences: Number  # that have such tokens
    max_tokens: Number  # that all its episodes may sample, missing and filtered ones included


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """What a loss sees of a call's tokens, in any shape. Only `policy_logp` is differentiated.

    Where `loss_mask` is off all numbers are 0, and what a loss says there counts for nothing. Every sequence lies
    whole in one call.
    """

    policy_logp: Float[Array, "*t"]  # of the policy that learns
    prox_logp: Float[Array, "*t"]  # of the policy before the update
    behavior_logp: Float[Array, "*t"]  # of the sampler
    ref_logp: Float[Array, "*t"] | None  # of the policy that training began with, where KL needs it
    advantage: Float[Array, "*t"]
    loss_mask: Bool[Array, "*t"]
    counts: StepCounts
    sequence_ids: Int[Array, "*t"] | None = None
    num_sequences: int = 0

    @property
    def ratio(self) -> Float[Array, "*t"]:
        """How much likelier the policy makes each token than the policy before the update did."""
        return bounded_exp(self.policy_logp - self.prox_logp)

    @property
    def of_step(self) -> Float[Array, "*t"]:
        """The share of a token in a mean over all tokens of the step."""
        return self._even(self.counts.num_tokens)

    @property
    def of_sequence(self) -> Float[Array, "*t"]:
        """Its share in a mean over sequences of means over their tokens."""
        lengths = self.sequence_sums(jnp.ones_like(self.policy_logp))
        return self._even(self.counts.num_sequences) / jnp.maximum(lengths, 1)

    @property
    def of_longest(self) -> Float[Array, "*t"]:
        """Its share if every episode were as long as it may be: neither lengths nor other episodes change it."""
        return self._even(self.counts.max_tokens)

    def _even(self, count: Number) -> Float[Array, "*t"]:
        return kept(jnp.ones_like(self.policy_logp) / count, self.loss_mask)

    def sequence_sums(self, values: Float[Array, "*t"]) -> Float[Array, "*t"]:
        """At every token the sum over its sequence; NaN for a sequence's number that is out of range."""
        assert self.sequence_ids is not None
        sums = segment_sums(values, self.loss_mask, self.sequence_ids, self.num_sequences)
        of_token = sums.at[self.sequence_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return kept(of_token, self.loss_mask)

    def sequence_means(self, values: Float[Array, "*t"]) -> Float[Array, "*t"]:
        """At every token the mean over its sequence."""
        return self.sequence_sums(values) / jnp.maximum(self.sequence_sums(jnp.ones_like(values)), 1)


class TokenLoss(NamedTuple):
    """What a kind of loss says of each token."""

    loss: Float[Array, "*t"]
    share: Float[Array, "*t"]
    clipped_low: Bool[Array, "*t"] | None = None  # where the kind held a ratio that fell …
    clipped_high: Bool[Array, "*t"] | None = None  # … and one that rose


Variant = Callable[..., TokenLoss]


def para_grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """The published loss: clipped ratios of tokens, and the mean over all tokens of the step."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.of_step)


def grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """The original (arXiv 2402.03300): every sequence weighs the same, so that a token of a long one weighs less."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.of_sequence)


def dapo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """DAPO (arXiv 2503.14476): the mean over all tokens, and more room above than below."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.of_step)


def dr_grpo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """Dr. GRPO (arXiv 2503.20783): a token weighs the same however long answers are, and no std of the group."""
    return _clipped(tokens, tokens.ratio, clip_low, clip_high, tokens.of_longest)


def gspo(tokens: SampledTokens, *, clip_low: Number, clip_high: Number) -> TokenLoss:
    """GSPO (arXiv 2507.18071): the ratio of a sequence, the mean over its tokens, then over sequences.

    DIFFERS: in the form of GSPO-token, whose ratio has the sequence's value and the token's gradient. With one
    advantage per sequence value and gradient are GSPO's; with the anchor's, credit stays on its token.
    """
    log_ratio = tokens.policy_logp - tokens.prox_logp
    own = tokens.policy_logp - stop_gradient(tokens.policy_logp)
    ratio = bounded_exp(stop_gradient(tokens.sequence_means(log_ratio)) + own)
    return _clipped(tokens, ratio, clip_low, clip_high, tokens.of_sequence)


def cispo(tokens: SampledTokens, *, max_ratio: Number) -> TokenLoss:
    """CISPO of MiniMax-M1 (arXiv 2506.13585): REINFORCE by a capped ratio, so that no token loses its gradient."""
    ratio = stop_gradient(tokens.ratio)
    loss = -jnp.minimum(ratio, max_ratio) * tokens.advantage * tokens.policy_logp
    return TokenLoss(loss, tokens.of_step, clipped_high=ratio > max_ratio)


VARIANTS: dict[str, Variant] = {
    function.__name__: function for function in (para_grpo, grpo, dapo, dr_grpo, gspo, cispo)
}


def _clipped(
    tokens: SampledTokens, ratio: Float[Array, "*t"], clip_low: Number, clip_high: Number, share: Float[Array, "*t"]
) -> TokenLoss:
    """PPO's: beyond the clip a ratio that already went the way of its advantage has no gradient."""
    unclipped = ratio * tokens.advantage
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * tokens.advantage
    held = clipped < unclipped
    return TokenLoss(-jnp.minimum(unclipped, clipped), share, held & (ratio < 1), held & (ratio > 1))


def bounded_exp(log_ratio: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """exp, and its tangent from TANGENT_FROM on: a clamp would take the gradient away, exp itself overflows."""
    below = jnp.minimum(log_ratio, TANGENT_FROM)
    return jnp.exp(below) * (1 + (log_ratio - below))


def kept(values: Float[Array, "*t"], mask: Bool[Array, "*t"]) -> Float[Array, "*t"]:
    """Zero outside the mask, before any arithmetic: a NaN there would come back through the gradient of a later one."""
    return jnp.where(mask, values, 0.0)


def segment_sums(
    values: Float[Array, "*t"], mask: Bool[Array, "*t"], ids: Int[Array, "*t"], num: int
) -> Float[Array, " E"]:
    """The sum of each of the numbers 0 … num − 1."""
    return jax.ops.segment_sum(kept(values, mask).ravel(), ids.ravel(), num)
