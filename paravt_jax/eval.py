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

from model_port.cli import run_cli
from model_port.layout import RESULTS_FILE
from paravt_jax.config import EvalConfig
from paravt_jax.evaluation.results import Cell, OfShards, cell_table, refusal, score_table
from paravt_jax.run.command import config_parser, read_config
from paravt_jax.run.log import whole_file
from paravt_jax.run.process import claim_memory


async def run_eval(config: EvalConfig, shard: OfShards | None = None) -> list[Cell]:
    """The cells, in the order of dispatches and budgets; of one shard, the k-th of n, where that is given."""
    from paravt_jax.evaluation.evaluation import (
        open_evaluation,
    )  # late: --help and wrong settings need not wait for jax

    async with open_evaluation(config, shard) as evaluation:
        for cell in config.eval.cells:
            await evaluation.fill(*cell)
        cells = [evaluation.cell(*cell) for cell in config.eval.cells]
        with whole_file(evaluation.directory / RESULTS_FILE) as file:
            file.write(json.dumps({"model": config.model.path, "cells": cells}, indent=2).encode() + b"\n")
    return cells


def shard_of(text: str) -> OfShards:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard such as 3/8")
    return int(match[1]), int(match[2])


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        from paravt_jax.evaluation.table import main as main_table  # late: brings in matplotlib

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
    print(cell_table(cells))
    if config.data.split:
        print(f"\n{score_table(cells)}")
    if args.shard is None and (problem := refusal(cells)):
        raise RuntimeError(problem)


if __name__ == "__main__":
    run_cli(main)
