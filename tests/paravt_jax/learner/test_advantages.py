"""Advantages by hand, missing episodes, equal rewards, and the effect of every option."""

from dataclasses import replace

import numpy as np
import pytest

from paravt_jax.learner.advantages import (
    TOKENS_EPSILON,
    GroupRewards,
    Moments,
    group_advantages,
    group_rewards,
    kl_sums,
    kl_to_go,
    relative_penalties,
    token_advantages,
    with_kl_penalty,
)
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import OwnTerm, reward_terms

NAN = float("nan")
EXACT = AdvantageConfig()
REWARDS = np.array([2.0, 1.0, 0.0, 2.0, 0.5])
ANCHORS = np.array([0.7, 0.4, -0.3, 0.0, 0.7])
SCALE = 0.5  # λ · w_fmt


@pytest.fixture(autouse=True)
def negligible_epsilon(monkeypatch):
    """Makes values computed by hand exact."""
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 1e-12)


def of_rewards(total, present=None, anchors=(), scale=SCALE):
    """Returns a group's rewards."""
    present = np.ones(len(total), bool) if present is None else np.array(present)
    arrays = {name: np.array(row, float) for name, row in dict(anchors).items()}
    return GroupRewards(present, np.array(total, float), arrays, scale)


def advantages(rewards, anchors, config=EXACT, *, scale=SCALE, without=None):
    """Computes a group's advantages; a NaN reward marks a missing episode."""
    rewards, anchors = np.array(rewards, float), np.array(anchors, float)
    without = rewards - scale * anchors if without is None else np.array(without, float)
    base, scale = (rewards, 0.0) if config.credit == "sequence" else (without, scale)
    return group_advantages(of_rewards(base, ~np.isnan(rewards), {"anchor": anchors}, scale), config)


def test_token_credit_by_hand(monkeypatch):
    group = advantages([1.35, 0.2, 0.85], [0.7, 0.4, 0.7])
    # without the anchor: 1.35 − 0.35 = 1, 0.2 − 0.2 = 0, 0.85 − 0.35 = 0.5; mean 0.5, variance (0.25 + 0.25 + 0) / 3
    np.testing.assert_allclose(group.sequence, [1.2247449, -1.2247449, 0.0], atol=1e-7)  # ±0.5 / 0.40824829
    # anchors: mean 0.6, deviations 0.1, −0.2, 0.1, variance 0.06 / 3 = 0.02; times 0.5
    np.testing.assert_allclose(group.anchor, [0.35355339, -0.70710678, 0.35355339], atol=1e-7)
    assert group.keep.all() and group.has_spread
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 0.5)
    np.testing.assert_allclose(advantages([1.0, 0.0], [0.0, 0.0]).sequence, [0.5, -0.5])  # 0.5 / (0.5 + 0.5)


def test_sequence_credit_by_hand(monkeypatch):
    group = advantages([1.5, 0.5], [0.7, 0.3], replace(EXACT, credit="sequence"))
    np.testing.assert_allclose(group.sequence, [1.0, -1.0])  # ±0.5 / 0.5: the std of a population of two
    assert not group.anchor.any()
    monkeypatch.undo()  # a difference of 1e-4 is no rounding: ±5e-5 / (5e-5 + 1e-6)
    np.testing.assert_allclose(advantages([1e-4, 0.0], [0.0, 0.0]).sequence, [1 / 1.02, -1 / 1.02])


def test_likelihood_credit_is_nonzero_in_every_group():
    config = replace(EXACT, credit="likelihood")
    group, by_token = advantages(REWARDS, ANCHORS, config), advantages(REWARDS, ANCHORS)
    np.testing.assert_array_equal(group.sequence, by_token.sequence)
    assert not group.anchor.any() and not group.properties and group.likelihood == SCALE
    assert group.of(1).likelihood == SCALE and by_token.of(1).likelihood == 0
    equal = advantages([1.0, NAN, 1.0], [0.7, NAN, -0.3], config, without=[1.0, NAN, 1.0])
    assert equal.keep.tolist() == [True, False, True]
    assert not (equal.has_spread or equal.sequence.any()) and equal.likelihood == SCALE
    assert not advantages([1.0, 1.0], [0.7, 0.7], config, scale=0.0).keep.any()


