"""Logs a run: metrics and episodes of every step, TensorBoard, Weights & Biases and the terminal.

The files are authoritative; other outputs are for viewing. Log a step before saving its checkpoint, so that a resumed
run finds all steps up to its checkpoint in the log. It moves later steps aside and runs them again.
"""

import importlib
import json
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from model_port.json_files import without_nan
from model_port.output_dir import named
from model_port.progress import Ticker, make_bar
from model_port.terminal import say, visible
from paravt_jax.config import LogConfig
from paravt_jax.run.event_file import EventFile

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
EPISODES_DIR = "episodes"
SUPERSEDED_DIR = "superseded"
TENSORBOARD_DIR = "tensorboard"
PLOTS_DIR = "plots"
WANDB_ID_FILE = "wandb_id"
TERMINAL_METRICS = {
    "reward": "rollout/reward_mean",
    "f_tau": "rollout/format_reward",
    "parseable": "rollout/parseable_frac",
    "kappa": "rollout/tool_calls_mean",
    "loss": "loss/imitation",
}
TERMINAL_RATES = {"sampled": "perf/sampled_tokens_per_s", "trained": "perf/trained_tokens_per_s_device"}
VALIDATION_METRICS = {
    "accuracy": "validation/accuracy_mean",
    "f_tau": "validation/format_reward",
    "parseable": "validation/parseable_frac",
    "kappa": "validation/tool_calls_mean",
    "loss": "validation/loss",
}
REFRESH_S = 0.5  # refresh interval of the bar
ETA_STEPS = 20  # use only the newest steps, which predict the next steps best


class RunLog:
    """Writes RUN/metrics.jsonl, validation.jsonl, episodes/NNNNNN.jsonl and tensorboard/, and shows the progress.

    `first_step` is the number of steps in the checkpoint. Later steps in the log will run again, so they are moved to
    RUN/superseded/ to avoid duplicates. Weights & Biases shows `settings`. `compiling` returns the names of programs
    that are being compiled, for the progress bar.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LogConfig,
        *,
        num_steps: int,
        first_step: int,
        settings: dict[str, Any],
        compiling: Callable[[], Collection[str]] = tuple,
    ) -> None:
        wandb = import_wandb(config.wandb_project) if config.wandb_project else None  # raises before any file changes
        self._run_dir = run_dir
        self._last_step = first_step
        (run_dir / EPISODES_DIR).mkdir(parents=True, exist_ok=True)
        logged = last_step(run_dir)
        put_aside = _supersede_later(run_dir, first_step)
        self._tensorboard = EventFile(run_dir / TENSORBOARD_DIR, first_step)
        self._wandb = None if wandb is None else _wandb_run(wandb, run_dir, config.wandb_project, first_step, settings)
        self.validated = set(rows_by_step(run_dir / VALIDATION_FILE))  # includes steps before a restart
        self._progress = _StepBar(num_steps, first_step, compiling)
        if put_aside is not None:
            self.say(f"the log after step {first_step} was moved to {put_aside}; these steps run again")
        if logged < first_step:
            lost = f"the log of the steps up to the checkpoint's, {first_step}, is lost"
            self.say(f"{run_dir / METRICS_FILE} ends at step {logged}: {lost}")

    def step(
        self, step: int, metrics: Mapping[str, float | int], episodes: Iterable[Mapping[str, Any] | bytes] | None
    ) -> None:
        """Logs a finished step, counted from 1. Episodes are written before their step's metrics.

        An episode is a record, or a line that another host made.
        """
        if step != self._last_step + 1:
            raise ValueError(f"step {step} was logged after step {self._last_step}, expected {self._last_step + 1}")
        if episodes is not None:
            with whole_file(self._run_dir / EPISODES_DIR / f"{step:06d}.jsonl") as file:
                file.writelines(row if isinstance(row, bytes) else json_line(row) for row in episodes)
        self._write(METRICS_FILE, step, metrics)
        self._last_step = step
        self._progress.step(step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Logs the metrics on held-out prompts after `step` steps, with the prefix `validation/`."""
        self.validated.add(step)
        self._write(VALIDATION_FILE, step, metrics)
        say("  ".join([f"held-out prompts after step {step}:", *_texts_of(VALIDATION_METRICS, metrics)]))

    def phase(self, text: str) -> None:
        """Sets the current activity. A terminal shows it at once; other outputs print it every half a minute."""
        self._progress.phase(text)

    def where(self) -> str:
        """The text about the current activity; empty before the first phase."""
        return self._progress.where()

    def say(self, message: str) -> None:
        say(message)

    def end(self) -> None:
        """Ends the progress bar, which stays above the last messages."""
        self._progress.close(keep=True)

    def close(self, failed: bool = False) -> None:
        self._progress.close(keep=False)
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(int(failed))

    def _write(self, name: str, step: int, metrics: Mapping[str, float | int]) -> None:
        for key, value in metrics.items():
            if not isinstance(value, float | int):
                raise ValueError(f"metric {key} is a {type(value).__name__}, expected a number; log float(...) of it")
        path = self._run_dir / name
        with named(path), path.open("ab") as file:
            file.write(json_line({"step": step} | dict(sorted(metrics.items()))))
            _sync(file)
        self._tensorboard.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)


