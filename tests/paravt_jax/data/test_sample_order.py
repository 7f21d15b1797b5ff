"""Sample order: every epoch a permutation, from numbers alone. Frame budgets: uniform, from their keys alone."""

import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import grain
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paravt_jax.config import VideoConfig
from paravt_jax.data.budget import budgets_of, frame_budget
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, PromptSample, SampleOrder

PUBLISHED = [4, 8, 16, 32, 64]
# With probability 0.001, chi-square is above these; the draws are fixed by their keys, so no test fails by chance.
CRITICAL = {4: 18.5, 24: 51.2}


def prompts(num: int, num_videos: int = 1) -> list[Prompt]:
    videos = tuple(f"/{number}.mp4" for number in range(num_videos))
    return [Prompt(f"p{number}", "Which?", videos, "A", "mcq") for number in range(num)]


def order(num: int, seed: int, numbers: range) -> list[str]:
    samples = SampleOrder(prompts(num), seed)
    return [samples[number].item.id for number in numbers]


def chi_square(counts: list[int], num_cells: int) -> float:
    expected = sum(counts) / num_cells
    return sum((count - expected) ** 2 for count in [*counts, *[0] * (num_cells - len(counts))]) / expected


@pytest.mark.parametrize("num", [1, 2, 7, 97])
def test_every_epoch_has_every_prompt_once(num):
    samples = SampleOrder(prompts(num), seed=3)
    for epoch in (0, 1, 11):
        epoch_samples = [samples[epoch * num + offset] for offset in range(num)]
        assert {sample.item.id for sample in epoch_samples} == {prompt.id for prompt in prompts(num)}
        assert {sample.epoch for sample in epoch_samples} == {epoch}


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(order(23, seed, range(epoch * 23, epoch * 23 + 23))) for seed in (0, 1, 2) for epoch in range(4)]
    assert len(set(orders)) == 12  # seed 0's second epoch is not seed 1's first either


def test_a_prompt_comes_first_as_often_as_any_other():
    samples = SampleOrder(prompts(5), seed=0)
    firsts = Counter(samples[5 * epoch].item.id for epoch in range(100))
    assert len(firsts) == 5 and chi_square([*firsts.values()], 5) < CRITICAL[4]


def test_a_sample_depends_only_on_its_number():
    in_order = order(13, 5, range(40))
    samples = SampleOrder(prompts(13), seed=5)
    shuffled = random.Random(0).sample(range(40), 40)
    random.seed(1)
    list(grain.MapDataset.range(13).seed(9).shuffle().batch(3).to_iter_dataset())  # grain was busy with something else
    assert {number: samples[number].item.id for number in shuffled} == dict(enumerate(in_order))


