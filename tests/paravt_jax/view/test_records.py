"""The choice of episodes for a page, for every kind of run."""

from pathlib import Path

import pytest
from agents import call
from data_rows import write_lines
from evaluator import Evaluator, answer, config_of
from view_run import CHAT, make_run

from paravt_jax.view.cells import load_cells
from paravt_jax.view.episodes import convert, row_of
from paravt_jax.view.page import make_page
from paravt_jax.view.records import cells_of, chosen_of_cells, chosen_of_steps, samples_of, steps_of
from rollout.engine.protocol import EngineError


@pytest.fixture
def evaluated(tmp_path, monkeypatch) -> Path:
    """Two cells of three samples; one cell has calls and a missing sample."""

    def say(episode, request):
        looks = "A report" not in CHAT.decode(request.ids) and "crop_video" in CHAT.decode(request.ids)
        if looks and "v2" in episode:
            raise EngineError("gone")
        return f"I look.</think>{call(3, 12)}<|im_end|>" if looks else answer("B" if "v1" in episode else "C")

    config = config_of("longvideobench", tmp_path / "copy", "eval.dispatches=[parallel,none]")
    Evaluator(CHAT, say, monkeypatch).run(config)
    return Path(config.run_dir)


def test_every_sample_of_an_evaluation_is_an_episode_of_its_cell(evaluated):
    chosen = chosen_of_cells(cells_of(evaluated), 100)
    rows = [row_of(convert(record, "", 1000), 0) for record in chosen.convert(dict)]
    assert [row["cell"] for row in rows] == ["none_3"] * 3 + ["parallel_3"] * 3
    by_cell = {cell: {row["prompt"]: row for row in rows if row["cell"] == cell} for cell in ("none_3", "parallel_3")}
    assert len(by_cell["none_3"]) == 3 and by_cell["none_3"].keys() == by_cell["parallel_3"].keys()
    samples = by_cell["parallel_3"]
    assert sorted(row["outcome"] for row in samples.values()) == ["done", "done", "missing: engine"]
    assert sorted(row["result"] for row in samples.values()) == ["missing", "right", "wrong"]
    assert sorted(row["calls"] for row in samples.values()) == [0, 1, 1]
    assert (chosen.num_parts_shown, chosen.num_parts) == (2, 2)


def test_fewer_episodes_than_cells_are_spread_over_the_cells(tmp_path):
    cells = {f"none_{n}": [write_lines(tmp_path / f"samples_none_{n}.jsonl", [{"id": "a"}])] for n in range(7)}
    chosen = chosen_of_cells(cells, 3)
    assert [line.path.stem for line in chosen.lines] == ["samples_none_0", "samples_none_3", "samples_none_6"]


@pytest.mark.parametrize("max_episodes", [0, 1, 3, 4, 8])
def test_as_many_episodes_are_shown_as_fit_if_a_sample_has_several(max_episodes, tmp_path):
    samples = [{"id": name, "key": name, "episodes": [{}] * 4} for name in "ab"]
    cells = {"none_8": [write_lines(tmp_path / "samples_none_8.jsonl", samples)]}
    assert len([*chosen_of_cells(cells, max_episodes, 4).convert(dict)]) == max_episodes


def test_the_newest_line_of_a_sample_counts_unless_it_is_missing(tmp_path):
    def line(key, name, missing):
        return {"key": key, "id": name, "episodes": [{"missing": missing}]}

    shard = write_lines(tmp_path / "shards" / "1_of_2" / "samples_none_8.jsonl", [line("a", "1", True)])
    lines = [line("a", "2", False), line("b", "3", False), line("b", "4", False), line("b", "5", True)]
    lines += [line("c", "6", True), line("c", "7", True)]
    own = write_lines(tmp_path / "samples_none_8.jsonl", lines)
    assert cells_of(tmp_path) == {"none_8": [shard, own]}
    assert sorted(line.id for line in samples_of([shard, own])) == ["2", "4", "7"]


@pytest.mark.slow
def test_two_runs_on_the_same_data_show_the_same_episodes(tmp_path):
    runs = [make_run(tmp_path / name, 3, luck=luck) for luck, name in enumerate("ab")]
    names = [[line.id for line in chosen_of_steps([*steps_of(run).values()], 9).lines] for run in runs]
    assert names[0] == names[1] and len(set(names[0])) == 9


CALL = '{"turns": [{"text": "", "calls": [{"span": [0, 0], "outcome": "ok", %s}]}]}'


@pytest.mark.parametrize("line", ['{"id": "b"', "[5]", '{"id": "\\x"}', "[" * 100_000])
def test_a_line_without_a_json_object_is_reported(line, tmp_path):
    path = write_lines(tmp_path / "000001.jsonl", [{"id": "a"}])
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ValueError, match=r"000001\.jsonl: line 2 is not a JSON object; .*restore the file"):
        list(chosen_of_steps([path], 5).convert(dict))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"turns": 3}', "'int' object"),
        ('{"step": "1"}', "step is str"),
        ('{"seconds": NaN}', "not JSON"),
        ('{"videos": [{"name": "a"}]}', "key 'path' is missing"),
        ('{"episodes": [{}]}', "key 'id' is missing"),
        (CALL % '"latency_s": "1"', "latency_s is str"),
        (CALL % '"box": [0, 1]', "Box"),
        (CALL % '"shown": [{"png": "AAAA"}]', "cannot identify image"),
    ],
)
def test_a_record_with_a_wrong_type_or_a_missing_key_is_reported(line, reason, tmp_path):
    """Also a type with which only the scripts of the page would stop."""
    path = write_lines(tmp_path / "episodes" / "000001.jsonl", [{"id": "a"}])
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ValueError, match=rf"000001\.jsonl: line 2 is not a record .*{reason}.*; .*restore the file"):
        make_page([tmp_path], 5)


def test_episodes_that_a_resumed_run_moved_are_reported_with_what_to_do(tmp_path):
    chosen = chosen_of_steps([path := write_lines(tmp_path / "000001.jsonl", [{"id": "a"}])], 5)
    path.rename(tmp_path / "aside.jsonl")
    with pytest.raises(ValueError, match=r"000001\.jsonl was moved while it was read; .*try again"):
        list(chosen.convert(dict))


@pytest.mark.parametrize(
    ("text", "problem"),
    [('{"n": ', " is not valid JSON"), ("[]", " must hold a JSON"), ('{"n": 3, "scores": {}}', ": n=3 must be an ob")],
)
def test_a_damaged_certificate_is_reported_with_the_way_to_rewrite_it(text, problem, tmp_path):
    (tmp_path / "cell_none_3.json").write_text(text)
    with pytest.raises(ValueError, match=rf"cell_none_3\.json{problem}.*; run the evaluation again to rewrite it"):
        load_cells(tmp_path, {})
