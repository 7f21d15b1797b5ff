"""Prepares a model's inputs on the host in numpy, where all data-dependent shapes are decided.

The device gets two records of static shape, `TextBatch` and `VisionBatch`, and compiles a program for each pair of
shapes. A frame is one image or one temporal slice of a video; patches in the vision tower attend within their frame. A
visual token indexes a row in the table of merged patches. Several tokens may index the same row, so a frame is computed
once even if several token rows contain it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Float, Int, Shaped

from model_port.architecture import ModelConfig, TextConfig, VisionConfig
from model_port.patches import patch_positions

NOT_VISUAL = -1
NOT_REPLAYED = -1  # instead of an expert's index: the router chooses the token's experts


@flax.struct.dataclass
class VisionBatch:
    """Rows of patches, with several frames per row.

    The rows are split into `num_parts`; part i has the frames for part i of the token rows.
    """

    patches: Float[Any, "B P C"]
    segment_ids: Int[Any, "B P"]  # one per frame, 0 = padding
    positions: Int[Any, "B P 2"]  # row and column in the frame's grid
    extra: dict[str, Shaped[Any, "B P *values"]]  # the family's `patch_arrays`, by name
    num_parts: int = flax.struct.field(pytree_node=False, default=1)


@flax.struct.dataclass
class TextBatch:
    """Rows of tokens, with several sequences per row. A sequence is a trunk and the branches that share it."""

    tokens: Int[Any, "B T"]
    positions: Int[Any, "B T 3"]  # time, row, column
    segment_ids: Int[Any, "B T"]  # one per sequence, 0 = padding
    branch_ids: Int[Any, "B T"]  # 0 = trunk
    visual_index: Int[Any, "B T"]  # row in this part's visual table, or NOT_VISUAL
    experts: Int[Any, "B T L J"] | None = None  # for MoE models: the experts to replay, or NOT_REPLAYED


@dataclass(frozen=True)
class Frame:
    patches: np.ndarray  # [P, C], in merge order, as transformers' processors return them
    grid: tuple[int, int]  # rows and columns of patches
    clip_time: int | None = None  # for frames of a clip: the time in positions since the clip's first frame

    @cached_property
    def digest(self) -> bytes:
        """A hash that is equal for equal frames."""
        return blake2b(repr(self.grid).encode() + self.patches.tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Tokens:
    """Ids with expanded placeholders, and the numbers in the batch of the placeholders' frames."""

    ids: np.ndarray
    frames: tuple[int, ...] = ()
    experts: np.ndarray | None = None  # the experts to replay; None: the router chooses


@dataclass(frozen=True)
class RowSequence:
    """A sequence in a row: a trunk, and the branches that share it."""

    trunk: Tokens
    branches: tuple[Tokens, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.trunk.ids) + sum(len(branch.ids) for branch in self.branches)


def checked_ids(config: ModelConfig, input_ids: Int[np.ndarray, "*batch T"]) -> Int[np.ndarray, " T"]:
    """Returns a sequence's ids as a vector. Raises if they are not in the vocabulary."""
    ids = np.asarray(input_ids)
    if ids.size != max(ids.shape, default=0) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids of {ids.dtype} and shape {ids.shape}, expected the integer ids of one sequence")
    if ids.size and not 0 <= ids.min() <= ids.max() < config.text.vocab_size:
        last = config.text.vocab_size - 1
        raise ValueError(f"input_ids from {ids.min()} to {ids.max()} are not all in the vocabulary, 0 to {last}")
    return ids.reshape(-1)


def split_frames(
    pixel_values: Float[np.ndarray, "P C"] | None,
    grid_thw: Int[np.ndarray, "n 3"] | None,
    intervals: Sequence[float] | None = None,
) -> list[Frame]:
    """Splits a processor's output into frames; a video of t temporal patches has t frames.

    `intervals` has each video's number of positions from frame to frame, if its frames are a clip.
    """
    if pixel_values is None or grid_thw is None:
        if pixel_values is not None or grid_thw is not None:
            raise ValueError("pixel values and their grid_thw must be given together")
        return []
    frames, start = [], 0
    for video, (num_frames, down, across) in enumerate(np.asarray(grid_thw).tolist()):
        for number in range(num_frames):
            time = None if intervals is None else int(np.float32(number) * np.float32(intervals[video]))
            frames.append(Frame(pixel_values[start : start + down * across], (down, across), time))
            start += down * across
    if start != len(pixel_values):
        raise ValueError(f"grid_thw describes {start} patches, but the pixel values have {len(pixel_values)}")
    return frames