@pytest.mark.slow
def test_another_process_has_the_same_order_and_grain_starts_nothing():
    code = """
import json, multiprocessing, os, threading
import jax, numpy, pyarrow
before = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import SampleOrder
samples = SampleOrder([Prompt(f"p{n}", "?", ("/v",), "A", "mcq") for n in range(13)], seed=5)
ids = [samples[number].item.id for number in reversed(range(40))]
after = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None
print(json.dumps([ids[::-1], threading.active_count(), len(multiprocessing.active_children()), before == after]))
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == [order(13, 5, range(40)), 1, 0, True]
    assert done.stderr == ""


def test_impossible_samples_are_errors():
    with pytest.raises(ValueError, match="no prompts or traces"):
        SampleOrder([], seed=0)
    with pytest.raises(IndexError, match="sample -1"):
        SampleOrder(prompts(3), seed=0)[-1]


def test_open_samples_come_first_after_a_kill():
    cursor = Cursor()
    assert cursor.take(3) == [0, 1, 2] and cursor.take(4) == [3, 4, 5, 6]
    cursor.done([1, 3, 4])
    again = Cursor.from_record(json.loads(json.dumps(cursor.to_record())))
    assert again.take(3) == [0, 2, 5]
    assert Cursor.from_record(again.to_record()).take(7) == [0, 2, 5, 6, 7, 8, 9]
    assert cursor.take(1) == [7]  # what was killed is not changed by what goes on from its record


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["go on", "record", "kill"]))))
def test_no_kill_skips_or_doubles_a_sample(steps):
    cursor, open_, kept = Cursor(), [], []
    record, kept_then = cursor.to_record(), []
    for num_taken, num_done, then in steps:
        open_ += cursor.take(num_taken)
        finished, open_ = open_[:num_done], open_[num_done:]
        cursor.done(finished)
        kept += finished
        if then == "record":
            record, kept_then = json.loads(json.dumps(cursor.to_record())), [*kept]
        elif then == "kill":
            cursor, open_, kept = Cursor.from_record(record), [], [*kept_then]
    last = Cursor.from_record(cursor.to_record())
    kept += last.take(50)
    assert sorted(kept) == list(range(len(kept)))


def test_what_is_given_back_comes_first_and_once():
    cursor = Cursor()
    cursor.take(4)
    cursor.give_back([3, 1])
    assert (cursor.num_again, cursor.to_record()) == (2, {"next": 4, "again": [0, 1, 2, 3]})
    assert cursor.take(3) == [1, 3, 4]
    with pytest.raises(ValueError, match=r"samples \[5\] are not open"):
        cursor.give_back([5])


def test_samples_that_a_log_skips_remain():
    cursor = Cursor.from_record({"next": 3, "again": [1]})
    cursor.take_these([5, 3])
    cursor.done([3, 5])
    assert cursor.to_record() == {"next": 6, "again": [1, 4]}
    with pytest.raises(ValueError, match=r"samples \[5\] are already done or open"):
        cursor.take_these([5, 6])


def test_what_is_not_open_cannot_be_done():
    cursor = Cursor()
    cursor.take(2)
    cursor.done([1])
    for numbers in ([1], [0, 2]):
        with pytest.raises(ValueError, match=rf"samples \[{numbers[-1]}\] are not open; open are \[0\]"):
            cursor.done(numbers)
    cursor.done([0])  # a refused call has closed nothing


@pytest.mark.parametrize(
    "record", [{}, {"next": 2}, {"next": 2, "again": [2]}, {"next": 2, "again": [1, 1]}, {"next": "2", "again": []}]
)
def test_a_damaged_record_is_refused(record):
    with pytest.raises(ValueError, match="is not a cursor"):
        Cursor.from_record(record)


def test_budgets_are_uniform():
    for key in ("over prompts", "over epochs", "over seeds"):
        keys = [
            {"over prompts": (0, 0, f"p{n}"), "over epochs": (0, n, "p"), "over seeds": (n, 0, "p")}[key]
            for n in range(5000)
        ]
        counts = Counter(frame_budget(*k, PUBLISHED) for k in keys)
        assert set(counts) == set(PUBLISHED) and chi_square([*counts.values()], 5) < CRITICAL[4], key


def test_a_budget_says_nothing_of_the_next_epochs_or_the_next_seeds():
    epochs = [frame_budget(0, epoch, "p", PUBLISHED) for epoch in range(5000)]
    seeds = [frame_budget(seed, 0, "p", PUBLISHED) for seed in range(5000)]
    for draws in (epochs, seeds):
        assert chi_square([*Counter(pairwise(draws)).values()], 25) < CRITICAL[24]
    assert chi_square([*Counter(zip(epochs, seeds, strict=True)).values()], 25) < CRITICAL[24]


def test_a_budget_is_the_same_in_every_process():
    # blake2b-64 of repr(("frame budget", seed, epoch, id)) modulo 5: other values would break every resume
    assert [frame_budget(0, epoch, "p0", PUBLISHED) for epoch in range(6)] == [8, 4, 8, 4, 32, 16]


VISITS = SampleOrder(prompts(11), seed=0)
STEP = [VISITS[number] for number in range(14, 21)]


def test_without_gating_every_visit_has_the_overviews_frames():
    assert budgets_of(STEP, VideoConfig(gating=False, overview_frames=48), seed=0) == [48] * 7


def test_budgets_belong_to_visits_and_not_to_their_places():
    video = VideoConfig()
    ahead = budgets_of(STEP, video, seed=0)
    assert budgets_of(STEP[::-1], video, seed=0) == ahead[::-1]
    assert budgets_of(STEP, video, seed=0) == ahead
    assert budgets_of(STEP, video, seed=1) != ahead
    next_epoch = [PromptSample(visit.number + 11, visit.epoch + 1, visit.item) for visit in STEP]
    assert budgets_of(next_epoch, video, seed=0) != ahead


def test_gated_budgets_are_those_of_the_prompts_whichever_others_are_in_the_step():
    video = VideoConfig(frame_budgets=[2, 3, 5])
    assert budgets_of(STEP, video, 0) == [budget for visit in STEP for budget in budgets_of([visit], video, 0)]
    assert budgets_of(STEP, video, 0) == [frame_budget(0, v.epoch, v.item.id, [2, 3, 5]) for v in STEP]


@pytest.mark.parametrize("video", [VideoConfig(), VideoConfig(False, overview_frames=4)])
def test_every_video_of_a_prompt_has_at_least_a_frame(video):
    visits = SampleOrder(prompts(7, num_videos=5), seed=0)
    assert min(budgets_of([visits[number] for number in range(7)], video, seed=0)) >= 5