def test_without_a_std_the_advantage_is_the_distance_from_the_mean():
    group = advantages([1.0, 0.0, 0.5], [0.0, 0.6, 0.0], replace(EXACT, normalise="none"), without=[1.0, 0.0, 0.5])
    np.testing.assert_allclose(group.sequence, [0.5, -0.5, 0.0])
    np.testing.assert_allclose(group.anchor, [-0.1, 0.2, -0.1])  # 0.5 · (−0.2, 0.4, −0.2)
    leave_one_out = advantages([1.0, 0.0, 0.5, NAN], [0.0, 0.6, 0.0, NAN], replace(EXACT, normalise="loo"), scale=0.0)
    np.testing.assert_allclose(leave_one_out.sequence, [0.75, -0.75, 0.0, 0.0])  # 1 − 0.25, 0 − 0.75, 0.5 − 0.5


def test_a_missing_episode_does_not_change_the_advantages_of_the_others():
    with_gaps = advantages([2.0, NAN, 0.0, NAN, 0.5], [0.7, 0.4, -0.3, NAN, 0.1])
    without = advantages([2.0, 0.0, 0.5], [0.7, -0.3, 0.1])
    np.testing.assert_array_equal(with_gaps.sequence[[0, 2, 4]], without.sequence)
    np.testing.assert_array_equal(with_gaps.anchor[[0, 2, 4]], without.anchor)
    assert with_gaps.keep.tolist() == [True, False, True, False, True]
    assert not with_gaps.sequence[[1, 3]].any() and not with_gaps.anchor[[1, 3]].any()


@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [NAN, 1.0, NAN]])
@pytest.mark.parametrize("filter_zero_variance", [True, False])
def test_a_group_with_at_most_one_episode_has_no_advantage(rewards, filter_zero_variance):
    config = replace(EXACT, filter_zero_variance=filter_zero_variance)
    group = advantages(rewards, [0.7, 0.4, 0.1], config)
    assert not (group.sequence.any() or group.anchor.any() or group.has_spread)
    assert (group.keep == ~np.isnan(rewards)).all() if not filter_zero_variance else not group.keep.any()


def test_equal_rewards_keep_a_group_only_without_the_filter():
    rewards, anchors = [0.8, 0.5 + 0.3, 0.1 * 8], [0.7, 0.3 + 0.4, 0.7]  # equal up to rounding
    filtered = advantages(rewards, anchors)
    unfiltered = advantages(rewards, anchors, replace(EXACT, filter_zero_variance=False))
    assert (filtered.keep.tolist(), unfiltered.keep.tolist()) == ([False] * 3, [True] * 3)
    for group in (filtered, unfiltered):
        assert not (group.sequence.any() or group.anchor.any() or group.has_spread)


def test_a_group_that_differs_only_in_its_anchors_still_trains_its_structure():
    rewards, without, anchors = [1.35, 1.2, 1.35], [1.0, 1.0, 1.0], [0.7, 0.4, 0.7]
    group = advantages(rewards, anchors, without=without)
    assert group.keep.all() and not group.sequence.any()
    np.testing.assert_allclose(group.anchor, [0.35355339, -0.70710678, 0.35355339], atol=1e-7)
    assert not advantages(rewards, anchors, scale=0.0, without=without).keep.any()  # the arm without anchoring


def test_the_bound_of_the_format_reward_does_not_enter_the_sequence_part():
    """Two correct answers with different structure; R_fmt is 1 for both, so R does not distinguish them."""
    group = advantages([2.0, 2.0], [0.7, 0.0], without=[2.0, 2.0])
    assert not group.sequence.any()
    assert group.anchor[0] > 0 > group.anchor[1]


@pytest.mark.parametrize(
    ("rewards", "normalise", "unit"),
    [
        ([1.0, 0.0], "std", 2.0),  # the std is 0.5
        ([1.0, 0.0], "none", 1.0),
        ([1.0, 0.0], "loo", 2.0),  # the mean of the others is twice as far as the mean of all
        ([0.3, 0.1 * 3], "std", 1.0),  # no spread except rounding, so no std
    ],
)
def test_the_unit_is_the_advantage_per_unit_of_reward(rewards, normalise, unit):
    assert advantages(rewards, [0.0, 0.0], replace(EXACT, normalise=normalise)).unit == pytest.approx(unit)


