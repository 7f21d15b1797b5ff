"""Times of frames: an overview covers the video, and a crop covers its window, for any inputs."""

import itertools
import math

import pytest
from hypothesis import example, given, strategies as st

from rollout.video.times import CROP_MAX_FRAMES, crop_times, num_frames_at, overview_times

durations = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))  # zero or at least a microsecond
starts = st.floats(0, 1e6)
lengths = st.floats(1e-3, 1e6)


@given(durations, st.integers(1, 10**6), st.integers(1, 512))
def test_an_overview_covers_the_video_evenly(duration_s, of_frames, num_frames):
    times = overview_times(duration_s, of_frames, num_frames)
    assert len(times) == num_frames and all(0 <= time <= duration_s for time in times)
    if num_frames > 1:
        frame_s = duration_s / of_frames
        assert math.isclose(times[0], frame_s / 2) and math.isclose(times[-1], duration_s - frame_s / 2)
        step = (duration_s - frame_s) / (num_frames - 1)
        assert all(abs(b - a - step) <= frame_s * (1 + 1e-6) + 1e-9 for a, b in itertools.pairwise(times))


def test_overview_times_by_hand():
    assert overview_times(60, 60, 4) == [0.5, 20.5, 39.5, 59.5]  # frames 0, 59 / 3 = 19.67, 39.33 and 59
    assert overview_times(60, 1, 2) == [30, 30]
    assert overview_times(60, 60, 1) == [30]


@pytest.mark.parametrize(
    ("duration_s", "of_frames", "max_frames", "num_frames"),
    [
        (30.0, 900, 64, 30),  # one per second
        (31.9, 957, 64, 30),  # an even number
        (600.0, 18_000, 64, 64),
        (600.0, 18_000, 16, 16),  # the sampled frame budget is the bound
        (1.0, 30, 64, 4),
        (0.1, 3, 64, 2),
        (0.1, 1, 64, 1),
        (600.0, 18_000, 1, 1),
    ],
)
def test_an_overview_with_a_frame_rate_grows_with_the_duration(duration_s, of_frames, max_frames, num_frames):
    assert num_frames_at(1.0, duration_s, of_frames, max_frames) == num_frames
    assert num_frames_at(0.0, duration_s, of_frames, max_frames) == max_frames


@given(starts, lengths)
@example(0.1, 0.7)
@example(0.0, float(CROP_MAX_FRAMES))
def test_a_crop_stays_in_its_window_and_covers_it(start_s, length_s):
    end_s = start_s + length_s
    times = crop_times(start_s, end_s)
    assert 1 <= len(times) <= CROP_MAX_FRAMES
    assert times[0] == start_s and all(a < b for a, b in itertools.pairwise(times)) and times[-1] <= end_s
    step = max(1.0, (end_s - start_s) / (CROP_MAX_FRAMES - 1)) * (1 + 1e-9)
    assert all(b - a <= step + 1e-9 for a, b in zip(times, [*times[1:], end_s], strict=True))


def test_crop_times_by_hand():
    assert crop_times(20, 23) == [20, 21, 22]
    assert crop_times(20, 23.5) == [20, 21, 22, 23]
    assert crop_times(20, 20.2) == [20]
    assert crop_times(0, 16) == list(range(16))
    assert crop_times(0, 30) == list(range(0, 31, 2))
    assert crop_times(0, 30, max_frames=4) == [0, 10, 20, 30]
    assert crop_times(0, 30, max_frames=1) == [15]
