"""The commands that run a config, as people type them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from paravt_jax.config import Config, EvalConfig, SftConfig, load_config
from paravt_jax.run.policy import open_policy

CONFIGS = Path(__file__).parents[3] / "configs"
COMMANDS = {"train": "smoke_cpu.yaml", "sft": "miniature/sft.yaml", "eval": "eval_8b.yaml"}
SETTINGS = {"train": Config, "sft": SftConfig, "eval": EvalConfig}


@pytest.fixture
def shown(monkeypatch, capsys):
    """What a command prints, called as `python -m paravt_jax.NAME ARGUMENTS`."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        importlib.import_module(f"paravt_jax.{name}").main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_may_stand_between_settings(name, shown):
    given = ["--config", str(CONFIGS / COMMANDS[name]), "seed=41", "--show", "mesh.data=1", "run_dir=runs/elsewhere"]
    found = shown(name, *given)
    assert "seed: 41" in found and "run_dir: runs/elsewhere" in found


def test_plan_may_stand_between_settings(shown):
    found = shown(
        "train", "--config", str(CONFIGS / "smoke_cpu.yaml"), "--plan", "mesh.data=1", "--device", "v5p", "seed=1"
    )
    assert "v5p" in found


@pytest.mark.parametrize("arguments", [["--help"], ["--show"], ["--config", "gone.yaml"]])
def test_what_needs_no_computation_does_not_wait_for_jax(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "paravt_jax.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "paravt_jax.config" in loaded and not {"jax", "orbax", "transformers"} & loaded
    assert done.returncode == (arguments == ["--config", "gone.yaml"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_cannot_be_downloaded_is_to_be_given_as_the_setting_is_called(name, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    config = load_config(CONFIGS / COMMANDS[name], "model.path=Nobody/nothing", schema=SETTINGS[name])
    with pytest.raises(RuntimeError, match=r"could not be downloaded .* and give model\.path=DIR$"):
        open_policy(config, tmp_path)
