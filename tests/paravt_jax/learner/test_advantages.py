"""Advantages by hand, what missing episodes and equal rewards do, and that every option changes what it names."""

from dataclasses import replace

import numpy as np
import pytest

from paravt_jax.learner.advantages import (
    GroupRewards,
    group_advantages,
    group_rewards,
    token_advantages,
    with_kl_penalty,
)
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import OwnTerm, reward_terms

NAN = float("nan")
EXACT = AdvantageConfig()
APART = replace(EXACT, terms="apart")
REWARDS = np.array([2.0, 1.0, 0.0, 2.0, 0.5])
ANCHORS = np.array([0.7, 0.4, -0.3, 0.0, 0.7])
SCALE = 0.5  # λ · w_fmt


@pytest.fixture(autouse=True)
def negligible_epsilon(monkeypatch):
    """So that the values worked out by hand are exact."""
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 1e-12)


def of_terms(present=None, anchors=(), scale=SCALE, **terms):
    """A group's rewards by (weight, values)."""
    size = len(next(iter(terms.values()))[1])
    present = np.ones(size, bool) if present is None else np.array(present)
    values = {name: np.array(row, float) for name, (_, row) in terms.items()}
    weights = {name: np.full(size, float(weight)) for name, (weight, _) in terms.items()}
    return GroupRewards(present, values, weights, {n: np.array(row, float) for n, row in dict(anchors).items()}, scale)


def advantages(rewards, anchors, config=EXACT, *, scale=SCALE, without=None):
    """NaN marks a missing episode."""
    rewards, anchors = np.array(rewards, float), np.array(anchors, float)
    without = rewards - scale * anchors if without is None else np.array(without, float)
    within = config.credit == "sequence"
    base, scale = (rewards, 0.0) if within else (without, scale)
    return group_advantages(of_terms(~np.isnan(rewards), {"anchor": anchors}, scale, R=(1, base)), config)


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


def test_epsilon_is_added_to_the_std(monkeypatch):
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 0.5)
    found = advantages([1.0, 0.0], [0.0, 0.0], EXACT)
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


@pytest.mark.parametrize(
    "change",
    [{"credit": "sequence"}, {"credit": "span"}, {"normalise": "none"}, {"normalise": "loo"}],
)
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
        ([1.0, 0.0], "loo", 1.0),
        ([1.0, 1.0], "std", 1.0),  # no spread, no std
    ],
)
def test_a_reward_of_1_is_worth_its_groups_unit_of_advantage(rewards, normalise, unit):
    assert advantages(rewards, [0.0, 0.0], replace(EXACT, normalise=normalise)).unit == pytest.approx(unit)


def test_a_small_kl_stays_small_where_all_rewards_are_equal():
    group = advantages([1.0, 1.0], [0.0, 0.0], replace(EXACT, filter_zero_variance=False))
    sampled = np.array([False, True, True])
    of_two = [with_kl_penalty(np.zeros(3, np.float32), sampled, kl * group.unit) for kl in (1e-4, 3e-4)]
    np.testing.assert_allclose(of_two, [[0, -1e-4, -1e-4], [0, -3e-4, -3e-4]], rtol=1e-6)


def test_a_kl_penalty_is_measured_by_the_spread_of_the_rewards_without_it():
    group = advantages([1.0, 0.0], [0.0, 0.0])
    advantage = np.full(2, group.sequence[0], np.float32)
    # 1 − 0.1 against mean 0.5 and std 0.5 of the rewards: 0.8, where the token was sampled
    np.testing.assert_allclose(
        with_kl_penalty(advantage, np.array([True, False]), 0.1 * group.unit), [0.8, 0], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["R", "anchor"])
def test_a_number_that_is_none_is_refused(name):
    given = {"R": [1.0, 2.0], "anchor": [0.0, 0.1]}
    given[name][1] = np.inf if name == "R" else NAN
    with pytest.raises(ValueError, match=f"^{name} must be finite in every episode with a reward"):
        of_terms(anchors={"anchor": given["anchor"]}, R=(1, given["R"]))


