"""Evaluates a policy on held-out prompts or a public split, by frame budget, dispatch and question type.

python -m paravt_jax.eval --config configs/eval_8b.yaml [data.split=videomme] [--shard K/N] [a.b=c …]
python -m paravt_jax.eval batch configs/reproduce --splits all --run-dir runs/table1
python -m paravt_jax.eval table RUN… [--png FILE]

Every combination of dispatch, frame budget and temperature is a cell. Samples are logged as they end, so an interrupted
evaluation resumes. The agent loop is the same as in training. If an engine, a video or the judge fails, the sample
counts as missing, not as wrong; a public split gets a headline score only if no sample is missing.
"""

import argparse
import asyncio
import re
import sys

from model_port.cli import run_cli
from model_port.layout import RESULTS_FILE
from paravt_jax.config import EvalConfig
from paravt_jax.evaluation.results import Cell, Shard, cell_table, refusal, score_table
from paravt_jax.run.command import config_parser, read_config
from paravt_jax.run.log import write_json
from paravt_jax.run.process import claim_resources


async def run_eval(config: EvalConfig, shard: Shard | None = None) -> list[Cell]:
    """Runs all cells, or one shard of them, and returns them in the order of `config.eval.cells`."""
    from paravt_jax.evaluation.evaluation import open_evaluation  # imported late, so that --help does not load jax

    async with open_evaluation(config, shard) as evaluation:
        for cell in config.eval.cells:
            await evaluation.fill(cell)
        cells = [evaluation.cell(cell) for cell in config.eval.cells]
        write_json(evaluation.directory / RESULTS_FILE, {"model": config.model.path, "cells": cells})
    if len(config.eval.temperatures) > 1:
        from paravt_jax.evaluation.temperatures import draw_temperatures  # imported late: loads matplotlib

        draw_temperatures(evaluation.directory, cells)
    return cells


def shard_of(text: str) -> Shard:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard, for example 3/8")
    return int(match[1]), int(match[2])


def _set_up() -> None:
    from paravt_jax.run.compiles import set_up_compilation

    claim_resources()
    set_up_compilation()


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        from paravt_jax.evaluation.table import main as main_table  # imported late: loads matplotlib

        main_table(sys.argv[2:])
        return
    if sys.argv[1:2] == ["batch"]:
        from paravt_jax.evaluation.batch import main as main_batch  # imported late: loads matplotlib

        main_batch(sys.argv[2:], run_eval, _set_up)
        return
    parser = config_parser(
        "paravt_jax.eval",
        "Evaluate a policy on held-out prompts. The same run_dir resumes an interrupted evaluation. "
        "`batch DIR` runs all configs of a directory; `table RUN…` prints the published tables with your runs next "
        "to them.",
    )
    parser.add_argument(
        "--shard",
        type=shard_of,
        metavar="K/N",
        help="run every N-th sample from the K-th, in run_dir/shards/K_of_N; the same command without it merges "
        "all shards",
    )
    args = parser.parse_intermixed_args()
    config = read_config(parser, args, EvalConfig, "configs/eval_8b.yaml is an example", "data.validation=FILE")
    if config is None:
        return
    _set_up()
    cells = asyncio.run(run_eval(config, args.shard))
    print(cell_table(cells))
    if config.data.split:
        print(f"\n{score_table(cells)}")
    if args.shard is None and (problem := refusal(cells)):
        raise RuntimeError(problem)


if __name__ == "__main__":
    run_cli(main)
