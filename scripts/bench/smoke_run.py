"""Starts the smoke run for the long benchmarks, and measures its processes' resource usage.

A random model calls no tools, so every turn starts with forced calls. Crops, sub-agents and reports are real, and the
policy samples the rest of the turn.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paravt_jax.run.log import METRICS_FILE
from rollout.supervisor import descendants

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smoke_cpu.yaml"
CALLS = "".join(
    f"<tool_code>crop_video(start_time={start_s}, end_time={start_s + 3})</tool_code>" for start_s in (1, 4)
)
SETTINGS = (
    "train.num_steps=1000000",
    f"rollout.forced_prefix='<think>I look.</think>{CALLS}'",
    "rollout.max_new_tokens=24",
    "rollout.max_turns=1",
    "train.group_size=4",
    "video.frame_budgets=[3,4]",
    "advantage.filter_zero_variance=false",  # a random model's rewards rarely differ
    "data.validation=",
)


class Usage(NamedTuple):
    """Resource usage, summed over processes."""

    memory_mib: float = 0.0  # shared pages count in proportion (PSS)
    files: int = 0
    threads: int = 0
    cpu_s: float = 0.0  # including exited children

    def plus(self, other: "Usage") -> "Usage":
        pairs = zip(self, other, strict=True)
        return Usage(*map(sum, pairs))  # type: ignore[arg-type]


def check_clone() -> None:
    """Raises before any long work if the working directory is not a clone."""
    if not CONFIG.is_file():
        raise RuntimeError(f"{CONFIG} does not exist: run this benchmark from a clone of the repository")


def trainer_command(run_dir: Path, settings: Sequence[str]) -> list[str]:
    """Returns the command that a user would run."""
    check_clone()
    command = [sys.executable, "-m", "paravt_jax.train", "--config", str(CONFIG), f"run_dir={run_dir}"]
    return [*command, *SETTINGS, *settings]


def num_steps(run_dir: Path) -> int:
    """Counts the steps in the log."""
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def family(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [pid, *descendants(pid)]


def is_decoder(pid: int) -> bool:
    return b"rollout.video.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def usage_by_role(trainer: int) -> dict[str, Usage]:
    """Returns the usage of the trainer, its decoders and its own servers."""
    roles = {"trainer": Usage(), "decoders": Usage(), "servers": Usage()}
    for pid in family(trainer):
        with suppress(OSError):  # it has exited
            role = "trainer" if pid == trainer else "decoders" if is_decoder(pid) else "servers"
            roles[role] = roles[role].plus(usage_of(pid))
    return {role: usage for role, usage in roles.items() if usage.threads}


def usage_of(pid: int) -> Usage:
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()
    memory_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    fields = (process / "stat").read_text().rpartition(")")[2].split()  # from field 3 of proc(5)
    ticks = sum(map(int, fields[11:15]))
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return Usage(memory_kib / 1024, len(list((process / "fd").iterdir())), int(fields[17]), cpu_s)
