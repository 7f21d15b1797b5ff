"""Command lines of the commands that run a config."""

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
from paravt_jax.run.command import config_lines
from paravt_jax.run.policy import policy_of

CONFIGS = Path(__file__).parents[3] / "configs"
COMMANDS = {"train": "smoke_cpu.yaml", "sft": "miniature/sft.yaml", "eval": "eval_8b.yaml"}
SETTINGS = {"train": Config, "sft": SftConfig, "eval": EvalConfig}


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Returns the output of `python -m paravt_jax.NAME ARGUMENTS`."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        importlib.import_module(f"paravt_jax.{name}").main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_options_can_be_between_settings(name, output_of):
    output = output_of(name, "--config", str(CONFIGS / COMMANDS[name]), "seed=41", "--show", "run_dir=runs/elsewhere")
    assert "seed: 41" in output and "run_dir: runs/elsewhere" in output


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("train", ["--device", "h100"], "--device needs --plan"),
        ("sft", ["--device", "h100"], "--device needs --plan"),
        ("train", ["--take-over"], "--take-over needs running servers; set engine.urls"),
    ],
)
def test_a_flag_without_its_condition_is_rejected(name, flags, message, output_of, capsys):
    with pytest.raises(SystemExit, match="2"):
        output_of(name, "--config", str(CONFIGS / COMMANDS[name]), *flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["--train.num_steps=3", "--num-steps"])
def test_a_setting_written_as_a_flag_is_an_error_with_advice(name, flag, output_of, capsys):
    with pytest.raises(SystemExit):
        output_of(name, "--config", str(CONFIGS / COMMANDS[name]), flag)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: unrecognized arguments: {flag}; settings have no dashes, for example seed=1")


def test_a_replay_has_its_runs_settings_and_a_directory_inside(output_of, tmp_path):
    record = to_record(load_config(CONFIGS / "smoke_cpu.yaml", "seed=41"))
    (tmp_path / "config.json").write_text(json.dumps({"config": record, "git_commit": None}))
    output = output_of("train", "--replay", str(tmp_path), "--show", "loss.kl_coef=0.5")
    assert f"run_dir: {tmp_path / 'replay'}" in output and "seed: 41" in output and "kl_coef: 0.5" in output
    output = output_of("train", "--replay", str(tmp_path), "--show", "run_dir=elsewhere")
    assert "run_dir: elsewhere" in output
    output = output_of("train", "--config", str(CONFIGS / "smoke_cpu.yaml"), "--replay", str(tmp_path), "--show")
    assert "run_dir: runs/smoke_cpu" in output and "seed: 0 " in output


JUDGED = ["reward.oe_mode=llm", "judge.url=http://a/v1", "judge.model='1e3: # é'", r'rollout.forced_prefix="# \n\"\n"']


@pytest.mark.parametrize(("name", "settings"), [("train", []), ("train", JUDGED), ("sft", []), ("eval", JUDGED)])
def test_the_output_of_show_is_the_same_config(name, settings, tmp_path):
    config = load_config(CONFIGS / COMMANDS[name], *settings, schema=SETTINGS[name])
    (tmp_path / "shown.yaml").write_text("\n".join(config_lines(config)))
    assert load_config(tmp_path / "shown.yaml", schema=SETTINGS[name]) == config


@pytest.mark.parametrize("name", ["train", "eval"])
def test_show_leaves_variables_unresolved(name, output_of, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("SERVERS", "5")
    engine = ("engine.kind=sglang", "engine.urls=['http://${oc.env:SECRET}']", "engine.num_servers=${oc.env:SERVERS}")
    file = str(CONFIGS / COMMANDS[name])
    output = output_of(name, "--config", file, "--show", "model.path=${oc.env:SECRET}/8b", *engine)
    assert "path: ${oc.env:SECRET}/8b" in output and 'urls: ["http://${oc.env:SECRET}"]' in output
    assert "num_servers: ${oc.env:SERVERS}" in output and "hunter2" not in output


def test_a_comment_is_beside_its_setting_or_above_a_long_one(output_of):
    text = output_of("train", "--show", "train.group_size=5")
    for line in (
        "\n  group_size: 5                         # episodes per prompt; the published value\n",
        "\n  attention: auto                       # auto | xla | blocked | scanned | kernel; attention ",
        "\n  serve_with: ''                        # '' | vllm | sglang; openai: start num_servers of this program ",
        "\n\nmesh:                                   # Devices along each axis. ",
        "\n  video_root: ''                        # base directory of relative video paths; ",
        f"\n{' ' * 40}# with parquet files, a dataset on the hub as OWNER/NAME[/SUB/DIR][@REVISION],\n",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["--show"], ["--config", "gone.yaml"]])
def test_help_show_and_missing_files_do_not_load_jax(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "paravt_jax.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "paravt_jax.config" in loaded and not {"jax", "orbax", "transformers"} & loaded
    assert done.returncode == (arguments == ["--config", "gone.yaml"])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_failed_download_names_the_setting(name, tmp_path, monkeypatch):
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
