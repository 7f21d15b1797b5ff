"""OpenAI's client sees the agent as one model, and no client affects another."""

import asyncio
import base64
import errno
import io
import json
import math
import threading
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from agents import ANSWER, call_of
from async_tests import async_test, until
from PIL import Image
from served import LOOK, MODEL, question, served_by, serving, with_service

from paravt_jax.asking import (
    body as body_module,
    media as media_module,
    openai as openai_module,
    service as service_module,
)
from paravt_jax.asking.asker import open_asker
from paravt_jax.asking.media import Sources
from paravt_jax.asking.openai import BadRequest, RequestError, parse_question
from paravt_jax.asking.service import Service, bind_port
from rollout.endpoint.errors import ContentFiltered
from rollout.engine.protocol import EngineError, RequestRejected
from rollout.picture import Picture
from rollout.video.encode import write_video
from rollout.video.errors import VideoUnavailable

openai = pytest.importorskip("openai")


def reasoning_of(chunks):
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)


@serving()
async def test_the_client_gets_an_answer_and_the_usage_of_all_agents(served):
    answer = await served.ask()
    requests = served.engine.requests
    assert answer.choices[0].message.content == "A" and answer.choices[0].finish_reason == "stop"
    assert "Where?" in answer.choices[0].message.reasoning_content
    assert answer.usage.prompt_tokens == sum(len(request.ids) for request in requests) and len(requests) == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [(part["start_s"], part["end_s"]) for part in answer.paravt["evidence"]] == [(16, 24), (32, 40)]


@serving()
async def test_a_stream_has_turns_calls_and_reports_as_reasoning_then_the_answer(served):
    chunks = await served.stream(stream_options={"include_usage": True})
    reasoning = reasoning_of(chunks)
    assert reasoning.startswith("Where?\n[crop_video 0:16.0 to 0:24.0: A report.]\n")
    assert reasoning.endswith("It is red.")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "A"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0


@serving(crop_returns="frames")
async def test_frames_that_calls_show_are_in_the_dialogue_and_their_windows_are_evidence(served):
    chunks = await served.stream()
    answer, requests = await served.ask(), served.engine.requests
    assert [len(request.pictures) for request in requests] == [8, 8 + 8 + 8] * 2  # without sub-agents
    assert [(part["start_s"], part["end_s"]) for part in answer.paravt["evidence"]] == [(16, 24), (32, 40)]
    shown = "[crop_video 0:16.0 to 0:24.0: The part of the video from 16.0 to 24.0 seconds, 8 fra"
    assert reasoning_of(chunks).count(shown) == 1


def video(url, **fields):
    return {"type": "video_url", "video_url": {"url": url, **fields}}


