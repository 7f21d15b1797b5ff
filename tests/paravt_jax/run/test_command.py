"""The commands that run a config, as people type them."""

import asyncio
import importlib
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from huggingface_hub import constants

from paravt_jax.config import Config, EvalConfig, SftConfig, load_config, to_record
from paravt_jax.config.keys import section_of
from paravt_jax.run.command import shown as shown_lines
from paravt_jax.run.policy import policy_of

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


@pytest.mark.parametrize(
    "name",
    ["train", "sft"],
)
def test_device_is_rejected_without_plan(name, shown, capsys):
    with pytest.raises(SystemExit):
        shown(name, "--config", str(CONFIGS / COMMANDS[name]), "--device", "h100", "--show")
    assert "--device needs --plan" in capsys.readouterr().err


def test_a_replay_has_the_settings_of_its_run_and_a_directory_below_it(shown, tmp_path):
    record = to_record(load_config(CONFIGS / "smoke_cpu.yaml", "seed=41"))
    (tmp_path / "config.json").write_text(json.dumps({"config": record, "git_commit": None}))
    found = shown("train", "--replay", str(tmp_path), "--show", "loss.kl_coef=0.5")
    assert f"run_dir: {tmp_path / 'replay'}" in found and "seed: 41" in found and "kl_coef: 0.5" in found
    found = shown("train", "--replay", str(tmp_path), "--show", "run_dir=elsewhere")
    assert "run_dir: elsewhere" in found
    found = shown("train", "--config", str(CONFIGS / "smoke_cpu.yaml"), "--replay", str(tmp_path), "--show")
    assert "run_dir: runs/smoke_cpu" in found and "seed: 0 " in found


JUDGED = ["reward.oe_mode=llm", "judge.url=http://a/v1", "judge.model='1e3: # é'", r'rollout.forced_prefix="# \n\"\n"']


@pytest.mark.parametrize(("name", "settings"), [("train", []), ("train", JUDGED), ("sft", []), ("eval", JUDGED)])
def test_what_is_shown_is_the_same_config_again(name, settings, tmp_path):
    config = load_config(CONFIGS / COMMANDS[name], *settings, schema=SETTINGS[name])
    (tmp_path / "shown.yaml").write_text("\n".join(shown_lines(config)))
    assert load_config(tmp_path / "shown.yaml", schema=SETTINGS[name]) == config


@pytest.mark.parametrize("name", ["train", "eval"])
def test_what_a_variable_stands_for_is_shown_as_it_is_written(name, shown, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("SERVERS", "5")
    engine = ("engine.kind=sglang", "engine.urls=['http://${oc.env:SECRET}']", "engine.num_servers=${oc.env:SERVERS}")
    file = str(CONFIGS / COMMANDS[name])
    found = shown(name, "--config", file, "--show", "model.path=${oc.env:SECRET}/8b", *engine)
    assert "path: ${oc.env:SECRET}/8b" in found and 'urls: ["http://${oc.env:SECRET}"]' in found
    assert "num_servers: ${oc.env:SERVERS}" in found and "hunter2" not in found


def test_a_comment_stands_beside_its_setting_or_above_a_long_one(shown):
    text = shown("train", "--show", "train.group_size=5")
    for line in (
        "\n  group_size: 5                         # episodes per prompt; published\n",
        "\n  attention: auto                       # auto | xla | blocked | scanned | kernel; auto picks ",
        "\n\nmesh:                                   # Devices along each axis. ",
        "\n  video_root: ''                        # directory for relative ",
        f"\n{' ' * 40}# files, a data set on the hub as OWNER/NAME[/SUB/DIR][@REVISION], or synthetic\n",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120


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
        asyncio.run(policy_of(config, tmp_path))


def without_help(schema: type) -> list[str]:
    sections = {field.name: section_of(get_type_hints(schema)[field.name]) for field in fields(schema)}
    silent = [field.name for field in fields(schema) if sections[field.name] is None and not field.metadata.get("help")]
    nested = [name for section in sections.values() if section is not None for name in without_help(section)]
    return [f"{schema.__name__}.{name}" for name in silent] + nested


@pytest.mark.parametrize("schema", [Config, SftConfig, EvalConfig])
def test_every_setting_has_a_help_text(schema):
    assert without_help(schema) == []
