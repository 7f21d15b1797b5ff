"""Turns are merged only where no call needed an earlier answer, and no frame becomes an empty text."""

import asyncio
import base64
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from make_video import at_fps, write_video

from paravt_jax.data import parallelize as module
from paravt_jax.data.__main__ import main
from paravt_jax.data.merging import (
    CITED,
    ERROR,
    FAULTY,
    GRAMMAR,
    LIMIT,
    OTHER_TOOL,
    SEVERAL,
    TIME,
    ZOOM,
    Times,
    cited_answer,
    heard,
    make_plan,
    merged,
    text_of,
)
from paravt_jax.data.parallelize import parallelize
from paravt_jax.data.summaries import SummarizerSettings, frame_size, load_known, read_summary
from paravt_jax.data.traces import load_traces
from paravt_jax.rewards.terms import reward_terms

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ANSWER = "<think>\nNow it is clear what happens.\n</think>\n<answer>B</answer>"


def call(start, end, video="v.mp4") -> str:
    arguments = {"video_path": video, "start_time": start, "end_time": end}
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def turn(start, end, think="This part may matter for the question.", video="v.mp4") -> str:
    return f"<think>\n{think}\n</think>\n{call(start, end, video)}"


def dialogue(*said, question="What happens? The video lasts 300 seconds.") -> list[dict]:
    """The question, then turns and their answers by turns, then the final answer."""
    roles = ["assistant", "tool"] * len(said)
    tool_turns = [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]
    return [{"role": "user", "content": question}, *tool_turns, {"role": "assistant", "content": ANSWER}]


def plan_of(*said, max_parallel=5, **options):
    messages = dialogue(*said, **options)
    answers = {n: heard(text_of(m)) for n, m in enumerate(messages) if m["role"] == "tool"}
    plan = make_plan(messages, answers, max_parallel)
    return [len(group) for group in plan.groups], [stop.reason for stop in plan.stops], merged(messages, plan.groups)


def assistant_texts(messages: list[dict]) -> list[str]:
    return [text_of(message) for message in messages if message["role"] == "assistant"]


# The rule


def test_independent_turns_become_one_with_the_answers_in_order():
    said = [turn(0, 10), "A dog.", turn(20, 30, "And the middle."), "A cat.", turn(90, 99), "A bird."]
    sizes, stops, messages = plan_of(*said)
    assert (sizes, stops) == ([3], [])
    assert [message["role"] for message in messages] == ["user", "assistant", *["tool"] * 3, "assistant"]
    assert [message["content"] for message in messages[2:5]] == ["A dog.", "A cat.", "A bird."]
    assert messages[1]["content"] == (
        "<think>\nThis part may matter for the question.\n\nAnd the middle.\n</think>\n"
        + "\n".join([call(0, 10), call(20, 30), call(90, 99)])
    )


@pytest.mark.parametrize(
    ("answer", "then", "reason"),
    [
        ("Error: the video could not be read.", turn(20, 30), ERROR),
        ("A dog.", turn(42, 45), ZOOM),
        ("A dog.", turn(40, 50), ZOOM),
        ("A dog.", turn(60, 70, "The summary shows a dog, so I go on."), CITED),
        ("A dog.", turn(60, 70, "The previous crop was of no use."), CITED),
        ("A dog.", turn(60, 70, "Based on the result I go further."), CITED),
        ("A dog.", turn(60, 70, "The clip does not contain the event."), CITED),
        ("A dog.", turn(60, 70, "I have found a dog. What else?"), CITED),
        ("A dog.", turn(60, 70, "It was not there, so later."), CITED),
        ("The goal follows at 120 seconds.", turn(120, 130), TIME),
        ("The goal follows at 2:00.", turn(115, 125), TIME),
        ("The goal follows after 2 minutes.", turn(115, 125), TIME),
        ("It says 70 on the wall.", turn(60, 70), TIME),
        ("A dog barks at 47.5 s.", turn(60, 70, "The barking at 47.5 s was loud."), TIME),
    ],
)
def test_a_call_that_needed_the_answer_stays_in_a_turn_of_its_own(answer, then, reason):
    sizes, stops, messages = plan_of(turn(40, 50), answer, then, "Done.")
    assert (sizes, stops) == ([1, 1], [reason])
    assert messages == dialogue(turn(40, 50), answer, then, "Done.")