def order_frames(
    ids: Int[np.ndarray, " T"], images: Sequence[int], videos: Sequence[int], sizes: Sequence[int], config: ModelConfig
) -> list[int]:
    """Merges the numbers of image and video frames in the order of their placeholders. `sizes` has tokens per frame."""
    queues = {config.image_token_id: list(images), config.video_token_id: list(videos)}
    ordered, at = [], 0
    placeholders = np.flatnonzero(np.isin(ids, list(queues)))
    while at < len(placeholders):
        queue = queues[int(ids[placeholders[at]])]
        if not queue:
            raise ValueError(f"token {placeholders[at]} is a placeholder, but there are no more images or video frames")
        ordered.append(queue.pop(0))
        at += sizes[ordered[-1]]
    num_unused = sum(len(queue) for queue in queues.values())
    if num_unused:
        raise ValueError(f"{num_unused} image or video frames have no placeholder tokens")
    return ordered


def place_tokens(
    tokens: Tokens, frames: Sequence[Frame], first_rows: Sequence[int], config: ModelConfig, start: int = 0
) -> tuple[Int[np.ndarray, "T 3"], Int[np.ndarray, " T"], int]:
    """Returns the M-RoPE positions, the rows in the visual table, and the position after the last token.

    A text token advances all three axes by one. A frame has a single time, spans rows and columns, and advances by its
    longer side (transformers Qwen3VLModel.get_rope_index; timestamps separate the frames of a video). The frames of a
    clip have the same start but different times, and together advance by the longer side
    (Qwen2_5_VLModel.get_rope_index).
    """
    num_tokens, merge = len(tokens.ids), config.vision.merge
    positions = np.empty((num_tokens, 3), np.int32)
    visual_index = np.full(num_tokens, NOT_VISUAL, np.int32)
    placeholders = np.flatnonzero((tokens.ids == config.image_token_id) | (tokens.ids == config.video_token_id))
    at, position, num_placed, clip_start, last_time = 0, start, 0, start, None
    for number in tokens.frames:
        down, across = (side // merge for side in frames[number].grid)
        time = frames[number].clip_time
        run = placeholders[num_placed : num_placed + down * across]
        if len(run) < down * across or run[-1] - run[0] != len(run) - 1:
            raise ValueError(
                f"frame {number} needs {down * across} consecutive placeholder tokens, but the ids have "
                f"{len(placeholders) - num_placed} left; expand placeholders to token counts first"
            )
        first, last = int(run[0]), int(run[-1]) + 1
        positions[at:first] = np.arange(position, position + first - at)[:, None]
        position += first - at
        if time is None or last_time is None or first > at:
            clip_start = position
        row, column = np.divmod(np.arange(down * across), across)
        positions[first:last] = clip_start + np.stack([np.full_like(row, time or 0), row, column], axis=1)
        visual_index[first:last] = first_rows[number] + table_rows(frames[number].grid, config.vision)
        position = clip_start + max(down, across)
        at, num_placed, last_time = last, num_placed + len(run), time
    if num_placed != len(placeholders):
        raise ValueError(f"{len(placeholders) - num_placed} placeholder tokens have no frame")
    positions[at:] = np.arange(position, position + num_tokens - at)[:, None]
    return positions, visual_index, position + num_tokens - at


def pack_text(
    rows: Sequence[Sequence[RowSequence]],
    frames: Sequence[Frame],
    first_rows: Sequence[int],
    config: ModelConfig,
    num_tokens: int,
    num_rows: int | None = None,
) -> TextBatch:
    """Packs sequences into rows of `num_tokens` tokens and adds empty rows up to `num_rows`."""
    num_rows = len(rows) if num_rows is None else num_rows
    if len(rows) > num_rows:
        raise ValueError(f"{len(rows)} rows of sequences do not fit into {num_rows}")
    tokens, segment_ids, branch_ids = (np.zeros((num_rows, num_tokens), np.int32) for _ in range(3))
    positions = np.zeros((num_rows, num_tokens, 3), np.int32)
    visual_index = np.full((num_rows, num_tokens), NOT_VISUAL, np.int32)
    experts = no_experts((num_rows, num_tokens), config.text)
    for b, sequences in enumerate(rows):
        at = 0
        for segment, sequence in enumerate(sequences, start=1):
            if at + sequence.num_tokens > num_tokens:
                raise ValueError(f"row {b} needs {at + sequence.num_tokens} tokens or more, but has {num_tokens}")
            follow = 0
            for branch, part in enumerate((sequence.trunk, *sequence.branches)):
                where = np.s_[b, at : at + len(part.ids)]
                positions[where], visual_index[where], end = place_tokens(part, frames, first_rows, config, follow)
                tokens[where], segment_ids[where], branch_ids[where] = part.ids, segment, branch
                if experts is not None and part.experts is not None:
                    experts[where] = part.experts
                at += len(part.ids)
                follow = end if branch == 0 else follow
    return TextBatch(tokens, positions, segment_ids, branch_ids, visual_index, experts)


def no_experts(shape: tuple[int, ...], config: TextConfig) -> Int[np.ndarray, "*tokens L J"] | None:
    """Returns `TextBatch.experts` with nothing to replay, or None for dense models."""
    if not config.num_experts:
        return None
    return np.full((*shape, config.num_layers, config.token_experts), NOT_REPLAYED, np.int16)


def frame_rows(frames: Sequence[Frame], row_patches: int) -> list[list[int]]:
    """Distributes frames over rows of patches, first fit. Returns the numbers of the frames in each row."""
    rows: list[list[int]] = []
    used: list[int] = []
    for number, frame in enumerate(frames):
        size = len(frame.patches)
        if size > row_patches:
            raise ValueError(f"frame {number} has {size} patches, but a row holds {row_patches}")
        row = next((b for b, num_used in enumerate(used) if num_used + size <= row_patches), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(number)
        used[row] += size
    return rows


def pack_vision(
    frames: Sequence[Frame], config: VisionConfig, row_patches: int, num_rows: int | None = None
) -> tuple[VisionBatch, list[int]]:
    """Packs frames into rows of `row_patches`. Also returns each frame's first row in the visual table."""
    rows = frame_rows(frames, row_patches)
    num_rows = max(len(rows), 1) if num_rows is None else num_rows
    if len(rows) > num_rows:
        raise ValueError(f"{len(frames)} frames need {len(rows)} rows of {row_patches} patches, not {num_rows}")

    batch = empty_vision(config, num_rows, row_patches)
    first_rows = [0] * len(frames)
    for b, numbers in enumerate(rows):
        at = 0
        for segment, number in enumerate(numbers, start=1):
            frame = frames[number]
            where = np.s_[b, at : at + len(frame.patches)]
            order = patch_order(frame.grid, config)
            batch.patches[where] = frame.patches[order]
            batch.segment_ids[where] = segment
            batch.positions[where] = patch_positions(frame.grid, config.merge)[order]
            for name, values in config.patch_arrays(frame.grid).items():
                batch.extra[name][where] = values
            first_rows[number] = (b * row_patches + at) // config.merge_unit
            at += len(frame.patches)
    return batch, first_rows


def patch_order(grid: tuple[int, int], config: VisionConfig) -> slice | Int[np.ndarray, " P"]:
    """Returns our order of a frame's patches, as an index into the processor's patches."""
    merged = config.merged_order(grid)
    if merged is None:
        return slice(None)
    return (merged[:, None] * config.merge_unit + np.arange(config.merge_unit, dtype=np.int32)).reshape(-1)


def table_rows(grid: tuple[int, int], config: VisionConfig) -> Int[np.ndarray, " M"]:
    """Returns the row of each token of a frame, relative to the frame's first row in the visual table."""
    merged = config.merged_order(grid)
    return np.arange(math.prod(grid) // config.merge_unit) if merged is None else np.argsort(merged)


def empty_vision(config: VisionConfig, num_rows: int, row_patches: int) -> VisionBatch:
    shape = (num_rows, row_patches)
    smallest = config.patch_arrays((config.merge, config.merge))
    return VisionBatch(
        patches=np.zeros((*shape, config.patch_values), np.float32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros((*shape, 2), np.int32),
        extra={name: np.zeros((*shape, *values.shape[1:]), values.dtype) for name, values in smallest.items()},
    )


def bucket(count: int, step: int) -> int:
    """Rounds `count` up to a multiple of `step`, so that similar lengths share a compiled program."""
    return max(1, -(-count // step)) * step
