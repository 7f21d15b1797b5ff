"""SFT traces for the cold start: calls for the windows that a question names, reports and answers, mostly malformed.

There are direct answers from an overview, traces with calls, and sub-agent traces about one window. `Mixture` has the
dials: how often a report is right, how often a trace calls, and how fragile the format is. Tags that are missing by
chance give the episodes of a prompt different formats; tags that are missing in one source of questions do not.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from paravt_jax.data.synthetic import COLOURS
from rollout.video.times import overview_times
from scripts.miniature.world import (
    CURATED_FRAC,
    DURATION_S,
    FPS,
    MAX_WINDOWS,
    STEP_S,
    WINDOW_S,
    Event,
    Kind,
    Question,
    Scene,
    Window,
    questions,
)

FORCED = "<think>\n"
CAPTION = "caption"
NOTHING = "No color is shown."
NUM_OTHERS = 2  # sub-agent traces without the color, for questions with a range
LIMIT = "Up to {max_parallel} calls a turn."  # after a question about a range; training and evaluation share it
PLAYS = ("parallel", "sequential", "one context", "frames")  # of a question about a range


@dataclass(frozen=True)
class Mixture:
    """The composition of a corpus. `tools=False` is the weak prior without any calls."""

    tools: bool = True
    direct_frac: float = 0.5  # share answered without a call if the overview shows the event
    guess_frac: float = 0.0  # share answered without a call, as a guess, if the overview lacks the event
    thinking: Literal["always", "source", "chance", "uncalled"] = "source"  # which dialogues have thinking tags
    noise_frac: float = 0.2  # share of thinking turns without </think>
    unclosed_frac: float = 0.0  # share of answers without </answer>
    unclosed_call_frac: float = 0.0  # share of calling turns without their last </tool_call>
    sequential_frac: float = 0.0  # share of traces with several windows that call one per turn
    one_context_frac: float = 0.0  # share of traces about a range whose prompt has the frames of all windows
    frames_frac: float = 0.0  # share of traces about a range whose parallel calls return frames
    num_captions: int = 4  # captions per video, from overviews that show the event; they teach times
    wrong_frac: float = 0.5  # share of reports with a wrong color
    num_looks: int = 6  # sub-agent traces per event, with windows at random seconds, which teach times
    short_looks: bool = False  # give these windows any length up to the usual one, which teaches colors


def with_calls(mixture: Mixture, scenes: Sequence[Scene], frame_budgets: Sequence[int], calls_frac: float) -> Mixture:
    """Returns a mixture in which `calls_frac` of all dialogues call, first those whose overview lacks the event."""
    unseen = float(np.mean([not overview_shows(scene, budget) for scene in scenes for budget in frame_budgets]))
    calls_unseen = min(1.0, calls_frac / unseen)
    calls_seen = max(0.0, calls_frac - unseen) / (1 - unseen)
    return replace(mixture, guess_frac=1 - calls_unseen, direct_frac=1 - calls_seen)


def rows_of(
    scenes: Sequence[Scene],
    frame_budgets: Sequence[int],
    mixture: Mixture,
    seed: int,
    kinds: Sequence[Kind] = ("window", "either"),
) -> list[dict[str, Any]]:
    """Returns a corpus: every question once with a random budget, captions, and sub-agent traces."""
    rows_of_scene = _rows_of_ranges if "range" in kinds and mixture.tools else _rows_of_scene
    return [row for scene in scenes for row in rows_of_scene(scene, frame_budgets, mixture, seed, kinds)]


def _rows_of_scene(
    scene: Scene, frame_budgets: Sequence[int], mixture: Mixture, seed: int, kinds: Sequence[Kind]
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng((seed, scene.seed, scene.number, 2))
    showing = [budget for budget in frame_budgets if overview_shows(scene, budget)]
    pairs = zip(questions(scene, kinds), questions(_misread(scene, rng), kinds), strict=True)
    prompts = [(question, misled, rng.choice(frame_budgets)) for question, misled in pairs]
    fewest = sorted({*showing})[:2]  # short rows, so that more fit in a step
    caption = _caption(scene)
    prompts += [(caption, caption, rng.choice(fewest)) for _ in range(mixture.num_captions) if showing]
    for question, misled, budget in prompts:
        is_visible = budget in showing
        direct_frac = mixture.direct_frac if is_visible else mixture.guess_frac
        if not mixture.tools or question.type == CAPTION or (direct_frac and rng.random() < direct_frac):
            calls, turns = [], [_direct(question, is_visible)]
        else:
            question = misled if rng.random() < mixture.wrong_frac else question
            calls = _calls_of_turns(question, mixture, rng)
            turns = [*map(_calling, calls), _answering(question)]
        if not _thinks(question, mixture, bool(calls), rng):
            turns = [_bare(turn) for turn in turns]
        turns = [_damaged(turn, mixture, rng) for turn in turns]
        yield _row(question, int(budget), calls, turns)
    if mixture.tools:
        yield _subagent_row(scene, scene.decoy_s, NOTHING)
        length_s = DURATION_S // 4 if "unnamed" in kinds else WINDOW_S
        for event in scene.events:
            for window_s in _looks(event, length_s, mixture, rng):
                reported = _misread(scene, rng) if rng.random() < mixture.wrong_frac else scene
                yield _subagent_row(scene, window_s, report(reported, window_s))


def _rows_of_ranges(
    scene: Scene, frame_budgets: Sequence[int], mixture: Mixture, seed: int, kinds: Sequence[Kind]
) -> Iterator[dict[str, Any]]:
    """Yields clean traces: parallel calls with reports or frames; one call per turn until the color; no call."""
    rng = np.random.default_rng((seed, scene.seed, scene.number, 2))
    apart = mixture.sequential_frac, mixture.one_context_frac, mixture.frames_frac
    for question in questions(scene, kinds):
        play = rng.choice(PLAYS, p=[1 - sum(apart), *apart])
        if play == "one context":
            yield one_context_row(question)
            continue
        until = question.windows_s.index(scene.window_s) + 1
        calls = (
            [(window_s,) for window_s in question.windows_s[:until]] if play == "sequential" else [question.windows_s]
        )
        limit = LIMIT.format(max_parallel=1 if play == "sequential" else MAX_WINDOWS)
        turns = [*map(_calling, calls), _answering(question)]
        question = replace(question, text=f"{question.text} {limit}")
        yield _row(question, int(rng.choice(frame_budgets)), calls, turns, shows_frames=play == "frames")
    others = [(start_s, start_s + WINDOW_S) for start_s in range(0, DURATION_S, WINDOW_S)]
    others.remove(scene.window_s)
    looks = _looks(scene, WINDOW_S, mixture, rng)
    for window_s in (*looks, *map(tuple, rng.permutation(others)[:NUM_OTHERS].tolist())):
        yield _subagent_row(scene, window_s, report(scene, window_s))


def _looks(event: Event, longest_s: int, mixture: Mixture, rng: np.random.Generator) -> list[Window]:
    """Returns windows with the event."""
    lengths_s = range(event.length_s if mixture.short_looks else longest_s, longest_s + 1, STEP_S)
    windows_s = []
    for _ in range(mixture.num_looks):
        length_s = lengths_s[rng.integers(len(lengths_s))]
        earliest_s, latest_s = max(0, event.end_s - length_s), min(event.start_s, DURATION_S - length_s)
        start_s = int(rng.integers(earliest_s, latest_s, endpoint=True))
        windows_s.append((start_s, start_s + length_s))
    return windows_s


def one_context_row(question: Question) -> dict[str, Any]:
    """Returns a trace without sub-agents, whose prompt has the overview and the frames of all windows."""
    whole = {"type": "video_url", "video_url": {"url": question.scene.video}}
    content = [whole, *(_window_part(question.scene, window_s) for window_s in question.windows_s)]
    content.append({"type": "text", "text": f"{question.text}\n\nThink first, then answer."})
    reply = _thought(f"The frames show {report(question.scene, question.scene.window_s)}", question)
    return {
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": content},
            {"role": "assistant", "content": reply},
        ]
    }


def _thinks(question: Question, mixture: Mixture, has_calls: bool, rng: np.random.Generator) -> bool:
    if mixture.thinking == "chance":
        return bool(rng.random() < CURATED_FRAC)
    if mixture.thinking == "uncalled":  # half of the dialogues without calls; calls have the native form
        return not has_calls and bool(rng.random() < 0.5)
    return mixture.thinking == "always" or question.curated


def report(scene: Scene, *windows_s: Window) -> str:
    """Reports the events that start in the windows, in time order."""
    events = [event for event in scene.events if any(start <= event.start_s < end for start, end in windows_s)]
    return " ".join(f"{event.colour} from {event.start_s} to {event.end_s} seconds." for event in events) or NOTHING


def _caption(scene: Scene) -> Question:
    """Returns a captioning trace that names no window, so that only the frames show the time."""
    answer = report(scene, (0, DURATION_S)).removesuffix(".")
    return Question(scene, CAPTION, "Describe the video.", answer, (), curated=False)


def _misread(scene: Scene, rng: np.random.Generator) -> Scene:
    return replace(scene, colour=str(rng.choice([colour for colour in COLOURS if colour != scene.colour])))


def overview_shows(scene: Scene, budget: int) -> bool:
    times_s = overview_times(DURATION_S, DURATION_S * FPS, budget)
    return all(any(event.start_s <= int(time_s) < event.end_s for time_s in times_s) for event in scene.events)


def _direct(question: Question, is_visible: bool) -> str:
    shown = report(question.scene, *(question.windows_s or ((0, DURATION_S),)))
    return _thought(f"The overview shows {shown}" if is_visible else "The overview shows no color.", question)


def _thought(thought: str, question: Question) -> str:
    return f"{FORCED}{thought}\n</think>\n<answer>{question.answer}</answer>"


def _calls_of_turns(question: Question, mixture: Mixture, rng: np.random.Generator) -> list[Sequence[Window]]:
    """Returns the windows that each turn looks at: all in one turn, or one per turn."""
    if mixture.sequential_frac and len(question.windows_s) > 1 and rng.random() < mixture.sequential_frac:
        return [(window_s,) for window_s in question.windows_s]
    return [question.windows_s]


def _calling(windows_s: Sequence[Window]) -> str:
    calls = "\n".join(_call(*window_s) for window_s in windows_s)
    windows = " and ".join(f"{start_s} to {end_s}" for start_s, end_s in windows_s)
    return f"{FORCED}I look at {windows} seconds.\n</think>\n{calls}"


def _call(start_s: int, end_s: int) -> str:
    call = {
        "name": "crop_video",
        "arguments": {"video_path": "video.mp4", "start_time": start_s, "end_time": end_s},
    }
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _answering(question: Question) -> str:
    return _thought(f"The summary shows {report(question.scene, *question.windows_s)}", question)


def _bare(turn: str) -> str:
    return turn.removeprefix(FORCED).replace("</think>\n", "")


def _damaged(turn: str, mixture: Mixture, rng: np.random.Generator) -> str:
    if rng.random() < mixture.noise_frac:
        turn = turn.replace("</think>\n", "")
    unclosed_frac = mixture.unclosed_call_frac if turn.endswith("</tool_call>") else mixture.unclosed_frac
    if rng.random() < unclosed_frac:
        turn = turn.removesuffix("</answer>").removesuffix("\n</tool_call>")
    return turn


def _row(
    question: Question,
    budget: int,
    calls: Sequence[Sequence[Window]],
    turns: Sequence[str],
    shows_frames: bool = False,
) -> dict[str, Any]:
    """Builds a row; `calls` has the windows of each turn but the last, which tools report on or show."""
    scene = question.scene
    content = [
        {"type": "video_url", "video_url": {"url": scene.video, "nframes": budget}},
        {"type": "text", "text": question.text},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    for turn, windows_s in zip(turns[:-1], calls, strict=True):
        messages.append({"role": "assistant", "content": turn})
        responses = [[_window_part(scene, w)] if shows_frames else report(scene, w) for w in windows_s]
        messages += [{"role": "tool", "content": response} for response in responses]
    messages.append({"role": "assistant", "content": turns[-1]})
    return {"messages": messages}


def _subagent_row(scene: Scene, window_s: Window, reported: str) -> dict[str, Any]:
    reply = {"role": "assistant", "content": reported}
    return {"messages": [{"role": "user", "content": [_window_part(scene, window_s)]}, reply]}


def _window_part(scene: Scene, window_s: Window) -> dict[str, Any]:
    start_s, end_s = window_s
    return {"type": "video_url", "video_url": {"url": scene.video, "start_time": start_s, "end_time": end_s}}