@pytest.mark.parametrize(
    ("answer", "then", "options"),
    [
        ("From 40 s to 50 s a dog sleeps.", turn(50, 60), {}),  # the window asked for is no news
        ("It goes on until 120 s.", turn(120, 130), {"question": "What is at 120 s?"}),
        ("A dog barks at 47.5 s.", turn(60, 70), {}),
        ("A dog at 45 s.", turn(30, 100), {}),  # what was seen is no reason to look elsewhere
        ("There are 2 dogs.", turn(0, 10), {}),
        ("A dog.", turn(60, 70, "The overview frames show nothing at all here."), {}),
        ("A dog.", turn(60, 70, "I will look at the segment where something may be shown."), {}),
        ("A dog.", turn(42, 45, video="w.mp4"), {}),
        ([{"type": "text", "text": "<60.0 seconds>"}], turn(60, 70), {}),  # the time of a frame
    ],
)
def test_what_the_model_knew_before_is_no_dependence(answer, then, options):
    assert plan_of(turn(40, 50), answer, then, "Done.", **options)[:2] == ([2], [])


@pytest.mark.parametrize(
    "thinking",
    [
        "The cropped segment clearly shows a dog.",
        "The tool's response does not mention it.",
        "Since the frames from 10 to 20 did not help, I go on.",
        "From the summary, the clip has no goal.",
        "Based on what I saw, it comes later.",
        "According to the first report it is late.",
        "The returned clip was dark.",
        "As mentioned, there is a dog.",
        "I now know where it is.",
        "I need to narrow the search.",
        "It is still unclear.",
        "Nothing is there.",
        "IN THE PREVIOUS WINDOW A DOG RAN",
    ],
)
def test_words_that_cite_an_answer_are_noticed(thinking):
    assert cited_answer(thinking) is not None


@pytest.mark.parametrize(
    "thinking",
    [
        "I will check the last part of the video.",
        "Based on the overview, the second segment may contain the event.",
        "Given the question, I look at the middle.",
        "The overview frames do not show enough.",
        "The sampled frames show only a field.",
        "Let me see whether the clip shows the goal.",
        "I want to look at this segment to find what is there.",
        "The report in the question is about a dog.",
        "Next, the window from 40 to 50 seconds.",
        "",
    ],
)
def test_plans_and_the_overview_are_no_citations(thinking):
    assert cited_answer(thinking) is None


@given(
    st.text()
    | st.lists(st.sampled_from(["the", "clip", "frames", "shows", "not", "I", " ", "found", "if"])).map(" ".join)
)
def test_any_thinking_can_be_looked_through(thinking):
    assert cited_answer(thinking) is None or cited_answer(thinking) in thinking


def test_a_time_of_an_answer_from_before_the_merged_turn_is_known():
    said = [turn(0, 10), "It happens at 100 s and at 200 s."]
    said += [turn(95, 105, "The summary says so."), "Yes.", turn(195, 205), "Yes, too."]
    sizes, stops, messages = plan_of(*said)
    assert (sizes, stops) == ([1, 2], [CITED])
    assert [len(text.split("<tool_call>")) - 1 for text in assistant_texts(messages)] == [1, 2, 0]


def test_the_plan_of_the_first_thinking_is_known():
    first = turn(0, 10, "First the beginning, then 100 to 110 s.")
    assert plan_of(first, "Later, at 100 s.", turn(100, 110), "Yes.")[0] == [2]


def test_no_more_calls_are_merged_than_allowed():
    said = [text for n in range(7) for text in (turn(10 * n, 10 * n + 5), f"Part {chr(65 + n)}.")]
    sizes, stops, _ = plan_of(*said, max_parallel=3)
    assert (sizes, stops) == ([3, 3, 1], [LIMIT, LIMIT])
    assert plan_of(*said, max_parallel=1)[0] == [1] * 7


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (call(20, 30), GRAMMAR),
        (f"<think>\n\n</think>{call(20, 30)}", GRAMMAR),
        (turn(20, 30) + " and so on", GRAMMAR),
        (f"<think>\na <answer> b\n</think>{call(20, 30)}", GRAMMAR),
        ("<think>\nLook.\n</think>\n<tool_code>crop_video('v.mp4', 20, 30)</tool_code>", GRAMMAR),
        ("<think>\nLook.\n</think>\n<tool_call>{</tool_call>", FAULTY),
        (turn(30, 20), FAULTY),
        (turn("soon", 30), FAULTY),
        (turn(20, 10**400), FAULTY),
        (turn(20, 30).replace("crop_video", "zoom_frame"), OTHER_TOOL),
        (turn(20, 30) + call(70, 80), SEVERAL),
    ],
)
def test_a_turn_that_is_not_one_good_call_is_left_alone_and_ends_a_run(odd, reason):
    said = [turn(0, 10), "A dog.", odd, "A cat.", turn(90, 99), "A bird."]
    sizes, stops, messages = plan_of(*said)
    assert sizes == [1, 1] and stops == [reason] and messages == dialogue(*said)


