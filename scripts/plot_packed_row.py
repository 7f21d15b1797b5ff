"""Draws a row that the learner's `pack` made: python scripts/plot_packed_row.py docs/img/packed_row.svg"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from model_port.tiny import tiny_config
from paravt_jax.learner.packing import BatchShape, Dialogue, TrainBatch, pack

ROW_TOKENS = 24
COLORS = ["#9aa5b1", "#2f6db3", "#d9822b", "#3a9a5b"]  # the prompt, then its branches
PADDING = "#eeeeee"


def example_batch() -> TrainBatch:
    """A prompt of seven tokens with three branches, and a second prompt with one; the first token of each is forced."""

    def dialogue(episode: int, prompt: int, num_prompt: int, num_own: int) -> Dialogue:
        n = num_prompt + num_own
        mask = np.arange(n) > num_prompt
        zeros = np.zeros(n, np.float32)
        ids = np.r_[np.full(num_prompt, 100 + prompt), np.full(num_own, 200 + episode)]
        return Dialogue(ids, (), num_prompt, 0, mask, zeros, zeros, zeros.astype(np.int32), episode)

    dialogues = [dialogue(0, 0, 7, 4), dialogue(1, 0, 7, 3), dialogue(2, 0, 7, 3), dialogue(3, 1, 3, 2)]
    (batch,) = pack(dialogues, {}, tiny_config(), BatchShape(num_rows=1, row_tokens=ROW_TOKENS, row_patches=16))
    return batch


def attends(text: Any) -> np.ndarray:
    """Returns the query × key mask: causal, same sequence, and a key of the prompt or of the query's branch."""
    segment, branch = text.segment_ids[0], text.branch_ids[0]
    same = (segment[:, None] == segment[None]) & (segment[:, None] > 0)
    visible = (branch[None] == 0) | (branch[:, None] == branch[None])
    return same & visible & np.tri(len(segment), dtype=bool)


def color(segment: int, branch: int) -> str:
    return COLORS[branch] if segment else PADDING


def draw(batch: TrainBatch, path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "packed row"  # so that the file does not change from run to run
    text = batch.text
    segment, branch, position = text.segment_ids[0], text.branch_ids[0], text.positions[0, :, 0]
    figure = Figure(figsize=(8, 8), layout="constrained")
    row, mask = figure.subplots(2, 1, height_ratios=[1.3, ROW_TOKENS])
    predicts = np.bincount(batch.source[0][batch.loss_mask[0]], minlength=ROW_TOKENS)
    for t in range(ROW_TOKENS):
        row.add_patch(Rectangle((t, 0), 1, 1, facecolor=color(segment[t], branch[t]), edgecolor="white"))
        if segment[t]:
            row.text(t + 0.5, 0.5, str(position[t]), ha="center", va="center", color="white", fontsize=9)
        if predicts[t]:
            row.text(t + 0.5, 1.25, "▾", ha="center", va="center", fontsize=9)
    row.set(xlim=(0, ROW_TOKENS), ylim=(0, 1.6), title="tokens by position; ▾ predicts a loss token", yticks=[])
    row.set_xticks([])
    for query, key in np.argwhere(attends(text)):
        face = color(segment[key], branch[key])
        mask.add_patch(Rectangle((key, query), 1, 1, facecolor=face, edgecolor="white"))
    mask.set(xlim=(0, ROW_TOKENS), ylim=(ROW_TOKENS, 0), xlabel="key", ylabel="query", title="who attends to whom")
    for axes in (row, mask):
        axes.spines[:].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="the figure to write")
    draw(example_batch(), parser.parse_args().path)
