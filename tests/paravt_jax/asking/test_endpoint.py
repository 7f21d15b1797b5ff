"""Questions to a model behind an endpoint, and our own server as an endpoint."""

import argparse
import asyncio
import json
import re

import numpy as np
import pytest
from agents import FakeFrames, call
from aiohttp.test_utils import TestClient, TestServer
from async_tests import async_test
from fake_endpoint import MODEL as FAKE_MODEL, FakeEndpoint, asking
from PIL import Image
from served import ACCESS, LOOK, MODEL, with_service

from paravt_jax import ask
from paravt_jax.asking import asker, service as service_module
from paravt_jax.asking.access import AccessControl
from paravt_jax.asking.answerer import Answerer
from paravt_jax.asking.asker import engine_of, open_asker
from paravt_jax.asking.media import Sources
from paravt_jax.asking.service import Service
from paravt_jax.rewards.terms import find_prediction
from paravt_jax.run.recipe import Recipe
from rollout.endpoint.agent import EndpointAgent
from rollout.endpoint.check import check_endpoint
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import EndpointError
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.video.encode import write_video

TURNS = (f"<think>\nWhere?</think>{call(0, 1)}", "<think>\nIt is red.</think><answer>A</answer>")
TASK = Task("t", "What colour is it?\nA. red\nB. blue", ("/a.mp4",), 4)


def says(body):
    number = sum(message["role"] == "assistant" for message in body["messages"])
    return "A report." if "looks closely" in body["messages"][0]["content"] else TURNS[number]


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    write_video(path, [np.full((64, 96, 3), 40 * number, np.uint8) for number in range(6)], fps=2)
    return str(path)


def test_an_invalid_endpoint_url_names_the_flag():
    with pytest.raises(ValueError, match=r"^--url is not a URL such as http://10\.0\.0\.2:30000$"):
        engine_of("any", ["nonsense"], [], "")


@pytest.mark.slow
@async_test
async def test_an_endpoint_answers_a_question_and_its_page_is_written(video, capsys, tmp_path):
    page = tmp_path / "page.html"
    async with FakeEndpoint(says) as endpoint:
        flags = ["--endpoint", endpoint.url, "--model", FAKE_MODEL, "--frames", "3", "--json", "--html", str(page)]
        args = ask.make_parser().parse_args([video, "What colour?", *flags])
        await ask.run(args, [video], "What colour?")
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert (answer["answer"], answer["outcomes"], answer["num_sampled_tokens"]) == ("A", ["ok"], 21)
    pictures = set(re.findall(r'"UklGR[^"]+"', page.read_text()))
    assert len(pictures) >= 3 and "It is red." in page.read_text()
    assert "3 frames" in printed.err and "behind an endpoint" in printed.err


@pytest.mark.parametrize("shown", ["photo.jpg", "still.webp", ""])
@async_test
async def test_a_question_about_an_image_or_text_alone_has_no_tools(shown, tmp_path, capsys):
    files = [str(tmp_path / shown)] if shown else []
    for file in files:
        Image.new("RGB", (96, 64), "red").save(file)
    page = tmp_path / "page.html"
    async with FakeEndpoint("<think>\nRed.</think><answer>A</answer>") as endpoint:
        flags = ["--endpoint", endpoint.url, "--model", FAKE_MODEL, "--html", str(page)]
        args = ask.make_parser().parse_args([*files, "What colour?", *flags])
        await ask.run(args, *ask._files_and_question(args.arguments, False))
    *_, body = endpoint.bodies
    printed = capsys.readouterr()
    assert printed.out == "A\n" and "evidence  only the prompt\n" in printed.err
    assert "Red." in page.read_text() and '"frame_budget":null' in page.read_text().replace(" ", "")
    assert json.dumps(body).count("data:image/") == len(files) and "crop_video" not in json.dumps(body)


@async_test
async def test_a_model_that_is_not_served_is_rejected_at_once():
    async with FakeEndpoint(says) as endpoint:
        opened = open_asker("other", engine_of("other", [], [endpoint.url], ""), num_frames=3, dispatch=None)
        with pytest.raises(EndpointError, match=rf"does not serve --model=other; it serves {FAKE_MODEL}"):
            await opened.__aenter__()


