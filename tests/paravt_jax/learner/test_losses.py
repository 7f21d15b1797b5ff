"""The loss by hand, the effect of each option, and gradients that splitting, padding and extremes do not change."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax.learner import losses
from paravt_jax.learner.losses import LossCoefs, LossSpec, LossSums, policy_loss
from paravt_jax.learner.settings import LossConfig
from paravt_jax.learner.variants import VARIANTS, SampledTokens, StepCounts

PLAIN = LossConfig(kl_coef=0.0)
SUMS = StepCounts(1.0, 1.0, 1.0)  # makes a loss the sum over its tokens
LOGPS = ("policy_logp", "prox_logp", "behavior_logp", "ref_logp")
BAD = (math.nan, math.inf, -math.inf)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def make_tokens(ratio=(1.0,), weight=None, advantage=None, ref_ratio=None, mask=None, ids=None):
    """Makes tokens with the given ratios policy/prox, prox/behavior and ref/policy."""
    n = len(ratio)
    prox = -1.0 - 0.1 * np.arange(n)
    policy = prox + np.log(ratio)
    behavior = prox - np.log(np.ones(n) if weight is None else weight)
    arrays = {"policy_logp": policy, "prox_logp": prox, "behavior_logp": behavior}
    arrays["advantage"] = np.ones(n) if advantage is None else advantage
    if ref_ratio is not None:
        arrays["ref_logp"] = policy + np.log(ref_ratio)
    tokens = {name: jnp.asarray(values, jnp.float32) for name, values in arrays.items()}
    tokens["loss_mask"] = jnp.asarray(np.ones(n, bool) if mask is None else mask)
    tokens["episode_tokens"] = jnp.ones(n, jnp.int32)
    return tokens if ids is None else tokens | {"sequence_ids": jnp.asarray(ids, jnp.int32)}


def random_tokens(rows=3, width=7, seed=0, dtype=np.float32):
    """Makes random rows with three sequences each, a mask with gaps, and garbage outside of the mask."""
    random = np.random.default_rng(seed)
    shape = (rows, width)
    policy = -2 * random.random(shape)
    mask = random.random(shape) < 0.8
    arrays = {
        "policy_logp": policy,
        "prox_logp": policy + 0.3 * random.standard_normal(shape),
        "ref_logp": policy + 0.5 * random.standard_normal(shape),
        "advantage": random.standard_normal(shape),
    }
    arrays["behavior_logp"] = arrays["prox_logp"] + 0.8 * random.standard_normal(shape)
    for number, name in enumerate(LOGPS):
        arrays[name] = np.where(mask, arrays[name], BAD[number % 3])
    tokens = {name: jnp.asarray(values, dtype) for name, values in arrays.items()}
    ids = 3 * np.arange(rows)[:, None] + np.arange(width) * 3 // width
    episode_tokens = np.bincount(ids[mask], minlength=3 * rows)[ids]
    tokens |= {"sequence_ids": jnp.asarray(ids, jnp.int32), "episode_tokens": jnp.asarray(episode_tokens, jnp.int32)}
    return tokens | {"loss_mask": jnp.asarray(mask)}


@partial(jax.jit, static_argnames=("config", "num_sequences", "counts"))
def jitted(config, tokens, num_sequences, counts):
    def value(policy_logp):
        sums = loss_of(config, tokens | {"policy_logp": policy_logp}, num_sequences, counts)
        return sums.loss, sums

    return jax.value_and_grad(value, has_aux=True)(tokens["policy_logp"])


def loss_of(config, tokens, num_sequences=0, counts=SUMS):
    sampled = SampledTokens(**tokens, num_sequences=num_sequences, counts=counts)
    return policy_loss(LossSpec.of(config, VARIANTS[config.name]), LossCoefs.of(config), sampled)


def sums_and_gradient(config, tokens, num_sequences=None, counts=SUMS):
    """Returns the sums, and the gradient with respect to each token's log-prob."""
    num_sequences = tokens["policy_logp"].size if num_sequences is None else num_sequences
    (_, sums), gradient = jitted(config, tokens, num_sequences, counts)
    return sums, np.asarray(gradient)


