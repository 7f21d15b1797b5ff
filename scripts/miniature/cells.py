"""The cells of the map: worlds that differ in the reliability of reports and in the initial call rate.

The stated cells were chosen before any run, because the published pattern should hold there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from paravt_jax.run.log import whole_file
from scripts.miniature.arms import ARMS
from scripts.miniature.dials import World, load_world

DATA = Path(__file__).parents[2] / "docs" / "miniature" / "data"
PREDICTIONS, MEASURED = DATA / "map_predictions.json", DATA / "map.json"
REPORTS, CALLS = (0.5, 0.75, 0.95), (0.03, 0.2, 0.6)
BUDGETS = (4, 16, 32)  # frame budgets of an evaluation
METRICS = {  # of an episode, and their names in an evaluation
    "accuracy": "accuracy_mean",
    "kappa": "tool_calls_mean",
    "f_tau": "format_reward",
    "parseable": "parseable_frac",
}
STATED = ((0.95, 0.2), (0.95, 0.03))
COLD_START = "sft"
CORE = ("grpo", "para_grpo", "no_tool_reward", "recommended")  # arms of every cell; the stated cells have all arms
Row = Mapping[str, Any]


class Labels(Protocol):
    def row(self, arm: str, forced: bool, dispatch: str, frames: int) -> dict[str, Any]:
        """Returns the keys that identify a number in the results."""
        ...


@dataclass(frozen=True)
class Cell:
    reports: float  # share of right reports
    calls: float  # share of traces that call

    @property
    def arms(self) -> Sequence[str]:
        return tuple(ARMS) if (self.reports, self.calls) in STATED else CORE

    @cached_property
    def world(self) -> World:
        return load_world("map", f"traces.wrong_frac={1 - self.reports:g}", f"calls_frac={self.calls}")

    def row(self, arm: str, forced: bool, dispatch: str, frames: int) -> dict[str, Any]:
        """Returns the keys that identify a number of the map."""
        names = {"reports": self.reports, "calls": self.calls, "arm": arm}
        return names | {"forced": forced, "dispatch": dispatch, "frames": frames}


CELLS = tuple(Cell(*each) for each in (*STATED, *((r, c) for r in REPORTS for c in CALLS if (r, c) not in STATED)))


def write_rows_of_map(path: Path, rows: Iterable[Row], **about: Any) -> None:
    """Writes one row per line, with few digits, because the files are committed."""
    lines = ",\n".join(json.dumps(_rounded(row), ensure_ascii=False) for row in rows)
    head = json.dumps({**about, "date": date.today().isoformat()}, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(f'{{"about": {head},\n"rows": [\n{lines}\n]}}\n'.encode())


def _rounded(row: Row) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_bytes())["rows"] if path.exists() else []
