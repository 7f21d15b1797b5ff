"""The shipped public splits: for each, a function from a row of the hub to a sample, and an entry in `SPLITS`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits.public import (
    LETTERS,
    PublicSplit,
    Sample,
    choice,
    grounding,
    open_question,
    options_in,
    unlettered,
    up_to_last_used,
)
from paravt_jax.rewards.official import first_capital, first_capital_or_guess, mmvu, window_iou

Row = Mapping[str, Any]

VIDEOMME_GROUPS = ("duration", "domain", "sub_category", "task_type")
LONGVIDEOBENCH_GROUPS = ("duration_group", "question_category")
LONGVIDEOBENCH_OPTIONS = tuple(f"option{number}" for number in range(5))
MMVU_KINDS = ("multiple-choice", "open-ended")
MMVU_IN_REPO = "/resolve/main/"  # a video's URL has its path after this


def videomme_sample(row: Row) -> Sample:
    """Video-MME: three questions on each of 900 videos in three duration classes; options include their letters.

    744 of the videos have subtitles. The prompt has the lines that are on screen in the sampled frames, as the
    benchmark's page describes. DIFFERS from the release, which includes the whole subtitle file.
    """
    groups = {name: (row[name],) for name in VIDEOMME_GROUPS}
    options, answer = unlettered(row["options"]), row["answer"]
    video, subtitles = f"data/{row['videoID']}.mp4", f"subtitle/{row['videoID']}.srt"
    return choice(row["question_id"], row["question"], options, answer, video, groups, subtitles)


def longvideobench_sample(row: Row) -> Sample:
    """LongVideoBench, validation: one column per option, N/A if unused; the answer is a number.

    The authors insert subtitles between the frames. Like the release, this project does not.
    """
    options, number, name = up_to_last_used(longvideobench_options(row)), row["correct_choice"], row["id"]
    if not 0 <= number < len(options):
        raise BadRow(
            "answer outside of the options", f"correct_choice of {name} is {number}, it has {len(options)} options"
        )
    groups = {group: (str(row[group]),) for group in LONGVIDEOBENCH_GROUPS}
    return choice(name, row["question"], options, LETTERS[number], f"videos/{row['video_path']}", groups)


def longvideobench_options(row: Row) -> list[str]:
    """The texts of all option columns, empty if unused."""
    return ["" if row[name] == "N/A" else row[name] for name in LONGVIDEOBENCH_OPTIONS]


def lvbench_sample(row: Row) -> Sample:
    """LVBench: videos of an hour and more. The question text includes the options; a question may have several types.

    `time_reference`, the position of the answer in the video, is not read, so it cannot leak into the prompt.
    """
    stem, options = options_in(row["question"])
    groups = {"question_type": tuple(row["question_type"]), "type": (row["type"],)}
    return choice(row["uid"], stem, options, row["answer"], row["video_path"], groups)


def mlvu_sample(row: Row) -> Sample:
    """MLVU, dev: seven tasks. The official score is the mean over tasks, so a small task weighs as much as a large one.

    The question text includes the options, and `candidates` has them without letters. The answer is a letter, or the
    text of exactly one option, as in the authors' own files.
    """
    stem, options, answer = row["question"].split("\n(A)")[0], row["candidates"], row["answer"].strip()
    letters = [letter for letter, option in zip(LETTERS, options, strict=False) if option.strip() == answer]
    answer = letters[0] if len(letters) == 1 else answer
    video = row["video_name"].removesuffix(".mp4") + ".mp4"
    return choice(f"{row['task_type']}:{video}", stem, options, answer, video, {"task_type": (row["task_type"],)})


def mmvu_sample(row: Row) -> Sample:
    """MMVU, validation: 625 multiple-choice and 375 open questions, on 27 subjects of four disciplines.

    `reward.oe_mode` chooses how open answers are scored. The authors use GPT-4o for both kinds.
    """
    subject, kind = row["metadata"].get("subject"), row["question_type"]
    if not isinstance(subject, str) or kind not in MMVU_KINDS:
        raise BadRow(
            "wrong schema", f"{row['id']} is {kind!r} on {subject!r}, expected {' or '.join(MMVU_KINDS)} on a subject"
        )
    groups = {"question_type": (kind,), "subject": (subject,)}
    video = row["video"].partition(MMVU_IN_REPO)[2] or row["video"]
    if kind == "open-ended":
        return open_question(row["id"], row["question"], row["answer"], video, groups)
    options = up_to_last_used([row["choices"].get(letter, "") for letter in LETTERS])
    return choice(row["id"], row["question"], options, row["answer"].strip(), video, groups)


def charades_sample(row: Row) -> Sample:
    """Charades-STA, test: find when a sentence holds in a video of half a minute. Times are rounded to 0.1 s.

    The hub's file stores times in half precision, for example 24.296875 for 24.3. Rows have no ids, and some are equal;
    all count. DIFFERS from lmms-eval, which keys replies by video, sentence and window, so that equal rows merge.
    """
    window_s = [round(float(time_s), 1) for time_s in row["timestamp"]]
    name = f"{row['video']}:{row['caption']}:{window_s}"
    return grounding(name, row["caption"], window_s, f"Charades_v1_480/{row['video']}")


VIDEOMME = PublicSplit(
    name="videomme",
    title="VideoMME w/o sub",
    repo="lmms-lab/Video-MME",
    rows="videomme/test-*.parquet",
    columns={"videoID": str, "question_id": str, "question": str, "options": list[str], "answer": str}
    | dict.fromkeys(VIDEOMME_GROUPS, str),
    sample=videomme_sample,
    num_samples=2700,
    official=first_capital,
)
SPLITS = {
    split.name: split
    for split in (
        VIDEOMME,
        replace(VIDEOMME, name="videomme_subtitles", title="VideoMME w/ sub", with_subtitles=True),
        PublicSplit(
            name="longvideobench",
            title="LongVideoBench",
            repo="longvideobench/LongVideoBench",
            rows="validation-*.parquet",
            columns={"id": str, "video_path": str, "question": str, "correct_choice": int}
            | dict.fromkeys(LONGVIDEOBENCH_OPTIONS, str)
            | {"duration_group": int, "question_category": str},
            sample=longvideobench_sample,
            num_samples=1337,
            official=first_capital_or_guess,
        ),
        PublicSplit(
            name="lvbench",
            title="LVBench",
            repo="lmms-lab/LVBench",
            rows="data/*.parquet",
            columns=dict.fromkeys(("uid", "video_path", "question", "answer", "type"), str)
            | {"question_type": list[str]},
            sample=lvbench_sample,
            num_samples=1549,
            official=first_capital,
            folders=("video_chunks", "all_videos", "videos"),
        ),
        PublicSplit(
            name="mlvu",
            title="MLVU",
            repo="sy1998/MLVU_dev",
            rows="mlvu/test-*.parquet",
            columns={"video_name": str, "question": str, "candidates": list[str], "answer": str, "task_type": str},
            sample=mlvu_sample,
            num_samples=2174,
            official=first_capital,
            folders=("video", "videos", *(f"video_part_{number}" for number in range(1, 9))),
            mean_over="task_type",
        ),
        PublicSplit(
            name="mmvu",
            title="MMVU",
            repo="yale-nlp/MMVU",
            rows="validation.json",
            columns=dict.fromkeys(("id", "video", "question_type", "question", "answer"), str)
            | {"metadata": dict, "choices": dict[str, str]},
            sample=mmvu_sample,
            num_samples=1000,
            official=mmvu,
        ),
        PublicSplit(
            name="charades",
            title="Charades-STA",
            repo="lmms-lab/charades_sta",
            rows="data/test-*.parquet",
            columns={"video": str, "caption": str, "timestamp": list[float]},
            sample=charades_sample,
            num_samples=3720,
            official=window_iou,
            thresholds=(0.3, 0.5, 0.7),
        ),
    )
}
