"""Measures which share of an update's token slots hold tokens, for rows sized by the largest group and for chosen rows.

A step has the config's prompts. Each prompt has a random frame budget and a group of responses whose lengths are
lognormal around the plan's mean. `--signal` is the probability that a group's rewards differ, so that it trains.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from paravt_jax.config import Config, load_config
from paravt_jax.learner.packing import (
    Piece,
    PromptGroup,
    best_row_tokens,
    num_batches,
    place,
    row_lengths,
)
from paravt_jax.plan.plan import model_config
from paravt_jax.plan.run import PROMPT_TEXT_TOKENS, RESPONSE_TOKENS, PlannedRl

SIGMA = 0.5  # standard deviation of a response's log-length
MIN_TOKENS = 32
SIZES_PER_DOUBLING_BEFORE = 4


class Packed(NamedTuple):
    row_tokens: int
    num_batches: int
    slots: int
    used: int  # slots with a token, including repeated prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="configs/paragrpo_8b.yaml", help="run to pack (default %(default)s)")
    parser.add_argument("--rows", type=int, default=0, help="pack.num_rows (default 0: the config's)")
    parser.add_argument("--signal", type=float, default=1.0, help="probability that a group trains (default 1)")
    parser.add_argument("--steps", type=int, default=54, help="number of steps to pack (default 54)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} must be at least 1")
    if not 0 <= args.signal <= 1:
        raise ValueError(f"--signal {args.signal:g} must be between 0 and 1")
    if args.rows < 0:
        raise ValueError(f"--rows {args.rows} must be at least 0")
    config = load_config(args.config)
    rows = args.rows or config.pack.num_rows
    steps = list(_steps(config, args.signal, args.steps))
    tokens = sum(group.num_tokens for groups in steps for group in groups)
    lengths = row_lengths(config.pack.row_tokens)
    chosen = [_packed(groups, _chosen(groups, lengths, rows), rows) for groups in steps]
    of_largest = [_packed(*_of_largest(groups, config.pack.row_tokens), rows) for groups in steps]
    cases = {"largest group": of_largest, "chosen": chosen}
    return {"num_rows": rows, "signal": args.signal, "rows": [_row(*case, tokens) for case in cases.items()]}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    lines = ["| row length | lengths | batches | slots a step | used | with each prompt once |", "|---" * 6 + "|"]
    for row in result["rows"]:
        shares = f"{row['used']:.2f} | {row['distinct']:.2f}"
        lines.append(f"| {row['name']} | {row['lengths']} | {row['batches']:.1f} | {row['slots']:,.0f} | {shares} |")
    return "\n".join(lines)


def _row(name: str, packed: Sequence[Packed], tokens: int) -> dict[str, Any]:
    slots = sum(step.slots for step in packed)
    return {
        "name": name,
        "lengths": len({step.row_tokens for step in packed}),
        "batches": statistics.mean(step.num_batches for step in packed),
        "slots": slots / len(packed),
        "used": sum(step.used for step in packed) / slots,
        "distinct": tokens / slots,
    }


def _steps(config: Config, signal: float, num_steps: int) -> Iterator[list[PromptGroup]]:
    random, train = np.random.default_rng(config.seed), config.train
    frame_tokens = PlannedRl.of(config, model_config(config.model.path)[0]).frame_tokens
    most = config.rollout.max_new_tokens * (config.rollout.tool_turns + 1)
    for _ in range(num_steps):
        num_groups = max(1, random.binomial(train.prompts_per_step, signal))
        budgets = random.choice(config.video.frame_budgets or [config.video.overview_frames], num_groups).tolist()
        location = np.log(RESPONSE_TOKENS) - SIGMA**2 / 2
        lengths = random.lognormal(location, SIGMA, (num_groups, train.group_size)).clip(MIN_TOKENS, most)
        prompts = [PROMPT_TEXT_TOKENS + frame_tokens * budget for budget in budgets]
        yield [PromptGroup(*group) for group in zip(prompts, lengths.astype(int).tolist(), strict=True)]


def _chosen(groups: Sequence[PromptGroup], lengths: Sequence[int], batch_rows: int) -> int:
    needed = [num_batches(groups, length, batch_rows) for length in lengths]
    return best_row_tokens(lengths, needed)


def _of_largest(groups: Sequence[PromptGroup], max_row_tokens: int) -> tuple[list[PromptGroup], int]:
    """Returns rows that hold the largest group, as the learner packed until version 0.3.0: no group is cut."""
    largest = max(group.num_tokens for group in groups)
    if largest > max_row_tokens:
        raise ValueError(
            f"a group has {largest} tokens, more than pack.row_tokens={max_row_tokens}; use another --config"
        )
    lengths = row_lengths(max_row_tokens, SIZES_PER_DOUBLING_BEFORE)
    return [PromptGroup(0, [group.num_tokens]) for group in groups], min(n for n in lengths if n >= largest)


def _packed(groups: Sequence[PromptGroup], row_tokens: int, batch_rows: int) -> Packed:
    rows = place(groups, row_tokens, batch_rows)
    batches = -(-len(rows) // batch_rows)
    used = sum(_num_tokens(piece, groups) for row in rows for piece in row)
    return Packed(row_tokens, batches, batches * batch_rows * row_tokens, used)


def _num_tokens(piece: Piece, groups: Sequence[PromptGroup]) -> int:
    prompt, branches = groups[piece.group]
    return prompt + sum(branches[branch] for branch in piece.branches)
