"""The agent behind OpenAI's API is one model for its real client, and what a client does harms no other."""

import asyncio
import base64
import io
from contextlib import asynccontextmanager

import aiohttp
import av
import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from aiohttp import web
from PIL import Image

from model_port.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.asking import media as media_module
from paravt_jax.asking import service as service_module
from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.media import Sources, is_public
from paravt_jax.asking.openai import BadRequest, Medium, question_of
from paravt_jax.asking.service import Service, bound, serve
from rollout.chat import Chat
from rollout.episode import Agent, EpisodeConfig

openai = pytest.importorskip("openai")
LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"
MODEL = "tiny"


@pytest.fixture(scope="module")
def chat():
    return Chat(tiny_tokenizer(), CHAT_TEMPLATE)


@pytest.fixture
def videos(tmp_path):
    directory = tmp_path / "videos"
    directory.mkdir()
    (directory / "a.mp4").write_bytes(b"any")
    return directory


class Served:
    """A service of a script at a port, and OpenAI's client of it."""

    def __init__(self, service, url):
        self.service, self.url = service, url
        self.engine = service.answerer.agent.engine
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

    async def ask(self, text="What colour is it?", url="a.mp4", **settings):
        parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}]
        return await self.client.chat.completions.create(**{"model": MODEL, "messages": messages, **settings})


def with_service(chat, videos, work, turns=(LOOK, ANSWER), report_after_s=0.0, deadline_s=20.0, max_questions=2):
    agent = Agent(script(chat, turns, report_after_s=report_after_s), FakeFrames(), chat, EpisodeConfig())
    service = Service(Answerer(agent, 8), MODEL, Sources(videos, False), max_questions, deadline_s)

    async def body():
        stop, place = asyncio.Event(), bound("127.0.0.1", 0)
        serving = asyncio.create_task(serve(service, place, 5.0, stop))
        served = Served(service, f"http://127.0.0.1:{place.getsockname()[1]}")
        served.stop, served.serving = stop, serving
        try:
            async with asyncio.timeout(30), served.client:
                await until(lambda: serving.done() or listens(place))
                return await work(served)
        finally:
            stop.set()
            await serving

    return asyncio.run(body())


def listens(place):
    return place.getsockopt(service_module.socket.SOL_SOCKET, service_module.socket.SO_ACCEPTCONN)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


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


def test_a_client_that_says_nothing_is_not_waited_for(chat, videos, monkeypatch):
    monkeypatch.setattr(service_module, "BODY_DEADLINE_S", 0.2)

    async def work(served):
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        said = await reader.readline()
        writer.close()
        return said, (await served.ask()).choices[0].message.content

    said, answer = with_service(chat, videos, work)
    assert said.split()[1] == b"408" and answer == "A"


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
    ("temperature", body(temperature="hot"), "must be a number from 0 to 2"),
    ("seed", body(seed=10**30), "must be a number"),
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


def path_of(url, tmp_path, kind="video", **media):
    made = tmp_path / "made"
    made.mkdir(exist_ok=True)
    found = Sources(media.get("video_root"), media.get("allow_fetch", False))
    return asyncio.run(found.path_of(Medium(kind, url), made, 0))


def test_files_are_those_below_the_directory_and_no_others(videos, tmp_path):
    (tmp_path / "secret").write_text("x")
    (videos / "link.mp4").symlink_to(tmp_path / "secret")
    for url in (
        "a.mp4",
        str(videos / "a.mp4"),
        f"file://{videos}/a.mp4",
        f"file://{videos}/%61.mp4",
        "../videos/a.mp4",
    ):
        assert path_of(url, tmp_path, video_root=videos) == videos / "a.mp4"
    outside = ("../secret", f"{tmp_path}/secret", "link.mp4", f"file://{videos}/%2e%2e/secret", "none.mp4", ".", "a\0b")
    for url in outside:
        with pytest.raises(BadRequest, match="there is no"):
            path_of(url, tmp_path, video_root=videos)
    with pytest.raises(BadRequest, match="--video-root"):
        path_of("a.mp4", tmp_path)


