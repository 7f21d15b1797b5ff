"""Plots of runs with one step, with many, and with pieces missing."""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from paravt_jax.run import plots
from paravt_jax.run.plots import (
    _frame_budget,
    _kl_levels,
    _label_ends,
    _reward_by_frame_budget,
    load_run,
    main,
    make_plots,
    of_budgets,
    of_types,
    running_mean,
)

ALL = {
    *("reward_terms", "format_and_calls", "reward_by_frame_budget", "frame_budget", "question_type", "groups"),
    *("mismatch", "loss", "validation"),
}
KEYS = (
    *("rollout/reward_mean", "rollout/accuracy_mean", "rollout/format_reward", "rollout/tool_reward_mean"),
    *("rollout/anchor_mean", "rollout/tool_calls_mean", "loss/policy", "loss/kl_ref", "loss/clip_frac"),
    *("rollout/accuracy_mean_k4", "rollout/accuracy_mean_k16", "rollout/tool_calls_mean_mcq", "rollout/taught_frac"),
    *("optim/grad_norm", "mismatch/behavior_kl", "mismatch/behavior_kl_plain", "mismatch/behavior_kl_structural"),
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 30)


def write_lines(path: Path, rows: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def episode(budget: int, total: float | None, accuracy: float | None, task: str = "t") -> dict:
    return {"task": task, "frame_budget": budget, "reward": {"total": total, "accuracy": accuracy}}


@pytest.fixture
def make_run(tmp_path):
    def make(num_steps: int, keys: tuple[str, ...] = KEYS) -> Path:
        chance = np.random.default_rng(0)
        steps = range(1, num_steps + 1)
        write_lines(tmp_path / "metrics.jsonl", [{"step": n} | {k: chance.random() for k in keys} for n in steps])
        for step in steps:
            members = [episode(4, 1.5, 1.0), episode(64, 0.5, 0.0), episode(64, None, None), {"missing": True}]
            write_lines(tmp_path / "episodes" / f"{step:06d}.jsonl", members)
        return tmp_path

    return make


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 3, 60])
def test_every_plot_is_a_picture_however_many_steps_there_are(num_steps, make_run):
    run_dir = make_run(num_steps)
    write_lines(run_dir / "validation.jsonl", [{"step": n, "validation/accuracy_mean": 0.5} for n in range(num_steps)])
    before = dict(matplotlib.rcParams)
    written = make_plots(run_dir)
    assert {path.stem for path in written} == ALL
    assert sorted(written) == sorted((run_dir / "plots").iterdir())  # and nothing half done
    for path in written:
        with Image.open(path) as picture:
            assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("key", "plot"),
    [
        ("rollout/reward_mean", "reward_terms"),
        ("rollout/tool_calls_mean", "format_and_calls"),
        ("mismatch/behavior_kl_plain", "mismatch"),
        ("optim/grad_norm", "loss"),
    ],
)
def test_a_plot_is_made_of_what_there_is_of_it(key, plot, make_run):
    run_dir = make_run(2, keys=(key,))
    assert {path.stem for path in make_plots(run_dir)} == {plot, "reward_by_frame_budget"}


def test_budgets_are_in_order_and_apart_from_question_types(make_run):
    prefix = "rollout/accuracy_mean_"
    table = load_run(make_run(2, keys=tuple(prefix + part for part in ("k16", "k4", "oe", "mcq", "k64")))).metrics
    assert [(quantity.key, quantity.label) for quantity in of_budgets(table, prefix)] == [
        (f"{prefix}k{budget}", f"K={budget}") for budget in (4, 16, 64)
    ]
    assert [quantity.label for quantity in of_types(table, prefix)] == ["mcq", "oe"]


def test_lines_that_share_the_steps_go_on_where_they_have_no_value(tmp_path):
    values = {f"rollout/accuracy_mean_k{budget}": 0.5 for budget in (4, 16)}
    rows = [{"step": step} | dict([list(values.items())[step % 2]]) for step in range(1, 8)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    figure = _frame_budget(load_run(tmp_path))
    assert figure is not None
    drawn = [line.get_xdata().tolist() for line in figure.axes[0].lines]  # type: ignore[union-attr]
    assert drawn == [[2, 4, 6], [1, 3, 5, 7]]


def test_steps_without_a_value_leave_a_gap_and_not_a_failure(make_run):
    run_dir = make_run(4, keys=("loss/policy",))
    rows = [{"step": 5, "loss/policy": None}, {"step": 6}, {"step": 7, "loss/policy": 1.0, "loss/kl_ref": None}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "loss/po')  # cut by a kill
    assert "loss" in {path.stem for path in make_plots(run_dir)}
    column = load_run(run_dir).metrics.column("loss/policy")
    assert np.isfinite(column).tolist() == [True] * 4 + [False, False, True]


@pytest.mark.slow
def test_numbers_that_no_axis_can_show_are_gaps(make_run):
    run_dir = make_run(4)
    rows = [{"step": step} | dict.fromkeys(KEYS, value) for step, value in ((5, 1e308), (6, -1e308), (7, 10**400))]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert {path.stem for path in make_plots(run_dir)} == {path.stem for path in make_plots(make_run(4))}


def test_no_mismatch_at_all_can_be_drawn_on_a_log_scale(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "mismatch/behavior_kl": 0.0} for n in (1, 2)])
    assert [path.stem for path in make_plots(tmp_path)] == ["mismatch"]


