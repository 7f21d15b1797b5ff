"""Every split from its file to a certificate, with a scripted engine."""

import asyncio
import hashlib
import json
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agents import call
from async_tests import async_test
from data_rows import rl_row, write_lines
from evaluator import Evaluator, answer, config_of
from fake_server import FakeServer
from published import longvideobench_row, make_copy, write_rows

from model_port.progress import Meter
from paravt_jax import eval as command
from paravt_jax.config import DIRECT, EngineConfig
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.splits import SPLITS, Sample
from paravt_jax.data.splits.reading import load_samples
from paravt_jax.eval import shard_of
from paravt_jax.evaluation import evaluation, provenance
from paravt_jax.evaluation.release import questions
from paravt_jax.evaluation.results import cell_table, refusal, score_table
from paravt_jax.evaluation.runner import Tally, on_screen
from paravt_jax.evaluation.sample_log import SampleLog, SampleResult, is_answer, result_of, sample_key
from paravt_jax.rewards.judge import JudgeConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.run.directory import OWN_CODE, load_settings
from rollout import tools
from rollout.engine.protocol import DeadlineExceeded, EngineError
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.toolbox.subtitles import Cue
from rollout.video.errors import VideoTimeout

RIGHT = {  # split -> the reply to every row of published.py, and each row's scores by both rules
    "videomme": ("A", [1, 1, 1], [1, 1, 1]),
    "videomme_subtitles": ("A", [1, 1, 1], [1, 1, 1]),
    "longvideobench": ("The answer is B", [0, 1, 0], [0, 1, 0]),
    "lvbench": ("D. 1633", [1, 1, 1], [1, 1, 1]),
    "mlvu": ("Because it is red: A", [0, 0, 0], [1, 1, 1]),
    "mmvu": ("dfs, I think", [0, 0, 0], [1, 0, 1]),
    "charades": ("30.4 to 24.3", [0, 0, 0], [1, 6.1 / 7.1, 6.1 / 8.1]),
}


@pytest.fixture
def evaluator(chat, monkeypatch):
    """Makes an evaluator whose engine has a fixed reply, or a function from an episode to its reply."""

    def make(say) -> Evaluator:
        return Evaluator(chat, say if callable(say) else lambda episode, request: answer(say), monkeypatch)

    return make


@pytest.fixture
def complete(monkeypatch):
    """Makes LongVideoBench's published size three samples."""
    monkeypatch.setitem(SPLITS, "longvideobench", replace(SPLITS["longvideobench"], num_samples=3))


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    monkeypatch.setattr("paravt_jax.evaluation.runner.MAX_IN_FLIGHT", 1)


def dead(episode, request):
    raise EngineError("no server is alive")


