"""eval.protocol=release from a copy of a split to a certificate, with a fake endpoint."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_endpoint import MODEL, FakeEndpoint
from published import ROWS, make_copy_with, write_film, write_rows

from paravt_jax.config import EvalConfig, load_config
from paravt_jax.data.splits import SPLITS
from paravt_jax.data.splits.reading import load_samples
from paravt_jax.eval import run_eval
from paravt_jax.evaluation import batch
from paravt_jax.evaluation.published import TABLES
from paravt_jax.evaluation.results import cell_table, score_table
from paravt_jax.prompts import to_yaml
from rollout.endpoint.check import PROBE_TOKENS
from rollout.endpoint.errors import EndpointError
from rollout.video.encode import write_video
from rollout.video.errors import VideoTimeout
from rollout.video.reader import FrameReader

TEXTS = json.loads((Path(__file__).parent / "release_golden.json").read_text())["texts"]
CALL = '<tool_call>{"arguments": {"start_time": 0, "end_time": 1}}</tool_call>'
RIGHT = {  # the reply to every row of published.py; scores by the release's rule and by the harness's
    "videomme": ("A man", [1, 1, 1], [1, 1, 1]),
    "videomme_subtitles": ("A", [1, 1, 1], [1, 1, 1]),
    "longvideobench": ("answer: B", [0, 1, 0], [0, 1, 0]),
    "lvbench": ("D", [1, 1, 1], [1, 1, 1]),
    "mlvu": ("B", [0, 0, 0], [1, 1, 1]),  # the gold is a letter, and the release expects an option's text
    "mmvu": ("A", [1, 0, 1], [1, 1, 1]),  # the harness accepts a part of an open answer
    "charades": ("24.3 - 30.4", [1, 1, 1], [1, 1, 1]),
}


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    return write_film(tmp_path_factory.mktemp("film") / "film.mp4")


@pytest.fixture
def copy_of(film, tmp_path):
    """Makes copies of splits with real videos; all rows of Charades have the same window."""

    def make(split, root=None):
        root = make_copy_with(film, split, root or tmp_path / split)
        if split == "charades":
            write_rows(split, root, [ROWS[split](0)] * 3)
        return root

    (tmp_path / "release.yaml").write_text(to_yaml(TEXTS, "Stand-ins."))
    return make


def config_of(split, root, url, *overrides):
    settings = [f"data.split={split}", f"data.validation={root}", f"run_dir={root.parent / 'run'}"]
    settings += ["engine.kind=openai", f"engine.urls=[{url}]", f"engine.model={MODEL}", "eval.protocol=release"]
    settings += ["eval.mode=agentic_general", f"eval.release_texts={root.parent / 'release.yaml'}"]
    settings += ["video.num_workers=1"]
    return load_config(None, *settings, *overrides, schema=EvalConfig)


def run(split, root, say, *overrides, modes=()):
    """Runs an evaluation. Returns its cell, and the requests after the endpoint's checks."""
    endpoint = FakeEndpoint(say, "ok", *modes)
    cell = run_on([endpoint], split, root, *overrides)
    return cell, [body for body in endpoint.bodies if body["max_tokens"] != PROBE_TOKENS]


def run_on(endpoints, split, root, *overrides):
    async def evaluate():
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(endpoint)).url for endpoint in endpoints]
            (cell,) = await run_eval(config_of(split, root, ",".join(urls), *overrides))
            return cell

    return asyncio.run(evaluate())


