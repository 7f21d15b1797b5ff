"""A run and a checkpoint on 1, 2 and 4 processes of this machine; publishing to servers, compared with a copy.

All runs have the same settings, seed and devices, but the devices belong to a different number of processes. With
--engine jax the learner samples, so every run has the same episodes and is compared with the first run. With --engine
sglang all processes share real servers, which sample at random, so every run is compared with its replay on one
process. Then all processes save and restore a learner's state, and weights go to receivers or to real servers.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, base_checksum, new_adapter
from model_port.config import LoraConfig, ModelConfig
from model_port.layout import HF_DIR
from model_port.model import VLModel
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.terminal import say
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.learner.learner import LANGUAGE
from paravt_jax.rl.replay import OF_THE_MACHINE
from paravt_jax.run.log import METRICS_FILE, load_jsonl
from paravt_jax.sampling.weights import AdapterWeights, ModelWeights
from rollout.engine.protocol import Weights
from scripts.bench import shared_checkpoint
from scripts.bench.checkpoint import WIDTH, sized_model
from scripts.bench.convert import peak_rss_bytes
from scripts.bench.publishing import By, publish_times, receivers
from scripts.bench.smoke_run import CONFIG, ROOT

SETTINGS = (  # short rows: an update of the smoke run takes ten times as long as its rollout
    "rollout.prompts.system=Call crop_video.",
    "rollout.prompts.system_has_tools=true",
    "rollout.prompts.with_tool=Look, or answer.",
    "rollout.max_new_tokens=16",
    "video.frame_budgets=[3,4]",
    "video.max_pixels=6144",
    "train.prompts_per_step=4",
    "train.group_size=4",
    "advantage.filter_zero_variance=false",  # a random model rarely differs from itself
    "optim.learning_rate=1e-5",  # without differing rewards, Adam follows noise
    "data.validation=",
    "checkpoint.every_steps=1000000",  # saves only at the end
)
TRAIN = (sys.executable, "-m", "paravt_jax.train")
SERVE = (sys.executable, "-m", "rollout.serve")
ALONE = ("hosts.coordinator=", "hosts.num=1", "hosts.index=0")
FIRST_STEPS = 2  # a run's first steps compile and are not counted
TIMES = ("step_s", "rollout_s", "update_s", "publish_s")
SMALL = 1e-3  # metrics below this value are compared absolutely
LOOK_EVERY_S = 0.2
SHOWN_LINES = 15  # lines of a failed run's log to print
STOP_S = 10.0  # time for a server to stop
FLOAT32 = np.dtype(np.float32)
MIB = 2**20
RANK = 16  # of adapters
VISION = Qwen3VisionConfig(12, 640, 2560, 10, WIDTH, (0,), num_positions=256)  # a fifth of 1280 MiB, as in the 2B


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--engine",
        choices=["jax", "sglang"],
        default="jax",
        help="engine of the runs; sglang starts real servers (default jax)",
    )
    add("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="processes per run (default 1 2 4)")
    add("--steps", type=int, default=4, help=f"steps per run, after {FIRST_STEPS} that compile (default 4)")
    add("--servers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="servers to publish to (default 1 2 4)")
    add("--mib", type=int, default=320, help="approximate size of saved and published weights (default 320)")
    add(
        "--weights",
        nargs="+",
        default=["all"],
        choices=["all", "merged", "adapter"],
        help=f"what is published: all weights, or a LoRA run's weights of rank {RANK}, merged or alone (default all)",
    )
    add("--repeats", type=int, default=5, help="publishes; the median is reported (default 5)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("processes", "steps", "servers", "mib", "repeats"):
        if np.min(getattr(args, name)) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        return {
            "engine": args.engine,
            "runs": _runs(args, Path(folder)),
            "checkpoints": _checkpoints(args, Path(folder)),
            "publishes": _publishes(args, Path(folder)),
        }


def table(result: dict[str, Any]) -> str:
    """Formats the result as three Markdown tables."""
    head = "| processes | step s | rollout s | update s | publish s | peak MiB | largest difference |"
    lines = [head, "|---" * 7 + "|", *map(_run_line, result["runs"]), ""]
    lines += ["| processes | share, MiB | peak while saving | peak while restoring | seconds to save, to restore |"]
    lines += ["|---" * 5 + "|", *map(_checkpoint_line, result["checkpoints"]), ""]
    head = "| weights | servers | by | MiB | sent MiB | publish s | paused s | copy s | publish / copy |"
    lines += [head, "|---" * 9 + "|"]
    return "\n".join([*lines, *map(_publish_line, result["publishes"])])


def _run_line(row: Mapping[str, Any]) -> str:
    times = " | ".join(f"{row[name]:.2f}" for name in TIMES)
    return (
        f"| {row['processes']} | {times} | {max(row['peaks_mib']):.0f} | {row['differ_by']:.1e}, {row['differ_in']} |"
    )


def _checkpoint_line(row: Mapping[str, Any]) -> str:
    sizes = " | ".join(f"{row[name]:.0f}" for name in ("share_mib", "saving_mib", "restoring_mib"))
    return f"| {row['processes']} | {sizes} | {row['save_s']:.1f}, {row['restore_s']:.1f} |"


def _publish_line(row: Mapping[str, Any]) -> str:
    times = " | ".join(f"{row[name]:.2f}" for name in ("publish_s", "paused_s", "copy_s"))
    ratio = row["publish_s"] / row["copy_s"]
    sizes = f"{row['mib']} | {row['sent_mib']:.0f}"
    return f"| {row['weights']} | {row['servers']} | {row['by']} | {sizes} | {times} | {ratio:.2f} |"


def _runs(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Trains with each number of processes; the total number of devices is divisible by all of them."""
    num_devices, rows = math.lcm(*args.processes), []
    settings = [*SETTINGS, f"mesh.fsdp={num_devices}", f"pack.num_rows={num_devices}"]
    settings.append(f"train.num_steps={FIRST_STEPS + args.steps}")
    real = args.engine == "sglang"
    with served(folder / "tiny", tiny_config(), max(args.servers) if real else 0) as urls:
        settings += [f"engine.kind={args.engine}", f"engine.urls=[{','.join(urls)}]"]
        settings += [f"model.path={folder / 'tiny'}"]
        for num in args.processes:
            say(f"a run on {num} process{'es' * (num > 1)}")
            run_dir, replay_dir = folder / f"of{num}", folder / f"replay{num}"
            peaks_mib = trained(train_command(run_dir, settings), run_dir, num, num_devices)
            if real:
                say("its replay on one")
                trained(replay_command(run_dir, replay_dir), replay_dir, 1, num_devices)
            reference = replay_dir if real else folder / f"of{args.processes[0]}"
            rows.append({"processes": num, "peaks_mib": peaks_mib, **measured_in(run_dir, reference)})
            say(_run_line(rows[-1]))
    return rows