def test_a_picture_in_the_request_becomes_a_video_that_shows_it(tmp_path):
    pixels = np.full((33, 47, 3), (200, 30, 30), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    with av.open(str(path_of(url, tmp_path, "image"))) as container:
        (frame,) = container.decode(video=0)
    shown = frame.to_ndarray(format="rgb24")[:33, :47]
    assert frame.pts is not None and np.abs(shown.astype(int) - pixels).mean() < 8


@pytest.mark.parametrize("url", ["data:,x", "data:video/mp4;base64,a", "data:video/mp4;base64,a?=="])
def test_data_that_are_none_are_refused(url, tmp_path):
    with pytest.raises(BadRequest, match="data URL"):
        path_of(url, tmp_path)


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "data:image/svg+xml;base64,PHN2Zy8+"])
def test_a_picture_that_is_none_is_refused(url, tmp_path):
    with pytest.raises(BadRequest, match="picture"):
        path_of(url, tmp_path, "image")


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "169.254.169.254",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "[fd00::1]",
    "localhost",
]


@pytest.mark.parametrize("host", PRIVATE)
def test_no_address_of_this_machine_or_network_is_fetched(host, tmp_path):
    with pytest.raises(BadRequest, match="not on the public web"):
        path_of(f"http://{host}:9/a.mp4", tmp_path, allow_fetch=True)


def test_nothing_is_fetched_unless_it_is_allowed_and_only_from_the_web(tmp_path):
    with pytest.raises(BadRequest, match="--allow-fetch"):
        path_of("https://example.org/a.mp4", tmp_path)
    with pytest.raises(BadRequest, match="scheme 'ftp'"):
        path_of("ftp://example.org/a.mp4", tmp_path, allow_fetch=True)


def test_public_addresses_are_public():
    assert is_public("93.184.215.14") and is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert not is_public("224.0.0.1") and not is_public("100.64.0.1")


@asynccontextmanager
async def website():
    """At /video a video, at /there a redirect to it, at /here one to a private address, at /round one to itself."""
    app = web.Application()
    app.router.add_get("/{name}", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


MOVED = {"there": "/video", "here": "http://10.0.0.1/video", "file": "file:///etc/passwd", "round": "/round"}


async def answered(request):
    name = request.match_info["name"]
    if name in MOVED:
        return web.Response(status=302, headers={"Location": MOVED[name]})
    return web.Response(body=b"v" * 5000) if name == "video" else web.Response(status=404)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/video", ""),
        ("/there", ""),
        ("/here", "10.0.0.1 is not on the public web"),
        ("/file", "no address of the web"),
        ("/round", "redirects more than"),
        ("/none", "answered 404"),
    ],
)
def test_a_fetch_looks_at_every_address_that_it_is_sent_to(path, said, tmp_path, monkeypatch):
    monkeypatch.setattr(media_module, "is_public", lambda address: address == "127.0.0.1" or is_public(address))

    async def fetch():
        async with website() as url:
            return await Sources(None, True).path_of(Medium("video", url + path), tmp_path, 0)

    if said:
        with pytest.raises(BadRequest, match=said):
            asyncio.run(fetch())
    else:
        assert asyncio.run(fetch()).read_bytes() == b"v" * 5000


def test_a_fetch_of_more_than_may_be_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(media_module, "is_public", lambda address: True)
    monkeypatch.setattr(media_module, "MAX_FETCHED_BYTES", 1000)

    async def fetch():
        async with website() as url:
            await Sources(None, True).path_of(Medium("video", f"{url}/video"), tmp_path, 0)

    with pytest.raises(BadRequest, match="larger than"):
        asyncio.run(fetch())


def test_a_port_in_use_is_said_before_anything_is_loaded():
    with bound("127.0.0.1", 0) as place:
        place.listen()
        with pytest.raises(ValueError, match=rf"--port {place.getsockname()[1]} of --host 127.0.0.1 cannot be had"):
            bound("127.0.0.1", place.getsockname()[1])


def test_nothing_that_a_client_sent_is_left(chat, videos, tmp_path, monkeypatch):
    monkeypatch.setattr(service_module.TemporaryDirectory.__init__, "__defaults__", (None, None, str(tmp_path), False))

    async def work(served):
        await served.ask(url=f"data:video/mp4;base64,{base64.b64encode(b'video').decode()}")

    with_service(chat, videos, work)
    assert not list(tmp_path.glob("paravt_*"))