def lines_of(root):
    (path,) = (root.parent / "run").glob("samples_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_row_order(split, root):
    """Returns samples in row order; they are logged in the order in which they finish."""
    loaded = load_samples(SPLITS[split], str(root), video_root="", max_bad_frac=0.0)
    ids = [sample.prompt.id for sample in loaded.samples]
    return sorted(lines_of(root), key=lambda line: ids.index(line["id"]))


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_scored_by_the_releases_rule_and_the_harness(split, copy_of):
    reply, released, official = RIGHT[split]
    root = copy_of(split)
    cell, _ = run(split, root, lambda body: reply if len(body["messages"]) > 2 else CALL + CALL)
    scores = [line["episodes"][0]["scores"] for line in in_row_order(split, root)]
    assert [score["official"] for score in scores] == pytest.approx(official)
    assert [score["release"] for score in scores] == pytest.approx(released, abs=2e-3)  # Charades: half precision
    assert (cell["protocol"], cell["split"], cell["n"]["answered"]) == ("release", split, 3)
    assert cell["frames"]["max"] == (0 if split == "charades" else 64)
    assert cell["hashes"]["requests"] and cell["scores"]["release"]["as_released"] == pytest.approx(
        sum(released) / (3 if split == "charades" else SPLITS[split].num_samples), abs=2e-3
    )
    assert "| release |" in score_table([cell]) and "| official |" in score_table([cell])
    assert "| parallel | 64 |" in cell_table([cell])


def parts_of(message):
    return [part["type"] for part in message["content"]] if isinstance(message["content"], list) else message["content"]


def test_crops_return_pictures_and_the_last_turn_demands_an_answer(copy_of):
    cell, bodies = run("lvbench", copy_of("lvbench"), CALL, "eval.max_prompts=1")
    assert [body["max_tokens"] for body in bodies] == [2048, 2048, 2048, 64]
    messages = bodies[-1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "user"] * 3, "user"]
    assert parts_of(messages[1]) == ["image_url"] * 64 + ["text"]
    assert parts_of(messages[3]) == ["image_url"] * 2 + ["text"] and parts_of(messages[-1]) == TEXTS["last.choice"]
    assert cell["metrics"]["tool_calls_mean"] == 3 and cell["crop_frames"]["max"] == 6


def test_the_published_policys_mode_and_channel_for_charades(copy_of):
    cell, bodies = run("charades", copy_of("charades"), "1 - 2", "eval.mode=agentic")
    system, user = bodies[0]["messages"]
    assert system["content"] == TEXTS["system.agentic_minimal"] and cell["mode"] == "agentic_minimal"
    assert parts_of(user) == ["video_url", "text"]
    assert user["content"][0]["video_url"]["url"].startswith("file:///")


def test_an_endpoint_without_video_input_is_a_one_line_error_before_the_first_sample(copy_of):
    message = "HTTP 422: .*; eval.channel=video_url needs a server that can read /.* set eval.channel=image_url to send"
    root = copy_of("charades")
    with pytest.raises(EndpointError, match=message):
        run("charades", root, "1 - 2", modes=("rejected",))
    assert not list((root.parent / "run").glob("samples_*"))


@pytest.mark.slow
def test_a_failed_request_is_missing_here_and_wrong_in_the_releases_figure(copy_of, monkeypatch):
    monkeypatch.setattr("paravt_jax.evaluation.runner.MAX_IN_FLIGHT", 1)
    monkeypatch.setitem(SPLITS, "lvbench", replace(SPLITS["lvbench"], num_samples=3))
    root = copy_of("lvbench")
    cell, _ = run("lvbench", root, "D", modes=("ok", "vllm context", "ok"))
    scores = cell["scores"]["release"]
    assert cell["n"]["missing"] == {"context": 1} and cell["headline"] is None
    assert (scores["score"], scores["as_released"]) == (1, pytest.approx(2 / 3))
    again, bodies = run("lvbench", root, "D")
    assert len(bodies) == 1 and again["headline"] == again["scores"]["release"]["as_released"] == 1


@pytest.mark.parametrize(
    ("mode", "failure", "released"),
    [
        ("agentic_general", "vllm context", 1 / 3),  # the driver uses the error's text as the reply
        ("agentic_general", "empty", 1 / 3),
        ("direct", "vllm context", 1),  # an error that the driver omits
        ("direct", "empty", 1 / 3),
    ],
)
def test_an_error_that_the_driver_misses_counts_in_the_releases_mean_iou(mode, failure, released, copy_of):
    (say, *_) = RIGHT["charades"]
    overrides = f"eval.mode={mode}", "eval.channel=image_url"
    cell, _ = run("charades", copy_of("charades"), say, *overrides, modes=("ok", failure))
    scores = cell["scores"]["release"]
    assert (scores["score"], scores["as_released"]) == pytest.approx((1, released), abs=2e-3)


def test_a_missing_video_is_missing_and_a_video_below_64_frames_has_no_frames(copy_of):
    root = copy_of("longvideobench")
    (root / "videos" / "v0.mp4").unlink()
    write_video(root / "videos" / "v1.mp4", (np.zeros((48, 64, 3), np.uint8) for _ in range(63)), 25)
    cell, bodies = run("longvideobench", root, "C")
    assert cell["n"]["missing"] == {"video": 1} and cell["frames"] == {"min": 0, "median": 32, "max": 64}
    assert sorted(len(body["messages"][1]["content"]) for body in bodies) == [1, 65]


