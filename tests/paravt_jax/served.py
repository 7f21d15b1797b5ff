"""A service with a scripted agent on a loopback port, and OpenAI's client for it."""

import asyncio

import pytest
from agents import ANSWER, FakeFrames, call, script
from async_tests import make_test, until

from paravt_jax.asking import service as service_module
from paravt_jax.asking.access import AccessControl
from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.media import Sources
from paravt_jax.asking.service import Service, bind_port, serve
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig

openai = pytest.importorskip("openai")
LOOK = f"Where?</think>{call(16, 24)}{call(32, 40)}<|im_end|>"
MODEL = "tiny"
ACCESS = AccessControl()


def question(url="a.mp4", **settings):
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What colour is it?"}]
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], **settings}


class Served:
    def __init__(self, service, port):
        self.service, self.port, self.url = service, port, f"http://127.0.0.1:{port}"
        self.engine = service.answerer.agent.engine
        self.client = self.client_with("none")

    def client_with(self, key):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    async def raw(self, text):
        """Opens a connection and sends `text`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(text)
        return reader, writer

    async def ask(self, url="a.mp4", **settings):
        return await self.client.chat.completions.create(**question(url, **settings))

    async def stream(self, **settings):
        return [chunk async for chunk in await self.ask(stream=True, **settings)]

    async def ask_with(self, key):
        async with self.client_with(key) as client:
            return await client.chat.completions.create(**question())


def with_service(
    chat,
    videos,
    work,
    turns=(LOOK, ANSWER),
    report_after_s=0.0,
    deadline_s=20.0,
    max_questions=2,
    access=ACCESS,
    **config,
):
    agent = Agent(script(chat, turns, report_after_s=report_after_s), FakeFrames(), chat, EpisodeConfig(**config))
    sources = Sources(videos, False, videos.parent)
    return asyncio.run(served_by(Service(Answerer(agent, 8), MODEL, sources, max_questions, deadline_s, access), work))


def serving(*turns, **settings):
    """Returns a decorator for tests whose first argument is the served agent; the others are fixtures."""

    def run(work, chat, videos):
        with_service(chat, videos, work, *turns, **settings)

    return lambda work: make_test(work, 1, run)


async def served_by(service, work):
    stop, listener = asyncio.Event(), bind_port("127.0.0.1", 0)
    serving = asyncio.create_task(serve(service, listener, stop))
    served = Served(service, listener.getsockname()[1])
    served.stop, served.serving = stop, serving
    try:
        async with asyncio.timeout(90), served.client:
            await until(lambda: serving.done() or is_listening(listener))
            return await work(served)
    finally:
        stop.set()
        await serving


def is_listening(listener):
    return listener.getsockopt(service_module.socket.SOL_SOCKET, service_module.socket.SO_ACCEPTCONN)
