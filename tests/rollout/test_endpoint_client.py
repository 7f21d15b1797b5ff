"""The client of OpenAI-compatible endpoints: every failure has its reason, only what a retry helps is retried, and the
key goes nowhere but to the endpoint.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fake_endpoint import CHOICES, ERRORS, MODEL, FakeEndpoint

from rollout.endpoint import client as client_module
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import EndpointError, retry_after_s, shown
from rollout.engine.protocol import DeadlineExceeded

MESSAGES = [{"role": "user", "content": "What colour is it?"}]
KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(client_module, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(client_module, "POLL_S", 0.01)
    monkeypatch.setattr(client_module, "GIVE_UP_S", 0.5)


async def ask(client: EndpointClient, **changed: Any) -> Any:
    return await client.complete(MESSAGES, **{"max_tokens": 9, "temperature": 0.0, "deadline_s": 10.0} | changed)


def with_endpoints(
    work: Callable[..., Awaitable[Any]], *endpoints: FakeEndpoint, key: str = "", **settings: Any
) -> Any:
    """Runs `work(client, *endpoints)`."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            for endpoint in endpoints:
                await stack.enter_async_context(endpoint)
            client = EndpointClient([e.url for e in endpoints], MODEL, key, **settings)
            stack.push_async_callback(client.close)
            return await work(client, *endpoints)

    return asyncio.run(run())


def failure(mode: str, key: str = "", **changed: Any) -> tuple[EndpointError, FakeEndpoint]:
    endpoint = FakeEndpoint("x", mode)

    async def work(client: EndpointClient, endpoint: FakeEndpoint) -> EndpointError:
        with pytest.raises(EndpointError) as caught:
            await ask(client, **changed)
        return caught.value

    return with_endpoints(work, endpoint, key=key), endpoint


REASON_OF = {
    **{mode: "context" for mode in ERRORS if "context" in mode or mode.startswith("sglang") or "long" in mode},
    **{mode: "pictures" for mode in ERRORS if "pictures" in mode},
    **dict.fromkeys((*(m for m in ERRORS if "filter" in m), "refusal", "filtered"), "content_filter"),
    **{mode: "content_filter" for mode in CHOICES if mode.startswith("gemini")},
    **dict.fromkeys(("openai key", "gemini key", "forbidden"), "key"),
    **{mode: "model" for mode in ERRORS if mode.endswith(" model")},
    **dict.fromkeys(("empty", "no content", "other finish", "no choices"), "empty"),
    **dict.fromkeys(("no such path", "rejected", "redirect", "parsed calls"), "rejected"),
    "quota": "rate_limit",
}


@pytest.mark.parametrize("mode", REASON_OF)
def test_every_failure_has_its_reason_and_is_not_retried(mode):
    problem, endpoint = failure(mode)
    assert problem.reason == REASON_OF[mode]
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("mode", ["500", "abort", "html", "broken json"])
def test_a_failing_server_is_tried_again_and_then_unreachable(mode):
    problem, endpoint = failure(mode)
    assert problem.reason == "unreachable" and "5 times" in str(problem)
    assert len(endpoint.bodies) == client_module.MAX_ATTEMPTS


@pytest.mark.parametrize("mode", ["500", "503", "drop", "html", "abort", "429"])
def test_a_failure_that_passes_costs_no_sample(mode):
    endpoint = FakeEndpoint("It is red.", mode, mode, "ok")
    reply = with_endpoints(lambda client, _: ask(client), endpoint)
    assert reply.text == "It is red." and len(endpoint.bodies) == 3


def test_a_reply_has_text_finish_and_the_token_counts_of_the_endpoint():
    reply = with_endpoints(lambda client, _: ask(client), FakeEndpoint("It is red."))
    assert (reply.text, reply.finish, reply.num_prompt_tokens, reply.num_sampled_tokens) == (
        "It is red.",
        "stop",
        70,
        7,
    )
    assert reply.latency_s > 0 and reply.server.startswith("http://127.0.0.1")


def test_a_reply_that_was_all_hidden_thinking_was_cut_off_and_is_no_failure():
    reply = with_endpoints(lambda client, _: ask(client), FakeEndpoint("", "thinking only"))
    assert (reply.text, reply.finish) == ("", "length")


