"""A synthetic world in which crops help: long gray videos that show a color for two seconds.

White and black distractors appear for as long at other times, and no question asks for them. An overview of 64 frames
always shows the color, one of 4 frames rarely; a crop of the right window always does. A clock in the border, as in
much real footage, makes times readable, which a small model learns in minutes. Questions have the three published types
and two sources with different beginnings. There are five kinds:

    window    names the window with the color
    either    names two windows, one of which has it, so that two parallel calls help
    unnamed   names none; four parallel calls look at the quarters of the video
    both      names two windows with a color each, and needs both reports
    range     names one to five windows in a row, one of which has the color

Videos, questions and answers depend only on the seed and the video's number.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from model_port.progress import counted
from paravt_jax.data.synthetic import COLOURS, LETTERS, write_atomic
from rollout.video.encode import write_video

FRAME_PX = 32  # one visual token
FPS = 1
DURATION_S = 64
WINDOW_S = 8  # length of the windows in questions and calls
EVENT_S = 2  # length of distractors, and of events unless a world sets longer ones
STEP_S = 2  # everything starts at even seconds, which the clock shows
BORDER_PX = 4
CLOCK_ON, CLOCK_OFF = 225, 30
NUM_WINDOWS = DURATION_S // WINDOW_S
NUM_DISTRACTORS = 3
MAX_WINDOWS = 5  # of questions of kind `range`
WHITE, BLACK = 240, 15
CURATED_FRAC = 1 / 6  # share of questions from the source with well-formed traces
QUARTERS_S = tuple((start_s, start_s + DURATION_S // 4) for start_s in range(0, DURATION_S, DURATION_S // 4))
Kind = Literal["window", "either", "unnamed", "both", "range"]
Window = tuple[int, int]  # start and end in seconds


@dataclass(frozen=True)
class Event:
    colour: str
    start_s: int
    length_s: int

    @property
    def end_s(self) -> int:
        return self.start_s + self.length_s

    @property
    def window_s(self) -> Window:
        """The window that contains the event."""
        start_s = self.start_s // WINDOW_S * WINDOW_S
        return start_s, start_s + WINDOW_S


@dataclass(frozen=True)
class Scene(Event):
    """A video, which is also its own first event."""

    seed: int
    number: int
    decoy_s: Window  # a window without a color
    distractors: dict[int, int]  # second -> shade
    other: Event | None = None  # for questions of kind `both`

    @property
    def video(self) -> str:
        length = "" if self.length_s == EVENT_S else f"_{self.length_s}s"
        kind = f"{len(self.distractors)}{length}{'_both' if self.other else ''}"
        return f"videos/seed{self.seed}_{self.number:04}_{kind}.mp4"

    @property
    def events(self) -> tuple[Event, ...]:
        """Returns the events in time order."""
        return tuple(sorted((self, *((self.other,) if self.other else ())), key=lambda event: event.start_s))


@dataclass(frozen=True)
class Question:
    scene: Scene
    type: str  # mcq, tvg or oe
    text: str
    answer: str
    windows_s: tuple[Window, ...]  # the windows to crop, in order
    curated: bool  # from the source that starts with "Question:" and has well-formed traces


def make_scene(
    seed: int, number: int, num_distractors: int = NUM_DISTRACTORS, two_events: bool = False, event_s: int = EVENT_S
) -> Scene:
    """Makes a scene with balanced colors: each event within one window, distractors elsewhere, all at even seconds."""
    rng = np.random.default_rng((seed, number))
    window, decoy, second = (int(number) * WINDOW_S for number in rng.permutation(NUM_WINDOWS)[:3])
    starts_s = range(0, WINDOW_S - event_s + 1, STEP_S)  # relative to the window's start
    start_s = window + int(rng.choice(starts_s))
    other = Event(str(rng.choice([*COLOURS])), second + int(rng.choice(starts_s)), event_s) if two_events else None
    taken = {first + n for first in (start_s, *((other.start_s,) if other else ())) for n in range(0, event_s, STEP_S)}
    free = [second for second in range(0, DURATION_S, STEP_S) if second not in taken]
    seconds = rng.choice(free, num_distractors, replace=False)
    distractors = {int(second): int(rng.choice((WHITE, BLACK))) for second in seconds}
    colour = [*COLOURS][(seed + number) % len(COLOURS)]
    return Scene(colour, start_s, event_s, seed, number, (decoy, decoy + WINDOW_S), distractors, other)


def frames(scene: Scene) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yields the frames, at n / FPS seconds: flickering gray, a color, white or black, between clock bars."""
    rng = np.random.default_rng((scene.seed, scene.number, 1))
    shown = [(second, second + EVENT_S, shade) for second, shade in scene.distractors.items()]
    shown += [(event.start_s, event.end_s, COLOURS[event.colour]) for event in scene.events]
    for number in range(DURATION_S * FPS):
        pixels = np.full((FRAME_PX, FRAME_PX, 3), rng.integers(90, 166), np.uint8)
        for start_s, end_s, colour in shown:
            if start_s <= number / FPS < end_s:
                pixels[BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX] = colour
        window, second = divmod(number // FPS, WINDOW_S)
        _draw_bar(pixels[:BORDER_PX], (window + 1) / NUM_WINDOWS)
        _draw_bar(pixels[-BORDER_PX:], (second // STEP_S + 1) / (WINDOW_S // STEP_S))
        yield pixels


def _draw_bar(strip: UInt8[np.ndarray, "height width 3"], frac: float) -> None:
    strip[:] = CLOCK_OFF
    strip[:, : round(FRAME_PX * frac)] = CLOCK_ON


def questions(scene: Scene, kinds: Sequence[Kind] = ("window", "either")) -> list[Question]:
    """Returns questions of all three types for each kind (`both`: only open ones), and for each length of a `range`."""
    rng = np.random.default_rng((scene.seed, scene.number, 3))
    return [
        Question(scene, form, f"Question: {text}" if curated else text, answer, windows_s, curated)
        for kind in kinds
        for form, text, answer, windows_s in _questions_of(kind, scene)
        for curated in (bool(rng.random() < CURATED_FRAC),)
    ]


def _questions_of(kind: Kind, scene: Scene) -> Iterator[tuple[str, str, str, tuple[Window, ...]]]:
    """Yields type, text, answer and windows."""
    if kind == "both":
        windows_s, colours = zip(*((event.window_s, event.colour) for event in scene.events), strict=True)
        yield "oe", f"Name the colors shown {_between(windows_s, 'and')}.", " ".join(colours), windows_s
        return
    if kind == "range":
        for windows_s in _ranges(scene):
            text = f"Name the color shown from {windows_s[0][0]} to {windows_s[-1][1]} seconds."
            yield "oe", text, scene.colour, windows_s
        return
    named = (scene.window_s,) if kind == "window" else tuple(sorted((scene.window_s, scene.decoy_s)))
    where, windows_s = ("", QUARTERS_S) if kind == "unnamed" else (f" {_between(named, 'or')}", named)
    options = "\n".join(f"{letter}. {colour}" for colour, letter in LETTERS.items())
    yield "mcq", f"What color is shown{where}?\n{options}", LETTERS[scene.colour], windows_s
    yield "oe", f"Name the color shown{where}.", scene.colour, windows_s
    yield "tvg", f"When is a color shown{where}?", f"[{scene.start_s}, {scene.end_s}]", windows_s


def _ranges(scene: Scene) -> Iterator[tuple[Window, ...]]:
    """Yields one to five windows in a row that include, at any place, the window with the color."""
    rng = np.random.default_rng((scene.seed, scene.number, 4))
    own = scene.window_s[0] // WINDOW_S
    for length in range(1, MAX_WINDOWS + 1):
        first = int(rng.integers(max(0, own - length + 1), min(own, NUM_WINDOWS - length), endpoint=True))
        yield tuple((number * WINDOW_S, (number + 1) * WINDOW_S) for number in range(first, first + length))


def _between(windows_s: Sequence[Window], word: str) -> str:
    return f" {word} ".join(f"between {start_s} and {end_s} seconds" for start_s, end_s in windows_s)


def make_world(
    directory: Path, seed: int, num_videos: int, scene_of: Callable[[int, int], Scene] = make_scene
) -> list[Scene]:
    """Writes the missing videos. `scene_of` makes a scene from the seed and the video's number."""
    (directory / "videos").mkdir(parents=True, exist_ok=True)
    scenes = [scene_of(seed, number) for number in range(num_videos)]
    undone = [scene for scene in scenes if not (directory / scene.video).exists()]
    for scene in counted(undone, "making videos", "video"):
        write_atomic(directory / scene.video, lambda partial, scene=scene: write_video(partial, frames(scene), FPS))
    return scenes


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes the rows unless the file has them. Raises if it has others, because finished runs used those."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists():
        write_atomic(path, lambda partial: partial.write_text(text))
    elif path.read_text() != text:
        raise ValueError(f"{path} has the rows of another world; choose another directory, or remove that one")
    return path


def rl_row(question: Question) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"<video>\n{question.text}"}],
        "videos": [{"video": question.scene.video}],
        "extra_info": json.dumps({"answer": question.answer, "question_type": question.type}),
    }
