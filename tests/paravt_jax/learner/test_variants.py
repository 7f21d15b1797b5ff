"""Every kind of loss beside a plain numpy one, beside other libraries, and by what sets it apart from the others."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax.learner.losses import LossCoefs, LossSpec, policy_loss
from paravt_jax.learner.objectives import variant_of
from paravt_jax.learner.settings import PARAMS, LossConfig
from paravt_jax.learner.variants import VARIANTS, SampledTokens, StepCounts

KINDS = list(VARIANTS)
MAX_TOKENS = 24.0  # three sequences, eight tokens each
KL_COEF = 0.04


@pytest.fixture(autouse=True)
def exact(float64):
    with jax.numpy_dtype_promotion("strict"):
        yield


# Three sequences; none is in two rows. Advantages are of sequences, as other libraries know them.
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], bool)
POLICY = np.array([[-0.9, -1.4, 0, 0], [-0.2, -2.0, -0.7, -1.1], [-1.6, -0.5, -0.3, 0]])
LOG_RATIO = np.array([[0.05, -0.30, 0, 0], [0.28, -0.10, 0.02, -0.45], [0.21, -0.02, 0.004, 0]])
TO_REF = np.array([[0.3, -0.2, 0, 0], [0.1, 0.0, -0.4, 0.2], [-0.1, 0.5, 0.05, 0]])
WEIGHT = np.array([[1.2, 0.7, 1, 1], [1.0, 3.0, 0.5, 1.1], [0.9, 1.3, 0.8, 1]])
ADVANTAGE = np.repeat([[-1.0], [0.5], [2.0]], 4, axis=1)
SCALE = {"gspo": 0.004}  # of the log-ratios, so that a clip of 3e-4 holds some and lets others pass


def given(kind, advantage=ADVANTAGE, mask=MASK):
    prox = POLICY - SCALE.get(kind, 1.0) * LOG_RATIO
    arrays = {"policy_logp": POLICY, "prox_logp": prox, "behavior_logp": prox - np.log(WEIGHT)}
    arrays |= {"ref_logp": POLICY + TO_REF, "advantage": advantage}
    ids = np.repeat([[0], [1], [2]], 4, axis=1)
    return {name: jnp.asarray(values) for name, values in arrays.items()} | {
        "loss_mask": jnp.asarray(mask),
        "sequence_ids": jnp.asarray(ids, jnp.int32),
    }


def counts_of(mask=MASK):
    return StepCounts(float(mask.sum()), float(mask.any(1).sum()), MAX_TOKENS)


def loss_and_gradient(config, arrays, counts=None):
    counts = counts or counts_of(np.asarray(arrays["loss_mask"]))

    def loss(policy_logp):
        tokens = SampledTokens(**(arrays | {"policy_logp": policy_logp}), num_sequences=3, counts=counts)
        return policy_loss(LossSpec.of(config, variant_of(config)), LossCoefs.of(config), tokens).loss

    value, gradient = jax.value_and_grad(loss)(arrays["policy_logp"])
    return float(value), np.asarray(gradient)


def in_numpy(kind, config, arrays):
    """Loss and gradient token by token, as the papers write them."""
    numbers, array = config.all_params, {name: np.asarray(values) for name, values in arrays.items()}
    mask = array["loss_mask"]
    loss, gradient = 0.0, np.zeros(mask.shape)
    for row in range(3):
        kept = [t for t in range(4) if mask[row, t]]
        log_ratio = array["policy_logp"][row] - array["prox_logp"][row]
        if kind == "gspo":
            log_ratio = np.full(4, np.mean(log_ratio[kept]))
        for t in kept:
            share = {
                "grpo": 1 / (len(kept) * 3),
                "gspo": 1 / (len(kept) * 3),
                "dr_grpo": 1 / MAX_TOKENS,
            }.get(kind, 1 / mask.sum())
            ratio, advantage = np.exp(log_ratio[t]), array["advantage"][row, t]
            weight = np.exp(array["prox_logp"][row, t] - array["behavior_logp"][row, t])
            weight = weight if weight <= config.behavior_cap else 0.0
            if kind == "cispo":
                capped = min(ratio, numbers["max_ratio"])
                term, slope = capped * advantage * array["policy_logp"][row, t], capped * advantage
            else:
                bounded = min(max(ratio, 1 - numbers["clip_low"]), 1 + numbers["clip_high"])
                term = min(ratio * advantage, bounded * advantage)
                slope = ratio * advantage if ratio * advantage <= bounded * advantage else 0.0
            to_ref = array["ref_logp"][row, t] - array["policy_logp"][row, t]
            kl = np.exp(to_ref) - 1 - to_ref
            loss += share * (-weight * term + config.kl_coef * kl)
            gradient[row, t] = share * (-weight * slope + config.kl_coef * (1 - np.exp(to_ref)))
    return loss, gradient


def config_of(kind):
    return LossConfig(kind, {"max_ratio": 1.2} if kind == "cispo" else {}, behavior_cap=2.5, kl_coef=KL_COEF)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_token", [False, True], ids=["one advantage", "an advantage a token"])
def test_a_kind_equals_plain_numpy(kind, per_token):
    spread = np.array([[0.1, -0.4, 0, 0], [0.3, 0.0, -1.0, 0.2], [0.0, -0.1, -2.5, 0]])
    arrays = given(kind, ADVANTAGE + spread if per_token else ADVANTAGE)
    loss, gradient = loss_and_gradient(config_of(kind), arrays)
    expected, expected_gradient = in_numpy(kind, config_of(kind), arrays)
    assert loss == pytest.approx(expected, abs=1e-13)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-13)


# What trl 1.16.0 and verl 0.9.1 give for the arrays above, in float64, without a cap of the weights: the loss, and its
# gradient at the tokens of each sequence. Computed by their own functions as they stand in the wheels:
# `GRPOTrainer._compute_loss` (with vLLM's correction), `compute_policy_loss_vanilla | gspo | cispo`, `agg_loss` and
# `kl_penalty_forward`. The two agree to 2e-9, which is verl's 1e-8 beside a length. In gspo the loss is both's and the
# gradient verl's, which also has the form of GSPO-token: trl's spreads the weights of a sequence over its tokens.
PUBLISHED = {
    "grpo": (
        -0.6101863863,
        [[0.20792183, 0.00120846], [-0.00035057, -0.11310468, -0.02015526, -0.02996263],
         [0.00042294, -0.28605171, -0.17871818]],
    ),
    "dapo": (
        -0.7938015536,
        [[0.13861455, 0.00080564], [-0.00046743, -0.15080624, -0.02687368, -0.03995018],
         [-0.24631267, -0.28605171, -0.17871818]],
    ),
    "dr_grpo": (
        -0.2934830614,
        [[0.05198046, 0.00030212], [-0.00017528, -0.05655234, -0.01007763, -0.01498132],
         [0.0001586, -0.10726939, -0.06701932]],
    ),
    "gspo": (
        -0.5820740976,
        [[-0.00233239, 0.00120846], [-0.04200682, -0.12496875, -0.01972919, -0.04655989],
         [-0.19962879, -0.29184683, -0.17805164]],
    ),
    "cispo": (
        0.7513813915,
        [[0.13861455, 0.05842484], [-0.06713409, -0.15080624, -0.02687368, -0.03995018],
         [-0.23957706, -0.28605171, -0.17871818]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_kind_equals_that_of_other_libraries(kind):
    loss, gradient = loss_and_gradient(replace(config_of(kind), behavior_cap=math.inf), given(kind))
    expected, expected_gradient = PUBLISHED[kind]
    assert loss == pytest.approx(expected, abs=3e-9)
    np.testing.assert_allclose(gradient[MASK], np.concatenate(expected_gradient), atol=1e-8)


def test_every_kind_has_numbers_and_every_numbers_a_kind():
    assert list(VARIANTS) == list(PARAMS)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("para_grpo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28}),
        ("dr_grpo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", {"max_ratio": 5.0}),
    ],
)
def test_a_kind_begins_with_the_numbers_of_its_paper(kind, numbers):
    assert LossConfig(kind).all_params == numbers
    one = next(iter(numbers))
    assert LossConfig(kind, {one: 1.01 * numbers[one]}).all_params == numbers | {one: 1.01 * numbers[one]}


def test_how_much_a_token_weighs_by_hand():
    """Without ratios, weights or KL the gradient is minus the token's share: lengths 2, 4 and 3, and room for 24."""
    arrays = given("grpo", np.ones((3, 4)))
    arrays |= dict.fromkeys(("prox_logp", "behavior_logp", "ref_logp"), arrays["policy_logp"])

    def shares(kind):
        return -loss_and_gradient(LossConfig(kind, kl_coef=0.0), arrays)[1][MASK]

    even = np.ones(9)
    for kind in ("para_grpo", "dapo", "cispo"):
        np.testing.assert_allclose(shares(kind), even / 9)
    np.testing.assert_allclose(shares("dr_grpo"), even / 24)
    for kind in ("grpo", "gspo"):
        np.testing.assert_allclose(shares(kind), np.repeat([1 / 6, 1 / 12, 1 / 9], [2, 4, 3]))


