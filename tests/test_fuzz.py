"""Fuzz tests: any input from models, servers, data sets and disks is either handled or rejected cleanly.

Each target takes a hundred inputs in the suite. `.venv/bin/python -m pytest tests/test_fuzz.py --long 60` fuzzes each
target for 60 minutes, with new inputs every round. Add an input that fails as an `@example`, or as a separate test.
"""

import base64
import copy
import functools
import json
import math
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings, strategies as st

import model_port
from model_port.layout import RECORD_FILE
from model_port.output_dir import LIST_FILE, LOCK_FILE
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.config import CheckpointConfig
from paravt_jax.data.prompts import load_prompts, read_prompt
from paravt_jax.data.rows import BadRow
from paravt_jax.data.traces import read_trace
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import QUESTION_TYPES, reward_terms
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_files import verify
from rollout.chat import TURN_PROBE, Chat
from rollout.engine.answers import Expected, Fingerprint, generation_of
from rollout.engine.http import ServerUnavailable
from rollout.engine.protocol import Sampling
from rollout.engine.settings import Mixture, SGLangSettings
from rollout.toolbox import BUILT_IN, Videos, signatures
from rollout.toolbox.search_subtitles import search
from rollout.toolbox.subtitles import parse_srt
from rollout.tools import MAX_CALLS, BadCall, find_calls, video_of, window_of
from rollout.video.info import VideoInfo

LONG_EXAMPLES = 2_000  # per round
FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_code>", "</tool_code>", "<answer>", "</answer>"),
    *("crop_video(", "start_time=", "end_time=", "video_path=", "print(", "1:30", "1e999"),
    *(")", ",", "'", '"', "\n", "-"),
    *('{"name": "crop_video", "arguments": {', '"start_time": 1', '"end_time": 2', "}}", "[[", "((", "**", "0x", "\0"),
    *(TURN_PROBE, "\ue000", "\ud800", "<|im_end|>", "<|im_start|>assistant", "<tool_response>", "</tool_response>"),
    *("<|image_pad|>", "<|vision_start|>", "<video>", "\u2028", "９", "½"),
)


@pytest.fixture
def rounds(request):
    """Runs a target once; with --long repeatedly until its time is over, with new inputs each time."""
    minutes = request.config.getoption("--long")

    def run(target, *fixed):
        if minutes:
            target = settings(max_examples=LONG_EXAMPLES, derandomize=False, database=None)(target)
        end_s = time.monotonic() + 60 * minutes
        target(*fixed)
        while time.monotonic() < end_s:
            target(*fixed)

    return run


texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8) | st.integers().map(str), max_size=40).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(texts | st.sampled_from(["a", "text"]), part, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated(draw, whole):
    """Returns a copy with up to three parts replaced or removed."""
    whole = [copy.deepcopy(whole)]
    for _ in range(draw(st.integers(0, 3))):
        part = whole
        while True:
            places = list(part) if isinstance(part, dict) else list(range(len(part)))
            place = draw(st.sampled_from(places))
            if not isinstance(part[place], dict | list) or not part[place] or draw(st.booleans()):
                break
            part = part[place]
        if part is not whole and draw(st.booleans()):
            del part[place]
        else:
            part[place] = draw(json_values)
    return whole[0]


def damaged(path, draw):
    """Damages a file: flips a bit, truncates it, appends bytes, or replaces its end; or leaves it unchanged."""
    content = bytearray(path.read_bytes())
    at = draw(st.integers(0, max(0, len(content) - 1)))
    how = draw(st.sampled_from(["unchanged", "flipped", "truncated", "extended", "replaced"]))
    if how == "flipped" and content:
        content[at] ^= 1 << draw(st.integers(0, 7))
    if how in ("truncated", "replaced"):
        del content[at:]
    if how in ("extended", "replaced"):
        content += draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(content)


@functools.cache
def fuzz_chat():
    return Chat(tiny_tokenizer(), CHAT_TEMPLATE)


@given(text=texts, duration_s=st.floats(0.01, 1e6))
@example(text="<tool_call>" * 200, duration_s=1.0)
@example(text="<tool_code>crop_video(" + "(" * 500 + "</tool_code>", duration_s=1.0)
def any_text_can_be_parsed_for_calls_and_scored(text, duration_s):
    end = 0
    calls = find_calls(text)
    assert len(calls) <= MAX_CALLS
    for call in calls:
        first, last = call.span
        assert text[first:].startswith(("<tool_call>", "<tool_code>")) and first < last <= len(text)
        assert first >= end or (first, last) == calls[calls.index(call) - 1].span  # several statements in one block
        end = last
        if call.problem is None:
            with suppress(BadCall):
                assert video_of(call.arguments, {"video.mp4": "/v.mp4"}) == "/v.mp4"
                window = window_of(call.arguments, duration_s)
                assert 0 <= window.start_s < window.end_s <= duration_s
    for question_type, truth in zip(QUESTION_TYPES, ("A", "[1, 2]", "red"), strict=True):
        terms = reward_terms([text], ["ok"] * len(calls), truth, question_type, RewardConfig(), None)
        assert terms.total is None or math.isfinite(terms.total)
        assert all(0 <= tag.place.start < tag.place.end <= len(text) for tag in terms.tags)


@given(turn=texts, responses=st.lists(texts, min_size=1, max_size=4), question=texts)
@example(turn="\ud800", responses=[""], question="")
def any_text_keeps_the_structure_of_its_ledger(turn, responses, question):
    chat = fuzz_chat()
    ids = np.concatenate([chat.prompt([{"role": "user", "content": chat.escape(question)}]), chat.encode_turn(turn)])
    after = chat.after_turn(ids, responses)
    text = chat.decode(after)
    assert text.count("<tool_response>") == text.count("</tool_response>") == len(responses)
    assert text.endswith("<|im_start|>assistant\n")
    assert chat.visual_ids.isdisjoint(after.tolist())
    assert text.startswith("<|im_end|>") != chat.ended(ids)
    for whole in (ids, after):
        spans = chat.spans(whole)
        assert len(spans) == len(whole) and spans[-1][1] == len(chat.decode(whole))


KEYS = ("video_path", "start_time", "end_time", "time", "box", "query")


@given(text=texts, arguments=st.dictionaries(st.sampled_from(KEYS), json_values))
@example(text="", arguments={"start_time": 59.5, "end_time": 70})
def any_arguments_of_any_tool_are_validated(text, arguments):
    videos = Videos({"/v.mp4": VideoInfo("v", 60.0, 60, 48, 64)}, {"video.mp4": "/v.mp4"}, {"/v.mp4": "/v.srt"})
    tools = signatures(BUILT_IN["report"].values())
    found = find_calls(text, tools)
    assert [call.span for call in found] == [call.span for call in find_calls(text)]
    asked = [(call.name, call.arguments) for call in found if call.well_formed] + [(name, arguments) for name in tools]
    for name, asked_for in asked:
        with suppress(BadCall):
            args = BUILT_IN["report"][name].check(asked_for, videos)
            assert args.path == "/v.mp4"
            assert args.window is None or 0 <= args.window.start_s <= args.window.end_s <= 60.0
            assert args.box is None or min(args.box.size_px(48, 64)) >= 1


SRT_PARTS = ("1\n", "\n\n", "\r", "00:00:01,5 --> 00:00:02,000\n", "999:99:99.999-->", "<i>", "{\\an8}", "\ufeff", "９")


@given(
    content=st.binary(max_size=200)
    | st.lists(st.sampled_from(SRT_PARTS) | st.text(max_size=5), max_size=20)
    .map("".join)
    .map(lambda text: text.encode(errors="replace")),
    query=texts,
)
@example(content=b"\xff\xfe\x00", query="")
@example(content=b"00:00:01,000 --> 00:00:02,000\n" + b"<" * 10_000, query="a")
def any_bytes_can_be_parsed_as_subtitles(content, query):
    cues = parse_srt(content)
    assert all(cue.text and "\n" not in cue.text and math.isfinite(cue.start_s + cue.end_s) for cue in cues)
    search(cues, query).encode()


PROMPT_ROW = {
    "prompt": [{"role": "user", "content": "<video>\nWhich colour?\nA. red\nB. blue"}],
    "videos": [{"video": "v.mp4", "subtitles": "v.srt"}],
    "extra_info": {"answer": "A", "question_type": "mcq"},
    "id": "one",
}
TRACE_ROW = {
    "messages": [
        {"role": "system", "content": "You look."},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "v.mp4", "nframes": 4}}]},
        {"role": "assistant", "content": "<think>I look.</think><answer>A</answer>"},
    ]
}


@given(prompt=mutated(PROMPT_ROW), trace=mutated(TRACE_ROW))
def any_row_is_parsed_or_reported_as_bad(prompt, trace):
    for row, read in ((prompt, read_prompt), (trace, read_trace)):
        for one in (row, json.dumps(row)):
            with suppress(BadRow):
                read(one, lambda name: f"/{name}").id.encode()


