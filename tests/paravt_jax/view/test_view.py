"""The page of a run is complete, bounded, offline, and safe from model output."""

import base64
import hashlib
import json
import shutil
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from data_rows import write_lines
from evaluator import Evaluator, answer, config_of
from view_run import CHAT, DURATION_S, NASTY, QUESTIONS, make_run, write_metrics

from model_port.cli import run_cli
from model_port.terminal import visible
from paravt_jax.run.directory import load_settings_log, write_settings
from paravt_jax.run.log import load_jsonl
from paravt_jax.view import episodes
from paravt_jax.view.__main__ import main
from paravt_jax.view.episodes import PAGE_BYTES, Mark, pieces
from paravt_jax.view.figures import MAX_POINTS
from paravt_jax.view.page import make_page


class Page(HTMLParser):
    """A page parsed with the standard library."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.contents: dict[str, str] = {}
        self._inside = ""
        self.feed(page.decode())
        self.close()
        self.all = json.loads(self.contents["application/json"])
        self.data, self.rows = self.all["runs"][0], self.all["rows"]
        self.episodes = [json.loads(line) for line in self.contents.get("text/plain", "").splitlines()]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._inside = dict(attrs).get("type") or tag

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.contents[self._inside] = self.contents.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def view(*run_dirs: Path, max_episodes: int = 200, frames: bool = False) -> Page:
    return Page(make_page(run_dirs, max_episodes, frames=frames))


def charts_of(page: Page) -> dict[str, dict]:
    return {chart["title"]: chart for chart in page.data["figures"]["charts"]}


def command(monkeypatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["view", *map(str, args)])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("view") / "studio")


@pytest.fixture(scope="module")
def page(run_dir) -> Page:
    return view(run_dir)


def test_the_page_loads_nothing_and_allows_only_its_own_style_and_script(page):
    links = {value for name, value in page.attributes if name in ("src", "href", "data", "action", "srcset")}
    assert links == {"#episodes"}
    contents = [value or "" for name, value in page.attributes if name == "content"]
    policy = next(value for value in contents if "default-src" in value)
    for name in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.contents[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "img-src" not in policy


def test_model_output_never_becomes_markup_and_is_complete(page, tmp_path):
    nasty = view(make_run(tmp_path / "<script>x&amp;", texts=NASTY))
    assert nasty.tags == page.tags
    texts = {"".join(piece["text"] for turn in e["turns"] for piece in turn["pieces"]) for e in nasty.episodes}
    assert {visible(text) for text in NASTY} <= texts
    assert nasty.contents["script"] == page.contents["script"]
    for data in (nasty.contents["application/json"], nasty.contents["text/plain"]):
        assert data.isascii() and not set(data) & set("<>&\x00")


def test_highlighted_characters_are_those_that_earned_the_credit(run_dir, page):
    """Also those of a plugin's terms."""
    records = [record for path in sorted((run_dir / "episodes").iterdir()) for record in load_jsonl(path)]
    num_checked = 0
    for record, episode in zip(records, page.episodes, strict=True):
        own = ["brief", "repeated"] * (not episode["missing"])
        assert [term["name"] for term in episode["own"]] == own
        for number, credit in enumerate(record.get("reward", {}).get("credits", [])):
            earned = "".join(record["turns"][turn]["text"][start:end] for turn, start, end in credit["places"])
            pieces_ = [piece for turn in episode["turns"] for piece in turn["pieces"]]
            assert "".join(piece["text"] for piece in pieces_ if number in piece.get("credits", [])) == earned
            num_checked += 1
    assert num_checked > 200


def test_spans_count_characters_and_not_utf16_units():
    parts = pieces("\U0001f3fa\U0001f3fa</think>", [Mark(2, 10, "credit", 3)], 100)
    assert parts == [{"text": "\U0001f3fa\U0001f3fa"}, {"text": "</think>", "credits": [3]}]