def assert_same(first, second, atol=1e-5):
    (sums, gradient), (other_sums, other_gradient) = first, second
    np.testing.assert_allclose(np.array(sums), np.array(other_sums), atol=atol, rtol=atol)
    np.testing.assert_allclose(gradient.ravel(), other_gradient.ravel(), atol=atol, rtol=atol)


SEQUENCE_CLIP = {"clip_low": 0.03, "clip_high": 0.04}
# Every loss, and every option at least once: for tests of an invariance.
ALL_LOSSES = [
    LossConfig(),
    LossConfig("dapo", {"clip_high": 0.5, "dual_clip": 1.6}, "token_tis", {"max_weight": 1.3}, kl="k2"),
    LossConfig("gspo", SEQUENCE_CLIP, "sequence_mis", {"max_weight": 2.0}),
    LossConfig("grpo", correction="none", kl="reward"),
    LossConfig("dr_grpo", correction="icepop"),
    LossConfig("cispo", {"max_ratio": 1.2}, "sequence_tis"),
]


def test_the_policy_term_by_hand():
    ratio, advantage = [1.0, 1.5, 1.5, 0.5, 0.5, 1.1], [2, 2, -2, 2, -2, 1]
    tokens = make_tokens(ratio, weight=[1, 2, 1, 1, 3, 0.5], advantage=advantage)
    sums, gradient = sums_and_gradient(PLAIN, tokens)
    # min(ratio·A, clip·A): 2; min(3, 2.4) = 2.4; min(−3, −2.4) = −3; min(1, 1.6) = 1; min(−1, −1.6) = −1.6; 1.1
    # times w: 2 + 2·2.4 − 3 + 1 − 3·1.6 + 0.5·1.1 = 0.55
    assert sums.policy == sums.loss == pytest.approx(-0.55, abs=1e-6)
    # −w·ratio·A where the clip does not decide
    np.testing.assert_allclose(gradient, [-2.0, 0.0, 3.0, -1.0, 0.0, -0.55], atol=1e-6)
    assert (sums.num_tokens, sums.num_clipped_low, sums.num_clipped_high, sums.num_capped) == (6, 1, 1, 0)


