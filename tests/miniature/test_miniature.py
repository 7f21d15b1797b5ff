"""The world matches its questions, and the experiment runs, stops, resumes and reports."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model_port.layout import RESULTS_FILE
from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.traces import load_traces
from paravt_jax.rewards.terms import reward_terms
from paravt_jax.run.log import METRICS_FILE
from rollout import supervisor
from rollout.tools import find_calls, window_of
from rollout.video.times import crop_times
from scripts.miniature.__main__ import arms_of, main
from scripts.miniature.experiment import ARMS, QUICK, VARIANTS, Experiment, Job, JobRunner
from scripts.miniature.report import draw, missing_seeds, table
from scripts.miniature.traces import FORCED, NUM_LOOKS, Mixture, overview_shows, report, rows_of
from scripts.miniature.world import (
    DURATION_S,
    WINDOW_S,
    frames,
    make_scene,
    make_world,
    questions,
    rl_row,
    write_rows,
)

SCENES = [make_scene(0, number) for number in range(64)]
CLEAN = Mixture(bare=False, noise_frac=0.0, wrong_frac=0.0)


def replies(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def is_main(row: dict) -> bool:
    """Whether the row is a main agent's, and not a caption."""
    content = row["messages"][0]["content"]
    return "nframes" in content[0]["video_url"] and content[1]["text"] != "Describe the video."


def is_subagent(row: dict) -> bool:
    return "start_time" in row["messages"][0]["content"][0]["video_url"]


def coloured(scene) -> list[int]:
    return [second for second, frame in enumerate(frames(scene)) if np.ptp(frame[16, 16].astype(int)) > 40]


def test_an_overview_of_64_frames_shows_every_event_and_one_of_4_hardly_any():
    assert all(overview_shows(scene, 64) for scene in SCENES)
    assert np.mean([overview_shows(scene, 16) for scene in SCENES]) < 0.7
    assert np.mean([overview_shows(scene, 4) for scene in SCENES]) < 0.25


def test_an_event_is_visible_at_its_time_and_in_a_crop_of_its_window():
    for scene in SCENES[:8]:
        assert coloured(scene) == list(range(scene.start_s, scene.end_s))
        crop = {int(time_s) for time_s in crop_times(*scene.window_s, max_frames=8)}
        assert crop & set(coloured(scene))
        decoy = {int(time_s) for time_s in crop_times(*scene.decoy_s, max_frames=8)}
        assert not decoy & set(coloured(scene))


def test_distractors_last_as_long_and_never_overlap_the_event():
    for scene in SCENES[:8]:
        without = frames(make_scene(0, scene.number, 0))
        differ = [
            second for second, pair in enumerate(zip(frames(scene), without, strict=True)) if np.any(np.subtract(*pair))
        ]
        assert differ == [second + offset for second in sorted(scene.distractors) for offset in (0, 1)]
        assert len(scene.distractors) == 3 and not set(differ) & set(coloured(scene))


def test_a_question_names_the_right_window_and_maybe_another():
    for scene in SCENES:
        prompts = questions(scene)
        assert {question.type for question in prompts} == {"mcq", "tvg", "oe"}
        assert all(scene.window_s in question.windows_s for question in prompts)
        assert sorted(len(question.windows_s) for question in prompts) == [1, 1, 1, 2, 2, 2]
        assert all(f"between {start} and {end}" in q.text for q in prompts for start, end in q.windows_s)
    assert all(question.text.startswith("Question: ") == question.curated for s in SCENES for question in questions(s))
    first = [question.windows_s[0] == question.scene.window_s for s in SCENES for question in questions(s)[3:]]
    assert 0.3 < np.mean(first) < 0.7  # the order does not reveal the right one


@pytest.mark.slow
def test_clean_traces_have_the_full_reward_and_executable_calls():
    rows = [row for row in rows_of(SCENES, (4, 64), CLEAN, 0) if is_main(row)]
    prompts = [question for scene in SCENES for question in questions(scene)]
    num_calls = []
    for row, question in zip(rows, prompts, strict=True):
        turns = replies(row)
        calls = [call for turn in turns[:-1] for call in find_calls(turn)]
        for call in calls:
            window = window_of(call.arguments, DURATION_S)
            assert window.end_s - window.start_s == WINDOW_S and call.well_formed
        terms = reward_terms(turns, ["ok"] * len(calls), question.answer, question.type)
        assert terms.parseable and terms.accuracy == 1 and terms.format == pytest.approx(1.0)
        num_calls.append(len(calls))
    assert set(num_calls) == {0, 1, 2}


@pytest.mark.slow
def test_the_cold_start_is_malformed_and_believes_its_reports():
    rows = [row for row in rows_of(SCENES, (4, 64), Mixture(), 0) if is_main(row)]
    prompts = [question for scene in SCENES for question in questions(scene)]
    terms = [
        reward_terms(replies(row), ["ok"] * (len(row["messages"]) - 3), question.answer, question.type)
        for row, question in zip(rows, prompts, strict=True)
    ]
    assert 0.1 < np.mean([term.format for term in terms]) < 0.25
    misled = []
    for row, question, term in zip(rows, prompts, terms, strict=True):
        reports = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        is_correct = not reports or any(question.scene.colour in text for text in reports)
        assert term.accuracy == (is_correct or question.type == "tvg")  # reports have the right time
        misled += [not is_correct] if reports else []
    assert 0.4 < np.mean(misled) < 0.6


