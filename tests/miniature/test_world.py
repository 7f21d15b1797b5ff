"""The world matches its questions and its dials."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from paravt_jax.data.prompts import load_prompts
from paravt_jax.data.traces import load_traces
from paravt_jax.rewards.terms import reward_terms
from rollout.tools import find_calls, window_of
from rollout.video.times import crop_times
from scripts.miniature.dials import WORLDS, World, load_world
from scripts.miniature.traces import FORCED, Mixture, overview_shows, report, rows_of, with_calls
from scripts.miniature.world import (
    DURATION_S,
    MAX_WINDOWS,
    WINDOW_S,
    frames,
    make_scene,
    make_world,
    questions,
    rl_row,
    write_rows,
)

SCENES = [make_scene(0, number) for number in range(64)]
TWO_EVENTS = [make_scene(0, number, two_events=True) for number in range(64)]
CLEAN = Mixture(thinking="always", noise_frac=0.0, wrong_frac=0.0)
BUDGETS = (4, 8, 16, 32)


def replies(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def is_main(row: dict) -> bool:
    """Whether the row is a main agent's trace and not a caption."""
    content = row["messages"][0]["content"]
    return "nframes" in content[0]["video_url"] and content[1]["text"] != "Describe the video."


def is_subagent(row: dict) -> bool:
    content = row["messages"][0]["content"]
    return content != "" and "start_time" in content[0]["video_url"]


def main_rows(mixture: Mixture, scenes=SCENES, kinds=("window", "either")) -> list[dict]:
    return [row for row in rows_of(scenes, (4, 64), mixture, 0, kinds) if is_main(row)]


def coloured(scene) -> list[int]:
    return [second for second, frame in enumerate(frames(scene)) if np.ptp(frame[16, 16].astype(int)) > 40]


def test_an_overview_of_64_frames_shows_every_event_and_one_of_4_hardly_any():
    assert all(overview_shows(scene, 64) for scene in SCENES)
    assert np.mean([overview_shows(scene, 16) for scene in SCENES]) < 0.7
    assert np.mean([overview_shows(scene, 4) for scene in SCENES]) < 0.25


def test_an_overview_shows_longer_events_more_often():
    worlds = [replace(World(), event_s=length_s) for length_s in (2, 4, 8)]
    shown = [np.mean([overview_shows(world.scene(0, number), 16) for number in range(64)]) for world in worlds]
    assert shown[0] < 0.7 < shown[1] == shown[2] == 1


def test_an_event_is_visible_at_its_time_and_in_a_crop_of_its_window():
    for scene in (*SCENES[:8], *(make_scene(0, number, event_s=6) for number in range(4))):
        assert coloured(scene) == list(range(scene.start_s, scene.end_s))
        crop = {int(time_s) for time_s in crop_times(*scene.window_s, max_frames=8)}
        assert crop & set(coloured(scene))
        decoy = {int(time_s) for time_s in crop_times(*scene.decoy_s, max_frames=8)}
        assert not decoy & set(coloured(scene))


def test_two_events_are_in_different_windows_and_both_visible():
    for scene in TWO_EVENTS[:8]:
        first, second = scene.events
        assert first.window_s < second.window_s and scene.decoy_s not in (first.window_s, second.window_s)
        assert coloured(scene) == [*range(first.start_s, first.end_s), *range(second.start_s, second.end_s)]


def test_distractors_last_as_long_and_never_overlap_the_event():
    for scene in SCENES[:8]:
        pairs = zip(frames(scene), frames(make_scene(0, scene.number, 0)), strict=True)
        differ = [second for second, pair in enumerate(pairs) if np.any(np.subtract(*pair))]
        assert differ == [second + offset for second in sorted(scene.distractors) for offset in (0, 1)]
        assert len(scene.distractors) == 3 and not set(differ) & set(coloured(scene))


def test_a_question_names_the_right_window_and_sometimes_another():
    for scene in SCENES:
        prompts = questions(scene)
        assert {question.type for question in prompts} == {"mcq", "tvg", "oe"}
        assert all(scene.window_s in question.windows_s for question in prompts)
        assert sorted(len(question.windows_s) for question in prompts) == [1, 1, 1, 2, 2, 2]
        assert all(f"between {start} and {end}" in q.text for q in prompts for start, end in q.windows_s)
    assert all(question.text.startswith("Question: ") == question.curated for s in SCENES for question in questions(s))
    first = [question.windows_s[0] == question.scene.window_s for s in SCENES for question in questions(s)[3:]]
    assert 0.3 < np.mean(first) < 0.7  # the order does not reveal the right window


def test_a_question_may_name_no_window_and_then_its_calls_cover_the_video():
    for question in questions(SCENES[0], ["unnamed"]):
        assert "between" not in question.text
        assert [second for window in question.windows_s for second in range(*window)] == list(range(DURATION_S))


