"""Every loss against plain numpy and against other libraries, and user-defined losses."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax.learner.losses import LossCoefs, LossSpec, policy_loss
from paravt_jax.learner.objectives import variant_of
from paravt_jax.learner.settings import LossConfig
from paravt_jax.learner.variants import VARIANTS, SampledTokens, StepCounts

MAX_TOKENS = 24.0  # three sequences, eight tokens each
KL_COEF = 0.04


@pytest.fixture(autouse=True)
def exact(float64):
    with jax.numpy_dtype_promotion("strict"):
        yield


# Three sequences, one per row. Advantages are constant over a sequence, as in other libraries.
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], bool)
POLICY = np.array([[-0.9, -1.4, 0, 0], [-0.2, -2.0, -0.7, -1.1], [-1.6, -0.5, -0.3, 0]])
LOG_RATIO = np.array([[0.05, -0.30, 0, 0], [0.28, -0.10, 0.02, -0.45], [0.21, -0.02, 0.004, 0]])
TO_REF = np.array([[0.3, -0.2, 0, 0], [0.1, 0.0, -0.4, 0.2], [-0.1, 0.5, 0.05, 0]])
WEIGHT = np.array([[1.2, 0.7, 1, 1], [1.0, 3.0, 0.5, 1.1], [0.9, 1.3, 0.8, 1]])
ADVANTAGE = np.repeat([[-1.0], [0.5], [2.0]], 4, axis=1)
SCALE = {"gspo": 0.004}  # scale of the log-ratios, so that a clip of 3e-4 clips only some of them


def tokens_of(name, advantage=ADVANTAGE):
    prox = POLICY - SCALE.get(name, 1.0) * LOG_RATIO
    arrays = {"policy_logp": POLICY, "prox_logp": prox, "behavior_logp": prox - np.log(WEIGHT)}
    arrays |= {"ref_logp": POLICY + TO_REF, "advantage": advantage, "loss_mask": MASK}
    ids = np.repeat([[0], [1], [2]], 4, axis=1).astype(np.int32)
    arrays |= {"sequence_ids": ids, "episode_tokens": MASK.sum(1).astype(np.int32)[ids]}
    return {name: jnp.asarray(values) for name, values in arrays.items()}


def loss_and_gradient(config, arrays):
    counts = StepCounts(float(MASK.sum()), 3.0, MAX_TOKENS)

    def loss(policy_logp):
        tokens = SampledTokens(**(arrays | {"policy_logp": policy_logp}), num_sequences=3, counts=counts)
        sums = policy_loss(LossSpec.of(config, variant_of(config)), LossCoefs.of(config), tokens)
        return sums.loss, sums

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(arrays["policy_logp"])
    num_tokens, *counted = map(float, sums[4:])
    assert max(counted) <= num_tokens == MASK.sum()
    return float(value), np.asarray(gradient)


def in_numpy(name, config, arrays):
    """Computes loss and gradient token by token as in the papers."""
    params, array = config.all_params, {name: np.asarray(values) for name, values in arrays.items()}
    loss, gradient = 0.0, np.zeros(MASK.shape)
    for row, length in enumerate(MASK.sum(1)):
        log_ratio = (array["policy_logp"] - array["prox_logp"])[row, :length]
        if name == "gspo":
            log_ratio = np.full(length, log_ratio.mean())
        per_sequence = 1 / (length * 3)
        share = {"grpo": per_sequence, "gspo": per_sequence, "dr_grpo": 1 / MAX_TOKENS}.get(name, 1 / MASK.sum())
        for t in range(length):
            ratio, advantage = np.exp(log_ratio[t]), array["advantage"][row, t]
            weight = np.exp(array["prox_logp"][row, t] - array["behavior_logp"][row, t])
            weight = weight if weight <= config.all_bounds["max_weight"] else 0.0
            if name == "cispo":
                capped = min(ratio, params["max_ratio"])
                term, slope = capped * advantage * array["policy_logp"][row, t], capped * advantage
            else:
                bounded = min(max(ratio, 1 - params["clip_low"]), 1 + params["clip_high"])
                term = min(ratio * advantage, bounded * advantage)
                slope = ratio * advantage if ratio * advantage <= bounded * advantage else 0.0
            to_ref = array["ref_logp"][row, t] - array["policy_logp"][row, t]
            kl = np.exp(to_ref) - 1 - to_ref
            loss += share * (-weight * term + config.kl_coef * kl)
            gradient[row, t] = share * (-weight * slope + config.kl_coef * (1 - np.exp(to_ref)))
    return loss, gradient


def config_of(name):
    params = {"max_ratio": 1.2} if name == "cispo" else {}
    return LossConfig(name, params, correction_bounds={"max_weight": 2.5}, kl_coef=KL_COEF)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("per_token", [False, True], ids=["advantage per sequence", "advantage per token"])
def test_a_loss_equals_plain_numpy(name, per_token):
    spread = np.array([[0.1, -0.4, 0, 0], [0.3, 0.0, -1.0, 0.2], [0.0, -0.1, -2.5, 0]])
    arrays = tokens_of(name, ADVANTAGE + spread if per_token else ADVANTAGE)
    loss, gradient = loss_and_gradient(config_of(name), arrays)
    expected, expected_gradient = in_numpy(name, config_of(name), arrays)
    assert loss == pytest.approx(expected, abs=1e-13)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-13)


# The results of trl 1.16.0 and verl 0.9.1 for the arrays above, in float64, without a cap of the weights: the loss, and
# its gradient at the tokens of each sequence. Computed by the functions in their wheels:
# `GRPOTrainer._compute_loss` (with vLLM's correction), `compute_policy_loss_vanilla | gspo | cispo`, `agg_loss` and
# `kl_penalty_forward`. They agree to 2e-9, because verl adds 1e-8 to a length. For gspo the gradient is verl's, which
# also implements GSPO-token: trl spreads the weights of a sequence over its tokens.
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_loss_equals_other_libraries(name):
    config = replace(config_of(name), correction_bounds={"max_weight": math.inf})
    loss, gradient = loss_and_gradient(config, tokens_of(name))
    expected, expected_gradient = PUBLISHED[name]
    assert loss == pytest.approx(expected, abs=3e-9)
    np.testing.assert_allclose(gradient[MASK], np.concatenate(expected_gradient), atol=1e-8)


def test_gspo_equals_the_objective_of_its_paper():
    """The mean over sequences of min(s · A, clip(s) · A), differentiated through the sequence's own ratio."""
    arrays = tokens_of("gspo")
    arrays |= {"behavior_logp": arrays["prox_logp"]}

    def objective(policy):
        log_ratio = jnp.where(MASK, policy - arrays["prox_logp"], 0).sum(1) / jnp.asarray(MASK.sum(1), float)
        ratio, advantage = jnp.exp(log_ratio), jnp.asarray(ADVANTAGE[:, 0])
        return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage))

    loss, gradient = loss_and_gradient(LossConfig("gspo", kl_coef=0.0), arrays)
    expected, expected_gradient = jax.value_and_grad(objective)(arrays["policy_logp"])
    assert loss == pytest.approx(float(expected), abs=1e-14)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-14)
    assert not gradient[0].any() and gradient[1].any()  # the clip affects the first sequence and not the second


