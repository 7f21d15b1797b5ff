"""Host-side preparation: positions and tables by hand, and one-line errors for invalid inputs."""

import numpy as np
import pytest
from reference import CONFIGS, END, IMAGE, START, VIDEO

from model_port.inputs import (
    Frame,
    RowSequence,
    Tokens,
    order_frames,
    pack_text,
    pack_vision,
    place_tokens,
    split_frames,
)
from model_port.loading import _intervals, one_sequence
from model_port.patches import patch_positions
from model_port.qwen3_vl.config import interpolation

CONFIG = CONFIGS["tied"]


def frame(down: int, across: int) -> Frame:
    return Frame(np.ones((down * across, CONFIG.vision.patch_values), np.float32), (down, across))


def test_positions_of_an_image_by_hand():
    """Text at 0, start at 1, a 2 x 3 block at 2 (rows 2-3, columns 2-4), which advances by 3, so the end is at 5."""
    tokens = Tokens(np.array([7, START, *[IMAGE] * 6, END]), (0,))
    positions, index, following = place_tokens(tokens, [frame(4, 6)], [10], CONFIG)
    expected = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4], [5, 5, 5]]
    assert positions.tolist() == expected
    assert index.tolist() == [-1, -1, 10, 11, 12, 13, 14, 15, -1]
    assert following == 6


def test_frames_of_one_color_and_different_shapes_differ():
    assert frame(4, 6).digest == frame(4, 6).digest != frame(6, 4).digest


def test_merge_order_by_hand():
    """2 x 4 patches, blocks of 2 x 2: the left block's four patches come before the right block's."""
    assert patch_positions((2, 4), 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


def test_interpolation_by_hand():
    """4 rows map to rows 0, 2, 4, 6 of a 7-row table, 2 columns to 0 and 6: every patch uses one table entry."""
    index, weight = interpolation((4, 2), CONFIG.vision)
    on = (index * (weight > 0)).sum(axis=1)
    assert np.sort(on).tolist() == [0, 6, 14, 20, 28, 34, 42, 48]
    np.testing.assert_allclose(weight.sum(axis=1), 1)
    index, weight = interpolation((6, 2), CONFIG.vision)  # row 1 of 6 maps to 6/5 = 1.2: 0.8 of row 1, 0.2 of row 2
    assert index[2].tolist()[::2] == [7, 14] and np.allclose(weight[2][::2], [0.8, 0.2])


def test_windows_and_the_positions_of_a_clip_by_hand():
    """2 x 3 tokens in windows of 2 x 2: columns 0 and 1, then column 2. The frames are 2 s apart, 2 positions each."""
    config = CONFIGS["windows"]
    assert config.vision.merged_order((4, 6)).tolist() == [0, 1, 3, 4, 2, 5]
    assert config.vision.patch_arrays((4, 6))["window_ids"].tolist() == [0] * 16 + [1] * 8
    frames = split_frames(np.ones((48, config.vision.patch_values), np.float32), np.array([[2, 4, 6]]), [4.0])
    tokens = Tokens(np.array([7, START, *[VIDEO] * 12, END]), (0, 1))
    positions, index, following = place_tokens(tokens, frames, [10, 30], config)
    rows = [[2, 2], [2, 3], [2, 4], [3, 2], [3, 3], [3, 4]]
    assert positions[2:14].tolist() == [[time, *place] for time in (2, 6) for place in rows]
    assert index[2:14].tolist() == [start + row for start in (10, 30) for row in (0, 1, 4, 2, 3, 5)]
    assert positions[14].tolist() == [5, 5, 5] and following == 6


def test_a_clip_starts_after_an_image_that_no_text_separates():
    """The image's 2 x 2 block at 1 advances by 2, so the clip starts at 3; its frames are 4 positions apart."""
    config = CONFIGS["windows"]
    clip = split_frames(np.ones((8, config.vision.patch_values), np.float32), np.array([[2, 2, 2]]), [4.0])
    tokens = Tokens(np.array([7, *[IMAGE] * 4, VIDEO, VIDEO]), (0, 1, 2))
    positions, _, following = place_tokens(tokens, [frame(4, 4), *clip], [0, 4, 5], config)
    assert positions[1:].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3], [7, 3, 3]]
    assert following == 4


