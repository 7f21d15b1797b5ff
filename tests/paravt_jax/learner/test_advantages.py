"""Advantages by hand, what missing episodes and equal rewards do, and that every option changes what it names."""

from dataclasses import replace

import numpy as np
import pytest

from paravt_jax.learner.advantages import (
    TokenMoments,
    batch_normalised,
    group_advantages,
    token_advantages,
    token_moments,
    with_kl_penalty,
)
from paravt_jax.learner.settings import AdvantageConfig

NAN = float("nan")
EXACT = AdvantageConfig(epsilon=1e-12)
REWARDS = np.array([2.0, 1.0, 0.0, 2.0, 0.5])
ANCHORS = np.array([0.7, 0.4, -0.3, 0.0, 0.7])
SCALE = 0.5  # λ · w_fmt


def advantages(rewards, anchors, config=EXACT, *, scale=SCALE, without=None):
    rewards, anchors = np.array(rewards, float), np.array(anchors, float)
    without = rewards - scale * anchors if without is None else np.array(without, float)
    return group_advantages(rewards, without, anchors, anchor_scale=scale, config=config)


def same(one, other) -> bool:
    return np.array_equal(one.sequence, other.sequence) and np.array_equal(one.anchor, other.anchor)


def test_token_credit_by_hand():
    found = advantages([1.35, 0.2, 0.85], [0.7, 0.4, 0.7])
    # without the anchor: 1.35 − 0.35 = 1, 0.2 − 0.2 = 0, 0.85 − 0.35 = 0.5; mean 0.5, variance (0.25 + 0.25 + 0) / 3
    np.testing.assert_allclose(found.sequence, [1.2247449, -1.2247449, 0.0], atol=1e-7)  # ±0.5 / 0.40824829
    # anchors: mean 0.6, deviations 0.1, −0.2, 0.1, variance 0.06 / 3 = 0.02; times 0.5
    np.testing.assert_allclose(found.anchor, [0.35355339, -0.70710678, 0.35355339], atol=1e-7)
    assert found.keep.all() and found.has_spread and found.num_missing == 0


def test_sequence_credit_by_hand():
    found = advantages([1.5, 0.5], [0.7, 0.3], replace(EXACT, credit="sequence"))
    np.testing.assert_allclose(found.sequence, [1.0, -1.0])  # ±0.5 / 0.5: the std of a population of two
    assert not found.anchor.any()


def test_without_a_std_the_advantage_is_the_distance_from_the_mean():
    found = advantages([1.0, 0.0, 0.5], [0.0, 0.6, 0.0], replace(EXACT, normalise="none"), without=[1.0, 0.0, 0.5])
    np.testing.assert_allclose(found.sequence, [0.5, -0.5, 0.0])
    np.testing.assert_allclose(found.anchor, [-0.1, 0.2, -0.1])  # 0.5 · (−0.2, 0.4, −0.2)


def test_epsilon_is_added_to_the_std():
    found = advantages([1.0, 0.0], [0.0, 0.0], replace(EXACT, epsilon=0.5))
    np.testing.assert_allclose(found.sequence, [0.5, -0.5])  # 0.5 / (0.5 + 0.5)


def test_a_missing_episode_leaves_the_advantages_of_the_others_as_if_it_were_not_there():
    with_gaps = advantages([2.0, NAN, 0.0, NAN, 0.5], [0.7, 0.4, -0.3, NAN, 0.1])
    without = advantages([2.0, 0.0, 0.5], [0.7, -0.3, 0.1])
    np.testing.assert_array_equal(with_gaps.sequence[[0, 2, 4]], without.sequence)
    np.testing.assert_array_equal(with_gaps.anchor[[0, 2, 4]], without.anchor)
    assert with_gaps.keep.tolist() == [True, False, True, False, True]
    assert with_gaps.num_missing == 2
    assert not with_gaps.sequence[[1, 3]].any() and not with_gaps.anchor[[1, 3]].any()


