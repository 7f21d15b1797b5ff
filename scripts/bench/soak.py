"""The smoke run for hours, or a service of its model: whether memory, files, threads and seconds stay where they were.

Calls are forced on the random model, so every episode has sub-agents; updates, publishes and checkpoints are those of
any run. A service answers some clients at a time, of whom some leave before their answer. What the processes take is
written to OUT/samples.jsonl and drawn in the end; what grows beyond its bound or stays behind is a violation.
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
from paravt_jax.run.log import METRICS_FILE, load_jsonl, whole_file
from paravt_jax.run.plots import BLUE, GREEN, NEUTRAL, ORANGE, STYLE
from rollout.supervisor import SHARED_MEMORY
from scripts.bench.chaos import left_in_memory
from scripts.bench.smoke_run import ROOT, family, num_steps, taken_by_role, trainer_command

SAMPLE_EVERY_S = 5.0
WARM_FRAC, WINDOW_FRAC = 0.1, 0.2  # of all samples: left out at the beginning, compared at each end of the rest
STOP_S = 180.0  # for the step to end and its checkpoint to be written
GONE_S = 30.0  # for what belonged to the run to end after it
SHOWN_LINES, SHOWN_BYTES = 15, 300  # of what failed
BUSY = (429, 503)  # too many questions, or stopping
STOPPED = (0, 128 + signal.SIGTERM)
# What each may grow to from the first window to the last: a factor, and so much more. In two hours medians grew by 7 %
# at most; a leak of 1 MiB a step would be 360 MiB.
GROWTH = {"memory_mib": (1.15, 32.0), "files": (1.0, 8.0), "threads": (1.0, 8.0)}
CLIENTS, LEAVES_EVERY, LEAVES_AFTER_S, ANSWER_S = 3, 5, 0.3, 120.0  # of a service
STEPS_TOGETHER = 10  # whose CPU seconds are measured as one, since samples are seconds apart
COLOURS = {"trainer": BLUE, "servers": ORANGE, "decoders": GREEN}
STEP_S, CPU_S = "seconds of a step", "CPU seconds of a step"
LABELS = {"memory_mib": "memory, MiB", "files": "open files", "threads": "threads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=120, help="default 120")
    parser.add_argument("--engine", choices=["jax", "sglang"], default="jax", help="what samples (default jax)")
    parser.add_argument("--serve", action="store_true", help="a service under load in place of a run, by --engine jax")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), metavar="DIR", help="default runs/soak")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes} must be greater than 0")
    check_local(args.out)
    out, run_dir = args.out.absolute(), args.out.absolute() / "run"
    if run_dir.exists():
        raise ValueError(f"{run_dir} is there already; move it away, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    if args.serve and args.engine != "jax":
        raise ValueError(f"--serve samples by --engine jax, got --engine {args.engine}")
    samples, violations = _serving(args, out, run_dir) if args.serve else _training(args, out, run_dir)
    rows = load_jsonl(run_dir / METRICS_FILE)
    series = _series(samples, _seconds_each(samples) if args.serve else [step["time/step_s"] for step in rows])
    _draw(samples, series, args, out / "soak.png")
    rows = [{"of": name, **_ends(values)} for name, values in series.items()]
    return {
        "engine": args.engine,
        "serve": args.serve,
        "minutes": args.minutes,
        "steps": samples[-1]["steps"] if samples else 0,
        "rows": rows,
        "violations": [*violations, *grown(rows)],
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
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
    """What takes more at the end than its bound allows."""
    bounds = {f"{LABELS[name]}, {role}": bound for name, bound in GROWTH.items() for role in COLOURS}
    return [
        f"{row['of']} grew from {row['begin']:.4g} to {row['end']:.4g}"
        for row in rows
        if row["of"] in bounds and row["end"] > bounds[row["of"]][0] * row["begin"] + bounds[row["of"]][1]
    ]


def _training(args: argparse.Namespace, out: Path, run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    settings = (f"engine.kind={args.engine}", "engine.num_servers=2", "checkpoint.every_steps=10")
    return soak(trainer_command(run_dir, settings), out, args.minutes * 60, lambda: num_steps(run_dir))


def _serving(args: argparse.Namespace, out: Path, run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The policy of one step of the smoke run, asked by some clients at a time."""
    settings = ("engine.kind=jax", "train.num_steps=1")
    subprocess.run(trainer_command(run_dir, settings), cwd=ROOT, check=True)
    video = json.loads(make_synthetic(out / "data").read_text().splitlines()[0])["videos"][0]["video"]
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
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
    """Asks again and again, once the service listens; every few questions it leaves before the answer."""
    question = {"type": "text", "text": "What colour is it? A. red B. blue"}
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
        except OSError as problem:  # it has left, or the service does not listen yet, or is busy
            if isinstance(problem, urllib.error.HTTPError) and problem.code not in BUSY:
                failed.append(f"the service answered {problem.code}: {problem.read()[:SHOWN_BYTES]!r}")
            over.wait(LEAVES_AFTER_S)