def test_turns_with_another_message_between_are_not_merged():
    messages = dialogue(turn(0, 10), "A dog.")[:-1] + dialogue(turn(20, 30), "A cat.", question="And later?")
    messages.insert(3, {"role": "assistant", "content": ANSWER})
    plan = make_plan(messages, {2: "A dog.", 6: "A cat."}, 5)
    assert [len(group) for group in plan.groups] == [1, 1] and not plan.merges


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60), st.text(max_size=30), st.text(max_size=40)), max_size=7)
)
def test_what_was_in_the_grammar_stays_in_it_and_no_call_or_answer_is_lost(turns):
    said = [
        text
        for start, length, think, answer in turns
        for text in (turn(start, start + length, f"Look {think}"), answer)
    ]
    messages = dialogue(*said)
    texts = assistant_texts(messages)
    found = plan_of(*said)[2]
    assert [m for m in found if m["role"] == "tool"] == [m for m in messages if m["role"] == "tool"]
    assert "".join(assistant_texts(found)).count("<tool_call>{") == "".join(texts).count("<tool_call>{")
    before, after = (reward_terms(t, ["ok"] * len(turns), "B", "mcq") for t in (texts, assistant_texts(found)))
    assert before.parseable == after.parseable and after.accuracy == 1.0


@given(st.text() | st.text(st.sampled_from("0123456789:. -smin")))
def test_times_are_read_from_any_text(text):
    found = Times.of(text)
    assert found.named <= found.numbers


def test_times_are_read_with_their_units():
    found = Times.of("At 1:02:03, 2:05 and 7.25s; 3 min later; 10 to 20 seconds; 5 dogs, mp4, 3.5.2, 12:345")
    assert found.named == {3723.0, 125.0, 7.2, 180.0, 10.0, 20.0}
    assert 5.0 in found.numbers and 4.0 not in found.numbers


# Rows and files


def frames(*urls: str) -> list[dict]:
    parts = [{"type": "text", "text": "<5.0 seconds>"}]
    return [*parts, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def with_frames() -> list[dict]:
    return dialogue(turn(0, 10), frames("a.png"), turn(20, 30), frames("a.png", "a.png"), turn(90, 99), "A bird.")


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def here(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    return tmp_path


def loaded(path: Path):
    return load_traces(path, video_root=str(path.parent), max_bad_frac=0.0).traces


def check_grammar(trace) -> None:
    texts = [message.text for message in trace.messages if message.role == "assistant"]
    num_calls = sum(message.role == "tool" for message in trace.messages)
    assert reward_terms(texts, ["ok"] * num_calls, "B", "mcq").parseable


@pytest.mark.parametrize(
    "column",
    [["A dog.", " A cat. "], ["A dog.", "A cat.", None], json.dumps({"0": "A dog.", "1": "A cat."})],
)
@pytest.mark.parametrize(("src", "dst"), [("s.jsonl", "d.jsonl"), ("s.jsonl", "d.parquet"), ("s.parquet", "d.parquet")])
def test_frames_become_the_texts_of_a_column(here, column, src, dst):
    rows = [{"id": "x", "messages": json.dumps(with_frames()), "notes": column, "score": 0.5}]
    rows.append({"id": "y", "messages": json.dumps(dialogue()), "notes": None, "score": None})
    if src.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), here / src)
    else:
        write_lines(here / src, rows)
    report = parallelize(str(here / src), here / dst, "column:notes")
    first, second = loaded(here / dst)
    assert [message.text for message in first.messages[2:5]] == ["A dog.", "A cat.", "A bird."]
    assert (first.id, second.id) == ("x", "y")
    check_grammar(first)
    assert (report.num_traces, report.num_merged, report.num_without_calls, report.num_summaries) == (2, 1, 1, 2)
    assert (report.calls_before, report.calls_after) == ({1: 3}, {3: 1})