def test_long_texts_lose_their_middle_which_is_counted():
    parts = pieces("a" * 40 + "b" * 1000 + "c" * 40, [Mark(500, 600, "tag"), Mark(1075, 1080, "credit", 0)], 60)
    omitted = {"text": "", "left_out": 1020}
    assert parts == [{"text": "a" * 30}, omitted, {"text": "c" * 25}, {"text": "c" * 5, "credits": [0]}]


def test_the_forced_prefix_is_separate_from_sampled_text(page):
    first = [turn["pieces"][0] for episode in page.episodes for turn in episode["turns"]]
    forced = [piece for piece in first if "forced" in piece]
    assert len(forced) > 50 and {piece["text"] for piece in forced} == {"<think>"}  # its line break is the next piece
    assert not any("forced" in turn["pieces"][-1] for episode in page.episodes for turn in episode["turns"])


def test_episodes_before_a_change_of_settings_have_the_settings_of_their_step(tmp_path):
    run_dir = make_run(tmp_path / "run", 2)
    config = load_settings_log(run_dir)[0]["config"]
    rollout, reward = config["rollout"] | {"forced_prefix": ""}, config["reward"] | {"format_weight": 0.5}
    write_settings(config | {"rollout": rollout, "reward": reward}, run_dir, step=1)
    page = view(run_dir)
    forced = [e["step"] for e in page.episodes for turn in e["turns"] if "forced" in turn["pieces"][0]]
    assert set(forced) == {1}
    assert {(e["step"], e["weights"]["format"]) for e in page.episodes} == {(1, 1.0), (2, 0.5)}
    changes = [["rollout.forced_prefix", "<think>\n → empty"], ["reward.format_weight", "1.0 → 0.5"]]
    assert page.data["about"]["changes"] == [[1, changes]]


