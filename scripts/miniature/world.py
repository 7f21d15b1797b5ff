"""A synthetic world in which crops help: long grey videos that show a colour for two seconds.

White and black distractors appear as briefly at other times, and no question asks for them. An overview of 64 frames
always shows the colour, one of 4 frames rarely; a crop of the right window always does. A clock in the border, as in
much real footage, makes times readable, which a small model learns in minutes. A question names one window, or two with
one right one, so that two parallel calls help. Questions have the three published types and two sources with different
beginnings. Videos, questions and answers depend only on the seed and the video's number.
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

FRAME_PX = 32  # one visual token
FPS = 1
DURATION_S = 64
WINDOW_S = 8  # length of the windows in questions and calls
EVENT_S = 2
EVENT_STARTS_S = range(0, WINDOW_S, EVENT_S)  # relative to a window
BORDER_PX = 4
CLOCK_ON, CLOCK_OFF = 225, 30
NUM_WINDOWS = DURATION_S // WINDOW_S
NUM_DISTRACTORS = 3
WHITE, BLACK = 240, 15
CURATED_FRAC = 1 / 6  # share of questions


@dataclass(frozen=True)
class Scene:
    seed: int
    number: int
    colour: str
    start_s: int
    decoy_s: tuple[int, int]  # a window without a colour
    distractors: dict[int, int]  # second -> shade

    @property
    def video(self) -> str:
        return f"videos/seed{self.seed}_{self.number:04}_{len(self.distractors)}.mp4"

    @property
    def end_s(self) -> int:
        return self.start_s + EVENT_S

    @property
    def window_s(self) -> tuple[int, int]:
        """The window that contains the event."""
        start_s = self.start_s // WINDOW_S * WINDOW_S
        return start_s, start_s + WINDOW_S


@dataclass(frozen=True)
class Question:
    scene: Scene
    type: str  # mcq, tvg or oe
    text: str
    answer: str
    windows_s: tuple[tuple[int, int], ...]  # the windows that it names, in order
    curated: bool  # from the source that starts with "Question:" and has well-formed traces


def make_scene(seed: int, number: int, num_distractors: int = NUM_DISTRACTORS) -> Scene:
    """Colours are balanced. The event is within one window; distractors are elsewhere; all start at even seconds."""
    rng = np.random.default_rng((seed, number))
    window, decoy = (int(number) * WINDOW_S for number in rng.permutation(NUM_WINDOWS)[:2])
    start_s = window + int(rng.choice(EVENT_STARTS_S))
    free = [second for second in range(0, DURATION_S, EVENT_S) if second != start_s]
    seconds = rng.choice(free, num_distractors, replace=False)
    distractors = {int(second): int(rng.choice((WHITE, BLACK))) for second in seconds}
    colour = [*COLOURS][(seed + number) % len(COLOURS)]
    return Scene(seed, number, colour, start_s, (decoy, decoy + WINDOW_S), distractors)


def frames(scene: Scene) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yields the frames, at n / FPS seconds: flickering grey, a colour, white or black, between clock bars."""
    rng = np.random.default_rng((scene.seed, scene.number, 1))
    events = {**scene.distractors, scene.start_s: COLOURS[scene.colour]}
    for number in range(DURATION_S * FPS):
        pixels = np.full((FRAME_PX, FRAME_PX, 3), rng.integers(90, 166), np.uint8)
        for start_s, colour in events.items():
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
    """Questions of all three types, with one window and with two, up to `max_windows`."""
    options = "\n".join(f"{letter}. {colour}" for colour, letter in LETTERS.items())
    rng = np.random.default_rng((scene.seed, scene.number, 3))
    result = []
    single, pair = (scene.window_s,), tuple(sorted((scene.window_s, scene.decoy_s)))
    for windows_s in (single, pair)[:max_windows]:
        where = " or ".join(f"between {start_s} and {end_s} seconds" for start_s, end_s in windows_s)
        for kind, text, answer in (
            ("mcq", f"What color is shown {where}?\n{options}", LETTERS[scene.colour]),
            ("oe", f"Name the color shown {where}.", scene.colour),
            ("tvg", f"When is a color shown {where}?", f"[{scene.start_s}, {scene.end_s}]"),
        ):
            curated = bool(rng.random() < CURATED_FRAC)
            result.append(Question(scene, kind, f"Question: {text}" if curated else text, answer, windows_s, curated))
    return result


def make_world(directory: Path, seed: int, num_videos: int, num_distractors: int = NUM_DISTRACTORS) -> list[Scene]:
    """Writes the missing videos."""
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