def test_branches_continue_from_the_trunk():
    sequence = RowSequence(Tokens(np.array([5, IMAGE, 6]), (0,)), (Tokens(np.array([1, 2])), Tokens(np.array([3]))))
    batch = pack_text([[sequence, RowSequence(Tokens(np.array([9])))]], [frame(2, 2)], [4], CONFIG, 8, num_rows=2)
    assert batch.tokens[0].tolist() == [5, IMAGE, 6, 1, 2, 3, 9, 0]
    assert batch.positions[0, :, 0].tolist() == [0, 1, 2, 3, 4, 3, 0, 0]
    assert batch.branch_ids[0].tolist() == [0, 0, 0, 1, 1, 2, 0, 0]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1, 2, 0], [0] * 8]
    assert batch.visual_index[0].tolist() == [-1, 4, -1, -1, -1, -1, -1, -1]


def test_frames_share_rows_first_fit():
    batch, first_rows = pack_vision([frame(4, 4), frame(2, 4), frame(2, 2), frame(2, 4)], CONFIG.vision, 24)
    assert batch.segment_ids.shape == (2, 24)  # 16 + 8 in the first row, 4 + 8 in the second
    assert first_rows == [0, 4, 6, 7]


def test_frames_are_ordered_as_the_ids_show_them():
    ids = np.array([VIDEO, VIDEO, 5, IMAGE, 6, VIDEO, VIDEO, IMAGE])
    assert order_frames(ids, [0, 1], [2, 3], [1, 1, 2, 2], CONFIG) == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda: place_tokens(Tokens(np.array([IMAGE] * 3), (0,)), [frame(4, 4)], [0], CONFIG),
            "needs 4 consecutive placeholder tokens",
        ),
        (lambda: place_tokens(Tokens(np.array([IMAGE, 5]), ()), [], [], CONFIG), "1 placeholder tokens have no frame"),
        (lambda: order_frames(np.array([IMAGE]), [], [], [], CONFIG), "no more images"),
        (lambda: order_frames(np.array([5]), [0], [], [1], CONFIG), "1 image or video frames have no placeholder"),
        (lambda: split_frames(np.ones((5, 3), np.float32), np.array([[1, 2, 2]])), "describes 4 patches.* have 5"),
        (lambda: split_frames(np.ones((5, 3), np.float32), None), "must be given together"),
        (lambda: pack_vision([frame(4, 4)], CONFIG.vision, 8), "frame 0 has 16 patches, but a row holds 8"),
        (lambda: pack_vision([frame(4, 4)] * 3, CONFIG.vision, 16, num_rows=2), "need 3 rows of 16 patches"),
        (lambda: pack_text([[RowSequence(Tokens(np.arange(9)))]], [], [], CONFIG, 8), "row 0 needs 9 tokens"),
        (lambda: _intervals(CONFIGS["windows"].vision, 1, [0.5, 1.0]), "has 2 values, expected one for each of 1 vid"),
        (lambda: pack_text([[], []], [], [], CONFIG, 8, num_rows=1), "2 rows of sequences do not fit into 1"),
    ],
)
def test_invalid_inputs_are_named(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def clip(down: int, across: int) -> dict[str, np.ndarray]:
    return {"pixel_values_videos": frame(down, across).patches, "video_grid_thw": np.array([[1, down, across]])}


@pytest.mark.parametrize(
    ("ids", "media", "message"),
    [
        ([1, 10**6], {}, "1 to 1000000 are not all in the vocabulary, 0 to"),
        ([1, -3], {}, "-3 to 1 are not all in the vocabulary"),
        ([[1, 2], [3, 4]], {}, r"shape \(2, 2\), expected the integer ids of one sequence"),
        ([1], {"pixel_values": np.ones((4, 7), np.float32)}, r"shape \(4, 7\), expected \[P, \d+\]"),
        ([VIDEO] * 3, clip(3, 4), "3 x 4 patches, expected positive multiples of the merge size 2"),
        ([VIDEO] * 3, clip(4, 3), "4 x 3 patches, expected positive"),
        ([VIDEO], clip(2, 2) | {"second_per_grid_ts": [1.0]}, "has 1 values, .* none for a model whose prompts write"),
        ([VIDEO] * 3, clip(-2, -6), "-2 x -6 patches, expected positive"),
    ],
)
def test_ids_and_pixels_out_of_range_are_rejected(ids, media, message):
    with pytest.raises(ValueError, match=message):
        one_sequence(CONFIG, np.array(ids), **media)