def lines_of(config):
    (path,) = Path(config.run_dir).glob("samples_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_your_own_reward_scores_rows_of_your_own_question_types(evaluator, tmp_path):
    of_word = [{"question": word, "extra_info": {"question_type": "caption", "word": word}} for word in ("dog", "cat")]
    (tmp_path / "a.mp4").touch()
    rows = [rl_row(**of_word[0]), rl_row(**of_word[1], videos=[])]  # the second row has text only
    write_lines(tmp_path / "rl.jsonl", rows)
    (tmp_path / "mine.py").write_text("def seen(completions, word): return [float(word[0] in completions[0])]")
    settings = [f"data.validation={tmp_path}/rl.jsonl", f"reward.plugin={tmp_path}/mine.py:seen", "data.split="]
    config = config_of("own", tmp_path, *settings)
    (cell,) = evaluator("a dog").run(config)
    assert cell["scores"]["strict"]["score"] == 0.5 and cell["n"]["answered"] == 2
    assert "accuracy_mean" not in cell["by_type"]["caption"]
    assert list(load_settings(Path(config.run_dir))[OWN_CODE]) == [f"{tmp_path}/mine.py"]
    digest = hashlib.sha256((tmp_path / "rl.jsonl").read_bytes()).hexdigest()
    assert cell["data"] == {"repository": f"{tmp_path}/rl.jsonl", "revision": None, "sha256": {"rl.jsonl": digest}}
    (samples,) = Path(config.run_dir).glob("samples_*.jsonl")
    samples.write_text(samples.read_text().splitlines(keepends=True)[0])
    evaluation._write_played(config, Path(config.run_dir), {"digest": ""}, {})
    (tmp_path / "mine.py").write_text("def seen(completions, word): return [1.0]")
    with pytest.raises(ValueError, match=r"scores of another scorer: the code of reward\.plugin or data\.split"):
        evaluator("a dog").run(config)


def test_a_finished_evaluation_says_that_its_scores_are_of_older_scoring_code(evaluator, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def seen(completions): return [0.5]")
    config = config_of("longvideobench", tmp_path / "copy", f"reward.plugin={tmp_path}/mine.py:seen")
    (cell,) = evaluator("A").run(config)
    evaluation._write_played(config, Path(config.run_dir), {"digest": ""}, {})
    evaluator("A").run(config)
    assert "scoring code" not in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def seen(completions): return [1.0]")
    (again,) = evaluator("A").run(config)
    assert again["scores"] == cell["scores"]
    assert "these are the scores of older scoring code" in capsys.readouterr().err


def test_a_finished_evaluation_says_that_its_scores_are_of_older_files_of_the_model(evaluator, tmp_path, capsys):
    config = config_of("longvideobench", tmp_path / "copy")
    (cell,) = evaluator("A").run(config)
    (model := tmp_path / "trained.hf").mkdir()
    (model / "weights").write_text("old")
    evaluation._write_played(config, Path(config.run_dir), provenance.model_record("trained.hf", model), {})
    evaluator("A").run(config)
    assert "older" not in capsys.readouterr().err
    (model / "weights").write_text("new")
    (again,) = evaluator("A").run(config)
    assert again["scores"] == cell["scores"]
    assert "these are the scores of older files of trained.hf; " in capsys.readouterr().err
    shutil.rmtree(model)  # as on another machine
    evaluator("A").run(config)
    assert "older" not in capsys.readouterr().err


def test_a_damaged_certificate_is_written_again(evaluator, tmp_path):
    config = config_of("longvideobench", tmp_path / "copy")
    (cell,) = evaluator("A").run(config)
    (file,) = Path(config.run_dir).glob("cell_*.json")
    for damaged in ("", "{", "[]", "{}"):
        file.write_text(damaged)
        assert evaluator("A").run(config) == [cell]


@pytest.mark.parametrize("damaged", ["", "{", "[]", "{}", '{"model": {}, "engine": {}}'])
def test_a_damaged_record_of_the_model_is_an_error_that_names_the_file(evaluator, tmp_path, damaged):
    config = config_of("longvideobench", tmp_path / "copy")
    evaluator("A").run(config)
    (Path(config.run_dir) / "played_by.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"played_by\.json .*restore the file, or choose another run_dir"):
        evaluator("A").run(config)


@pytest.mark.parametrize("line", ["{}", "[]", "1", '{"episodes": [{}]}', '{"episodes": 1}'])
def test_a_line_that_is_not_the_record_of_a_sample_is_an_error_that_names_it(evaluator, tmp_path, line):
    config = config_of("longvideobench", tmp_path / "copy")
    evaluator("A").run(config)
    (samples,) = Path(config.run_dir).glob("samples_*.jsonl")
    with samples.open("a") as file:
        file.write(f"{line}\n")
    number = len(samples.read_text().splitlines())
    with pytest.raises(ValueError, match=rf"samples_.*: line {number} is not the record of a sample; restore the file"):
        evaluator("A").run(config)


def test_an_engine_of_your_own_is_loaded_before_the_model(evaluator, tmp_path):
    config = config_of("longvideobench", tmp_path / "copy", f"engine.kind={tmp_path}/absent.py:open_engine")
    with pytest.raises(ValueError, match=r"engine\.kind=.*absent\.py:open_engine: there is no file"):
        evaluator("A").run(config)


def test_every_file_of_your_own_rows_is_hashed(tmp_path):
    (tmp_path / "a.mp4").touch()
    for folder in "ab":
        (tmp_path / folder).mkdir()
        pq.write_table(pa.Table.from_pylist([rl_row(folder.upper())]), tmp_path / folder / "rl.parquet")
    loaded = load_samples(None, str(tmp_path), video_root=str(tmp_path), max_bad_frac=0)
    assert len(loaded.samples) == len(set(loaded.files.values())) == 2 and "a/rl.parquet" in loaded.files


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_scored_by_both_rules_from_the_same_replies(split, evaluator, tmp_path):
    reply, strict, official = RIGHT[split]
    config = config_of(split, tmp_path / split)
    (cell,) = evaluator(reply).run(config)
    scores = [line["episodes"][0]["scores"] for line in lines_of(config)]
    assert [score["strict"] for score in scores] == pytest.approx(strict)
    assert [score["official"] for score in scores] == pytest.approx(official)
    assert cell["scores"]["strict"]["micro"] == pytest.approx(sum(strict) / 3)
    assert cell["n"]["answered"] + cell["n"]["unanswered"] == 3 and cell["split"] == split
    assert f"3 of {SPLITS[split].num_samples} samples" in cell["refused"] and cell["headline"] is None
    assert f"3 of {SPLITS[split].num_samples} |" in score_table([cell])
    assert refusal([cell]).startswith("no headline for none, 3 frames: 3 of")


def test_a_rule_of_your_own_may_return_a_number_of_numpy(evaluator, tmp_path, monkeypatch):
    split = replace(SPLITS["longvideobench"], official=lambda reply, answer, options: np.float32(0.5))
    monkeypatch.setitem(SPLITS, "longvideobench", split)
    (cell,) = evaluator("A").run(config_of("longvideobench", tmp_path / "copy"))
    assert cell["scores"]["official"]["score"] == 0.5


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (lambda *_: float("nan"), r"returned nan for sample v0_0, expected a score from 0 to 1"),
        (lambda *_: 100, r"returned 100 for sample v0_0, expected a score from 0 to 1"),
        (lambda *_: sys.exit("no"), r"failed on sample v0_0: RuntimeError: SystemExit: no"),
        (lambda *_: {}["lid"], r"failed on sample v0_0: KeyError: 'lid'"),
    ],
)
def test_a_rule_of_your_own_that_gives_no_score_is_named(rule, problem, evaluator, tmp_path, monkeypatch):
    monkeypatch.setitem(SPLITS, "longvideobench", replace(SPLITS["longvideobench"], official=rule))
    with pytest.raises(ValueError, match=rf"the rule `official` of data\.split, longvideobench, {problem}"):
        evaluator("A").run(config_of("longvideobench", tmp_path / "copy"))


def test_a_certificate_has_counts_frames_data_hashes_and_scores(evaluator, tmp_path, complete):
    config = config_of("longvideobench", tmp_path / "copy")
    (cell,) = evaluator("B").run(config)
    assert cell["n"] == {"expected": 3, "rows": 3, "answered": 3, "unanswered": 0, "missing": {}, "not_played": 0}
    assert (cell["headline"], cell["refused"]) == (pytest.approx(1 / 3), "") and not refusal([cell])
    low, high = cell["scores"]["strict"]["interval_95"]
    assert low <= cell["headline"] <= high
    assert cell["frames"] == {"min": 3, "median": 3, "max": 3} and cell["crop_frames"]["max"] == 0
    assert cell["data"]["repository"] == "longvideobench/LongVideoBench"
    assert [len(digest) for digest in cell["data"]["sha256"].values()] == [64]
    assert set(cell["hashes"]) == {"prompt", "schema", "scorer"} and cell["packages"]["jax"]
    assert cell["scores"]["official"]["groups"]["duration_group"] == {"15": {"score": pytest.approx(1 / 3), "n": 3}}
    assert cell["metrics"]["format_reward"] > 0.5 and cell["by_type"]["mcq"]["num_episodes"] == 3


def test_choice_and_open_questions_are_printed_separately(evaluator, tmp_path):
    (cell,) = evaluator("A").run(config_of("mmvu", tmp_path / "copy"))
    assert "| multiple-choice 100.0 of 2, open-ended 0.0 of 1 |" in score_table([cell]).splitlines()[2]


def test_the_official_score_of_mlvu_is_the_mean_over_tasks(evaluator, tmp_path):
    config = config_of("mlvu", tmp_path / "copy")
    say = evaluator(lambda episode, request: answer("B" if "plotQA" in episode else "C"))
    (cell,) = say.run(config)
    assert cell["scores"]["strict"]["score"] == 0.5  # plotQA 2 of 2, needle 0 of 1
    assert cell["scores"]["strict"]["micro"] == pytest.approx(2 / 3)
    assert "| 50.0 |" in (table := score_table([cell]))
    assert "| micro 66.7, needle 0.0 of 1, plotQA 100.0 of 2 |" in table


def test_charades_has_the_fraction_above_each_threshold(evaluator, tmp_path):
    (cell,) = evaluator("[24.3, 28.0]").run(config_of("charades", tmp_path / "copy"))
    scores = cell["scores"]["strict"]  # 3.7 of 6.1, 7.1 and 8.1 seconds
    assert scores["score"] == pytest.approx((3.7 / 6.1 + 3.7 / 7.1 + 3.7 / 8.1) / 3)
    assert (scores["R@0.3"], scores["R@0.5"], scores["R@0.7"]) == pytest.approx((1, 2 / 3, 0))


def test_samples_with_an_unreadable_video_are_missing(evaluator, tmp_path, complete):
    root = make_copy("longvideobench", tmp_path / "copy")
    lost = [longvideobench_row(n, video_path="missing.mp4") for n in range(2, 6)]  # more than failures of an engine
    write_rows("longvideobench", root, [*(longvideobench_row(n, correct_choice=0) for n in range(2)), *lost])
    (cell,) = evaluator("A").run(config_of("longvideobench", root))
    assert cell["n"]["missing"] == {"video": 4} and cell["n"]["answered"] == 2
    assert cell["scores"]["strict"]["score"] == 1
    assert cell["scores"]["strict"]["missing_as_wrong"] == pytest.approx(2 / 6)
    assert cell["headline"] is None and cell["refused"].startswith("2 of 3 samples: 4 missing (video)")


def test_a_question_type_whose_samples_are_all_missing_has_no_metrics(evaluator, tmp_path):
    def say(episode, request):
        if "open" in episode:
            raise DeadlineExceeded("no answer within 600 s")
        return answer("A")

    (tmp_path / "a.mp4").touch()
    write_lines(tmp_path / "rl.jsonl", [rl_row("A", id="choice"), rl_row("a dog", "oe", id="open")])
    (cell,) = evaluator(say).run(config_of("own", tmp_path, f"data.validation={tmp_path}/rl.jsonl", "data.split="))
    assert cell["by_type"]["oe"]["num_missing"] == 1 and "accuracy_mean" not in cell["by_type"]["oe"]
    header, _, values = (line.split("|") for line in cell_table([cell]).splitlines())
    shown = {name.strip(): value.strip() for name, value in zip(header, values, strict=True)}
    assert (shown["mcq"], shown["oe"]) == ("1", "")


def test_a_reply_without_an_answer_is_unanswered_and_wrong(evaluator, tmp_path, complete):
    (cell,) = evaluator("none of them").run(config_of("longvideobench", tmp_path / "copy"))
    assert (cell["n"]["answered"], cell["n"]["unanswered"]) == (0, 3) and cell["headline"] == 0
    assert cell["scores"]["official"]["score"] == 0.25  # the chance level


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"video_path": "../../outside.mp4"}, "file outside of data.video_root"),
        ({"video_path": "x" * 5000}, "impossible path"),
        ({"correct_choice": 9}, "answer outside of the options"),
    ],
)
def test_a_bad_row_is_counted_by_its_reason_and_prevents_a_headline(changed, reason, evaluator, tmp_path, complete):
    (tmp_path / "outside.mp4").touch()
    root = make_copy("longvideobench", tmp_path / "copy")
    write_rows("longvideobench", root, [*map(longvideobench_row, range(2)), longvideobench_row(2, **changed)])
    (cell,) = evaluator("A").run(config_of("longvideobench", root, "data.max_bad_frac=0.5"))
    assert cell["refused"] == f"2 of 3 samples: 1 missing (row: {reason})"


