"""The smoke run for hours: whether memory, open files, threads and the time of a step stay where they were.

Calls are forced on the random model, so every episode has sub-agents; updates, publishes and checkpoints are those of
any run. What its processes take is written to OUT/samples.jsonl while it runs, and drawn in the end.
"""

import argparse
import json
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from model_port.output_dir import check_local
from model_port.progress import Meter
from paravt_jax.bench.smoke_run import ROOT, family, num_steps, taken_by_role, trainer_command
from paravt_jax.run.log import METRICS_FILE, load_jsonl, whole_file
from paravt_jax.run.plots import BLUE, GREEN, NEUTRAL, ORANGE, STYLE

SAMPLE_EVERY_S = 5.0
WARM_FRAC, WINDOW_FRAC = 0.1, 0.2  # of all samples: left out at the beginning, compared at each end of the rest
STOP_S = 180.0  # for the step to end and its checkpoint to be written
GONE_S = 30.0  # for what belonged to the run to end after it
SHOWN_LINES = 15  # of a trainer that failed
STEPS_TOGETHER = 10  # whose CPU seconds are measured as one, since samples are seconds apart
COLOURS = {"trainer": BLUE, "servers": ORANGE, "decoders": GREEN}
STEP_S, CPU_S = "seconds of a step", "CPU seconds of a step"
LABELS = {"memory_mib": "memory, MiB", "files": "open files", "threads": "threads"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=120, help="default 120")
    parser.add_argument("--engine", choices=["jax", "sglang"], default="jax", help="what samples (default jax)")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), metavar="DIR", help="default runs/soak")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes} must be greater than 0")
    check_local(args.out)
    out, run_dir = args.out.absolute(), args.out.absolute() / "run"
    if run_dir.exists():
        raise ValueError(f"{run_dir} is there already; move it away, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    samples = _soak(args, out, run_dir)
    series = _series(samples, [step["time/step_s"] for step in load_jsonl(run_dir / METRICS_FILE)])
    _draw(samples, series, args, out / "soak.png")
    rows = [{"of": name, **_ends(values)} for name, values in series.items()]
    return {"engine": args.engine, "minutes": args.minutes, "steps": len(series[STEP_S]), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        f"{result['engine']}: {result['steps']} steps in {result['minutes']:g} minutes",
        "",
        "| | begin | end | end / begin | most |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio = row["end"] / row["begin"] if row["begin"] else float("nan")
        lines.append(f"| {row['of']} | {row['begin']:.4g} | {row['end']:.4g} | {ratio:.3f} | {row['most']:.4g} |")
    return "\n".join(lines)


def _soak(args: argparse.Namespace, out: Path, run_dir: Path) -> list[dict[str, Any]]:
    """What the run takes, every few seconds from its first step on."""
    settings = (f"engine.kind={args.engine}", "engine.num_servers=2", "checkpoint.every_steps=10")
    log, samples = out / "trainer.log", []
    with log.open("ab") as output:
        trainer = subprocess.Popen(
            trainer_command(run_dir, settings), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    began_s = time.monotonic()
    try:
        with (out / "samples.jsonl").open("w") as file, Meter("soaking", int(args.minutes * 60), "second") as meter:
            while (seconds := time.monotonic() - began_s) < args.minutes * 60:
                if trainer.poll() is not None:
                    raise RuntimeError(f"the trainer ended with exit code {trainer.returncode}: {_last_lines(log)}")
                if steps := num_steps(run_dir):
                    usage = {role: taken._asdict() for role, taken in taken_by_role(trainer.pid).items()}
                    samples.append({"seconds": seconds, "steps": steps, **usage})
                    file.write(json.dumps(samples[-1]) + "\n")
                    file.flush()
                meter.at(int(seconds))
                time.sleep(SAMPLE_EVERY_S)
        _stop(trainer, log)
    finally:
        trainer.kill()  # its servers and decoders end with it
        trainer.wait()
    return samples


def _stop(trainer: subprocess.Popen[bytes], log: Path) -> None:
    """As a user does, and nothing of it may stay."""
    processes = family(trainer.pid)
    trainer.send_signal(signal.SIGTERM)
    if (code := trainer.wait(STOP_S)) != 128 + signal.SIGTERM:
        raise RuntimeError(f"the trainer ended with exit code {code}: {_last_lines(log)}")
    give_up_s = time.monotonic() + GONE_S
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"processes {left} of the run are still there after it ended")
        time.sleep(0.1)


def _series(samples: Sequence[dict[str, Any]], step_s: Sequence[float]) -> dict[str, list[float]]:
    of_roles = {
        f"{label}, {role}": [sample[role][name] for sample in samples if role in sample]
        for name, label in LABELS.items()
        for role in COLOURS
    }
    series = of_roles | {STEP_S: list(step_s), CPU_S: _cpu_s(samples)}
    return {name: values for name, values in series.items() if values}


def _cpu_s(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Of a step, whichever process took them: unlike seconds they hardly change beside other work."""
    taken, begin = [], samples[0]
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
        figure.suptitle(f"The smoke run with the {args.engine} engine for {args.minutes:g} minutes", x=0.01, ha="left")
        with whole_file(path) as file:
            figure.savefig(file, format="png")


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
