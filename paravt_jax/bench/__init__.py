"""Benchmarks of this machine, one module each: `python -m paravt_jax.bench NAME [--json OUT]`."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

VERSIONED = ("jax", "flax", "orbax-checkpoint", "tensorstore", "numpy")


def machine() -> dict[str, Any]:
    """The hardware and versions that results depend on. Benchmarks that use accelerators report them."""
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONED},
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
