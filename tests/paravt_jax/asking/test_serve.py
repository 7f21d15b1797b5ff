"""The agent behind OpenAI's API is one model for its real client, and what a client does harms no other."""

import asyncio
import base64
import errno
import json
from dataclasses import replace

import aiohttp
import pytest
from served import MODEL, question, until, with_service

from paravt_jax.asking import body as body_module
from paravt_jax.asking import openai as openai_module
from paravt_jax.asking import service as service_module
from paravt_jax.asking.openai import BadRequest, question_of
from paravt_jax.asking.service import bound

openai = pytest.importorskip("openai")


def test_openais_client_gets_an_answer_and_the_tokens_of_all_agents(chat, videos):
    async def work(served):
        answer = await served.ask()
        return answer, served.engine.requests

    answer, requests = with_service(chat, videos, work)
    assert answer.choices[0].message.content == "A" and answer.choices[0].finish_reason == "stop"
    assert "Where?" in answer.choices[0].message.reasoning_content
    assert answer.usage.prompt_tokens == sum(len(request.ids) for request in requests) and len(requests) == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [(one["start_s"], one["end_s"]) for one in answer.paravt["evidence"]] == [(16, 24), (32, 40)]


def test_a_stream_tells_turns_calls_and_reports_as_reasoning_then_the_answer(chat, videos):
    async def work(served):
        stream = await served.ask(stream=True, stream_options={"include_usage": True})
        return [one async for one in stream]

    chunks = with_service(chat, videos, work)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert "Where?" in reasoning and "[crop_video 0:16.0 to 0:24.0: A report.]" in reasoning and "<" not in reasoning
    assert "".join(delta.content or "" for delta in deltas) == "A"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0


def test_what_can_be_asked_and_how_it_goes(chat, videos):
    async def work(served):
        models = await served.client.models.list()
        await served.ask()
        async with aiohttp.ClientSession() as session:
            health = await session.get(f"{served.url}/health")
            metrics = await session.get(f"{served.url}/metrics")
            return models.data[0].id, health.status, await metrics.text()

    model, health, metrics = with_service(chat, videos, work)
    assert (model, health) == (MODEL, 200)
    assert 'paravt_questions_total{outcome="answered"} 1' in metrics and "paravt_questions_running 0" in metrics


def test_more_questions_than_may_be_are_told_when_to_come_again(chat, videos):
    async def work(served):
        answers = await asyncio.gather(*(served.ask() for _ in range(12)), return_exceptions=True)
        again = await served.ask()
        return answers, again

    answers, again = with_service(chat, videos, work, report_after_s=0.3)
    refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
    assert len(refused) == 10 and len(answers) == 12
    assert all(int(one.response.headers["Retry-After"]) >= 1 for one in refused)
    assert again.choices[0].message.content == "A"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_question_along(chat, videos, stream):
    async def work(served):
        asking = asyncio.create_task(served.ask(stream=stream))
        if stream:
            response = await asking
            await until(lambda: len(served.engine.requests) == 3)
            await response.close()
        else:
            await until(lambda: len(served.engine.requests) == 3)
            asking.cancel()
        await until(lambda: not served.service.running)
        await until(lambda: not served.engine._running)
        return dict(served.service.counts)

    assert with_service(chat, videos, work, report_after_s=20)["given up"] == 1


def test_a_question_ends_at_its_deadline(chat, videos):
    async def work(served):
        with pytest.raises(openai.InternalServerError, match="not answered in time") as refused:
            await served.ask()
        stream = await served.ask(stream=True)
        with pytest.raises(openai.APIError, match="not answered in time"):
            [one async for one in stream]
        return refused.value.status_code

    assert with_service(chat, videos, work, report_after_s=20, deadline_s=0.3) == 504


HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_clients_that_send_headers_and_one_byte_keep_nobody_out(chat, videos, monkeypatch):
    monkeypatch.setattr(body_module, "BODY_DEADLINE_S", 0.5)

    async def work(served):
        waiting = [await served.raw(HEADERS + b"Content-Length: 100\r\n\r\n{") for _ in range(8)]
        await until(lambda: len(served.service.busy) == 8)
        answer = await served.ask()
        said = [await reader.readline() for reader, _ in waiting]
        for _, writer in waiting:
            writer.close()
        return answer.choices[0].message.content, said, dict(served.service.counts)

    answer, said, counts = with_service(chat, videos, work)
    assert answer == "A" and all(line.split()[1] == b"408" for line in said) and counts == {"answered": 1}


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEADERS], ids=["nothing", "half a line", "half of the headers"])
def test_a_connection_without_a_whole_request_is_closed(chat, videos, sent, monkeypatch):
    monkeypatch.setattr(service_module, "HEADERS_DEADLINE_S", 0.3)

    async def work(served):
        reader, writer = await served.raw(sent)
        asking = asyncio.create_task(served.ask())  # takes longer than that, and is let be
        left = await reader.read()
        writer.close()
        return left, (await asking).choices[0].message.content

    assert with_service(chat, videos, work, report_after_s=1.0) == (b"", "A")


def test_large_bodies_are_bounded_together_and_small_ones_come_through(chat, videos, monkeypatch):
    monkeypatch.setattr(body_module, "MAX_BODIES_BYTES", 3 * 2**20)

    async def work(served):
        part = HEADERS + b"Content-Length: 9999999\r\n\r\n" + b" " * 2**21
        waiting = [await served.raw(part), await served.raw(part)]
        for_one = [asyncio.ensure_future(reader.readline()) for reader, _ in waiting]
        (done,), _ = await asyncio.wait(for_one, return_when=asyncio.FIRST_COMPLETED)
        answer = await served.ask()
        for_one[0].cancel(), for_one[1].cancel()
        for _, writer in waiting:
            writer.close()
        await until(lambda: not served.service.bodies.num_bytes)
        return (await done).split()[1], answer.choices[0].message.content

    assert with_service(chat, videos, work) == (b"503", "A")


def test_a_request_of_a_hundred_megabytes_is_refused(chat, videos):
    async def work(served):
        with pytest.raises(openai.APIStatusError) as refused:
            await served.ask(url=f"data:video/mp4;base64,{'A' * 10**8}")
        return refused.value.status_code

    assert with_service(chat, videos, work) == 413


def test_a_server_that_stops_answers_what_it_has_begun_and_takes_nothing_more(chat, videos):
    async def work(served):
        asking = asyncio.create_task(served.ask())
        await until(lambda: len(served.engine.requests) == 3)
        served.stop.set()
        await until(lambda: served.service.stopping)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            await served.ask()
        answer = await asking
        await served.serving
        return answer.choices[0].message.content

    assert with_service(chat, videos, work, report_after_s=0.5) == "A"


@pytest.mark.parametrize(
    "problem", [OSError(errno.EMFILE, "Too many open files"), MemoryError()], ids=["files", "memory"]
)
def test_a_server_without_files_or_memory_asks_its_clients_to_come_back(problem, chat, videos):
    async def work(served):
        async def fail(path, deadline_s):
            raise problem

        served.service.answerer.agent.frames.info = fail
        with pytest.raises(openai.InternalServerError) as refused:
            await served.ask()
        return refused.value

    refused = with_service(chat, videos, work)
    assert refused.status_code == 503 and refused.response.headers["Retry-After"] == "10"


def test_an_error_of_our_own_tells_the_client_nothing_of_this_machine(chat, videos, capsys):
    async def work(served):
        async def fail(path, deadline_s):
            raise OSError(2, "No such file", "/srv/secret/\x1b]0;title\x07")

        served.service.answerer.agent.frames.info = fail
        with pytest.raises(openai.InternalServerError) as refused:
            await served.ask()
        return refused.value.message

    message = with_service(chat, videos, work)
    told = capsys.readouterr().err
    assert "went wrong" in message and "secret" not in message and "OSError" not in message
    assert "/srv/secret" in told and "\x1b" not in told