def test_a_dead_engine_stops_the_evaluation_and_a_restart_resumes_it(evaluator, tmp_path, complete):
    config = config_of("longvideobench", tmp_path / "copy")

    message = r"failed 3 samples in a row, the last .*no server is alive; when it works again"
    with pytest.raises(RuntimeError, match=message):
        evaluator(dead).run(config)
    assert [line["episodes"][0]["reason"] for line in lines_of(config)] == ["engine"] * 3
    assert not list(Path(config.run_dir).glob("cell_*"))
    again = evaluator("A")
    assert again.run(config)[0]["headline"] == pytest.approx(1 / 3) and len(again.episodes) == 3


def dies_at(number):
    """Returns an engine that exits after `number` replies."""
    remaining = iter(range(number))

    def say(episode, request):
        if next(remaining, None) is None:
            raise SystemExit
        return answer("A")

    return say


MOMENTS = ["before a line", "after a line", "in a line", "before the certificate", "before the results"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_evaluation_killed_at_any_moment_resumes_to_the_same_cells(moment, evaluator, tmp_path, monkeypatch):
    def settings(name):
        return config_of("longvideobench", tmp_path / "copy", f"run_dir={tmp_path / name}")

    expected = evaluator("A").run(settings("expected"))
    config = settings("killed")
    with monkeypatch.context() as patch:
        if moment == "before the certificate":
            patch.setattr(evaluation, "certificate", lambda *_: sys.exit())
        if moment == "before the results":
            patch.setattr(evaluation.Evaluation, "cell", lambda *_: sys.exit())
        num_replies = {"before a line": 0, "after a line": 1, "in a line": 2}.get(moment, 3)
        with pytest.raises(SystemExit):
            evaluator(dies_at(num_replies)).run(config)
    num_done = num_replies
    if moment == "in a line":
        path = Path(config.run_dir) / "samples_none_3.jsonl"
        path.write_bytes(path.read_bytes()[:-10])
        num_done = 1
    again = evaluator("A")
    assert again.run(config) == expected
    assert len(again.episodes) == 3 - num_done
    assert len({line["id"] for line in lines_of(config)}) == len(lines_of(config)) == 3


@pytest.mark.parametrize("mended_by", ["a shard", "a run that was killed before its certificate"])
def test_a_certificate_with_missing_samples_is_replaced_when_others_have_run_them(
    mended_by, evaluator, tmp_path, complete, monkeypatch
):
    root = make_copy("longvideobench", tmp_path / "copy")
    config = config_of("longvideobench", root)

    replies = iter([answer("A"), answer("A")])

    def failing(episode, request):
        if (reply := next(replies, None)) is None:
            raise EngineError("it died")
        return reply

    (cell,) = evaluator(failing).run(config)
    assert cell["refused"] == "2 of 3 samples: 1 missing (engine)"
    with monkeypatch.context() as patch, suppress(SystemExit):
        if mended_by != "a shard":
            patch.setattr(evaluation, "certificate", lambda *_: sys.exit())
        evaluator("A").run(config, (1, 1) if mended_by == "a shard" else None)
    (cell,) = evaluator("A").run(config)
    assert not cell["refused"] and cell["n"]["answered"] == 3


def test_a_certificate_of_earlier_rows_is_replaced_when_a_shard_has_run_the_new_ones(evaluator, tmp_path):
    config = config_of("own", tmp_path, f"data.validation={tmp_path}/rl.jsonl", "data.split=")
    (tmp_path / "a.mp4").touch()
    scores = []
    for gold in "AB":
        write_lines(tmp_path / "rl.jsonl", [rl_row(answer=gold)])
        if scores:
            evaluator("A").run(config, (1, 1))
        (cell,) = evaluator("A").run(config)
        scores.append(cell["scores"]["strict"]["score"])
    assert scores == [1.0, 0.0]


@pytest.mark.parametrize(("shard", "settings"), [(None, ["eval.max_prompts=2"]), ((1, 2), [])])
def test_bad_rows_do_not_count_in_a_part_of_the_rows(shard, settings, evaluator, tmp_path):
    (tmp_path / "a.mp4").touch()
    rows = [rl_row(answer=gold) for gold in ("A", "B", "A", "Z")]
    write_lines(tmp_path / "rl.jsonl", rows)
    settings = ["data.split=", "data.max_bad_frac=0.5", *settings]
    (cell,) = evaluator("A").run(config_of("own", tmp_path, f"data.validation={tmp_path}/rl.jsonl", *settings), shard)
    assert (cell["n"]["rows"], cell["n"]["missing"], cell["n"]["not_played"]) == (2, {}, 0)
    assert cell["scores"]["strict"]["missing_as_wrong"] == cell["scores"]["strict"]["score"]


def test_merged_shards_equal_an_evaluation_without_shards(evaluator, tmp_path):
    copy = tmp_path / "copy"
    unsharded = evaluator("A").run(config_of("longvideobench", copy, f"run_dir={tmp_path / 'unsharded'}"))
    config = config_of("longvideobench", copy, f"run_dir={tmp_path / 'shards'}")
    for shard, num_samples in (((1, 2), 2), ((2, 2), 1)):
        engine = evaluator("A")
        engine.run(config, shard)
        assert len(engine.episodes) == num_samples
    merged = evaluator("B")
    assert merged.run(config) == unsharded and not merged.episodes


def test_a_missing_sample_never_replaces_a_complete_one(tmp_path):
    sample = dict.fromkeys(("id", "key", "video", "question_type", "groups", "subtitles"), "s")
    log = SampleLog(tmp_path, "c")
    for number, missing in enumerate((True, True, False, True)):
        log.write(sample | {"episodes": [{"missing": missing, "reason": "video", "problem": str(number)}]})
    (kept,) = log.read({"s"}).values()
    assert not kept.missing and kept.episodes[0]["problem"] == "2"


def test_a_sample_is_answered_if_the_strict_rule_reads_every_reply():
    replies = {"mcq": ("B", "B or C"), "tvg": ("1 - 2", "soon"), "oe": ("maybe", ""), "own": ("maybe", None)}
    for kind, (readable, unreadable) in replies.items():
        assert is_answer(readable, kind, "") and not is_answer(unreadable, kind, "")
    episodes = ({"answered": True}, {"answered": False})
    assert not SampleResult("s", "s", "s", "mcq", {}, "", episodes).answered


def test_a_shard_does_not_replace_the_plot_of_the_whole_evaluation(evaluator, tmp_path):
    config = config_of("longvideobench", tmp_path / "copy", "eval.temperatures=[0,0.5]")
    evaluator("A").run(config, (1, 2))
    run_dir = Path(config.run_dir)
    assert [*run_dir.rglob("temperatures.png")] == [run_dir / "shards" / "1_of_2" / "plots" / "temperatures.png"]


def test_samples_are_identified_by_all_that_the_policy_and_the_reward_get_but_not_by_paths():
    prompt = Prompt("1", "What?", ("a.mp4",), "A", "mcq")
    changed: list[dict[str, Any]] = [{}, {"videos": ("/elsewhere/a.mp4",)}, {"question": "Where?"}, {"answer": "B"}]
    changed += [{"messages": (("system", text),)} for text in "ab"] + [{"columns": (("word", text),)} for text in "ab"]
    keys = [sample_key("", Sample(replace(prompt, **each), "a")) for each in changed]
    assert keys[0] == keys[1] and len(set(keys)) == len(keys) - 1


def test_shards_of_other_settings_are_not_merged_but_their_rows_may_have_been_elsewhere(evaluator, tmp_path):
    copy, here = tmp_path / "copy", f"run_dir={tmp_path / 'run'}"
    evaluator("A").run(config_of("longvideobench", copy, here), (1, 1))
    other = evaluator("B")
    others = {"rollout": config_of("longvideobench", copy, here, "rollout.temperature=0.5")}
    others["data"] = config_of("lvbench", tmp_path / "lvbench", here)
    for section, config in others.items():
        with pytest.raises(ValueError, match=rf"shards/1_of_1 has cells .* other settings \({section}\)"):
            other.run(config)
    other.run(config_of("longvideobench", copy.rename(tmp_path / "moved"), here))
    with pytest.raises(ValueError, match=r"shards/1_of_1 has cells .* other settings \(eval\.mode\)"):  # merged before
        other.run(config_of("longvideobench", tmp_path / "moved", here, "eval.mode=direct"))
    assert not other.episodes


def test_shards_of_another_model_are_not_merged(tmp_path):
    for digest in "12":
        shard = tmp_path / "shards" / f"{digest}_of_2"
        shard.mkdir(parents=True)
        (shard / "played_by.json").write_text(json.dumps({"model": {"path": "m", "digest": digest}, "engine": {}}))
    with pytest.raises(ValueError, match="its shards have different models"):
        evaluation._played_by(tmp_path)


def test_shards_of_another_scorer_are_not_merged_and_the_certificate_names_the_scorer_that_was_used(
    evaluator, tmp_path
):
    config = config_of("longvideobench", tmp_path / "copy")
    for number in (1, 2):
        evaluator("A").run(config, (number, 2))
        file = Path(config.run_dir) / "shards" / f"{number}_of_2" / "played_by.json"
        file.write_text(json.dumps({"model": {"digest": ""}, "engine": {}, "scorer": "old"}))
    (cell,) = evaluator("A").run(config)
    assert cell["hashes"]["scorer"] == "old"
    file.write_text(file.read_text().replace("old", "new"))
    with pytest.raises(ValueError, match="its shards have different scorers"):
        evaluator("A").run(config)


@pytest.mark.parametrize("module", [tools, questions])
def test_the_scorer_digest_depends_on_the_parsers_outside_of_the_rewards(module, tmp_path, monkeypatch):
    before = provenance.scorer_digest(RewardConfig(), JudgeConfig(), "mlvu")
    (tmp_path / "changed.py").write_text("changed")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "changed.py"))
    assert provenance.scorer_digest(RewardConfig(), JudgeConfig(), "mlvu") != before


