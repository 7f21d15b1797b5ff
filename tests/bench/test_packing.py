"""The packing benchmark, which is pure arithmetic, reproduces its page."""

from argparse import Namespace
from pathlib import Path

import pytest

from scripts.bench import packing

ROOT = Path(__file__).parents[2]


def lines(config: str, rows: int, signal: float, steps: int) -> list[str]:
    args = Namespace(config=str(ROOT / "configs" / config), rows=rows, signal=signal, steps=steps)
    return packing.table(packing.run(args)).splitlines()[2:]


@pytest.mark.parametrize(("rows", "signal"), [(8, 1.0), (8, 0.6), (4, 1.0), (1, 1.0)])
def test_the_page_has_what_the_bench_computes(rows, signal):
    page = (ROOT / "docs" / "results" / "learner.md").read_text()
    largest, chosen = lines("paragrpo_8b.yaml", rows, signal, 54)
    assert f"| {rows} | {signal:g} {largest}\n| | {chosen}" in page


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [("paragrpo_8b.yaml", -1, "--rows -1 must be at least 0"), ("smoke_cpu.yaml", 0, "more than pack.row_tokens=2048")],
)
def test_rows_that_hold_no_group_are_refused(config, rows, message):
    with pytest.raises(ValueError, match=message):
        lines(config, rows, 1.0, 1)


def test_a_recipe_without_gating_has_the_overview_of_every_prompt():
    _, chosen = lines("grpo_8b.yaml", 8, 1.0, 2)
    slots = float(chosen.split(" | ")[3].replace(",", ""))
    assert slots > 7 * (500 + 64 * 60)  # seven prompts with 64 frames of 60 tokens
