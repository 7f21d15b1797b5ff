"""Charts and plots of runs with one step, with many, and with missing values."""

import json
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from data_rows import write_lines
from PIL import Image

from paravt_jax.run import plots
from paravt_jax.run.charts import SECTIONS, load_run
from paravt_jax.run.plots import draw_runs, draw_section, main, make_plots, running_mean

KEYS = (
    *("rollout/reward_mean", "rollout/accuracy_mean", "rollout/format_reward", "rollout/tool_reward_mean"),
    *("rollout/anchor_mean", "rollout/tool_calls_mean", "loss/policy", "loss/kl_ref", "loss/clip_frac"),
    *("rollout/accuracy_mean_k4", "rollout/accuracy_mean_k16", "rollout/tool_calls_mean_mcq", "rollout/taught_frac"),
    *("optim/grad_norm", "mismatch/behavior_kl", "mismatch/behavior_kl_plain", "mismatch/behavior_kl_structural"),
    *("rollout/advantage_p50", "time/rollout_s", "time/update_s", "time/step_s"),
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 30)


@pytest.fixture
def make_run(tmp_path):
    def make(num_steps: int, keys: tuple[str, ...] = KEYS) -> Path:
        chance = np.random.default_rng(0)
        rows = [{"step": step} | {key: chance.random() for key in keys} for step in range(1, num_steps + 1)]
        write_lines(tmp_path / "metrics.jsonl", rows)
        return tmp_path

    return make


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, pytest.param(3, marks=pytest.mark.nightly), 60])
def test_every_section_is_a_picture_for_any_number_of_steps(num_steps, make_run):
    run_dir = make_run(num_steps)
    write_lines(run_dir / "validation.jsonl", [{"step": n, "validation/accuracy_mean": 0.5} for n in range(num_steps)])
    parameters = dict(matplotlib.rcParams)
    written = make_plots(run_dir)
    assert [path.stem for path in written] == list(SECTIONS)
    assert sorted(written) == sorted((run_dir / "plots").iterdir())  # no partial files
    for path in written:
        with Image.open(path) as picture:
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn
    assert dict(matplotlib.rcParams) == parameters


def test_a_metric_has_a_chart_in_its_section(make_run):
    sections = {
        "rollout/reward_mean": "rewards",
        "rollout/accuracy_mean_k4": "prompts",
        "rollout/sampled_tokens_p50": "rollouts",
        "loss/of_a_plugin": "learner",
        "perf/tokens_per_s": "machine",
        "perf/mfu": "machine",
    }
    charts = load_run(make_run(2, keys=tuple(sections))).charts
    assert {line.key: chart.section for chart in charts for line in chart.lines} == sections


def test_your_own_terms_are_terms_of_the_reward(make_run):
    keys = ("rollout/accuracy_mean", "rollout/reward_brief_mean", "rollout/reward_mean", "rollout/reward_std")
    charts = {chart.title: chart for chart in load_run(make_run(2, keys=keys)).charts}
    lines = charts["Terms of the reward"].lines
    assert [(line.key, line.label) for line in lines] == [(keys[0], "accuracy"), (keys[1], "brief")]
    assert keys[1] not in charts and keys[3] in charts


def test_frame_budgets_are_sorted_and_separate_from_question_types(make_run):
    parts = ("k16", "k4", "oe", "mcq", "k64")
    budgets, types = load_run(make_run(2, keys=tuple(f"rollout/accuracy_mean_{part}" for part in parts))).charts
    assert [(line.key, line.label) for line in budgets.lines] == [
        (f"rollout/accuracy_mean_k{budget}", f"K={budget}") for budget in (4, 16, 64)
    ]
    assert [line.label for line in types.lines] == ["mcq", "oe"]


