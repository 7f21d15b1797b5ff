"""Sample order: every epoch is a permutation. Frame budgets: uniform. Both depend only on numbers and the seed."""

import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import grain
import pytest
from hypothesis import given, strategies as st

from paravt_jax.config import VideoConfig
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, PromptSample, SampleOrder, budgets_of, frame_budget, spread

PUBLISHED = [4, 8, 16, 32, 64]
# Chi-square exceeds these with probability 0.001; the draws have fixed keys, so no test fails by chance.
CRITICAL = {4: 18.5, 24: 51.2}


def prompts(num: int, num_videos: int = 1) -> list[Prompt]:
    videos = tuple(f"/{number}.mp4" for number in range(num_videos))
    return [Prompt(f"p{number}", "Which?", videos, "A", "mcq") for number in range(num)]


def order(num: int, seed: int, numbers: range) -> list[str]:
    samples = SampleOrder(prompts(num), seed)
    return [samples[number].item.id for number in numbers]


def is_uniform(draws, num_cells: int) -> bool:
    counts = [*Counter(draws).values()]
    expected = sum(counts) / num_cells
    counts += [0] * (num_cells - len(counts))
    return sum((count - expected) ** 2 for count in counts) / expected < CRITICAL[num_cells - 1]


@pytest.mark.parametrize("num", [1, 2, 7, 97])
def test_every_epoch_has_every_prompt_once(num):
    samples = SampleOrder(prompts(num), seed=3)
    for epoch in (0, 1, 11):
        epoch_samples = [samples[epoch * num + offset] for offset in range(num)]
        assert {sample.item.id for sample in epoch_samples} == {prompt.id for prompt in prompts(num)}
        assert {sample.epoch for sample in epoch_samples} == {epoch}


def test_every_epoch_of_every_seed_has_another_order():
    orders = [tuple(order(23, seed, range(epoch * 23, epoch * 23 + 23))) for seed in (0, 1, 2) for epoch in range(4)]
    assert len(set(orders)) == 12  # seed 0's second epoch also differs from seed 1's first
    rows = prompts(3)
    fingerprints = {SampleOrder(items, seed).fingerprint for items in (rows, rows[::-1], rows[:2]) for seed in (0, 1)}
    assert len(fingerprints) == 6


def test_a_sample_depends_only_on_its_number():
    in_order, samples = order(13, 5, range(40)), SampleOrder(prompts(13), seed=5)
    shuffled = random.Random(0).sample(range(40), 40)
    random.seed(1)
    list(grain.MapDataset.range(13).seed(9).shuffle().batch(3).to_iter_dataset())  # another grain loader in between
    assert {number: samples[number].item.id for number in shuffled} == dict(enumerate(in_order))


@pytest.mark.slow
def test_another_process_has_the_same_order_and_grain_starts_neither_threads_nor_processes():
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


@pytest.mark.parametrize(("num", "chosen"), [(1, "0"), (2, "02"), (3, "013"), (5, "01234"), (9, "01234")])
def test_a_validation_takes_prompts_from_the_whole_file(num, chosen):
    assert [item.id for item in spread(prompts(5), num)] == [f"p{number}" for number in chosen]


def test_an_order_without_samples_is_an_error():
    with pytest.raises(ValueError, match=r"no prompts or traces; set data\.train"):
        SampleOrder([], seed=0)


def test_after_a_kill_open_samples_come_first():
    cursor = Cursor()
    assert cursor.take(3) == [0, 1, 2] and cursor.take(4) == [3, 4, 5, 6]
    cursor.done([1, 3, 5])
    resumed = Cursor.from_record(json.loads(json.dumps(cursor.to_record())))
    assert resumed.take(2) == [0, 2]
    assert Cursor.from_record(resumed.to_record()).take(7) == [0, 2, 4, 6, 7, 8, 9]
    assert cursor.take(1) == [7]  # the record shares no state with its cursor


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["continue", "record", "kill"]))))
def test_no_kill_skips_or_repeats_a_sample(steps):
    cursor, open_samples, finished = Cursor(), [], []
    record, recorded = cursor.to_record(), []
    for num_taken, num_done, event in steps:
        open_samples += cursor.take(num_taken)
        done, open_samples = open_samples[:num_done], open_samples[num_done:]
        cursor.done(done)
        finished += done
        if event == "record":
            record, recorded = json.loads(json.dumps(cursor.to_record())), [*finished]
        elif event == "kill":
            cursor, open_samples, finished = Cursor.from_record(record), [], [*recorded]
    finished += Cursor.from_record(cursor.to_record()).take(50)
    assert sorted(finished) == list(range(len(finished)))