@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [NAN, 1.0, NAN]])
@pytest.mark.parametrize("filter_zero_variance", [True, False])
def test_a_group_of_one_or_none_has_no_advantage(rewards, filter_zero_variance):
    config = replace(EXACT, filter_zero_variance=filter_zero_variance)
    found = advantages(rewards, [0.7, 0.4, 0.1], config)
    assert not (found.sequence.any() or found.anchor.any() or found.has_spread)
    assert (found.keep == ~np.isnan(rewards)).all() if not filter_zero_variance else not found.keep.any()


def test_equal_rewards_keep_a_group_only_without_the_filter():
    rewards, anchors = [0.8, 0.5 + 0.3, 0.1 * 8], [0.7, 0.3 + 0.4, 0.7]  # equal but for rounding
    filtered = advantages(rewards, anchors)
    unfiltered = advantages(rewards, anchors, replace(EXACT, filter_zero_variance=False))
    assert (filtered.keep.tolist(), unfiltered.keep.tolist()) == ([False] * 3, [True] * 3)
    for found in (filtered, unfiltered):
        assert not (found.sequence.any() or found.anchor.any() or found.has_spread)


def test_a_group_that_differs_only_in_its_anchors_still_teaches_its_structure():
    rewards, without, anchors = [1.35, 1.2, 1.35], [1.0, 1.0, 1.0], [0.7, 0.4, 0.7]
    found = advantages(rewards, anchors, without=without)
    assert found.keep.all() and not found.sequence.any()
    np.testing.assert_allclose(found.anchor, [0.35355339, -0.70710678, 0.35355339], atol=1e-7)
    assert not advantages(rewards, anchors, scale=0.0, without=without).keep.any()  # the arm without anchoring


def test_the_bound_of_the_format_reward_does_not_enter_the_sequence_part():
    """Two full answers, one with the better structure; R_fmt is 1 for both, so that R tells them apart no more."""
    found = advantages([2.0, 2.0], [0.7, 0.0], without=[2.0, 2.0])
    assert not found.sequence.any()
    assert found.anchor[0] > 0 > found.anchor[1]


@pytest.mark.parametrize("change", [{"credit": "sequence"}, {"normalise": "none"}, {"epsilon": 0.1}])
def test_each_option_changes_the_advantages(change):
    assert not same(advantages(REWARDS, ANCHORS), advantages(REWARDS, ANCHORS, replace(EXACT, **change)))


def test_filtering_changes_nothing_for_a_group_with_spread():
    unfiltered = advantages(REWARDS, ANCHORS, replace(EXACT, filter_zero_variance=False))
    assert same(advantages(REWARDS, ANCHORS), unfiltered) and unfiltered.keep.all()


def test_the_order_of_a_group_does_not_matter():
    order = np.array([3, 0, 4, 2, 1])
    straight, turned = advantages(REWARDS, ANCHORS), advantages(REWARDS[order], ANCHORS[order])
    np.testing.assert_allclose(turned.sequence, straight.sequence[order], rtol=1e-12)
    np.testing.assert_allclose(turned.anchor, straight.anchor[order], rtol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "normalise", "unit"),
    [
        ([1.0, 0.0], "std", 2.0),  # the std is 0.5
        ([1.0, 0.0], "none", 1.0),
        ([1.0, 1.0], "std", 1.0),  # no spread, no std
    ],
)
def test_a_reward_of_1_is_worth_its_groups_unit_of_advantage(rewards, normalise, unit):
    assert advantages(rewards, [0.0, 0.0], replace(EXACT, normalise=normalise)).unit == pytest.approx(unit)


