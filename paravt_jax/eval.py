"""A policy on held-out prompts or a public split: by frame budget, by the way calls are made, by type of question.

python -m paravt_jax.eval --config configs/eval_8b.yaml [data.split=videomme] [--shard K/N] [a.b=c …]
python -m paravt_jax.eval table RUN… [--png FILE]

Every pair of budget and dispatch is a cell. Every sample has its line as soon as it ends, so that an evaluation that
was interrupted goes on where it was. The agent loop is that of training. What an engine, a video or the judge failed
to give is counted as missing, and never as a wrong answer; a public split has a headline only where nothing is missing.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_port.cli import add_debug_flag, prog_of, run_cli
from paravt_jax.config import EvalConfig
from paravt_jax.run.command import config_parser, read_config
from paravt_jax.run.log import whole_file
from paravt_jax.run.process import claim_memory

RESULTS_FILE = "eval.json"
SHOWN = {
    "accuracy": "accuracy_mean",
    "f_tau": "format_reward",
    "kappa": "tool_calls_mean",
    "tool use": "tool_use_frac",
    "reward": "reward_mean",
    "tokens": "sampled_tokens_mean",
    "missing": "num_missing",
}
Cell = dict[str, Any]
OfShards = tuple[int, int]


async def run_eval(config: EvalConfig, shard: OfShards | None = None) -> list[Cell]:
    """The cells, in the order of dispatches and budgets; of one shard, the k-th of n, where that is given."""
    from paravt_jax.evaluation.opening import opened  # late: --help and wrong settings need not wait for jax

    async with opened(config, shard) as evaluation:
        for cell in config.eval.cells:
            await evaluation.fill(*cell)
        cells = [evaluation.cell(*cell) for cell in config.eval.cells]
        with whole_file(evaluation.directory / RESULTS_FILE) as file:
            file.write(json.dumps({"model": config.model.path, "cells": cells}, indent=2).encode() + b"\n")
    return cells


def table(cells: Iterable[Cell]) -> str:
    """As Markdown, one line for each cell."""
    columns = ["dispatch", "frames", *SHOWN, "mcq", "tvg", "oe"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for cell in cells:
        values = [f"{cell['metrics'][key]:.3g}" for key in SHOWN.values()]
        by_type = [cell["by_type"].get(kind, {}).get("accuracy_mean") for kind in ("mcq", "tvg", "oe")]
        values += ["" if value is None else f"{value:.3g}" for value in by_type]
        lines.append(f"| {cell['dispatch']} | {cell['frame_budget']} | {' | '.join(values)} |")
    return "\n".join(lines)


def score_table(cells: Iterable[Cell]) -> str:
    """Of a public split, the scores of each cell by both rules, in percent."""
    lines = ["| dispatch | frames | scorer | score | 95 % | missing as wrong | n | apart |", "|---" * 8 + "|"]
    for cell in cells:
        num = cell["n"]["answered"] + cell["n"]["unanswered"]
        for scorer, scores in cell["scores"].items():
            low, high = scores["interval_95"]
            shares = [f"{100 * scores['score']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
            shares += [f"{100 * scores['missing_as_wrong']:.1f}", f"{num} of {cell['n']['expected']}", _apart(scores)]
            lines.append(f"| {cell['dispatch']} | {cell['frame_budget']} | {scorer} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _apart(scores: dict[str, Any]) -> str:
    """What else a score has, and the first of its groups."""
    beside = {name: value for name, value in scores.items() if name == "micro" or "@" in name}
    parts = [f"{name} {100 * value:.1f}" for name, value in beside.items() if value != scores["score"] or "@" in name]
    for labels in list(scores["groups"].values())[:1]:
        parts += [f"{label} {100 * found['score']:.1f} of {found['n']}" for label, found in labels.items()]
    return ", ".join(parts)


def refusal(cells: Iterable[Cell]) -> str:
    """Why some cells of a public split have no headline; empty where all have."""
    told = [
        f"{cell['dispatch']}, {cell['frame_budget']} frames: {cell['refused']}" for cell in cells if cell["refused"]
    ]
    return f"no headline for {'; '.join(told)}" if told else ""


def shard_of(text: str) -> OfShards:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard such as 3/8")
    return int(match[1]), int(match[2])


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        main_table(sys.argv[2:])
        return
    parser = config_parser(
        "paravt_jax.eval",
        "Evaluates a policy on held-out prompts. Run again with the same run_dir, it goes on where it was. "
        "`table RUN…` in place of all else prints the published tables with the runs beside.",
    )
    parser.add_argument(
        "--shard",
        type=shard_of,
        metavar="K/N",
        help="only every N-th sample, from the K-th on, in run_dir/shards/K_of_N; the same command without it puts "
        "all of them together",
    )
    args = parser.parse_intermixed_args()
    config = read_config(parser, args, EvalConfig, "configs/eval_8b.yaml is an example", "data.validation=FILE")
    if config is None:
        return
    from paravt_jax.run.compiles import use_compilation_cache

    claim_memory()
    use_compilation_cache()
    cells = asyncio.run(run_eval(config, args.shard))
    print(table(cells))
    if config.data.split:
        print(f"\n{score_table(cells)}")
    if args.shard is None and (problem := refusal(cells)):
        raise RuntimeError(problem)


def main_table(arguments: list[str]) -> None:
    from paravt_jax.evaluation.table import draw, markdown, read_rows  # late: brings in matplotlib

    parser = argparse.ArgumentParser(prog=f"{prog_of('paravt_jax.eval')} table", description=markdown.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run_dir of an evaluation")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it there")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    rows = read_rows(args.runs)
    print(markdown(rows))
    if args.png is not None:
        draw(rows, args.png)


if __name__ == "__main__":
    run_cli(main)
