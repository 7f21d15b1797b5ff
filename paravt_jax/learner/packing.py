"""Packs dialogues into rows of static shape; a group's common prompt is computed once.

The episodes of a prompt share thousands of tokens. They become one sequence, `[prompt][branch][branch]…`: a branch
attends to the prompt and to itself, and its positions continue from the prompt's, so the gradient is
the same as with separate rows. Only loss tokens are scored. Each entry records where in the row it is predicted: the
first token of a branch is predicted at the last token of the prompt.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from model_port.config import ModelConfig
from model_port.inputs import (
    Frame,
    RowSequence,
    TextBatch,
    Tokens,
    VisionBatch,
    frame_rows,
    pack_text,
    pack_vision,
)

TOKEN_STEP = 128  # granularity of a row's tokens and of its scored tokens …
FRAME_ROW_STEP = 4  # … and of the rows of patches, for small sizes
SIZES_PER_DOUBLING = 4  # larger sizes take larger steps: more sizes waste less, fewer sizes compile fewer programs


@dataclass(frozen=True, eq=False)
class Dialogue:
    """One agent's dialogue, placeholders expanded. Its first `num_shared` tokens are the prompt of its group.

    Frames are keys. The arrays after `num_shared_frames` have one entry per token and count where `loss_mask` is True.
    """

    ids: Int[np.ndarray, " n"]
    frames: tuple[str, ...]  # in the order of the placeholders
    num_shared: int
    num_shared_frames: int
    loss_mask: Bool[np.ndarray, " n"]
    behavior_logp: Float[np.ndarray, " n"]
    advantage: Float[np.ndarray, " n"]
    token_class: Int[np.ndarray, " n"]
    episode: int  # its number in the step

    @property
    def shared(self) -> tuple[bytes, tuple[str, ...]]:
        """Equal for dialogues with the same prompt."""
        return self.ids[: self.num_shared].tobytes(), self.frames[: self.num_shared_frames]

    @property
    def num_own(self) -> int:
        return len(self.ids) - self.num_shared


@flax.struct.dataclass
class TrainBatch:
    """Rows of tokens, and one entry per scored token, padded."""

    text: TextBatch
    vision: VisionBatch | None
    source: Int[Any, "B A"]  # position in the row where the token is predicted
    target: Int[Any, "B A"]
    loss_mask: Bool[Any, "B A"]  # False = padding
    behavior_logp: Float[Any, "B A"]
    advantage: Float[Any, "B A"]
    token_class: Int[Any, "B A"]
    dialogue: Int[Any, "B A"]  # its number among all dialogues of the update, on all hosts


ENTRIES = {
    "source": np.int32,
    "target": np.int32,
    "loss_mask": np.bool_,
    "behavior_logp": np.float32,
    "advantage": np.float32,
    "token_class": np.int32,
    "dialogue": np.int32,
}


@dataclass(frozen=True)
class PackShape:
    """The static sizes that all batches of a step share, so that they share one compiled program."""

    num_rows: int
    row_tokens: int
    row_patches: int  # patches per row of frames; the largest frame fits
    sizes_per_doubling: int = SIZES_PER_DOUBLING
    num_parts: int = 1  # the mesh splits the rows into this many parts; each part has only its rows' frames

    def __post_init__(self) -> None:
        if self.num_rows % self.num_parts:
            raise ValueError(
                f"pack.num_rows={self.num_rows} must be a multiple of mesh.data x mesh.fsdp = {self.num_parts}"
            )


@dataclass(frozen=True)
class PackSizes:
    """The sizes that depend on the dialogues. Hosts agree on the largest of each, so that their batches combine."""

    num_batches: int
    num_actions: int  # scored tokens of the row with the most
    num_frame_rows: int  # rows of patches of the part with the most


Row = list[list[int]]  # the sequences of a row, each the indices of the dialogues that share its prompt


def pack(
    dialogues: Sequence[Dialogue],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: PackShape,
    *,
    first_number: int = 0,
    agree: Callable[[PackSizes], PackSizes] = lambda sizes: sizes,
) -> list[TrainBatch]:
    """Packs each dialogue exactly once, into as few rows as first fit finds; every batch has `num_rows` rows.

    Dialogues are numbered from `first_number`. `agree` turns the sizes that this host needs into the sizes of all
    hosts; a host that needs fewer batches adds empty ones.
    """
    rows = plan_rows(dialogues, shape.row_tokens)
    sizes = agree(_needed_sizes(rows, dialogues, frames, shape))
    return fill(rows, dialogues, frames, config, shape, sizes, first_number)


def plan_rows(dialogues: Sequence[Dialogue], row_tokens: int) -> list[Row]:
    """Which dialogues go into which row, by first fit from the longest sequence to the shortest."""
    sequences = [part for group in _groups(dialogues) for part in _split(group, dialogues, row_tokens)]
    rows: list[Row] = []
    free: list[int] = []
    for sequence in sorted(sequences, key=lambda sequence: -_num_tokens(sequence, dialogues)):
        needed = _num_tokens(sequence, dialogues)
        row = next((number for number, tokens in enumerate(free) if tokens >= needed), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[row].append(sequence)
        free[row] -= needed
    return rows


def fill(
    rows: Sequence[Row],
    dialogues: Sequence[Dialogue],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: PackShape,
    sizes: PackSizes,
    first_number: int = 0,
) -> list[TrainBatch]:
    """The batches of a plan."""
    keys = _frame_keys(dialogues)
    parts = _parts(rows, shape)
    parts += [[] for _ in range(sizes.num_batches * shape.num_parts - len(parts))]
    num_actions = stepped(sizes.num_actions, TOKEN_STEP, shape.sizes_per_doubling)
    num_frame_rows = stepped(sizes.num_frame_rows, FRAME_ROW_STEP, shape.sizes_per_doubling)

    def filled(part: Sequence[Row]) -> TrainBatch:
        visible = _visible_frames(part, dialogues, keys)
        vision, first_rows = None, dict.fromkeys(keys, 0)  # 0 for the frames of other parts
        if sizes.num_frame_rows:
            packed = pack_vision([frames[key] for key in visible], config.vision, shape.row_patches, num_frame_rows)
            vision, first_rows = packed[0], first_rows | dict(zip(visible, packed[1], strict=True))
        sequences = [[_row_sequence(sequence, dialogues, keys, config) for sequence in row] for row in part]
        ordered, table = [frames[key] for key in keys], list(first_rows.values())
        num_rows = shape.num_rows // shape.num_parts
        text = pack_text(sequences, ordered, table, config, shape.row_tokens, num_rows)
        return TrainBatch(text=text, vision=vision, **_entries(part, dialogues, num_rows, num_actions, first_number))

    starts = range(0, len(parts), shape.num_parts)
    return [_joined([filled(part) for part in parts[start : start + shape.num_parts]]) for start in starts]


def rows_of_host(batch: TrainBatch, host: int, num_hosts: int) -> TrainBatch:
    """One host's rows of a batch that every host has packed, with the frames of these rows."""
    if num_hosts == 1:
        return batch

    def own(array: np.ndarray) -> np.ndarray:
        size = len(array) // num_hosts
        return array[host * size : (host + 1) * size]

    batch = jax.tree.map(own, batch)
    vision = batch.vision
    return batch if vision is None else replace(batch, vision=replace(vision, num_parts=vision.num_parts // num_hosts))


def used_frac(batches: Sequence[TrainBatch]) -> float:
    """The fraction of token slots that hold a token."""
    slots = sum(batch.text.tokens.size for batch in batches)
    return sum(int(np.count_nonzero(batch.text.segment_ids)) for batch in batches) / max(slots, 1)


def fitting_row_tokens(
    dialogues: Sequence[Dialogue], max_row_tokens: int, sizes_per_doubling: int = SIZES_PER_DOUBLING
) -> int:
    """A row length that holds the largest group whole, if the maximum allows it."""
    needed = max((_num_tokens(group, dialogues) for group in _groups(dialogues)), default=1)
    return min(stepped(needed, TOKEN_STEP, sizes_per_doubling), max_row_tokens)


def stepped(count: int, step: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> int:
    """Rounds `count` up on a coarse scale; larger counts take larger steps."""
    while count > 2 * sizes_per_doubling * step:
        step *= 2
    return max(1, -(-count // step)) * step


def _groups(dialogues: Sequence[Dialogue]) -> list[list[int]]:
    """The indices of the dialogues that share a prompt."""
    groups: dict[Any, list[int]] = {}
    for number, dialogue in enumerate(dialogues):
        groups.setdefault(dialogue.shared if dialogue.num_shared else number, []).append(number)
    return list(groups.values())


def _split(group: Sequence[int], dialogues: Sequence[Dialogue], row_tokens: int) -> list[list[int]]:
    """The sequences of a group: one if its branches fit into a row, else several that each repeat the prompt."""
    sequences: list[list[int]] = []
    free = 0
    for number in group:
        dialogue = dialogues[number]
        if len(dialogue.ids) > row_tokens:
            raise ValueError(
                f"a dialogue of {len(dialogue.ids)} tokens does not fit into pack.row_tokens={row_tokens}; raise it, "
                f"or lower rollout.max_context_tokens or the frame budget"
            )
        if dialogue.num_own > free or not sequences:
            sequences.append([])
            free = row_tokens - dialogue.num_shared
        sequences[-1].append(number)
        free -= dialogue.num_own
    return sequences


def _num_tokens(sequence: Sequence[int], dialogues: Sequence[Dialogue]) -> int:
    return dialogues[sequence[0]].num_shared + sum(dialogues[number].num_own for number in sequence)


def _needed_sizes(
    rows: Sequence[Row], dialogues: Sequence[Dialogue], frames: Mapping[str, Frame], shape: PackShape
) -> PackSizes:
    keys = _frame_keys(dialogues)
    num_actions = [
        sum(int(_scored(sequence, dialogues[number]).sum()) for sequence in row for number in sequence) for row in rows
    ]
    num_frame_rows = [
        len(frame_rows([frames[key] for key in _visible_frames(part, dialogues, keys)], shape.row_patches))
        for part in _parts(rows, shape)
    ]
    num_batches = -(-len(rows) // shape.num_rows)
    return PackSizes(num_batches, max(num_actions, default=1), max(num_frame_rows, default=0))


def _parts(rows: Sequence[Row], shape: PackShape) -> list[list[Row]]:
    """The parts of every batch in turn. Long rows come first, so each part gets every `num_parts`th row."""
    batches = [rows[first : first + shape.num_rows] for first in range(0, len(rows), shape.num_rows)]
    return [list(batch[part :: shape.num_parts]) for batch in batches for part in range(shape.num_parts)]


def _frame_keys(dialogues: Iterable[Dialogue]) -> dict[str, int]:
    """The distinct frames, numbered in order of appearance."""
    return {key: n for n, key in enumerate(dict.fromkeys(key for dialogue in dialogues for key in dialogue.frames))}


def _visible_frames(rows: Sequence[Row], dialogues: Sequence[Dialogue], keys: Mapping[str, int]) -> list[str]:
    """The distinct frames of these rows, in the order of `keys`."""
    own = (dialogues[number] for row in rows for sequence in row for number in sequence)
    return sorted(_frame_keys(own), key=keys.__getitem__)


def _scored(sequence: Sequence[int], dialogue: Dialogue) -> np.ndarray:
    """The loss tokens. The very first token of a dialogue follows nothing, so it cannot be predicted."""
    mask = dialogue.loss_mask.copy()
    mask[:1] = False
    if len(sequence) > 1 and mask[: dialogue.num_shared].any():
        raise ValueError(f"episode {dialogue.episode} has loss tokens in the prompt that its group shares")
    return mask


def _row_sequence(
    sequence: Sequence[int], dialogues: Sequence[Dialogue], keys: Mapping[str, int], config: ModelConfig
) -> RowSequence:
    placeholders = (config.image_token_id, config.video_token_id)

    def tokens(dialogue: Dialogue, part: slice, visible: slice) -> Tokens:
        # A sampled placeholder is a target without a frame. It ends its dialogue, so its input id does not matter.
        sampled = dialogue.loss_mask & np.isin(dialogue.ids, placeholders)
        ids = np.where(sampled, 0, dialogue.ids)
        return Tokens(ids[part], tuple(keys[key] for key in dialogue.frames[visible]))

    first, *siblings = (dialogues[number] for number in sequence)
    if not siblings:
        return RowSequence(tokens(first, slice(None), slice(None)))
    trunk = tokens(first, slice(first.num_shared), slice(first.num_shared_frames))
    branches = [tokens(d, slice(d.num_shared, None), slice(d.num_shared_frames, None)) for d in (first, *siblings)]
    return RowSequence(trunk, tuple(branches))


def _entries(
    rows: Sequence[Row], dialogues: Sequence[Dialogue], num_rows: int, num_actions: int, first_number: int
) -> dict[str, np.ndarray]:
    """The scored tokens of these rows."""
    entries = {name: np.zeros((num_rows, num_actions), dtype) for name, dtype in ENTRIES.items()}
    for b, row in enumerate(rows):
        entry = trunk = 0  # the next entry, and where the sequence starts in the row
        for sequence in row:
            branch = trunk + dialogues[sequence[0]].num_shared
            for number in sequence:
                dialogue = dialogues[number]
                scored = np.flatnonzero(_scored(sequence, dialogue))
                where = np.s_[b, entry : entry + len(scored)]
                index = np.arange(len(dialogue.ids))
                in_row = np.where(index < dialogue.num_shared, trunk + index, branch + index - dialogue.num_shared)
                entries["source"][where] = in_row[scored - 1]
                entries["target"][where] = dialogue.ids[scored]
                entries["loss_mask"][where] = True
                entries["behavior_logp"][where] = dialogue.behavior_logp[scored]
                entries["advantage"][where] = dialogue.advantage[scored]
                entries["token_class"][where] = dialogue.token_class[scored]
                entries["dialogue"][where] = first_number + number
                entry += len(scored)
                branch += dialogue.num_own
            trunk = branch
    return entries


def _joined(parts: Sequence[TrainBatch]) -> TrainBatch:
    if len(parts) == 1:
        return parts[0]
    batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    vision = None if batch.vision is None else replace(batch.vision, num_parts=len(parts))
    return replace(batch, vision=vision)
