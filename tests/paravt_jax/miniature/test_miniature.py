"""The small world is what it says, and the experiment on it runs, stops, goes on and reports."""

import io
import json
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
from paravt_jax.miniature.__main__ import arms_of
from paravt_jax.miniature.experiment import ARMS, QUICK, VARIANTS, Experiment, Part, Runner
from paravt_jax.miniature.report import draw, remarks, table
from paravt_jax.miniature.traces import FORCED, NUM_LOOKS, Mixture, overview_shows, report, rows_of
from paravt_jax.miniature.world import (
    DURATION_S,
    WINDOW_S,
    frames,
    make_scene,
    make_world,
    questions,
    rl_row,
    write_rows,
)
from paravt_jax.rewards.terms import reward_terms
from paravt_jax.run.log import METRICS_FILE
from rollout import supervisor
from rollout.tools import find_calls, window_of
from rollout.video.times import crop_times

SCENES = [make_scene(0, number) for number in range(64)]
CLEAN = Mixture(bare=False, noise_frac=0.0, wrong_frac=0.0)


def said(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def is_main(row: dict) -> bool:
    """Of an episode's main agent, not a caption."""
    asked = row["messages"][0]["content"]
    return "nframes" in asked[0]["video_url"] and asked[1]["text"] != "Describe the video."


def is_subagent(row: dict) -> bool:
    return "start_time" in row["messages"][0]["content"][0]["video_url"]


def coloured(scene) -> list[int]:
    return [second for second, frame in enumerate(frames(scene)) if np.ptp(frame[16, 16].astype(int)) > 40]


def test_an_overview_of_64_frames_shows_every_event_and_one_of_4_hardly_any():
    assert all(overview_shows(scene, 64) for scene in SCENES)
    assert np.mean([overview_shows(scene, 16) for scene in SCENES]) < 0.7
    assert np.mean([overview_shows(scene, 4) for scene in SCENES]) < 0.25


def test_an_event_is_seen_when_it_is_said_to_be_and_in_a_close_look_at_its_window():
    for scene in SCENES[:8]:
        assert coloured(scene) == list(range(scene.start_s, scene.end_s))
        seen = {int(time_s) for time_s in crop_times(*scene.window_s, max_frames=8)}
        assert seen & set(coloured(scene))
        decoy = {int(time_s) for time_s in crop_times(*scene.decoy_s, max_frames=8)}
        assert not decoy & set(coloured(scene))


def test_distractors_are_shown_as_long_and_never_at_the_same_time():
    for scene in SCENES[:8]:
        without = frames(make_scene(0, scene.number, 0))
        differ = [
            second for second, pair in enumerate(zip(frames(scene), without, strict=True)) if np.any(np.subtract(*pair))
        ]
        assert differ == [second + late for second in sorted(scene.distractors) for late in (0, 1)]
        assert len(scene.distractors) == 3 and not set(differ) & set(coloured(scene))


def test_a_question_names_the_right_window_and_often_another():
    for scene in SCENES:
        asked = questions(scene)
        assert {question.type for question in asked} == {"mcq", "tvg", "oe"}
        assert all(scene.window_s in question.windows_s for question in asked)
        assert sorted(len(question.windows_s) for question in asked) == [1, 1, 1, 2, 2, 2]
        assert all(f"between {start} and {end}" in q.text for q in asked for start, end in q.windows_s)
    assert all(question.text.startswith("Question: ") == question.curated for s in SCENES for question in questions(s))
    first = [question.windows_s[0] == question.scene.window_s for s in SCENES for question in questions(s)[3:]]
    assert 0.3 < np.mean(first) < 0.7  # no telling which of two it is


@pytest.mark.slow
def test_clean_traces_have_the_full_reward_and_make_calls_that_can_be_carried_out():
    rows = [row for row in rows_of(SCENES, (4, 64), CLEAN, 0) if is_main(row)]
    asked = [question for scene in SCENES for question in questions(scene)]
    num_calls = []
    for row, question in zip(rows, asked, strict=True):
        turns = said(row)
        calls = [call for turn in turns[:-1] for call in find_calls(turn)]
        for call in calls:
            window = window_of(call.arguments, DURATION_S)
            assert window.end_s - window.start_s == WINDOW_S and call.well_formed
        terms = reward_terms(turns, ["ok"] * len(calls), question.answer, question.type)
        assert terms.parseable and terms.accuracy == 1 and terms.format == pytest.approx(1.0)
        num_calls.append(len(calls))
    assert set(num_calls) == {0, 1, 2}


@pytest.mark.slow
def test_the_cold_start_is_badly_formed_and_believes_its_reports():
    rows = [row for row in rows_of(SCENES, (4, 64), Mixture(), 0) if is_main(row)]
    asked = [question for scene in SCENES for question in questions(scene)]
    terms = [
        reward_terms(said(row), ["ok"] * (len(row["messages"]) - 3), question.answer, question.type)
        for row, question in zip(rows, asked, strict=True)
    ]
    assert 0.1 < np.mean([term.format for term in terms]) < 0.25
    misled = []
    for row, question, term in zip(rows, asked, terms, strict=True):
        reports = [message["content"] for message in row["messages"] if message["role"] == "tool"]
        told = not reports or any(question.scene.colour in text for text in reports)
        assert term.accuracy == (told or question.type == "tvg")  # reports tell the right time
        misled += [not told] if reports else []
    assert 0.4 < np.mean(misled) < 0.6


def test_answers_are_left_unclosed_as_often_as_asked_for():
    rows = [row for row in rows_of(SCENES, (4, 64), Mixture(unclosed_frac=0.4), 0) if is_main(row)]
    assert 0.5 < np.mean(["</answer>" in said(row)[-1] for row in rows]) < 0.7


def test_the_weak_prior_never_calls():
    rows = rows_of(SCENES, (4, 64), Mixture(tools=False), 0)
    assert not any(map(is_subagent, rows))
    assert all(len(said(row)) == 1 and "<tool_call>" not in said(row)[0] for row in rows)


def test_captions_are_of_overviews_that_show_the_event_and_name_no_window():
    for scene in SCENES:
        rows = rows_of([scene], (4, 16), CLEAN, 0)
        captions = [row for row in rows if not is_main(row) and not is_subagent(row)]
        assert len(captions) == (4 if overview_shows(scene, 4) or overview_shows(scene, 16) else 0)
        for row in captions:
            assert overview_shows(scene, row["messages"][0]["content"][0]["video_url"]["nframes"])
            assert f"<answer>{scene.colour} from {scene.start_s} to {scene.end_s} seconds" in said(row)[0]


def test_reports_say_what_a_window_shows():
    scene = SCENES[0]
    assert report(scene, scene.window_s) == f"{scene.colour} from {scene.start_s} to {scene.end_s} seconds."
    assert report(scene, scene.decoy_s) == "No color is shown."
    assert said(rows_of([scene], (4,), CLEAN, 0)[0])[0].startswith(FORCED)


def test_a_part_of_the_subagents_names_another_colour():
    def reports(scene) -> list[str]:
        return [said(row)[0] for row in rows_of([scene], (4,), Mixture(), 0) if is_subagent(row)]

    wrong = []
    for scene in SCENES:
        decoy, *looks = reports(scene)
        assert decoy == "No color is shown."
        for look in looks:
            colour, start_s, end_s = re.fullmatch(r"(\w+) from (\d+) to (\d+) seconds.", look).groups()
            assert (int(start_s), int(end_s)) == (scene.start_s, scene.end_s)
            wrong.append(colour != scene.colour)
    assert 0.4 < np.mean(wrong) < 0.6


def test_rows_are_read_by_the_loaders_and_nothing_is_made_twice(tmp_path):
    scenes = make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "rl.jsonl", [rl_row(question) for scene in scenes for question in questions(scene)])
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert len(load_prompts(tmp_path / "rl.jsonl", video_root="", max_bad_frac=0).prompts) == 12
    assert len(load_traces(tmp_path / "sft.jsonl", video_root="", max_bad_frac=0).traces) == 12 + 2 * (1 + NUM_LOOKS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before


def part(directory: Path, code: str, name: str = "it") -> Part:
    return Part(name, directory, (sys.executable, "-c", code), 1, METRICS_FILE, directory / "done")


def test_a_part_that_is_done_is_not_run_again(tmp_path):
    code = f"from pathlib import Path; p = Path({str(tmp_path / 'done')!r}); p.write_text('once'); print('ran')"
    for _ in range(2):
        Runner(1).run([part(tmp_path, code)])
    assert (tmp_path / "log.txt").read_text() == "ran\n"


@pytest.mark.slow
def test_a_part_begins_when_what_it_needs_is_there_and_others_do_not_wait_for_it(tmp_path):
    def writing(name: str, needs: str | None = None) -> Part:
        path, needed = tmp_path / name, tmp_path / needs / "done" if needs else None
        code = f"from pathlib import Path; print(Path({str(needed or path)!r}).exists())"
        return replace(part(path, f"{code}; Path({str(path)!r}, 'done').touch()", name), needs=needed)

    Runner(2).run([writing("last", "middle"), writing("middle", "first"), writing("first"), writing("alone")])
    assert [(tmp_path / name / "log.txt").read_text() for name in ("first", "middle", "last")] == ["True\n"] * 3


def test_a_part_that_fails_ends_the_experiment_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"it ended with code 3: no such thing \(all of it in"):
        Runner(2).run([part(tmp_path, "print('before'); print('no such thing'); raise SystemExit(3)")])