@pytest.mark.parametrize("read", ["info", "numbered"])
def test_a_video_that_times_out_is_missing(read, copy_of, monkeypatch):
    """A guess without frames is not a measurement, and the release has no such deadline."""

    async def late(*args):
        raise VideoTimeout("the video could not be read in time")

    monkeypatch.setattr(FrameReader, read, late)
    root = copy_of("lvbench")
    with pytest.raises(RuntimeError, match=r"every sample is missing; for example .*could not be read in time"):
        run("lvbench", root, "D")
    assert {line["episodes"][0]["reason"] for line in lines_of(root)} == {"video"}


def test_a_window_without_finite_times_is_logged_as_json(copy_of):
    root = copy_of("lvbench")
    run("lvbench", root, CALL.replace("0", '"nan"', 1), "eval.max_prompts=1")
    (path,) = (root.parent / "run").glob("samples_*.jsonl")
    assert '"window_s": [null, ' in path.read_text()


def test_a_call_that_stops_the_released_driver_is_wrong(copy_of):
    root = copy_of("charades")
    cell, _ = run("charades", root, "<tool_call>[1, 2]</tool_call> 24.3 - 30.4")
    assert cell["n"]["unanswered"] == 3 and cell["scores"]["release"]["score"] == 0
    assert {line["episodes"][0]["malformed"] for line in lines_of(root)} == {"the call [1, 2] has no arguments"}


@pytest.mark.slow
def test_samples_continue_on_the_other_server_if_one_dies(copy_of, capsys):
    """All samples use one video, so one server gets them, and dies at their second turn."""
    root, endpoints = copy_of("lvbench"), [FakeEndpoint(), FakeEndpoint()]

    def says(number, body):
        if len(body["messages"]) < 3:  # the endpoint's check is the first request
            return CALL
        if not died:
            died.append(number)
            endpoints[number].modes = ["drop"]
            asyncio.get_running_loop().create_task(endpoints[number].die())
        return "D"

    died: list[int] = []
    for number, endpoint in enumerate(endpoints):
        endpoint.say = partial(says, number)
    cell = run_on(endpoints, "lvbench", root)
    (dead,) = died
    assert cell["n"]["answered"] == 3 and cell["n"]["missing"] == {} and cell["metrics"]["tool_calls_mean"] == 1
    assert len({line["key"] for line in lines_of(root)}) == len(lines_of(root)) == 3
    assert all([turn["text"] for turn in line["episodes"][0]["turns"]] == [CALL, "D"] for line in lines_of(root))
    logged = f"{endpoints[dead].url} cannot be reached: .*; it gets no requests until it answers again"
    assert re.search(logged, capsys.readouterr().err)


@pytest.mark.slow
def test_samples_of_other_texts_are_not_mixed(copy_of):
    root = copy_of("lvbench")
    run("lvbench", root, "D")
    (root.parent / "release.yaml").write_text(to_yaml(TEXTS | {"last.choice": "Other."}, "Changed."))
    with pytest.raises(ValueError, match=r"an evaluation with other settings \(eval\.release_texts_digest\)"):
        run("lvbench", root, "D")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["eval.release_texts="], r"needs the release's texts: python -m paravt_jax.prompts import-release"),
        (["eval.release_texts=gone.yaml"], r"eval.release_texts=gone.yaml: No such file or directory; make it with"),
        (["engine.kind=sglang", "engine.model="], "which engine.kind=sglang is not; set engine.kind=openai"),
        (["eval.mode=agent"], "eval.mode=agent is not a mode of eval.protocol=release; expected"),
        (["eval.mode=agentic_release"], "was removed: eval.protocol=release eval.mode=agentic_general"),
        (["eval.mode=agentic_sage"], r"agentic_sage needs the system text of that model.*--text agentic_sage=FILE"),
        (["rollout.max_turns=4", "eval.frame_budgets=[8]"], r"eval.frame_budgets=\[8\], rollout.max_turns=4: .* fixes"),
        (["data.split="], r"has no questions for data.split=\(empty\); use one of"),
        (["eval.protocol=paravt", "eval.mode=agentic"], "eval.release_texts=.* has no effect without eval.protocol"),
    ],
)
def test_invalid_settings_are_a_one_line_error_before_the_first_sample(overrides, complaint, copy_of, monkeypatch):
    root = copy_of("lvbench")
    texts = {name: text for name, text in TEXTS.items() if name != "system.agentic_sage"}
    (root.parent / "release.yaml").write_text(to_yaml(texts, "Stand-ins."))
    with pytest.raises(ValueError, match=complaint):
        asyncio.run(run_eval(config_of("lvbench", root, "http://127.0.0.1:9/v1", *overrides)))


