"""One NVIDIA GPU, checked and measured in less than ten minutes: what docs/results/README.md cannot say without one.

Attention of every form against the oracle, with gradients; the update at the 8B's width over 4k to 32k tokens; a prompt
computed once for its group, beside a row for each episode and beside torch with transformers; weights written for
servers. Each part is a process of its own with a deadline: the memory of a GPU is given back only so, and a part that
fails is said at the end and stops no other.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paravt_jax.bench.update import TOLERANCES, check_agreement
from paravt_jax.run.process import claim_memory

Row = dict[str, Any]
DEADLINES_S = {  # of each part; together less than ten minutes
    "device": 20,
    "attention": 80,
    "attention_time": 40,
    "update": 170,
    "weights": 45,
    "branches": 75,
    "rows": 75,
    "torch": 60,
    "publish": 30,
}
PATIENCE = 4  # times as long, where a CPU that others use too tries it
TITLES = {
    "device": "The device",
    "attention": "Attention against the oracle, forward and gradients",
    "attention_time": "Attention of one layer, forward and backward",
    "update": "The update at the 8B's width",
    "weights": "The model of the next three",
    "branches": "One update of a group: its prompt once",
    "rows": "The same, a row for each episode",
    "torch": "The same in torch and transformers",
    "publish": "Weights written for servers",
}
CONVENTION = """\
Errors are the largest difference over the largest value; in bfloat16 as a multiple of the oracle's own error. FLOPs of
the model are 6·N a token (N: the layers' products; the head's for scored tokens, an eighth) and causal attention, half
of 12·heads·head_dim a pair and layer; nothing computed again and no frame counts. MFU is of the dense bfloat16 peak.
Float32 masters, moments and gradients; where those of all layers do not fit, fewer, as the column says, and tokens/s of
the whole depth are scaled by FLOPs. Seconds are medians of three."""
WAYS = ("branches", "rows", "torch")  # of the same update
SHOWN_CHARS = 300
ROOM_BYTES = 16 * 2**30  # for the models that the parts write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="try the check itself: tiny models, on a CPU too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    claim_memory()
    with tempfile.TemporaryDirectory(prefix="paravt-gpu-check-", dir=_memory()) as folder:
        parts = {"device": measured("device", Path(folder), tiny=args.tiny)}
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
        seen = ", ".join(row["device"] for row in part["rows"]) or part["problem"] or "nothing"
        raise RuntimeError(f"jax sees no GPU here but {seen}, so nothing was measured; --tiny tries the check itself")


def measured(name: str, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """What a part printed until it ended or had to, and what was wrong with it."""
    command = [sys.executable, "-m", "paravt_jax.bench.gpu_parts", name, str(folder), *["--tiny"] * tiny]
    print(f"{name} …", file=sys.stderr, flush=True)
    start, deadline_s = time.monotonic(), DEADLINES_S[name] * (PATIENCE if tiny else 1)
    return {**part_of(command, deadline_s, folder), "seconds": round(time.monotonic() - start, 1)}


def part_of(command: list[str], deadline_s: float, folder: Path) -> dict[str, Any]:
    """The rows of a command, and its problem: how it ended, with the last line that it said."""
    problem = None
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        try:
            code = subprocess.run(command, stdout=out, stderr=err, timeout=deadline_s).returncode
        except subprocess.TimeoutExpired:
            problem = f"not done within {deadline_s:g} s"
        else:
            said = (_text(err).strip().splitlines() or ["nothing"])[-1]
            problem = f"ended with exit code {code}: {said[:SHOWN_CHARS]}" if code else None
        rows = [json.loads(line) for line in _text(out).splitlines() if line.startswith("{") and line.endswith("}")]
    return {"rows": rows, "problem": problem}


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()


def _memory() -> Path | None:
    """Where files are memory, as those that servers read, if there is room."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > ROOM_BYTES
    return shared if roomy else None


def problems_of(parts: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name}: {problem}"
        for name, part in parts.items()
        for problem in [part["problem"], *(row.get("problem") for row in part["rows"])]
        if problem
    ]


def _disagreement(ways: list[Row]) -> list[str]:
    """Ways that compute something else are not compared."""
    done = [row for row in ways if "loss" in row]
    found = {row["way"]: {"loss/total": row["loss"], "optim/grad_norm": row["grad_norm"]} for row in done}
    try:
        if found:
            check_agreement(found, TOLERANCES["bfloat16"])
    except RuntimeError as problem:
        return [str(problem)]
    return []


def table(found: dict[str, Any]) -> str:
    """A page of Markdown: what fell short, then every part."""
    violations = found["violations"]
    size = ", tiny models: to try the check, not to measure" if found["tiny"] else ""
    lines = [f"# GPU check{size}", "", f"{found['date']}, `python -m paravt_jax.bench gpu_check`", "", CONVENTION, ""]
    lines += [f"Problems: {len(violations)}", "", *(f"- {problem}" for problem in violations), ""] * bool(violations)
    lines += _ratios(found["parts"])
    for name, part in found["parts"].items():
        lines += [f"## {TITLES[name]}", "", *_table(part["rows"]), ""]
        lines += [f"Failed: {part['problem']}", ""] * bool(part["problem"])
    return "\n".join(lines).rstrip()


def _ratios(parts: dict[str, dict[str, Any]]) -> list[str]:
    """The three ways beside each other, as far as they were done."""
    done = [row for name in WAYS for row in parts.get(name, {"rows": []})["rows"] if "update_s" in row]
    seconds = {row["way"]: row["update_s"] for row in done}
    if "branches" not in seconds:
        return []
    own_s = seconds.pop("branches")
    others = [f"{way} takes {other_s / own_s:.2f} x as long" for way, other_s in seconds.items()]
    return [f"One update of a group, its prompt computed once: {'; '.join([f'{own_s:.3g} s', *others])}.", ""]


def _table(rows: list[Row]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["Nothing was measured."]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
