"""Draws docs/results from its data:   python -m scripts.results

docs/results/data/NAME.json is the result of a bench (`… --json`), or the same figures with their command, date and
machine. This writes docs/results/img/*.png and the tables of docs/results/README.md. After a new measurement, replace
the data and run it again.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.counts import AIMS
from scripts.summary import FRAMES, RESULTS, ROWS, TORCH, conversion, data, ratios, speedups, tables

COLORS = ["#0072B2", "#E69F00", "#009E73"]
NAMES = {"_s": "s", "_mib": "MiB", "_gib": "GiB", "_noise": "times the noise"}


@dataclass(frozen=True)
class Panel:
    """A panel of horizontal bars: a group per label, a color per series."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]  # NaN: not measured
    target: float | None = None
    log: bool = False


def columns(file: str, rows: str, label: str, title: str, keys: str, log: bool = False) -> Panel:
    """Makes a panel from a file's rows; the keys end with their unit."""
    chosen = data(file)[rows]
    (unit,) = {name for suffix, name in NAMES.items() if keys.endswith(suffix)}
    series = {key.rpartition("_")[0]: [row[key] for row in chosen] for key in keys.split()}
    return Panel(title, unit, [label.format(**row) for row in chosen], series, log=log)


def passes(mode: str) -> Panel:
    rows = [row for row in data("learner")["rows"] if row["mode"] == mode]
    series = {dtype: ratios(rows, "torch_s", "jax_s", dtype=dtype) for dtype in ("float32", "bfloat16")}
    series["bfloat16"] += [math.nan] * (len(series["float32"]) - len(series["bfloat16"]))
    labels = [f"{row['model']}, {row['workload']}" for row in rows if row["dtype"] == "float32"]
    return Panel(mode, "torch s / jax s", labels, series, 1.2)


def updates() -> Panel:
    compared = {ROWS: "rows → branches", TORCH: "torch → branches", FRAMES: "frames per row → once"}
    tiny, mid = zip(*(speedups("learner", name) for name in compared), strict=True)
    small = [speedups("learner_small", name)[0] for name in compared]
    return Panel("one update", "times faster", list(compared.values()), {"1M": tiny, "53M": small, "123M": mid})


def conversions(number: int, title: str, unit: str, target: float) -> Panel:
    steps = ("convert", "export")
    series = {size.upper(): [conversion(size)[step][number] for step in steps] for size in ("2b", "8b")}
    return Panel(title, unit, steps, series, target)


def decoders() -> Panel:
    rows = data("decoders")["rows"]
    series = {name: [row[name] for row in rows] for name in ("decord", "pyav")}
    return Panel("decoders", f"right frames of {rows[0]['frames']}", [row["clip"] for row in rows], series)


def suite() -> Panel:
    rows = data("suite")["rows"]
    series = {name: [row[f"{name}_s"] / 60 for row in rows] for name in ("all", "quick")}
    return Panel("from a fresh clone", "minutes", [f"{row['date']}, {row['machine']}" for row in rows], series, 12)


def size() -> Panel:
    before, now = data("size")["before"], data("size")["now"]
    names = [name for name in AIMS if "you" not in name]
    series = {"now": [now[n] / before[n] * 100 for n in names], "aim": [AIMS[n] / before[n] * 100 for n in names]}
    return Panel("size and language", "% of before", names, series)


PICTURES = {
    "learner": lambda: [passes("forward"), passes("forward+backward"), updates()],
    "models": lambda: [
        conversions(0, "time", "relative to a copy", 1.5),
        conversions(1, "peak memory", "MiB", 3000),
        columns(
            "hosts_checkpoint",
            "checkpoints",
            "{processes}",
            "checkpoint by processes",
            "share_mib saving_mib restoring_mib",
        ),
    ],
    "rollouts": lambda: [
        columns("rollout", "crops", "{crops}", "crops in a turn", "parallel_s sequential_s"),
        columns("parity", "rows", "{server}", "parity gate", "times_noise"),
    ],
    "video": lambda: [
        columns("video", "rows", "{video}, {read}", "read a video", "original_s ours_s", log=True),
        decoders(),
    ],
    "hosts": lambda: [
        columns("hosts_sglang", "runs", "{processes}", "step by processes", "rollout_s update_s publish_s"),
        columns("publishing", "publishes", "{servers}", "publish by servers", "publish_s paused_s copy_s"),
    ],
    "meshes": lambda: [
        columns("mesh_compiled", "rows", "{mesh}", "8B on 8 x H100, per device", "compiled_gib planned_gib"),
        columns("mesh_epyc", "rows", "{mesh}", "update, AMD EPYC", "measured_s estimated_s"),
        columns("mesh_xeon", "rows", "{mesh}", "update, Intel Xeon", "measured_s estimated_s"),
    ],
    "tests": lambda: [suite()],
    "size": lambda: [size()],
}


def bars(axis: Axes, panel: Panel) -> None:
    height = 0.8 / len(panel.series)
    for number, (name, values) in enumerate(panel.series.items()):
        centers = [group + (number + 0.5) * height - 0.4 for group in range(len(values))]
        drawn = axis.barh(centers, values, height, label=name, color=COLORS[number])
        shown = ["" if math.isnan(v) else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values]
        axis.bar_label(drawn, shown, padding=2, fontsize=7)
    if panel.target is not None:
        axis.axvline(panel.target, color="#444444", linestyle="--", linewidth=1, label=f"target {panel.target:g}")
    axis.set_yticks(range(len(panel.labels)), panel.labels)
    axis.tick_params(labelsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(panel.unit, fontsize=8)
    axis.set_xscale("log" if panel.log else "linear")
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(panel.title, fontsize=10, loc="left", pad=18)
    if len(panel.series) > 1:
        axis.legend(fontsize=7, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 0.99), borderpad=0)


def draw(panels: Sequence[Panel], path: Path) -> None:
    num_bars = max(len(panel.labels) * len(panel.series) for panel in panels)
    figure = Figure(figsize=(4.2 * len(panels), 1.3 + 0.19 * num_bars), layout="constrained", dpi=110)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        bars(axis, panel)
    figure.savefig(path)


def with_tables(page: str) -> str:
    for first, lines in tables().items():
        page = re.sub(rf"^\| {first} \|.*?\n(?=\n|\Z)", "\n".join([*lines, ""]), page, flags=re.MULTILINE | re.DOTALL)
    return page


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m scripts.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, panels in PICTURES.items():
        draw(panels(), RESULTS / "img" / f"{name}.png")
    page = RESULTS / "README.md"
    page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
