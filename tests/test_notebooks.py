"""Every notebook of docs/ and every example of scripts/examples runs from start to end."""

import ast
import asyncio
import inspect
import json
import runpy
import tempfile
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


async def run_cells(notebook: Path) -> None:
    """Runs the code cells in one namespace. As in Jupyter, cells may use top-level `await`."""
    namespace = types.ModuleType("notebook").__dict__
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            name = f"{notebook.name}, cell {number}"
            code = compile("".join(cell["source"]), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            awaitable = eval(code, namespace)
            if inspect.iscoroutine(awaitable):
                await awaitable


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asyncio.run(run_cells(notebook))


def test_a_failing_notebook_is_detected(tmp_path):
    path = tmp_path / "wrong.ipynb"
    cells = [{"cell_type": "code", "source": ["import asyncio\n", "await asyncio.sleep(0)\n", "assert 1 == 2"]}]
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(AssertionError):
        asyncio.run(run_cells(path))


@pytest.mark.slow
def test_the_loop_from_its_parts_runs_and_fits_on_a_screen(capsys):
    path = ROOT / "scripts" / "examples" / "rl_loop.py"
    assert len(path.read_text().splitlines()) <= 100
    runpy.run_path(str(path), run_name="__main__")
    steps = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 1", "step 2"]
    assert all("mismatch/behavior_kl" in line for line in steps)
