"""Parallel against sequential calls: one policy answers questions that need the frames of one to five windows.

python -m scripts.miniature crops                cold start, accuracy, times
python -m scripts.miniature crops --only time    measures the times again, with the trained policy

The third way to play has no sub-agents: the prompt has the overview and the frames of all windows. There is no RL.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_port.cli import add_debug_flag, prog_of
from model_port.export import export
from model_port.output_dir import check_local, exit_on_sigterm
from model_port.processing import VisionContract
from model_port.progress import Meter
from paravt_jax.bench import machine
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.traces import read_trace
from paravt_jax.evaluation.evaluation import open_evaluation
from paravt_jax.evaluation.runner import MAX_IN_FLIGHT
from paravt_jax.evaluation.statistics import interval
from paravt_jax.imitation.render import TraceRenderer
from paravt_jax.rl.episodes import Rollout, RolloutWorker
from paravt_jax.run.log import whole_file
from rollout.episode_config import TOKEN_PX, Dispatch
from rollout.prompter import Overview, Task
from scripts.miniature.cells import DATA, write_rows_of_map
from scripts.miniature.dials import World, load_world
from scripts.miniature.experiment import Experiment, run_jobs, share_programs
from scripts.miniature.traces import PLAYS, one_context_row
from scripts.miniature.world import MAX_WINDOWS, Question, questions

MEASURED = DATA / "crops.json"
DISPATCHES: Mapping[str, Dispatch] = dict(zip(PLAYS, ("parallel", "sequential", "none"), strict=True))
CELLS = tuple((n, play) for n in range(1, MAX_WINDOWS + 1) for play in PLAYS)
ENGINES = ("jax", "sglang")  # engine.kind
STAGES = ("train", "accuracy", "time")
COUNTED = ("accuracy", "visual_tokens", "turns", "calls")
TIMES = ("alone_s", "together_s")  # of an episode
NUM_ALONE = 5  # episodes one at a time
NUM_TIMED = NUM_ALONE + MAX_IN_FLIGHT
Row = dict[str, Any]


@dataclass(frozen=True)
class Player:
    """Plays questions in each way with an open engine."""

    worker: RolloutWorker
    renderer: TraceRenderer
    videos: Path
    frame_budget: int

    async def episode(self, play: str, question: Question) -> Row:
        began_s = time.perf_counter()
        name, path = f"{question.scene.number}-{len(question.windows_s)}", self.videos / question.scene.video
        task = Task(name, question.text, (str(path),), self.frame_budget)
        agent = self.worker.agent.with_settings(dispatch=DISPATCHES[play])
        overview = await (self._one_context(task, question) if play == "one context" else agent.overview(task))
        prompt = Prompt(name, question.text, task.videos, question.answer, question.type)
        rollout = await replace(self.worker, agent=agent).run_episode(overview, prompt, 0, None, [])
        if rollout.missing:
            raise RuntimeError(f"{play}, {name}: {rollout.problem}")
        return counts(rollout) | {"video": question.scene.number, "seconds": time.perf_counter() - began_s}

    async def _one_context(self, task: Task, question: Question) -> Overview:
        """The prompt that the cold start's traces of this kind have."""
        trace = read_trace(one_context_row(question), lambda _: task.videos[0])
        prompt = (await self.renderer.render(trace, self.frame_budget)).ledger.segments[0]
        return Overview(task, {}, {}, prompt.ids, prompt.pictures, (), 0.0)

    async def episodes(self, play: str, chosen: Sequence[Question], num_in_flight: int = MAX_IN_FLIGHT) -> list[Row]:
        gate = asyncio.Semaphore(num_in_flight)
        with Meter(play, len(chosen), "episode") as meter:

            async def one(question: Question) -> Row:
                async with gate:
                    row = await self.episode(play, question)
                meter.update()
                return row

            return await asyncio.gather(*map(one, chosen))


def counts(rollout: Rollout) -> Row:
    """The numbers of an episode; a context is the dialogue of the main agent or of one sub-agent."""
    assert rollout.episode is not None and rollout.terms is not None
    ledgers = rollout.episode.ledgers
    return {
        "accuracy": rollout.terms.accuracy,
        "visual_tokens": max(sum(p.num_tokens(TOKEN_PX) for p in ledger.pictures) for ledger in ledgers),
        "turns": len(rollout.episode.turns),
        "calls": rollout.episode.outcomes.count("ok"),
    }