def test_the_objective_of_gspo_is_that_of_its_paper():
    """The mean over sequences of min(s · A, clip(s) · A), differentiated through the sequence's own ratio."""
    arrays = given("gspo")
    arrays |= {"behavior_logp": arrays["prox_logp"]}

    def objective(policy):
        log_ratio = jnp.where(MASK, policy - arrays["prox_logp"], 0).sum(1) / jnp.asarray(MASK.sum(1), float)
        ratio, advantage = jnp.exp(log_ratio), jnp.asarray(ADVANTAGE[:, 0])
        return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage))

    loss, gradient = loss_and_gradient(LossConfig("gspo", kl_coef=0.0), arrays)
    expected, expected_gradient = jax.value_and_grad(objective)(arrays["policy_logp"])
    assert loss == pytest.approx(float(expected), abs=1e-14)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-14)
    assert not gradient[0].any() and gradient[1].any()  # the clip holds one sequence, and not another


def test_cispo_caps_a_ratio_and_keeps_the_gradient_of_its_token():
    arrays = given("cispo", np.full((3, 4), 1.0))
    capped = loss_and_gradient(LossConfig("cispo", {"max_ratio": 1.1}, kl_coef=0.0), arrays)[1]
    clipped = loss_and_gradient(LossConfig("para_grpo", {"clip_high": 0.1}, kl_coef=0.0), arrays)[1]
    assert capped[1, 0] == pytest.approx(-1.1 / 9)  # weight 1, ratio e^0.28
    assert clipped[1, 0] == 0


