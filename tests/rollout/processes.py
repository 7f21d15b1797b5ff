"""Starts and stops servers as processes, and finds their descendants."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout.server import Server

ROOT = Path(__file__).parents[2]
SERVE = [sys.executable, "-m", "rollout.serve"]
SMALL = ("--context-length", "4096", "--max-total-tokens", "16384")


def start(settings, **kwargs):
    return asyncio.run(Server.start(settings, **{"deadline_s": 30, **kwargs}))


def family(pid):
    """Returns a process and all its descendants."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def all_gone(processes, within_s=10.0):
    """Whether all processes have exited within a time; zombies count as exited."""
    deadline = time.monotonic() + within_s
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def serve(settings, *options):
    """Starts the command."""
    args = ["--model", str(settings.model), "--python", str(settings.python), *options, "--", *settings.extra_args]
    return subprocess.Popen([*SERVE, *args], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@dataclass(frozen=True)
class Served:
    """A server that the command started."""

    command: subprocess.Popen[str]
    url: str
    pid: int


@contextmanager
def served(settings, *options) -> Iterator[Served]:
    """Runs a real server; `options` may change its sizes."""
    command = serve(settings, *SMALL, "--json", *options)
    try:
        shown = json.loads(command.stdout.readline())
        yield Served(command, shown["url"], shown["pid"])
    finally:
        command.terminate()
        command.communicate(timeout=60)


def ended(command, within_s=30):
    """Waits for a command. Returns its exit code, the rest of stdout, and stderr."""
    output, errors = command.communicate(timeout=within_s)
    return command.returncode, output, errors