def test_the_dual_clip_bounds_the_ratio_of_negative_advantages_only():
    tokens = make_tokens(ratio=[4.0, 4.0, 2.9, 0.5], advantage=[-2, 2, -2, -2])
    sums, gradient = sums_and_gradient(replace(PLAIN, params={"dual_clip": 3.0}), tokens)
    # −2 · 3, 2 · 1.2, −2 · 2.9, −2 · 0.8
    assert sums.loss == pytest.approx(6 - 2.4 + 5.8 + 1.6, abs=1e-5)
    np.testing.assert_allclose(gradient, [0, 0, 5.8, 0], atol=1e-5)
    assert (sums.num_clipped_low, sums.num_clipped_high) == (1, 2)
    without, gradient = sums_and_gradient(PLAIN, tokens)
    assert without.loss == pytest.approx(8 - 2.4 + 5.8 + 1.6, abs=1e-5) and gradient[0] == pytest.approx(8, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_an_episode_with_five_sub_agents_weighs_as_much_as_one_without(name):
    """Episode 0 has six sequences of two tokens each, episode 1 has one: every episode weighs 1/2."""
    ids = np.repeat(np.arange(7), 2)
    tokens = make_tokens(ratio=[1.0] * 14, ids=ids) | {"episode_tokens": jnp.asarray([12] * 12 + [2] * 2, jnp.int32)}
    _, gradient = sums_and_gradient(replace(PLAIN, name=name), tokens, 7, StepCounts(14.0, 2.0, 1.0))
    assert gradient[:12].sum() == pytest.approx(-0.5, abs=1e-6) == gradient[12:].sum()


@pytest.mark.slow
def test_the_kl_terms_by_hand():
    tokens = make_tokens(ratio=[1.0, 1.0], advantage=[0, 0], ref_ratio=[2.0, 0.25])
    # k3: 2 − 1 − ln 2 = 0.3068528; 0.25 − 1 + ln 4 = 0.6362944
    sums, gradient = sums_and_gradient(LossConfig(kl_coef=0.1), tokens)
    assert (sums.kl_ref, sums.loss, sums.policy) == pytest.approx((0.9431472, 0.09431472, 0.0), abs=1e-6)
    np.testing.assert_allclose(gradient, [-0.1, 0.075], atol=1e-6)  # 0.1 · (1 − ref/policy)
    # k2: (ln 2)² / 2 + (ln 4)² / 2 = 2.5 · (ln 2)²
    sums, gradient = sums_and_gradient(LossConfig(kl_coef=0.1, kl="k2"), tokens)
    assert (sums.kl_ref, sums.loss) == pytest.approx((0.9431472, 0.25 * math.log(2) ** 2), abs=1e-6)
    np.testing.assert_allclose(gradient, [-0.1 * math.log(2), 0.1 * math.log(4)], atol=1e-6)
    sums, _ = sums_and_gradient(PLAIN, make_tokens(ratio=[1.0, 1.0], weight=[2.0, 0.25]))
    assert sums.behavior_kl == pytest.approx(0.9431472, abs=1e-6)
    sums, _ = sums_and_gradient(LossConfig(kl="reward"), random_tokens())
    assert sums.loss == sums.policy and sums.kl_ref > 0


@pytest.mark.parametrize(
    ("correction", "bounds", "by_hand", "num_capped"),
    [
        ("token_mis", {"max_weight": 5.0}, 0.4 + 4, 1),
        ("token_tis", {"max_weight": 5.0}, 0.4 + 4 + 5, 1),
        ("icepop", {"min_weight": 0.5, "max_weight": 5.0}, 4, 2),
        ("icepop", {"min_weight": 0.3, "max_weight": 6.5}, 0.4 + 4 + 6, 0),
        # one sequence has 0.4 · 4 = 1.6 at its two tokens, the other 6
        ("sequence_mis", {"max_weight": 5.0}, 1.6 + 1.6, 1),
        ("sequence_tis", {"max_weight": 1.5}, 3 * 1.5, 3),
        ("none", {}, 3, 0),
    ],
)
def test_weights_out_of_bounds_by_hand(correction, bounds, by_hand, num_capped):
    tokens = make_tokens(ratio=[1.0] * 3, weight=[0.4, 4.0, 6.0], ref_ratio=[2.0] * 3, ids=[0, 0, 1])
    sums, gradient = sums_and_gradient(LossConfig(correction=correction, correction_bounds=bounds), tokens)
    assert (sums.policy, sums.num_capped) == pytest.approx((-by_hand, num_capped), abs=1e-5)
    assert gradient.sum() == pytest.approx(-by_hand - 3 * 0.01, abs=1e-5)  # KL: 0.01 · (1 − 2) at every token
    assert sums.loss - sums.policy == pytest.approx(3 * 0.01 * 0.3068528, abs=1e-5)


def test_a_weight_at_its_bound_counts():
    config = replace(PLAIN, correction="icepop", correction_bounds={"min_weight": 1.0, "max_weight": 1.0})
    sums, _ = sums_and_gradient(config, make_tokens(ratio=[1.0]))
    assert (sums.policy, sums.num_capped) == (-1.0, 0.0)


@pytest.mark.slow
def test_on_fresh_rollouts_the_gradient_is_reinforces():
    tokens = random_tokens()
    tokens |= {"behavior_logp": tokens["policy_logp"], "prox_logp": tokens["policy_logp"]}
    scores = jnp.asarray(np.random.default_rng(1).standard_normal((5, 3, 7)), jnp.float32)  # ∂ logp / ∂ θ
    mask, advantage = np.asarray(tokens["loss_mask"]), np.asarray(tokens["advantage"])
    num_tokens = int(mask.sum())

    def loss(theta):
        policy = tokens["policy_logp"] + jnp.einsum("p,pbt->bt", theta, scores)
        # prox is the policy itself: the ratio must not be differentiated through both
        arrays = tokens | {"policy_logp": policy, "prox_logp": policy, "ref_logp": None}
        return loss_of(PLAIN, arrays, counts=StepCounts(float(num_tokens), 1.0, 1.0)).loss

    reinforce = -np.einsum("bt,pbt->p", np.where(mask, advantage, 0), np.asarray(scores)) / num_tokens
    np.testing.assert_allclose(jax.grad(loss)(jnp.zeros(5)), reinforce, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "forward"), [("k2", True), ("k3", False)])
