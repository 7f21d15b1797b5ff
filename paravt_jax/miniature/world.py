"""A world in which looking closely pays: long grey videos, in which a colour is shown for two seconds at a known time.

White and black are shown as briefly, at other times, and are never what is asked for. An overview of 64 frames shows
the colour, one of 4 frames hardly ever; a call on the right window shows it always. A clock runs in the border, as in
much footage, so that one look tells what is shown and when, which a small model learns in minutes. A question names one
window, or two of which one is right, so that two calls in one turn pay. Questions are of the three published types and
come from two sources, which can be told apart by how they begin. What is shown, asked and answered follows from the
seed and the video's number alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from model_port.progress import counted
from paravt_jax.data.synthetic import COLOURS, LETTERS, write_atomic
from rollout.video.encode import write_video

FRAME_PX = 32  # one token of the model
FPS = 1
DURATION_S = 64
WINDOW_S = 8  # a question names one of these windows, a call looks at one
EVENT_S = 2
EVENT_STARTS_S = range(0, WINDOW_S, EVENT_S)  # in a window
BORDER_PX = 4
CLOCK_ON, CLOCK_OFF = 225, 30
NUM_WINDOWS = DURATION_S // WINDOW_S
NUM_DISTRACTORS = 3
WHITE, BLACK = 240, 15
CURATED_FRAC = 1 / 6  # of the questions


@dataclass(frozen=True)
class Scene:
    seed: int
    number: int
    colour: str
    start_s: int
    decoy_s: tuple[int, int]  # a window in which no colour is shown
    distractors: dict[int, int]  # from which second on, which shade

    @property
    def video(self) -> str:
        return f"videos/seed{self.seed}_{self.number:04}_{len(self.distractors)}.mp4"

    @property
    def end_s(self) -> int:
        return self.start_s + EVENT_S

    @property
    def window_s(self) -> tuple[int, int]:
        """The one that shows the event, all of it."""
        start_s = self.start_s // WINDOW_S * WINDOW_S
        return start_s, start_s + WINDOW_S


@dataclass(frozen=True)
class Question:
    scene: Scene
    type: str  # mcq, tvg or oe
    text: str
    answer: str
    windows_s: tuple[tuple[int, int], ...]  # those that it names, in the order of time
    curated: bool  # of the source that begins with "Question:"; its traces are well-formed, those of the other are not


def make_scene(seed: int, number: int, num_distractors: int = NUM_DISTRACTORS) -> Scene:
    """Colours come equally often; an event lies within a window, distractors where it is not; all on even seconds."""
    rng = np.random.default_rng((seed, number))
    window, decoy = (int(place) * WINDOW_S for place in rng.permutation(NUM_WINDOWS)[:2])
    start_s = window + int(rng.choice(EVENT_STARTS_S))
    free = [second for second in range(0, DURATION_S, EVENT_S) if second != start_s]
    seconds = rng.choice(free, num_distractors, replace=False)
    distractors = {int(second): int(rng.choice((WHITE, BLACK))) for second in seconds}
    colour = [*COLOURS][(seed + number) % len(COLOURS)]
    return Scene(seed, number, colour, start_s, (decoy, decoy + WINDOW_S), distractors)


def frames(scene: Scene) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Frame n is shown from n / FPS seconds on: grey that flickers, a colour, white or black between bars."""
    rng = np.random.default_rng((scene.seed, scene.number, 1))
    shown = {**scene.distractors, scene.start_s: COLOURS[scene.colour]}
    for number in range(DURATION_S * FPS):
        pixels = np.full((FRAME_PX, FRAME_PX, 3), rng.integers(90, 166), np.uint8)
        for start_s, colour in shown.items():
            if start_s <= number / FPS < start_s + EVENT_S:
                pixels[BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX] = colour
        window, second = divmod(number // FPS, WINDOW_S)
        _draw_bar(pixels[:BORDER_PX], (window + 1) / NUM_WINDOWS)
        _draw_bar(pixels[-BORDER_PX:], (second // EVENT_S + 1) / len(EVENT_STARTS_S))
        yield pixels


def _draw_bar(strip: UInt8[np.ndarray, "height width 3"], frac: float) -> None:
    strip[:] = CLOCK_OFF
    strip[:, : round(FRAME_PX * frac)] = CLOCK_ON


def questions(scene: Scene, max_windows: int = 2) -> list[Question]:
    """In each of the three ways, about one window and about two, if so many are allowed."""
    options = "\n".join(f"{letter}. {colour}" for colour, letter in LETTERS.items())
    rng = np.random.default_rng((scene.seed, scene.number, 3))
    asked = []
    one, two = (scene.window_s,), tuple(sorted((scene.window_s, scene.decoy_s)))
    for windows_s in (one, two)[:max_windows]:
        where = " or ".join(f"between {start_s} and {end_s} seconds" for start_s, end_s in windows_s)
        for kind, text, answer in (
            ("mcq", f"What color is shown {where}?\n{options}", LETTERS[scene.colour]),
            ("oe", f"Name the color shown {where}.", scene.colour),
            ("tvg", f"When is a color shown {where}?", f"[{scene.start_s}, {scene.end_s}]"),
        ):
            curated = bool(rng.random() < CURATED_FRAC)
            asked.append(Question(scene, kind, f"Question: {text}" if curated else text, answer, windows_s, curated))
    return asked


def make_world(directory: Path, seed: int, num_videos: int, num_distractors: int = NUM_DISTRACTORS) -> list[Scene]:
    """Writes the videos that are not there yet."""
    (directory / "videos").mkdir(parents=True, exist_ok=True)
    scenes = [make_scene(seed, number, num_distractors) for number in range(num_videos)]
    undone = [scene for scene in scenes if not (directory / scene.video).exists()]
    for scene in counted(undone, "making videos", "video"):
        write_atomic(directory / scene.video, lambda partial, scene=scene: write_video(partial, frames(scene), FPS))
    return scenes


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        write_atomic(path, lambda partial: partial.write_text(text))
    return path


def rl_row(question: Question) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"<video>\n{question.text}"}],
        "videos": [{"video": question.scene.video}],
        "extra_info": json.dumps({"answer": question.answer, "question_type": question.type}),
    }
