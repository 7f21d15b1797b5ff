"""MLVU, dev: seven tasks. The official score is the mean over tasks, so a small task weighs as much as a large one.

The question text includes the options, and `candidates` has them without letters. The answer is a letter, or the text
of exactly one option, as in the authors' own files.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.splits.public import LETTERS, PublicSplit, Sample, choice
from paravt_jax.rewards.official import first_capital


def sample(row: Mapping[str, Any]) -> Sample:
    stem = row["question"].split("\n(A)")[0]
    options = row["candidates"]
    video, answer = file_name(row["video_name"]), letter_of(row["answer"].strip(), options)
    return choice(f"{row['task_type']}:{video}", stem, options, answer, video, {"task_type": (row["task_type"],)})


def letter_of(answer: str, options: list[str]) -> str:
    matches = [letter for letter, option in zip(LETTERS, options, strict=False) if option.strip() == answer]
    return matches[0] if len(matches) == 1 else answer


def file_name(video: str) -> str:
    return video if video.endswith(".mp4") else f"{video}.mp4"


DEV = PublicSplit(
    name="mlvu",
    title="MLVU",
    repo="sy1998/MLVU_dev",
    rows="mlvu/test-*.parquet",
    columns={"video_name": str, "question": str, "candidates": list[str], "answer": str, "task_type": str},
    sample=sample,
    num_samples=2174,
    official=first_capital,
    folders=("video", "videos", *(f"video_part_{number}" for number in range(1, 9))),
    mean_over="task_type",
)