def test_the_expected_gradient_of_the_kl_term(estimator, forward, float64):
    """k2 has the gradient of KL(policy‖ref), k3 of KL(ref‖policy), over all five tokens of a vocabulary."""
    theta = jnp.asarray([0.3, -1.0, 0.7, 0.1, -0.4])
    ref_logp = jax.nn.log_softmax(jnp.asarray([1.0, 0.2, -0.5, 0.0, 0.4]))

    def expected(theta):
        logp = jax.nn.log_softmax(theta)
        probability = jax.lax.stop_gradient(jnp.exp(logp))
        config = LossConfig(kl_coef=1.0, kl=estimator)
        tokens = {"advantage": jnp.zeros(1), "loss_mask": jnp.ones(1, bool)}
        logps = [dict.fromkeys(LOGPS, logp[n : n + 1]) | {"ref_logp": ref_logp[n : n + 1]} for n in range(5)]
        return probability @ jnp.stack([loss_of(config, tokens | of_token).loss for of_token in logps])

    def divergence(theta):
        logp = jax.nn.log_softmax(theta)
        p, q = (logp, ref_logp) if forward else (ref_logp, logp)
        return jnp.sum(jnp.exp(p) * (p - q))

    gradient = jax.grad(divergence)(theta)
    np.testing.assert_allclose(jax.grad(expected)(theta), gradient, atol=1e-12)
    assert np.abs(gradient).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_likelihood_has_the_gradient_of_a_float64_reference(name, float64):
    """−Σ weight · likelihood · log softmax(z)[target], differentiated by hand to the logits z."""
    random = np.random.default_rng(4)
    logits, target = jnp.asarray(random.standard_normal((3, 7, 5))), random.integers(0, 5, (3, 7))
    likelihood = 0.5 * (random.random((3, 7)) < 0.4)
    tokens = random_tokens(dtype=np.float64)
    mask, lengths = np.asarray(tokens["loss_mask"]), np.maximum(tokens["episode_tokens"], 1)
    counts = StepCounts(float(mask.sum()), 9.0, 64.0)

    def loss(logits, with_likelihood):
        logp = jax.nn.log_softmax(logits)
        policy = jnp.take_along_axis(logp, jnp.asarray(target)[..., None], -1)[..., 0]
        arrays = tokens | {"policy_logp": policy, "prox_logp": jnp.full((3, 7), -1.5)}
        arrays |= {"likelihood": jnp.asarray(likelihood)} if with_likelihood else {}
        sums = loss_of(LossConfig(name), arrays, 9, counts)
        return sums.loss, sums.policy

    gradients = jax.grad(loss, has_aux=True)
    (whole, policy), (rest, same_policy) = gradients(logits, True), gradients(logits, False)
    weight = {"grpo": 1 / (9 * lengths), "gspo": 1 / (9 * lengths), "dr_grpo": 1 / 64}.get(name, 1 / mask.sum())
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    by_hand = -(np.where(mask, weight, 0) * likelihood)[..., None] * (np.eye(5)[target] - probability)
    np.testing.assert_allclose(whole - rest, by_hand, atol=1e-15)
    assert policy == same_policy and np.abs(by_hand).max() > 1e-3