def test_the_scorer_digest_depends_on_the_file_of_your_own_split(tmp_path):
    digests = []
    for text in ("a", "b"):
        (tmp_path / "own.py").write_text(text)
        digests.append(provenance.scorer_digest(RewardConfig(), JudgeConfig(), f"{tmp_path}/own.py:SPLIT"))
    assert digests[0] != digests[1]


def test_the_model_digest_depends_on_the_middle_of_files(tmp_path):
    digests = []
    for middle in (b"0", b"1", b"0"):
        (tmp_path / "model.safetensors").write_bytes(b"0" * 200_000 + middle + b"0" * 200_000)
        digests.append(provenance.model_record("m", tmp_path)["digest"])
    assert digests[0] == digests[2] != digests[1]


@async_test
async def test_the_engine_record_has_each_server_s_version_and_model():
    async with FakeServer() as server:
        engine = await SGLangEngine.connect([url := server.url], SGLangSettings())
        try:
            record = await provenance.engine_record(EngineConfig(kind="sglang"), engine)
        finally:
            await engine.close()
    assert record == {"kind": "sglang", "servers": {url: {"version": "0.5.23", "model": "served.hf"}}}
    same, other = ({"path": path, "source": "/models/served.hf"} for path in ("served.hf", "run/checkpoints/9"))
    assert provenance.with_other_models(record, same) == []
    assert provenance.with_other_models(record, other) == [f"{url} (served.hf)"]


