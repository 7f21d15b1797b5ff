"""LongVideoBench, validation: one column per option, N/A if unused; the answer is a number.

The authors insert subtitles between the frames. Like the release, this project does not.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits.public import LETTERS, PublicSplit, Sample, choice, up_to_last_used
from paravt_jax.rewards.official import first_capital_or_guess

OPTIONS = tuple(f"option{number}" for number in range(5))
UNUSED = "N/A"
GROUPS = ("duration_group", "question_category")


def sample(row: Mapping[str, Any]) -> Sample:
    options = up_to_last_used(["" if row[name] == UNUSED else row[name] for name in OPTIONS])
    number, name = row["correct_choice"], row["id"]
    if not 0 <= number < len(options):
        raise BadRow(
            "answer outside of the options", f"correct_choice of {name} is {number}, it has {len(options)} options"
        )
    groups = {group: (str(row[group]),) for group in GROUPS}
    return choice(name, row["question"], options, LETTERS[number], f"videos/{row['video_path']}", groups)


VALIDATION = PublicSplit(
    name="longvideobench",
    title="LongVideoBench",
    repo="longvideobench/LongVideoBench",
    rows="validation-*.parquet",
    columns={"id": str, "video_path": str, "question": str, "correct_choice": int}
    | dict.fromkeys(OPTIONS, str)
    | {"duration_group": int, "question_category": str},
    sample=sample,
    num_samples=1337,
    official=first_capital_or_guess,
)
