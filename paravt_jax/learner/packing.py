"""Dialogues into rows of static shape, with what a group shares computed once.

The episodes of a prompt begin with the same thousands of tokens. They become one sequence, `[prompt][branch][branch]…`:
a branch attends to the prompt and to itself, and its positions go on from the prompt's, so that the gradient is that of
separate rows. Only the tokens that count are scored, and each knows where its prediction stands: for the first token of
a branch that is the last one of the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from model_port.config import ModelConfig
from model_port.inputs import Frame, RowSequence, TextBatch, Tokens, VisionBatch, pack_text, pack_vision

TOKEN_STEP = 128  # smallest steps between the sizes of a batch: of a row's tokens and of the scored ones …
FRAME_ROW_STEP = 4  # … and of rows of patches
SIZES_PER_DOUBLING = 4  # larger sizes have larger steps: more sizes waste less, fewer compile fewer programs


@dataclass(frozen=True, eq=False)
class Dialogue:
    """One agent's dialogue, placeholders expanded. The first `num_shared` tokens are what its group begins with.

    Frames are named by key. The arrays after `frames` have one entry per token; only those where `loss_mask` counts.
    """

    ids: Int[np.ndarray, " n"]
    frames: tuple[str, ...]  # in the order in which the ids show them
    num_shared: int
    num_shared_frames: int
    loss_mask: Bool[np.ndarray, " n"]
    behavior_logp: Float[np.ndarray, " n"]
    advantage: Float[np.ndarray, " n"]
    token_class: Int[np.ndarray, " n"]
    episode: int  # number of its episode in the step

    @property
    def shared(self) -> tuple[bytes, tuple[str, ...]]:
        """Equal for dialogues that begin alike."""
        return self.ids[: self.num_shared].tobytes(), self.frames[: self.num_shared_frames]


@flax.struct.dataclass
class TrainBatch:
    """Rows of tokens, and of the scored ones among them: one entry each, filled up with entries that do not count."""

    text: TextBatch
    vision: VisionBatch | None
    source: Int[Any, "B A"]  # where in the row the token is predicted
    target: Int[Any, "B A"]
    loss_mask: Bool[Any, "B A"]  # True = an entry, False = filled up
    behavior_logp: Float[Any, "B A"]
    advantage: Float[Any, "B A"]
    token_class: Int[Any, "B A"]
    dialogue: Int[Any, "B A"]  # its number among all that were packed


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
class Shape:
    """What all batches of a step have in common, so that they share one compiled program."""

    num_rows: int
    row_tokens: int
    row_patches: int  # of a row of frames, at least those of the largest frame
    sizes_per_doubling: int = SIZES_PER_DOUBLING
    num_parts: int = 1  # that a mesh splits the rows into; each gets the frames that its own rows show

    def __post_init__(self) -> None:
        if self.num_rows % self.num_parts:
            raise ValueError(
                f"pack.num_rows={self.num_rows} must be a multiple of mesh.data x mesh.fsdp = {self.num_parts}"
            )


@dataclass(frozen=True)
class PackSizes:
    """What follows from what is packed; batches of several hosts have the largest of each, so that they are one."""

    num_batches: int
    num_actions: int  # of the row with the most
    num_frame_rows: int  # of the part with the most


@dataclass(frozen=True, eq=False)
class _Placed:
    """A sequence and its dialogues; `starts` is where each one's own tokens begin in the sequence."""

    sequence: RowSequence
    dialogues: list[Dialogue]
    starts: list[int]