def test_the_share_of_unclosed_answers_matches_the_mixture():
    rows = [row for row in rows_of(SCENES, (4, 64), Mixture(unclosed_frac=0.4), 0) if is_main(row)]
    assert 0.5 < np.mean(["</answer>" in replies(row)[-1] for row in rows]) < 0.7


def test_the_weak_prior_never_calls():
    rows = rows_of(SCENES, (4, 64), Mixture(tools=False), 0)
    assert not any(map(is_subagent, rows))
    assert all(len(replies(row)) == 1 and "<tool_call>" not in replies(row)[0] for row in rows)


def test_captions_have_overviews_with_the_event_and_name_no_window():
    for scene in SCENES:
        rows = rows_of([scene], (4, 16), CLEAN, 0)
        captions = [row for row in rows if not is_main(row) and not is_subagent(row)]
        assert len(captions) == (4 if overview_shows(scene, 4) or overview_shows(scene, 16) else 0)
        for row in captions:
            assert overview_shows(scene, row["messages"][0]["content"][0]["video_url"]["nframes"])
            assert f"<answer>{scene.colour} from {scene.start_s} to {scene.end_s} seconds" in replies(row)[0]


def test_a_report_describes_its_window():
    scene = SCENES[0]
    assert report(scene, scene.window_s) == f"{scene.colour} from {scene.start_s} to {scene.end_s} seconds."
    assert report(scene, scene.decoy_s) == "No color is shown."
    assert replies(rows_of([scene], (4,), CLEAN, 0)[0])[0].startswith(FORCED)


def test_half_of_the_subagents_name_a_wrong_colour():
    def reports(scene) -> list[str]:
        return [replies(row)[0] for row in rows_of([scene], (4,), Mixture(), 0) if is_subagent(row)]

    wrong = []
    for scene in SCENES:
        decoy, *looks = reports(scene)
        assert decoy == "No color is shown."
        for look in looks:
            colour, start_s, end_s = re.fullmatch(r"(\w+) from (\d+) to (\d+) seconds.", look).groups()
            assert (int(start_s), int(end_s)) == (scene.start_s, scene.end_s)
            wrong.append(colour != scene.colour)
    assert 0.4 < np.mean(wrong) < 0.6


def test_the_loaders_read_all_rows_and_existing_files_stay(tmp_path):
    scenes = make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "rl.jsonl", [rl_row(question) for scene in scenes for question in questions(scene)])
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert len(load_prompts(tmp_path / "rl.jsonl", video_root="", max_bad_frac=0).prompts) == 12
    assert len(load_traces(tmp_path / "sft.jsonl", video_root="", max_bad_frac=0).traces) == 12 + 2 * (1 + NUM_LOOKS)
    modified = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == modified


def job(directory: Path, code: str, name: str = "it") -> Job:
    return Job(name, directory, (sys.executable, "-c", code), 1, METRICS_FILE, directory / "done")


def test_a_finished_job_does_not_run_again(tmp_path):
    code = f"from pathlib import Path; p = Path({str(tmp_path / 'done')!r}); p.write_text('once'); print('ran')"
    for _ in range(2):
        JobRunner(1).run([job(tmp_path, code)])
    assert (tmp_path / "log.txt").read_text() == "ran\n"


@pytest.mark.slow
def test_a_job_waits_for_the_file_it_needs_and_others_do_not(tmp_path):
    def writing(name: str, needs: str | None = None) -> Job:
        path, needed = tmp_path / name, tmp_path / needs / "done" if needs else None
        code = f"from pathlib import Path; print(Path({str(needed or path)!r}).exists())"
        return replace(job(path, f"{code}; Path({str(path)!r}, 'done').touch()", name), needs=needed)

    JobRunner(2).run([writing("last", "middle"), writing("middle", "first"), writing("first"), writing("alone")])
    assert [(tmp_path / name / "log.txt").read_text() for name in ("first", "middle", "last")] == ["True\n"] * 3


def test_a_failed_job_ends_the_experiment_with_its_last_line(tmp_path):
    with pytest.raises(RuntimeError, match=r"it exited with code 3: no such thing \(see"):
        JobRunner(2).run([job(tmp_path, "print('before'); print('no such thing'); raise SystemExit(3)")])


