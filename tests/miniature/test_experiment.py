"""The experiment runs, stops, resumes and reports."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from model_port.json_files import flattened
from model_port.layout import RESULTS_FILE
from paravt_jax.config import load_config, to_record
from paravt_jax.run.log import METRICS_FILE
from scripts.miniature import experiment
from scripts.miniature.__main__ import arms_of, main, numbers_of
from scripts.miniature.arms import ARMS, COLD_STARTS, CONFIGS, VARIANTS, forces_prefix, settings_of
from scripts.miniature.dials import load_world
from scripts.miniature.experiment import COST_FILE, Experiment, Job, run_jobs
from scripts.miniature.report import CURVES, draw, missing_seeds, table

QUICK = load_world("quick")


def job(directory: Path, name: str = "it") -> Job:
    config = CONFIGS / "miniature" / "eval.yaml"
    settings = (f"run_dir={directory}",)
    return Job(name, directory, "eval", config, settings, 5, METRICS_FILE, directory / "done")


def play(monkeypatch, run) -> None:
    """Replaces evaluations by `run`, which gets the run's directory."""

    async def run_eval(config):
        run(Path(config.run_dir))

    monkeypatch.setitem(experiment.RUNS, "eval", run_eval)


def test_a_finished_job_does_not_run_again_and_its_output_and_cost_are_kept(tmp_path, monkeypatch):
    def run(directory: Path) -> None:
        print("ran")
        sum(range(10**6))
        (directory / "done").touch()

    play(monkeypatch, run)
    for _ in range(2):
        run_jobs([job(tmp_path / "a"), job(tmp_path / "b")])
    assert [(tmp_path / name / "output.txt").read_text() for name in "ab"] == ["ran\n"] * 2
    cost = json.loads((tmp_path / "a" / COST_FILE).read_text())
    assert cost.keys() == {"wall_s", "cpu_s"}


def test_a_failed_job_ends_the_experiment_and_the_same_command_resumes_it(tmp_path, monkeypatch):
    play(monkeypatch, lambda directory: (directory / "done").touch() if directory.name == "a" else None)
    jobs = [job(tmp_path / name, name) for name in "abc"]
    with pytest.raises(RuntimeError, match=r"b did not finish, see .*output\.txt"):
        run_jobs(jobs)
    assert not (tmp_path / "c").exists()
    done = []

    def run(directory: Path) -> None:
        done.append(directory.name)
        (directory / "done").touch()

    play(monkeypatch, run)
    run_jobs(jobs)
    assert done == ["b", "c"]


def test_a_directory_that_has_another_world_is_an_error(tmp_path):
    """Otherwise its finished runs would count as runs of this world."""
    worlds = (load_world(name, "num_videos=4", "num_held_out=2") for name in ("default", "wrong_reports"))
    first, second = (Experiment(tmp_path, ["grpo"], [0], world) for world in worlds)
    for _ in range(2):
        first.make_data()
    with pytest.raises(ValueError, match=r"sft_train\.jsonl has the rows of another world; choose another directory"):
        second.make_data()
    first.make_data()


def test_progress_counts_the_steps_of_the_runs(tmp_path, monkeypatch):
    seen = []

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            seen.append(text)
            return super().write(text)

    def run(directory: Path) -> None:
        (directory / METRICS_FILE).write_text('{"step": 1}\n{"step": 2}\n')
        for _ in range(1000):
            if any("1 of 1 runs, it: 2 of 5 steps, 40 %, " in text for text in seen):
                break
            experiment.time.sleep(0.01)
        (directory / "done").touch()

    monkeypatch.setattr("model_port.progress.EVERY_S", 0.01)
    monkeypatch.setattr(sys, "stderr", Stderr())
    play(monkeypatch, run)
    run_jobs([job(tmp_path / "it")])
    assert any("it: 2 of 5 steps, 40 %, " in text for text in seen)
    assert "\nit: done in " in sys.stderr.getvalue()