def test_a_shard_is_parsed_as_k_of_n():
    assert shard_of("3/8") == (3, 8)
    for text in ("8", "0/8", "9/8", "a/b"):
        with pytest.raises(Exception, match="is not a shard, for example 3/8"):
            shard_of(text)


def test_the_number_of_samples_in_flight_is_bounded(chat, monkeypatch, tmp_path):
    class Counting(Evaluator):
        flying = most = 0

        async def reply(self, request):
            self.flying += 1
            self.most = max(self.most, self.flying)
            await asyncio.sleep(0.001)
            self.flying -= 1
            return await super().reply(request)

    counting = Counting(chat, lambda episode, request: answer("A"), monkeypatch)
    monkeypatch.setattr("paravt_jax.evaluation.runner.MAX_IN_FLIGHT", 4)
    counting.run(config_of("longvideobench", tmp_path / "copy", num_rows=20))
    assert counting.most == 4 and len(counting.episodes) == 20


def test_several_episodes_per_sample_give_avg_and_pass_at_k(evaluator, tmp_path):
    config = config_of("longvideobench", tmp_path / "copy", "eval.num_samples=2", "rollout.temperature=0.5", num_rows=2)
    (cell,) = evaluator(lambda episode, request: answer("A" if episode.endswith("/0") else "C")).run(config)
    scores = cell["scores"]["strict"]  # the answers are A and B
    assert (scores["avg@2"], scores["pass@2"], scores["score"]) == (0.25, 0.5, 0.25)


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"1\r\n00:00:00,000 --> 00:00:20,000\r\nCaf\xe9 lid\r\n", "shown"),  # Latin-1, CRLF
        ("\ufeff1\n00:00:00,000 --> 00:00:20,000\n<i>Café</i> lid\n".encode(), "shown"),
        (b"1\n00:00:04,000 --> 00:00:05,000\nCaf\xe9 lid\n", "none"),  # not on screen with a frame
        (b"", "unreadable"),
        (b"no subtitles at all", "unreadable"),
        (None, "none"),
    ],
)
def test_lines_on_screen_precede_the_question_and_broken_files_are_counted(content, state, evaluator, tmp_path):
    root = make_copy("videomme_subtitles", tmp_path / "copy", 1)
    file = root / "subtitle" / "fFjv93ACGo0.srt"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    engine = evaluator("A")
    (cell,) = engine.run(config_of("videomme_subtitles", root))
    assert cell["subtitles"] == {state: 1}
    assert ("Café lid\n\nHow many lids?" in engine.prompts[0]) == (state == "shown")