@dataclass(frozen=True)
class Crops:
    """The experiment in its directory."""

    directory: Path
    world: World

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.directory, ["sft"], [], self.world)

    @property
    def model(self) -> Path:
        return self.directory / "model.hf"

    def train(self) -> None:
        cold_start = self.experiment.cold_start("sft")
        self.experiment.make_data()
        run_jobs([cold_start])
        if not self.model.exists():
            export(cold_start.done.parent, self.model)  # SGLang reads no checkpoint

    async def measure(self, kind: str, stage: str) -> None:
        """Plays with an engine, and writes what `accuracy` or `times` returns."""
        file = self.file(stage, kind)
        if file.exists():
            return
        *_, job = self.experiment.jobs()
        own = (f"run_dir={self.directory / kind}", f"model.path={self.model}", f"engine.kind={kind}")
        async with open_evaluation(load_config(job.config, *job.settings, *own, schema=EvalConfig)) as evaluation:
            assert evaluation.worker is not None
            agent = evaluation.worker.agent
            contract = VisionContract.from_hf(self.model)
            renderer = TraceRenderer(agent.frames, agent.chat, contract, agent.config)
            (budget,) = evaluation.settings.frame_budgets
            player = Player(evaluation.worker, renderer, self.directory / "world", budget)
            rows = await (self.accuracy(player) if stage == "accuracy" else self.times(player))
        file.parent.mkdir(exist_ok=True)
        with whole_file(file) as content:
            content.write(json.dumps(rows).encode())

    def file(self, stage: str, kind: str) -> Path:
        return self.directory / stage / f"{kind}.json"

    def questions(self, numbers: Iterable[int], num_windows: int) -> list[Question]:
        """A question about each video."""
        scenes = (self.world.scene(self.experiment.world_seed, number) for number in numbers)
        return [questions(scene, self.world.questions)[num_windows - 1] for scene in scenes]

    async def accuracy(self, player: Player) -> list[Row]:
        """Of every play and number of windows, on all held-out videos."""
        held_out = range(self.world.num_videos)[-self.world.num_held_out :]
        return [summary(await player.episodes(play, self.questions(held_out, n))) for n, play in CELLS]

    async def times(self, player: Player) -> list[Row]:
        """Seconds of an episode. Every cell has its own videos, because engines cache prompts that they have seen."""
        fresh = range(len(CELLS) * NUM_TIMED, self.world.num_videos)[:MAX_IN_FLIGHT]
        for n, play in CELLS:
            await player.episodes(play, self.questions(fresh, n))  # compiles
        return [
            await timed(player, play, self.questions(range(number * NUM_TIMED, (number + 1) * NUM_TIMED), n))
            for number, (n, play) in enumerate(CELLS)
        ]

    def rows(self) -> list[Row]:
        """One for each number of windows and play."""
        rows: list[Row] = [{"windows": n, "play": play} for n, play in CELLS]
        for file in (self.file("accuracy", "jax"), *(self.file("time", kind) for kind in ENGINES)):
            for row, numbers in zip(rows, json.loads(file.read_bytes()) if file.exists() else [], strict=False):
                row |= {(f"{file.stem}_{key}" if key in TIMES else key): value for key, value in numbers.items()}
        return rows


def summary(episodes: Sequence[Row]) -> Row:
    """Means of a cell's episodes, with the interval of the accuracy over videos."""
    right, videos = [row["accuracy"] for row in episodes], [row["video"] for row in episodes]
    means = {key: statistics.fmean(row[key] for row in episodes) for key in COUNTED}
    return means | {"interval_95": interval(right, videos, [""] * len(right)), "episodes": len(episodes)}


async def timed(player: Player, play: str, chosen: Sequence[Question]) -> Row:
    """The median of episodes one at a time, and of many at once the time of all divided by their number."""
    alone = [await player.episode(play, question) for question in chosen[:NUM_ALONE]]
    began_s = time.perf_counter()
    together = await player.episodes(play, chosen[NUM_ALONE:])
    seconds = statistics.median(row["seconds"] for row in alone), (time.perf_counter() - began_s) / len(together)
    return dict(zip(TIMES, seconds, strict=True))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{prog_of('scripts.miniature')} crops",
        description="Train a cold start, and play questions about one to five windows in parallel, one call a turn, "
        "and with all frames in one context. Re-running the command resumes it.",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/crops"), help="output directory (default runs/crops)")
    parser.add_argument("--only", choices=STAGES, help="one stage; `time` measures again (default: all that is left)")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    check_local(args.dir)
    crops = Crops(args.dir.absolute(), load_world("crops"))
    exit_on_sigterm()
    share_programs()
    if args.only in (None, "train"):
        crops.train()
    if args.only in (None, "accuracy"):
        asyncio.run(crops.measure("jax", "accuracy"))
    for kind in ENGINES if args.only in (None, "time") else ():
        if args.only:
            crops.file("time", kind).unlink(missing_ok=True)
        asyncio.run(crops.measure(kind, "time"))
    command = f"python -m scripts.miniature crops {' '.join(arguments)}".strip()
    write_rows_of_map(crops.directory / MEASURED.name, crops.rows(), command=command, machine=machine())
    print(crops.directory / MEASURED.name)