OWN = """
import jax.numpy as jnp
from paravt_jax.learner.variants import TokenLoss, SampledTokens


def floored(tokens: SampledTokens, *, floor: float, power: float = 1.0) -> TokenLoss:
    loss, mask = -jnp.maximum(tokens.ratio, floor) ** power * tokens.advantage, tokens.loss_mask
    return TokenLoss(jnp.where(mask, loss, 1), jnp.where(mask, tokens.token_mean, 1), mask | True)  # 1 is ignored


def leaving(tokens: SampledTokens) -> TokenLoss:
    raise SystemExit(0)


def averaging(tokens: SampledTokens) -> TokenLoss:
    return TokenLoss(-(tokens.ratio * tokens.advantage).mean(), tokens.token_mean)


def forgetting(tokens: SampledTokens):
    return -tokens.ratio * tokens.advantage


number = 3
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_users_function_is_a_loss_with_its_own_parameters(own):
    config = LossConfig(f"{own}:floored", {"floor": 0.8}, "none", kl_coef=0.0)
    ratio = np.exp(LOG_RATIO)
    for power in (1.0, 2.0):
        with_power = replace(config, params={"floor": 0.8, "power": power} if power != 1 else {"floor": 0.8})
        loss, gradient = loss_and_gradient(with_power, tokens_of("para_grpo"))
        assert loss == pytest.approx(-np.sum((np.maximum(ratio, 0.8) ** power * ADVANTAGE)[MASK]) / 9)
        slope = power * ratio**power * ADVANTAGE / 9
        np.testing.assert_allclose(gradient, np.where(MASK & (ratio > 0.8), -slope, 0), atol=1e-15)
    assert variant_of(config) is variant_of(with_power)  # so that both share a compiled program


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("leaving", RuntimeError, r"^SystemExit: 0"),
        ("averaging", ValueError, r"^loss\.name: expected a TokenLoss with a loss for each token, got TokenLoss\("),
        ("forgetting", ValueError, r"^loss\.name: expected a TokenLoss"),
    ],
)
def test_a_users_function_that_exits_or_has_another_result_is_an_error(name, error, message, own):
    config = LossConfig(f"{own}:{name}", {}, "none", kl_coef=0.0)
    with pytest.raises(error, match=message):
        loss_and_gradient(config, tokens_of("para_grpo"))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("mine.py:floored", {}, r"mine\.py:floored needs loss\.params\.floor: it has no default there"),
        ("mine.py:floored", {"floor": 1.0, "roof": 2.0}, r"params\.roof is not a .* of .*, which has floor, power$"),
        ("mine.py:missing", {}, r"loss\.name=.*mine\.py:missing: the file has no missing$"),
        ("mine.py:number", {}, r"is not a function$"),
        ("broken.py:f", {}, r"broken\.py:f cannot be loaded: ModuleNotFoundError: No module named 'nothing_of_"),
        ("gone.py:f", {}, r"gone\.py:f: there is no file /.*gone\.py"),
    ],
)
def test_an_unusable_function_is_rejected_in_one_line(own, name, params, message):
    own.with_name("broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ValueError, match=message) as raised:
        variant_of(LossConfig(f"{own.parent}/{name}", params))
    assert "\n" not in str(raised.value)