def test_progress_counts_the_steps_of_the_runs(tmp_path, monkeypatch):
    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("it: 2 of 5 steps, 40 %, "):
                (tmp_path / "counted").touch()  # and the run ends
            return super().write(text)

    monkeypatch.setattr("model_port.progress.EVERY_S", 0.01)
    monkeypatch.setattr("scripts.miniature.experiment.PROGRESS_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Stderr())
    code = f"""
import time
from pathlib import Path
directory = Path({str(tmp_path)!r})
(directory / "metrics.jsonl").write_text('{{"step": 1}}\\n{{"step": 2}}\\n')
while not (directory / "counted").exists():
    time.sleep(0.01)
(directory / "done").touch()
"""
    JobRunner(1).run([replace(job(tmp_path, code), num_steps=5, progress="metrics.jsonl")])
    assert "\nit: done in " in sys.stderr.getvalue()


@pytest.mark.slow
def test_a_killed_experiment_ends_its_runs(tmp_path):
    child = """
import os, time
from pathlib import Path
Path("started.partial").write_text(str(os.getpid()))
Path("started.partial").rename("started")
time.sleep(300)
"""
    code = f"""
import sys
from pathlib import Path
from scripts.miniature.experiment import Job, JobRunner
directory = Path({str(tmp_path)!r})
JobRunner(1).run([Job("it", directory, (sys.executable, "-c", {child!r}), 1, "none.jsonl", directory / "done")])
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    wait_for((tmp_path / "started").exists)
    run = int((tmp_path / "started").read_text())
    assert run in living()
    parent.kill()
    parent.wait()
    wait_for(lambda: run not in living())


def living() -> set[int]:
    return {process.pid for process in supervisor.processes()}


def wait_for(is_so: Callable[[], bool], deadline_s: float = 60.0) -> None:
    start_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - start_s < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_arms_come_from_one_cold_start_and_are_evaluated_as_they_were_trained(tmp_path):
    jobs = Experiment(tmp_path, ARMS, [0, 1], QUICK).jobs()
    cold, evaluations = jobs[:2], [job for job in jobs if job.name.startswith("eval ")]
    arms = [job for job in jobs if "/seed" in job.name and job not in evaluations]
    assert [job.name for job in cold] == ["sft", "sft_weak"] and len(arms) == 2 * len(ARMS)
    assert len(evaluations) == 2 * 2 + len(arms)
    assert all((job.needs is None) == (job in cold) for job in jobs)
    models = {job.name: next(a for a in job.command if a.startswith("model.path=")) for job in arms}
    assert all(("sft_weak" in model) == name.startswith("weak_prior") for name, model in models.items())
    forced = {job.name: "rollout.forced_prefix=" not in job.command for job in evaluations}
    assert not forced["eval grpo/seed0"] and not forced["eval gating/seed1"] and not forced["eval sft"]
    assert forced["eval para_grpo/seed0"] and forced["eval anchoring/seed1"] and forced["eval sft/forced"]


@pytest.mark.slow
def test_a_variant_differs_from_para_grpo_only_in_its_settings(tmp_path):
    arms = arms_of("para_grpo,variants")
    assert arms == ["para_grpo", *VARIANTS]
    jobs = {job.name: job for job in Experiment(tmp_path, arms, [0], QUICK).jobs()}
    baseline = jobs["para_grpo/seed0"].command
    for name, settings in VARIANTS.items():
        changed = [setting for setting in jobs[f"{name}/seed0"].command if setting not in baseline]
        assert changed == [f"run_dir={tmp_path / name / 'seed0'}", *settings]
    # A checkpoint's name is its version; two updates per step produce two versions.
    last = {name: int(jobs[f"{name}/seed0"].done.parent.name) for name in ("para_grpo", "two_updates")}
    assert last["two_updates"] == 2 * last["para_grpo"]


def test_an_unknown_arm_is_an_error():
    with pytest.raises(ValueError, match="--arms grppo is unknown"):
        Experiment(Path("x"), ["grppo"], [0])


def test_an_address_is_rejected_as_the_output_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["miniature", "--dir", "gs://bucket/x"])
    with pytest.raises(ValueError, match="gs:/"):
        main()
    assert not [*tmp_path.iterdir()]


def test_the_report_has_means_and_spreads_of_finished_runs(tmp_path):
    experiment = Experiment(tmp_path, ["grpo", "para_grpo"], [0, 1])
    for seed in (0, 1):
        cells = [
            {
                "dispatch": dispatch,
                "frame_budget": budget,
                "metrics": {"format_reward": 0.1 + seed / 5, "tool_calls_mean": 2.0, "accuracy_mean": budget / 64},
            }
            for dispatch in ("parallel", "none")
            for budget in (4, 64)
        ]
        evaluated, trained = tmp_path / "eval" / "grpo" / f"seed{seed}", tmp_path / "grpo" / f"seed{seed}"
        for directory in (evaluated, trained):
            directory.mkdir(parents=True)
        (evaluated / RESULTS_FILE).write_text(json.dumps({"cells": cells}))
        steps = [{"step": n, "rollout/format_reward": n / 9, "rollout/tool_calls_mean": 1.0} for n in (1, 2, 3)]
        (trained / METRICS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    row = table(experiment).splitlines()[-1]
    kappas = " | ".join(["2.00 ± 0.00"] * 3)
    accuracies = "0.06 ± 0.00 | 1.00 ± 0.00 | 0.53 ± 0.00 | 0.53 ± 0.00"
    assert row == f"| + GRPO | 2 | 0.20 ± 0.14 | {kappas} | {accuracies} |"
    assert list(missing_seeds(experiment)) == ["PARA-GRPO: 2 of 2 seeds are not evaluated"]
    draw(experiment, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