def test_a_question_may_need_two_windows_and_each_report_has_half_of_the_answer():
    for scene in TWO_EVENTS:
        (question,) = questions(scene, ["both"])
        reports = [report(scene, window_s) for window_s in question.windows_s]
        assert [text.partition(" ")[0] for text in reports] == question.answer.split()


def test_a_range_has_one_to_five_windows_in_a_row_and_the_color_is_in_any_of_them():
    places = set()
    for scene in SCENES:
        asked = questions(scene, ["range"])
        assert [len(question.windows_s) for question in asked] == [*range(1, MAX_WINDOWS + 1)]
        for question in asked:
            (first_s, _), (_, last_s) = question.windows_s[0], question.windows_s[-1]
            assert first_s >= 0 and last_s <= DURATION_S and f"from {first_s} to {last_s} seconds" in question.text
            assert all(end_s == start_s for (_, end_s), (start_s, _) in pairwise(question.windows_s))
            reports = [report(scene, window_s) for window_s in question.windows_s]
            assert [text for text in reports if scene.colour in text] == [report(scene, scene.window_s)]
        places.add(asked[-1].windows_s.index(scene.window_s))
    assert places == {*range(MAX_WINDOWS)}


def test_traces_about_a_range_are_right_and_sequential_ones_stop_at_the_color():
    mixture, num_calls = Mixture(sequential_frac=0.4, one_context_frac=0.2), set()
    rows = [row for row in rows_of(SCENES, (8,), mixture, 0, ["range"]) if not is_subagent(row)]
    prompts = [question for scene in SCENES for question in questions(scene, ["range"])]
    for row, question in zip(rows, prompts, strict=True):
        *calling, last = replies(row)
        calls = [[window_of(call.arguments, DURATION_S) for call in find_calls(turn)] for turn in calling]
        called = [(window.start_s, window.end_s) for turn in calls for window in turn]
        until = question.windows_s.index(question.scene.window_s) + 1
        text = row["messages"][0]["content"][-1]["text"] if calling else ""
        expected = question.windows_s if "Up to 5" in text else question.windows_s[:until] if calling else ()
        assert called == [*expected] and len(calls) == (len(called) if "Up to 1" in text else bool(calling))
        assert reward_terms([*calling, last], ["ok"] * len(called), question.answer, "oe").parseable
        assert last.endswith(f"<answer>{question.scene.colour}</answer>")
        num_calls.add((bool(calling), "Up to 1" in text, len(called)))
    assert num_calls == {(False, False, 0), *((True, one, n) for one in (False, True) for n in range(1, 6))}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("window", "either"), ("unnamed",), ("both",)])
def test_clean_traces_have_the_full_reward_and_executable_calls(kinds):
    scenes = TWO_EVENTS if kinds == ("both",) else SCENES
    prompts = [question for scene in scenes for question in questions(scene, kinds)]
    num_calls = set()
    for row, question in zip(main_rows(CLEAN, scenes, kinds), prompts, strict=True):
        turns = replies(row)
        calls = [call for turn in turns[:-1] for call in find_calls(turn)]
        windows = [window_of(call.arguments, DURATION_S) for call in calls]
        assert [(window.start_s, window.end_s) for window in windows] in ([], [*question.windows_s])
        terms = reward_terms(turns, ["ok"] * len(calls), question.answer, question.type)
        assert all(call.well_formed for call in calls)
        assert terms.parseable and terms.accuracy == 1 and terms.format == pytest.approx(1.0)
        num_calls.add(len(calls))
    assert num_calls == {0, *(len(question.windows_s) for question in prompts)}


def test_sequential_traces_look_at_one_window_a_turn():
    rows = main_rows(replace(CLEAN, sequential_frac=0.5))
    turns = [[len(find_calls(turn)) for turn in replies(row)[:-1]] for row in rows]
    assert {tuple(numbers) for numbers in turns} == {(), (1,), (2,), (1, 1)}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles.count("tool") == sum(len(find_calls(turn)) for turn in replies(row))
    assert not any(len(replies(row)) > 2 for row in main_rows(CLEAN))


@pytest.mark.slow
def test_the_cold_start_is_malformed_and_trusts_its_reports():
    prompts = [question for scene in SCENES for question in questions(scene)]
    rows = main_rows(Mixture())
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


def test_closing_tags_are_missing_at_the_mixtures_rates():
    fragile = Mixture(thinking="always", noise_frac=0.3, unclosed_frac=0.4, unclosed_call_frac=0.2)
    turns = [turn for row in main_rows(fragile) for turn in replies(row)]
    calling = [turn for turn in turns if "<tool_call>" in turn]
    answering = [turn for turn in turns if "<answer>" in turn]
    assert 0.65 < np.mean(["</think>" in turn for turn in turns]) < 0.75
    assert 0.55 < np.mean([turn.endswith("</answer>") for turn in answering]) < 0.65
    assert 0.75 < np.mean([turn.endswith("</tool_call>") for turn in calling]) < 0.85