def pack(
    dialogues: Sequence[Dialogue],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: Shape,
    *,
    first_number: int = 0,
    agreed: Callable[[PackSizes], PackSizes] = lambda sizes: sizes,
) -> list[TrainBatch]:
    """All dialogues, each exactly once, in as few rows as first-fit finds; every batch has `num_rows` rows.

    They are numbered from `first_number` on. `agreed` makes of the sizes that are needed here those of all hosts; a
    host that needs fewer batches fills up with empty ones.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(key for d in dialogues for key in d.frames))}
    dialogue_numbers = {id(dialogue): number for number, dialogue in enumerate(dialogues, first_number)}
    placed = [piece for group in _groups(dialogues) for piece in _split(group, numbers, shape.row_tokens, config)]
    rows = _first_fit(placed, shape.row_tokens)
    batches = [rows[first : first + shape.num_rows] for first in range(0, len(rows), shape.num_rows)]
    # Long rows come first: dealt out, no part has the frames of the longest ones only.
    parts = [batch[part :: shape.num_parts] for batch in batches for part in range(shape.num_parts)]
    keys = list(numbers)
    visions = [_vision(part, keys, frames, config, shape) for part in parts]
    # One shape for all of them: the row with the most entries, the part with the most frames decides.
    sizes = agreed(
        PackSizes(
            len(batches),
            max((_num_actions(row) for row in rows), default=1),
            max((len(vision.patches) for vision, _ in visions if vision is not None), default=0),
        )
    )
    num_actions = stepped(sizes.num_actions, TOKEN_STEP, shape.sizes_per_doubling)
    num_empty = sizes.num_batches - len(batches)
    parts += [[] for _ in range(num_empty * shape.num_parts)]
    visions += [(None, [0] * len(keys)) for _ in range(num_empty * shape.num_parts)]
    made = (
        _part(
            part,
            dialogue_numbers,
            vision,
            table,
            [frames[key] for key in keys],
            config,
            shape,
            num_actions,
            sizes.num_frame_rows,
        )
        for part, (vision, table) in zip(parts, visions, strict=True)
    )
    return [_joined([next(made) for _ in range(shape.num_parts)]) for _ in range(sizes.num_batches)]


def rows_of_host(batch: TrainBatch, host: int, num_hosts: int) -> TrainBatch:
    """What one of several hosts gives of a batch that all of them have packed; frames lie with their rows."""
    if num_hosts == 1:
        return batch

    def own(array: np.ndarray) -> np.ndarray:
        size = len(array) // num_hosts
        return array[host * size : (host + 1) * size]

    batch = jax.tree.map(own, batch)
    vision = batch.vision
    return batch if vision is None else replace(batch, vision=replace(vision, num_parts=vision.num_parts // num_hosts))


def used_frac(batches: Sequence[TrainBatch]) -> float:
    """Of all token slots, those that hold a token."""
    slots = sum(batch.text.tokens.size for batch in batches)
    return sum(int(np.count_nonzero(batch.text.segment_ids)) for batch in batches) / max(slots, 1)


def fitting_row_tokens(
    dialogues: Sequence[Dialogue], max_row_tokens: int, sizes_per_doubling: int = SIZES_PER_DOUBLING
) -> int:
    """A length of rows that holds the largest group whole, where the most that is allowed does."""
    needed = [
        group[0].num_shared + sum(len(dialogue.ids) - dialogue.num_shared for dialogue in group)
        for group in _groups(dialogues)
    ]
    return min(stepped(max(needed, default=1), TOKEN_STEP, sizes_per_doubling), max_row_tokens)


def stepped(count: int, step: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> int:
    """`count` rounded up to a size of a coarse scale: multiples of a step that grows with the size."""
    while count > 2 * sizes_per_doubling * step:
        step *= 2
    return max(1, -(-count // step)) * step


def _groups(dialogues: Sequence[Dialogue]) -> list[list[Dialogue]]:
    groups: dict[Any, list[Dialogue]] = {}
    for dialogue in dialogues:
        groups.setdefault(dialogue.shared if dialogue.num_shared else id(dialogue), []).append(dialogue)
    return list(groups.values())


def _split(group: list[Dialogue], numbers: Mapping[str, int], row_tokens: int, config: ModelConfig) -> list[_Placed]:
    """The sequences of a group: one, unless its branches do not fit into a row; then each repeats the trunk."""
    pieces: list[list[Dialogue]] = []
    room = 0
    for dialogue in group:
        own = len(dialogue.ids) - dialogue.num_shared
        if len(dialogue.ids) > row_tokens:
            raise ValueError(
                f"a dialogue of {len(dialogue.ids)} tokens does not fit into pack.row_tokens={row_tokens}; raise it, "
                f"or lower rollout.max_context_tokens or the frame budget"
            )
        if own > room or not pieces:
            pieces.append([])
            room = row_tokens - dialogue.num_shared
        pieces[-1].append(dialogue)
        room -= own
    return [_placed(piece, numbers, config) for piece in pieces]


def _placed(dialogues: list[Dialogue], numbers: Mapping[str, int], config: ModelConfig) -> _Placed:
    placeholders = (config.image_token_id, config.video_token_id)

    def tokens(dialogue: Dialogue, part: slice, shown: slice) -> Tokens:
        # A placeholder that was sampled is to be predicted and has no frame to show. It ends its dialogue, so what
        # stands there as an input changes nothing.
        sampled = dialogue.loss_mask & np.isin(dialogue.ids, placeholders)
        ids = np.where(sampled, 0, dialogue.ids)
        return Tokens(ids[part], tuple(numbers[key] for key in dialogue.frames[shown]))

    first = dialogues[0]
    if len(dialogues) == 1:
        return _Placed(RowSequence(tokens(first, slice(None), slice(None))), dialogues, [first.num_shared])
    trunk = tokens(first, slice(first.num_shared), slice(first.num_shared_frames))
    branches = [tokens(d, slice(d.num_shared, None), slice(d.num_shared_frames, None)) for d in dialogues]
    lengths = [len(branch.ids) for branch in branches]
    starts = first.num_shared + np.cumsum([0, *lengths[:-1]])
    return _Placed(RowSequence(trunk, tuple(branches)), dialogues, starts.tolist())


def _first_fit(placed: Sequence[_Placed], row_tokens: int) -> list[list[_Placed]]:
    rows: list[list[_Placed]] = []
    rooms: list[int] = []
    for piece in sorted(placed, key=lambda piece: -piece.sequence.num_tokens):
        needed = piece.sequence.num_tokens
        row = next((number for number, room in enumerate(rooms) if room >= needed), len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(row_tokens)
        rows[row].append(piece)
        rooms[row] -= needed
    return rows


def _num_actions(row: Sequence[_Placed]) -> int:
    return sum(int(_scored(dialogue, piece, n).sum()) for piece in row for n, dialogue in enumerate(piece.dialogues))


def _scored(dialogue: Dialogue, piece: _Placed, number: int) -> np.ndarray:
    """Tokens that count: of a shared beginning only in the first dialogue; the very first token follows nothing."""
    mask = dialogue.loss_mask.copy()
    mask[:1] = False
    if len(piece.dialogues) > 1 and mask[: dialogue.num_shared].any():
        raise ValueError(f"episode {dialogue.episode} has loss tokens in what its group shares")
    return mask


def _vision(
    rows: Sequence[Sequence[_Placed]],
    keys: Sequence[str],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: Shape,
) -> tuple[VisionBatch | None, list[int]]:
    """The distinct frames of a part, and the first row of each in its visual table (0 for frames of other parts)."""
    shown = sorted({n for row in rows for piece in row for part in _parts(piece.sequence) for n in part.frames})
    table = [0] * len(keys)
    if not shown:
        return None, table
    vision, first_rows = pack_vision([frames[keys[n]] for n in shown], config.vision, shape.row_patches)
    for number, first_row in zip(shown, first_rows, strict=True):
        table[number] = first_row
    return vision, table


def _parts(sequence: RowSequence) -> tuple[Tokens, ...]:
    return (sequence.trunk, *sequence.branches)


def _part(
    rows: Sequence[Sequence[_Placed]],
    dialogue_numbers: Mapping[int, int],
    vision: VisionBatch | None,
    table: list[int],
    frames: Sequence[Frame],
    config: ModelConfig,
    shape: Shape,
    num_actions: int,
    num_frame_rows: int,
) -> TrainBatch:
    """The part of a batch that these rows are."""
    num_rows = shape.num_rows // shape.num_parts
    sequences = [[piece.sequence for piece in row] for row in rows]
    text = pack_text(sequences, frames, table, config, shape.row_tokens, num_rows)
    entries = {name: np.zeros((num_rows, num_actions), dtype) for name, dtype in ENTRIES.items()}
    for b, row in enumerate(rows):
        at = first = 0  # in the entries, and in the row
        for piece in row:
            for number, dialogue in enumerate(piece.dialogues):
                scored = np.flatnonzero(_scored(dialogue, piece, number))
                where = np.s_[b, at : at + len(scored)]
                place = _place_in_row(dialogue, first, first + piece.starts[number])
                entries["source"][where] = place[scored - 1]
                entries["target"][where] = dialogue.ids[scored]
                entries["loss_mask"][where] = True
                entries["behavior_logp"][where] = dialogue.behavior_logp[scored]
                entries["advantage"][where] = dialogue.advantage[scored]
                entries["token_class"][where] = dialogue.token_class[scored]
                entries["dialogue"][where] = dialogue_numbers[id(dialogue)]
                at += len(scored)
            first += piece.sequence.num_tokens
    if num_frame_rows:
        vision = _filled_up(vision, num_frame_rows, config, shape)
    return TrainBatch(text=text, vision=vision, **entries)


def _joined(parts: Sequence[TrainBatch]) -> TrainBatch:
    if len(parts) == 1:
        return parts[0]
    batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    vision = None if batch.vision is None else replace(batch.vision, num_parts=len(parts))
    return replace(batch, vision=vision)


def _place_in_row(dialogue: Dialogue, trunk_start: int, own_start: int) -> np.ndarray:
    """Where each token of a dialogue stands in its row."""
    number = np.arange(len(dialogue.ids))
    return np.where(number < dialogue.num_shared, trunk_start + number, own_start + number - dialogue.num_shared)


def _filled_up(vision: VisionBatch | None, num_rows: int, config: ModelConfig, shape: Shape) -> VisionBatch:
    num_rows = stepped(num_rows, FRAME_ROW_STEP, shape.sizes_per_doubling)
    if vision is None:
        vision, _ = pack_vision([], config.vision, shape.row_patches, num_rows)
        return vision

    def fill(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array, np.zeros((num_rows - len(array), *array.shape[1:]), array.dtype)])

    return VisionBatch(
        patches=fill(vision.patches),
        segment_ids=fill(vision.segment_ids),
        positions=fill(vision.positions),
        interp_index=fill(vision.interp_index),
        interp_weight=fill(vision.interp_weight),
    )
