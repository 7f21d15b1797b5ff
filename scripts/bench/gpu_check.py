"""Checks and measures one NVIDIA GPU in less than ten minutes.

It compares all forms of attention with the oracle, including gradients. It times the update at the 8B's width for 4k
to 32k tokens, a group's update with a shared prompt, with a row per episode and in torch, and writing weights for
servers. Each part runs in its own process with a timeout, because only that frees GPU memory; one that fails does not
stop the others.
"""

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from paravt_jax.check.process import part_of
from paravt_jax.run.process import claim_memory
from scripts.bench.update import TOLERANCES, check_agreement

Row = dict[str, Any]
DEADLINES_S = {  # timeout of each part; less than ten minutes in total
    "device": 10,
    "attention": 50,
    "attention_time": 45,
    "sampler": 125,
    "generate": 45,
    "update": 125,
    "weights": 40,
    "branches": 45,
    "rows": 45,
    "torch": 35,
    "publish": 30,
}
PATIENCE = 4  # multiplies the timeouts on a CPU, which may be shared
TITLES = {
    "device": "The device",
    "attention": "Attention compared with the oracle, forward and gradients",
    "attention_time": "Attention of one layer, forward and backward",
    "sampler": "Sampling from the 8B with the embedded engine",
    "generate": "The same with transformers' generate",
    "update": "The update at the 8B's width",
    "weights": "The model for the next three parts",
    "branches": "One update of a group with a shared prompt",
    "rows": "The same with a row per episode",
    "torch": "The same in torch and transformers",
    "publish": "Weights written for servers",
}
CONVENTION = """\
Errors are the largest difference divided by the largest value; in bfloat16 divided by the oracle's own error. Model
FLOPs are 6·N per token (N: parameters of the layers' products; the head counts for scored tokens, an eighth) plus
causal attention, half of 12·heads·head_dim per pair and layer; recomputation and frames do not count. MFU is relative
to the dense bfloat16 peak. Master weights, moments and gradients are float32; if all layers do not fit, the column
shows how many do, and tokens/s of the full depth are scaled by FLOPs. Seconds are medians of three."""
WAYS = ("branches", "rows", "torch")  # parts whose losses and gradient norms must agree
SHOWN_LINES = 60  # lines of a failed part's log to print
ROOM_BYTES = 16 * 2**30  # free space for the models of all parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="test this check with tiny models, also on a CPU")


def run(args: argparse.Namespace) -> dict[str, Any]:
    claim_memory()
    with tempfile.TemporaryDirectory(prefix="paravt-gpu-check-", dir=_memory()) as folder:
        parts: dict[str, Any] = {"device": measured("device", Path(folder), tiny=args.tiny)}
        if not args.tiny:
            _check_gpu(parts["device"])
        for name in DEADLINES_S:
            if name not in parts:
                parts[name] = measured(name, Path(folder), tiny=args.tiny)
    ways = [row for name in WAYS if name in parts for row in parts[name]["rows"]]
    violations = [*problems_of(parts), *_disagreement(ways)]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"tiny": args.tiny, "date": today, "parts": parts, "violations": violations}


def _check_gpu(part: dict[str, Any]) -> None:
    if not any(row["platform"] == "gpu" for row in part["rows"]):
        devices = ", ".join(row["device"] for row in part["rows"]) or part["problem"] or "nothing"
        raise RuntimeError(f"no GPU found, jax has {devices}; --tiny tests the check itself without one")


def measured(name: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Runs a part in its own process. Returns the rows printed before it ended or timed out, and its problem."""
    command = [sys.executable, "-m", "scripts.bench.gpu_parts", name, str(folder), *["--tiny"] * tiny]
    print(f"{name} …", file=sys.stderr, flush=True)
    log = folder / "log"
    done = part_of(command, log, DEADLINES_S[name] * (PATIENCE if tiny else 1))
    part = {"rows": done.rows, "problem": done.problem or None, "seconds": round(done.seconds, 1)}
    if problems_of({name: part}):
        print(*log.read_text(errors="replace").splitlines()[-SHOWN_LINES:], sep="\n", file=sys.stderr)
    return part


def _memory() -> Path | None:
    """Returns /dev/shm if it has room; servers read weights from there too."""
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > ROOM_BYTES
    return shared if has_room else None


def problems_of(parts: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name}: {problem}"
        for name, part in parts.items()
        for problem in [part["problem"], *(row.get("problem") for row in part["rows"])]
        if problem
    ]


def _disagreement(ways: list[Row]) -> list[str]:
    """Lists a violation if losses or gradient norms of the ways differ."""
    done = [row for row in ways if "loss" in row]
    by_way = {row["way"]: {"loss/total": row["loss"], "optim/grad_norm": row["grad_norm"]} for row in done}
    try:
        if by_way:
            check_agreement(by_way, TOLERANCES["bfloat16"])
    except RuntimeError as problem:
        return [str(problem)]
    return []


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown page: problems first, then every part."""
    violations = result["violations"]
    size = ", tiny models: tests the check, measures nothing" if result["tiny"] else ""
    lines = [f"# GPU check{size}", "", f"{result['date']}, `python -m scripts.bench gpu_check`", "", CONVENTION, ""]
    lines += [f"Problems: {len(violations)}", "", *(f"- {problem}" for problem in violations), ""] * bool(violations)
    lines += _ratios(result["parts"])
    for name, part in result["parts"].items():
        lines += [f"## {TITLES[name]}", "", *_table(part["rows"]), ""]
        lines += [f"Failed: {part['problem']}", ""] * bool(part["problem"])
    return "\n".join(lines).rstrip()


def _ratios(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the speed and memory ratios of the ways that were measured."""
    done = [row for name in WAYS for row in parts.get(name, {"rows": []})["rows"] if "update_s" in row]
    seconds = {row["way"]: row["update_s"] for row in done}
    if "branches" not in seconds:
        return []
    own_s = seconds.pop("branches")
    ratios = [f"{way} takes {way_s / own_s:.2f} x as long" for way, way_s in seconds.items()]
    return [f"One update of a group, its prompt computed once: {'; '.join([f'{own_s:.3g} s', *ratios])}.", ""]


def _table(rows: list[Row]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["Nothing was measured."]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
