"""MMVU, validation: 625 multiple-choice and 375 open questions, on 27 subjects of four disciplines.

`reward.oe_mode` chooses how open answers are scored. The authors use GPT-4o for both kinds.
"""

from collections.abc import Mapping
from typing import Any

from paravt_jax.data.rows import BadRow
from paravt_jax.data.splits.public import LETTERS, PublicSplit, Sample, choice, open_question, up_to_last_used
from paravt_jax.rewards.official import mmvu

KINDS = ("multiple-choice", "open-ended")
IN_REPO = "/resolve/main/"  # a video's URL has its path after this


def sample(row: Mapping[str, Any]) -> Sample:
    subject, kind = row["metadata"].get("subject"), row["question_type"]
    if not isinstance(subject, str) or kind not in KINDS:
        raise BadRow(
            "wrong schema", f"{row['id']} is {kind!r} on {subject!r}, expected {' or '.join(KINDS)} on a subject"
        )
    groups = {"question_type": (kind,), "subject": (subject,)}
    video = row["video"].partition(IN_REPO)[2] or row["video"]
    if kind == "open-ended":
        return open_question(row["id"], row["question"], row["answer"], video, groups)
    options = up_to_last_used([row["choices"].get(letter, "") for letter in LETTERS])
    return choice(row["id"], row["question"], options, row["answer"].strip(), video, groups)


VALIDATION = PublicSplit(
    name="mmvu",
    title="MMVU",
    repo="yale-nlp/MMVU",
    rows="validation.json",
    columns=dict.fromkeys(("id", "video", "question_type", "question", "answer"), str)
    | {"metadata": dict, "choices": dict[str, str]},
    sample=sample,
    num_samples=1000,
    official=mmvu,
)