class QuietLog(RunLog):
    """The log of a host that does not lead. Host 0 logs for all hosts."""

    def __init__(self, validated: Iterable[int]) -> None:
        """Makes a log without output. `validated` has host 0's steps with validation."""
        self.validated = set(validated)

    def validation(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self.validated.add(step)

    def where(self) -> str:
        return ""

    def _ignore(self, *arguments: Any, **options: Any) -> None:
        pass

    step = phase = say = end = close = _ignore


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Writes or replaces a file atomically."""
    partial = path.with_name(f".{path.name}.partial")  # overwrites the partial file of a killed process
    try:
        with partial.open("wb") as file:
            try:
                yield file
                _sync(file)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as problem:
        if problem.filename in (None, str(partial)):
            problem.filename = str(path)
        raise


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


def load_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Reads a JSONL file, except an incomplete last line that a killed process left."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return
                raise ValueError(
                    f"{path}: line {number} is not valid JSON; restore the file, or remove the line"
                ) from None
            yield row


def rows_by_step(path: Path) -> dict[int, dict[str, Any]]:
    """Reads a metrics file's rows by step; empty if the file does not exist."""
    return {row["step"]: row for row in _load_steps(path)} if path.exists() else {}


def _load_steps(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(load_jsonl(path), 1):
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or abs(step) >= 2**63:
            problem = "has no step" if step is None else f"has the step {json.dumps(step)}, not a 64-bit integer"
            raise ValueError(f"{path} is not a run's log: line {number} {problem}; give another run_dir")
        yield row


def last_step(run_dir: Path) -> int:
    """The last step with logged metrics; 0 if there is none."""
    return max(rows_by_step(run_dir / METRICS_FILE), default=0)


def _supersede_later(run_dir: Path, first_step: int) -> Path | None:
    """Moves logs after `first_step` to a new directory and returns it; None if there are none."""
    aside = next(
        path for n in count(1) if not (path := run_dir / SUPERSEDED_DIR / f"after_step_{first_step}_{n}").exists()
    )
    for path in (run_dir / METRICS_FILE, run_dir / VALIDATION_FILE):
        if path.exists():
            rows = list(_load_steps(path))
            if later := [row for row in rows if row["step"] > first_step]:
                write_rows(aside / path.name, later)
            write_rows(path, [row for row in rows if row["step"] <= first_step])  # drops an incomplete last line
    for path in (run_dir / EPISODES_DIR).glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) > first_step:
            (aside / EPISODES_DIR).mkdir(parents=True, exist_ok=True)
            path.rename(aside / EPISODES_DIR / path.name)
    return aside if aside.exists() else None


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes or replaces a JSONL file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.writelines(map(json_line, rows))


def json_line(record: Mapping[str, Any]) -> bytes:
    """Makes a line of JSON. NaN and infinity become null, because JSON lacks them."""
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:  # rare, so checking every number first would be slower
        text = json.dumps(without_nan(record), allow_nan=False)
    return text.encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def import_wandb(project: str) -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as problem:
        raise ValueError(
            f"log.wandb_project={project} needs a package that is not installed ({problem}); "
            f"pip install wandb, or leave log.wandb_project empty"
        ) from None


def _wandb_run(wandb: Any, run_dir: Path, project: str, first_step: int, settings: dict[str, Any]) -> Any:
    """Starts or resumes the run in Weights & Biases, which ignores steps that it already has."""
    id_file = run_dir / WANDB_ID_FILE
    if first_step == 0 or not id_file.exists():
        with whole_file(id_file) as file:
            file.write(secrets.token_hex(4).encode())
    run_id = id_file.read_text()
    where = {"project": project, "id": run_id, "name": run_dir.name, "dir": str(run_dir)}
    return wandb.init(**where, config=settings, resume="allow")


def _texts_of(
    keys: Mapping[str, str], metrics: Mapping[str, float | int], spec: str = ".2f", unit: str = ""
) -> Iterator[str]:
    """Formats the metrics that exist, with the names in `keys`."""
    return (f"{name} {metrics[key]:{spec}}{unit}" for name, key in keys.items() if key in metrics)


class _StepBar:
    """A progress bar on a terminal; elsewhere a line per step, and a line every half a minute in long steps."""

    def __init__(self, num_steps: int, first_step: int, compiling: Callable[[], Collection[str]]) -> None:
        self._num_steps, self._step, self._phase, self._compiling = num_steps, first_step, "", compiling
        self._step_ends_s: deque[float] = deque(maxlen=ETA_STEPS + 1)
        self._last_s = time.monotonic()
        self._summary = ""
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = make_bar(total=num_steps, initial=first_step, bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}")
        self._ticker = Ticker(self.where) if self._bar is None else Ticker(self._refresh, REFRESH_S)

    def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
        took_s, self._last_s = time.monotonic() - self._last_s, time.monotonic()
        self._step, self._phase = step, ""
        self._step_ends_s.append(self._last_s)
        texts = [*_texts_of(TERMINAL_METRICS, metrics), *_texts_of(TERMINAL_RATES, metrics, ".0f", "/s")]
        if "perf/mfu" in metrics:
            texts.append(f"MFU {100 * metrics['perf/mfu']:.0f} %")
        if self._bar is None:
            texts.append(f"{metrics.get('time/step_s', took_s):.1f} s")
            say("  ".join([f"step {step}/{self._num_steps}", *texts, *self._eta()]))
        else:
            self._summary = " ".join([*self._eta(), *texts])
            self._bar.set_description_str(self._summary, refresh=False)
            self._bar.update()
            self._bar.refresh()  # otherwise the bar would skip fast steps

    def phase(self, text: str) -> None:
        self._phase = text
        if self._bar is not None:
            self._refresh()

    def where(self) -> str:
        if not self._phase:
            return ""
        took = tqdm.format_interval(time.monotonic() - self._last_s)
        return f"{self._activity()}, {took} since step {self._step}/{self._num_steps}"

    def _activity(self) -> str:
        """The current phase, and the programs that are being compiled."""
        compiling = [f"compiling {name}" for name in self._compiling()]
        return visible(", ".join([self._phase, *compiling] if self._phase else compiling))

    def _refresh(self) -> str:
        """Redraws the bar if its text has changed. Returns no line to print."""
        assert self._bar is not None
        text = ", ".join(filter(None, [self._activity(), self._summary]))  # a narrow terminal truncates the end
        if text != self._bar.desc:
            self._bar.set_description_str(text)
        return ""

    def close(self, keep: bool) -> None:
        """Ends the bar's line, or clears the bar."""
        self._ticker.close()
        if self._bar is not None:
            self._bar.leave = keep
            self._bar.set_description_str(self._summary, refresh=keep)
            self._bar.close()

    def _eta(self) -> Iterator[str]:
        """Estimates the remaining time from the newest steps; not after the first step, which includes compilation."""
        if num_timed := len(self._step_ends_s) - 1:
            seconds = (self._step_ends_s[-1] - self._step_ends_s[0]) / num_timed
            yield f"ETA {tqdm.format_interval((self._num_steps - self._step) * seconds)}"
