"""Computes the tables of docs/results/README.md from docs/results/data."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.counts import AIMS

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ROWS, FRAMES, TORCH = "a row per episode → branches", "frames seen per row → once", "torch → branches"
MIB = 2**20


def data(name: str) -> Any:
    return json.loads((RESULTS / "data" / f"{name}.json").read_bytes())


def ratios(rows: Sequence[dict[str, Any]], slow: str, fast: str, **where: Any) -> list[float]:
    chosen = [row for row in rows if all(row[key] == value for key, value in where.items())]
    return [row[slow] / row[fast] for row in chosen]


def speedups(file: str, compared: str) -> list[float]:
    rows = [row for row in data(file)["updates"] if row["compared"] == compared]
    return [row["slow"]["update_s"] / row["fast"]["update_s"] for row in rows]


def conversion(size: str) -> dict[str, tuple[float, float]]:
    """Returns each step's seconds relative to a copy, and its peak MiB."""
    steps = {step["name"]: step for step in data(f"convert_{size}")["steps"]}
    copy_s = (steps["copy"]["seconds"] + steps["copy again"]["seconds"]) / 2
    return {name: (step["seconds"] / copy_s, step["peak_rss_bytes"] / MIB) for name, step in steps.items()}


@dataclass(frozen=True)
class Line:
    """A line of the summary, whose values must all be at most, or at least, the target."""

    quantity: str
    values: Sequence[float]
    target: str = ""  # such as "≤ 1.5"
    unit: str = "×"
    digits: int = 2

    def __str__(self) -> str:
        is_range = len(self.values) > 3
        chosen = (min(self.values), max(self.values)) if is_range else self.values
        result = (" to " if is_range else "; ").join(f"{value:,.{self.digits}f}" for value in chosen)
        target = f"{self.target} {self.unit}" if self.target else "–"
        return f"| {self.quantity} | {result} {self.unit} | {target} | {met(self.values, self.target)} |"


def met(values: Sequence[float], target: str) -> str:
    if not target:
        return "–"
    sign, bound = target.split()
    good = sum(value <= float(bound) if sign == "≤" else value >= float(bound) for value in values)
    return "yes" if good == len(values) else f"{good} of {len(values)}" if good else "no"


def summary() -> Iterator[Line]:
    passes, servers = data("learner")["rows"], data("parity")["rows"]
    suite = [row for row in data("suite")["rows"] if row["machine"].startswith("AMD EPYC")][-1]  # the targets' machine
    for step in ("convert", "export"):
        relative, mib = conversion("8b")[step]
        yield Line(f"[{step} the 8B](models.md#conversion): peak memory", [mib], "≤ 3000", "MiB", 0)
        yield Line(f"[{step} the 8B](models.md#conversion): time, relative to a copy", [relative], "≤ 1.5")
    checksums = ratios(data("checkpoint")["rows"], "compared_s", "restored_s")
    yield Line("[restore](models.md#checkpoints) with / without checksums: page cache warm; cold", checksums, "≤ 1.1")
    for mode in ("forward", "forward+backward"):
        values = ratios(passes, "torch_s", "jax_s", mode=mode, dtype="float32")
        yield Line(f"[{mode}](learner.md#forward-and-backward), torch / ours: 1M and 123M", values, "≥ 1.2")
    (tiny, mid), (small,) = speedups("learner", ROWS), speedups("learner_small", ROWS)
    update = "[an update](learner.md#one-update)"
    yield Line(f"{update}, one row per episode / branches: 1M; 53M; 123M", [tiny, small, mid], "≥ 4", digits=1)
    yield Line(f"{update}, torch / ours: 1M; 123M", speedups("learner", TORCH), "≥ 3", digits=1)
    yield Line(f"{update}, torch / ours: 53M, 64 frames", speedups("learner_small", TORCH), "≥ 6", digits=1)
    yield Line(f"{update}, frames encoded per row / once: 1M; 123M", speedups("learner", FRAMES), "≥ 2", digits=1)
    compile_s = [row["command_s"] for row in data("mesh_targets")["rows"]]
    yield Line("[compile the 8B](learner.md#meshes) for v5p: libtpu 0.0.52; 0.0.42.1", compile_s, "≤ 240", "s", 0)
    publish = ratios(data("publishing")["publishes"], "publish_s", "copy_s", servers=2)
    yield Line("[publish](hosts.md#publishing) to two real servers / a copy of all bytes, AMD EPYC", publish, "≤ 2")
    crops = ratios(data("rollout")["crops"], "sequential_s", "parallel_s", crops=8)
    yield Line("[eight crops](rollouts.md#crops-in-parallel), sequential / parallel", crops, "≥ 2.5")
    apart = [min(row["times_noise"] for row in servers[1:]) / servers[0]["times_noise"]]
    yield Line("[parity gate](rollouts.md#parity-gate): closest wrong / worst correct server", apart, "≥ 1", digits=1)
    for read, target in {
        "overview and crops, cold": 1.2,
        "overview and crops, warm": 3,
        "first frames, cold": 1.2,
    }.items():
        values = ratios(data("video")["rows"], "original_s", "ours_s", read=read)
        yield Line(f"[{read}](video.md#frames), decord / ours: 360p; 720p", values, f"≥ {target}", digits=1)
    drawing_s = data("page")["rows"][0]["first_drawing_s"]
    yield Line("[report page](page.md) of 10,080 episodes: first render", drawing_s, unit="s", digits=1)
    violations = [row["violations"] for row in data("chaos")["rows"]]
    quantity = f"[fault injection](faults.md#faults): seeds of {len(violations)} without a violation"
    yield Line(quantity, [violations.count(0)], "≥ 10", "seeds", 0)
    yield Line("[`ask` with the tiny model](rollouts.md#sampling), nothing compiled", suite["ask_s"], "≤ 20", "s", 1)
    for name, values, target in (
        ("[all tests](tests.md) from a fresh clone", [suite["all_s"]], "≤ 12"),
        ("[quick tests](tests.md) from a fresh clone", [suite["quick_s"]], "≤ 2.5"),
        ("[quickstart](tests.md#quickstart), after the installation", suite["installed_quickstart_s"], "≤ 2"),
    ):
        yield Line(f"{name}, {suite['machine']}", [seconds / 60 for seconds in values], target, "minutes", 1)


def tables() -> dict[str, list[str]]:
    """Returns all lines of each table, by the first cell of its header."""
    size = data("size")
    lines = ["| count | before | now | aim | met |", "|---|---|---|---|---|"]
    for name, aim in AIMS.items():
        target = f"{'≥' if 'you' in name else '≤'} {aim}"
        cells = (name, size["before"][name], size["now"][name], target, met([size["now"][name]], target))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return {
        "quantity": ["| quantity | result | target | met |", "|---|---|---|---|", *map(str, summary())],
        "count": lines,
    }