def test_kl_in_the_reward_counts_relative_to_its_groups_mean():
    penalties, group = np.array([0.5, 0.1, 0.3, 0.3, 9.0]), np.array([0, 0, 2, 2, 3])
    relative = relative_penalties(penalties, group, np.array([2.0, 7.0, 1.0, 1.0]))
    # (0.5 − 0.3) · 2, (0.1 − 0.3) · 2; equal ones and one alone favor no episode
    np.testing.assert_allclose(relative, [0.4, -0.4, 0, 0, 0], atol=1e-15)
    assert relative_penalties(np.zeros(0), np.zeros(0, int), np.zeros(0)).size == 0


@pytest.mark.parametrize("normalise", ["none", "loo", "std"])
def test_kl_in_the_reward_equals_a_lower_reward_but_for_the_std(normalise):
    rewards, kl, config = np.array([1.0, 0.0, 0.4]), np.array([0.3, 0.1, 0.0]), replace(EXACT, normalise=normalise)
    group = advantages(rewards, np.zeros(3), config)
    penalized = group.sequence - relative_penalties(kl, np.zeros(3, int), np.array([group.unit]))
    lower = advantages(rewards - kl, np.zeros(3), config)
    np.testing.assert_allclose(penalized, lower.sequence * group.unit / lower.unit, atol=1e-12)


def test_a_kl_penalty_is_scaled_by_the_spread_of_the_rewards_without_it():
    group = advantages([1.0, 0.0], [0.0, 0.0])
    advantage, sampled = np.full(2, group.sequence[0], np.float32), np.array([True, False])
    # 1 − 0.1 against mean 0.5 and std 0.5 of the rewards: 0.8, where the token was sampled
    np.testing.assert_allclose(with_kl_penalty(advantage, sampled, 0.1 * group.unit), [0.8, 0], rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("R", np.inf), ("anchor", NAN)])
def test_a_non_finite_reward_is_rejected(name, value):
    values = {"R": [1.0, 2.0], "anchor": [0.0, 0.1]}
    values[name][1] = value
    with pytest.raises(ValueError, match=f"^{name} must be finite in every episode with a reward"):
        of_rewards(values["R"], anchors={"anchor": values["anchor"]})


def test_only_sampled_tokens_have_an_advantage():
    sampled = np.array([False, False, True, True, True, False, True])
    anchor = 0.25 * np.array([False, True, False, True, False, False, True])
    advantage = token_advantages(-1.0, anchor, sampled)
    assert advantage.tolist() == [0.0, 0.0, -1.0, -0.75, -1.0, 0.0, -0.75]
    assert advantage.dtype == np.float32


def test_the_unit_of_a_step_is_the_spread_within_its_groups():
    wide, narrow, equal = (of_rewards(row) for row in ([2.0, 0.0], [5.1, 4.9], [3.0, 3.0]))
    config = replace(EXACT, normalise="batch")
    groups = [group_advantages(group, config, [wide, narrow, equal]) for group in (wide, narrow, equal)]
    # distances ±1 and ±0.1, without the zero-variance group: std √(2.02 / 4) = 0.7106
    np.testing.assert_allclose([group.sequence[0] for group in groups], [1.4072, 0.14072, 0.0], rtol=1e-4)
    assert [group.unit for group in groups] == pytest.approx([1.4072] * 3, rel=1e-4)
    unfiltered = group_advantages(wide, replace(config, filter_zero_variance=False), [wide, narrow, equal])
    assert unfiltered.sequence[0] == pytest.approx((6 / 2.02) ** 0.5)  # 1 / √(2.02 / 6)


@pytest.mark.parametrize(("normalise", "worth"), [("std", 1.0), ("batch", 0.3)])
def test_batch_normalization_keeps_the_weight_of_a_small_bonus(normalise, worth):
    """By its group's std, 0.3 · R_tool has the advantages of R_tool: the std cancels every weight."""
    config, other = replace(EXACT, normalise=normalise), of_rewards(100 * [1.0, -1.0])
    groups = [of_rewards([1 + weight, 1, 1, 1]) for weight in (0.3, 1)]
    small, full = (group_advantages(group, config, [group, other]) for group in groups)
    np.testing.assert_allclose(small.sequence, worth * full.sequence, rtol=0.01)


