"""Imports go scripts, tests -> paravt_jax -> {model_port, rollout}; the maths stays pure, the sidecar stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("paravt_jax", "model_port", "rollout")
MAY_IMPORT = {"paravt_jax": {"model_port", "rollout"}, "model_port": set(), "rollout": set()}
PURE_MODULES = ("rewards", "answers", "advantages", "packing", "losses")  # no config, no I/O, no logger
IMPURE = {"config", "logging", "omegaconf", "yaml", "os", "io", "pathlib", "subprocess", "socket", "shutil", "requests"}


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at any depth of it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_in_one_direction_only(package):
    forbidden = set(PACKAGES) - MAY_IMPORT[package] - {package}
    for path in (ROOT / package).rglob("*.py"):
        wrong = {name for name in imports_of(path) if name.split(".")[0] in forbidden}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("module", PURE_MODULES)
def test_the_maths_imports_no_config_and_no_io(module):
    path = ROOT / "paravt_jax" / f"{module}.py"
    if not path.exists():
        pytest.skip("not written yet")
    outside = {name for name in imports_of(path) if not name.startswith("model_port.")}  # its config is a shape
    wrong = {name for name in outside if IMPURE & set(name.split("."))}
    assert not wrong, f"{path.name} imports {wrong}"


def test_the_check_itself_notices_a_forbidden_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def late():\n    from paravt_jax.config import load\n    import rollout.engine\n")
    assert imports_of(path) == {"paravt_jax.config.load", "rollout.engine"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(m for m in sys.modules if '.' not in m))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_rollout_brings_in_neither_jax_nor_torch():
    assert not modules_after("import rollout") & {"jax", "jaxlib", "flax", "torch"}


@pytest.mark.parametrize("statement", ["import model_port, model_port.sampler", "import paravt_jax"])
def test_the_learner_does_not_bring_in_torch(statement):
    assert "torch" not in modules_after(statement)
