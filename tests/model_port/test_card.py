"""A model card has the run's record and how to use the model, but nothing about the machine."""

import json
import re
from typing import Any

import pytest
from huggingface_hub import ModelCard

from model_port.card import CURVE_FILE, curve_of, make_card, read_cells, renamed
from model_port.convert import convert
from model_port.export import export
from model_port.model import VLModel

BASE = "Qwen/Qwen3-VL-8B-Instruct"
RL = {
    "model": {"path": "/secret/place/sft.ckpt"},
    "data": {"train": "ParaVT/ParaVT-Parquet/rl@main", "validation": "/secret/place/own.jsonl"},
    "train": {"num_steps": 54, "group_size": 8},
    "video": {"frame_budgets": [4, 64]},
    "optim": {"learning_rate": 1e-6},
    "loss": {"name": "para_grpo|x"},
    "judge": None,
}


@pytest.fixture
def trained(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "54"
    checkpoint.mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({"config": RL}))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "learner.png").write_bytes(b"picture")
    return checkpoint


def test_the_card_of_a_run_has_data_stage_and_hyper_parameters(trained):
    card = make_card(trained, "me/policy", BASE, "bfloat16", has_recipe=True)
    data = ModelCard(card).data
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", BASE, ["ParaVT/ParaVT-Parquet"])
    assert "step 54 of a training run" in card and "trained by reinforcement learning" in card
    assert "| train.num_steps | 54 |" in card and "| video.frame_budgets | [4, 64] |" in card
    assert "| loss.name | para_grpo x |" in card  # no value can end a table cell
    assert f"![training]({CURVE_FILE})" in card and curve_of(trained).read_bytes() == b"picture"
    assert 'paravt_jax.ask VIDEO "QUESTION" --model me/policy' in card and "paravt.json" in card
    assert "eprint = {2605.20342}" in card


def test_a_renamed_card_is_the_card_of_the_other_name(trained):
    old, new = (make_card(trained, name, BASE, "bfloat16", has_recipe=True) for name in ("model", "me/policy"))
    assert renamed(old.encode(), "model", "me/policy") == new.encode()


def test_the_card_has_the_licenses_of_weights_and_data_sets(trained):
    card = make_card(trained, "me/policy", BASE, "bfloat16", has_recipe=True)
    page = "[ParaVT/ParaVT-Parquet](https://huggingface.co/datasets/ParaVT/ParaVT-Parquet)"
    assert f"| training data | {page} |\n| validation data | own data |" in card
    assert "applies to the weights: apache-2.0.\n\nLicenses of the data" in card
    assert f"- {page}: apache-2.0\n- own data: not recorded by the run\n" in card
    assert "other/rows): see its page" in card_with(trained, {"data": {"train": "other/rows"}})
    assert "- synthetic data: no license, drawn by the run" in card_with(trained, {"data": {"train": "synthetic"}})


def card_with(checkpoint, settings):
    (checkpoint.parents[1] / "config.json").write_text(json.dumps({"config": settings}))
    return make_card(checkpoint, "me/policy", BASE, "bfloat16", has_recipe=True)


@pytest.mark.slow
def test_the_cards_code_loads_the_model(tiny_hf):
    """Runs the card's code up to the video processor, which transformers lacks without torchvision."""
    card = make_card(tiny_hf, str(tiny_hf), BASE, "float32", has_recipe=False)
    in_jax, in_transformers = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(in_jax, namespace)
    assert isinstance(namespace["model"], VLModel)
    compile(in_transformers, "card", "exec")
    exec(in_transformers.partition("processor = ")[0], namespace)
    assert namespace["model"].config.model_type == "qwen3_vl"


def test_the_card_of_a_cold_start_names_its_stage(trained):
    assert "trained by supervised fine-tuning on traces" in card_with(trained, {**RL, "sft": {"num_steps": 500}})


def test_a_card_needs_no_settings(trained):
    (trained.parents[1] / "config.json").unlink()
    card = make_card(trained, "me/policy", None, "bfloat16", has_recipe=False)
    assert "## Training" not in card and "## How to use" in card and "Not evaluated" in card
    assert ModelCard(card).data.license is None
    (trained.parents[1] / "config.json").write_text('{"config": 7}')
    with pytest.raises(ValueError, match=r"config\.json: config=7 must be an object"):
        make_card(trained, "me/policy", None, "bfloat16", has_recipe=False)


