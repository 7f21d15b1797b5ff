"""The map: its cells and runs, the table model that predicts it, and the page."""

import json
from dataclasses import replace

import numpy as np
import pytest

from model_port.layout import RESULTS_FILE
from paravt_jax.config import load_config
from paravt_jax.run.log import METRICS_FILE
from scripts.miniature import map_page
from scripts.miniature.arms import CONFIGS
from scripts.miniature.cells import BUDGETS, CELLS, PREDICTIONS, Cell, read_rows, write_rows_of_map
from scripts.miniature.experiment import COST_FILE
from scripts.miniature.map import Runs, costs, finished_in, main
from scripts.miniature.table_model import Table, predicted, scored

CELL = Cell(0.95, 0.2)


def test_a_cell_sets_the_dials_of_its_world():
    world = Cell(0.75, 0.6).world
    assert (world.traces.wrong_frac, world.calls_frac) == (0.25, 0.6)


@pytest.mark.slow
def test_cells_with_the_same_reports_continue_the_same_cold_start_and_a_seed_is_its_own_world(tmp_path):
    first, second = (Runs.of(tmp_path, Cell(0.95, calls), 0, ["grpo", "weak_prior"]) for calls in (0.2, 0.6))
    assert first.jobs()[:2] == second.jobs()[:2] and first.jobs()[2:4] != second.jobs()[2:4]
    assert [job.name for job in first.jobs()[:4]] == ["sft", "sft_weak"] * 2
    for base, continued in zip(first.jobs()[:2], first.jobs()[2:4], strict=True):
        assert f"model.path={base.done.parent}" in continued.settings and continued.num_steps < base.num_steps
    other = Runs.of(tmp_path, Cell(0.95, 0.2), 1, ["grpo"])
    assert other.own.videos != first.own.videos and other.own.world_seed == 1
    assert all("seed=1" in job.settings for job in other.jobs() if job.kind != "eval")


def evaluated(runs: Runs, name: str, accuracy: float) -> None:
    scores = {"strict": {"interval_95": [accuracy - 0.1, accuracy + 0.1]}}
    metrics = {"accuracy_mean": accuracy, "tool_calls_mean": 0.5, "format_reward": 0.9, "parseable_frac": 0.8}
    cell = {"dispatch": "parallel", "metrics": metrics, "scores": scores, "n": {"rows": 128}}
    cells = [cell | {"frame_budget": frames} for frames in BUDGETS]
    directory = runs.own.directory / "eval" / name
    directory.mkdir(parents=True)
    (directory / RESULTS_FILE).write_text(json.dumps({"cells": cells}))


def test_finished_runs_have_rows_with_intervals_and_costs(tmp_path):
    runs = Runs.of(tmp_path, CELL, 0, ["grpo", "para_grpo"])
    evaluated(runs, "grpo/seed0", 0.5)
    trained = runs.own.directory / "grpo" / "seed0"
    trained.mkdir(parents=True)
    means = {"accuracy_mean": 0.5, "tool_calls_mean": 0.5, "format_reward": 0.5, "parseable_frac": 0.5}
    steps = [{"step": n} | {f"rollout/{key}": value * n for key, value in means.items()} for n in range(1, 21)]
    (trained / METRICS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    rows = [*runs.rows()]
    assert len(rows) == len(BUDGETS) and rows[0]["interval_95"] == [0.4, 0.6]
    assert (rows[0]["arm"], rows[0]["forced"], rows[0]["seed"], rows[0]["prompts"]) == ("grpo", False, 0, 128)
    assert rows[0]["train_kappa"] == [1.0, 8.25]  # means of steps 1 to 3, and 13 to 20
    job = next(job for job in runs.jobs() if job.directory == trained)
    (trained / COST_FILE).write_text('{"wall_s": 2.0, "cpu_s": 1.5}\n' * 2)
    assert costs([job])["train"] == {"runs": 0, "cpu_s": 0.0, "wall_s": 0.0}
    job.done.parent.mkdir(parents=True)
    job.done.touch()
    assert costs([job])["train"] == {"runs": 1, "cpu_s": 3.0, "wall_s": 4.0}


def test_an_extra_arm_of_a_cell_is_among_the_finished_runs(tmp_path):
    runs = Runs.of(tmp_path, Cell(0.5, 0.03), 0, ["grpo_tool_reward"])
    (runs.own.directory / "grpo_tool_reward").mkdir(parents=True)
    evaluated(runs, "grpo_tool_reward/seed0", 0.5)
    assert {row["arm"] for own in finished_in(tmp_path) for row in own.rows()} == {"grpo_tool_reward"}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--reports", "0.9"], "--reports 0.9 is none of 0.5, 0.75, 0.95"),
        (["--calls", "x"], "--calls x: expected comma-separated numbers"),
        (["--arms", "grppo"], "--arms grppo is unknown"),
    ],
)
def test_an_unknown_cell_or_arm_is_an_error_before_anything_is_written(tmp_path, flags, error):
    with pytest.raises(ValueError, match=error):
        main(["--dir", str(tmp_path / "map"), *flags])
    assert not (tmp_path / "map").exists()


def reward(**settings):
    return replace(load_config(CONFIGS / "miniature" / "para_grpo.yaml").reward, **settings)


def test_an_episode_of_the_table_model_is_scored_by_the_real_reward():
    call = (("open", True), ("close_think", True), ("call", True), ("close_call", True))
    answer = (("open", True), ("close_think", True), ("close_answer", True))
    whole = scored((*call, *answer), True, reward())
    assert whole.terms.parseable and whole.terms.accuracy == 1 and whole.f_tau == pytest.approx(1.0)
    assert whole.terms.tool == pytest.approx(0.8)
    unclosed = scored((*call[:3], ("close_call", False), *answer), True, reward())
    assert not unclosed.terms.parseable and unclosed.terms.tool == 0


