"""The benchmarks run, compare equal work, and report their results."""

import importlib
import json
import re
import sys
from argparse import ArgumentParser, Namespace

import forked
import numpy as np
import pytest

from model_port.inputs import Frame
from model_port.tiny import tiny_config
from paravt_jax.bench import __main__ as wheel_main, rollout
from scripts.bench import __main__ as bench_main, learner, sampler, update, ways


@pytest.fixture
def bench(monkeypatch):
    """Runs the command in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        monkeypatch.setattr(wheel_main, "exit_on_sigterm", lambda: None)
        bench_main.main()

    return run


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # otherwise the bench restarts its process
    sizes = {"FRAME_GRID": (4, 6), "SMALL_GRID": (4, 6), "PROMPT": (2, 11), "RESPONSE": (0, 7), "NUM_EPISODES": 3}
    workloads = {"one sequence": [(2, 11)], "unequal batch": [(2, 11), (0, 29)]}
    for name, value in {**sizes, "WORKLOADS": workloads}.items():
        monkeypatch.setattr(learner, name, value)
    # Runs each of the four ways once, because each process compiles.
    pairs = {("own frames", "branches"): ("update_s", "vision_s"), ("torch", "rows"): ("update_s",)}
    compared = {pair: {measure: f"{pair} {measure}" for measure in measures} for pair, measures in pairs.items()}
    monkeypatch.setattr(ways, "COMPARED", compared)
    monkeypatch.setattr(ways, "get_context", lambda _: forked.forks)  # forked processes save the import time


@pytest.mark.slow
def test_learner_bench_compares_both_sides_and_writes_json(small, bench, tmp_path, capsys):
    out = tmp_path / "learner.json"
    only = ("--model", "tiny", "--dtype", "float32", "--workload", "passes")
    bench("learner", *only, "--repeats", "1", "--json", str(out))
    result = json.loads(out.read_text())
    assert {(row["workload"], row["mode"]) for row in result["rows"]} == {
        (workload, mode) for workload in ("one sequence", "unequal batch") for mode in ("forward", "forward+backward")
    }
    assert all(row["torch_s"] > 0 and row["jax_s"] > 0 for row in result["rows"])
    assert f"{result['rows'][0]['jax_s']:.3f}" in capsys.readouterr().out and result["machine"]["num_cores"] >= 1


@pytest.mark.nightly
def test_learner_bench_compares_whole_updates(small):
    result = learner.run(Namespace(model="tiny", dtype="float32", repeats=1, workload="update"))
    assert not result["rows"]
    assert {(row["slow"]["way"], row["fast"]["way"]) for row in result["updates"]} == set(ways.COMPARED)
    assert all(row[side][row["measure"]] > 0 for row in result["updates"] for side in ("slow", "fast"))
    assert all(row[side]["peak_mib"] > 0 for row in result["updates"] for side in ("slow", "fast"))
    lines = learner.table(result).splitlines()
    assert len(lines) == 2 + 3 and "('torch', 'rows') update_s" in lines[-1]


@pytest.mark.parametrize(
    ("package", "name"),
    [
        *(("scripts.bench", name) for name in bench_main.BENCHES),
        *(("paravt_jax.bench", name) for name in wheel_main.BENCHES),
    ],
)
def test_help_shows_every_default(package, name):
    parser = ArgumentParser()
    importlib.import_module(f"{package}.{name}").add_arguments(parser)
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and action.default is not None:
            values = action.default if isinstance(action.default, list) else [action.default]
            shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            text = (action.help or "").replace("%(default)s", shown)
            assert re.search(rf"default: |\(default {re.escape(shown)}[);:]", text), action.option_strings


@pytest.mark.parametrize(("name", "flag"), [("sampler", "--rows"), ("video", "--workers")])
def test_a_number_below_one_is_an_error(bench, name, flag):
    with pytest.raises(ValueError, match=f"^{flag} 0 must be at least 1"):
        bench(name, flag, "0")


def test_ways_with_different_results_are_an_error():
    turn = {way: {"loss/total": -0.3, "optim/grad_norm": 3.7} for way in ("torch", "branches")}
    update.check_agreement(turn, 1e-4)
    turn["torch"]["loss/total"] += 2e-4
    with pytest.raises(RuntimeError, match="the ways disagree on loss/total"):
        update.check_agreement(turn, 1e-4)
    turn["torch"] = {"loss/total": -0.3, "optim/grad_norm": 3.71}
    with pytest.raises(RuntimeError, match="the ways disagree on optim/grad_norm"):
        update.check_agreement(turn, 1e-4)


def test_ways_differ_only_in_shared_tokens_and_frames():
    frame = Frame(np.ones((4, 1536), np.float32), (2, 2))
    group = update.EpisodeGroup(tiny_config(), np.arange(5), [frame], [np.arange(3), np.arange(4)])
    by_way = {way: group.dialogues(way) for way in ("branches", "rows", "own frames")}
    for dialogues, frames in by_way.values():
        assert [len(dialogue.ids) for dialogue in dialogues] == [8, 9]
        assert [int(dialogue.loss_mask.sum()) for dialogue in dialogues] == [3, 4]
        assert all(frames[key] is frame for dialogue in dialogues for key in dialogue.frames)
    assert [len(frames) for _, frames in by_way.values()] == [1, 1, 2]
    assert [dialogues[0].num_shared for dialogues, _ in by_way.values()] == [5, 0, 0]
    assert len({dialogue.shared for dialogue in by_way["branches"][0]}) == 1


def test_an_invalid_option_is_rejected_before_measuring(bench, tmp_path):
    for name, flag in (("learner", "--repeats"), ("sampler", "--repeats"), ("packing", "--steps")):
        with pytest.raises(ValueError, match=rf"^{flag} 0 must be at least 1$"):
            bench(name, flag, "0")
    with pytest.raises(ValueError, match=r"^\S+ has no config.json, so it is not a Hugging Face model directory$"):
        rollout.run(Namespace(model=str(tmp_path), servers=1, episodes=1, report_tokens=1, repeats=1))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is not a writable directory$"):
        bench("learner", "--json", str(tmp_path / "file" / "x.json"))


@pytest.mark.parametrize(("name", "flag"), [("chaos", "--out"), ("soak", "--out"), ("checkpoint", "--dir")])
def test_an_address_is_rejected_as_a_directory(name, flag, bench):
    with pytest.raises(ValueError, match="s3:// is not supported here"):
        bench(name, flag, "s3://bucket/runs")


def test_help_lists_the_benches(bench, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        bench("--help")
    output = capsys.readouterr().out
    assert "convert" in output and "learner" in output


@pytest.mark.slow
def test_sampler_bench_measures_every_limit_and_transformers(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(sampler, "NEW_TOKENS", 3)
    out = tmp_path / "sampler.json"
    bench("sampler", "--rows", "2", "--limits", "64", "128", "--repeats", "1", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["ours, limit 64", "ours, limit 128", "transformers"]
    assert all(row["token_ms"] > 0 for row in rows)
