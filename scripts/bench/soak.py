"""Runs the smoke run or a service for hours, to check that memory, files, threads and step time do not grow.

The random model's calls are forced, so every episode has sub-agents; updates, publishes and checkpoints are real. A
service answers several clients, some of which disconnect early. Resource usage goes to OUT/samples.jsonl and a plot.
Growth beyond a bound, and anything left behind, is a violation.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from model_port.layout import CHECKPOINTS_DIR
from model_port.output_dir import check_local
from model_port.progress import Meter
from paravt_jax.data.synthetic import make_synthetic
from paravt_jax.run.charts import COLORS
from paravt_jax.run.log import METRICS_FILE, load_jsonl, whole_file
from paravt_jax.run.plots import STYLE
from rollout.supervisor import SHARED_MEMORY
from scripts.bench.chaos import left_in_memory
from scripts.bench.smoke_run import ROOT, family, num_steps, trainer_command, usage_by_role

LOG_FILE, OUTSIDE = "soak.log", "outside"
SAMPLE_EVERY_S = 5.0
WARM_FRAC, WINDOW_FRAC = 0.1, 0.2  # fractions of all samples: dropped at the start; compared at both ends of the rest
STOP_S = 180.0  # time to finish the step and write its checkpoint
GONE_S = 30.0  # time for all the run's processes to exit
SHOWN_LINES, SHOWN_BYTES = 15, 300  # how much of a failed command's output is printed
BUSY = (429, 503)  # too many requests, or stopping
STOPPED = (0, 128 + signal.SIGTERM)
# Maximum growth from the first to the last window: a factor and an offset. In two hours medians grew by at most 7 %; a
# leak of 1 MiB a step would be 360 MiB.
GROWTH = {"memory_mib": (1.15, 32.0), "files": (1.0, 8.0), "threads": (1.0, 8.0)}
CLIENTS, LEAVES_EVERY, LEAVES_AFTER_S, ANSWER_S = 3, 5, 0.3, 120.0  # for a service's clients
STEPS_TOGETHER = 10  # window for CPU seconds, because samples are seconds apart
ROLE_COLORS = {"trainer": COLORS["blue"], "servers": COLORS["orange"], "decoders": COLORS["green"]}
STEP_S, CPU_S = "seconds of a step", "CPU seconds of a step"
LABELS = {"memory_mib": "memory, MiB", "files": "open files", "threads": "threads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=120, help="duration (default 120)")
    parser.add_argument("--engine", choices=["jax", "sglang"], default="jax", help="engine of the run (default jax)")
    parser.add_argument("--serve", action="store_true", help="test a service instead of a run (--engine jax only)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/soak"), metavar="DIR", help="output directory (default runs/soak)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes} must be greater than 0")
    check_local(args.out)
    out, run_dir = args.out.absolute(), args.out.absolute() / "run"
    if run_dir.exists() or (out / OUTSIDE).exists():
        raise ValueError(f"{args.out} has an earlier soak; move it away, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    if args.serve and args.engine != "jax":
        raise ValueError(f"--serve needs --engine jax, got --engine {args.engine}")
    samples, violations = _serving(args, out, run_dir) if args.serve else _training(args, out, run_dir)
    if not samples:
        raise RuntimeError(f"no step in {args.minutes:g} minutes, see {out / LOG_FILE}; use more --minutes")
    rows = load_jsonl(run_dir / METRICS_FILE)
    series = _series(samples, _seconds_each(samples) if args.serve else [step["time/step_s"] for step in rows])
    _draw(samples, series, args, out / "soak.png")
    rows = [{"of": name, **_ends(values)} for name, values in series.items()]
    return {
        "engine": args.engine,
        "serve": args.serve,
        "minutes": args.minutes,
        "steps": samples[-1]["steps"],
        "rows": rows,
        "violations": [*violations, *grown(rows)],
    }


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    counted = "answers" if result["serve"] else "steps"
    lines = [
        f"{result['engine']}: {result['steps']} {counted} in {result['minutes']:g} minutes",
        "",
        "| | begin | end | end / begin | most |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio = row["end"] / row["begin"] if row["begin"] else float("nan")
        lines.append(f"| {row['of']} | {row['begin']:.4g} | {row['end']:.4g} | {ratio:.3f} | {row['most']:.4g} |")
    return "\n".join([*lines, *(f"\nVIOLATION {violation}" for violation in result["violations"])])


def grown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists quantities that grew beyond their bound."""
    bounds = {f"{LABELS[name]}, {role}": bound for name, bound in GROWTH.items() for role in ROLE_COLORS}
    return [
        f"{row['of']} grew from {row['begin']:.4g} to {row['end']:.4g}"
        for row in rows
        if row["of"] in bounds and row["end"] > bounds[row["of"]][0] * row["begin"] + bounds[row["of"]][1]
    ]


