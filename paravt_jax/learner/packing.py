"""Packs dialogues into rows of static shape; a group's common prompt is computed once per row.

The episodes of a prompt share thousands of tokens. They become one sequence, `[prompt][branch][branch]…`: a branch
attends to the prompt and to itself, and its positions continue from the prompt's, so the gradient is
the same as with separate rows. A group can span several rows, each with the prompt. Only loss tokens are scored. Each
scored token records the row position that predicts it; the prompt's last token predicts the first token of a branch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from model_port.config import ModelConfig
from model_port.inputs import (
    NOT_REPLAYED,
    Frame,
    RowSequence,
    TextBatch,
    Tokens,
    VisionBatch,
    frame_rows,
    pack_text,
    pack_vision,
)

TOKEN_STEP = 128  # granularity of a row's tokens, for small sizes
SIZES_PER_DOUBLING = 8  # row lengths to choose from, per doubling
FRAME_ROW_STEP = 4  # number of patch rows, doubled until all frames fit
FRAME_TEXT_TOKENS = 3  # text tokens of a frame, at least: its time, its start, its end
MAX_HALVINGS = 3  # a row has room for all its tokens as scored tokens, or for a half, up to this many halvings
BATCH_TOKENS = 256  # cost of reading all weights, which every batch does, as a number of tokens


@dataclass(frozen=True, eq=False)
class Dialogue:
    """One agent's dialogue with expanded placeholders. Its first `num_shared` tokens are its group's prompt.

    `frames` has keys. Arrays after `num_shared_frames` have one value per token; all but `experts` are only used where
    `loss_mask` is True.
    """

    ids: Int[np.ndarray, " n"]
    frames: tuple[str, ...]  # in the order of the placeholders
    num_shared: int
    num_shared_frames: int
    loss_mask: Bool[np.ndarray, " n"]
    behavior_logp: Float[np.ndarray, " n"]
    advantage: Float[np.ndarray, " n"]
    token_class: Int[np.ndarray, " n"]
    episode: int  # the episode's number in the step
    likelihood: Float[np.ndarray, " n"] | None = None  # weight of each token's log-likelihood; None: 0
    experts: Int[np.ndarray, "n L J"] | None = None  # experts that computed each token (MoE); None: unknown

    @property
    def shared(self) -> tuple[bytes, tuple[str, ...]]:
        """A key that dialogues with the same prompt share."""
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
    dialogue: Int[Any, "B A"]  # number of its dialogue in the update, over all hosts
    episode_tokens: Int[Any, "B A"]  # scored tokens of its episode
    likelihood: Float[Any, "B A"]  # weight of the token's log-likelihood in the loss


ENTRIES = {
    "source": np.int32,
    "target": np.int32,
    "loss_mask": np.bool_,
    "behavior_logp": np.float32,
    "advantage": np.float32,
    "token_class": np.int32,
    "dialogue": np.int32,
    "episode_tokens": np.int32,
    "likelihood": np.float32,
}


@dataclass(frozen=True)
class BatchShape:
    """A batch's static sizes. All batches of a step have the same, so that they share one compiled program."""

    num_rows: int
    row_tokens: int
    row_patches: int  # patches per row of frames; the largest frame fits
    num_parts: int = 1  # the mesh splits the rows into this many equal parts; each part has only its rows' frames
    row_actions: int = 1  # scored tokens per row; `pack` raises it to what its dialogues need
    num_frame_rows: int = 0  # rows of frames, of all parts; `pack` raises this too

    def of_hosts(self, num: int) -> "BatchShape":
        """The batch of all hosts together, from the shape of each."""
        return replace(
            self,
            num_rows=num * self.num_rows,
            num_parts=num * self.num_parts,
            num_frame_rows=num * self.num_frame_rows,
        )