def test_a_prefix_that_was_imitated_or_sampled_is_not_marked_as_forced(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    records = run_dir / "episodes" / "000001.jsonl"
    records.write_text(records.read_text().replace('"kind": "forced"', '"kind": "prompt"'))
    assert not any("forced" in piece for e in view(run_dir).episodes for turn in e["turns"] for piece in turn["pieces"])


def test_ids_and_log_probs_of_tokens_stay_out(page):
    def keys(value):
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    assert not keys(page.episodes) & {"ids", "behavior_logp", "segments", "token_span"}
    assert page.episodes[0]["turns"][0]["num_sampled"] > 5


def test_calls_have_their_window_in_the_video_and_frames_their_times(page):
    episode = next(e for e in page.episodes if sum(len(turn["calls"]) for turn in e["turns"]) > 1)
    (video,) = episode["videos"]
    assert (video["name"], video["duration_s"]) == ("video.mp4", DURATION_S)
    assert len(video["frames_s"]) == episode["frame_budget"] and video["frames_s"] == sorted(video["frames_s"])
    calls = [call for turn in episode["turns"] for call in turn["calls"]]
    assert [call["window_s"] for call in calls if call["outcome"] == "ok"]
    assert all(call["video"] == 0 and call["response"] for call in calls)


def test_characters_have_the_advantage_they_were_trained_with(run_dir, page):
    records = [record for path in sorted((run_dir / "episodes").iterdir()) for record in load_jsonl(path)]
    num_checked = 0
    for record, episode in zip(records, page.episodes, strict=True):
        for turn, start, end, value in record["advantage"]["places"]:
            number = episode["advantages"].index(round(value, 4))
            trained = [piece for piece in episode["turns"][turn]["pieces"] if piece.get("advantage") == number]
            text = visible(record["turns"][turn]["text"][start:end])
            if text:
                assert text in "".join(piece["text"] for piece in trained)
            else:
                assert episode["turns"][turn]["end_advantage"] == number
            num_checked += 1
    assert num_checked > 200


def test_turns_and_calls_have_their_time(page):
    episode = next(e for e in page.episodes if len(e["turns"]) > 1 and len(e["turns"][0]["calls"]) > 1)
    first, second = episode["turns"][:2]
    ends = [call["started_s"] + call["latency_s"] for call in first["calls"]]
    assert {call["started_s"] for call in first["calls"]} == {first["started_s"] + first["latency_s"]}
    assert max(ends) == pytest.approx(second["started_s"], abs=1e-3) and episode["overview_s"] > 0


def test_a_page_of_two_runs_has_the_episodes_of_both(run_dir, tmp_path):
    other = make_run(tmp_path / "other", 2, luck=1)
    page = view(run_dir, other, max_episodes=24)
    assert [run["about"]["name"] for run in page.all["runs"]] == ["view0/studio", f"{tmp_path.name}/other"]
    prompts = [{(row["step"], row["prompt"]) for row in page.rows if row["run"] == run} for run in (0, 1)]
    assert [sum(row["run"] == run for row in page.rows) for run in (0, 1)] == [12, 12]
    assert prompts[0] == prompts[1]  # of the common steps
    assert [row["run"] for row in view(run_dir, other, max_episodes=1).rows] == [0]


def test_runs_share_their_steps_also_beside_a_run_without_episodes(run_dir, tmp_path):
    others = [make_run(tmp_path / "other", 2, luck=1), write_metrics(tmp_path, [{"step": 1, "loss/policy": 0.5}])]
    page = view(run_dir, *others)
    assert [{row["step"] for row in page.rows if row["run"] == run} for run in range(3)] == [{1, 2}, {1, 2}, set()]


def test_an_evaluation_has_its_cells_with_the_results_of_their_certificates(tmp_path, monkeypatch):
    settings = ["eval.dispatches=[none]", "eval.frame_budgets=[3,5]", "eval.num_samples=2", "rollout.temperature=1"]
    config = config_of("longvideobench", tmp_path / "copy", *settings)
    cells = Evaluator(CHAT, lambda episode, request: answer("B"), monkeypatch).run(config)
    (Path(config.run_dir) / "cell_none_5.json").unlink()  # as before the cell is finished
    page = view(Path(config.run_dir), max_episodes=8)
    done, unfinished = page.data["cells"]
    assert page.data["about"]["kind"] == "evaluation" and page.data["headlines"] == []
    assert done | {"temperature": 1.0} == cells[0] | {"provenance": done["provenance"]}
    assert (done["n"]["expected"], done["dispatch"], done["frame_budget"]) == (1337, "none", 3)
    assert (unfinished["n"]["answered"], unfinished["scores"], unfinished["frame_budget"]) == (3, {}, 5)
    assert Counter(row["cell"] for row in page.rows) == {"none_3": 4, "none_5": 4}  # two prompts, two samples each
    assert {row["split"] for row in page.rows} == {"longvideobench"}
    assert ["Dispatches", "none"] in page.data["about"]["facts"]


def test_an_evaluation_in_shards_that_are_not_merged_is_an_evaluation(tmp_path):
    shard = tmp_path / "shards" / "1_of_2"
    write_settings({"eval": {}, "data": {"split": "mlvu"}}, write_metrics(shard, []))
    (shard / "samples_none_3.jsonl").write_text(json.dumps({"key": "a", "id": "1", "episodes": [{"id": "1"}]}))
    page = view(tmp_path)
    assert (page.data["about"]["kind"], page.data["about"]["facts"]) == ("evaluation", [["Split", "mlvu"]])
    assert [row["split"] for row in page.rows] == ["mlvu"]


def test_the_model_of_an_evaluation_behind_an_endpoint_is_the_endpoints(tmp_path):
    engine = {"kind": "openai", "urls": ["http://127.0.0.1:1/v1"], "model": "gpt-4o"}
    config = {"eval": {}, "model": {"path": "not/used", "dtype": "bfloat16"}, "engine": engine}
    write_settings(config, write_metrics(tmp_path, []))
    assert view(tmp_path).data["about"]["facts"] == [["Model", "gpt-4o"], ["Engine", "openai"]]


def test_a_curve_has_a_gap_where_a_step_has_no_finite_number(tmp_path):
    rows = [{"step": n} | value for n, value in enumerate([{"loss/policy": 0.5}, {}, {"loss/policy": None}], 1)]
    rows.append({"step": 4, "loss/policy": 1e300})  # too large to draw
    (line,) = charts_of(view(write_metrics(tmp_path, rows)))["Policy loss"]["lines"]
    assert line["values"] == [0.5, None, None, None]


def test_a_missing_episode_has_its_problem_and_a_siblings_question(page):
    missing = [episode for episode in page.episodes if episode["missing"]]
    assert missing and all("no server answered" in episode["problem"] for episode in missing)
    assert all(episode["reward"] is None and not episode["turns"] for episode in missing)
    assert {episode["question"] for episode in missing} <= {text.removeprefix("<video>\n") for _, text, _ in QUESTIONS}


@pytest.fixture
def forty_steps(tmp_path) -> Path:
    for step in range(1, 41):
        write_lines(tmp_path / "episodes" / f"{step:06d}.jsonl", [{"id": n, "step": step} for n in range(6)])
    return tmp_path


@pytest.mark.parametrize("max_episodes", [0, 1, 3, 8, 50])
def test_episodes_are_spread_evenly_over_the_steps(max_episodes, forty_steps):
    steps = [episode["step"] for episode in view(forty_steps, max_episodes=max_episodes).episodes]
    assert len(steps) == max_episodes
    assert steps == sorted(steps) and max(Counter(steps).values(), default=0) <= 5
    assert steps[-1:] in ([], [40]) and (max_episodes < 8 or steps[0] == 1)


def test_different_steps_show_different_rollout_numbers(forty_steps):
    assert {episode["id"] for episode in view(forty_steps, max_episodes=40).episodes} == set("012345")


@pytest.mark.slow
def test_a_page_of_huge_texts_stays_small_and_counts_omitted_characters(tmp_path):
    run_dir = make_run(tmp_path / "run", 1, texts=["<think>\n" + "\U0001f3fa<answer>" * 3_000, "\x00" * 200_000] * 3)
    page = make_page([run_dir], 200)
    assert len(page) < PAGE_BYTES
    long = [episode for episode in Page(page).episodes if episode["id"].startswith("000099")]
    assert all(any("left_out" in piece for piece in episode["turns"][0]["pieces"]) for episode in long)


def test_episodes_fit_in_their_share_of_the_page(run_dir, monkeypatch):
    monkeypatch.setattr(episodes, "PAGE_BYTES", 72 * 2_000)
    monkeypatch.setattr(episodes, "MIN_EPISODE_BYTES", 100)
    converted = view(run_dir).episodes
    assert len(converted) == 72 and max(len(json.dumps(episode)) for episode in converted) <= 2_000
    assert {episode["problem"] for episode in converted if not episode["turns"]} >= {"too large for this page"}


def test_a_running_runs_page_ends_at_its_last_complete_line(run_dir, page, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    for path in (tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "episodes" / "000003.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    cut = view(tmp_path / "run")
    assert cut.data["figures"]["steps"] == [1, 2] and page.data["figures"]["steps"] == [1, 2, 3]
    assert cut.episodes == page.episodes[:-1]


def test_a_run_without_steps_has_an_empty_page(run_dir, tmp_path):
    shutil.copy(run_dir / "config.json", tmp_path)
    page = view(tmp_path)
    assert page.data["about"]["steps_done"] == 0 and page.data["about"]["steps_planned"] == 5
    assert [page.episodes, page.rows, page.data["headlines"], page.data["figures"]["charts"]] == [[], [], [], []]


def test_metrics_without_a_predefined_chart_get_their_own(tmp_path):
    fixed = {"optim/grad_norm": 1.0, "data/bad_rows": 0, "note": "x"}
    rows = [{"step": n, "loss/sft": 2.0 / n} | fixed for n in (1, 2, 3)]
    data = view(write_metrics(tmp_path, rows)).data
    sections = {chart["title"]: chart["section"] for chart in data["figures"]["charts"]}
    assert sections == {"Gradient norm before clipping": "Learner", "loss/sft": "Learner", "data/bad_rows": None}
    assert [(item["symbol"], item["first"], item["last"]) for item in data["headlines"]] == [("sft", 2.0, 0.66667)]


def test_headlines_are_means_of_the_first_and_last_tenth(tmp_path):
    rows = [{"step": n, "rollout/format_reward": n, "rollout/tool_calls_mean": None} for n in range(1, 21)]
    (item,) = view(write_metrics(tmp_path, rows)).data["headlines"]
    assert (item["symbol"], item["first"], item["last"]) == ("f_τ", 1.5, 19.5)  # (1 + 2) / 2, (19 + 20) / 2


def test_labels_of_the_data_are_spelled_out_like_model_output(tmp_path):
    turned = "a\u202eb"
    run_dir = make_run(tmp_path / "run", 1)
    write_metrics(run_dir, [{"step": 1, f"rollout/accuracy_mean_{turned}": 0.5, f"loss/{turned}": 0.5}])
    (run_dir / "config.json").write_text(json.dumps({"config": {"model": {"path": turned}}, "git_commit": None}))
    episode = {"id": "1", "question_type": turned, "split": turned, "groups": {turned: [turned]}}
    write_lines(run_dir / "episodes" / "000001.jsonl", [episode])
    content = make_page([run_dir], 20).decode()
    assert "\\u202e" not in content and "U+202E" in content


def test_an_episode_too_large_for_the_page_has_no_colors_of_its_text(run_dir, monkeypatch):
    monkeypatch.setattr(episodes, "PAGE_BYTES", 1)
    monkeypatch.setattr(episodes, "MIN_EPISODE_BYTES", 1)
    assert {str(episode["advantages"]) for episode in view(run_dir).episodes} == {"[]"}


def test_points_of_long_runs_are_means_of_neighboring_steps(tmp_path):
    rows = [{"step": n, "loss/policy": float(n % 2)} for n in range(1, 2 * MAX_POINTS + 1)]
    page = view(write_metrics(tmp_path, rows))
    figures = page.data["figures"]
    assert figures["steps_per_point"] == 2 and figures["steps"][-1] == 2 * MAX_POINTS
    assert charts_of(page)["Policy loss"]["lines"][0]["values"] == [0.5] * MAX_POINTS


def test_a_count_is_whole_even_where_points_are_means(tmp_path):
    rows = [{"step": n, "loss/few": n % 2, "loss/policy": n / 2} for n in range(1, 2 * MAX_POINTS + 1)]
    charts = charts_of(view(write_metrics(tmp_path, rows)))
    assert [charts[title]["whole"] for title in ("loss/few", "Policy loss")] == [True, False]


def test_validation_values_are_drawn_over_the_training_curve(tmp_path):
    write_lines(tmp_path / "validation.jsonl", [{"step": 1, "validation/accuracy_mean": 0.25}])
    rows = [{"step": step, "rollout/accuracy_mean": 0.5, "rollout/anchor_mean": 0.0} for step in (1, 2)]
    charts = charts_of(view(write_metrics(tmp_path, rows)))
    assert [charts[title]["validation"] for title in ("Accuracy", "Terms of the reward")] == [[0.25], None]


@pytest.mark.parametrize(("num_rows", "shown"), [(1, [0.0]), (2, [0.0, 0.25]), (3, [0.0, 0.5])])
def test_a_headline_has_the_first_and_the_last_validation(num_rows, shown, tmp_path):
    rows = [{"step": n, "validation/accuracy_mean": n / 4} for n in range(num_rows)]
    write_lines(tmp_path / "validation.jsonl", rows)
    (item,) = view(write_metrics(tmp_path, [{"step": 1, "rollout/accuracy_mean": 0.5}])).data["headlines"]
    assert item["validation"] == shown


def test_questions_about_images_and_text_have_no_placeholder_and_no_frame_budget(tmp_path):
    run_dir, shared = make_run(tmp_path / "run", 1), {"step": 1, "turns": []}
    image = {**shared, "id": "1", "question": "<image>\nWhat is this?", "videos": [], "frame_budget": 1}  # as SFT logs
    missing = {**shared, "id": "2", "question": "What <image> is this?", "frame_budget": 0}
    write_lines(run_dir / "episodes" / "000001.jsonl", [image, missing])
    page = view(run_dir)
    assert [row["question"] for row in page.rows] == ["What is this?", "What  is this?"]
    assert [row["frame_budget"] for row in page.rows] == [None, None]


def test_parts_of_a_steps_time_add_up_to_its_total(tmp_path):
    rows = [{"step": 1, "time/rollout_s": 5.0, "time/update_s": 3.0, "time/publish_s": 0.5, "time/step_s": 10.0}]
    lines = charts_of(view(write_metrics(tmp_path, rows)))["Time per step, seconds"]["lines"]
    assert [line["values"] for line in lines] == [[5.0], [3.0], [0.5], [1.5]]


@pytest.mark.parametrize(("num_runs", "name"), [(1, "report.html"), (2, "compare.html")])
def test_a_comparison_has_its_own_page(num_runs, name, tmp_path, monkeypatch):
    write_metrics(tmp_path, [{"step": 1, "loss/policy": 0.5}])
    assert command(monkeypatch, *[tmp_path] * num_runs) == 0
    assert [path.name for path in tmp_path.glob("*.html")] == [name]


NO_RUN = "is not a run"
OTHERS_FILES = [
    ({}, NO_RUN),
    ({"config.json": '{"model_type": "qwen3_vl"}'}, NO_RUN),
    ({"notes.txt": ""}, NO_RUN),
    ({"metrics.jsonl": '{"loss": 1}\n'}, NO_RUN),
    ({"metrics.jsonl": "[1]\n"}, NO_RUN),
    ({"metrics.jsonl": '{"step": 1}\n{"step": "2"}\n'}, NO_RUN),
    ({"metrics.jsonl": '{"step": 1}\n{"step": true}\n'}, "line 2 has the step true, not a 64-bit integer"),
    ({"metrics.jsonl": '{"step": 99999999999999999999}\n'}, NO_RUN),
    ({"config.json": '{"config": {"eval": 3}}'}, "config.json: config.eval=3 must be an object"),
    ({"config.json": '{"config": {"mismatch": {"max_kl": "x"}}}'}, "config.mismatch.max_kl='x' must be a number"),
    ({"settings.jsonl": '{"config": {}}\n'}, "settings.jsonl line 1: key 'after_step' is missing"),
    ({"config.json": '{"config": {"reward": {"format_weight": "x"}}}'}, "config.reward.format_weight='x' must be a nu"),
    ({"config.json": "[" * 100_000}, "config.json is not valid JSON"),
    ({"metrics.jsonl": "[" * 100_000 + "\n"}, "metrics.jsonl: line 1 is not valid JSON"),
    ({"settings.jsonl": "[1]\n"}, "settings.jsonl line 1 must hold a JSON object"),
]


@pytest.mark.parametrize(("files", "message"), OTHERS_FILES)
def test_a_directory_that_is_no_run_or_a_damaged_one_is_rejected(files, message, tmp_path, monkeypatch, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert command(monkeypatch, tmp_path) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_only_force_replaces_files_other_than_an_older_page(tmp_path, monkeypatch, capsys):
    write_metrics(tmp_path, [{"step": 1, "loss/policy": 0.5}])
    assert command(monkeypatch, tmp_path) == command(monkeypatch, tmp_path) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.html")] * 2
    other = tmp_path / "thesis.html"
    other.write_text("<!doctype html> years of work")
    assert command(monkeypatch, tmp_path, "--out", other) == 1
    assert "with --force" in capsys.readouterr().err and other.read_text().endswith("years of work")
    assert command(monkeypatch, tmp_path, "--out", other, "--force") == 0
    assert Page(other.read_bytes()).data["about"]["steps_done"] == 1