@pytest.mark.parametrize(
    ("url", "key_env", "problem"),
    [
        ("http://10.0.0.2/v1?key=1", "", r"^--endpoint has http://10\.0\.0\.2/v1, expected a base URL"),
        ("http://10.0.0.2/v1", "NO_KEY", r"^--endpoint-key-env=NO_KEY names an environment variable that is not set"),
        (None, "", r"rejects the API key .* check the variable that --endpoint-key-env names"),
    ],
)
@async_test
async def test_the_errors_of_an_endpoint_name_the_flags(url, key_env, problem, monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    async with FakeEndpoint(says) as endpoint:
        endpoint.key = "sk-right"
        urls, settings = [url or endpoint.url], {"num_frames": 3, "dispatch": None}
        with pytest.raises((ValueError, EndpointError), match=problem):
            await open_asker(FAKE_MODEL, engine_of(FAKE_MODEL, [], urls, key_env), **settings).__aenter__()


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        ({}, "^no answer: the endpoint cut the turn off after 7 tokens; raise its limits, or pass a smaller --frames$"),
        ({"max_new_tokens": 7}, "^no answer: the turn reached its limit of 7 tokens, which --endpoint cannot raise$"),
    ],
)
@async_test
async def test_an_answer_that_an_endpoint_cut_off_names_the_limit_that_was_reached(limit, problem, monkeypatch):
    monkeypatch.setattr(asker, "Recipe", lambda: Recipe(rollout=EpisodeConfig(**limit)))
    async with FakeEndpoint("Red or blue?", "ok", "cut off") as endpoint:
        args = ask.make_parser().parse_args(["What colour?", "--endpoint", endpoint.url, "--model", FAKE_MODEL])
        with pytest.raises(RuntimeError, match=problem):
            await ask.run(args, [], "What colour?")


@asking()
async def test_a_service_is_as_healthy_as_its_endpoint_which_it_checks_once_for_many_requests(
    client, endpoint, monkeypatch
):
    service = Service(Answerer(EndpointAgent(client, FakeFrames()), 4), FAKE_MODEL, Sources(None, False), 1, 20.0)
    async with TestClient(TestServer(service.app())) as visitor:
        monkeypatch.setattr(service_module, "HEALTH_S", 60.0)
        answers = await asyncio.gather(*(visitor.get("/health") for _ in range(20)))
        assert {answer.status for answer in answers} == {200} and endpoint.num_probes == 1
        monkeypatch.setattr(service_module, "HEALTH_S", 0.0)
        await endpoint.die()
        assert (await visitor.get("/health")).status == 503


def test_sglang_servers_and_endpoints_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        ask.make_parser().parse_args(["a", "b", "--url", "http://h", "--endpoint", "http://h/v1"])
    assert "not allowed with argument --url" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no effect without --endpoint"):
        engine_of("m", [], [], "NAME")


def asked(chat, videos, turns, key="", access=ACCESS):
    """An episode of an agent whose endpoint is our own server."""

    async def work(served):
        client = EndpointClient([f"{served.url}/v1"], MODEL, key)
        try:
            await check_endpoint(client, 0.0)
            agent = EndpointAgent(client, FakeFrames(), EpisodeConfig(dispatch="none"))
            return await agent.run(await agent.overview(TASK))
        finally:
            await client.close()

    return with_service(chat, videos, work, turns=turns, access=access, max_questions=1)


def test_our_own_server_is_an_endpoint(chat, videos):
    episode = asked(chat, videos, ["It is red.</think><answer>A</answer><|im_end|>"])
    assert episode.turns[0].text == "<think>\nIt is red.</think><answer>A</answer>"
    assert find_prediction([turn.text for turn in episode.turns]) == "A"
    assert 0 < episode.num_sampled < 50  # frames come as images, so the server's agent makes no calls


def test_our_own_server_refuses_a_wrong_key(chat, videos, monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", "sk-wrong")
    with pytest.raises(EndpointError, match="rejects the API key") as caught:
        asked(chat, videos, [LOOK], "ENDPOINT_KEY", AccessControl("sk-right"))
    assert caught.value.reason == "key"


def test_the_flags_of_both_commands_name_the_endpoint():
    parser = argparse.ArgumentParser()
    ask.add_model_arguments(parser)
    args = parser.parse_args(["--endpoint", "http://h/v1", "--endpoint", "http://i/v1", "--endpoint-key-env", "KEY"])
    engine = engine_of("m", args.url, args.endpoint, args.endpoint_key_env)
    assert engine is not None
    assert (engine.kind, engine.urls) == ("openai", ["http://h/v1", "http://i/v1"])
    assert (engine.model, engine.api_key_env) == ("m", "KEY")
