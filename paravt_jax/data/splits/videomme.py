"""Video-MME: three questions on each of 900 videos in three duration classes; options include their letters.

744 of the videos have subtitles. The prompt has the lines that are on screen in the sampled frames, as the benchmark's
page describes. DIFFERS from the release, which includes the whole subtitle file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paravt_jax.data.splits.public import PublicSplit, Sample, choice, unlettered
from paravt_jax.rewards.official import first_capital

GROUPS = ("duration", "domain", "sub_category", "task_type")


def sample(row: Mapping[str, Any]) -> Sample:
    groups = {name: (row[name],) for name in GROUPS}
    video, subtitles = f"data/{row['videoID']}.mp4", f"subtitle/{row['videoID']}.srt"
    return choice(
        row["question_id"], row["question"], unlettered(row["options"]), row["answer"], video, groups, subtitles
    )


WITHOUT_SUBTITLES = PublicSplit(
    name="videomme",
    title="VideoMME w/o sub",
    repo="lmms-lab/Video-MME",
    rows="videomme/test-*.parquet",
    columns={"videoID": str, "question_id": str, "question": str, "options": list[str], "answer": str}
    | dict.fromkeys(GROUPS, str),
    sample=sample,
    num_samples=2700,
    official=first_capital,
)
WITH_SUBTITLES = replace(WITHOUT_SUBTITLES, name="videomme_subtitles", title="VideoMME w/ sub", with_subtitles=True)
