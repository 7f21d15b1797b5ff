"""The benches run, compare like with like, and say what they found."""

import json
import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest

from model_port.inputs import Frame
from model_port.tiny import tiny_config
from paravt_jax.bench import learner, update


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paravt_jax.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_learner_bench_compares_both_sides_and_writes_json(tmp_path):
    out = tmp_path / "learner.json"
    only = ("--model", "tiny", "--dtype", "float32", "--workload", "passes")
    run = bench("learner", *only, "--repeats", "1", "--json", str(out))
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert {(row["workload"], row["mode"]) for row in found["rows"]} == {
        (workload, mode) for workload in ("one sequence", "unequal batch") for mode in ("forward", "forward+backward")
    }
    assert all(row["torch_s"] > 0 and row["jax_s"] > 0 for row in found["rows"])
    assert f"{found['rows'][0]['jax_s']:.3f}" in run.stdout and found["machine"]["num_cores"] >= 1


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # otherwise the bench restarts its process
    monkeypatch.setattr(learner, "PROMPT", (2, 11))
    monkeypatch.setattr(learner, "RESPONSE", (0, 7))
    monkeypatch.setattr(learner, "NUM_EPISODES", 3)
    # Each of the four ways once: a process of each has to compile.
    pairs = {("own frames", "branches"): ("update_s", "vision_s"), ("torch", "rows"): ("update_s",)}
    compared = {pair: {measure: f"{pair} {measure}" for measure in measures} for pair, measures in pairs.items()}
    monkeypatch.setattr(update, "COMPARED", compared)


@pytest.mark.slow
def test_learner_bench_compares_whole_updates(small):
    found = learner.run(Namespace(model="tiny", dtype="float32", repeats=1, workload="update"))
    assert not found["rows"]
    assert {(row["slow"]["way"], row["fast"]["way"]) for row in found["updates"]} == set(update.COMPARED)
    assert all(row[side][row["measure"]] > 0 for row in found["updates"] for side in ("slow", "fast"))
    assert all(row[side]["peak_mib"] > 0 for row in found["updates"] for side in ("slow", "fast"))
    lines = learner.table(found).splitlines()
    assert len(lines) == 2 + 3 and "('torch', 'rows') update_s" in lines[-1]


def test_ways_that_compute_different_things_are_not_compared():
    turn = {way: {"loss/total": -0.3, "optim/grad_norm": 3.7} for way in ("torch", "branches")}
    update.check_agreement(turn, 1e-4)
    turn["torch"]["loss/total"] += 2e-4
    with pytest.raises(RuntimeError, match="the ways disagree on loss/total"):
        update.check_agreement(turn, 1e-4)
    turn["torch"] = {"loss/total": -0.3, "optim/grad_norm": 3.71}
    with pytest.raises(RuntimeError, match="the ways disagree on optim/grad_norm"):
        update.check_agreement(turn, 1e-4)


def test_ways_differ_only_in_what_they_share():
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


@pytest.mark.slow
def test_a_bad_option_is_one_line_and_a_failure(tmp_path):
    run = bench("learner", "--repeats", "0")
    assert (run.returncode, run.stdout) == (1, "") and run.stderr == "error: --repeats 0 must be at least 1\n"
    run = bench("learner", "--json", str(tmp_path / "absent" / "x.json"))
    assert run.returncode == 1 and "is not a directory" in run.stderr


def test_help_lists_the_benches():
    run = bench("--help")
    assert run.returncode == 0 and "convert" in run.stdout and "learner" in run.stdout