def test_a_parquet_struct_keeps_its_schema(here):
    def part(**other):
        return {"type": "text", "text": None, "image_url": None, **other}

    messages = [
        {
            **m,
            "content": [
                part(**p) for p in (m["content"] if isinstance(m["content"], list) else [{"text": m["content"]}])
            ],
        }
        for m in with_frames()
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "notes": ["A dog.", "A cat."]}]), here / "s.parquet")
    parallelize(str(here / "s.parquet"), here / "d.parquet", "column:notes")
    assert pq.read_schema(here / "d.parquet").equals(pq.read_schema(here / "s.parquet"))
    (trace,) = loaded(here / "d.parquet")
    assert [message.text for message in trace.messages[2:5]] == ["A dog.", "A cat.", "A bird."]
    check_grammar(trace)


@pytest.mark.parametrize("column", [None, [], ["A dog."], ["A dog.", ""], ["A dog.", 3], "{", {"0": "A dog."}, 7])
def test_a_row_without_all_its_summaries_stays_as_it_was(here, column):
    row = {"messages": with_frames(), "notes": column}
    write_lines(here / "s.jsonl", [row])
    report = parallelize(str(here / "s.jsonl"), here / "d.jsonl", "column:notes")
    assert json.loads((here / "d.jsonl").read_text()) == row
    assert report.failed == {"no summary": 1} and report.num_unchanged == 1 and report.num_merged == 0


def test_the_summary_counts_as_what_the_model_knew(here):
    row = {"messages": with_frames(), "notes": ["It happens at 25 s.", "A cat."]}
    write_lines(here / "s.jsonl", [row])
    report = parallelize(str(here / "s.jsonl"), here / "d.jsonl", "column:notes")
    assert report.stops == {TIME: 1} and report.calls_after == {1: 1, 2: 1}


def test_bad_rows_and_rows_without_calls_come_out_as_they_went_in(here):
    lines = ["{", json.dumps({"messages": 3}), json.dumps({"messages": dialogue()}, indent=None), '{"messages":  []}']
    write_lines(here / "s.jsonl", lines)
    report = parallelize(str(here / "s.jsonl"), here / "d.jsonl")
    assert (here / "d.jsonl").read_text().splitlines() == lines
    assert report.bad == {"wrong schema": 2, "no answer": 1} and report.num_without_calls == 1
    assert "s.jsonl line 1" in report.examples["wrong schema"]