def test_k3_averages_to_the_kl_and_keeps_its_digits_when_small(float64):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimates = np.asarray(losses.k3(jnp.log(q / p)))
    assert p @ estimates == pytest.approx(float(p @ np.log(p / q)), abs=1e-12)
    assert (estimates > 0).all()
    small = losses.k3(jnp.asarray([1e-3, -1e-3, 1e-4], jnp.float32))
    np.testing.assert_allclose(small, [5.001667e-7, 4.998334e-7, 5.00017e-9], rtol=1e-2)  # x² / 2 + x³ / 6


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL_LOSSES)
def test_an_uneven_split_into_micro_batches_changes_nothing(config, float64):
    tokens = random_tokens(rows=5, dtype=np.float64)
    parts = [{name: array[part] for name, array in tokens.items()} for part in (slice(0, 2), slice(2, 5))]
    counts = StepCounts(float(tokens["loss_mask"].sum()), 15.0, 64.0)
    sums, gradients = zip(*(sums_and_gradient(config, part, 15, counts) for part in parts), strict=True)
    split = LossSums(*map(sum, zip(*sums, strict=True))), np.concatenate(gradients)
    assert_same(sums_and_gradient(config, tokens, 15, counts), split, atol=1e-12)


@pytest.mark.parametrize("config", ALL_LOSSES)
def test_token_order_and_array_shape_change_nothing(config):
    tokens = random_tokens()
    sums, gradient = sums_and_gradient(config, tokens)
    order = np.random.default_rng(2).permutation(21)
    flat = {name: array.ravel()[order] for name, array in tokens.items()}
    assert_same((sums, gradient.ravel()[order]), sums_and_gradient(config, flat))


@pytest.mark.parametrize("config", ALL_LOSSES)
@pytest.mark.parametrize("garbage", BAD)
def test_padding_with_any_garbage_changes_nothing(config, garbage):
    tokens = random_tokens()
    sums, gradient = sums_and_gradient(config, tokens)
    wider = {name: jnp.pad(array, ((0, 2), (0, 4)), constant_values=garbage) for name, array in tokens.items()
             if array.dtype == jnp.float32}  # fmt: skip
    wider["loss_mask"] = jnp.pad(tokens["loss_mask"], ((0, 2), (0, 4)))
    for name in ("sequence_ids", "episode_tokens"):
        wider[name] = jnp.pad(tokens[name], ((0, 2), (0, 4)), constant_values=10**6)
    padded_sums, padded_gradient = sums_and_gradient(config, wider, num_sequences=9)
    assert_same((sums, gradient), (padded_sums, padded_gradient[:3, :7]))
    assert np.count_nonzero(padded_gradient) == np.count_nonzero(gradient)


@pytest.mark.parametrize(
    "config", [*ALL_LOSSES, LossConfig(correction="token_tis", correction_bounds={"max_weight": math.inf})]
)
@pytest.mark.parametrize("advantage", [-3.0, 3.0])
def test_extreme_log_ratios_give_finite_sums_and_gradients(config, advantage):
    steps = [-80.0, -20.0, 0.0, 20.0, 80.0]
    policy, prox, ref = (jnp.asarray(grid.ravel(), jnp.float32) for grid in np.meshgrid(steps, steps, steps))
    tokens = dict(policy_logp=policy, prox_logp=prox, ref_logp=ref, behavior_logp=jnp.zeros(125))
    tokens |= dict(advantage=jnp.full(125, advantage), loss_mask=jnp.ones(125, bool), sequence_ids=jnp.arange(125))
    tokens |= dict(episode_tokens=jnp.ones(125, jnp.int32))
    sums, gradient = sums_and_gradient(config, tokens)
    assert np.isfinite(np.array(sums)).all() and np.isfinite(gradient).all()
    assert np.isfinite(np.square(gradient).sum())  # the norm that clipping divides by


def test_a_ratio_far_above_the_clip_still_has_a_gradient():
    _, gradient = sums_and_gradient(PLAIN, make_tokens(ratio=[math.exp(20)], advantage=[-1.0]))
    assert gradient[0] > 0  # descent lowers the log-prob