def test_no_length_and_no_other_episode_changes_what_a_token_of_dr_grpo_weighs():
    fewer = MASK & (np.arange(3)[:, None] < 2)
    whole, without = (loss_and_gradient(config_of("dr_grpo"), given("dr_grpo", mask=mask))[1] for mask in (MASK, fewer))
    np.testing.assert_allclose(whole[:2], without[:2], atol=1e-15)
    of_dapo = [loss_and_gradient(config_of("dapo"), given("dapo", mask=mask))[1][:2] for mask in (MASK, fewer)]
    assert np.abs(of_dapo[0] - of_dapo[1]).max() > 1e-2


OWN = """
import jax.numpy as jnp
from paravt_jax.learner.variants import TokenLoss, SampledTokens


def floored(tokens: SampledTokens, *, floor: float, power: float = 1.0) -> TokenLoss:
    return TokenLoss(-jnp.maximum(tokens.ratio, floor) ** power * tokens.advantage, tokens.token_mean)


def leaving(tokens: SampledTokens) -> TokenLoss:
    raise SystemExit(0)


number = 3
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_function_of_ones_own_is_a_loss_with_its_own_numbers(own):
    config = LossConfig(f"{own}:floored", {"floor": 0.8}, "none", kl_coef=0.0)
    loss, gradient = loss_and_gradient(config, given("para_grpo"))
    ratio = np.exp(LOG_RATIO)
    assert loss == pytest.approx(-np.sum((np.maximum(ratio, 0.8) * ADVANTAGE)[MASK]) / 9)
    np.testing.assert_allclose(gradient, np.where(MASK & (ratio > 0.8), -ratio * ADVANTAGE / 9, 0), atol=1e-15)
    squared, _ = loss_and_gradient(replace(config, params={"floor": 0.8, "power": 2.0}), given("para_grpo"))
    assert squared == pytest.approx(-np.sum((np.maximum(ratio, 0.8) ** 2 * ADVANTAGE)[MASK]) / 9)
    assert variant_of(config) is variant_of(replace(config, params={"floor": 0.5}))  # or each would be compiled anew


def test_a_function_of_ones_own_that_exits_is_an_error_and_no_success(own):
    config = LossConfig(f"{own}:leaving", {}, "none", kl_coef=0.0)
    with pytest.raises(RuntimeError, match=r"^SystemExit: 0"):
        loss_and_gradient(config, given("para_grpo"))


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("floored", {}, r"mine\.py:floored needs loss\.params\.floor: it has no default there"),
        ("floored", {"floor": 0.1, "roof": 2.0}, r"loss\.params\.roof is not a .* of .*, which has floor, power$"),
        ("missing", {}, r"loss\.name=.*mine\.py:missing: the file has no function missing$"),
        ("number", {}, r"the file has no function number$"),
    ],
)
def test_what_is_wrong_with_ones_own_function_is_one_sentence(own, name, numbers, message):
    with pytest.raises(ValueError, match=message) as refused:
        variant_of(LossConfig(f"{own}:{name}", numbers))
    assert "\n" not in str(refused.value)


def test_a_file_that_does_not_load_is_named_with_what_it_said(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ValueError, match=r"broken\.py:f cannot be loaded: ModuleNotFoundError: No module named 'noth"):
        variant_of(LossConfig(f"{tmp_path}/broken.py:f"))
    with pytest.raises(ValueError, match=r"gone\.py:f: there is no file /.*gone\.py"):
        variant_of(LossConfig("gone.py:f"))
