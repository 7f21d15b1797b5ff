"""Runs the contrast between prior and architecture: two model families, two priors each, the same SFT and RL.

python -m scripts.miniature contrast --seeds 0

A new model acquires its prior by training on dialogues without tags, in which calls are frequent or rare. A seed
determines the world, the model, the prompt order and the sampling. Runs with the same seed share videos and frames.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_port.cli import add_debug_flag, prog_of
from model_port.output_dir import check_local
from paravt_jax.bench import machine
from scripts.miniature.__main__ import numbers_of
from scripts.miniature.arms import forces_prefix
from scripts.miniature.cells import DATA, METRICS, write_rows_of_map
from scripts.miniature.dials import World, load_world
from scripts.miniature.experiment import Experiment, Job
from scripts.miniature.map import Runs, costs, run_plan, seeds_in, training_steps

MEASURED = DATA / "contrast.json"
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
PRIORS = {"strong": 0.6, "weak": 0.03}  # share of the dialogues before SFT that call
ARMS = ("grpo", "para_grpo")
BEFORE_SFT = "pretrained"  # name of the model in the results
CURVES = METRICS | {"failed": "failed_calls_mean"}
TRAINING = "training"  # `dispatch` value of rows about a training run; they have a list of steps for each metric


@dataclass(frozen=True)
class Policy:
    """A cell of the contrast."""

    family: str
    prior: str

    @property
    def pretraining(self) -> World:
        dials = "traces.thinking=uncalled", f"calls_frac={PRIORS[self.prior]}", "trace_budgets=[4,4,8,16,32]"
        return load_world("contrast", *dials)

    def row(self, arm: str, forced: bool, dispatch: str, frames: int) -> dict[str, Any]:
        names = {"family": self.family, "prior": self.prior, "arm": arm}
        return names | {"forced": forced, "dispatch": dispatch, "frames": frames}


POLICIES = tuple(Policy(family, prior) for family in FAMILIES for prior in PRIORS)


class Contrast(Runs):
    """A policy with a seed. `base` is its pretraining, which the cold start of its own experiment continues."""

    @classmethod
    def of_policy(cls, directory: Path, policy: Policy, seed: int) -> "Contrast":
        own, videos = directory / f"seed{seed}" / policy.family / policy.prior, directory / f"seed{seed}" / "world"
        base = Experiment(own / BEFORE_SFT, ["sft"], [], policy.pretraining, seed, videos, family=policy.family)
        starts = {"sft": base.cold_start("sft").done}
        world = load_world("contrast")
        return cls(policy, seed, base, Experiment(own, ARMS, [seed], world, seed, videos, starts))

    def jobs(self) -> list[Job]:
        pretraining, evaluation, _ = self.base.jobs()  # the last job forces the prefix
        return [pretraining, evaluation, *self.own.jobs()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all evaluations, and the steps of each training run."""
        yield from ({**row, "arm": BEFORE_SFT} for row in Runs(self.cell, self.seed, self.base, self.base).rows())
        yield from super().rows()
        for arm in ARMS:
            if steps := training_steps(self.own.directory / arm / f"seed{self.seed}"):
                curves = {key: [round(row[f"rollout/{name}"], 3) for row in steps] for key, name in CURVES.items()}
                yield self.cell.row(arm, forces_prefix(arm), TRAINING, 0) | {"seed": self.seed} | curves


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{prog_of('scripts.miniature')} contrast",
        description="Train both families with a strong and a weak tool prior, then the same SFT and the same RL. "
        "Re-running the command resumes it. The results list all finished runs in --dir.",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/contrast"), help="output directory (default runs/contrast)"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds (default 0,1,2)")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    check_local(args.dir)
    directory, seeds = args.dir.absolute(), numbers_of("--seeds", args.seeds)
    run_plan([Contrast.of_policy(directory, policy, seed) for seed in seeds for policy in POLICIES])
    command = f"python -m scripts.miniature contrast {' '.join(arguments)}".strip()
    finished = [Contrast.of_policy(directory, policy, seed) for seed in seeds_in(directory) for policy in POLICIES]
    cost = costs(dict.fromkeys(job for runs in finished for job in runs.jobs()))
    rows = [row for runs in finished for row in runs.rows()]
    write_rows_of_map(directory / MEASURED.name, rows, command=command, machine=machine(), cost=cost)
    print(directory / MEASURED.name)