def _training(args: argparse.Namespace, out: Path, run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    settings = (f"engine.kind={args.engine}", "engine.num_servers=2", "checkpoint.every_steps=10")
    return soak(trainer_command(run_dir, settings), out, args.minutes * 60, lambda: num_steps(run_dir))


def _serving(args: argparse.Namespace, out: Path, run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Serves the policy after one step of the smoke run to several clients."""
    settings = ("engine.kind=jax", "train.num_steps=1")
    subprocess.run(trainer_command(run_dir, settings), cwd=ROOT, check=True)
    video = json.loads(make_synthetic(out / "data").read_text().splitlines()[0])["videos"][0]["video"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    model, over = run_dir / CHECKPOINTS_DIR / "1", threading.Event()
    answered, failed = list[float](), list[str]()
    command = [sys.executable, "-m", "paravt_jax.serve", "--model", str(model), "--port", str(port)]
    clients = [
        threading.Thread(
            target=_ask, args=(f"http://127.0.0.1:{port}/v1", Path(video).name, number, answered, failed, over)
        )
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        command += ["--video-root", str(out / "data" / "videos")]
        samples, violations = soak(command, out, args.minutes * 60, lambda: len(answered))
    finally:
        over.set()
        for client in clients:
            client.join()
    return samples, violations + sorted(set(failed))


def _ask(url: str, video: str, number: int, answered: list[float], failed: list[str], over: threading.Event) -> None:
    """Sends requests while the service listens; disconnects early from every few of them."""
    question = {"type": "text", "text": "What color is it? A. red B. blue"}
    parts = [{"type": "video_url", "video_url": {"url": video}}, question]
    for turn in itertools.count(number):
        if over.is_set():
            return
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=ANSWER_S) as listed:
                model = json.load(listed)["data"][0]["id"]
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": parts}]}).encode()
            request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=ANSWER_S if turn % LEAVES_EVERY else LEAVES_AFTER_S) as answer:
                json.load(answer)
            answered.append(time.monotonic())
        except OSError as problem:  # disconnected, not listening yet, or busy
            if isinstance(problem, urllib.error.HTTPError) and problem.code not in BUSY:
                failed.append(f"the service answered {problem.code}: {problem.read()[:SHOWN_BYTES]!r}")
            over.wait(LEAVES_AFTER_S)


def soak(
    command: Sequence[str], out: Path, seconds: float, count: Callable[[], int]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Samples a command's resource usage once `count` is positive, stops it, and lists leftover processes and files.

    Its working directory and temporary directory are empty, and must stay so.
    """
    log, samples, outside, in_memory = out / LOG_FILE, [], out / OUTSIDE, set(SHARED_MEMORY.iterdir())
    (outside / "tmp").mkdir(parents=True)
    environment = os.environ | {"TMPDIR": str(outside / "tmp")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=outside, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    start_s = time.monotonic()
    try:
        with (out / "samples.jsonl").open("w") as file, Meter("soaking", int(seconds), "second") as meter:
            while (now_s := time.monotonic() - start_s) < seconds:
                if process.poll() is not None:
                    raise RuntimeError(f"{_name_of(command)} ended with {process.returncode}: {_last_lines(log)}")
                if steps := count():
                    usage = {role: used._asdict() for role, used in usage_by_role(process.pid).items()}
                    samples.append({"seconds": now_s, "steps": steps, **usage})
                    file.write(json.dumps(samples[-1]) + "\n")
                    file.flush()
                meter.at(int(now_s))
                time.sleep(SAMPLE_EVERY_S)
        violations = _stop(process, _name_of(command), log)
    finally:
        process.kill()  # stops its servers and decoders
        process.wait()
    stray = [path.relative_to(outside) for path in outside.rglob("*") if path != outside / "tmp"]
    violations += [f"left outside of its directory: {path}" for path in sorted(stray)]
    return samples, violations + [f"left in {SHARED_MEMORY}: {name}" for name in sorted(left_in_memory(in_memory))]


def _stop(process: subprocess.Popen[bytes], name: str, log: Path) -> list[str]:
    """Stops the command as a user does; no process may remain."""
    processes = family(process.pid)
    process.send_signal(signal.SIGTERM)
    code = process.wait(STOP_S)
    violations = [] if code in STOPPED else [f"{name} ended with exit code {code}: {_last_lines(log)}"]
    give_up_s = time.monotonic() + GONE_S
    while remaining := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > give_up_s:
            return [*violations, f"processes {remaining} still run {GONE_S:g} s after it ended"]
        time.sleep(0.1)
    return violations


def _name_of(command: Sequence[str]) -> str:
    return command[command.index("-m") + 1] if "-m" in command else command[0]


def _series(samples: Sequence[dict[str, Any]], step_s: Sequence[float]) -> dict[str, list[float]]:
    by_role = {
        f"{label}, {role}": [sample[role][name] for sample in samples if role in sample]
        for name, label in LABELS.items()
        for role in ROLE_COLORS
    }
    series = by_role | {STEP_S: list(step_s), CPU_S: _cpu_s(samples)}
    return {name: values for name, values in series.items() if values}


def _seconds_each(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the seconds per answer between samples."""
    pairs = itertools.pairwise(samples)
    return [
        (after["seconds"] - earlier["seconds"]) / steps
        for earlier, after in pairs
        if (steps := after["steps"] - earlier["steps"])
    ]


def _cpu_s(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Returns CPU seconds per step over all processes; unlike seconds, they hardly depend on other load."""
    per_step, begin = [], samples[0]
    for sample in samples:
        if (steps := sample["steps"] - begin["steps"]) >= STEPS_TOGETHER:
            cpu_s = [sum(at[role]["cpu_s"] for role in ROLE_COLORS if role in at) for at in (begin, sample)]
            per_step.append((cpu_s[1] - cpu_s[0]) / steps)
            begin = sample
    return per_step


def _ends(values: Sequence[float]) -> dict[str, float]:
    """Returns medians at both ends, without the start, when programs compile and caches fill."""
    warm = values[int(WARM_FRAC * len(values)) :]
    window = max(1, int(WINDOW_FRAC * len(values)))
    return {"begin": statistics.median(warm[:window]), "end": statistics.median(warm[-window:]), "most": max(warm)}


def _draw(
    samples: Sequence[dict[str, Any]], series: dict[str, list[float]], args: argparse.Namespace, path: Path
) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7))
        panels = figure.subplots(2, 2).ravel()
        for panel, (name, label) in zip(panels, LABELS.items(), strict=False):
            for role, color in ROLE_COLORS.items():
                if present := [sample for sample in samples if role in sample]:
                    minutes = [sample["seconds"] / 60 for sample in present]
                    panel.plot(minutes, [sample[role][name] for sample in present], color=color, label=role)
            panel.set(title=label, xlabel="minutes", ylim=(0, None))
        panels[0].legend(frameon=False)
        panels[-1].plot(series.get(STEP_S, []), color=COLORS["neutral"], linewidth=0.6)
        panels[-1].set(title=STEP_S, xlabel="step", ylim=(0, None))
        name = "A service of the smoke run's model" if args.serve else "The smoke run"
        figure.suptitle(f"{name} with the {args.engine} engine for {args.minutes:g} minutes", x=0.01, ha="left")
        with whole_file(path) as file:
            figure.savefig(file, format="png")


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
