"""Builds a row's question and gold answer by the release's rules.

Rows are used as on the hub: options keep their letters, so that Video-MME has two letters on every line; LVBench and
MLVU have options inside the question; open questions of MMVU are scored as multiple choice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_jax.config import SINGLE_TURN_MODES
from paravt_jax.data.splits import Sample
from paravt_jax.data.splits.shipped import longvideobench_options
from paravt_jax.evaluation.release.texts import ReleaseTexts
from paravt_jax.rewards.answers import interval_iou
from paravt_jax.rewards.release import predicted_letter, predicted_window

LETTERS = "ABCDEFGHIJ"
NO_LETTER = "?"  # gold answer of an MLVU row whose answer is not an option's text
NAMES_A_VIDEO = "video path"
MIN_SUBTITLE_LINES = 3  # number, time and text
TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class ReleaseQuestion:
    text: str
    video: str
    gold: str = ""  # a letter; for MMVU's open questions, the answer's text
    window_s: tuple[float, float] | None = None  # gold of temporal grounding

    @property
    def is_choice(self) -> bool:
        return self.window_s is None

    def prediction(self, reply: str) -> str:
        """The predicted letter, or the predicted window as text; empty without a window."""
        if self.window_s is None:
            return predicted_letter(reply)
        window = predicted_window(reply)
        return "" if window is None else f"{window[0]:.1f}-{window[1]:.1f}"

    def score(self, reply: str) -> float:
        if self.window_s is None:
            return float(predicted_letter(reply) == self.gold)
        window = predicted_window(reply)
        return 0.0 if window is None else interval_iou(window, self.window_s)


def question_of(split: str, sample: Sample, mode: str, texts: ReleaseTexts) -> ReleaseQuestion:
    video, row = sample.prompt.videos[0], sample.row
    instruction = texts.texts["instruction.direct" if mode == "direct" else "instruction.other"].format()
    parts = {"instruction": instruction, "question": row.get("question", ""), "caption": row.get("caption", "")}
    if split in OPTIONS_OF:
        parts["options"] = "\n".join(f"{letter}. {option}" for letter, option in OPTIONS_OF[split](row))
    if split == "videomme_subtitles":
        lines = subtitle_text(sample.prompt.subtitles[0])
        parts["subtitles"] = texts.fill("subtitles", lines=lines) if lines else ""
    text = texts.fill(f"question.{split}", **parts)
    if mode not in SINGLE_TURN_MODES and NAMES_A_VIDEO not in text.lower():
        text = texts.fill("file_name", question=text, name=Path(video).name)
    if split == "charades":
        start_s, end_s = row["timestamp"]
        return ReleaseQuestion(text, video, window_s=(float(start_s), float(end_s)))
    return ReleaseQuestion(text, video, GOLD_OF[split](row))


def _lettered(options: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(LETTERS, options, strict=False))


def _mlvu_gold(row: Mapping[str, Any]) -> str:
    answer = row["answer"].strip()
    return next((letter for letter, text in _lettered(row["candidates"]) if text.strip() == answer), NO_LETTER)


OPTIONS_OF: Mapping[str, Callable[[Mapping[str, Any]], Sequence[tuple[str, str]]]] = {
    "videomme": lambda row: _lettered(row["options"]),
    "videomme_subtitles": lambda row: _lettered(row["options"]),
    "longvideobench": lambda row: _lettered(list(filter(None, longvideobench_options(row)))),
    "mlvu": lambda row: _lettered(row["candidates"]),
    "mmvu": lambda row: [(letter, text) for letter, text in sorted(row["choices"].items()) if text],
}
GOLD_OF: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "videomme": lambda row: row["answer"],
    "videomme_subtitles": lambda row: row["answer"],
    "longvideobench": lambda row: LETTERS[row["correct_choice"]],
    "lvbench": lambda row: row["answer"],
    "mlvu": _mlvu_gold,
    "mmvu": lambda row: row["answer"].strip(),
}
RELEASE_SPLITS = (*GOLD_OF, "charades")


def subtitle_text(file: str) -> str:
    """The text of a whole subtitle file without tags; blocks of fewer than three lines are dropped."""
    if not file:
        return ""
    content = Path(file).read_text(encoding="utf-8", errors="ignore")
    blocks = (block.strip().split("\n") for block in re.split(r"\n\s*\n", content.strip()))
    lines = (line for block in blocks if len(block) >= MIN_SUBTITLE_LINES for line in block[2:])
    return "\n".join(filter(None, (TAG.sub("", line).strip() for line in lines)))
