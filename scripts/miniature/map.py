"""Runs the map: the arms in every cell, from cold starts that share their beginning, in one process.

python -m scripts.miniature map --reports 0.95 --calls 0.2 --seeds 0

A seed determines the world, the cold start, the prompt order and the sampling. A world's first cold start has the
middle call rate; each cell continues it with its own. Cells with the same seed share videos and frames.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.cli import add_debug_flag, prog_of
from model_port.layout import RESULTS_FILE
from model_port.output_dir import check_local, exit_on_sigterm
from paravt_jax.bench import machine
from paravt_jax.run.log import METRICS_FILE, load_jsonl
from scripts.miniature.__main__ import numbers_of
from scripts.miniature.arms import FORCED, NAMES
from scripts.miniature.cells import CALLS, CELLS, MEASURED, METRICS, REPORTS, Cell, Labels, write_rows_of_map
from scripts.miniature.experiment import COST_FILE, Experiment, Job, run_jobs, share_programs

FIRST, LAST = slice(0, 3), slice(-8, None)  # first and last steps of a training run whose means are reported
MIDDLE = CALLS[1]
CHOICES = {"reports": REPORTS, "calls": CALLS}


@dataclass(frozen=True)
class Runs:
    """A cell with a seed: its world's cold starts, which other cells continue too, and its own runs."""

    cell: Labels
    seed: int
    base: Experiment
    own: Experiment

    @classmethod
    def of(cls, directory: Path, cell: Cell, seed: int, arms: Sequence[str]) -> "Runs":
        videos = directory / f"seed{seed}" / "world"
        world = directory / f"seed{seed}" / f"reports{cell.reports:g}"
        chosen = arms or cell.arms
        needed = Experiment(world, chosen, [seed], cell.world).cold_starts
        base = Experiment(world, needed, [], replace(cell.world, calls_frac=MIDDLE), seed, videos)
        starts = {name: base.cold_start(name).done for name in needed}
        return cls(
            cell,
            seed,
            base,
            Experiment(world / f"calls{cell.calls:g}", chosen, [seed], cell.world, seed, videos, starts),
        )

    def make_data(self) -> None:
        self.base.make_data()
        self.own.make_data()

    def jobs(self) -> list[Job]:
        return [*map(self.base.cold_start, self.base.cold_starts), *self.own.jobs()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the numbers of all finished evaluations, with intervals over videos."""
        trained = {f"{arm}/seed{self.seed}": arm for arm in self.own.trained_arms}
        for name, arm in ({name: name for name in self.own.cold_starts} | trained).items():
            means = _trained(self.own.directory / name)
            for forced in (False, True):
                file = self.own.directory / "eval" / f"{name}{FORCED if forced else ''}" / RESULTS_FILE
                for result in json.loads(file.read_bytes())["cells"] if file.exists() else []:
                    yield self._row(arm, forced, result) | means

    def _row(self, arm: str, forced: bool, result: Mapping[str, Any]) -> dict[str, Any]:
        row = self.cell.row(arm, forced, result["dispatch"], result["frame_budget"])
        numbers = {key: result["metrics"][metric] for key, metric in METRICS.items()}
        interval = {"interval_95": result["scores"]["strict"]["interval_95"], "prompts": result["n"]["rows"]}
        return row | {"seed": self.seed} | numbers | interval


def _trained(directory: Path) -> dict[str, Any]:
    """Returns means over the first and the last steps of an arm's training."""
    steps = training_steps(directory)
    return {
        f"train_{key}": [_mean(row[f"rollout/{metric}"] for row in steps[part]) for part in (FIRST, LAST)]
        for key, metric in METRICS.items()
        if steps
    }


def training_steps(directory: Path) -> list[dict[str, Any]]:
    path = directory / METRICS_FILE
    return [row for row in load_jsonl(path) if "rollout/format_reward" in row] if path.exists() else []


def costs(jobs: Iterable[Job]) -> dict[str, dict[str, float]]:
    """Returns, for each kind of run, the number finished and their CPU and wall seconds."""
    totals: dict[str, dict[str, float]] = {}
    for job in jobs:
        own = totals.setdefault(job.kind, {"runs": 0, "cpu_s": 0.0, "wall_s": 0.0})
        for line in load_jsonl(job.directory / COST_FILE) if job.done.exists() else ():
            own["cpu_s"] += float(line["cpu_s"])
            own["wall_s"] += float(line["wall_s"])
        own["runs"] += job.done.exists()
    return totals


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{prog_of('scripts.miniature')} map",
        description="Run the arms in every cell of the map. Re-running the command resumes it. The results list all "
        "finished runs in --dir.",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/map"), help="output directory (default runs/map)")
    for name, values in CHOICES.items():
        text = ",".join(map(str, values))
        parser.add_argument(f"--{name}", default=text, help=f"comma-separated choice of {text}")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated seeds (default 0,1,2)")
    parser.add_argument("--arms", default="", help="comma-separated arms (default: those of each cell)")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    check_local(args.dir)
    directory, arms = args.dir.absolute(), args.arms.split(",") if args.arms else []
    seeds = numbers_of("--seeds", args.seeds)
    plan = [Runs.of(directory, cell, seed, arms) for seed in seeds for cell in _cells(args)]
    run_plan(plan)
    command = f"python -m scripts.miniature map {' '.join(arguments)}".strip()
    finished = [*finished_in(directory)]
    measured = [row for runs in finished for row in runs.rows()]
    cost = costs(dict.fromkeys(job for runs in finished for job in runs.jobs()))
    write_rows_of_map(directory / MEASURED.name, measured, command=command, machine=machine(), cost=cost)
    print(directory / MEASURED.name)


def run_plan(plan: Sequence[Runs]) -> None:
    jobs = list(dict.fromkeys(job for runs in plan for job in runs.jobs()))
    exit_on_sigterm()
    share_programs()
    for runs in plan:
        runs.make_data()
    run_jobs(jobs)


def finished_in(directory: Path) -> Iterator[Runs]:
    """Yields the runs of every cell and seed with all arms that were started, including those of `--arms`."""
    for seed in seeds_in(directory):
        for cell in CELLS:
            own = Runs.of(directory, cell, seed, ()).own.directory
            yield Runs.of(directory, cell, seed, [arm for arm in NAMES if (own / arm).is_dir()])


def seeds_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("seed")) for path in directory.glob("seed*"))


def _cells(args: argparse.Namespace) -> list[Cell]:
    chosen = {name: numbers_of(f"--{name}", getattr(args, name), float) for name in CHOICES}
    for name, values in CHOICES.items():
        if unknown := sorted({*chosen[name]} - {*values}):
            raise ValueError(f"--{name} {unknown[0]:g} is none of {', '.join(map(str, values))}")
    return [cell for cell in CELLS if cell.reports in chosen["reports"] and cell.calls in chosen["calls"]]
