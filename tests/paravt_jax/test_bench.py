"""The benches run, compare like with like, and say what they found."""

import json
import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paravt_jax.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_learner_bench_compares_both_sides_and_writes_json(tmp_path):
    out = tmp_path / "learner.json"
    run = bench("learner", "--model", "tiny", "--dtype", "float32", "--repeats", "1", "--json", str(out))
    assert run.returncode == 0, run.stderr
    found = json.loads(out.read_text())
    assert {(row["workload"], row["mode"]) for row in found["rows"]} == {
        (workload, mode) for workload in ("one sequence", "unequal batch") for mode in ("forward", "forward+backward")
    }
    assert all(row["torch_s"] > 0 and row["jax_s"] > 0 for row in found["rows"])
    assert f"{found['rows'][0]['jax_s']:.3f}" in run.stdout and found["machine"]["num_cores"] >= 1


def test_a_bad_option_is_one_line_and_a_failure(tmp_path):
    run = bench("learner", "--repeats", "0")
    assert (run.returncode, run.stdout) == (1, "") and run.stderr == "error: --repeats 0 must be at least 1\n"
    run = bench("learner", "--json", str(tmp_path / "absent" / "x.json"))
    assert run.returncode == 1 and "is not a directory" in run.stderr


def test_help_lists_the_benches():
    run = bench("--help")
    assert run.returncode == 0 and "convert" in run.stdout and "learner" in run.stdout