def largest_shape(
    num_rows: int, row_tokens: int, row_patches: int, merge_unit: int, num_parts: int, max_frames: int
) -> BatchShape:
    """The shape that fits any batch with at most `max_frames` frames, even if as many as fit are in the same part.

    Small frames share a row of patches.
    """
    frame_tokens = row_patches // merge_unit + FRAME_TEXT_TOKENS
    frame_rows = round_up(min(max_frames, num_rows // num_parts * row_tokens // frame_tokens), FRAME_ROW_STEP, 1)
    return BatchShape(num_rows, row_tokens, row_patches, num_parts, row_tokens, num_parts * frame_rows)


class PackSizes(NamedTuple):
    """The sizes that depend on the dialogues. All hosts use the maximum of each, so that their batches combine."""

    num_batches: int
    num_actions: int  # scored tokens per row, at most
    num_frame_rows: int  # rows of patches per part, at most


Row = list[list[int]]  # the sequences of a row, each the indices of the dialogues that share its prompt


def pack(
    dialogues: Sequence[Dialogue],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: BatchShape,
    *,
    first_number: int = 0,
    agree: Callable[[PackSizes], PackSizes] = lambda sizes: sizes,
) -> list[TrainBatch]:
    """Packs each dialogue exactly once, by best fit, into batches of `num_rows` rows.

    Dialogues are numbered from `first_number`. `agree` turns the sizes that this host needs into the maximum over
    hosts; a host that needs fewer batches adds empty batches. Raises ValueError if a dialogue is longer than a row.
    """
    rows = plan_rows(dialogues, shape.row_tokens, shape.num_rows)
    sizes = agree(_needed_sizes(rows, dialogues, frames, shape))
    return fill(rows, dialogues, frames, config, shape, sizes, first_number)


def plan_rows(dialogues: Sequence[Dialogue], row_tokens: int, batch_rows: int = 1) -> list[Row]:
    """Assigns dialogues to rows; batches have `batch_rows` rows."""
    longest = max((len(dialogue.ids) for dialogue in dialogues), default=0)
    if longest > row_tokens:
        raise ValueError(
            f"a dialogue of {longest} tokens does not fit into pack.row_tokens={row_tokens}; raise it, "
            f"or lower rollout.max_context_tokens or the frame budget"
        )
    groups = _groups(dialogues)
    rows = place([_prompt_group(group, dialogues) for group in groups], row_tokens, batch_rows)
    return [[[groups[piece.group][n] for n in piece.branches] for piece in row] for row in rows]


class PromptGroup(NamedTuple):
    """Token counts of a prompt and of each branch that continues it."""

    prompt: int
    branches: Sequence[int]

    @property
    def num_tokens(self) -> int:
        return self.prompt + sum(self.branches)


class Piece(NamedTuple):
    """Branches of a group in the same row."""

    group: int
    branches: list[int]


def place(groups: Sequence[PromptGroup], row_tokens: int, batch_rows: int) -> list[list[Piece]]:
    """Places groups by best fit into few batches of `batch_rows` rows. The longest dialogue must fit into a row."""
    num_batches = max(1, -(-sum(group.num_tokens for group in groups) // (row_tokens * batch_rows)))
    while (rows := _best_fit(groups, row_tokens, num_batches * batch_rows)) is None:
        num_batches += 1
    return rows


def _best_fit(groups: Sequence[PromptGroup], row_tokens: int, num_rows: int) -> list[list[Piece]] | None:
    """Places groups from longest to shortest into the fullest row with enough room, else into a new row.

    If no rows are left, the group is split: as many branches as fit go into the emptiest row. None if it cannot fit.
    """
    rows: list[list[Piece]] = []
    free: list[int] = []
    waiting = [(-group.num_tokens, number, list(range(len(group.branches)))) for number, group in enumerate(groups)]
    heapify(waiting)
    while waiting:
        size, number, branches = heappop(waiting)
        prompt, lengths = groups[number]
        row = min((n for n, room in enumerate(free) if room >= -size), key=free.__getitem__, default=len(rows))
        if row == num_rows:
            row = free.index(max(free))
        elif row == len(rows):
            rows.append([])
            free.append(row_tokens)
        room, taken = free[row] - prompt, []
        for branch in sorted(branches, key=lengths.__getitem__, reverse=True):
            if lengths[branch] <= room:
                taken.append(branch)
                room -= lengths[branch]
        if not taken:
            return None
        rows[row].append(Piece(number, sorted(taken)))
        free[row] = room
        if rest := [branch for branch in branches if branch not in taken]:
            heappush(waiting, (-prompt - sum(lengths[branch] for branch in rest), number, rest))
    return rows


def row_lengths(max_row_tokens: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> list[int]:
    """The row lengths to choose from. They are few, because each needs its own compiled programs."""
    lengths = [TOKEN_STEP]
    while lengths[-1] < max_row_tokens:
        lengths.append(min(round_up(lengths[-1] + 1, TOKEN_STEP, sizes_per_doubling), max_row_tokens))
    return lengths


def num_batches(groups: Sequence[PromptGroup], row_tokens: int, batch_rows: int) -> float:
    """The number of batches if rows have this length; infinite if a dialogue is longer than a row."""
    if any(group.prompt + max(group.branches) > row_tokens for group in groups):
        return math.inf
    return float(-(-len(place(groups, row_tokens, batch_rows)) // batch_rows))


def best_row_tokens(lengths: Sequence[int], num_batches: Sequence[float]) -> int:
    """The row length with the least work, given each length's number of batches; the longest if no length fits."""

    def work(choice: tuple[int, float]) -> float:
        tokens, batches = choice
        return batches * (BATCH_TOKENS + tokens)

    return min(zip(reversed(lengths), reversed(num_batches), strict=True), key=work)[0]


def prompt_groups(dialogues: Sequence[Dialogue]) -> list[PromptGroup]:
    return [_prompt_group(group, dialogues) for group in _groups(dialogues)]


def fill(
    rows: Sequence[Row],
    dialogues: Sequence[Dialogue],
    frames: Mapping[str, Frame],
    config: ModelConfig,
    shape: BatchShape,
    sizes: PackSizes,
    first_number: int = 0,
) -> list[TrainBatch]:
    """Fills the batches of planned rows."""
    keys = _frame_keys(dialogues)
    parts = _parts(rows, shape)
    parts += [[] for _ in range(sizes.num_batches * shape.num_parts - len(parts))]
    num_actions = halve_while_fits(shape.row_tokens, max(sizes.num_actions, shape.row_actions))
    num_frame_rows = shape.num_frame_rows // shape.num_parts
    if sizes.num_frame_rows > num_frame_rows:
        num_frame_rows = round_up(sizes.num_frame_rows, FRAME_ROW_STEP, 1)

    def filled(part: Sequence[Row]) -> TrainBatch:
        visible = _visible_frames(part, dialogues)
        vision, first_rows = None, dict.fromkeys(keys, 0)  # frames of other parts get row 0
        if num_frame_rows:
            packed = pack_vision([frames[key] for key in visible], config.vision, shape.row_patches, num_frame_rows)
            vision, first_rows = packed[0], first_rows | dict(zip(visible, packed[1], strict=True))
        sequences = [[_row_sequence(sequence, dialogues, keys, config) for sequence in row] for row in part]
        ordered, table = [frames[key] for key in keys], list(first_rows.values())
        num_rows = shape.num_rows // shape.num_parts
        text = pack_text(sequences, ordered, table, config, shape.row_tokens, num_rows)
        return TrainBatch(text=text, vision=vision, **_entries(part, dialogues, num_rows, num_actions, first_number))

    starts = range(0, len(parts), shape.num_parts)
    return [_concatenate_parts([filled(part) for part in parts[start : start + shape.num_parts]]) for start in starts]


def rows_of_host(batch: TrainBatch, host: int, num_hosts: int) -> TrainBatch:
    """Takes one host's rows, and their frames, from a batch that every host packed."""
    if num_hosts == 1:
        return batch

    def own(array: np.ndarray) -> np.ndarray:
        size = len(array) // num_hosts
        return array[host * size : (host + 1) * size]

    batch = jax.tree.map(own, batch)
    vision = batch.vision
    return batch if vision is None else replace(batch, vision=replace(vision, num_parts=vision.num_parts // num_hosts))


def num_packed(batches: Sequence[TrainBatch]) -> int:
    """Tokens in the rows of the batches; a shared prompt counts once per row."""
    return sum(int(np.count_nonzero(batch.text.segment_ids)) for batch in batches)


def used_frac(batches: Sequence[TrainBatch]) -> float:
    """The fraction of token slots that hold a token."""
    return num_packed(batches) / max(sum(batch.text.tokens.size for batch in batches), 1)


def replayed_frac(batches: Sequence[TrainBatch]) -> float:
    """The fraction of a mixture's tokens whose experts are replayed."""
    known = sum(int((np.asarray(batch.text.experts)[:, :, 0, 0] != NOT_REPLAYED).sum()) for batch in batches)
    return known / max(num_packed(batches), 1)


def halve_while_fits(most: int, count: int) -> int:
    """Halves `most` while `count` fits, at most MAX_HALVINGS times."""
    return next(size for n in range(MAX_HALVINGS, -1, -1) if (size := -(-most // 2**n)) >= count)


def round_up(count: int, step: int, sizes_per_doubling: int) -> int:
    """Rounds `count` up to a multiple of a step that grows with the count."""
    while count > 2 * sizes_per_doubling * step:
        step *= 2
    return max(1, -(-count // step)) * step


def _groups(dialogues: Sequence[Dialogue]) -> list[list[int]]:
    """The indices of the dialogues that share a prompt."""
    groups: dict[Any, list[int]] = {}
    for number, dialogue in enumerate(dialogues):
        groups.setdefault(dialogue.shared if dialogue.num_shared else number, []).append(number)
    return list(groups.values())


def _prompt_group(group: Sequence[int], dialogues: Sequence[Dialogue]) -> PromptGroup:
    return PromptGroup(dialogues[group[0]].num_shared, [dialogues[number].num_own for number in group])


def _needed_sizes(
    rows: Sequence[Row], dialogues: Sequence[Dialogue], frames: Mapping[str, Frame], shape: BatchShape
) -> PackSizes:
    num_actions = [
        sum(int(_loss_mask(sequence, dialogues[number]).sum()) for sequence in row for number in sequence)
        for row in rows
    ]
    num_frame_rows = [
        len(frame_rows([frames[key] for key in _visible_frames(part, dialogues)], shape.row_patches))
        for part in _parts(rows, shape)
    ]
    num_batches = -(-len(rows) // shape.num_rows)
    return PackSizes(num_batches, max(num_actions, default=1), max(num_frame_rows, default=0))


def _parts(rows: Sequence[Row], shape: BatchShape) -> list[list[Row]]:
    """Splits every batch into parts. Long rows come first, so each part gets every `num_parts`th row."""
    batches = [rows[first : first + shape.num_rows] for first in range(0, len(rows), shape.num_rows)]
    return [list(batch[part :: shape.num_parts]) for batch in batches for part in range(shape.num_parts)]


def _frame_keys(dialogues: Iterable[Dialogue]) -> dict[str, int]:
    """The distinct frames, numbered in order of appearance."""
    return {key: n for n, key in enumerate(dict.fromkeys(key for dialogue in dialogues for key in dialogue.frames))}


def _visible_frames(rows: Sequence[Row], dialogues: Sequence[Dialogue]) -> list[str]:
    return list(_frame_keys(dialogues[number] for row in rows for sequence in row for number in sequence))


def _loss_mask(sequence: Sequence[int], dialogue: Dialogue) -> np.ndarray:
    """The mask of a dialogue's loss tokens, which must not be in a shared prompt."""
    if len(sequence) > 1 and dialogue.loss_mask[: dialogue.num_shared].any():
        raise ValueError(f"episode {dialogue.episode} has loss tokens in the prompt that its group shares")
    return dialogue.loss_mask


def _row_sequence(
    sequence: Sequence[int], dialogues: Sequence[Dialogue], keys: Mapping[str, int], config: ModelConfig
) -> RowSequence:
    placeholders = (config.image_token_id, config.video_token_id)

    def tokens(dialogue: Dialogue, part: slice, visible: slice) -> Tokens:
        if (largest := dialogue.ids.max()) >= config.text.vocab_size:
            raise ValueError(
                f"episode {dialogue.episode} has the id {largest}, but the vocabulary ends at "
                f"{config.text.vocab_size - 1}: the engine or the tokenizer is another model's"
            )
        # A sampled placeholder is a target without a frame. It ends its dialogue, so its input id does not matter.
        sampled = dialogue.loss_mask & np.isin(dialogue.ids, placeholders)
        ids = np.where(sampled, 0, dialogue.ids)
        experts = None if dialogue.experts is None else dialogue.experts[part]
        return Tokens(ids[part], tuple(keys[key] for key in dialogue.frames[visible]), experts)

    first, *siblings = (dialogues[number] for number in sequence)
    if not siblings:
        return RowSequence(tokens(first, slice(None), slice(None)))
    trunk = tokens(first, slice(first.num_shared), slice(first.num_shared_frames))
    branches = [tokens(d, slice(d.num_shared, None), slice(d.num_shared_frames, None)) for d in (first, *siblings)]
    return RowSequence(trunk, tuple(branches))


def _entries(
    rows: Sequence[Row], dialogues: Sequence[Dialogue], num_rows: int, num_actions: int, first_number: int
) -> dict[str, np.ndarray]:
    """The arrays of a batch that have an entry per scored token of these rows."""
    episode_tokens = Counter[int]()
    for dialogue in dialogues:
        episode_tokens[dialogue.episode] += int(dialogue.loss_mask.sum())
    entries = {name: np.zeros((num_rows, num_actions), dtype) for name, dtype in ENTRIES.items()}
    for b, row in enumerate(rows):
        entry = trunk = 0  # index of the next entry, and start of the sequence in the row
        for sequence in row:
            branch = trunk + dialogues[sequence[0]].num_shared
            for number in sequence:
                dialogue = dialogues[number]
                scored = np.flatnonzero(_loss_mask(sequence, dialogue))
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
                entries["episode_tokens"][where] = episode_tokens[dialogue.episode]
                if dialogue.likelihood is not None:
                    entries["likelihood"][where] = dialogue.likelihood[scored]
                entry += len(scored)
                branch += dialogue.num_own
            trunk = branch
    return entries


def _concatenate_parts(parts: Sequence[TrainBatch]) -> TrainBatch:
    if len(parts) == 1:
        return parts[0]
    batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    vision = None if batch.vision is None else replace(batch.vision, num_parts=len(parts))
    return replace(batch, vision=vision)
