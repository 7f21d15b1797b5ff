"""A run's directory: held by one process at a time, it says what the run was started with."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

VERSIONED = ("paravt_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")
LOCK_FILE, SETTINGS_FILE = ".lock", "config.json"


@contextmanager
def held(run_dir: str | Path) -> Iterator[Path]:
    """The directory, made where it is not there. Two trainers in one would undo each other's files."""
    directory = Path(run_dir).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RuntimeError(f"another process trains in {directory}; wait for it, or choose another run_dir") from None
    try:
        yield directory
    finally:
        os.close(file)


def write_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """RUN/config.json: every setting as it is used, the commit, and the versions of what computes."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    record = {
        "config": settings,
        "git_commit": git.stdout.strip() or None,
        "packages": {name: version(name) for name in VERSIONED},
    }
    partial = directory / f"{SETTINGS_FILE}.partial"
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(directory / SETTINGS_FILE)
