"""A world in which looking closely pays: long grey videos, in which a colour is shown for two seconds at a known time.

An overview of 64 frames shows it, one of 4 frames hardly ever; a call on the right window shows it always. A question
names one window, or two of which one is right, so that two calls in one turn pay. What is shown, asked and answered
follows from the seed and the video's number alone. Questions are of the three published types.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from paravt_jax.data.synthetic import COLOURS, LETTERS, appear, write_video

FRAME_PX = 32  # one token of the model
FPS = 1
DURATION_S = 64
WINDOW_S = 8  # a question names one of these windows, a call looks at one
EVENT_S = 2
BORDER_PX = 4
NUM_WINDOWS = DURATION_S // WINDOW_S


@dataclass(frozen=True)
class Scene:
    seed: int
    number: int
    colour: str
    start_s: int
    decoy_s: tuple[int, int]  # a window in which nothing is shown

    @property
    def video(self) -> str:
        return f"videos/seed{self.seed}_{self.number:04}.mp4"

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


def make_scene(seed: int, number: int) -> Scene:
    """Colours come equally often; an event lies within a window."""
    rng = np.random.default_rng((seed, number))
    window, decoy = (int(place) * WINDOW_S for place in rng.permutation(NUM_WINDOWS)[:2])
    start_s = window + int(rng.integers(0, WINDOW_S - EVENT_S, endpoint=True))
    return Scene(seed, number, [*COLOURS][(seed + number) % len(COLOURS)], start_s, (decoy, decoy + WINDOW_S))


def frames(scene: Scene) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Frame n is shown from n / FPS seconds on: grey that flickers, or the colour in a grey border."""
    rng = np.random.default_rng((scene.seed, scene.number, 1))
    for number in range(DURATION_S * FPS):
        pixels = np.full((FRAME_PX, FRAME_PX, 3), rng.integers(90, 166), np.uint8)
        if scene.start_s <= number / FPS < scene.end_s:
            pixels[BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX] = COLOURS[scene.colour]
        yield pixels


def questions(scene: Scene, max_windows: int = 2) -> list[Question]:
    """In each of the three ways, about one window and about two, if so many are allowed."""
    options = "\n".join(f"{letter}. {colour}" for colour, letter in LETTERS.items())
    found = []
    one, two = (scene.window_s,), tuple(sorted((scene.window_s, scene.decoy_s)))
    for windows_s in (one, two)[:max_windows]:
        where = " or ".join(f"between {start_s} and {end_s} seconds" for start_s, end_s in windows_s)
        for kind, text, answer in (
            ("mcq", f"What color is shown {where}?\n{options}", LETTERS[scene.colour]),
            ("oe", f"Name the color shown {where}.", scene.colour),
            ("tvg", f"When is a color shown {where}?", f"[{scene.start_s}, {scene.end_s}]"),
        ):
            found.append(Question(scene, kind, text, answer, windows_s))
    return found


def make_world(directory: Path, seed: int, num_videos: int) -> list[Scene]:
    """Writes the videos that are not there yet."""
    (directory / "videos").mkdir(parents=True, exist_ok=True)
    scenes = [make_scene(seed, number) for number in range(num_videos)]
    for scene in scenes:
        path = directory / scene.video
        if not path.exists():
            appear(path, lambda partial, scene=scene: write_video(partial, frames(scene), FPS))
    return scenes


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        appear(path, lambda partial: partial.write_text(text))
    return path


def rl_row(question: Question) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"<video>\n{question.text}"}],
        "videos": [{"video": question.scene.video}],
        "extra_info": json.dumps({"answer": question.answer, "question_type": question.type}),
    }