def test_separated_thinking_is_put_back_before_the_reply():
    texts: list[str] = []
    endpoint = FakeEndpoint("", "reasoning")

    async def work(client: EndpointClient, _: FakeEndpoint) -> list[str]:
        return [(await ask(client)).text, (await ask(client, on_text=texts.append)).text]

    whole, streamed = with_endpoints(work, endpoint)
    assert whole == "<think>\nIt is red.\n</think>\n<answer>A</answer>"
    assert streamed.split() == whole.split() and texts[0].startswith("<think>\nIt")


def test_a_request_says_how_to_sample_and_nothing_about_tools():
    endpoint = FakeEndpoint()
    with_endpoints(lambda client, _: ask(client, temperature=0.3, top_p=0.9, seed=5, stop=["x"]), endpoint)
    assert endpoint.bodies == [
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 9}
        | {"temperature": 0.3, "top_p": 0.9, "seed": 5, "stop": ["x"]}
    ]


def test_the_newer_name_of_the_token_limit_is_used_where_the_older_one_is_refused():
    endpoint = FakeEndpoint("x", "other limit")

    async def work(client: EndpointClient, _: FakeEndpoint) -> None:
        await ask(client)
        await ask(client)

    with_endpoints(work, endpoint)
    assert ["max_tokens" in body for body in endpoint.bodies] == [True, False, False]
    assert endpoint.bodies[-1]["max_completion_tokens"] == 9


def test_a_stream_gives_the_text_so_far_and_the_same_reply():
    texts: list[str] = []
    reply = with_endpoints(lambda client, _: ask(client, on_text=texts.append), FakeEndpoint("It is red."))
    assert texts == ["It ", "It is ", "It is red. "]
    assert (reply.text, reply.finish, reply.num_sampled_tokens) == ("It is red. ", "stop", 7)


@pytest.mark.parametrize("mode", ["broken off", "no end"])
def test_a_stream_that_breaks_off_is_sent_again(mode):
    texts: list[str] = []
    endpoint = FakeEndpoint("It is red.", mode, "ok")
    reply = with_endpoints(lambda client, _: ask(client, on_text=texts.append), endpoint)
    assert reply.text == "It is red. " and len(endpoint.bodies) == 2


def test_an_error_in_a_stream_has_its_reason():
    problem, _ = failure("stream error", on_text=lambda text: None)
    assert problem.reason == "context"


def test_a_wait_that_the_server_asks_for_is_kept_by_every_request():
    endpoint = FakeEndpoint("x", "429", "ok")
    endpoint.retry_after = "0.4"

    async def work(client: EndpointClient, _: FakeEndpoint) -> float:
        started_s = time.monotonic()
        first = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, ask(client))
        return time.monotonic() - started_s

    assert with_endpoints(work, endpoint) >= 0.4
    assert len(endpoint.bodies) == 3


def test_a_wait_beyond_the_deadline_fails_at_once():
    endpoint = FakeEndpoint("x", "429")
    endpoint.retry_after = "3600"

    async def work(client: EndpointClient, _: FakeEndpoint) -> tuple[str, float]:
        started_s = time.monotonic()
        with pytest.raises(EndpointError) as caught:
            await ask(client, deadline_s=30.0)
        return caught.value.reason, time.monotonic() - started_s

    reason, seconds = with_endpoints(work, endpoint)
    assert reason == "rate_limit" and seconds < 5 and len(endpoint.bodies) == 1


def test_another_server_gets_the_request_while_one_asks_to_wait():
    busy, free = FakeEndpoint("busy", "429"), FakeEndpoint("free")
    busy.retry_after = "3600"

    async def work(client: EndpointClient, *_: FakeEndpoint) -> list[str]:
        return [(await ask(client)).text for _ in range(4)]

    assert with_endpoints(work, busy, free) == ["free"] * 4
    assert len(busy.bodies) <= 1


@pytest.mark.parametrize(
    ("headers", "text", "seconds"),
    [
        ({"retry-after": "7"}, "", 7.0),
        ({"retry-after-ms": "250"}, "", 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, "", 0.0),
        ({}, '[{"error": {"details": [{"retryDelay": "34s"}]}}]', 34.0),
        ({"retry-after": "soon"}, "", None),
        ({}, "slow down", None),
    ],
)
def test_waits_are_read_from_headers_and_from_geminis_body(headers, text, seconds):
    assert retry_after_s(headers, text) == seconds


def test_a_request_without_an_answer_ends_at_its_deadline():
    problem, _ = failure("hung", deadline_s=0.3)
    assert problem.reason == "deadline" and isinstance(problem, DeadlineExceeded)