def test_lines_by_frame_budget_continue_through_steps_without_a_value(tmp_path):
    rows = [{"step": step, f"rollout/accuracy_mean_k{4 if step % 2 else 16}": 0.5} for step in range(1, 8)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    run = load_run(tmp_path)
    (axes,) = (figure := draw_section(run, "", run.charts)).axes
    assert [line.get_xdata().tolist() for line in axes.lines[1::2]] == [[1, 3, 5, 7], [2, 4, 6]]  # type: ignore[union-attr]
    assert figure.get_supxlabel() == f"{run.name} · by step"  # no validation, no running mean


def test_a_question_type_of_one_step_in_a_long_run_is_drawn(tmp_path):
    rows = [{"step": step, "rollout/accuracy_mean_mcq": 0.5} for step in range(1, 60)]
    write_lines(tmp_path / "metrics.jsonl", [*rows, {"step": 60, "rollout/accuracy_mean_oe": 1.0}])
    assert [path.stem for path in make_plots(tmp_path)] == ["prompts"]


@pytest.mark.parametrize(("unit", "whole"), [(1, True), (0.5, False)])
def test_ticks_of_counts_are_whole(unit, whole, tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss/few": unit * (step % 2)} for step in range(1, 8)])
    run = load_run(tmp_path)
    (axes,) = draw_section(run, "", run.charts).axes
    assert all(tick % 1 == 0 for tick in axes.get_yticks()) == whole


@pytest.mark.parametrize(
    ("validation", "whole"), [({}, True), ({"validation/loss": 2}, True), ({"validation/loss": 0.3}, False)]
)
def test_a_chart_is_whole_only_if_its_validation_is(validation, whole, tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss/imitation": 1.0}, {"step": 2}])
    write_lines(tmp_path / "validation.jsonl", [{"step": 1, **validation}])
    run = load_run(tmp_path)
    assert run.is_whole(run.charts[0]) == whole


def test_steps_without_a_value_leave_a_gap(make_run):
    run_dir = make_run(4, keys=("loss/policy",))
    rows = [{"step": 5, "loss/policy": None}, {"step": 6}, {"step": 7, "loss/policy": 1.0, "loss/kl_ref": None}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "loss/po')  # cut by a kill
    assert [path.stem for path in make_plots(run_dir)] == ["learner"]
    column = load_run(run_dir).metrics.column("loss/policy")
    assert np.isfinite(column).tolist() == [True] * 4 + [False, False, True]


@pytest.mark.slow
def test_values_too_large_to_draw_are_gaps(make_run):
    run_dir = make_run(4)
    rows = [{"step": step} | dict.fromkeys(KEYS, value) for step, value in ((5, 1e308), (6, -1e308), (7, 10**400))]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [path.stem for path in make_plots(run_dir)] == list(SECTIONS)


def test_a_kl_of_zero_is_drawn_on_a_log_scale(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "mismatch/behavior_kl": 0.0} for n in (1, 2)])
    assert [path.stem for path in make_plots(tmp_path)] == ["learner"]


@pytest.mark.parametrize("name", ["a$b_{c$", os.fsdecode(b"\xff"), "视频"])
def test_any_name_of_a_run_is_shown_as_text_without_a_warning(name, tmp_path):
    run_dir = tmp_path / name
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "rollout/accuracy_mean_$x_{$": 1.0, "loss/a$b_{c$": 1.0}])
    assert [path.stem for path in make_plots(run_dir)] == ["prompts", "learner"]


def test_long_labels_and_large_values_leave_room_for_the_curves(tmp_path):
    keys = ("reward_mean", "accuracy_mean", "format_reward", f"reward_{'x' * 80}_mean")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **{f"rollout/{key}": 1e25 for key in keys}}])
    assert [path.stem for path in make_plots(tmp_path)] == ["rewards"]  # without a warning
    run = load_run(tmp_path)
    labels = [text.get_text() for text in draw_section(run, "", run.charts).axes[1].get_legend().get_texts()]
    assert labels == ["accuracy 1e+25", "format 1e+25", f"{'x' * 24}… 1e+25"]


def test_lines_with_the_same_color_have_different_dashes_in_the_legend(tmp_path):
    keys = [f"rollout/accuracy_mean_type{number}" for number in range(12)]
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, **dict.fromkeys(keys, step)} for step in (1, 2)])
    run = load_run(tmp_path)
    lines = draw_section(run, "", run.charts).axes[0].get_legend().get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(keys)
    assert all(line.get_xdata()[-1] > 0 for line in lines)


