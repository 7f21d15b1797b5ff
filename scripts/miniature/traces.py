"""SFT traces for the cold start: calls on the windows that a question names, reports and answers, mostly malformed.

There are direct answers from an overview, traces with calls, and sub-agent traces about one window. Only the curated
source has thinking tags, and some of its turns lack the closing tag. So the policy learns to call and to use reports,
while the format stays fragile and depends more on the question than on chance. Some reports name a wrong colour and are
believed, so an overview that shows the event is more reliable than a call.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paravt_jax.data.synthetic import COLOURS
from rollout.video.times import overview_times
from scripts.miniature.world import DURATION_S, FPS, WINDOW_S, Question, Scene, questions

FORCED = "<think>\n"
CAPTION = "caption"
NOTHING = "No color is shown."
NUM_LOOKS = 6  # sub-agent traces per event, with windows at random seconds, which teach times


@dataclass(frozen=True)
class Mixture:
    """Composition of a corpus. With `tools` off it is the weak prior, without any calls."""

    tools: bool = True
    direct_frac: float = 0.5  # share answered without a call, of questions with the event in the overview
    bare: bool = True  # dialogues of the other source have no thinking tags
    noise_frac: float = 0.2  # share of thinking turns without the closing tag
    unclosed_frac: float = 0.0  # share of answers without the closing tag
    num_captions: int = 4  # captions per video, from overviews that show the event; they teach times
    wrong_frac: float = 0.5  # share of reports with a wrong colour


def rows_of(
    scenes: Sequence[Scene], frame_budgets: Sequence[int], mixture: Mixture, seed: int, max_windows: int = 2
) -> list[dict[str, Any]]:
    """The rows of a corpus: every question once with a random budget, captions, and sub-agent traces."""
    return [row for scene in scenes for row in _rows_of_scene(scene, frame_budgets, mixture, seed, max_windows)]


def _rows_of_scene(
    scene: Scene, frame_budgets: Sequence[int], mixture: Mixture, seed: int, max_windows: int
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng((seed, scene.seed, scene.number, 2))
    showing = [budget for budget in frame_budgets if overview_shows(scene, budget)]
    pairs = zip(questions(scene, max_windows), questions(_misread(scene, rng), max_windows), strict=True)
    prompts = [(question, misled, rng.choice(frame_budgets)) for question, misled in pairs]
    fewest = sorted({*showing})[:2]  # short rows, so that more fit in a step
    caption = _caption(scene)
    prompts += [(caption, caption, rng.choice(fewest)) for _ in range(mixture.num_captions) if showing]
    for question, misled, budget in prompts:
        is_visible = budget in showing
        if not mixture.tools or question.type == CAPTION:
            turns = [_direct(question, is_visible)]
        elif is_visible and rng.random() < mixture.direct_frac:
            turns = [_direct(question, True)]
        else:
            question = misled if rng.random() < mixture.wrong_frac else question
            turns = [_calling(question), _answering(question)]
        if mixture.bare and not question.curated:
            turns = [_bare(turn) for turn in turns]
        turns = [_damaged(turn, mixture, rng) for turn in turns]
        yield _row(question, int(budget), turns)
    if mixture.tools:
        yield _subagent_row(scene, scene.decoy_s, NOTHING)
        earliest_s, latest_s = max(0, scene.end_s - WINDOW_S), min(scene.start_s, DURATION_S - WINDOW_S)
        for start_s in rng.integers(earliest_s, latest_s, NUM_LOOKS, endpoint=True):
            window_s = int(start_s), int(start_s) + WINDOW_S
            reported = _misread(scene, rng) if rng.random() < mixture.wrong_frac else scene
            yield _subagent_row(scene, window_s, report(reported, window_s))


def report(scene: Scene, window_s: tuple[int, int]) -> str:
    if window_s[0] <= scene.start_s < window_s[1]:
        return f"{scene.colour} from {scene.start_s} to {scene.end_s} seconds."
    return NOTHING


def _caption(scene: Scene) -> Question:
    """Names no window, so only the frames show the time."""
    answer = f"{scene.colour} from {scene.start_s} to {scene.end_s} seconds"
    return Question(scene, CAPTION, "Describe the video.", answer, (), curated=False)


def _misread(scene: Scene, rng: np.random.Generator) -> Scene:
    return replace(scene, colour=str(rng.choice([colour for colour in COLOURS if colour != scene.colour])))


def overview_shows(scene: Scene, budget: int) -> bool:
    times_s = overview_times(DURATION_S, DURATION_S * FPS, budget)
    return any(scene.start_s <= int(time_s) < scene.end_s for time_s in times_s)


def _direct(question: Question, is_visible: bool) -> str:
    scene = question.scene
    thought = f"The overview shows {report(scene, scene.window_s)}" if is_visible else "The overview shows no color."
    return f"{FORCED}{thought}\n</think>\n<answer>{question.answer}</answer>"


def _calling(question: Question) -> str:
    calls = "\n".join(_call(*window_s) for window_s in question.windows_s)
    windows = " and ".join(f"{start_s} to {end_s}" for start_s, end_s in question.windows_s)
    return f"{FORCED}I look at {windows} seconds.\n</think>\n{calls}"


def _call(start_s: int, end_s: int) -> str:
    call = {
        "name": "crop_video",
        "arguments": {"video_path": "video.mp4", "start_time": start_s, "end_time": end_s},
    }
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _answering(question: Question) -> str:
    scene = question.scene
    return f"{FORCED}The summary shows {report(scene, scene.window_s)}\n</think>\n<answer>{question.answer}</answer>"


def _bare(turn: str) -> str:
    return turn.removeprefix(FORCED).replace("</think>\n", "")


def _damaged(turn: str, mixture: Mixture, rng: np.random.Generator) -> str:
    if rng.random() < mixture.noise_frac:
        turn = turn.replace("</think>\n", "")
    return turn.removesuffix("</answer>") if rng.random() < mixture.unclosed_frac else turn


def _row(question: Question, budget: int, turns: list[str]) -> dict[str, Any]:
    scene = question.scene
    content = [
        {"type": "video_url", "video_url": {"url": scene.video, "nframes": budget}},
        {"type": "text", "text": question.text},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    for turn in turns[:-1]:
        messages.append({"role": "assistant", "content": turn})
        messages += [{"role": "tool", "content": report(scene, window_s)} for window_s in question.windows_s]
    messages.append({"role": "assistant", "content": turns[-1]})
    return {"messages": messages}


def _subagent_row(scene: Scene, window_s: tuple[int, int], reported: str) -> dict[str, Any]:
    start_s, end_s = window_s
    part = {"type": "video_url", "video_url": {"url": scene.video, "start_time": start_s, "end_time": end_s}}
    reply = {"role": "assistant", "content": reported}
    return {"messages": [{"role": "user", "content": [part]}, reply]}