async def post(served, text, **headers):
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Type": "application/json"} | headers
        async with session.post(f"{served.url}/v1/chat/completions", data=text, headers=headers) as response:
            return response.status, await response.json()


# Texts that a client of OpenAI's would not send.
HOSTILE = [
    ("names of 300 characters", json.dumps(question("a" * 300)), 400),
    ("half a character", json.dumps(question("\ud800")), 400),
    ("half a character in the question", json.dumps(question()).replace("What", "\\udfff"), 400),
    ("no URL", json.dumps(question("http://[")), 400),
    ("a role that is a list", json.dumps({"model": MODEL, "messages": [{"role": []}, {"role": "user"}]}), 400),
    ("a parameter that is nobody's", json.dumps(question(**{"x" * 10_000: 1})), 400),
    ("lists", "[" + "[]," * 200_000 + "[]]", 400),
    ("depth", "[" * 100_000 + "]" * 100_000, 400),
    ("UTF-16", json.dumps(question()).encode("utf-16"), 400),
    ("a number of a million digits", '{"model": ' + "1" * 10**6 + "}", 400),
]


@pytest.mark.parametrize(("text", "status"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_body_is_refused_in_plain_words(chat, videos, text, status):
    answered, said = with_service(chat, videos, lambda served: post(served, text))
    message = said["error"]["message"]
    assert answered == status and message.isprintable() and len(message) < 300 and str(videos) not in message


def test_only_json_is_read(chat, videos):
    async def work(served):
        text = json.dumps(question())
        plain = await post(served, text, **{"Content-Type": "text/plain"})
        return plain, await post(served, text, **{"Content-Type": "application/json; charset=utf-8"})

    (status, said), (of_json, _) = with_service(chat, videos, work)
    assert status == 415 and "application/json" in said["error"]["message"] and of_json == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_bounds_what_all_agents_sample_together(chat, videos, name):
    async def work(served):
        whole = await served.ask()
        sampled = whole.usage.completion_tokens
        return whole, {most: await served.ask(**{name: most}) for most in (1, 7, sampled - 12, sampled)}

    whole, by_most = with_service(chat, videos, work)
    *cuts, enough = by_most.items()
    for most, answer in cuts:
        assert 0 < answer.usage.completion_tokens <= most
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", "")
    assert cuts[-1][1].paravt["outcomes"] == ["ok", "ok"]  # no sub-agent takes what another one is to report with
    assert enough[1].choices[0] == whole.choices[0]


def test_temperature_top_p_and_seed_reach_the_engine(chat, videos):
    async def work(served):
        await served.ask(temperature=0.5, top_p=0.9, seed=1)
        await served.ask(seed=2)
        return [request.sampling for request in served.engine.requests]

    sampled = with_service(chat, videos, work)
    first, second = sampled[:4], sampled[4:]
    assert {(one.temperature, one.top_p) for one in first} == {(0.5, 0.9)}
    assert {(one.temperature, one.top_p) for one in second} == {(0.0, 1.0)}
    assert {one.seed for one in first}.isdisjoint(one.seed for one in second)


def test_top_p_is_refused_by_its_name_where_the_engine_has_none_and_it_would_matter(chat, videos):
    async def work(served):
        served.service.answerer = replace(served.service.answerer, samples_top_p=False)
        with pytest.raises(openai.BadRequestError) as refused:
            await served.ask(temperature=0.5, top_p=0.9)
        await served.ask(top_p=0.9)
        return refused.value.param, {request.sampling.top_p for request in served.engine.requests}

    assert with_service(chat, videos, work) == ("top_p", {1.0})


def body(**changed):
    message = {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image_url", "image_url": "x"}]}
    return {"model": MODEL, "messages": [message], **changed}


WRONG_BODIES = [
    ("list", [], "must be a JSON object"),
    ("model", body(model="gpt"), "the model here is tiny"),
    ("no messages", body(messages=[]), "list of messages"),
    ("a conversation", body(messages=[{"role": "user", "content": "a"}] * 2), "nothing is kept of a conversation"),
    ("no video", body(messages=[{"role": "user", "content": "a"}]), "between 1 and 64 parts"),
    (
        "no question",
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        "no question",
    ),
    ("a part", body(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "'input_audio' is none of"),
    ("a part that is no object", body(messages=[{"role": "user", "content": [7]}]), "None is none of"),
    ("no url", body(messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]), "needs {url"),
    ("content", body(messages=[{"role": "user", "content": 7}]), "a text or a list"),
    ("long", body(messages=[{"role": "user", "content": "a" * 100_001}]), "longer than"),
    ("n", body(n=3), "one answer is given"),
    ("tools", body(tools=[{}]), "tools cannot be had"),
    ("nobody's", body(top_k=1), "'top_k' is no parameter"),
    ("max_tokens", body(max_tokens=0), "max_tokens must be a whole number from 1"),
    ("max_completion_tokens", body(max_completion_tokens=2.5), "max_completion_tokens must be a whole"),
    ("top_p", body(top_p=0), "top_p must be above 0"),
    ("top_p above 1", body(top_p=1.5), "top_p must be a number from 0 to 1"),
    ("stream", body(stream="true"), "stream must be true or false"),
    ("stream_options", body(stream_options={"include_usage": True}), "beside stream=true"),
    ("temperature", body(temperature="hot"), "must be a number from 0 to 2"),
    ("seed", body(seed=10**30), "must be a whole number"),
    ("half a seed", body(seed=0.5), "must be a whole number"),
]


@pytest.mark.parametrize(("given", "said"), [case[1:] for case in WRONG_BODIES], ids=[case[0] for case in WRONG_BODIES])
def test_a_request_that_cannot_be_is_refused_in_one_sentence(given, said):
    with pytest.raises(BadRequest, match=said):
        question_of(given, MODEL)


def test_a_refusal_names_what_is_wrong_to_openais_client(chat, videos):
    async def work(served):
        with pytest.raises(openai.BadRequestError) as refused:
            await served.ask(n=2)
        return refused.value

    refused = with_service(chat, videos, work)
    assert refused.param == "n" and "one answer" in refused.message


def test_a_port_in_use_is_said_before_anything_is_loaded():
    with bound("127.0.0.1", 0) as place:
        place.listen()
        with pytest.raises(ValueError, match=rf"--port {place.getsockname()[1]} of --host 127.0.0.1 cannot be had"):
            bound("127.0.0.1", place.getsockname()[1])


def test_nothing_that_a_client_sent_is_left(chat, videos, tmp_path):
    async def work(served):
        await served.ask(url=f"data:video/mp4;base64,{base64.b64encode(b'video').decode()}")

    with_service(chat, videos, work)
    assert [path.name for path in tmp_path.iterdir()] == [videos.name]


OPENAIS = openai.types.chat.completion_create_params
PARAMETERS = OPENAIS.CompletionCreateParamsNonStreaming.__annotations__ | (
    OPENAIS.CompletionCreateParamsBase.__annotations__
)


def test_every_parameter_of_openais_is_acted_on_refused_or_known_to_be_without_effect():
    kinds = (openai_module.ACTED_ON, tuple(openai_module.REFUSED), openai_module.WITHOUT_EFFECT)
    known = [name for kind in kinds for name in kind]
    assert len(known) == len(set(known)) and set(PARAMETERS) <= set(known) and "stop" in PARAMETERS


@pytest.mark.parametrize("name", openai_module.REFUSED)
def test_a_parameter_that_cannot_be_had_is_refused_by_its_name_unless_it_asks_for_nothing(name):
    with pytest.raises(BadRequest, match=f"^{name} cannot be had here") as refused:
        question_of(body(**{name: {"any": "thing"}}), MODEL)
    assert refused.value.param == name
    for nothing in (None, *openai_module.REFUSED[name]):
        question_of(body(**{name: nothing}), MODEL)


@pytest.mark.parametrize("name", openai_module.WITHOUT_EFFECT)
def test_a_parameter_without_effect_changes_nothing(name):
    assert question_of(body(**{name: "any"}), MODEL) == question_of(body(), MODEL)
