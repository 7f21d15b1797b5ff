"""A policy on held-out prompts: by frame budget, by the way calls are made, by type of question.

python -m paravt_jax.eval --config configs/eval_8b.yaml [a.b=c …]

Every pair of budget and dispatch is a cell. A cell that is done is kept, so that an evaluation that was interrupted
goes on where it was. The agent loop is that of training. What an engine, a video or the judge failed to give is counted
as missing, and never as a wrong answer.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from model_port.cli import run_cli
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


async def run_eval(config: EvalConfig) -> list[Cell]:
    """The cells, in the order of dispatches and budgets."""
    from paravt_jax.rl.evaluation import opened  # late: --help and wrong settings need not wait for jax

    async with opened(config) as evaluation:
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


def main() -> None:
    parser = config_parser(
        "paravt_jax.eval",
        "Evaluates a policy on held-out prompts. Run again with the same run_dir, it goes on where it was.",
    )
    config = read_config(
        parser, parser.parse_intermixed_args(), EvalConfig, "configs/eval_8b.yaml is an example", "data.validation=FILE"
    )
    if config is None:
        return
    from paravt_jax.run.compiles import use_compilation_cache

    claim_memory()
    use_compilation_cache()
    print(table(asyncio.run(run_eval(config))))


if __name__ == "__main__":
    run_cli(main)
