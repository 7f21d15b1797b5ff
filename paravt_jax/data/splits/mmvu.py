"""MMVU, validation: 625 questions with options and 375 open ones, on 27 subjects of four disciplines.

Open answers are scored as `reward.oe_mode` says; the authors have GPT-4o read both kinds.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits.public import LETTERS, PublicSplit, Sample, choice, open_question, unlettered
from paravt_jax.rewards.official import mmvu

KINDS = ("multiple-choice", "open-ended")
IN_REPO = "/resolve/main/"  # what follows it in the URL of a video is its path


def sample(row: Mapping[str, Any]) -> Sample:
    subject, kind = row["metadata"].get("subject"), row["question_type"]
    if not isinstance(subject, str) or kind not in KINDS:
        raise BadRow("wrong schema", f"{row['id']} is {kind!r} of {subject!r}, expected {' or '.join(KINDS)} of one")
    groups = {"question_type": (kind,), "subject": (subject,)}
    video = row["video"].partition(IN_REPO)[2] or row["video"]
    if kind == "open-ended":
        return open_question(row["id"], row["question"], row["answer"], video, groups)
    used = [f"{letter}. {row['choices'][letter]}" for letter in LETTERS if row["choices"].get(letter)]
    return choice(row["id"], row["question"], unlettered(used), row["answer"].strip(), video, groups)


VALIDATION = PublicSplit(
    name="mmvu",
    title="MMVU",
    repo="yale-nlp/MMVU",
    rows="validation.json",
    columns={
        "id": str,
        "video": str,
        "question_type": str,
        "metadata": dict,
        "question": str,
        "choices": dict[str, str],
    }
    | {"answer": str},
    sample=sample,
    num_samples=1000,
    official=mmvu,
)