def test_many_rows_keep_their_order_over_batches_and_files(here, monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    (here / "s").mkdir()
    for name, numbers in (("a", range(7)), ("b", range(7, 11))):
        rows = [
            {"id": n, "messages": json.dumps(dialogue(turn(0, 10), f"Part {n}.", turn(20, 30), "x"))} for n in numbers
        ]
        pq.write_table(pa.Table.from_pylist(rows), here / "s" / f"{name}.parquet")
    report = parallelize(str(here / "s"), here / "d.jsonl")
    assert [trace.id for trace in loaded(here / "d.jsonl")] == [str(n) for n in range(11)]
    assert report.num_merged == 11


def test_what_cannot_be_done_is_refused_in_one_sentence(here):
    path = str(write_lines(here / "s.jsonl", [{"messages": dialogue()}]))
    pq.write_table(pa.table({"messages": ["[]"]}), here / "s.parquet")
    for problem, arguments in {
        "must end with": (path, here / "d.csv"),
        "would change --src": (path, here / "s.jsonl"),
        "would change --src .*; choose": (str(here), here / "deep" / "d.parquet"),
        "must be column:NAME or engine:URL": (path, here / "d.jsonl", "notes"),
        "has no column notes; it has messages": (str(here / "s.parquet"), here / "d.jsonl", "column:notes"),
        "does not exist": (str(here / "gone.jsonl"), here / "d.jsonl"),
    }.items():
        with pytest.raises(ValueError, match=problem):
            parallelize(*arguments)
    with pytest.raises(ValueError, match="--max-parallel 0"):
        parallelize(path, here / "d.jsonl", max_parallel=0)
    with pytest.raises(ValueError, match="--model must be the name of a model"):
        SummarizerSettings("http://host/v1", "")
    assert not list(here.glob("*d.*"))


# An engine


class FakeEngine:
    """Answers chat completions by a script, one entry a request and the last one for ever."""

    def __init__(self, *script: str, to_run: int = 1):
        self.script, self.bodies, self.running, self.most_running = list(script), [], 0, 0
        self.to_run = to_run  # the first answer waits for so many requests
        self.enough = asyncio.Event()

    async def __aenter__(self) -> "FakeEngine":
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running >= self.to_run:
            self.enough.set()
        try:
            self.bodies.append(await request.json())
            await self.enough.wait()
            entry = self.script[0] if len(self.script) == 1 else self.script.pop(0)
            await asyncio.sleep(30 if entry == "slow" else 0.01)
            if entry.isdecimal():
                return web.Response(status=int(entry), text="no")
            return web.json_response({"choices": [{"message": {"content": entry}}]})
        finally:
            self.running -= 1


def ask(here, *script: str, rows: list | None = None, video_root: str = "", to_run: int = 1, **settings):
    """The report, the messages that came out, and the engine."""
    write_lines(here / "s.jsonl", [{"messages": with_frames()}] if rows is None else rows)
    (here / "d.jsonl").unlink(missing_ok=True)

    async def body():
        async with FakeEngine(*script, to_run=to_run) as fake:
            options = dict(attempt_deadline_s=5.0, backoff_s=0.01, max_backoff_s=0.02, max_attempts=2) | settings
            run = lambda: parallelize(  # noqa: E731
                str(here / "s.jsonl"),
                here / "d.jsonl",
                "engine:x",
                engine=lambda _: SummarizerSettings(fake.url, "m", **options),
                video_root=video_root,
            )
            return await asyncio.to_thread(run), fake

    report, fake = asyncio.run(body())
    return report, [json.loads(line)["messages"] for line in (here / "d.jsonl").read_text().splitlines()], fake


def test_an_engine_sees_the_frames_and_its_words_replace_them(here):
    report, (messages,), fake = ask(here, "<think>hm</think> A <answer>dog</answer>.")
    assert [message["content"] for message in messages[2:5]] == [[{"type": "text", "text": "A dog."}]] * 2 + ["A bird."]
    assert report.num_summaries == 2 and report.num_merged == 1
    shown = max((body["messages"][1]["content"] for body in fake.bodies), key=len)
    pictures = [part["image_url"]["url"] for part in shown if part["type"] == "image_url"]
    assert pictures == [f"data:image/png;base64,{base64.b64encode(PNG).decode()}"] * 2
    assert shown[0]["text"].startswith("The part of the video from 20.0 to 30.0 seconds, 2 frames")
    assert shown[1]["text"] == "<5.0 seconds>" and fake.bodies[0]["model"] == "m"
    check_grammar(loaded(here / "d.jsonl")[0])


def test_an_engine_is_shown_nothing_from_outside_of_the_root(here):
    (here / "inside").mkdir()
    (here / "inside" / "a.png").symlink_to(here / "a.png")
    report, _, fake = ask(here, "A dog.", video_root=str(here / "inside"))
    assert fake.bodies == [] and report.num_summaries == 0


def test_what_an_engine_said_is_not_asked_for_twice(here):
    ask(here, "A dog.", rows=[{"messages": with_frames()}])
    known = here / "d.summaries.jsonl"
    with known.open("a") as file:
        file.write('[3]\n{"key": 1, "text": "x"}\n{"key": "k", "text": ""}\n{"key": "cut')
    other = dialogue(turn(50, 60), frames("a.png"), turn(0, 10), frames("a.png"))
    report, found, fake = ask(here, "A cat.", rows=[{"messages": with_frames()}, {"messages": other}])
    assert report.num_merged == 2 and len(fake.bodies) == 1  # only of the window that is new
    said = [text_of(message) for messages in found for message in messages if message["role"] == "tool"]
    assert said == ["A dog.", "A dog.", "A bird.", "A cat.", "A dog."]
    assert len(load_known(known)) == 3


def test_summaries_are_not_added_to_a_file_of_something_else(here):
    other = here / "d.summaries.jsonl"
    other.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"d\.summaries\.jsonl holds no summaries"):
        ask(here, "A dog.", rows=[{"messages": with_frames()}])
    assert other.read_text() == '{"messages": []}\n'


@pytest.mark.parametrize("trouble", ["503", "429", "", "<think>cut off"])
def test_passing_trouble_of_an_engine_is_tried_again(here, trouble):
    report, _, fake = ask(here, trouble, "A dog.")
    assert report.num_merged == 1 and len(fake.bodies) == 3