def test_a_sample_whose_subtitles_could_not_be_chosen_in_time_runs_again(evaluator, tmp_path):
    engine, config = evaluator("A"), config_of("videomme_subtitles", tmp_path / "copy", num_rows=1)
    info, late = engine.frames.info, iter([VideoTimeout("the video could not be read in time")])

    async def late_once(path, deadline_s):
        if (problem := next(late, None)) is not None:
            raise problem
        return await info(path, deadline_s)

    engine.frames.info = late_once
    with pytest.raises(RuntimeError, match=r"every sample is missing; .*could not be read in time"):
        engine.run(config)
    (cell,) = engine.run(config)
    assert cell["subtitles"] == {"shown": 1}


def test_the_split_without_subtitles_does_not_show_them(evaluator, tmp_path):
    root = make_copy("videomme_subtitles", tmp_path / "copy", 1)
    engine = evaluator("A")
    engine.run(config_of("videomme", root))
    assert "lid comes off" not in engine.prompts[0]


def test_a_cue_is_on_screen_between_its_times():
    cues = [Cue(0, 2, "a"), Cue(2, 4, "b"), Cue(4, 6, "c"), Cue(6, 8, "a")]
    assert on_screen(cues, [1.0, 4.0, 7.0]) == ["a", "c"]


def test_a_mode_sets_the_prompt_the_forced_prefix_and_the_prompt_hash(evaluator, tmp_path):
    prompts, hashes = {}, {}
    for mode in ("reasoning", "direct"):
        engine = evaluator("A")
        (cell,) = engine.run(config_of("longvideobench", tmp_path / mode, f"eval.mode={mode}"))
        prompts[mode], hashes[mode] = engine.prompts[0], cell["hashes"]
    assert prompts["reasoning"].endswith("<think>\n") and "Think first" in prompts["reasoning"]
    assert not prompts["direct"].endswith("<think>\n")
    assert DIRECT in prompts["direct"] and "Think" not in prompts["direct"]
    assert hashes["reasoning"]["prompt"] != hashes["direct"]["prompt"]
    assert hashes["reasoning"]["scorer"] == hashes["direct"]["scorer"]


