"""The results of a stage, measured lines and facts about its process, and the report of all stages."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from model_port.output_dir import GIB
from paravt_jax.check.process import PartResult

COLUMNS = ("stage", "case", "result", "bound", "s", "peak GiB", "planned GiB", "")
NO_TORCH = "torch is not installed: pip install torch, or in a clone bash scripts/setup.sh dev"

Facts: TypeAlias = dict[str, Any]  # about a stage, for example planned_gib


@dataclass(frozen=True)
class Measured:
    """A measured line of a stage. It fails if it has a problem or its value is out of bounds."""

    case: str
    value: float | str = ""
    bound: float | None = None
    problem: str = ""
    skipped: str = ""  # reason why it was not measured

    @property
    def failed(self) -> bool:
        within = self.bound is None or (not isinstance(self.value, str) and self.value <= self.bound)
        return bool(self.problem) or not (within or self.skipped)


@dataclass(frozen=True)
class StageReport:
    stage: str
    lines: list[Measured]
    facts: Facts
    problem: str  # error of the stage's process
    seconds: float
    peak_gib: float

    @classmethod
    def of(cls, stage: str, part: PartResult) -> "StageReport":
        facts: Facts = {}
        for row in part.rows:
            facts |= {} if "case" in row else row
        lines = [Measured(**row) for row in part.rows if "case" in row]
        peak_gib = facts.pop("peak_gib", part.peak_bytes / GIB)
        return cls(stage, lines, facts, part.problem, part.seconds, peak_gib)

    @property
    def failed(self) -> bool:
        return bool(self.problem) or any(line.failed for line in self.lines)

    @property
    def skipped(self) -> bool:
        return bool(self.lines) and all(line.skipped for line in self.lines)

    def to_record(self) -> dict[str, Any]:
        lines = [asdict(line) | {"failed": line.failed} for line in self.lines]
        return asdict(self) | {"lines": lines, "failed": self.failed}


def table(reports: Sequence[StageReport]) -> str:
    """Formats the report as a Markdown table with aligned columns."""
    rows = [list(COLUMNS), *(row for report in reports for row in rows_of(report))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    rows.insert(1, ["-" * width for width in widths])
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def rows_of(report: StageReport) -> Iterator[list[str]]:
    """Yields the row of a stage, then a row per measured line."""
    planned = report.facts.get("planned_gib")
    memory = [f"{report.seconds:.0f}", f"{report.peak_gib:.2f}", "" if planned is None else f"{planned:.2f}"]
    yield [report.stage, report.problem, "", "", *memory, _verdict(report.failed, report.skipped)]
    for line in report.lines:
        bound = "" if line.bound is None else f"{line.bound:.3g}"
        value = line.value if isinstance(line.value, str) else f"{line.value:.3g}"
        verdict = _verdict(line.failed, bool(line.skipped))
        yield ["", line.case, line.problem or line.skipped or value, bound, "", "", "", verdict]


def _verdict(failed: bool, skipped: bool) -> str:
    return "FAILED" if failed else "skipped" if skipped else "ok"
