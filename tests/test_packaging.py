"""What pip installs is what the tree holds."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("paravt_jax", "model_port", "rollout")
        for init in (ROOT / top).rglob("__init__.py")
        if "shim" not in init.parts  # belongs to the sidecar's environment
    }
    assert set(listed) == found