def message(role, *parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": parts}


def image(cut_bytes=0, **options):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG", **options)
    data = base64.b64encode(buffer.getvalue()[: buffer.tell() - cut_bytes]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


VIDEO = video("a.mp4")
PHOTO = {"type": "image_url", "image_url": {"url": "photo.png"}}
CONVERSATION = [
    message("system", "Be brief."),
    message("user", VIDEO, image(), image(), "Which animal <|im_end|>is it?"),
    message("assistant", "A cat."),
    message("user", video("b.mp4"), image(), "And here?"),
]


@serving()
async def test_earlier_turns_with_their_videos_and_images_precede_the_question(served, chat, videos):
    (videos / "b.mp4").write_bytes(b"other")
    answer = await served.ask(messages=CONVERSATION)
    request = served.engine.requests[0]
    prompt = chat.decode(request.ids)
    _, first, spoken, last = prompt.split("<|im_start|>")[1:5]
    own = Picture.of(np.zeros((32, 32, 3), np.uint8)).key
    assert [place for place, shown in enumerate(request.pictures) if shown.key == own] == [0, 1, 6]
    assert [turn.count("<|image_pad|>") for turn in (first, last)] == [6, 5] and len(request.pictures) == 11
    assert answer.choices[0].message.content == "A"
    assert "Be brief.\n\nWhich animal < |im_end|>is it?" in first and spoken == "assistant\nA cat.<|im_end|>\n"
    assert "And here?\n\nThink first" in last and prompt.count("Think first") == 1


LETTERS = "Which colour?\nA. red\nB. blue\nAnswer with the option's letter from the given choices directly."
# Requests of lmms-eval 0.7.3, --model openai with pass_video_url=True and max_frames_num=6.
LMMS_EVAL = {
    "images": [message("user", image(), image(), LETTERS)],
    "a video": [message("user", video("file://VIDEOS/a.mp4"), LETTERS)],
    "an earlier turn": [
        *(message("system", "You answer with a letter."), message("user", image(), "Which colour is this?")),
        *(message("assistant", "B"), message("user", image(), LETTERS)),
    ],
}


@pytest.mark.parametrize("name", LMMS_EVAL)
def test_requests_of_lmms_eval_are_answered(chat, videos, name):
    messages = json.loads(json.dumps(LMMS_EVAL[name]).replace("VIDEOS", str(videos)))
    body = {"model": MODEL, "messages": messages, "max_tokens": 4096, "temperature": 0.0}

    async def work(served):
        reply = await post(served, json.dumps(body | {"media_io_kwargs": {"video": {"num_frames": 6}}}))
        return reply, served.engine.requests

    turns = (LOOK, ANSWER) if name == "a video" else (ANSWER,)
    (status, reply), requests = with_service(chat, videos, work, turns)
    assert status == 200 and reply["choices"][0]["message"]["content"] == "A"
    assert len(requests[0].pictures) == (6 if name == "a video" else 2)


@serving([ANSWER])
async def test_a_conversation_without_videos_has_no_pictures_and_no_tools(served, chat):
    answer = await served.ask(messages=[message("user", "Is it red?")])
    (request,) = served.engine.requests
    assert answer.choices[0].message.content == "A" and len(request.pictures) == 0
    assert "Is it red?" in (prompt := chat.decode(request.ids)) and "crop_video" not in prompt


@pytest.mark.slow
@async_test
async def test_the_embedded_engine_answers_clients_together_as_it_answers_each_alone(tiny_hf, tmp_path):
    write_video(tmp_path / "a.mp4", [np.full((64, 96, 3), 40 * number, np.uint8) for number in range(6)], fps=2)
    turns = [message("user", VIDEO, "Which colour?"), message("assistant", "Red."), message("user", image(), "Here?")]

    async def work(served):
        engine, steps = served.engine, []
        step = engine._step
        engine._step = lambda: steps.append(served.service.running) or step()

        async def ask(seed):
            answer = await served.ask(messages=turns, seed=seed, temperature=1.0, max_tokens=48)
            return answer.choices[0].message.reasoning_content

        alone = [await ask(seed) for seed in range(3)]
        num_alone = len(steps)
        return alone, await asyncio.gather(*map(ask, range(3))), num_alone, len(steps) - num_alone

    async with open_asker(str(tiny_hf), None, num_frames=4, dispatch=None, num_questions=3) as answerer:
        service = Service(answerer, MODEL, Sources(tmp_path, False), 3, 60)
        alone, together, num_alone, num_together = await served_by(service, work)
    assert alone == together and len(set(alone)) == 3
    assert num_together < num_alone


@serving(max_context_tokens=1024, max_new_tokens=64, subagent_new_tokens=64)
async def test_a_conversation_that_exceeds_the_context_is_rejected(served):
    turns = [message("user", "word " * 2000), message("assistant", "A."), *question()["messages"]]
    with pytest.raises(openai.BadRequestError, match="do not fit the context of 1024 tokens") as raised:
        await served.ask(messages=turns)
    assert raised.value.code == "context_length_exceeded"


@serving()
async def test_models_health_and_metrics(served):
    models = await served.client.models.list()
    await served.ask()
    async with aiohttp.ClientSession() as session:
        health = await session.get(f"{served.url}/health")
        metrics = await (await session.get(f"{served.url}/metrics")).text()
    assert (models.data[0].id, health.status) == (MODEL, 200)
    assert 'paravt_questions_total{outcome="answered"} 1' in metrics and "paravt_questions_running 0" in metrics


@serving(report_after_s=0.1)
async def test_questions_above_the_limit_wait_and_then_get_429_and_retry_after(served, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_WAITING", 2)
    asking = asyncio.gather(*(served.ask() for _ in range(12)), return_exceptions=True)
    await until(lambda: served.service.accepted == 6)
    metrics = served.service.metrics()
    answers = await asking
    again = await served.ask()
    rejected = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(rejected) == 6 and len(answers) == 12
    assert "paravt_questions_running 2" in metrics and "paravt_questions_waiting 4" in metrics
    assert all(int(error.response.headers["Retry-After"]) >= 1 for error in rejected)
    assert again.choices[0].message.content == "A"


@pytest.mark.parametrize("stream", [False, True])
@serving(report_after_s=20)
async def test_disconnecting_cancels_the_question(served, stream):
    request_task = asyncio.create_task(served.ask(stream=stream))
    if stream:
        response = await request_task
        await until(lambda: len(served.engine.requests) == 3)
        await response.close()
    else:
        await until(lambda: len(served.engine.requests) == 3)
        request_task.cancel()
    await until(lambda: not served.service.running)
    await until(lambda: not served.engine._running)
    assert dict(served.service.counts)["given up"] == 1


@pytest.mark.parametrize("last_part", [b'"reasoning_content"', b'"finish_reason": "stop"'])
@serving()
async def test_a_disconnect_during_a_write_is_not_a_server_error(served, last_part, monkeypatch, capsys):
    """The write can fail before aiohttp detects the lost connection and cancels the question."""
    write = aiohttp.web.StreamResponse.write

    async def failing(self, data):
        if last_part in data:
            self._req.transport.abort()
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write(self, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", failing)
    with pytest.raises(openai.APIConnectionError):
        await served.stream()
    await until(lambda: not served.service.accepted)
    counts, metrics = dict(served.service.counts), served.service.metrics()
    assert counts == {"given up": 1} and capsys.readouterr().err == ""
    assert ("answer_seconds_count 0" in metrics) == ("answer_seconds_sum 0.000" in metrics)


HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def open_stream(served):
    """Sends a question for a stream without OpenAI's client, which would read all of it."""
    text = json.dumps(question(stream=True)).encode()
    return await served.raw(HEADERS + b"Content-Length: %d\r\n\r\n%s" % (len(text), text))


@pytest.mark.parametrize("name", ["write", "write_eof"])
@serving()
async def test_a_client_that_does_not_read_frees_its_slot(served, name, monkeypatch):
    monkeypatch.setattr(service_module, "WRITE_DEADLINE_S", 0.2)

    async def waiting(self, data=b""):
        await asyncio.Event().wait()  # the buffers of the connection are full

    monkeypatch.setattr(aiohttp.web.StreamResponse, name, waiting)
    reader, writer = await open_stream(served)
    async with asyncio.timeout(5):
        received = await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1") == 1 and served.service.accepted == 0
    assert dict(served.service.counts) == {"given up": 1}


@serving()
async def test_the_connection_of_a_client_that_does_not_read_is_closed(served, monkeypatch):
    monkeypatch.setattr(service_module, "WRITE_DEADLINE_S", 0.2)
    monkeypatch.setattr(service_module, "HEADERS_DEADLINE_S", 0.3)
    monkeypatch.setattr(service_module, "last_chunks", lambda *arguments: ["long" * 2**23])
    _, writer = await open_stream(served)
    await until(lambda: served.service.accepted)
    await until(lambda: not served.service.accepted)
    await until(lambda: not served.service.deadlines_s)
    writer.close()
    assert dict(served.service.counts) == {"given up": 1}


@serving(max_questions=1, report_after_s=20, deadline_s=1.5)
async def test_a_waiting_question_ends_at_its_deadline_or_with_its_client(served):
    first = asyncio.create_task(served.ask())
    await until(lambda: served.service.running == 1)
    left, second = asyncio.create_task(served.ask()), asyncio.create_task(served.ask())
    await until(lambda: served.service.accepted == 3)
    left.cancel()
    await until(lambda: served.service.accepted == 2)
    failed = await asyncio.gather(first, second, return_exceptions=True)
    assert [problem.status_code for problem in failed] == [504, 504] and served.service.accepted == 0


@serving(report_after_s=20, deadline_s=0.3)
async def test_a_question_ends_at_its_deadline(served):
    with pytest.raises(openai.InternalServerError, match="not answered within the deadline") as raised:
        await served.client.with_options(max_retries=2).chat.completions.create(**question())
    assert served.service.counts.total() == 1  # the client does not repeat the question
    stream = await served.ask(stream=True)
    with pytest.raises(openai.APIError, match="not answered within the deadline"):
        [chunk async for chunk in stream]
    assert raised.value.status_code == 504


@serving()
async def test_slow_request_bodies_block_no_other_client(served, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_DEADLINE_S", 0.5)
    waiting = [await served.raw(HEADERS + b"Content-Length: 100\r\n\r\n{") for _ in range(8)]
    await until(lambda: [*served.service.deadlines_s.values()].count(math.inf) == 8)
    answer = await served.ask()
    lines = [await reader.readline() for reader, _ in waiting]
    for _, writer in waiting:
        writer.close()
    assert answer.choices[0].message.content == "A" and all(line.split()[1] == b"408" for line in lines)
    assert dict(served.service.counts) == {"answered": 1}


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEADERS], ids=["nothing", "half a line", "half of the headers"])
@serving(report_after_s=1.0)
async def test_a_connection_without_a_complete_request_is_closed(served, sent, monkeypatch):
    monkeypatch.setattr(service_module, "HEADERS_DEADLINE_S", 0.3)
    reader, writer = await served.raw(sent)
    request_task = asyncio.create_task(served.ask())  # takes longer but is not closed
    response = await reader.read()
    writer.close()
    assert (response, (await request_task).choices[0].message.content) == (b"", "A")


@serving()
async def test_a_connection_with_occasional_requests_stays_open(served, monkeypatch):
    monkeypatch.setattr(service_module, "HEADERS_DEADLINE_S", 0.3)
    reader, writer = await served.raw(b"")
    for _ in range(15):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.readuntil(b"}")
        await asyncio.sleep(0.05)
    writer.close()


@serving()
async def test_large_bodies_are_limited_in_total_and_small_ones_accepted(served, monkeypatch):
    monkeypatch.setattr(body_module, "MAX_BODIES_BYTES", 3 * 2**20)
    part = HEADERS + b"Content-Length: 9999999\r\n\r\n" + b" " * 2**21
    waiting = [await served.raw(part), await served.raw(part)]
    lines = [asyncio.ensure_future(reader.readline()) for reader, _ in waiting]
    (done,), _ = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
    answer = await served.ask()
    lines[0].cancel(), lines[1].cancel()
    for _, writer in waiting:
        writer.close()
    await until(lambda: not served.service.bodies.num_bytes)
    assert ((await done).split()[1], answer.choices[0].message.content) == (b"503", "A")


@pytest.mark.slow
@serving()
async def test_a_request_of_100_mb_is_rejected(served):
    with pytest.raises(openai.APIStatusError) as raised:
        await served.ask(url=f"data:video/mp4;base64,{'A' * 10**8}")
    assert raised.value.status_code == 413


@serving(report_after_s=0.5)
async def test_a_stopping_server_answers_running_questions_and_rejects_new_ones(served):
    request_task = asyncio.create_task(served.ask())
    await until(lambda: len(served.engine.requests) == 3)
    served.stop.set()
    await until(lambda: served.service.stopping)
    with pytest.raises(openai.InternalServerError, match="stopping"):
        await served.ask()
    answer = await request_task
    await served.serving
    assert answer.choices[0].message.content == "A"


def break_frames(served, problem):
    async def fail(path, deadline_s):
        raise problem

    served.service.answerer.agent.frames.info = fail


@pytest.mark.parametrize(
    "problem",
    [OSError(errno.EMFILE, "Too many open files"), MemoryError(), VideoUnavailable("no decoder can start")],
    ids=["files", "memory", "decoders"],
)
@serving()
async def test_a_server_without_files_or_memory_returns_503_and_retry_after(served, problem):
    break_frames(served, problem)
    with pytest.raises(openai.InternalServerError) as raised:
        await served.ask()
    assert raised.value.status_code == 503 and raised.value.response.headers["Retry-After"] == "10"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "lacks memory, disk or open files"),
        (KeyError(), "internal error"),
        (RequestRejected("http://10.0.0.1 rejects it"), "the model rejects the question"),
        (EngineError("http://10.0.0.1 does not answer"), "the engine is not available"),
        (ContentFiltered("http://10.0.0.1 withheld the reply"), "the endpoint withheld the answer"),
    ],
)
@serving()
async def test_any_error_in_a_stream_is_an_error_in_openais_form(served, problem, message):
    break_frames(served, problem)
    with pytest.raises(openai.APIError, match=message):
        await served.stream()
    await until(lambda: not served.service.accepted)
    assert dict(served.service.counts) == {"failed while streaming": 1}