@pytest.mark.parametrize("largest", [1e-9, 0.05, 1e20])
def test_the_labels_of_the_kl_levels_are_apart_and_below_the_title(largest, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"mismatch": {"max_kl": 0.1}}, "git_commit": None}))
    rows = [{"step": step, "mismatch/behavior_kl": value} for step, value in enumerate((1e-9, largest), 1)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    run = load_run(tmp_path)
    figure = draw_section(run, "", run.charts)
    figure.draw_without_rendering()
    warn, stop = (text.get_window_extent() for text in figure.axes[0].texts)
    assert stop.y0 > warn.y1 and stop.y1 < figure.axes[0].get_window_extent().y1


def test_the_kl_levels_come_from_the_settings(tmp_path):
    assert load_run(tmp_path).kl_levels == {}
    (tmp_path / "config.json").write_text(json.dumps({"config": {"mismatch": {"max_kl": 0.1}}, "git_commit": None}))
    levels = load_run(tmp_path).kl_levels
    assert {round(level, 9): name for level, name in levels.items()} == {0.01: "warn", 0.1: "stop"}


def test_the_plots_command_may_run_while_the_run_ends(make_run, monkeypatch):
    run_dir = make_run(3, keys=("loss/policy",))

    def meanwhile(*arguments):
        monkeypatch.setattr(plots, "draw_section", draw_section)
        make_plots(run_dir)
        return draw_section(*arguments)

    monkeypatch.setattr(plots, "draw_section", meanwhile)
    assert [path.is_file() for path in make_plots(run_dir)] == [True]


def test_the_running_mean_is_over_finite_values():
    nan = float("nan")
    means = running_mean(np.array([1.0, 3.0, nan, 5.0, nan, nan, nan]), 3)
    np.testing.assert_allclose(means, [2.0, 2.0, 4.0, 5.0, 5.0, nan, nan])
    np.testing.assert_allclose(running_mean(np.array([1.0, nan, 4.0]), 1), [1.0, nan, 4.0])


def test_the_command_prints_the_paths_of_the_plots(make_run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plots", str(make_run(1, keys=("loss/policy",)))])
    main()
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["learner.png"]


@pytest.mark.parametrize(
    ("files", "message"), [([], "is not a run: it has no"), (["metrics.jsonl"], "logged nothing yet")]
)
def test_a_directory_without_metrics_is_rejected(files, message, tmp_path, monkeypatch):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path)])
    with pytest.raises(ValueError, match=message):
        main()
    assert not (tmp_path / "plots").exists()


def test_several_runs_are_drawn_over_each_other(tmp_path, monkeypatch, capsys):
    runs = [tmp_path / name for name in "abcd"]
    for number, run in enumerate(runs):
        write_lines(run / "metrics.jsonl", [{"step": n, "rollout/format_reward": number / 4} for n in range(1, 60)])
    monkeypatch.setattr(sys, "argv", ["plots", *map(str, runs), "--png", str(tmp_path / "four.png")])
    main()
    assert capsys.readouterr().out == f"{tmp_path / 'four.png'}\n"
    with Image.open(tmp_path / "four.png") as picture:
        assert len(np.unique(np.asarray(picture).reshape(-1, 4), axis=0)) > 10
    figure = draw_runs([load_run(run) for run in runs])
    (axes,) = figure.axes
    assert [line.get_ydata()[-1] for line in axes.get_lines()[1:8:2]] == [0, 0.25, 0.5, 0.75]  # running means
    assert len({line.get_color() for line in axes.get_lines()}) == 4


def test_several_runs_need_a_file_and_a_common_metric(tmp_path, monkeypatch):
    for name in "ab":
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": 1, "perf/x": 1.0}])
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(ValueError, match="2 runs are drawn in one picture; pass --png FILE"):
        main()
    with pytest.raises(ValueError, match="none has logged any of rollout/format_reward"):
        draw_runs([load_run(tmp_path / name) for name in "ab"])