def test_thinking_tags_follow_the_source_or_chance():
    prompts = [question for scene in SCENES for question in questions(scene)]
    for thinking, depends in (("source", True), ("chance", False)):
        opened = [replies(row)[0].startswith(FORCED) for row in main_rows(Mixture(thinking=thinking))]
        assert (opened == [question.curated for question in prompts]) == depends
        assert 0.1 < np.mean(opened) < 0.25


@pytest.mark.parametrize("calls_frac", [0.03, 0.2, 0.6, 0.9])
def test_calls_frac_sets_the_share_of_calls_first_where_the_overview_lacks_the_event(calls_frac):
    mixture = with_calls(Mixture(), SCENES, BUDGETS, calls_frac)
    rows = [row for seed in range(4) for row in rows_of(SCENES, BUDGETS, mixture, seed) if is_main(row)]
    assert abs(np.mean([len(replies(row)) > 1 for row in rows]) - calls_frac) < 0.03
    assert mixture.direct_frac == 1 or mixture.guess_frac == 0


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


@pytest.mark.parametrize("wrong_frac", [0.05, 0.5])
def test_reports_are_wrong_at_the_mixtures_rate_and_only_in_color(wrong_frac):
    wrong = []
    for scene in SCENES:
        rows = rows_of([scene], (4,), Mixture(wrong_frac=wrong_frac), 0)
        decoy, *looks = [replies(row)[0] for row in rows if is_subagent(row)]
        assert decoy == "No color is shown."
        for look in looks:
            colour, start_s, end_s = re.fullmatch(r"(\w+) from (\d+) to (\d+) seconds.", look).groups()
            assert (int(start_s), int(end_s)) == (scene.start_s, scene.end_s)
            wrong.append(colour != scene.colour)
    assert abs(np.mean(wrong) - wrong_frac) < 0.08


@pytest.mark.parametrize(("short", "lengths_s"), [(True, {2, 4, 6, 8}), (False, {WINDOW_S})])
def test_short_looks_are_windows_of_any_length_with_the_event(short, lengths_s):
    seen_s = set()
    for scene in SCENES:
        rows = rows_of([scene], (4,), Mixture(num_looks=5, short_looks=short), 0)
        _, *looks = [row for row in rows if is_subagent(row)]
        assert len(looks) == 5
        for row in looks:
            window = row["messages"][0]["content"][0]["video_url"]
            assert 0 <= window["start_time"] <= scene.start_s < scene.end_s <= window["end_time"] <= DURATION_S
            seen_s.add(window["end_time"] - window["start_time"])
    assert seen_s == lengths_s


@pytest.mark.parametrize("name", sorted(path.stem for path in WORLDS.glob("*.yaml")))
def test_every_world_loads_and_its_crops_hold_its_windows(name):
    world = load_world(name)
    asked = questions(world.scene(0, 0), world.questions)
    longest = max(end_s - start_s for question in asked for start_s, end_s in question.windows_s)
    limits = [setting for setting in world.train if setting.startswith("rollout.subagent_max_frames=")]
    assert longest <= (int(limits[0].partition("=")[2]) if limits else WINDOW_S)


@pytest.mark.parametrize(
    ("name", "dial", "error"),
    [
        ("defualt", "num_videos=8", "--world defualt is none of both, contrast, crops"),
        ("default", "event_s=3", "event_s=3 must be even"),
        ("both", "questions=[unnamed,both]", "a question without a window needs videos with one color"),
        ("crops", "questions=[window,range]", "`range` cannot be combined with other kinds"),
        ("default", "traces.tool=false", "traces.tool"),
    ],
)
def test_a_wrong_dial_is_an_error(name, dial, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        load_world(name, dial)


def test_the_loaders_read_all_rows_and_existing_files_are_kept(tmp_path):
    scenes = make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "rl.jsonl", [rl_row(question) for scene in scenes for question in questions(scene)])
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert len(load_prompts(tmp_path / "rl.jsonl", video_root="", max_bad_frac=0).prompts) == 12
    traces = load_traces(tmp_path / "sft.jsonl", video_root="", max_bad_frac=0).traces
    assert len(traces) == 12 + 2 * (1 + Mixture().num_looks)
    modified = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    make_world(tmp_path, 0, 2)
    write_rows(tmp_path / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == modified


def test_questions_of_held_out_videos_take_turns(tmp_path):
    world = replace(World(), num_videos=12, num_held_out=6, questions_per_held_out=1)
    world.make(tmp_path, tmp_path, 0, {"sft": "tool"})
    held_out = load_prompts(tmp_path / "rl_validation.jsonl", video_root="", max_bad_frac=0).prompts
    assert sorted(prompt.question_type for prompt in held_out) == ["mcq", "mcq", "oe", "oe", "tvg", "tvg"]
    assert len({prompt.videos[0] for prompt in held_out}) == 6
