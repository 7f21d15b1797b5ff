"""What pip installs is what the tree holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("paravt_jax", "model_port", "rollout")


def test_every_folder_with_code_is_a_package_and_is_installed():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": [f"{name}*" for name in PACKAGES]}
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    code = {folder for folder in folders if "sglang_cpu" not in folder.parts}  # that is data: the sidecar's shim
    assert {folder for folder in code if not (folder / "__init__.py").is_file()} == set()
