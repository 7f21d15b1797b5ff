"""Compares parallel and sequential calls, and reports and frames: one policy answers about one to five windows.

python -m scripts.miniature crops                cold start, accuracy, times
python -m scripts.miniature crops --only time    measures the times again, with the trained policy

Two modes have no sub-agents: parallel calls that return frames; and no calls, with the overview and the frames of all
windows in the prompt. There is no RL.
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
from rollout.chat import TOKEN_PX
from rollout.episode import Agent
from rollout.episode_config import Dispatch
from rollout.prompter import Overview, Task
from scripts.miniature.cells import DATA, write_rows_of_map
from scripts.miniature.dials import World, load_world
from scripts.miniature.experiment import Experiment, run_jobs, share_programs
from scripts.miniature.traces import PLAYS, one_context_row
from scripts.miniature.world import MAX_WINDOWS, Question, questions

MEASURED = DATA / "crops.json"
CELLS = tuple((n, play) for n in range(1, MAX_WINDOWS + 1) for play in PLAYS)
DISPATCHES: Mapping[str, Dispatch] = {
    "parallel": "parallel",
    "sequential": "sequential",
    "one context": "none",
    "frames": "parallel",
}
ENGINES = ("jax", "sglang")  # engine.kind
NUM_ALONE = 5  # episodes that are timed one at a time
NUM_TIMED = NUM_ALONE + MAX_IN_FLIGHT
Row = dict[str, Any]


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes in each mode with an open engine."""

    worker: RolloutWorker
    renderer: TraceRenderer
    videos: Path
    frame_budget: int

    async def episode(self, play: str, question: Question) -> Row:
        began_s = time.perf_counter()
        name, path = f"{question.scene.number}-{len(question.windows_s)}", self.videos / question.scene.video
        task = Task(name, question.text, (str(path),), self.frame_budget)
        agent = self._agent(play)
        overview = await (self._one_context(task, question) if play == "one context" else agent.overview(task))
        prompt = Prompt(name, question.text, task.videos, question.answer, question.type)
        rollout = await replace(self.worker, agent=agent).run_episode(overview, prompt, 0, None, [])
        if rollout.missing:
            raise RuntimeError(f"{play}, {name}: {rollout.problem}")
        return counts(rollout, agent.chat.image_id) | {"seconds": time.perf_counter() - began_s}

    def _agent(self, play: str) -> Agent:
        agent, dispatch = self.worker.agent, DISPATCHES[play]
        if dispatch == "none":  # the other modes have the tool in their system text
            return agent.with_settings(dispatch=dispatch, prompts=replace(agent.config.prompts, system_has_tools=False))
        return agent.with_settings(dispatch=dispatch, crop_returns="frames" if play == "frames" else "report")

    async def _one_context(self, task: Task, question: Question) -> Overview:
        """Returns the prompt that the cold start's traces of this mode have."""
        trace = read_trace(one_context_row(question), lambda _: task.videos[0])
        prompt = (await self.renderer.render(trace, self.frame_budget)).ledger.segments[0]
        return Overview(task, {}, {}, prompt.ids, prompt.pictures, (), 0.0)

    async def episodes(self, play: str, chosen: Sequence[Question]) -> list[Row]:
        """Runs as many episodes at once as an evaluation does."""
        gate = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def one(question: Question) -> Row:
            async with gate:
                return await self.episode(play, question)

        return await asyncio.gather(*map(one, chosen))