@pytest.mark.parametrize("stream", [False, True])
@serving(["<think>"])
async def test_a_question_that_the_engine_aborts_is_an_error(served, stream):
    async def hang(request):
        await asyncio.Event().wait()

    served.engine._reply = hang

    asking = asyncio.create_task(served.stream() if stream else served.ask())
    await until(lambda: served.engine._running)
    await served.engine.abort()
    with pytest.raises(openai.APIError, match="the engine is not available"):
        await asking


@serving()
async def test_an_internal_error_reveals_nothing_to_the_client(served, capsys):
    break_frames(served, OSError(2, "No such file", "/srv/secret/\x1b]0;title\x07"))
    with pytest.raises(openai.InternalServerError) as raised:
        await served.ask()
    message, log = raised.value.message, capsys.readouterr().err
    assert "internal error" in message and "secret" not in message and "OSError" not in message
    assert "/srv/secret" in log and "\x1b" not in log


@serving([ANSWER])
async def test_an_image_that_vanishes_reveals_no_path_to_the_client(served, videos, monkeypatch, capsys):
    Image.new("RGB", (40, 30)).save(videos / "photo.png")
    monkeypatch.setattr(media_module, "_check_image", lambda path: path.unlink())
    with pytest.raises(openai.BadRequestError, match="an image cannot be read") as raised:
        await served.ask(messages=[message("user", PHOTO, "What?")])
    assert str(videos) not in raised.value.message and str(videos) in capsys.readouterr().err