def test_only_sampled_tokens_have_an_advantage():
    sampled = np.array([False, False, True, True, True, False, True])
    anchor = 0.25 * np.array([False, True, False, True, False, False, True])
    found = token_advantages(-1.0, anchor, sampled)
    assert found.tolist() == [0.0, 0.0, -1.0, -0.75, -1.0, 0.0, -0.75]
    assert found.dtype == np.float32


def test_leave_one_out_measures_against_the_mean_of_the_others():
    found = advantages([1.0, 0.0, 0.5, NAN], [0.0, 0.6, 0.0, NAN], replace(EXACT, normalise="loo"), scale=0.0)
    np.testing.assert_allclose(found.sequence, [0.75, -0.75, 0.0, 0.0])  # 1 − 0.25, 0 − 0.75, 0.5 − 0.5


def test_the_unit_of_a_step_is_the_spread_within_its_groups():
    wide, narrow, equal = (of_terms(R=(1, row)) for row in ([2.0, 0.0], [5.1, 4.9], [3.0, 3.0]))
    config = replace(EXACT, normalise="batch")
    found = [group_advantages(group, config, [wide, narrow, equal]) for group in (wide, narrow, equal)]
    # distances ±1 and ±0.1, the group that teaches nothing left out: std √(2.02 / 4) = 0.7106
    np.testing.assert_allclose([group.sequence[0] for group in found], [1.4072, 0.14072, 0.0], rtol=1e-4)
    assert [group.unit for group in found] == pytest.approx([1.4072] * 3, rel=1e-4)
    kept = replace(config, filter_zero_variance=False)
    all_count = group_advantages(wide, kept, [wide, narrow, equal])
    assert all_count.sequence[0] == pytest.approx((6 / 2.02) ** 0.5)  # 1 / √(2.02 / 6)


def test_a_group_alone_is_its_own_step():
    batch, std = (advantages(REWARDS, ANCHORS, replace(EXACT, normalise=kind)) for kind in ("batch", "std"))
    assert same(batch, std)


CALLED = [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("config", "worth"), [(EXACT, 1.0), (APART, 0.3)])
def test_the_weight_of_a_small_bonus_in_a_group_that_is_otherwise_equal(config, worth):
    """Together, 0.3 · R_tool has the advantages of R_tool: the std takes every weight out again."""
    small, full = (
        group_advantages(of_terms(accuracy=(1, [1.0] * 4), tool=(weight, CALLED)), config) for weight in (0.3, 1)
    )
    np.testing.assert_allclose(small.sequence, worth * full.sequence)
    np.testing.assert_allclose(full.sequence, [3**0.5, *3 * [-(3**-0.5)]])  # 0.75 and −0.25 over √3 / 4


def test_terms_apart_by_hand():
    found = group_advantages(of_terms(accuracy=(1, [1.0, 0.0]), tool=(0.3, [0.0, 0.2]), format=(2, [0.7, 0.7])), APART)
    np.testing.assert_allclose(found.sequence, [0.7, -0.7])  # ±1 and ∓0.3; a term without spread says nothing


def test_terms_apart_that_cancel_out_still_teach():
    rewards = of_terms(accuracy=(0.5, [1.0, 0.0]), tool=(1, [0.0, 0.5]))
    assert not group_advantages(rewards, EXACT).has_spread
    np.testing.assert_allclose(group_advantages(rewards, APART).sequence, [-0.5, 0.5])