ROW = """
model: {{path: {model}}}
data: {{split: videomme}}
engine: {{kind: openai, urls: ["http://a"], model: {model}}}
eval: {{protocol: release, mode: reasoning, release_texts: {texts}, published_row: {row}}}
"""


def test_a_batch_whose_output_is_a_file_is_rejected_before_its_first_evaluation(tmp_path):
    (file := tmp_path / "file").write_text("any")
    with pytest.raises(ValueError, match=r"^--run-dir \S+ is not a directory$"):
        batch.main([str(tmp_path), "--run-dir", str(file)], run_eval, lambda: None)


def test_a_batch_continues_after_any_failure():
    jobs = dict.fromkeys("ab", None)

    async def fails(config):
        raise KeyError("column")

    assert batch.run_jobs(jobs, fails) == {"a": "KeyError('column')", "b": "KeyError('column')"}


def test_a_batch_ends_with_each_reason_once(tmp_path):
    for row in "abc":
        (tmp_path / f"{row}.yaml").write_text(ROW.format(model=MODEL, texts="gone.yaml", row="Video-R1-7B"))

    ends = r"resume\. a, lvbench and 2 more: eval\.release_texts=gone\.yaml: No such file [^;]*; make it with [^;]*$"
    with pytest.raises(RuntimeError, match=ends):
        batch.main([str(tmp_path), "--splits", "lvbench", "--run-dir", str(tmp_path / "runs")], run_eval, lambda: None)


@pytest.mark.slow
def test_a_batch_resumes_continues_after_a_failure_and_draws_the_table(copy_of, tmp_path, capsys, monkeypatch):
    for name in ("lvbench", "mlvu"):
        monkeypatch.setitem(SPLITS, name, replace(SPLITS[name], num_samples=3))
    copy_of("lvbench", tmp_path / "data" / "lvbench")
    (tmp_path / "rows").mkdir()
    for file, row, model in (("a", "Video-R1-7B", MODEL), ("b", "Time-R1-7B", "gone")):
        settings = dict(model=model, texts=tmp_path / "release.yaml", row=row)
        (tmp_path / "rows" / f"{file}.yaml").write_text(ROW.format(**settings))
    models, bodies = [MODEL], []

    async def evaluate(config):
        """Each evaluation of a batch has its own event loop and, in this test, its own endpoint."""
        async with FakeEndpoint("D") as endpoint:
            endpoint.models, endpoint.bodies = models, bodies
            return await run_eval(replace(config, engine=replace(config.engine, urls=[endpoint.url])))

    def start(*more):
        arguments = [str(tmp_path / "rows"), "--splits", "lvbench,mlvu", "--run-dir", str(tmp_path / "runs")]
        arguments += ["--data-root", str(tmp_path / "data"), "video.num_workers=1", *more]
        batch.main(arguments, evaluate, lambda: None)

    ends = r"3 of 4 evaluations are not complete; .*a, mlvu and 1 more: .*b, lvbench: .*gone"
    with pytest.raises(RuntimeError, match=ends):
        start()
    num_requests = len(bodies)
    assert "| ours minus published, release | — | — | — | +63.1 (+63.1 to +63.1) |" in capsys.readouterr().out
    copy_of("mlvu", tmp_path / "data" / "mlvu")
    models.append("gone")
    start("--png", str(tmp_path / "table.png"))
    assert (tmp_path / "table.png").read_bytes()[:4] == b"\x89PNG"
    done = len(bodies)
    assert done - num_requests == 3 * (1 + 3)  # three evaluations, each with a check of the endpoint
    start()
    assert len(bodies) == done
    output = capsys.readouterr().out
    assert (
        output.count("| Time-R1-7B | 58.9 |") == 2
        and f"ours: {MODEL}, release's protocol, reasoning, release |" in output
    )


def test_every_open_row_of_table_1_has_a_config():
    files = sorted(Path("configs/reproduce").glob("*.yaml"))
    rows = {load_config(file, schema=EvalConfig).eval.published_row for file in files}
    table_1, table_a = TABLES[0].rows, TABLES[1].rows
    assert rows == {*table_1, "+ SFT cold start"} - {"GPT-4o", "Gemini 1.5 Pro"} and "+ SFT cold start" in table_a
    files = Path("configs/reproduce").glob("*/*.yaml")
    templates = {load_config(file, schema=EvalConfig).eval.published_row for file in files}
    assert templates == {"GPT-4o", "Gemini 1.5 Pro"}