CELL = {
    "split": "lvbench",
    "dispatch": "parallel",
    "frame_budget": 64,
    "temperature": 0.7,
    "mode": "agentic",
    "num_samples": 1,
    "seed": 3,
    "n": {"expected": 1549, "rows": 1549, "answered": 1540, "unanswered": 9},
    "refused": "",
    "scores": {"strict": {"score": 0.398, "interval_95": [0.37, 0.425], "missing_as_wrong": 0.398}},
    "data": {"repository": "lmms-lab/LVBench", "revision": "abc", "sha256": {"/secret/rows.parquet": "d" * 64}},
    "hashes": {"prompt": "p" * 24},
    "model": {"path": "54", "source": "/secret/place"},
    "engines": [{"kind": "jax"}],
    "git_commit": "c" * 40,
}


def evaluated(directory, **changed):
    directory.mkdir(exist_ok=True)
    (directory / "eval.json").write_text(json.dumps({"cells": [{**CELL, **changed}]}))
    return directory


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, "at cccccccccccc."),
        ({"git_commit": None, "packages": {"paravt_jax": "0.3.0"}}, "0.3.0."),
        ({"git_commit": None}, "of an unknown version."),
    ],
)
def test_a_certificate_names_the_commit_or_without_a_clone_the_version(tmp_path, changed, code):
    cells = read_cells(evaluated(tmp_path / "eval", **changed), ["54"])
    card = make_card(tmp_path, "me/policy", None, "bfloat16", has_recipe=False, cells=cells)
    assert f"; paravt_jax {code}\n" in card


def test_the_card_has_evaluation_scores_and_certificates_without_paths(trained, tmp_path):
    own = {"split": None, "refused": "", "data": {"repository": "/secret/own.jsonl", "revision": None, "sha256": {}}}
    cells = read_cells(evaluated(tmp_path / "eval"), ["54"]) + read_cells(evaluated(tmp_path / "eval", **own), ["54"])
    card = make_card(trained, "me/policy", BASE, "bfloat16", has_recipe=True, cells=cells)
    assert "| lvbench | parallel | 64 | 0.7 | ours | 39.8 | 37.0 to 42.5 | 39.8 | 1549 of 1549 |" in card
    assert "| own data | parallel |" in card and "lmms-lab/LVBench at abc (sha256 dddddddddddd)" in card
    assert "mode `agentic`, seed 3" in card and "No headline" not in card and "secret" not in card


def test_user_code_is_named_without_its_directory(trained, tmp_path):
    (trained.parents[1] / "config.json").write_text(json.dumps({"config": {"loss": {"name": "/secret/own.py:loss"}}}))
    cells = read_cells(evaluated(tmp_path / "eval", engines=[{"kind": "/secret/engine.py:make"}]), ["54"])
    card = make_card(trained, "me/policy", BASE, "bfloat16", has_recipe=True, cells=cells)
    assert "| loss.name | own.py:loss |" in card and "engine engine.py:make;" in card and "secret" not in card


def test_a_refused_headline_is_reported_as_refused(trained, tmp_path):
    cells = read_cells(evaluated(tmp_path / "eval", refused="12 of 1549 samples: 12 rows"), ["54"])
    card = make_card(trained, "me/policy", BASE, "bfloat16", has_recipe=True, cells=cells)
    assert "No headline score for lvbench: 12 of 1549 samples: 12 rows." in card


def test_an_evaluation_of_another_or_no_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="evaluated 54, but you export other; give an evaluation of the exported"):
        read_cells(evaluated(tmp_path / "eval"), ["other"])
    with pytest.raises(ValueError, match=r"has no eval\.json; give the run_dir of a finished evaluation"):
        read_cells(tmp_path, ["54"])


def test_an_evaluation_of_an_earlier_export_with_other_weights_is_rejected(tiny_hf, tmp_path):
    ckpt, out = tmp_path / "ckpt", tmp_path / "out"
    evaluation = evaluated(tmp_path / "eval", model={"path": str(out)})
    convert(tiny_hf, ckpt)
    export(ckpt, out)
    export(ckpt, out, force=True, evaluation=evaluation)
    for options in ({"dtype": "bfloat16"}, {"max_shard_gib": 0.001}):
        with pytest.raises(ValueError, match=r"is of the model in .*out, which has other weights than this export"):
            export(ckpt, out, force=True, evaluation=evaluation, **options)
    assert "| ours | 39.8 |" in (out / "README.md").read_text()


def test_the_card_of_a_checkpoint_without_a_run_has_no_training_section(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": RL}))
    card = make_card(tmp_path / "8b.ckpt", "8b.hf", "some/base", "bfloat16", has_recipe=False)
    assert "a checkpoint with" in card and "## Training" not in card and curve_of(tmp_path / "8b.ckpt") is None