def test_a_log_hears_how_many_steps_the_runs_have_done(tmp_path, monkeypatch):
    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("it: 2 of 5 steps, 40 %, "):
                (tmp_path / "heard").touch()  # and the run ends
            return super().write(text)

    monkeypatch.setattr("model_port.progress.EVERY_S", 0.01)
    monkeypatch.setattr("paravt_jax.miniature.experiment.LOOK_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Stderr())
    code = f"""
import time
from pathlib import Path
directory = Path({str(tmp_path)!r})
(directory / "metrics.jsonl").write_text('{{"step": 1}}\\n{{"step": 2}}\\n')
while not (directory / "heard").exists():
    time.sleep(0.01)
(directory / "done").touch()
"""
    Runner(1).run([replace(part(tmp_path, code), num_steps=5, progress="metrics.jsonl")])
    assert "\nit: done in " in sys.stderr.getvalue()


@pytest.mark.slow
def test_a_killed_experiment_takes_its_runs_along(tmp_path):
    child = """
import os, time
from pathlib import Path
Path("begun.partial").write_text(str(os.getpid()))
Path("begun.partial").rename("begun")
time.sleep(300)
"""
    code = f"""
import sys
from pathlib import Path
from paravt_jax.miniature.experiment import Part, Runner
directory = Path({str(tmp_path)!r})
Runner(1).run([Part("it", directory, (sys.executable, "-c", {child!r}), 1, "none.jsonl", directory / "done")])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_for((tmp_path / "begun").exists)
    run = int((tmp_path / "begun").read_text())
    assert run in living()
    parent.kill()
    parent.wait()
    wait_for(lambda: run not in living())


def living() -> set[int]:
    return {process.pid for process in supervisor.processes()}


def wait_for(is_so: Callable[[], bool], deadline_s: float = 60.0) -> None:
    begun_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun_s < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_arms_come_from_one_cold_start_and_are_evaluated_as_they_were_trained(tmp_path):
    parts = Experiment(tmp_path, ARMS, [0, 1], QUICK).parts()
    cold, evaluations = parts[:2], [part for part in parts if part.name.startswith("eval ")]
    arms = [part for part in parts if "/seed" in part.name and part not in evaluations]
    assert [part.name for part in cold] == ["sft", "sft_weak"] and len(arms) == 2 * len(ARMS)
    assert len(evaluations) == 2 * 2 + len(arms)
    assert all((part.needs is None) == (part in cold) for part in parts)
    models = {part.name: next(a for a in part.command if a.startswith("model.path=")) for part in arms}
    assert all(("sft_weak" in model) == name.startswith("weak_prior") for name, model in models.items())
    forced = {part.name: "rollout.forced_prefix=" not in part.command for part in evaluations}
    assert not forced["eval grpo/seed0"] and not forced["eval gating/seed1"] and not forced["eval sft"]
    assert forced["eval para_grpo/seed0"] and forced["eval anchoring/seed1"] and forced["eval sft/forced"]


@pytest.mark.slow
def test_a_variant_differs_from_para_grpo_in_its_settings_alone(tmp_path):
    arms = arms_of("para_grpo,variants")
    assert arms == ["para_grpo", *VARIANTS]
    parts = {part.name: part for part in Experiment(tmp_path, arms, [0], QUICK).parts()}
    whole = parts["para_grpo/seed0"].command
    for name, settings in VARIANTS.items():
        own = [one for one in parts[f"{name}/seed0"].command if one not in whole]
        assert own == [f"run_dir={tmp_path / name / 'seed0'}", *settings]
    # A checkpoint is named by its version, and a step of two updates makes two.
    last = {name: int(parts[f"{name}/seed0"].done.parent.name) for name in ("para_grpo", "two_updates")}
    assert last["two_updates"] == 2 * last["para_grpo"]


def test_an_arm_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="--arms grppo: there is no such arm"):
        Experiment(Path("x"), ["grppo"], [0])


def test_the_report_has_means_and_spreads_of_what_is_there(tmp_path):
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
    assert list(remarks(experiment)) == ["PARA-GRPO: 2 of 2 seeds are not evaluated"]
    draw(experiment, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
