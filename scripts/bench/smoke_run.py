"""The smoke run as long benches start it, and what its processes take.

A random model calls no tools. So every turn begins with calls that are forced on it: crops, sub-agents and reports are
real, and the policy samples what follows.
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
    "advantage.filter_zero_variance=false",  # a random model rarely differs from itself
    "data.validation=",
)


class Taken(NamedTuple):
    """What a process takes, or some together."""

    memory_mib: float = 0.0  # what several share counts in parts that add up
    files: int = 0
    threads: int = 0
    cpu_s: float = 0.0  # with that of its children that ended

    def plus(self, other: "Taken") -> "Taken":
        both = zip(self, other, strict=True)
        return Taken(*(one + two for one, two in both))  # type: ignore[arg-type]


def check_clone() -> None:
    """Before anything that takes long is begun."""
    if not CONFIG.is_file():
        raise RuntimeError(f"{CONFIG} is not there: this bench runs from a clone of the repository")


def trainer_command(run_dir: Path, settings: Sequence[str]) -> list[str]:
    """As a user starts it."""
    check_clone()
    command = [sys.executable, "-m", "paravt_jax.train", "--config", str(CONFIG), f"run_dir={run_dir}"]
    return [*command, *SETTINGS, *settings]


def num_steps(run_dir: Path) -> int:
    """Logged so far."""
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *descendants(pid)]


def is_decoder(pid: int) -> bool:
    return b"rollout.video.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def taken_by_role(trainer: int) -> dict[str, Taken]:
    """Of the trainer, its decoders, and the servers that it started."""
    roles = {"trainer": Taken(), "decoders": Taken(), "servers": Taken()}
    for pid in family(trainer):
        with suppress(OSError):  # it ended since it was listed
            role = "trainer" if pid == trainer else "decoders" if is_decoder(pid) else "servers"
            roles[role] = roles[role].plus(taken_by(pid))
    return {role: taken for role, taken in roles.items() if taken.threads}


def taken_by(pid: int) -> Taken:
    process = Path(f"/proc/{pid}")
    lines = (process / "smaps_rollup").read_text().splitlines()
    memory_kib = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    fields = (process / "stat").read_text().rpartition(")")[2].split()  # from the third on, see man proc
    ticks = sum(map(int, fields[11:15]))
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return Taken(memory_kib / 1024, len(list((process / "fd").iterdir())), int(fields[17]), cpu_s)