def test_only_structural_tokens_get_the_anchors_credit():
    coins = (("open", True), ("close_think", True), ("call", False), ("close_answer", True))
    assert scored(coins, True, reward()).structural.tolist() == [False, True, True, True]


def test_initial_probabilities_are_the_dials_with_the_temperature_applied():
    start = Table.of(CELL.world, "sft").start()
    fragility = CELL.world.traces.unclosed_frac
    odds = ((1 - fragility) / fragility) ** (1 / 0.7)
    assert start.heads("close_answer") == pytest.approx(odds / (1 + odds))
    assert start.heads("call unseen") < 0.5 and start.heads("call seen") < 0.01


@pytest.mark.slow
def test_training_improves_the_format_only_with_the_prefix():
    f_tau = {}
    for arm in ("grpo", "prefix"):
        table = Table.of(CELL.world, arm)
        f_tau[arm] = [table.evaluate(policy, 32, arm == "prefix", 0)[2] for policy in (table.start(), table.train(0))]
    assert abs(f_tau["grpo"][1] - f_tau["grpo"][0]) < 0.1
    assert f_tau["prefix"][1] > f_tau["prefix"][0] + 0.2


class NoArms(Cell):
    arms = ()


def test_predictions_and_measurements_have_the_same_rows():
    (row, *_) = predicted(NoArms(CELL.reports, CELL.calls), 1)
    assert row.keys() == {*CELL.row("grpo", False, "parallel", 4), "accuracy", "kappa", "f_tau", "parseable"}
    stored = {(row["reports"], row["calls"], row["arm"]) for row in read_rows(PREDICTIONS)}
    assert stored == {(cell.reports, cell.calls, arm) for cell in CELLS for arm in ("sft", *cell.arms)}


def numbers(**accuracies: float) -> map_page.Numbers:
    return map_page.Numbers(
        [
            CELL.row(arm, arm != "grpo", "parallel", frames)
            | {"accuracy": accuracy, "kappa": 1 / frames, "interval_95": [0.4, 0.6]}
            for arm, accuracy in accuracies.items()
            for frames in BUDGETS
        ]
    )


def test_a_claim_is_decided_by_a_difference_and_small_ones_count_as_equal():
    claim = map_page.CLAIMS["R_tool adds accuracy"]
    pairs = {"yes": (0.8, 0.7), "no": (0.7, 0.8), "equal": (0.8, 0.79)}
    for expected, (full, without) in pairs.items():
        assert map_page.verdict(claim(numbers(para_grpo=full, no_tool_reward=without).of)) == expected
    assert map_page.verdict(claim(numbers(para_grpo=0.8).of)) == map_page.MISSING
    need = map_page.CLAIMS["its calls follow need: more with 4 frames than with 32"]
    assert map_page.verdict(need(numbers(para_grpo=0.8).of)) == "yes"


def test_agreement_counts_measured_cells_only(tmp_path, monkeypatch):
    predictions, measured = tmp_path / "predicted.json", tmp_path / "measured.json"
    monkeypatch.setattr(map_page, "PREDICTIONS", predictions)
    monkeypatch.setattr(map_page, "MEASURED", measured)
    full = {"f_tau": 1.0, "parseable": 1.0}
    assert full.keys() <= {*map_page.METRICS}
    guess = [row | full for row in numbers(grpo=0.6, para_grpo=0.8, no_tool_reward=0.7).rows]
    write_rows_of_map(predictions, guess, command="")
    assert map_page.agreement() == "No arm is measured yet."
    result = [row | full for row in numbers(grpo=0.5, para_grpo=0.6, no_tool_reward=0.7).rows]
    write_rows_of_map(measured, result, command="")
    first = {claim: pairs[CELLS.index(CELL)] for claim, pairs in map_page.verdicts().items()}
    assert first["the full method is more accurate than GRPO"] == ("yes", "yes")
    assert first["R_tool adds accuracy"] == ("yes", "no")
    assert first["the recommended reward is more accurate than the full method"] == ("–", "–")
    summary = [*map_page.summary_table()]
    assert "| the full method is more accurate than GRPO | 1 0 0 | 1 0 0 | 1 |" in summary
    assert "| R_tool adds accuracy | 1 0 0 | 0 0 1 | 0 |" in summary
    assert map_page.agreement().startswith("5 of 6 verdicts agree. Mean absolute errors over arms: accuracy 0.10")


@pytest.mark.slow
def test_the_tables_of_the_pages_are_computed_from_the_data(tmp_path):
    page, details = (path.read_text() for path in (map_page.PAGE, map_page.DETAILS))
    assert all(map_page.with_tables(text) == text for text in (page, details)), "run scripts.miniature.map_page"
    assert all(page.count(f"\n| {claim} |") == 1 for claim in map_page.CLAIMS) and map_page.agreement() in page
    assert all(details.count(f"\n| {cell.reports}, {cell.calls} |") == 1 for cell in CELLS)
    assert details.count("\n| − R_tool |") == 1 and "](map.png)" in page
    map_page.draw(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_an_accuracys_interval_is_the_mean_of_its_frame_budgets():
    assert numbers(grpo=0.5).half_interval("grpo") == pytest.approx(0.1)
    assert np.isnan(numbers().half_interval("grpo"))
