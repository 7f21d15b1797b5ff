"""The examples of scripts/examples run with the command in their first line."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
MAX_LINES = 100


@pytest.mark.slow
def test_the_loop_from_its_parts_runs_and_fits_on_a_screen(capsys):
    path = EXAMPLES / "rl_loop.py"
    assert len(path.read_text().splitlines()) <= MAX_LINES
    runpy.run_path(str(path), run_name="__main__")
    steps = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 1", "step 2"]
    assert all("mismatch/behavior_kl" in line for line in steps)