def _checkpoints(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Saves and restores a learner's state with each number of processes. Returns maxima over processes."""
    num_devices, rows = math.lcm(*args.processes), []
    for num in args.processes:
        directory = folder / f"saved{num}"
        make_tiny(directory / HF_DIR)
        command = [sys.executable, "-m", shared_checkpoint.__name__, str(directory), str(args.mib), str(num_devices)]
        address = f"127.0.0.1:{free_port()}" if num > 1 else ""
        each = [[*command, address, str(num), str(index)] for index in range(num)]
        log = directory.with_suffix(".log")
        run_all(each, log, num_devices)
        results = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        rows.append({"processes": num, **{name: max(result[name] for result in results) for name in results[0]}})
        shutil.rmtree(directory)
        say(_checkpoint_line(rows[-1]))
    return rows


def _publishes(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Publishes a model with a frozen vision tower to each number of servers."""
    config = replace(sized_model(args.mib * MIB / FLOAT32.itemsize), vision=VISION)
    real = args.engine == "sglang"
    rows = []
    with served(folder / "large", config, max(args.servers) if real else 0) as urls:
        model = model_port.load(folder / "large", "float32")
        for num in sorted(args.servers, reverse=True):  # all servers of an engine must start with the same version
            for weights in args.weights:
                versions = two_versions(weights, model)
                for by in get_args(By):
                    times = asyncio.run(_publish(urls[:num], num, versions, args.repeats, by))
                    row = {"weights": weights, "servers": num, "by": by, "mib": versions[0].num_bytes // MIB}
                    rows.append(row | times)
                    say(_publish_line(rows[-1]))
    return rows


def two_versions(weights: str, model: VLModel) -> list[Weights]:
    """Returns two versions that differ in every language tensor: all weights, or adapters, merged or alone."""
    if weights == "all":
        return [ModelWeights(model, FLOAT32), ModelWeights(updated(model), FLOAT32)]
    lora = LoraConfig(rank=RANK)
    adapted = [nnx.clone(model) for _ in range(2)]
    for seed, version in enumerate(adapted):
        pairs = new_adapter(model.config, lora, seed)
        random = np.random.default_rng(seed)
        add_adapter(version, lora, {path: random.random(pair.shape, np.float32) for path, pair in pairs.items()})
    if weights == "merged":
        return [ModelWeights(version, FLOAT32) for version in adapted]
    info = AdapterInfo(lora, AdapterBase("large", "float32", base_checksum(model, "float32")))
    return [AdapterWeights(version, info) for version in adapted]


def updated(model: VLModel) -> VLModel:
    """Returns another version of the model that differs in every language tensor."""
    graphdef, language, frozen = nnx.split(model, LANGUAGE, ...)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf * 1.01, language), frozen)


async def _publish(
    urls: Sequence[str], num: int, versions: Sequence[Weights], repeats: int, by: By
) -> dict[str, float]:
    if urls:
        return await publish_times(urls, versions, repeats, by)
    async with receivers(num, 2 * versions[0].num_bytes) as pretended:  # room for the files' headers
        return await publish_times(pretended, versions, repeats, by)


@contextmanager
def served(model: Path, config: ModelConfig, num: int) -> Iterator[list[str]]:
    """Writes a model to a directory and yields the URLs of `num` real CPU servers for it."""
    make_tiny(model, config=config)
    if num:
        say(f"starting {num} real servers")
    command = [*SERVE, "--model", str(model), "--context-length", "2048", "--grace-s", str(STOP_S), "--json"]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(num)]
    try:
        yield [_url(server) for server in servers]
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def trained(command: Sequence[str], run_dir: Path, num: int, num_devices: int) -> list[float]:
    """Runs a trainer on `num` processes to its end. Returns their peak memory in MiB."""
    joint = [f"hosts.coordinator=127.0.0.1:{free_port()}", f"hosts.num={num}"] if num > 1 else []
    each = [[*command, *joint, *([f"hosts.index={index}"] * (num > 1))] for index in range(num)]
    return run_all(each, run_dir.with_suffix(".log"), num_devices)


def run_all(commands: Sequence[Sequence[str]], log: Path, num_devices: int) -> list[float]:
    """Runs processes that share the devices to their end. Returns their peak memory in MiB."""
    num = len(commands)
    flags = with_devices(os.environ.get("XLA_FLAGS", ""), num_devices // num)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    peaks_mib = [0.0] * num
    with log.open("wb") as output:
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            for command in commands
        ]
    try:
        while (codes := [process.poll() for process in processes]) != [0] * num:
            if any(codes):
                lines = " | ".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
                raise RuntimeError(f"{log.stem}: processes ended with exit codes {codes}: {lines}")
            now_mib = (peak_rss_bytes(process.pid) / MIB for process in processes)
            peaks_mib = [max(*both) for both in zip(peaks_mib, now_mib, strict=True)]
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return peaks_mib


def train_command(run_dir: Path, settings: Sequence[str]) -> list[str]:
    return [*TRAIN, "--config", str(CONFIG), f"run_dir={run_dir}", *settings]


def replay_command(run_dir: Path, replay_dir: Path) -> list[str]:
    """Returns the command that replays a run's log on one process."""
    return [*TRAIN, "--replay", str(run_dir), f"run_dir={replay_dir}", *ALONE]


def measured_in(run_dir: Path, reference: Path) -> dict[str, Any]:
    """Returns a run's median step times, and the largest difference of its metrics from a reference run."""
    steps, reference_steps = (list(load_jsonl(directory / METRICS_FILE)) for directory in (run_dir, reference))
    times = {name: statistics.median(step[f"time/{name}"] for step in steps[FIRST_STEPS:]) for name in TIMES}
    differ_by, differ_in = largest_difference(steps, reference_steps)
    return {**times, "differ_by": differ_by, "differ_in": differ_in}


def largest_difference(steps: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Returns the largest relative difference between the metrics of two runs, and the metric's name."""
    largest = (0.0, "none")
    for ours, theirs in zip(steps, reference, strict=True):
        for key in sorted({*ours, *theirs}):
            if not key.startswith(OF_THE_MACHINE):
                largest = max(largest, (difference(ours.get(key), theirs.get(key)), key), key=lambda pair: pair[0])
    return largest


def difference(ours: float | None, theirs: float | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    relative = abs(ours - theirs) / max(abs(ours), abs(theirs), SMALL)
    return math.inf if math.isnan(relative) else relative


def with_devices(flags: str, num: int) -> str:
    """Adds `num` CPU devices to XLA's flags."""
    own = [flag for flag in flags.split() if "device_count" not in flag]
    return " ".join([*own, f"--xla_force_host_platform_device_count={num}"])


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    if not (line := server.stdout.readline()):
        raise RuntimeError("a server did not start; its error is above")
    return json.loads(line)["url"]