@pytest.mark.parametrize(("trouble", "tries"), [("500", 2), (" ", 2), ("400", 1), ("slow", None)])
def test_a_summary_that_fails_leaves_the_row_as_it_was_and_is_counted(here, trouble, tries):
    report, (messages,), fake = ask(here, trouble, attempt_deadline_s=0.2 if trouble == "slow" else 5.0)
    assert messages == with_frames() and report.failed == {"summary failed": 1} and report.num_merged == 0
    assert tries is None or len(fake.bodies) == 2 * tries  # a busy machine may not have begun when it is late


def test_of_a_whole_video_an_engine_sees_the_window_asked_for_and_of_a_cut_all(here):
    write_video(here / "v.mp4", at_fps(2.0, 20))
    write_video(here / "cut.mp4", at_fps(2.0, 6))
    shown = [[{"type": "video_url", "video_url": {"url": name}}] for name in ("v.mp4", "cut.mp4")]
    report, _, fake = ask(here, "A dog.", rows=[{"messages": dialogue(turn(2, 6), shown[0], turn(20, 23), shown[1])}])
    assert report.num_summaries == 2
    said = [body["messages"][1]["content"] for body in fake.bodies]
    times = {tuple(part["text"] for part in parts if part.get("text", "").startswith("<")) for parts in said}
    assert times == {tuple(f"<{n}.0 seconds>" for n in (2, 3, 4, 5)), tuple(f"<{n}.0 seconds>" for n in (0, 1, 2))}
    assert all(sum(part["type"] == "image_url" for part in parts) in (3, 4) for parts in said)


def test_frames_that_are_not_there_fail_their_row_alone(here):
    (here / "video.mp4").write_bytes(b"no video")
    cut = [{"type": "video_url", "video_url": {"url": "video.mp4"}}]
    rows = [{"messages": dialogue(turn(0, 10), shown, turn(20, 30), "x")} for shown in (frames("gone.png"), cut)]
    report, found, _ = ask(here, "A dog.", rows=[*rows, {"messages": with_frames()}])
    assert found[:2] == [row["messages"] for row in rows] and report.num_merged == 1
    assert report.failed == {"summary failed": 2} and "gone.png" in report.examples["summary failed"]


def test_an_engine_that_refuses_every_request_ends_it_in_one_sentence(here):
    with pytest.raises(RuntimeError, match="answered 404: no; check --summaries engine:URL, --model and --api-key-env"):
        ask(here, "404")
    assert not (here / "d.jsonl").exists()


def test_no_more_requests_run_at_once_than_allowed(here):
    rows = [{"messages": with_frames()}] * 5
    report, _, fake = ask(here, "A dog.", rows=rows, max_concurrent=3, to_run=3, attempt_deadline_s=60.0)
    assert report.num_summaries == 10 and fake.most_running == 3


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ("<think>a</think>\nA dog. ", "A dog."),
        ("</tool_response>A <to<tool_call>ol_call>dog.", "A dog."),
        ("<think>still", ""),
        (None, ""),
        (["A dog."], ""),
        ("\ud800A dog.", "A dog."),
    ],
)
def test_of_a_reply_only_plain_words_are_kept(reply, summary):
    assert read_summary(reply) == summary


def test_frames_are_small_and_their_sides_fit():
    rng = random.Random(7)
    for height, width in [
        (1, 1),
        (1080, 1920),
        (31, 4001),
        *[(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(50)],
    ]:
        shown = frame_size(height, width)
        assert all(side % 32 == 0 and side >= 32 for side in shown)
        assert shown[0] * shown[1] <= 50_176 or 32 in shown


def test_the_command_says_what_it_did(here, monkeypatch, capsys):
    rows = [{"messages": dialogue(turn(0, 10), "A dog.", turn(20, 30), "A cat.", turn(22, 24), "A bird.")}]
    write_lines(here / "s.jsonl", rows)
    options = ["--src", str(here / "s.jsonl"), "--dst", str(here / "d.jsonl")]
    monkeypatch.setattr("sys.argv", ["data", "parallelize", *options])
    monkeypatch.setattr("paravt_jax.data.__main__.exit_on_sigterm", lambda: None)
    main()
    shown = capsys.readouterr().out
    assert "1 traces: 1 merged" in shown and f"{ZOOM}: 1, such as s.jsonl line 1: 22–24 s in 20–30 s" in shown
    record = json.loads((here / "d.report.json").read_text())
    assert record["calls_per_turn"] == {"before": {"1": 3}, "after": {"1": 1, "2": 1}}
    assert record["turns_kept_sequential"][ZOOM]["count"] == 1