def settings(arm: str) -> dict:
    return flattened(to_record(load_config(CONFIGS / "miniature" / "para_grpo.yaml", *settings_of(arm))))


ANCHOR = {"reward.anchor_weight", "reward.unclosed_penalty"}
PREFIX, GATING, TOOL = "rollout.forced_prefix", "video.frame_budgets", "reward.tool"


@pytest.mark.parametrize(
    ("arm", "differs"),
    [
        ("grpo", {PREFIX, *ANCHOR, GATING, TOOL}),
        ("grpo_tool_reward", {PREFIX, *ANCHOR, GATING}),
        ("prefix", {*ANCHOR, GATING, TOOL}),
        ("anchor", {PREFIX, GATING, TOOL}),
        ("anchoring", {GATING, TOOL}),
        ("gating", {PREFIX, *ANCHOR, TOOL}),
        ("para_grpo", set()),
        ("no_tool_reward", {TOOL}),
        ("no_penalty", {"reward.unclosed_penalty"}),
        ("no_gating", {GATING}),
        ("credit_span", {"advantage.credit"}),
        ("credit_sequence", {"advantage.credit"}),
        ("weak_prior", set()),
    ],
)
def test_an_arm_differs_from_the_full_method_in_the_settings_of_its_name_only(arm, differs):
    full, own = settings("para_grpo"), settings(arm)
    assert {key for key, value in full.items() if own[key] != value} == differs


@pytest.mark.parametrize("world", ["map", "contrast", "quick"])
def test_an_arm_without_gating_ignores_the_frame_budgets_of_its_world(tmp_path, world):
    experiment = Experiment(tmp_path, ["grpo", "no_gating", "gating"], [0], load_world(world))
    training = {job.name: load_config(job.config, *job.settings) for job in experiment.jobs() if job.kind == "train"}
    gated = {name.split("/")[0]: len(config.video.frame_budgets) > 0 for name, config in training.items()}
    assert gated == {"grpo": False, "no_gating": False, "gating": True}


def test_the_recommended_arm_has_the_reward_and_credit_of_the_recommended_file():
    file = flattened(to_record(load_config(CONFIGS / "paragrpo_8b_recommended.yaml")))
    own, full = settings("recommended"), settings("para_grpo")
    assert all(own[key] == value for key, value in file.items() if key.startswith(("reward.", "advantage.")))
    assert all(key.startswith(("reward.", "advantage.")) for key in full if own[key] != full[key])


@pytest.mark.slow
def test_arms_come_from_one_cold_start_and_are_evaluated_with_both_prefixes(tmp_path):
    chosen = ["grpo", "para_grpo", "weak_prior"]
    jobs = Experiment(tmp_path, chosen, [0, 1], load_world("map")).jobs()
    cold, evaluations = jobs[:2], [job for job in jobs if job.kind == "eval"]
    arms = [job for job in jobs if job.kind == "train"]
    assert [job.name for job in cold] == [*COLD_STARTS] and len(arms) == 2 * len(chosen)
    assert len(evaluations) == 2 * (len(COLD_STARTS) + len(arms))
    models = {job.name: next(a for a in job.settings if a.startswith("model.path=")) for job in arms}
    assert all(("sft_weak" in model) == name.startswith("weak_prior") for name, model in models.items())
    for job in evaluations:
        assert ("rollout.forced_prefix=" in job.settings) == (not job.name.endswith("/forced"))
    dispatches = {job.name: load_config(job.config, *job.settings, schema=experiment.EvalConfig) for job in evaluations}
    own, other = (dispatches[f"eval para_grpo/seed0{suffix}"].eval.dispatches for suffix in ("/forced", ""))
    assert own == ["parallel", "none"] and other == ["parallel"]
    assert [arm for arm in ARMS if not forces_prefix(arm)] == ["grpo", "anchor", "gating", "grpo_tool_reward"]
    assert not any(map(forces_prefix, COLD_STARTS))