def test_the_releases_prompts_work_in_this_projects_protocol(evaluator, tmp_path):
    words = tmp_path / "words.yaml"
    words.write_text('system: "Crop with crop_video."\nsystem_has_tools: true\nwith_tool: "{question} It is {names}"\n')
    settings = ["rollout.forced_prefix=", "eval.dispatches=[parallel]", f"rollout.prompts_file={words}"]
    engine = evaluator("A")
    engine.run(config_of("longvideobench", tmp_path / "copy", *settings))
    assert "Crop with crop_video." in engine.prompts[0] and not engine.prompts[0].endswith("<think>\n")
    message = r"eval\.mode=direct has no tools, which conflicts with eval\.dispatches=\['parallel'\]"
    with pytest.raises(ValueError, match=message):
        config_of("longvideobench", tmp_path / "copy", "eval.mode=direct", settings[1])


def test_calls_run_and_their_frames_are_counted(evaluator, tmp_path):
    turns = {}

    def say(episode, request):
        turns[episode] = turns.get(episode, 0) + 1
        return f"I look closer.</think>{call(3, 8)}{call(20, 22)}<|im_end|>" if turns[episode] == 1 else answer("A")

    (cell,) = evaluator(say).run(config_of("longvideobench", tmp_path / "copy", "eval.dispatches=[parallel]"))
    assert cell["crop_frames"] == {"min": 7, "median": 7, "max": 7} and cell["metrics"]["tool_calls_mean"] == 2
    assert cell["metrics"]["calls_ok"] == 6 and cell["hashes"]["schema"]