def test_apart_the_unit_of_a_step_is_that_of_each_term():
    first = of_terms(accuracy=(1, [1.0, 0.0]), tool=(0.5, [0.0, 0.0]))
    second = of_terms(accuracy=(1, [0.0, 0.0]), tool=(0.5, [0.1, 0.0]), own=(1, [0.0, 3.0]))
    config = replace(APART, normalise="batch", filter_zero_variance=False)
    found = [group_advantages(group, config, [first, second]) for group in (first, second)]
    # of four distances two are ±d: std d / √2; of the own term there are two only
    np.testing.assert_allclose(found[0].sequence, [2**0.5, -(2**0.5)])
    np.testing.assert_allclose(found[1].sequence, [0.5 * 2**0.5 - 1, 1 - 0.5 * 2**0.5])


def test_properties_of_the_anchor_add_up_to_its_advantage():
    parts = {"think_closing": [0.4, 0.4, 0.0], "flow": [0.3, 0.0, 0.0], "think_unclosed": [0.0, 0.0, -0.3]}
    rewards = of_terms(anchors=parts, R=(1, [1.0, 1.0, 0.0]))
    together, apart = (group_advantages(rewards, replace(EXACT, credit=credit)) for credit in ("token", "span"))
    assert not together.properties and not apart.anchor.any()
    np.testing.assert_allclose(sum(apart.properties.values()), together.anchor)
    np.testing.assert_allclose(apart.sequence, together.sequence)
    # R_anchor is 0.7, 0.4, −0.3: variance 0.74 / 3 − 0.8² / 9 = 0.17556; the flow is 0.2 above its mean of 0.1
    assert apart.properties["flow"][0] == pytest.approx(0.5 * 0.2 / 0.17556**0.5, rel=1e-4)


def test_properties_that_cancel_out_still_teach():
    rewards = of_terms(anchors={"one": [0.4, 0.0], "other": [0.0, 0.4]}, R=(1, [1.0, 1.0]))
    assert not group_advantages(rewards, EXACT).has_spread
    found = group_advantages(rewards, replace(EXACT, credit="span"))
    assert found.keep.all()
    np.testing.assert_allclose(found.properties["one"], [0.1, -0.1])  # 0.5 · ±0.2, and no std


THINK = "<think>\nlet me look</think>"


def test_what_members_earned_becomes_rows_and_what_one_lacks_is_worth_nothing_to_it():
    config, own = RewardConfig(tool_call_weight=0.2), (OwnTerm("brief", 0.5, weight=2.0),)
    one = reward_terms([f"{THINK}<answer>B</answer>"], [], "B", "mcq", config, own=own)
    two = reward_terms([f"{THINK}<answer>C"], ["ok"], "B", "mcq", config)
    found = group_rewards([one, None, two], anchor_scale=0.5, config=EXACT)
    assert found.present.tolist() == [True, False, True]
    assert found.terms["accuracy"].tolist() == [1, 0, 0] and found.terms["tool_call"].tolist() == [0, 0, 1]
    assert found.terms["brief"].tolist() == [0.5, 0, 0] and found.weights["brief"].tolist() == [2, 2, 2]
    assert found.weights["tool_call"].tolist() == [0.2] * 3
    np.testing.assert_allclose(found.total[[0, 2]], [one.total_without_anchor, two.total_without_anchor])
    np.testing.assert_allclose(found.anchor, [0.7, 0.0, 0.4])
    within = group_rewards([one, None, two], anchor_scale=0.5, config=replace(EXACT, credit="sequence"))
    np.testing.assert_allclose(within.total[[0, 2]], [one.total, two.total])
    assert within.anchor_scale == 0


def test_a_group_of_missing_members_has_no_advantage():
    found = group_advantages(group_rewards([None, None], anchor_scale=0.5, config=EXACT), EXACT)
    assert not (found.keep.any() or found.sequence.any()) and found.num_missing == 2


@pytest.mark.parametrize("normalise", ["none", "loo"])
def test_terms_apart_without_a_std_are_refused(normalise):
    with pytest.raises(
        ValueError, match=rf"^advantage\.terms=apart does nothing with advantage\.normalise={normalise}"
    ):
        AdvantageConfig(terms="apart", normalise=normalise)