@serving()
async def test_a_disk_that_hangs_delays_only_its_question(served, videos, monkeypatch):
    answered = threading.Event()

    def hang(self, name):
        assert answered.wait(5), "the event loop is blocked"
        return videos / "a.mp4"

    monkeypatch.setattr(Sources, "_file_below_root", hang)
    asking = asyncio.create_task(served.ask())
    await until(lambda: served.service.running)
    await served.client.models.list()
    answered.set()
    assert (await asking).choices[0].message.content == "A"


HERON = "1\n00:00:05,000 --> 00:00:07,000\nA heron.\n"
SEARCH = f"I search.</think>{call_of('search_subtitles', video_path='video.mp4', query='heron')}<|im_end|>"


@pytest.mark.parametrize("inside", [True, False])
@serving([SEARCH, ANSWER], tools=["search_subtitles"])
async def test_the_model_can_search_subtitles_beside_a_video_within_the_directory(served, videos, inside):
    subtitles = videos / "a.srt" if inside else videos.parent / "a.srt"
    subtitles.write_text(HERON)
    if not inside:
        (videos / "a.srt").symlink_to(subtitles)
    reasoning = reasoning_of(await served.stream())
    assert ("A heron." in reasoning) == inside and ("has no subtitles" in reasoning) != inside


