"""The check's reward, which differs between episodes, so that a group of a random model has signal."""

import zlib
from collections.abc import Sequence
from typing import Any

from paravt_jax.rewards.terms import OwnTerm


def reward(
    question: str, answer: str, question_type: str, turns: Sequence[str], calls: Sequence[Any], outcomes: Sequence[Any]
) -> list[OwnTerm]:
    return [OwnTerm("spread", zlib.crc32("".join(turns).encode()) / 2**32)]