def test_the_quickstart_evaluates_an_arm_only_as_it_was_trained(tmp_path):
    names = [job.name for job in Experiment(tmp_path, ["grpo", "para_grpo"], [0], QUICK).jobs() if job.kind == "eval"]
    assert names == ["eval sft", "eval sft/forced", "eval grpo/seed0", "eval para_grpo/seed0/forced"]


def test_a_repeated_seed_counts_once():
    assert numbers_of("--seeds", "1,0,1") == [1, 0]


@pytest.mark.slow
def test_a_variant_differs_from_para_grpo_only_in_its_settings(tmp_path):
    arms = arms_of("para_grpo,variants")
    assert arms == ["para_grpo", *VARIANTS, "recommended"]
    jobs = {job.name: job for job in Experiment(tmp_path, arms, [0], QUICK).jobs()}
    baseline = jobs["para_grpo/seed0"].settings
    for name, own in VARIANTS.items():
        changed = [setting for setting in jobs[f"{name}/seed0"].settings if setting not in baseline]
        assert changed == [f"run_dir={tmp_path / name / 'seed0'}", *own]
    # A checkpoint's name is its version; two updates per step produce two versions.
    last = {name: int(jobs[f"{name}/seed0"].done.parent.name) for name in ("para_grpo", "two_updates")}
    assert last["two_updates"] == 2 * last["para_grpo"]


def test_a_setting_of_the_command_overrides_the_world_and_the_arm(tmp_path):
    jobs = Experiment(tmp_path, ["grpo"], [0], QUICK, train=["train.num_steps=3", "video.frame_budgets=[5]"]).jobs()
    (job,) = (job for job in jobs if job.kind == "train")
    assert job.num_steps == 3 and load_config(job.config, *job.settings).video.frame_budgets == [5]


def test_an_unknown_arm_is_an_error():
    with pytest.raises(ValueError, match="--arms grppo is unknown"):
        Experiment(Path("x"), ["grppo"], [0], QUICK)


def test_an_address_is_rejected_as_the_output_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["miniature", "--dir", "gs://bucket/x"])
    with pytest.raises(ValueError, match="gs:/"):
        main()
    assert not [*tmp_path.iterdir()]


def test_the_report_has_means_and_spreads_of_finished_runs(tmp_path):
    experiment = Experiment(tmp_path, ["grpo", "para_grpo"], [0, 1], replace(QUICK, both_prefixes=True))
    for seed in (0, 1):
        metrics = {"format_reward": 0.1 + seed / 5, "parseable_frac": 0.25, "tool_calls_mean": 2.0}
        cells = [
            {"dispatch": dispatch, "frame_budget": budget, "metrics": metrics | {"accuracy_mean": budget / 64}}
            for dispatch in ("parallel", "none")
            for budget in (4, 64)
        ]
        evaluated, trained = tmp_path / "eval" / "grpo" / f"seed{seed}", tmp_path / "grpo" / f"seed{seed}"
        for directory in (evaluated, evaluated / "forced", trained):
            directory.mkdir(parents=True)
        for directory in (evaluated, evaluated / "forced"):
            (directory / RESULTS_FILE).write_text(json.dumps({"cells": cells}))
        steps = [{"step": n} | dict.fromkeys(CURVES.values(), n / 9) for n in (1, 2, 3)]
        (trained / METRICS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    kappas = " | ".join(["2.00 ± 0.00"] * 3)
    accuracies = "0.06 ± 0.00 | 1.00 ± 0.00 | 0.53 ± 0.00 | 0.53 ± 0.00"
    numbers = f"2 | 0.20 ± 0.14 | 0.25 ± 0.00 | {kappas} | {accuracies} |"
    assert table(experiment).splitlines()[2:] == [f"| GRPO | no | {numbers}", f"| GRPO | forced | {numbers}"]
    assert list(missing_seeds(experiment)) == ["PARA-GRPO: 2 of 2 seeds are not evaluated"]
    draw(experiment, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
