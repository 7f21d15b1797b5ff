"""An evaluation with the embedded engine: cells of dispatches and budgets; missing answers are not wrong ones."""

import asyncio
import json
from pathlib import Path

import pytest
from training import ROOT

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, new_adapter, write_adapter
from model_port.config import LoraConfig
from model_port.layout import RESULTS_FILE
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.eval import run_eval
from paravt_jax.evaluation.results import cell_table
from paravt_jax.view.cells import load_cells
from paravt_jax.view.records import cells_of
from scripts.miniature.model import make_model
from scripts.miniature.world import make_world, questions, rl_row, write_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Two videos, the second of which cannot be decoded."""
    directory = tmp_path_factory.mktemp("world")
    scenes = make_world(directory, 0, 2)
    write_rows(directory / "rl.jsonl", [rl_row(question) for scene in scenes for question in questions(scene)[:3]])
    (directory / scenes[1].video).write_bytes(b"no video")
    make_model(directory / "tiny.hf")
    return directory


def config_of(world: Path, *overrides: str) -> EvalConfig:
    settings = [f"run_dir={world / 'eval'}", f"model.path={world / 'tiny.hf'}", f"data.validation={world / 'rl.jsonl'}"]
    settings += ["eval.frame_budgets=[2,4]", "eval.dispatches=[parallel,none]", "eval.num_samples=2"]
    settings += ["rollout.max_new_tokens=24", "engine.max_rows=8"]
    return load_config(ROOT / "configs" / "miniature" / "eval.yaml", *settings, *overrides, schema=EvalConfig)


@pytest.fixture(scope="module")
def cells(world):
    return asyncio.run(run_eval(config_of(world)))


@pytest.mark.slow
def test_every_dispatch_and_budget_is_a_cell(cells, world):
    expected = [("parallel", 2), ("parallel", 4), ("none", 2), ("none", 4)]
    assert [(cell["dispatch"], cell["frame_budget"]) for cell in cells] == expected
    assert json.loads((world / "eval" / RESULTS_FILE).read_text())["cells"] == cells
    assert len(cell_table(cells).splitlines()) == 2 + 4
    lines = [json.loads(line) for line in (world / "eval" / "samples_none_4.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and all(len(line["episodes"]) == 2 for line in lines)
    assert all("turns" in episode or episode["missing"] for line in lines for episode in line["episodes"])


@pytest.mark.slow
def test_missing_episodes_are_counted_apart_from_wrong_ones(cells):
    for cell in cells:
        metrics = cell["metrics"]
        assert (metrics["num_episodes"], metrics["num_missing"], cell["n"]["missing"]) == (6, 6, {"video": 3})
        by_type = cell["by_type"].values()
        assert sum(of_type["num_missing"] for of_type in by_type) == 6
        assert metrics["accuracy_mean"] == pytest.approx(sum(of_type["accuracy_mean"] for of_type in by_type) / 3)
        assert cell["scores"]["strict"]["score"] == pytest.approx(metrics["accuracy_mean"])
        assert cell["refused"] == "" and cell["headline"] is None  # the number of samples is not published


@pytest.mark.slow
def test_an_interrupted_evaluation_runs_only_the_missing_samples(cells, world):
    path = world / "eval" / "samples_none_2.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]) + lines[0][:50])
    (added := world / "tiny.hf" / "added").touch()
    with pytest.raises(ValueError, match=r"has samples of another model: the files of \S*tiny\.hf have changed"):
        asyncio.run(run_eval(config_of(world)))
    added.unlink()
    assert asyncio.run(run_eval(config_of(world))) == cells  # sampling depends only on the seed


@pytest.mark.slow
def test_temperatures_are_an_axis_of_the_cells(world):
    settings = ["eval.frame_budgets=[2]", "eval.dispatches=[none]", "eval.num_samples=1", "eval.temperatures=[0,0.7]"]
    cells = asyncio.run(run_eval(config_of(world, *settings, f"run_dir={world / 'temperatures'}")))
    axes = [(cell["dispatch"], cell["frame_budget"], cell["temperature"]) for cell in cells]
    assert axes == [("none", 2, 0.0), ("none", 2, 0.7)]
    directory = world / "temperatures"
    files = {path.name for path in directory.glob("samples_*")}
    assert files == {"samples_none_2_t0.jsonl", "samples_none_2_t0.7.jsonl"}
    assert (directory / "plots" / "temperatures.png").read_bytes().startswith(b"\x89PNG")
    assert cell_table(cells).splitlines()[0].startswith("| dispatch | frames | temperature | accuracy |")
    (cell,) = [cell for cell in load_cells(directory, cells_of(directory)) if cell["temperature"] == 0.7]
    assert (cell["dispatch"], cell["frame_budget"]) == ("none", 2)


@pytest.mark.slow
def test_cells_of_other_settings_are_not_mixed(cells, world):
    with pytest.raises(ValueError, match=r"other settings \(data, rollout\); choose another run_dir"):
        asyncio.run(run_eval(config_of(world, "rollout.temperature=0.5", "data.max_bad_frac=0.5")))


def test_conflicting_settings_are_rejected(world):
    with pytest.raises(ValueError, match=r"eval\.num_samples=2 would repeat the same answer"):
        config_of(world, "rollout.temperature=0")
    with pytest.raises(ValueError, match=r"eval\.num_samples=2 would repeat the same answer at eval\.temperatures=0"):
        config_of(world, "eval.temperatures=[0,0.7]")
    with pytest.raises(ValueError, match=r"eval\.temperatures=\[-1\.0\] must be finite numbers, 0 \(greedy\) or at l"):
        config_of(world, "eval.temperatures=[-1]")
    with pytest.raises(ValueError, match=r"data\.validation is empty"):
        config_of(world, "data.validation=")
    with pytest.raises(ValueError, match=r"eval\.frame_budgets"):
        config_of(world, "eval.frame_budgets=[0]")


@pytest.mark.slow
def test_sglang_servers_need_a_merged_model(world, tmp_path):
    config, lora = model_port.load(world / "tiny.hf").config, LoraConfig(rank=3)
    base = AdapterBase(str(world / "tiny.hf"))
    write_adapter(tmp_path, config, AdapterInfo(lora, base), new_adapter(config, lora, seed=0))
    overrides = (f"model.path={tmp_path}", f"run_dir={tmp_path / 'run'}", "engine.kind=sglang")
    with pytest.raises(ValueError, match=r"is an adapter, and SGLang servers need a merged model"):
        asyncio.run(run_eval(config_of(world, *overrides)))
