"""Makes a small synthetic data set: videos of gray noise in which a colored square appears once, for two seconds.

Sparse frames miss the square in a long video; a crop of the right window shows it. Each video has one question of every
published type, and a trace that answers it. The last quarter of the videos is for validation. Videos, questions and
traces depend only on the seed and the video's number.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from model_port.output_dir import named
from paravt_jax.config import SYNTHETIC, DataConfig
from rollout.video.encode import write_video

FPS = 2
HEIGHT_PX, WIDTH_PX = 64, 96
CELL_PX = 8  # grain of the noise; finer noise only needs more bytes
MIN_DURATION_S, MAX_DURATION_S = 8, 64
EVENT_S = 2
COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 220), "yellow": (225, 205, 40)}
MARGIN_S = 3  # a trace's call shows this much before and after the square
LETTERS = dict(zip(COLOURS, "ABCD", strict=True))


@dataclass(frozen=True)
class Clip:
    seed: int
    number: int
    duration_s: int
    colour: str
    start_s: int

    @property
    def end_s(self) -> int:
        return self.start_s + EVENT_S

    @property
    def video(self) -> str:
        """Path relative to the questions. It contains the seed, because each seed has its own videos."""
        return f"videos/seed{self.seed}_{self.number:03}.mp4"


def held_out_name(validation: str) -> str:
    """The name of validation rows in logs. Synthetic rows have another name than held-out training data."""
    return "held out, synthetic" if validation == SYNTHETIC else "held out"


def row_sources(data: DataConfig, directory: Path, seed: int, kind: str = "") -> list[tuple[str, str]]:
    """Paths and video roots of the training and validation rows. Creates synthetic rows first.

    `kind` is the suffix of a synthetic file's name: "_traces", or "" for questions.
    """
    if SYNTHETIC in (data.train, data.validation):
        make_synthetic(directory, seed)
    files = {"train": data.train, "validation": data.validation}
    return [
        (str(directory / f"{name}{kind}.jsonl"), "") if path == SYNTHETIC else (path, data.video_root)
        for name, path in files.items()
    ]


def make_synthetic(directory: Path, seed: int = 0, num_videos: int = 8) -> Path:
    """Writes at least two videos, questions and traces (*_traces.jsonl), train.jsonl last, and returns its path.

    Files are written atomically, so a later run keeps existing files and creates only missing files.
    """
    clips = [make_clip(seed, number) for number in range(num_videos)]
    (directory / "videos").mkdir(parents=True, exist_ok=True)
    for clip in clips:
        if not (directory / clip.video).exists():
            write_atomic(directory / clip.video, lambda path, clip=clip: write_video(path, frames(clip), FPS))
    num_train = num_videos - max(1, num_videos // 4)
    for name, chosen in (("validation", clips[num_train:]), ("train", clips[:num_train])):
        _write_rows(directory / f"{name}_traces.jsonl", [trace for clip in chosen for trace in traces(clip)])
        _write_rows(directory / f"{name}.jsonl", [row for clip in chosen for row in _questions(clip)])
    return directory / "train.jsonl"


def make_clip(seed: int, number: int) -> Clip:
    rng = np.random.default_rng((seed, number))
    duration_s = int(rng.integers(MIN_DURATION_S, MAX_DURATION_S, endpoint=True))
    start_s = int(rng.integers(0, duration_s - EVENT_S, endpoint=True))
    return Clip(seed, number, duration_s, [*COLOURS][(seed + number) % len(COLOURS)], start_s)  # balances the colors


def frames(clip: Clip) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yields the frames; frame n is at n / FPS seconds."""
    rng = np.random.default_rng((clip.seed, clip.number, 1))
    for number in range(clip.duration_s * FPS):
        cells = rng.integers(90, 166, (HEIGHT_PX // CELL_PX, WIDTH_PX // CELL_PX, 1), np.uint8)
        pixels = cells.repeat(CELL_PX, 0).repeat(CELL_PX, 1).repeat(3, 2)
        if clip.start_s <= number / FPS < clip.end_s:
            pixels[HEIGHT_PX // 4 : -HEIGHT_PX // 4, WIDTH_PX // 3 : -WIDTH_PX // 3] = COLOURS[clip.colour]
        yield pixels


def questions(clip: Clip) -> Iterator[tuple[str, str, str]]:
    """Yields question type, question and answer."""
    options = "\n".join(f"{letter}. {colour}" for colour, letter in LETTERS.items())
    at_s = clip.start_s + EVENT_S // 2
    yield "mcq", f"Which colour is shown at {at_s} seconds?\n{options}", LETTERS[clip.colour]
    yield (
        "tvg",
        f"When is the {clip.colour} square shown? Answer with [start, end] in seconds.",
        f"[{clip.start_s}, {clip.end_s}]",
    )
    yield "oe", "Name the colour of the square that is shown in the video.", clip.colour


def traces(clip: Clip) -> Iterator[dict[str, Any]]:
    """Yields a dialogue per question, which crops the video around the square, and the sub-agent's dialogue."""
    start_s, end_s = max(0, clip.start_s - MARGIN_S), min(clip.duration_s, clip.end_s + MARGIN_S)
    report = f"{clip.colour} from {clip.start_s} to {clip.end_s} seconds."
    window = {"video_path": "video.mp4", "start_time": start_s, "end_time": end_s}
    call = json.dumps({"name": "crop_video", "arguments": window})
    for _, question, answer in questions(clip):
        yield _trace(
            {"type": "video_url", "video_url": {"url": clip.video}},
            question,
            f"<think>\nI look at {start_s} to {end_s} seconds.\n</think>\n<tool_call>\n{call}\n</tool_call>",
            report,
            f"<think>\nThe report shows {report}\n</think>\n<answer>{answer}</answer>",
        )
    part = {"url": clip.video, "start_time": start_s, "end_time": end_s}
    yield _trace({"type": "video_url", "video_url": part}, "", report)


def _trace(video: dict[str, Any], question: str, *turns: str) -> dict[str, Any]:
    """Makes a trace. `turns` alternate between the policy's turns and tool responses."""
    asked = [video, {"type": "text", "text": question}] if question else [video]
    roles = itertools.cycle(("assistant", "tool"))
    said = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": [{"role": "user", "content": asked}, *said]}


def _questions(clip: Clip) -> Iterator[dict[str, Any]]:
    for question_type, question, answer in questions(clip):
        yield {
            "prompt": [{"role": "user", "content": f"<video>\n{question}"}],
            "videos": [{"video": clip.video}],
            "extra_info": json.dumps({"answer": answer, "question_type": question_type}),
        }


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        write_atomic(path, lambda partial: partial.write_text(text))


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with named(partial):
            write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
