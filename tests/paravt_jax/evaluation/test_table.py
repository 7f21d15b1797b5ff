"""The published tables with our runs next to them."""

import json
from pathlib import Path

import pytest

from paravt_jax.data.splits import SPLITS
from paravt_jax.evaluation import batch
from paravt_jax.evaluation.published import TABLES
from paravt_jax.evaluation.table import draw, markdown, read_rows


def make_run(directory, split="mlvu", refused="", score=0.5, dispatch="parallel", temperature=None, **more):
    scores = {"score": score, "interval_95": [score - 0.01, score + 0.02]}
    cell = {
        "split": split,
        "mode": "agentic",
        "dispatch": dispatch,
        "frame_budget": 64,
        "temperature": temperature,
        "model": {"path": "trained.hf"},
        "refused": refused,
        "n": {"answered": 10, "unanswered": 1, "expected": 2174},
        "scores": {"strict": scores, "official": {"score": 1.0, "interval_95": [1.0, 1.0]}},
        **more,
    }
    directory.mkdir()
    (directory / "eval.json").write_text(json.dumps({"cells": [cell]}))
    return directory


def test_every_published_row_has_a_number_for_every_split_of_its_table():
    for table in TABLES:
        assert all(len(numbers) == len(table.splits) for numbers in table.rows.values())
        assert set(table.splits) <= set(SPLITS)
    assert TABLES[0].rows["ParaVT-8B"] == (62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1)
    averages = [round(sum(TABLES[0].rows[name]) / 7, 1) for name in ("ParaVT-8B", "Qwen3-VL-8B")]
    assert averages == [59.3, 55.6]  # on the paper's page


def test_runs_on_several_splits_make_one_row_with_not_measured_for_the_rest(tmp_path):
    rows = read_rows([make_run(tmp_path / "a"), make_run(tmp_path / "b", "lvbench", "11 of 1549 samples: …")])
    (row,) = rows
    lines = markdown(rows).splitlines()
    (ours,) = [line for line in lines if "strict" in line and "not measured" in line and line.count("|") == 9]
    assert ours == (
        f"| ours: {row.name}, strict | not measured | not measured | not measured | incomplete, 11 of 2174 "
        f"| 50.0 (49.0 to 52.0) | not measured | not measured |"
    )
    assert sum(line.startswith("| ours") for line in lines) == 2 * len(TABLES)
    assert "| GPT-4o | 71.9 | 77.2 | 66.7 | 34.7 | 64.6 | 66.7 | — |" in lines


def test_a_run_that_no_table_has_is_shown_in_a_last_row(tmp_path):
    (row,) = read_rows([make_run(tmp_path / "a")])
    row.published = "Video-R1"  # the published row is Video-R1-7B
    assert markdown([row]).count(f"| ours: {row.name}, strict |") == len(TABLES)


def test_a_reproduction_is_compared_with_its_published_row_by_its_own_rule(tmp_path):
    (row,) = read_rows([make_run(tmp_path / "a"), make_run(tmp_path / "b", "lvbench", "11 of 1549 samples: …")])
    row.published = "ParaVT-8B"  # 65.0 on mlvu
    blank = " | — | — | — | —"
    assert f"| ours minus published, strict{blank} | -15.0 (-16.0 to -13.0) | — | — |" in markdown([row])


def test_each_dispatch_and_temperature_has_its_own_row(tmp_path):
    runs = [make_run(tmp_path / dispatch, dispatch=dispatch) for dispatch in ("parallel", "none")]
    runs.append(make_run(tmp_path / "warm", temperature=0.7))
    names = ["parallel, 64 frames", "none, 64 frames", "parallel, 64 frames, temperature 0.7"]
    assert [row.name for row in read_rows(runs)] == [f"trained.hf, agentic, {name}" for name in names]


def test_each_mode_of_the_releases_protocol_has_its_own_row_unless_it_depends_on_the_split(tmp_path):
    modes = {"direct": "mlvu", "reasoning": "lvbench", "agentic_general": "mmvu", "agentic_minimal": "charades"}
    runs = [make_run(tmp_path / mode, split, mode=mode, protocol="release") for mode, split in modes.items()]
    rows = {row.name.rpartition(", ")[2]: list(row.cells) for row in read_rows(runs)}
    assert rows == {"direct": ["mlvu"], "reasoning": ["lvbench"], "agentic": ["mmvu", "charades"]}


def test_contradictory_runs_are_rejected(tmp_path):
    message = r"/a and \S+/b both have mlvu of trained\.hf, agentic, parallel, 64 frames; give `paravt eval table` only"
    with pytest.raises(ValueError, match=message):
        read_rows([make_run(tmp_path / "a"), make_run(tmp_path / "b", score=0.6)])
    with pytest.raises(ValueError, match=r"has no eval\.json; give the run_dir"):
        read_rows([tmp_path])
    for text in ('{"cells": ', "[]", '{"cells": [3]}', '{"cells": [{"split": "mlvu"}]}'):
        (tmp_path / "eval.json").write_text(text)
        with pytest.raises(ValueError, match=r"eval\.json has no evaluation results .*; run paravt_jax\.eval again"):
            read_rows([tmp_path])
    with pytest.raises(ValueError, match="no cells of public splits"):
        read_rows([make_run(tmp_path / "c", split=None)])


def test_a_batch_whose_table_fails_still_lists_its_incomplete_evaluations(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text("model: {path: trained.hf}")
    (tmp_path / "runs").mkdir()

    async def run_eval(config):
        (run_dir := Path(config.run_dir)).parent.mkdir()
        if run_dir.parent.name == "c":
            raise ValueError("gone")
        make_run(run_dir, score=0.5 if run_dir.parent.name == "a" else 0.6)
        return []

    ends = r"1 of 3 .* not complete; .*c, mlvu: gone; no table: \S+/a/mlvu and \S+/b/mlvu both have mlvu of trained\.hf"
    with pytest.raises(RuntimeError, match=ends):
        batch.main([str(tmp_path), "--splits", "mlvu", "--run-dir", str(tmp_path / "runs")], run_eval, lambda: None)


@pytest.mark.slow
def test_the_table_is_drawn(tmp_path):
    draw(read_rows([make_run(tmp_path / "a")]), tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"