def test_progress_has_the_accuracy(evaluator, tmp_path):
    config = config_of("longvideobench", tmp_path / "copy", num_rows=4)
    evaluator("A").run(config)
    results = list(map(result_of, lines_of(config)))
    tally = Tally("longvideobench", results[:1])
    tally.add(results[1])
    assert tally.summary() == "longvideobench · 50.0 % of 2 right"


def test_a_repeated_sample_counts_once_in_the_progress(evaluator, tmp_path, monkeypatch):
    config = config_of("longvideobench", tmp_path / "copy")

    with pytest.raises(RuntimeError):
        evaluator(dead).run(config)
    shown = []
    monkeypatch.setattr(Meter, "at", lambda meter, done, text="": shown.append(text))
    evaluator("A").run(config)
    assert shown[-1].endswith(" · 33.3 % of 3 right")


def test_the_command_fails_without_a_headline(evaluator, tmp_path, monkeypatch, capsys):
    config = config_of("longvideobench", tmp_path / "copy")
    evaluator("A")
    monkeypatch.setattr(command, "read_config", lambda *_: config)
    monkeypatch.setattr(sys, "argv", ["eval", "--shard", "1/2"])
    command.main()
    assert "| none | 3 | strict | 50.0 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["eval"])
    with pytest.raises(RuntimeError, match="no headline for none, 3 frames: 3 of 1337 samples: the run has 3 rows"):
        command.main()
    assert "| none | 3 | strict | 33.3 |" in capsys.readouterr().out
