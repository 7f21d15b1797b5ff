"""The length penalty, by hand."""

import numpy as np
import pytest

from paravt_jax.rl.episodes import length_penalty
from rollout.ledger import Ledger, Segment
from rollout.prompter import Task
from rollout.records import Episode, Turn


def episode(*lengths, finish="done") -> Episode:
    """Makes turns with the given numbers of sampled tokens, each after three forced tokens, from two versions."""
    ledger, turns = Ledger([]), []
    for length in lengths:
        begin = len(ledger.ids)
        ledger.add("forced", np.arange(3))
        for version, num in enumerate((length // 2, length - length // 2)):
            logp = np.zeros(num, np.float32)
            ledger.segments.append(Segment("sampled", np.arange(num, dtype=np.int32), (), logp, version))
        turns.append(Turn("", "stop", (begin, len(ledger.ids))))
    return Episode("e/0", Task("e", "?", ("/v.mp4",), 4), ledger, turns, finish)


@pytest.mark.parametrize(
    ("lengths", "penalty"), [((10,), 0), ((80,), 0), ((90,), -0.5), ((100,), -1), ((70, 95, 30), -0.75), ((60, 60), 0)]
)
def test_the_last_fifth_of_a_turns_tokens_costs_up_to_1(lengths, penalty):
    assert length_penalty(episode(*lengths), 100) == pytest.approx(penalty)


@pytest.mark.parametrize("finish", ["length", "context"])
def test_a_cut_off_episode_costs_1(finish):
    assert length_penalty(episode(5, finish=finish), 100) == -1