def test_a_run_with_odd_names_is_drawn(tmp_path):
    """A dollar sign would be mathematics to matplotlib, and a task of the model's choosing is no path."""
    run_dir = tmp_path / "a$b_{c$"
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "rollout/reward_mean": 1.0}])
    write_lines(run_dir / "validation.jsonl", [{"step": 1, "validation/a$b_{c$": 1.0}])
    write_lines(run_dir / "episodes" / "000001.jsonl", [episode(4, 1.0, 1.0, task="/etc/\ud83d$x_{")])
    assert {path.stem for path in make_plots(run_dir)} == {"reward_terms", "validation", "reward_by_frame_budget"}


def test_the_mean_by_frame_budget_counts_every_scored_episode_once(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [])
    write_lines(
        tmp_path / "episodes" / "000001.jsonl",
        [episode(8, 1.0, 0.0), episode(8, 2.0, 1.0), episode(16, 0.5, None), episode(16, None, None)],
    )
    write_lines(tmp_path / "episodes" / "000002.jsonl", [episode(8, 3.0, 0.5), {"id": "missing", "missing": True}])
    figure = _reward_by_frame_budget(load_run(tmp_path))
    assert figure is not None
    reward, accuracy = figure.axes
    assert [label.get_text() for label in reward.get_xticklabels()] == ["8\nn=3", "16\nn=1"]
    assert [label.get_text() for label in accuracy.get_xticklabels()] == ["8\nn=3"]
    assert [float(line.get_ydata()[0]) for line in reward.lines] == [2.0, 0.5]  # (1 + 2 + 3) / 3


def test_the_interval_of_a_mean_is_over_prompts_and_not_over_their_equal_episodes(tmp_path):
    """Two prompts, at 0 and 1, with 8 equal episodes each: the error of the mean is that of two values, 1/2."""
    write_lines(tmp_path / "metrics.jsonl", [])
    members = [episode(8, value, value, task) for task, value in (("a", 0.0), ("b", 1.0)) for _ in range(8)]
    write_lines(tmp_path / "episodes" / "000001.jsonl", members)
    assert plots.mean_error(np.repeat([0.0, 1.0], 8), np.repeat([0, 1], 8)) == pytest.approx(0.5)
    assert plots.mean_error(np.array([0.0, 1.0]), np.array([0, 1])) == pytest.approx(0.5)
    assert make_plots(tmp_path)


def test_the_levels_of_the_mismatch_are_read_from_the_settings(tmp_path):
    assert _kl_levels(tmp_path) == {}
    ladder = {"max_kl": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"config": {"mismatch": ladder}, "git_commit": None}))
    assert {round(level, 9): name for level, name in _kl_levels(tmp_path).items()} == {0.01: "warn", 0.1: "stop"}


def test_therunning_mean_is_over_the_values_there_are():
    nan = float("nan")
    means = running_mean(np.array([1.0, 3.0, nan, 5.0, nan, nan, nan]), 3)
    np.testing.assert_allclose(means, [2.0, 2.0, 4.0, 5.0, 5.0, nan, nan])
    np.testing.assert_allclose(running_mean(np.array([1.0, nan, 4.0]), 1), [1.0, nan, 4.0])


def test_names_at_the_ends_of_lines_do_not_cover_each_other_and_keep_their_order():
    axes = Figure().subplots()
    axes.set_ylim(0, 1)
    _label_ends(axes, [(0.5, "b", "k"), (0.9, "d", "k"), (0.49, "a", "k"), (0.51, "c", "k")], gap=0.1)
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights == pytest.approx({"a": 0.4, "b": 0.5, "c": 0.6, "d": 0.9})


def test_the_command_prints_what_it_drew(make_run, monkeypatch, capsys):
    run_dir = make_run(1, keys=("loss/policy",))
    monkeypatch.setattr(sys, "argv", ["plots", str(run_dir)])
    main()
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["reward_by_frame_budget.png", "loss.png"]


@pytest.mark.parametrize(
    ("files", "message"), [([], "is no run: it has no"), (["metrics.jsonl"], "logged nothing yet")]
)
def test_a_directory_without_a_run_is_refused(files, message, tmp_path, monkeypatch):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path)])
    with pytest.raises(ValueError, match=message):
        main()
    assert not (tmp_path / "plots").exists()
