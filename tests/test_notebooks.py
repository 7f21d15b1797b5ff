"""Every notebook of docs/ runs from start to end."""

import ast
import asyncio
import inspect
import json
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