def counts(rollout: Rollout, image_id: int) -> Row:
    """Returns an episode's counts; a context is the dialogue of the main agent or of one sub-agent."""
    assert rollout.episode is not None and rollout.terms is not None
    tokens = [sum(p.num_tokens(TOKEN_PX) for p in ledger.pictures) for ledger in rollout.episode.ledgers]
    return {
        "accuracy": rollout.terms.accuracy,
        "context_tokens": max(tokens),
        "visual_tokens": sum(tokens),
        "main_tokens": int(rollout.episode.ledger.num_tokens_each(image_id, TOKEN_PX).sum()),
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

    async def measure(self, stage: str, kind: str) -> None:
        """Measures accuracy or times of all cells with an engine, and writes them."""
        *_, job = self.experiment.jobs()
        own = (f"run_dir={self.directory / kind}", f"model.path={self.model}", f"engine.kind={kind}")
        async with open_evaluation(load_config(job.config, *job.settings, *own, schema=EvalConfig)) as evaluation:
            assert isinstance(evaluation.worker, RolloutWorker)
            agent, (budget,) = evaluation.worker.agent, evaluation.settings.frame_budgets
            renderer = TraceRenderer(agent.frames, agent.chat, VisionContract.from_hf(self.model), agent.config)
            runner = EpisodeRunner(evaluation.worker, renderer, self.directory / "world", budget)
            rows = await (self.accuracy(runner) if stage == "accuracy" else self.times(runner, kind))
        with whole_file(self.file(stage, kind)) as content:
            content.write(json.dumps(rows).encode())

    def file(self, stage: str, kind: str) -> Path:
        return self.directory / f"{stage}_{kind}.json"

    def questions(self, numbers: Iterable[int], num_windows: int) -> list[Question]:
        """Returns a question about each video."""
        scenes = (self.world.scene(self.experiment.world_seed, number) for number in numbers)
        return [questions(scene, self.world.questions)[num_windows - 1] for scene in scenes]

    async def accuracy(self, runner: EpisodeRunner) -> list[Row]:
        """Measures accuracy on all held-out videos."""
        held_out = range(self.world.num_videos)[-self.world.num_held_out :]
        return [summary(await runner.episodes(play, self.questions(held_out, n))) for n, play in CELLS]

    async def times(self, runner: EpisodeRunner, kind: str) -> list[Row]:
        """Times episodes. Every cell has its own videos, because engines cache prompts that they have seen."""
        rows, others = [], range(len(CELLS) * NUM_TIMED, self.world.num_videos)[:MAX_IN_FLIGHT]
        for play in PLAYS:
            await runner.episodes(play, self.questions(others, MAX_WINDOWS))  # compiles
        for number, (n, play) in enumerate(CELLS):
            chosen = self.questions(range(number * NUM_TIMED, (number + 1) * NUM_TIMED), n)
            alone = [await runner.episode(play, question) for question in chosen[:NUM_ALONE]]
            began_s = time.perf_counter()
            await runner.episodes(play, chosen[NUM_ALONE:])
            together_s = (time.perf_counter() - began_s) / MAX_IN_FLIGHT
            alone_s = statistics.median(row["seconds"] for row in alone)
            rows.append({f"{kind}_alone_s": alone_s, f"{kind}_together_s": together_s})
        return rows

    def rows(self) -> list[Row]:
        """Returns a row for each cell."""
        files = (self.file("accuracy", "jax"), *(self.file("time", kind) for kind in ENGINES))
        measured = zip(*(json.loads(file.read_bytes()) for file in files), strict=True)
        return [
            {"windows": n, "play": play} | of_accuracy | of_jax | of_sglang
            for (n, play), (of_accuracy, of_jax, of_sglang) in zip(CELLS, measured, strict=True)
        ]


def summary(episodes: Sequence[Row]) -> Row:
    """Returns means, and the accuracy's interval over episodes, each about another video."""
    means = {key: statistics.fmean(row[key] for row in episodes) for key in episodes[0] if key != "seconds"}
    right, videos = [row["accuracy"] for row in episodes], range(len(episodes))
    return means | {"interval_95": interval(right, videos, [""] * len(right)), "episodes": len(episodes)}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{prog_of('scripts.miniature')} crops",
        description="Train a cold start, and play questions about one to five windows in parallel, with reports or "
        "frames, one call a turn, and with all frames in one context. Re-running the command resumes it.",
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/crops"), help="output directory (default runs/crops)")
    parser.add_argument("--only", choices=["time"], help="measure the times again, in less than five minutes")
    add_debug_flag(parser)
    args = parser.parse_args(arguments)
    check_local(args.dir)
    crops = Crops(args.dir.absolute(), load_world("crops"))
    exit_on_sigterm()
    share_programs()
    crops.train()
    for stage, kind in (("accuracy", "jax"), *(("time", kind) for kind in ENGINES)):
        if stage == args.only or not crops.file(stage, kind).exists():
            asyncio.run(crops.measure(stage, kind))
    command = f"python -m scripts.miniature crops {' '.join(arguments)}".strip()
    write_rows_of_map(crops.directory / MEASURED.name, crops.rows(), command=command, machine=machine())
    print(crops.directory / MEASURED.name)