def test_a_small_kl_stays_small_where_all_rewards_are_equal():
    group = advantages([1.0, 1.0], [0.0, 0.0], replace(EXACT, filter_zero_variance=False))
    sampled = np.array([False, True, True])
    of_two = [with_kl_penalty(np.zeros(3, np.float32), sampled, kl, group.unit) for kl in (1e-4, 3e-4)]
    np.testing.assert_allclose(of_two, [[0, -1e-4, -1e-4], [0, -3e-4, -3e-4]], rtol=1e-6)


def test_a_kl_penalty_is_measured_by_the_spread_of_the_rewards_without_it():
    group = advantages([1.0, 0.0], [0.0, 0.0])
    advantage = np.full(2, group.sequence[0], np.float32)
    # 1 − 0.1 against mean 0.5 and std 0.5 of the rewards: 0.8, where the token was sampled
    np.testing.assert_allclose(
        with_kl_penalty(advantage, np.array([True, False]), 0.1, group.unit), [0.8, 0], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["rewards", "anchors"])
def test_a_number_that_is_none_is_refused(name):
    given = {"rewards": [1.0, 2.0], "anchors": [0.0, 0.1]}
    given[name][1] = np.inf if name == "rewards" else NAN
    with pytest.raises(ValueError, match=f"^{name} .* finite"):
        advantages(given["rewards"], given["anchors"], without=given["rewards"])


def test_the_anchor_reaches_structural_tokens_only_and_only_sampled_ones_have_an_advantage():
    sampled = np.array([False, False, True, True, True, False, True])
    struct = np.array([False, True, False, True, False, False, True])
    found = token_advantages(-1.0, 0.25, sampled, struct)
    assert found.tolist() == [0.0, 0.0, -1.0, -0.75, -1.0, 0.0, -0.75]
    assert found.dtype == np.float32


def test_batch_normalisation_by_hand():
    advantage = np.array([3.0, 99.0, 1.0, -1.0, 1.0, NAN], np.float32)
    mask = np.array([True, False, True, True, True, False])
    moments = token_moments(advantage, mask)
    assert moments == TokenMoments(4, 4.0, 12.0)  # 3 + 1 − 1 + 1; 9 + 1 + 1 + 1
    # mean 1, std √(12 / 4 − 1) = √2
    expected = [2**0.5, 0.0, 0.0, -(2**0.5), 0.0, 0.0]
    np.testing.assert_allclose(batch_normalised(advantage, mask, moments, 1e-12), expected, rtol=1e-6)


def test_an_uneven_split_of_the_tokens_does_not_change_their_normalisation():
    random = np.random.default_rng(0)
    advantage, mask = random.standard_normal(29).astype(np.float32) + 3, random.random(29) < 0.7
    whole = batch_normalised(advantage, mask, token_moments(advantage, mask), 1e-6)
    parts = [(advantage[:5], mask[:5]), (advantage[5:], mask[5:])]
    moments = token_moments(*parts[0]) + token_moments(*parts[1])
    split = np.concatenate([batch_normalised(*part, moments, 1e-6) for part in parts])
    np.testing.assert_allclose(split, whole, atol=1e-6)
    assert abs(whole[mask].mean()) < 1e-6 and whole[mask].std() == pytest.approx(1.0, abs=1e-5)
    alone = batch_normalised(*parts[0], token_moments(*parts[0]), 1e-6)
    assert np.abs(alone - whole[:5]).max() > 1e-2


def test_a_step_without_loss_tokens_or_spread_is_normalised_to_zero():
    advantage = np.full(3, 0.1, np.float32)
    for mask in (np.zeros(3, bool), np.ones(3, bool)):
        assert np.abs(batch_normalised(advantage, mask, token_moments(advantage, mask), 1e-6)).max() < 1e-6


@pytest.mark.parametrize("epsilon", [0.0, -1e-6, NAN, float("inf")])
def test_an_impossible_epsilon_is_named(epsilon):
    with pytest.raises(ValueError, match=f"^advantage.epsilon={epsilon} must be a finite number above 0"):
        AdvantageConfig(epsilon=epsilon)
