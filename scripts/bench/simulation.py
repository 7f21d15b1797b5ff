"""Simulated steps beside real ones: the smoke run on one and two real SGLang servers, and with the embedded engine.

On one server also with rollouts of two later steps beside each step.

Calls are forced on the random model, so that every episode has sub-agents. Service times are measured on the engine of
the run, before its steps and after them; how many tokens were read and sampled is what the run has logged, and so are
the seconds of update and publish. What is predicted is the rollout, and the step that it is in.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from paravt_jax.bench.service import service_of
from paravt_jax.config import Config, EngineConfig, load_config
from paravt_jax.data.synthetic import HEIGHT_PX, WIDTH_PX
from paravt_jax.plan.service import EMBEDDED_STRIDE, ServiceTimes
from paravt_jax.plan.simulation import CallScript, GroupScript, TurnScript, simulate
from paravt_jax.rl.run import Run
from paravt_jax.rl.setup import open_run
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, load_jsonl
from scripts.bench.smoke_run import CONFIG, SETTINGS

ARMS = {
    "one server": ("engine.kind=sglang", "engine.num_servers=1"),
    "two servers": ("engine.kind=sglang", "engine.num_servers=2"),
    "one server, ahead": ("engine.kind=sglang", "engine.num_servers=1", "train.max_staleness=2"),  # as the 8B files
    "embedded": ("engine.kind=jax",),
}
OTHERWISE = (
    "rollout.max_context_tokens=2048",  # a cache that holds a step
    "train.group_size=8",  # enough to fill a server
    "train.truncated=leave_out",  # all are cut off: no update, which on a CPU takes ten times as long as its rollout
    "validation.at_start=false",
    "log.tensorboard=false",
)
FIRST_STEPS = 2  # of a run, which do not count: they compile
PROBE_REPEATS = 3
TIMES = ("rollout_s", "step_s")  # to compare
TAKEN_OVER = ("update_s", "publish_s")
HEAD = ("run", "rollout s", "simulated", "error", "step s (least to most)", "simulated", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=6, help=f"of each run that count, after {FIRST_STEPS} that compile"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of each run; every one is a row")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("steps", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    rows = []
    for arm in args.arms * args.repeats:
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(CONFIG, f"run_dir={folder}/run", *SETTINGS, *OTHERWISE, *ARMS[arm])
            num_steps = FIRST_STEPS + args.steps + 2 * config.train.steps_ahead
            config = replace(config, train=replace(config.train, num_steps=num_steps))
            rows.append({"arm": arm, **asyncio.run(_measured(config))})
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {"steps": args.steps, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    return "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(_line, result["rows"])])


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["arm"]]
    for name in TIMES:
        real, told = row["measured"][name], row["simulated"][name]
        span = f" ({min(row['all_step_s']):.2f} to {max(row['all_step_s']):.2f})" * (name == "step_s")
        cells += [f"{real:.2f}{span}", f"{told:.2f}", f"{told / real - 1:+.0%}"]
    return f"| {' | '.join(cells)} |"


async def _measured(config: Config) -> dict[str, Any]:
    """A run between two measurements of its engine, and the same simulated."""
    async with open_run(config) as run:
        services = [await _service(run)]
        while (groups := await run.collect()) is not None:
            metrics = await run.update(groups)
            run.record(groups, metrics, await run.publish())
        services.append(await _service(run))
        return compared(
            run.training.directory.path,
            services,
            num_servers=_num_servers(config.engine),
            token_px=run.policy.contract.unit_px,
            steps_ahead=config.train.steps_ahead,
        )


def _num_servers(engine: EngineConfig) -> int:
    return engine.num_servers if engine.kind == "sglang" else 1


async def _service(run: Run) -> ServiceTimes:
    servers, engine = run.config.engine.kind == "sglang", run.config.engine
    return await service_of(
        run.engine,
        run.policy.chat,
        frame_px=(HEIGHT_PX, WIDTH_PX),
        token_px=run.policy.contract.unit_px,
        repeats=PROBE_REPEATS,
        num_servers=_num_servers(engine),
        share=1 / len(os.sched_getaffinity(0)) if servers else 1.0,
        stride=1 if servers else EMBEDDED_STRIDE,
        prefixes=servers,
        max_running=engine.max_rows,
    )


def compared(
    run_dir: Path, services: Sequence[ServiceTimes], *, num_servers: int, token_px: int, steps_ahead: int = 0
) -> dict[str, Any]:
    """The steps of a log that count, beside those that are simulated with the mean of the services.

    Not the first and the last ones: beside them fewer than `steps_ahead` rollouts go on.
    """
    logged = list(load_jsonl(run_dir / METRICS_FILE))
    counted = slice(FIRST_STEPS + steps_ahead, len(logged) - steps_ahead)
    steps = logged[counted]
    real = {
        name: statistics.median(step[f"time/{name}"] for step in steps) for name in (*TIMES, "update_s", "publish_s")
    }
    files = sorted((run_dir / EPISODES_DIR).glob("*.jsonl"))[counted]
    scripts = [list(scripts_of(list(load_jsonl(file)), token_px)) for file in files]
    told = simulate(
        lambda step: scripts[step % len(scripts)],
        mean_service(services, real["publish_s"]),
        num_servers=num_servers,
        update_s=real["update_s"],
        steps_ahead=steps_ahead,
    )
    return {
        "measured": real,
        "all_step_s": [step["time/step_s"] for step in steps],
        "simulated": {name: getattr(told, name) for name in TIMES},
        "services": [asdict(one) for one in services],
    }


def mean_service(services: Sequence[ServiceTimes], publish_s: float) -> ServiceTimes:
    records = [asdict(service) for service in services]
    means = {key: statistics.mean(record[key] for record in records) for key in records[0] if key.endswith("_s")}
    return ServiceTimes(**records[0] | means | {"share": max(r["share"] for r in records), "publish_s": publish_s})


def scripts_of(records: Sequence[Mapping[str, Any]], token_px: int) -> Iterator[GroupScript]:
    """What the logged episodes of a step read and sampled, by group."""
    for visit, members in groupby(records, lambda record: record["visit"]):
        episodes = list(members)
        prompt = episodes[0]["segments"][0]
        turns = tuple(tuple(_turns(f"{visit}", episode, token_px)) for episode in episodes)
        yield GroupScript(f"{visit}", _num_tokens(prompt, token_px), _num_frames(prompt), turns)


def _turns(group: str, record: Mapping[str, Any], token_px: int) -> Iterator[TurnScript]:
    sampled = np.concatenate([np.full(len(one["ids"]), one["kind"] == "sampled") for one in record["segments"]])
    read_to = len(record["segments"][0]["ids"])
    for turn in record["turns"]:
        end = turn["token_span"][1]
        num_sampled = int(sampled[read_to:end].sum())
        calls = tuple(_call(group, call, token_px) for call in turn["calls"] if call["segments"])
        yield TurnScript(num_sampled, end - read_to - num_sampled, calls)
        read_to = end


def _call(group: str, record: Mapping[str, Any], token_px: int) -> CallScript:
    prompt, *said = record["segments"]
    report = sum(len(segment["ids"]) for segment in said if segment["kind"] == "sampled")
    return CallScript(f"{group} {record['window_s']}", _num_tokens(prompt, token_px), _num_frames(prompt), report)


def _num_frames(prompt: Mapping[str, Any]) -> int:
    return len(prompt.get("pictures", ()))


def _num_tokens(prompt: Mapping[str, Any], token_px: int) -> int:
    """With what shows its pictures, each of which is one id."""
    sizes_px = [picture["size_px"] for picture in prompt.get("pictures", ())]
    shown = sum(height * width // token_px**2 for height, width in sizes_px)
    return len(prompt["ids"]) - _num_frames(prompt) + shown