def soak(
    command: Sequence[str], out: Path, seconds: float, count: Callable[[], int]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What a command takes, every few seconds from the first that it counts on, until it is stopped; what it leaves.

    It works in a directory of its own, where it has nothing to write, like in the one for temporary files.
    """
    log, samples, outside, in_memory = out / "soak.log", [], out / "outside", set(SHARED_MEMORY.iterdir())
    (outside / "tmp").mkdir(parents=True)
    environment = os.environ | {"TMPDIR": str(outside / "tmp")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=outside, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    began_s = time.monotonic()
    try:
        with (out / "samples.jsonl").open("w") as file, Meter("soaking", int(seconds), "second") as meter:
            while (now_s := time.monotonic() - began_s) < seconds:
                if process.poll() is not None:
                    raise RuntimeError(f"{_called(command)} ended with {process.returncode}: {_last_lines(log)}")
                if steps := count():
                    usage = {role: taken._asdict() for role, taken in taken_by_role(process.pid).items()}
                    samples.append({"seconds": now_s, "steps": steps, **usage})
                    file.write(json.dumps(samples[-1]) + "\n")
                    file.flush()
                meter.at(int(now_s))
                time.sleep(SAMPLE_EVERY_S)
        violations = _stop(process, _called(command), log)
    finally:
        process.kill()  # its servers and decoders end with it
        process.wait()
    stray = [path.relative_to(outside) for path in outside.rglob("*") if path != outside / "tmp"]
    violations += [f"left outside of its directory: {path}" for path in sorted(stray)]
    return samples, violations + [f"left in {SHARED_MEMORY}: {name}" for name in sorted(left_in_memory(in_memory))]


def _stop(process: subprocess.Popen[bytes], name: str, log: Path) -> list[str]:
    """As a user does, and nothing of it may stay."""
    processes = family(process.pid)
    process.send_signal(signal.SIGTERM)
    code = process.wait(STOP_S)
    violations = [] if code in STOPPED else [f"{name} ended with exit code {code}: {_last_lines(log)}"]
    give_up_s = time.monotonic() + GONE_S
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > give_up_s:
            return [*violations, f"processes {left} are still there {GONE_S:g} s after it ended"]
        time.sleep(0.1)
    return violations


def _called(command: Sequence[str]) -> str:
    return command[command.index("-m") + 1] if "-m" in command else command[0]


def _series(samples: Sequence[dict[str, Any]], step_s: Sequence[float]) -> dict[str, list[float]]:
    of_roles = {
        f"{label}, {role}": [sample[role][name] for sample in samples if role in sample]
        for name, label in LABELS.items()
        for role in COLOURS
    }
    series = of_roles | {STEP_S: list(step_s), CPU_S: _cpu_s(samples)}
    return {name: values for name, values in series.items() if values}


def _seconds_each(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Of an answer, between two samples."""
    pairs = itertools.pairwise(samples)
    return [
        (after["seconds"] - before["seconds"]) / steps
        for before, after in pairs
        if (steps := after["steps"] - before["steps"])
    ]


def _cpu_s(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Of a step, whichever process took them: unlike seconds they hardly change beside other work."""
    taken, begin = [], samples[0] if samples else {}
    for sample in samples:
        if (steps := sample["steps"] - begin["steps"]) >= STEPS_TOGETHER:
            cpu_s = [sum(at[role]["cpu_s"] for role in COLOURS if role in at) for at in (begin, sample)]
            taken.append((cpu_s[1] - cpu_s[0]) / steps)
            begin = sample
    return taken


def _ends(values: Sequence[float]) -> dict[str, float]:
    """Medians at both ends, once the beginning is over: programs are compiled and caches filled."""
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
            for role, colour in COLOURS.items():
                if present := [sample for sample in samples if role in sample]:
                    minutes = [sample["seconds"] / 60 for sample in present]
                    panel.plot(minutes, [sample[role][name] for sample in present], color=colour, label=role)
            panel.set(title=label, xlabel="minutes", ylim=(0, None))
        panels[0].legend(frameon=False)
        panels[-1].plot(series[STEP_S], color=NEUTRAL, linewidth=0.6)
        panels[-1].set(title=STEP_S, xlabel="step", ylim=(0, None))
        what = "A service of the smoke run's model" if args.serve else "The smoke run"
        figure.suptitle(f"{what} with the {args.engine} engine for {args.minutes:g} minutes", x=0.01, ha="left")
        with whole_file(path) as file:
            figure.savefig(file, format="png")


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