def test_samples_given_back_come_first_and_once():
    cursor = Cursor()
    cursor.take(4)
    cursor.give_back([3])
    cursor.give_back([1])
    assert (cursor.num_again, cursor.to_record()) == (2, {"next": 4, "again": [0, 1, 2, 3]})
    assert cursor.take(3) == [1, 3, 4]
    with pytest.raises(ValueError, match=r"samples \[5\] are not open"):
        cursor.give_back([5])


def test_samples_that_a_log_skips_remain():
    cursor = Cursor.from_record({"next": 3, "again": [1]})
    cursor.take_these([])
    assert cursor.to_record() == {"next": 3, "again": [1]}
    cursor.take_these([5, 3])
    cursor.done([3, 5])
    cursor.take_these([1])
    assert cursor.to_record() == {"next": 6, "again": [1, 4]}
    with pytest.raises(ValueError, match=r"samples \[5\] are already done or open"):
        cursor.take_these([5, 6])


def test_only_open_samples_can_be_done():
    cursor = Cursor()
    cursor.take(2)
    cursor.done([1])
    for numbers in ([1], [0, 2]):
        with pytest.raises(ValueError, match=rf"samples \[{numbers[-1]}\] are not open; open are \[0\]"):
            cursor.done(numbers)
    cursor.done([0])  # a rejected call closes nothing


def test_budgets_are_uniform_and_independent_over_prompts_epochs_and_seeds():
    of_prompts = [frame_budget(0, 0, f"p{n}", PUBLISHED) for n in range(5000)]
    of_epochs = [frame_budget(0, epoch, "p", PUBLISHED) for epoch in range(5000)]
    of_seeds = [frame_budget(seed, 0, "p", PUBLISHED) for seed in range(5000)]
    for draws in (of_prompts, of_epochs, of_seeds):
        assert set(draws) == set(PUBLISHED) and is_uniform(draws, 5) and is_uniform(pairwise(draws), 25)
    assert is_uniform(zip(of_epochs, of_seeds, strict=True), 25)


def test_a_budget_is_the_same_in_every_process():
    # blake2b-64 of repr(("frame budget", seed, epoch, id)) modulo 5: other values would break every resume
    assert [frame_budget(0, epoch, "p0", PUBLISHED) for epoch in range(6)] == [8, 4, 8, 4, 32, 16]


SAMPLES = SampleOrder(prompts(11), seed=0)
STEP = [SAMPLES[number] for number in range(14, 21)]


def test_without_gating_every_sample_has_the_frames_of_an_overview():
    assert budgets_of(STEP, VideoConfig([], overview_frames=48), seed=0) == [48] * 7


def test_gated_budgets_depend_on_seed_epoch_and_prompt_and_not_on_the_step():
    video = VideoConfig(frame_budgets=[2, 3, 5])
    budgets = budgets_of(STEP, video, seed=0)
    assert budgets == [frame_budget(0, each.epoch, each.item.id, [2, 3, 5]) for each in STEP]
    assert budgets_of(STEP[::-1], video, seed=0) == budgets[::-1]
    assert budgets_of(STEP, video, seed=1) != budgets
    next_epoch = [PromptSample(each.number + 11, each.epoch + 1, each.item) for each in STEP]
    assert budgets_of(next_epoch, video, seed=0) != budgets


@pytest.mark.parametrize("video", [VideoConfig(), VideoConfig([], overview_frames=4)])
def test_every_video_of_a_prompt_has_at_least_one_frame(video):
    samples = SampleOrder(prompts(7, num_videos=5), seed=0)
    assert min(budgets_of([samples[number] for number in range(7)], video, seed=0)) >= 5
