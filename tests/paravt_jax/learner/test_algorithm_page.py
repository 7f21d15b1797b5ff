"""docs/algorithm.md has the numbers of the code, and its symbols name real settings, defaults and functions."""

import json
import re
import runpy
from importlib import import_module
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from paravt_jax.config import load_config
from paravt_jax.learner.advantages import group_advantages, group_rewards
from paravt_jax.learner.losses import LossCoefs, LossSpec, policy_loss
from paravt_jax.learner.settings import CORRECTIONS, AdvantageConfig, LossConfig
from paravt_jax.learner.variants import SampledTokens, StepCounts, para_grpo
from paravt_jax.rewards import RewardConfig, reward_terms

ROOT = Path(__file__).parents[3]
THINK = "<think>\nThe car turns left at 12 s."
CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 10, "end_time": 14}}</tool_call>'
EPISODES = {  # turns and outcomes of calls
    "a": ([f"{THINK}</think><answer>B</answer>"], []),
    "b": ([f"{THINK}</think>{CALL}", "<think>\nThe crop shows it.</think><answer>B</answer>"], ["ok"]),
    "c": ([f"{THINK}</think><answer>A</answer>"], []),
    "d": ([f"{THINK}<answer>A</answer>"], []),
}


def tables(page: str) -> list[list[list[str]]]:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    bodies = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in body.splitlines()] for body in bodies]


_, SYMBOLS, REWARDS, ADVANTAGES, TOKENS = tables("algorithm")


def numbers(rows: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) for cell in row] for row in rows])


@pytest.fixture(scope="module")
def terms():
    return [reward_terms(turns, outcomes, "B", "mcq", RewardConfig()) for turns, outcomes in EPISODES.values()]


def test_the_table_of_corrections_has_their_bounds():
    (rows,) = (table for table in tables("training") if table[0][0].startswith("`token_mis`"))
    written = {row[0].split("`")[1]: dict(re.findall(r"`(\w+)` ([\d.]+)", row[3])) for row in rows}
    bounds = {name: {bound: float(value) for bound, value in of_name.items()} for name, of_name in written.items()}
    assert bounds == CORRECTIONS


def test_the_rewards_of_the_group_equal_the_code(terms):
    assert [row[0] for row in REWARDS] == list(EPISODES)
    ours = [(term.accuracy, term.format, term.tool, term.total) for term in terms]
    np.testing.assert_allclose(numbers([row[2:] for row in REWARDS]), ours, atol=1e-12)


def test_the_advantages_of_the_group_equal_the_code(terms):
    config, reward = AdvantageConfig(), RewardConfig()
    rewards = group_rewards(terms, anchor_scale=reward.anchor_weight * reward.format_weight, config=config)
    ours = group_advantages(rewards, config)
    columns = (rewards.total, rewards.anchor, ours.sequence, ours.anchor, ours.sequence + ours.anchor)
    np.testing.assert_allclose(numbers([row[1:] for row in ADVANTAGES]), np.stack(columns, axis=1), atol=6e-5)


@pytest.mark.slow
def test_the_loss_of_the_tokens_equals_the_code(float64):
    advantage, ratio, weight, term = numbers([row[1:5] for row in TOKENS]).T
    prox = np.full(5, -1.0)
    arrays = (prox + np.log(ratio), prox, prox - np.log(weight), advantage)
    arrays = [jnp.asarray(array) for array in (*arrays, np.ones(5, bool))]
    tokens = SampledTokens(*arrays, StepCounts(5.0, 4.0, 1.0), arrays[0] + 0.1)
    config = LossConfig()
    sums = policy_loss(LossSpec.of(config, para_grpo), LossCoefs.of(config), tokens)
    assert term.sum() == pytest.approx(0.7362, abs=1e-4)
    assert sums.policy == pytest.approx(-term.sum() / 5, abs=1e-4)
    assert sums.loss - sums.policy == pytest.approx(0.01 * 0.00517, abs=1e-7)
    assert sums.loss == pytest.approx(-0.1472, abs=6e-5)
    assert sums.num_clipped_low + sums.num_clipped_high == sum("clip" in row[5] for row in TOKENS)
    assert sums.num_capped == sum("cap" in row[5] for row in TOKENS)


@pytest.mark.parametrize(("setting", "default", "function"), [row[1:] for row in SYMBOLS])
def test_a_symbol_names_a_setting_its_default_and_a_function(setting, default, function):
    module, *names = re.fullmatch(r"`(paravt_jax(?:\.[a-z_]+)+)\.(\w+)(?:\.(\w+))?`", function).groups()
    code = import_module(module)
    for name in filter(None, names):
        code = getattr(code, name)
    value = load_config(None)
    for name in [] if setting == "fixed" else setting.strip("`").split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    value = code if setting == "fixed" else value
    assert (value if isinstance(value, str) else json.dumps(value)) == default


@pytest.mark.slow
def test_the_figure_has_one_prompt_with_three_branches_that_do_not_attend_to_each_other(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "plot_packed_row.py"))
    batch = script["example_batch"]()
    branch, attends = batch.text.branch_ids[0], script["attends"](batch.text)
    assert set(branch[:17]) == {0, 1, 2, 3} and not attends[11:14, 7:11].any() and attends[11:14, :7].all()
    script["draw"](batch, tmp_path / "row.svg")
    assert (tmp_path / "row.svg").stat().st_size > 10_000