def test_the_death_of_one_of_two_servers_loses_no_request_and_it_is_used_again_when_it_is_back():
    one, two = FakeEndpoint("x"), FakeEndpoint("x")
    one.delay_s = two.delay_s = 0.2

    async def work(client: EndpointClient, one: FakeEndpoint, two: FakeEndpoint) -> None:
        asked = [asyncio.create_task(ask(client, affinity=str(number))) for number in range(20)]
        async with asyncio.timeout(10):
            while not (one.running and two.running):
                await asyncio.sleep(0.01)
        await one.die()
        assert [reply.text for reply in await asyncio.gather(*asked)] == ["x"] * 20
        health = await client.health()
        assert [server.alive for server in health.servers] == [False, True] and health.alive
        await one.__aenter__()
        one.delay_s = two.delay_s = 0.0
        num_before = len(one.bodies)
        async with asyncio.timeout(10):
            while len(one.bodies) == num_before:
                await asyncio.gather(*(ask(client, affinity=str(number)) for number in range(20)))

    with_endpoints(work, one, two)


def test_requests_to_servers_that_stay_away_fail_before_the_deadline():
    async def work(client: EndpointClient, endpoint: FakeEndpoint) -> None:
        await endpoint.die()
        for _ in range(2):
            with pytest.raises(EndpointError, match="cannot be reached") as caught:
                await ask(client, deadline_s=30.0)
            assert caught.value.reason == "unreachable"

    started_s = time.monotonic()
    with_endpoints(work, FakeEndpoint())
    assert time.monotonic() - started_s < 10


def test_requests_with_the_same_affinity_go_to_the_same_server_and_others_are_spread():
    async def work(client: EndpointClient, *_: FakeEndpoint) -> list[set[str]]:
        return [{(await ask(client, affinity=str(name))).server for _ in range(3)} for name in range(16)]

    servers = with_endpoints(work, FakeEndpoint(), FakeEndpoint())
    assert all(len(of_one) == 1 for of_one in servers) and len(set.union(*servers)) == 2


def test_at_most_so_many_requests_are_in_flight():
    endpoint = FakeEndpoint()
    endpoint.delay_s = 0.02

    async def work(client: EndpointClient, _: FakeEndpoint) -> None:
        await asyncio.gather(*(ask(client) for _ in range(12)))

    with_endpoints(work, endpoint, max_in_flight=3)
    assert endpoint.most_running == 3


def test_the_models_that_are_served_are_listed_where_there_is_a_list():
    endpoint = FakeEndpoint()

    async def work(client: EndpointClient, _: FakeEndpoint) -> list[list[str]]:
        (with_list,) = (await client.models()).values()
        endpoint.models = None
        return [with_list, *(await client.models()).values()]

    assert with_endpoints(work, endpoint) == [[MODEL], []]


def test_the_key_reaches_the_endpoint(monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    endpoint = FakeEndpoint()
    endpoint.key = KEY
    assert with_endpoints(lambda client, _: ask(client), endpoint, key="ENDPOINT_KEY").text == "It is red."


def test_a_key_that_is_not_set_is_one_clear_error(monkeypatch):
    monkeypatch.delenv("ENDPOINT_KEY", raising=False)
    with pytest.raises(ValueError, match=r"engine\.api_key_env=ENDPOINT_KEY names an environment variable"):
        EndpointClient(["http://127.0.0.1:9/v1"], MODEL, "ENDPOINT_KEY")


@pytest.mark.parametrize("mode", [*ERRORS, *CHOICES, "html", "drop"])
def test_no_error_has_the_key_even_if_the_server_repeats_it(monkeypatch, caplog, mode):
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    if mode == "thinking only":
        return
    with caplog.at_level(logging.DEBUG):
        problem, _ = failure(mode, key="ENDPOINT_KEY")
    shown_to_the_user = "".join(traceback.format_exception(problem)) + repr(problem) + caplog.text
    assert KEY not in shown_to_the_user and KEY[:12] not in shown_to_the_user


def test_a_key_is_removed_before_an_error_is_shortened():
    text = f"{'x' * 290} {KEY} {'y' * 300}"
    assert "sk-" not in shown(text, lambda text: text.replace(KEY, "***"))


def test_a_client_does_not_show_its_key(monkeypatch):
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    client = EndpointClient(["http://127.0.0.1:9/v1"], MODEL, "ENDPOINT_KEY")
    assert KEY not in repr(client) and KEY not in str(client)
