"""LVBench: videos of an hour and more. The question text includes the options; a question may have several types.

`time_reference`, the position of the answer in the video, is not read, so it cannot leak into the prompt.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.splits.public import PublicSplit, Sample, choice, options_in
from paravt_jax.rewards.official import first_capital


def sample(row: Mapping[str, Any]) -> Sample:
    stem, options = options_in(row["question"])
    groups = {"question_type": tuple(row["question_type"]), "type": (row["type"],)}
    return choice(row["uid"], stem, options, row["answer"], row["video_path"], groups)


ALL = PublicSplit(
    name="lvbench",
    title="LVBench",
    repo="lmms-lab/LVBench",
    rows="data/*.parquet",
    columns={"uid": str, "video_path": str, "question": str, "answer": str, "type": str, "question_type": list[str]},
    sample=sample,
    num_samples=1549,
    official=first_capital,
    folders=("video_chunks", "all_videos", "videos"),
)