@given(rows=st.lists(mutated(PROMPT_ROW), min_size=1, max_size=5), damage=st.data())
def any_data_set(directory, rows, damage):
    (directory / "v.mp4").touch()
    (directory / "v.srt").touch()
    path = directory / "rows.parquet"
    try:
        table = pa.Table.from_pylist([row if isinstance(row, dict) else {"prompt": row} for row in rows])
        pq.write_table(table, path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return  # parquet cannot store these values
    damaged(path, damage.draw)
    read_or_reject(path)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    damaged(path, damage.draw)
    read_or_reject(path)


def read_or_reject(path):
    """Reads rows, or checks that the error names the file."""
    try:
        load_prompts(path, video_root="", max_bad_frac=1.0)
    except ValueError as problem:
        if path.name not in str(problem):
            raise


@pytest.mark.slow
def test_any_data_set_is_read_or_rejected_with_its_name(rounds, tmp_path):
    rounds(any_data_set, tmp_path)


GOOD_ANSWER = {
    "output_ids": [5, 6, 7, 8],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 4},
        "output_token_logprobs": [[-0.5, token, None] for token in (5, 6, 7, 8)],
        "weight_versions": [{"version": "t/2", "start": 0, "end": 1}, {"version": "t/3", "start": 1, "end": 4}],
        "input_token_logprobs": [[None, 3, None], [-1.5, 4, None]],
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "routed_experts": base64.b64encode(np.arange(6, dtype=np.int32)).decode(),
    },
}


@given(answer=mutated(GOOD_ANSWER))
def any_server_response_is_valid_or_a_server_failure(answer):
    try:
        settings = SGLangSettings(vocab_size=100, mixture=Mixture(1, 8, 1))
        found = generation_of(answer, Sampling(4, stop_ids=(7,)), Expected("t/", 2, 3), settings, "http://server", 0.1)
    except ServerUnavailable:
        pass
    else:
        assert len(found.ids) == len(found.behavior_logp) == len(found.versions) <= 4
        assert (found.ids >= 0).all() and (found.ids < 100).all()
        assert (found.behavior_logp <= 0).all() and np.isfinite(found.behavior_logp).all()
        assert found.experts is None or ((found.experts >= 0) & (found.experts < 8)).all()
        assert (found.versions >= 2).all() and (found.versions <= 3).all()
    with suppress(ServerUnavailable):
        assert Fingerprint.of(answer, "http://server").problem(Fingerprint(np.zeros(1, int), np.zeros(0)))


@pytest.mark.parametrize(
    "target",
    [
        any_bytes_can_be_parsed_as_subtitles,
        pytest.param(any_text_can_be_parsed_for_calls_and_scored, marks=pytest.mark.slow),
        pytest.param(any_text_keeps_the_structure_of_its_ledger, marks=pytest.mark.slow),
        pytest.param(any_arguments_of_any_tool_are_validated, marks=pytest.mark.slow),
        pytest.param(any_row_is_parsed_or_reported_as_bad, marks=pytest.mark.slow),
        pytest.param(any_server_response_is_valid_or_a_server_failure, marks=pytest.mark.slow),
    ],
)
def test_any_input_is_handled_or_rejected(target, rounds):
    rounds(target)


@pytest.fixture(scope="module")
def checkpoint(tiny_hf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    learner = Learner(model_port.load(tiny_hf), OptimConfig(), LossConfig(kl_coef=0.0), temperature=0.7)
    checkpoints = Checkpoints(directory, tiny_hf, CheckpointConfig(), print)
    checkpoints.save(learner, {"step": 0, "seen": [0.1, 2**40], "name": "a run"})
    checkpoints.close()
    return directory / "0"


@given(damage=st.data())
def any_checkpoint(checkpoint, damage):
    names = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    names = [name for name in names if Path(name).name not in (LOCK_FILE, LIST_FILE)]
    path = checkpoint / damage.draw(st.sampled_from(names) | st.just(RECORD_FILE))
    content, record = path.read_bytes(), json.loads((checkpoint / RECORD_FILE).read_bytes())
    try:
        damaged(path, damage.draw)
        ((_, problem),) = verify(checkpoint)
        if not problem:
            assert json.loads((checkpoint / RECORD_FILE).read_bytes()) == record
            assert path.name == RECORD_FILE or path.read_bytes() == content
    finally:
        path.write_bytes(content)


@pytest.mark.slow
def test_any_damage_to_a_checkpoint_is_detected(rounds, checkpoint):
    rounds(any_checkpoint, checkpoint)