def test_the_kl_gradient_points_to_a_distant_reference():
    tokens = make_tokens(ratio=[1.0, 1.0], advantage=[0, 0])
    for config in (LossConfig(), LossConfig(kl="k2")):
        far = tokens | {"ref_logp": tokens["policy_logp"] + jnp.asarray([80.0, -80.0])}
        _, gradient = sums_and_gradient(config, far)
        assert gradient[0] < 0 < gradient[1]  # up to a reference above, down to one below


@pytest.mark.parametrize("name", LOGPS)
def test_a_nan_at_an_unmasked_token_is_not_hidden(name):
    tokens = make_tokens(ratio=[1.0, 1.0, 1.0], ref_ratio=[1.0, 2.0, 1.0])
    tokens[name] = tokens[name].at[1].set(jnp.nan)
    assert math.isnan(sums_and_gradient(LossConfig(), tokens)[0].loss)


@pytest.mark.parametrize("number", [2, -1])
def test_a_sequence_number_out_of_range_is_not_hidden(number):
    tokens = make_tokens(ratio=[1.0, 1.0, 1.0], ids=[0, 1, number])
    assert math.isnan(sums_and_gradient(replace(PLAIN, name="gspo"), tokens, num_sequences=2)[0].loss)


@pytest.mark.slow
def test_only_the_policy_is_differentiated():
    tokens = random_tokens()
    constants = {name: tokens[name] for name in ("prox_logp", "behavior_logp", "ref_logp", "advantage")}
    gradients = jax.grad(lambda arrays: loss_of(LossConfig("gspo"), tokens | arrays, num_sequences=9).loss)(constants)
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.slow
def test_mismatch_by_class_by_hand():
    mask = jnp.asarray([True, True, True, False, True])
    prox = jnp.asarray([-1.0, -1.0, -1.0, jnp.nan, -1.0])
    behavior = prox - jnp.log(jnp.asarray([2.0, 0.5, 1.0, 1.0, 0.5]))
    classes = jnp.asarray([0, 2, 0, 99, 2], jnp.int32)
    tokens = SampledTokens(prox, prox, behavior, jnp.zeros(5), mask, SUMS)
    sums = losses.class_sums(tokens, jnp.asarray([0.5, 1.0, 0.25, jnp.nan, 3.0]), classes, 4)
    assert sums.num_tokens.tolist() == [2, 0, 2, 0]
    np.testing.assert_allclose(sums.behavior_kl, [0.3068528, 0, 2 * 0.1931472, 0], atol=1e-6)
    np.testing.assert_allclose(sums.entropy, [0.75, 0, 4.0, 0], atol=1e-6)


@pytest.mark.slow
def test_quantiles_of_the_ratio_come_from_bins_that_add_up():
    log_ratio = np.concatenate([np.zeros(900), np.full(60, -0.2), np.full(40, 0.3), [jnp.nan]])
    mask = jnp.asarray(np.arange(1001) < 1000)
    policy, prox = jnp.asarray(log_ratio - 1), jnp.full(1001, -1.0)
    parts = (np.s_[:], np.s_[:950], np.s_[950:])
    tokens = [SampledTokens(policy[part], *3 * [prox[part]], mask[part], SUMS) for part in parts]
    total, first, second = map(losses.ratio_counts, tokens)
    np.testing.assert_array_equal(total, first + second)
    assert total.sum() == 1000
    low, median, high = (losses.ratio_quantile(np.asarray(total), quantile) for quantile in (0.01, 0.5, 0.99))
    assert median == 1.0
    np.testing.assert_allclose(np.log([low, high]), [-0.2, 0.3], rtol=0.125)
    extreme = jnp.asarray([-80.0, 80.0])
    counts = losses.ratio_counts(SampledTokens(extreme, *3 * [jnp.zeros(2)], jnp.ones(2, bool), SUMS))
    quantiles = [losses.ratio_quantile(np.asarray(counts), quantile) for quantile in (0.5, 1.0)]
    assert quantiles == [math.exp(-10), math.exp(10)]


@pytest.mark.slow
def test_a_missing_input_of_an_option_is_named():
    with pytest.raises(ValueError, match=r"loss\.kl_coef with a KL in the loss needs ref_logp"):
        loss_of(LossConfig(), make_tokens())