def test_properties_of_the_anchor_add_up_to_its_advantage():
    parts = {"think_closing": [0.4, 0.4, 0.0], "flow": [0.3, 0.0, 0.0], "think_unclosed": [0.0, 0.0, -0.3]}
    rewards = of_rewards([1.0, 1.0, 0.0], anchors=parts)
    together, apart = (group_advantages(rewards, replace(EXACT, credit=credit)) for credit in ("token", "span"))
    assert not together.properties and not apart.anchor.any()
    np.testing.assert_allclose(sum(apart.properties.values()), together.anchor)
    np.testing.assert_allclose(apart.sequence, together.sequence)
    # R_anchor is 0.7, 0.4, −0.3: variance 0.74 / 3 − 0.8² / 9 = 0.17556; the flow is 0.2 above its mean of 0.1
    assert apart.properties["flow"][0] == pytest.approx(0.5 * 0.2 / 0.17556**0.5, rel=1e-4)


def test_properties_that_cancel_out_have_a_signal():
    rewards = of_rewards([1.0, 1.0], anchors={"one": [0.4, 0.0], "other": [0.0, 0.4]})
    assert not group_advantages(rewards, EXACT).has_spread
    group = group_advantages(rewards, replace(EXACT, credit="span"))
    assert group.keep.all()
    np.testing.assert_allclose(group.properties["one"], [0.1, -0.1])  # 0.5 · ±0.2, and no std


THINK = "<think>\nlet me look</think>"


def test_rewards_become_arrays():
    config, own = RewardConfig(), (OwnTerm("brief", 0.5, weight=2.0),)
    first = reward_terms([f"{THINK}<answer>B</answer>"], [], "B", "mcq", config, own=own)
    last = reward_terms([f"{THINK}<answer>C"], ["ok"], "B", "mcq", config)
    group = group_rewards([first, None, last], anchor_scale=0.5, config=EXACT)
    assert group.present.tolist() == [True, False, True]
    np.testing.assert_allclose(group.total, [1 + 0.65 + 2 * 0.5, 0, 0.5 + 0.3])  # the last one lacks `</answer>`
    expected = [sum(s.reward for s in terms.summands_without_anchor) for terms in (first, last)]
    np.testing.assert_allclose(group.total[[0, 2]], expected)
    np.testing.assert_allclose(group.anchor, [0.7, 0.0, 0.4])
    with_anchor = group_rewards([first, None, last], anchor_scale=0.5, config=replace(EXACT, credit="sequence"))
    np.testing.assert_allclose(with_anchor.total[[0, 2]], [first.total, last.total])
    assert with_anchor.anchor_scale == 0
    unjudged = reward_terms([f"{THINK}<answer>B</answer>"], [], "B", "oe", RewardConfig(oe_mode="llm"), judged=None)
    assert group_rewards([first, unjudged], anchor_scale=0.5, config=EXACT).present.tolist() == [True, False]
    missing = group_advantages(group_rewards([None, None], anchor_scale=0.5, config=EXACT), EXACT)
    assert not (missing.keep.any() or missing.sequence.any())


RELEASE = AdvantageConfig(credit="sequence", normalise="tokens", filter_zero_variance=False)


def of_total(total, config):
    """Computes a group's advantages from total rewards."""
    reward = RewardConfig(anchor_weight=0)
    terms = [reward_terms([], [], "A", "mcq", reward, own=[OwnTerm("whole", value)]) for value in total]
    return group_advantages(group_rewards(terms, anchor_scale=0.0, config=config), config)


def test_the_releases_group_advantages_by_hand():
    """The release scales and clips R first: (R − 0.2) · 10, at most 20. Bias and scale cancel, the clip does not."""
    # (3.0 − 0.2) · 10 = 28 → 20, (2.2 − 0.2) · 10 = 20, (1.0 − 0.2) · 10 = 8, (0.0 − 0.2) · 10 = −2; mean 46 / 4 = 11.5
    # deviations 8.5, 8.5, −3.5, −13.5; squares 72.25, 72.25, 12.25, 182.25; sum 339, over 3: 113, root 10.630146
    expected = [0.7996127, 0.7996127, -0.3292523, -1.2699731]
    group = of_total([3.0, 2.2, 1.0, 0.0], RELEASE)
    np.testing.assert_allclose(group.sequence, expected, atol=1e-6)
    unclipped = of_total([3.0, 2.2, 1.0, 0.0], replace(RELEASE, normalise="std"))
    assert unclipped.sequence[0] > unclipped.sequence[1] + 0.1