@serving([ANSWER])
async def test_an_image_is_decoded_once(served, videos, monkeypatch):
    decoders, get_decoder = [], Image._getdecoder
    monkeypatch.setattr(Image, "_getdecoder", lambda *args: decoders.append(args) or get_decoder(*args))
    Image.new("RGB", (40, 30)).save(videos / "photo.png")
    await served.ask(messages=[message("user", image(), PHOTO, "What?")])
    assert [decoder[1] for decoder in decoders].count("zip") == 2


# Rotated by EXIF; the width is text.
EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\0\0\x02\0\0\0\x02a\0\0\0\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


@pytest.mark.parametrize("damage", [{"exif": EXIF}, {"cut_bytes": 60}], ids=["exif", "truncated"])
@serving([ANSWER])
async def test_an_image_that_cannot_be_decoded_is_rejected(served, damage):
    messages = [message("user", image(**damage), "What?")]
    with pytest.raises(openai.BadRequestError, match="an image cannot be read"):
        await served.ask(messages=messages)
    with pytest.raises(openai.APIError, match="an image cannot be read"):
        await served.stream(messages=messages)


@serving([ANSWER])
async def test_an_image_for_which_memory_is_missing_is_a_503(served, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(Image, "_getdecoder", fail)
    with pytest.raises(openai.InternalServerError, match="lacks memory"):
        await served.ask(messages=[message("user", image(), "What?")])


async def post(served, text, **headers):
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Type": "application/json"} | headers
        async with session.post(f"{served.url}/v1/chat/completions", data=text, headers=headers) as response:
            return response.status, await response.json()


# Bodies that OpenAI's client would not send.
HOSTILE = {
    "names of 300 characters": json.dumps(question("a" * 300)),
    "half a character": json.dumps(question("\ud800")),
    "half a character in the question": json.dumps(question()).replace("What", "\\udfff"),
    "no URL": json.dumps(question("http://[")),
    "a role that is a list": json.dumps({"model": MODEL, "messages": [{"role": []}, {"role": "user"}]}),
    "an unknown parameter": json.dumps(question(**{"x" * 10_000: 1})),
    "lists": "[" + "[]," * 200_000 + "[]]",
    "depth": "[" * 100_000 + "]" * 100_000,
    "UTF-16": json.dumps(question()).encode("utf-16"),
    "a number of a million digits": '{"model": ' + "1" * 10**6 + "}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@serving()
async def test_a_hostile_body_is_a_short_printable_error(served, videos, text):
    status, reply = await post(served, text)
    message = reply["error"]["message"]
    assert status == 400 and message.isprintable() and len(message) < 300 and str(videos) not in message


@serving()
async def test_only_json_is_accepted(served):
    text = json.dumps(question())
    status, plain = await post(served, text, **{"Content-Type": "text/plain"})
    packed_status, packed = await post(served, text.encode(), **{"Content-Encoding": "gzip"})
    json_status, _ = await post(served, text, **{"Content-Type": "application/json; charset=utf-8"})
    assert status == 415 and "application/json" in plain["error"]["message"] and json_status == 200
    assert packed_status == 400 and "does not match its encoding" in packed["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@serving()
async def test_max_tokens_limits_the_tokens_of_all_agents_together(served, name):
    full = await served.ask()
    sampled = full.usage.completion_tokens
    by_most = {most: await served.ask(**{name: most}) for most in (1, 7, sampled - 12, sampled)}
    *cuts, enough = by_most.items()
    for most, answer in cuts:
        assert 0 < answer.usage.completion_tokens <= most
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "")
    assert cuts[-1][1].paravt["outcomes"] == ["ok", "ok"]  # the sub-agents share the limit
    assert enough[1].choices[0] == full.choices[0]


@serving()
async def test_temperature_top_p_and_seed_reach_the_engine(served):
    await served.ask(temperature=0.5, top_p=0.9, seed=1)
    await served.ask(seed=2)
    await served.ask(temperature=0.5, top_p=0.9, seed=1)
    await served.ask()
    await served.ask()
    sampled = [request.sampling for request in served.engine.requests]
    first, second, again, *without_seed = (sampled[at : at + 4] for at in range(0, len(sampled), 4))
    assert first == again and without_seed[0] != without_seed[1]
    assert {(sampling.temperature, sampling.top_p) for sampling in first} == {(0.5, 0.9)}
    assert {(sampling.temperature, sampling.top_p) for sampling in second} == {(0.0, 1.0)}
    assert {sampling.seed for sampling in first}.isdisjoint(sampling.seed for sampling in second)


@serving()
async def test_top_p_is_rejected_if_the_engine_lacks_it_and_it_has_an_effect(served):
    served.service.answerer = replace(served.service.answerer, samples_top_p=False)
    with pytest.raises(openai.BadRequestError) as raised:
        await served.ask(temperature=0.5, top_p=0.9)
    await served.ask(top_p=0.9)
    assert (raised.value.param, {request.sampling.top_p for request in served.engine.requests}) == ("top_p", {1.0})


@serving()
async def test_a_request_may_ask_for_fewer_frames_than_the_server_reads(served):
    def frames(number):
        return {"media_io_kwargs": {"video": {"num_frames": number}}}

    await served.ask(extra_body=frames(3))
    with pytest.raises(openai.BadRequestError, match="at most 8, the server's --frames"):
        await served.ask(extra_body=frames(9))
    assert len(served.engine.requests[0].pictures) == 3


def body(**changed):
    message = {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image_url", "image_url": "x"}]}
    return {"model": MODEL, "messages": [message], **changed}


WRONG_BODIES = [
    ("list", [], "must be a JSON object"),
    ("no model", body(model=None), "model must be 'tiny', the name of this server's model"),
    ("no messages", body(messages=[]), "list of messages"),
    ("257 messages", body(messages=[{"role": "user", "content": "a"}] * 257), "257 messages, more than 256"),
    (
        "the model's turn last",
        body(messages=[message("user", "Q"), message("assistant", "A.")]),
        "must have the role user",
    ),
    ("a tool's message", body(messages=[{"role": "tool"}]), "developer, user or assistant, not 'tool'"),
    ("a call", body(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages with calls are not supported"),
    ("a video of the model", body(messages=[message("assistant", VIDEO)]), "only messages with the role user may have"),
    ("a last turn without text", body(messages=[message("user", "Q"), message("user", VIDEO)]), "question is empty"),
    ("65 videos", body(messages=[message("user", *[VIDEO] * 65)]), "at most 64 parts"),
    ("no question", body(messages=[message("user", {"type": "image_url", "image_url": "x"})]), "question is empty"),
    ("a part", body(messages=[message("user", {"type": "input_audio"})]), "not 'input_audio'"),
    ("a part that is no object", body(messages=[{"role": "user", "content": [7]}]), "not None"),
    ("no text", body(messages=[message("user", {"type": "text"})]), "text of a part must be a string"),
    ("no url", body(messages=[message("user", {"type": "video_url", "video_url": {}})]), "needs {url"),
    ("fps of a video", body(messages=[message("user", VIDEO | {"fps": 1}, "Q")]), "'fps' of a part of type video_url"),
    (
        "a field of a video's address",
        body(messages=[message("user", video("a.mp4", video_start=3.0))]),
        "'video_start' of a part of type video_url is not supported",
    ),
    ("content", body(messages=[{"role": "user", "content": 7}]), "a string or a list"),
    ("long", body(messages=[{"role": "user", "content": "a" * 100_001}]), "longer than"),
    ("n", body(n=3), "n must be 1"),
    ("tools", body(tools=[{}]), "tools is not supported"),
    ("frames", body(media_io_kwargs={"video": {"num_frames": 0}}), "num_frames must be an integer from 1 to 4096"),
    ("fps", body(media_io_kwargs={"video": {"num_frames": 8, "fps": 1}}), "must be {video: {num_frames: N}}"),
    ("audio", body(media_io_kwargs={"audio": {}}), "must be {video: {num_frames: N}}"),
    ("unknown", body(top_k=1), "'top_k' is not a parameter"),
    ("max_tokens", body(max_tokens=0), "max_tokens must be an integer from 1"),
    ("max_completion_tokens", body(max_completion_tokens=2.5), "max_completion_tokens must be an integer"),
    ("top_p", body(top_p=0), "top_p must be above 0"),
    ("top_p above 1", body(top_p=1.5), "top_p must be a number from 0 to 1"),
    ("stream", body(stream="true"), "stream must be true or false"),
    ("stream_options", body(stream_options={"include_usage": True}), "needs stream=true"),
    ("temperature", body(temperature="hot"), "must be a number from 0 to 2"),
    ("temperature", body(temperature=1e-40), r"must be 0 \(greedy\) or at least 1e-06"),
    ("seed", body(seed=10**30), "must be an integer"),
    ("half a seed", body(seed=0.5), "must be an integer"),
]


@pytest.mark.parametrize(
    ("request_body", "message"), [case[1:] for case in WRONG_BODIES], ids=[name for name, *_ in WRONG_BODIES]
)
def test_an_invalid_request_is_an_error_with_the_reason(request_body, message):
    with pytest.raises(RequestError, match=message):
        parse_question(request_body, MODEL)


@serving()
async def test_another_model_is_not_found_as_with_openai(served):
    with pytest.raises(openai.NotFoundError, match=f"has the model {MODEL}, not 'gpt'") as raised:
        await served.ask(model="gpt")
    problem = raised.value
    assert (problem.code, problem.param, problem.type) == ("model_not_found", "model", "invalid_request_error")


def test_a_port_in_use_is_an_error_before_loading():
    with bind_port("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(ValueError, match=rf"cannot listen at --host 127.0.0.1 --port {listener.getsockname()[1]}"):
            bind_port("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_an_error(port):
    with pytest.raises(ValueError, match=rf"^--port {port} must be from 0 \(any free port\) to 65535$"):
        bind_port("127.0.0.1", port)


@serving()
async def test_files_from_clients_are_deleted(served, tmp_path, videos):
    await served.ask(url=f"data:video/mp4;base64,{base64.b64encode(b'video').decode()}")
    assert [path.name for path in tmp_path.iterdir()] == [videos.name]


OPENAIS = openai.types.chat.completion_create_params
PARAMETERS = OPENAIS.CompletionCreateParamsNonStreaming.__annotations__ | (
    OPENAIS.CompletionCreateParamsBase.__annotations__
)


def test_every_parameter_of_openai_is_supported_unsupported_or_ignored():
    kinds = (openai_module.SUPPORTED, tuple(openai_module.UNSUPPORTED), openai_module.IGNORED)
    parameters = [name for kind in kinds for name in kind]
    assert len(parameters) == len(set(parameters)) and set(PARAMETERS) <= set(parameters) and "stop" in PARAMETERS


@pytest.mark.parametrize("name", openai_module.UNSUPPORTED)
def test_an_unsupported_parameter_is_rejected_unless_it_has_no_effect(name):
    with pytest.raises(BadRequest, match=f"^{name} is not supported") as raised:
        parse_question(body(**{name: {"any": "thing"}}), MODEL)
    assert raised.value.param == name
    for neutral in (None, *openai_module.UNSUPPORTED[name]):
        parse_question(body(**{name: neutral}), MODEL)


@pytest.mark.parametrize("name", openai_module.IGNORED)
def test_an_ignored_parameter_changes_nothing(name):
    assert parse_question(body(**{name: "any"}), MODEL) == parse_question(body(), MODEL)