def test_the_kl_of_dialogues_by_hand():
    kl, loss_mask = np.array([[0.5, -0.2, NAN], [0.3, 0.1, 9.0]]), np.array([[True, True, False], [True, True, False]])
    dialogue = np.array([[0, 2, 0], [2, 0, 0]])  # masked entries have number 0
    np.testing.assert_allclose(kl_sums(kl, loss_mask, dialogue, 4), [0.6, 0, 0.1, 0])
    assert kl_sums(kl, np.zeros((2, 3), bool), dialogue, 2).tolist() == [0.0, 0.0]


def test_the_kl_to_go_of_a_token_is_the_sum_of_it_and_the_later_ones_of_its_dialogue():
    kl = np.array([[1.0, -0.5, 2.0, 9.0], [4.0, 0.25, 0.5, 7.0]])
    loss_mask = np.array([[True, True, True, False], [True, True, True, False]])
    dialogue = np.array([[0, 0, 0, 0], [1, 2, 2, 0]])  # the last entry of a row is padding
    # dialogue 0: 1 − 0.5 + 2, −0.5 + 2, 2; dialogue 1: 4; dialogue 2: 0.25 + 0.5, 0.5
    expected = [[2.5, 1.5, 2.0, 0.0], [4.0, 0.75, 0.5, 0.0]]
    np.testing.assert_allclose(kl_to_go(kl, loss_mask, dialogue), expected, atol=1e-12)


def test_the_kl_to_go_does_not_depend_on_packing():
    random = np.random.default_rng(0)
    lengths = [30, 70, 1, 50]
    of_dialogues = [random.normal(size=length) for length in lengths]
    alone = [kl_to_go(kl, np.ones(len(kl), bool), np.zeros(len(kl), int)) for kl in of_dialogues]
    numbers = np.repeat([2, 0, 3, 1], [lengths[n] for n in (2, 0, 3, 1)])
    packed = np.concatenate([of_dialogues[n] for n in (2, 0, 3, 1)])
    to_go = kl_to_go(packed, np.ones(len(packed), bool), numbers)
    for number, expected in enumerate(alone):
        np.testing.assert_allclose(to_go[numbers == number], expected, atol=1e-12)


def test_the_kl_of_a_token_is_bounded_as_in_the_release():
    kl = np.array([50.0, -30.0, 1.0])
    assert kl_to_go(kl, np.ones(3, bool), np.zeros(3, int)).tolist() == [1.0, -9.0, 1.0]  # 10 − 10 + 1, −10 + 1, 1


def test_advantages_over_tokens_by_hand():
    """Two episodes with A = ±0.70710678, β = 0.01, and the KL to go of their three and one tokens."""
    advantage = np.array([0.70710678] * 3 + [-0.70710678]) - 0.01 * np.array([2.5, 1.5, 2.0, 4.0])
    # 0.68210678, 0.69210678, 0.68710678, −0.74710678; sum 1.31421356, mean 0.32855339
    # deviations 0.35355339, 0.36355339, 0.35855339, −1.07566017; squares 0.125, 0.13217107, 0.12856053, 1.15704480
    # sum 1.54277640, over n − 1 = 3: 0.51425880, root 0.71711840
    expected = [0.4930196, 0.5069642, 0.4999919, -1.4999757]
    padded, mask = np.append(advantage, 5.0), np.arange(5) < 4
    normalised = Moments.of(advantage).normalised(padded, mask)
    np.testing.assert_allclose(normalised, [*expected, 0.0], atol=1e-4)
    exact = (advantage - 0.32855339) / (0.71711840 + TOKENS_EPSILON)
    np.testing.assert_allclose(normalised[:4], exact, atol=1e-6)


def test_the_moments_of_hosts_are_the_moments_of_all_tokens():
    values = np.random.default_rng(1).normal(3.0, 2.0, 11)
    parts = [values[:4], values[4:4], values[4:]]
    joined, whole = Moments.of_all([Moments.of(part) for part in parts]), Moments.of(values)
    np.testing.assert_allclose(joined, whole, rtol=1e-12)
    np.testing.assert_allclose(whole, [11, values.mean(), 11 * values.var()], rtol=1e-12)
