"""The client of OpenAI-compatible endpoints: failures have reasons, only transient errors are retried, and the key is
sent only to the endpoint.
"""

import asyncio
import logging
import socket
import time
import traceback
import tracemalloc
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from async_tests import async_test, until
from fake_endpoint import CHOICES, ERRORS, MODEL, ODD, asking

from rollout.endpoint import client as client_module
from rollout.endpoint.answers import joined, read_completion
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import EndpointError, RateLimited, quoted, retry_after_s
from rollout.engine.protocol import DeadlineExceeded

MESSAGES = [{"role": "user", "content": "What colour is it?"}]
KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name, seconds in {"BACKOFF_S": 0.01, "PROBE_EVERY_S": 0.1, "POLL_S": 0.01, "GIVE_UP_S": 0.5}.items():
        monkeypatch.setattr(client_module, name, seconds)
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for servers on this machine


async def ask(client: EndpointClient, **changed: Any) -> Any:
    return await client.complete(MESSAGES, **{"max_tokens": 9, "temperature": 0.0, "deadline_s": 10.0} | changed)


async def failure(client: EndpointClient, **changed: Any) -> EndpointError:
    with pytest.raises(EndpointError) as caught:
        await ask(client, **changed)
    return caught.value


REASON_OF = {
    **{mode: "context" for mode in ERRORS if "context" in mode or mode.startswith("sglang") or "long" in mode},
    **{mode: "pictures" for mode in ERRORS if "pictures" in mode},
    **dict.fromkeys((*(m for m in ERRORS if "filter" in m), "refusal", "filtered"), "content_filter"),
    **{mode: "content_filter" for mode in CHOICES if mode.startswith("gemini")},
    **dict.fromkeys(("openai key", "gemini key", "forbidden"), "key"),
    **{mode: "model" for mode in ERRORS if mode.endswith(" model")},
    **dict.fromkeys(("empty", "no content", "other finish", "no choices"), "empty"),
    **dict.fromkeys(("no such path", "no limit", "rejected", "redirect", "parsed calls"), "rejected"),
    "quota": "rate_limit",
}


RETRIED = ("500", "503", "abort", "error", "html", "broken json", "drop")
OUTAGES = ("503", "drop")  # probes determine the time of the next attempt


@pytest.mark.parametrize("mode", [*REASON_OF, *RETRIED])
@asking(key="ENDPOINT_KEY")
async def test_a_failure_has_its_reason_not_the_key_and_is_retried_if_transient(client, endpoint, caplog, capsys, mode):
    endpoint.modes = [mode]
    with caplog.at_level(logging.DEBUG):
        problem = await failure(client)
    assert problem.reason == REASON_OF.get(mode, "unreachable")
    if mode not in OUTAGES:
        assert len(endpoint.bodies) == (client_module.MAX_ATTEMPTS if mode in RETRIED else 1 + (mode == "no limit"))
    said = capsys.readouterr().err
    assert ("it gets no requests until it answers again" in said) == (mode in OUTAGES)
    shown = "".join(traceback.format_exception(problem)) + repr(problem) + caplog.text + said
    assert KEY not in shown and KEY[:12] not in shown  # even if the server's error contains the key


@pytest.mark.parametrize("on_text", [None, lambda text: None])
@asking()
async def test_a_malformed_body_is_a_failure_or_text(client, endpoint, monkeypatch, on_text):
    monkeypatch.setattr(client_module, "MAX_ATTEMPTS", 1)
    for mode in ODD:
        endpoint.modes = [mode]
        with suppress(EndpointError):
            assert isinstance((await ask(client, on_text=on_text)).text, str)


@pytest.mark.parametrize("on_text", [None, lambda text: None])
@pytest.mark.parametrize("mode", ["endless", "bomb"])
@asking()
async def test_endless_and_compressed_bodies_use_bounded_memory(client, endpoint, monkeypatch, mode, on_text):
    monkeypatch.setattr(client_module, "MAX_BODY_BYTES", 2**20)
    endpoint.modes = [mode]
    tracemalloc.start()
    problem = await failure(client, on_text=on_text, deadline_s=5.0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert problem.reason == "unreachable" and most_bytes < 2**23


@asking()
async def test_a_malformed_model_list_is_a_failure_or_has_names(client, endpoint):
    for mode in ODD:
        endpoint.modes = [mode]
        await client.health()
        with suppress(EndpointError):
            assert all(isinstance(name, str) for name in (await client.models())[endpoint.url])


@pytest.mark.parametrize("mode", ["500", "503", "drop", "html", "abort", "429", "408", "409", "425"])
@asking()
async def test_a_transient_failure_loses_no_sample(client, endpoint, mode):
    endpoint.modes = [mode, mode, "ok"]
    assert (await ask(client)).text == "It is red." and len(endpoint.bodies) == 3


@asking()
async def test_a_reply_has_text_finish_and_the_token_counts_of_the_endpoint(client, endpoint):
    reply = await ask(client)
    assert (reply.text, reply.finish) == ("It is red.", "stop")
    assert (reply.num_prompt_tokens, reply.num_sampled_tokens) == (70, 7)
    assert reply.latency_s > 0 and reply.server == endpoint.url
    endpoint.modes = ["thinking only"]  # truncated hidden thinking is not a failure
    reply = await ask(client)
    assert (reply.text, reply.finish) == ("", "length")


@pytest.mark.parametrize("count", [-1, 10**400, 7.0, True, "7", None])
def test_invalid_token_counts_are_ignored(count):
    usage = {"prompt_tokens": count, "completion_tokens": count}
    completion = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    reply = read_completion(completion, "http://a/v1", str)
    assert (reply.num_prompt_tokens, reply.num_sampled_tokens) == (0, 0)


@asking()
async def test_a_reply_with_any_characters_can_be_sent_back(client, endpoint):
    endpoint.say = "red \ud800 \0 😀"
    texts: list[str] = []
    reply = (await ask(client)).text
    assert reply == "red ? \0 😀" and (await ask(client, on_text=texts.append)).text == texts[-1] == f"{reply} "
    await client.complete([{"role": "assistant", "content": reply}], max_tokens=9, temperature=0.0, deadline_s=10.0)


@asking()
async def test_separated_thinking_is_put_back_before_the_reply(client, endpoint):
    endpoint.modes, texts = ["reasoning"], []
    whole, streamed = (await ask(client)).text, (await ask(client, on_text=texts.append)).text
    assert whole == "<think>\nIt is red.\n</think>\n<answer>A</answer>"
    assert streamed.split() == whole.split() and texts[0].startswith("<think>\nIt")
    assert joined("<think>\nWhere?</think>a call\n<think>\nIt is red.</think>", "A") == "<think>\nIt is red.</think>\nA"


@asking()
async def test_a_request_has_sampling_parameters_and_no_tools(client, endpoint):
    sampling = {"temperature": 0.3, "top_p": 0.9, "seed": 5, "stop": ["x"]}
    await ask(client, **sampling)
    assert endpoint.bodies == [{"model": MODEL, "messages": MESSAGES, "max_tokens": 9} | sampling]


@pytest.mark.parametrize("modes", [["ok"], ["broken off", "ok"], ["no end", "ok"], ["failing stream", "ok"]])
@asking()
async def test_a_stream_reports_partial_text_and_is_retried_if_it_breaks(client, endpoint, modes):
    texts: list[str] = []
    endpoint.modes = [*modes]
    reply = await ask(client, on_text=texts.append)
    assert texts[-3:] == ["It ", "It is ", "It is red. "] and len(endpoint.bodies) == len(modes)
    assert (reply.text, reply.finish, reply.num_sampled_tokens) == ("It is red. ", "stop", 7)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [("no end", "ended a stream before the end of the reply"), ("no stream", "sent no stream; it must support stream")],
)
@asking()
async def test_an_incomplete_stream_is_not_blamed_on_a_finish_reason_that_was_never_sent(
    client, endpoint, mode, problem, monkeypatch
):
    monkeypatch.setattr(client_module, "BACKOFF_S", 0.0)
    endpoint.modes = [mode] * client_module.MAX_ATTEMPTS
    assert problem in str(await failure(client, on_text=lambda text: None))


@asking()
async def test_an_error_in_a_stream_has_its_reason(client, endpoint):
    def fail(text):
        raise TimeoutError("my display")

    endpoint.modes = ["stream error", "ok"]
    assert (await failure(client, on_text=lambda text: None)).reason == "context"
    with pytest.raises(TimeoutError, match="my display"):  # not the request's deadline
        await ask(client, on_text=fail)


@pytest.mark.parametrize("mode", ["429", "overloaded"])
@asking()
async def test_every_request_respects_retry_after(client, endpoint, mode):
    endpoint.modes, endpoint.retry_after, started_s = [mode, "ok"], "0.4", time.monotonic()
    first = asyncio.create_task(ask(client))
    await asyncio.sleep(0.1)
    await asyncio.gather(first, ask(client))
    assert time.monotonic() - started_s >= 0.4 and len(endpoint.bodies) == 3


@pytest.mark.parametrize("check", [None, EndpointClient.health])
@asking()
async def test_a_retry_after_beyond_the_deadline_fails_at_once_also_after_a_health_check(client, endpoint, check):
    endpoint.modes, endpoint.retry_after, started_s = ["429"], "3600", time.monotonic()
    for _ in range(2):  # also for a request that has not been sent yet
        assert (await failure(client, deadline_s=10.0)).reason == "rate_limit"
        assert check is None or (await check(client)).alive
    assert time.monotonic() - started_s < 5 and len(endpoint.bodies) == 1


@asking()
async def test_a_server_that_asks_for_a_wait_is_not_down(client, endpoint):
    """Of concurrent requests, one may lose its connection and the next one get HTTP 429."""
    (server,) = client._servers
    server.mark_down(EndpointError("the connection is lost"))
    server.limit(RateLimited("slow down", 3600.0))
    started_s = time.monotonic()
    assert (await failure(client)).reason == "rate_limit" and time.monotonic() - started_s < 5


def test_waits_after_rate_limits_are_bounded_and_never_shortened():
    endpoint = client_module._Endpoint("http://127.0.0.1:9/v1", None)
    for _ in range(2000):
        endpoint.ready_s = 0.0  # the wait is over
        endpoint.limit(RateLimited("slow down"))
    assert endpoint.ready_s - time.monotonic() <= client_module.MAX_BACKOFF_S
    for wait_s in (3600.0, 1.0):
        endpoint.limit(RateLimited("slow down", wait_s))
    assert endpoint.ready_s - time.monotonic() > 3000
    endpoint.mark_down(EndpointError("the connection is lost"))
    assert endpoint.ready_s == 0.0  # it is probed now


@asking()
async def test_all_concurrent_requests_are_resent_with_the_new_limit_parameter(client, endpoint):
    endpoint.modes, endpoint.delay_s = ["other limit"], 0.05
    replies = await asyncio.gather(*(ask(client) for _ in range(3)))
    assert [reply.text for reply in replies] == ["It is red."] * 3 and len(endpoint.bodies) == 6
    await ask(client)  # with the new one at once
    assert endpoint.bodies[-1]["max_completion_tokens"] == 9 and len(endpoint.bodies) == 7


@asking()
async def test_a_retry_after_of_zero_still_backs_off(client, endpoint):
    """Gateways and servers with a slow clock send such values."""
    endpoint.modes, endpoint.retry_after = ["429"], "0"
    assert (await failure(client, deadline_s=0.5)).reason == "rate_limit" and len(endpoint.bodies) < 10


@asking()
async def test_rate_limits_of_concurrent_requests_double_the_wait_once(client, endpoint):
    endpoint.modes, endpoint.retry_after, endpoint.delay_s = [*["429"] * 40, "ok"], "0", 0.1
    started_s = time.monotonic()
    await asyncio.gather(*(ask(client) for _ in range(40)))
    assert time.monotonic() - started_s < 5 and len(endpoint.bodies) == 80
    assert client._servers[0].num_limited == 0  # the next wait is short again


@pytest.mark.parametrize(("mode", "most"), [("429", 1), ("500", 4)])
@asking(2)
async def test_requests_move_to_another_server_after_a_failure(client, busy, free, mode, most):
    busy.modes, busy.retry_after = [mode], "3600"
    assert {(await ask(client)).server for _ in range(4)} == {free.url}
    assert len(busy.bodies) <= most


@pytest.mark.parametrize(
    ("headers", "text", "seconds"),
    [
        ({"retry-after": "7"}, "", 7.0),
        ({"retry-after-ms": "250"}, "", 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, "", 0.0),
        ({}, '[{"error": {"details": [{"retryDelay": "34s"}]}}]', 34.0),
        ({"retry-after": "soon"}, "", None),
        ({"retry-after": "nan"}, "", None),  # would otherwise mean no wait
        ({"retry-after-ms": "nan", "retry-after": "7"}, "", 7.0),
        ({"retry-after": "1 Jan 99999 9999999999907:28:00"}, "", None),
        ({"retry-after": "inf"}, "", 86_400.0),
        ({}, f'"retryDelay": "{"9" * 400}s"', 86_400.0),
        ({}, "slow down", None),
    ],
)
def test_retry_after_is_read_from_headers_and_geminis_body(headers, text, seconds):
    assert retry_after_s(headers, text) == seconds


@asking()
async def test_a_request_without_an_answer_ends_at_its_deadline(client, endpoint):
    endpoint.modes = ["hung"]
    problem = await failure(client, deadline_s=0.3)
    assert problem.reason == "deadline" and isinstance(problem, DeadlineExceeded)
    endpoint.modes = ["500", "hung"]
    assert (await failure(client, deadline_s=1.0)).reason == "unreachable"  # names the failure before the deadline


@asking(2)
async def test_a_dead_server_loses_no_request_and_is_used_again_after_its_return(client, one, two):
    one.delay_s = two.delay_s = 0.2
    asked = [asyncio.create_task(ask(client, affinity=str(number))) for number in range(20)]
    await until(lambda: one.running and two.running)
    await one.die()
    assert [reply.text for reply in await asyncio.gather(*asked)] == ["It is red."] * 20
    health = await client.health()
    assert [server.alive for server in health.servers] == [False, True] and health.alive
    await one.__aenter__()
    one.delay_s = two.delay_s = 0.0
    num_before = len(one.bodies)
    async with asyncio.timeout(10):
        while len(one.bodies) == num_before:
            await asyncio.gather(*(ask(client, affinity=str(number)) for number in range(20)))


@asking()
async def test_requests_to_dead_servers_fail_before_the_deadline(client, endpoint):
    await endpoint.die()
    started_s = time.monotonic()
    for _ in range(2):
        problem = await failure(client, deadline_s=30.0)
        assert problem.reason == "unreachable" and "cannot be reached" in str(problem)
    assert time.monotonic() - started_s < 10


@async_test
async def test_requests_to_hung_servers_fail_despite_running_probes(monkeypatch):
    monkeypatch.setattr(client_module, "PROBE_DEADLINE_S", 0.3)
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        client = EndpointClient([f"http://127.0.0.1:{each.getsockname()[1]}/v1" for each in listeners], MODEL)
        for number, server in enumerate(client._servers):
            server.mark_down(EndpointError("it hangs"))
            server.ready_s = time.monotonic() + number * 0.2
        assert (await failure(client, deadline_s=10.0)).reason == "unreachable"
        assert len(client._probes) <= 2  # one per server
        await client.close()


@asking()
async def test_a_request_after_an_idle_outage_is_answered(client, endpoint):
    await endpoint.die()
    assert (await failure(client)).reason == "unreachable"
    await endpoint.__aenter__()
    await asyncio.sleep(2 * client_module.PROBE_EVERY_S)
    assert (await ask(client)).text == "It is red."


@asking()
async def test_requests_wait_for_a_restarting_server(client, endpoint):
    patient = EndpointClient(client.urls, MODEL, give_up_s=lambda: 30.0)
    await endpoint.die()
    asked = asyncio.create_task(ask(patient, deadline_s=30.0))
    await asyncio.sleep(2 * client_module.GIVE_UP_S)
    assert not asked.done()
    await endpoint.__aenter__()
    assert (await asked).text == "It is red."
    await patient.close()


@asking(2)
async def test_requests_with_the_same_affinity_go_to_the_same_server_and_others_are_spread(client, *both):
    servers = [{(await ask(client, affinity=str(name))).server for _ in range(3)} for name in range(16)]
    assert all(len(of_one) == 1 for of_one in servers) and len(set.union(*servers)) == 2
    for server in both:
        server.delay_s = 0.5
    assert len({reply.server for reply in await asyncio.gather(*(ask(client, affinity="x") for _ in range(20)))}) == 2
    assert len({reply.server for reply in await asyncio.gather(*(ask(client) for _ in range(2)))}) == 2


@asking(2)
async def test_a_server_gets_no_more_requests_while_another_one_is_down(client, one, two):
    two.delay_s = 0.5
    await one.die()
    await asyncio.gather(*(ask(client) for _ in range(2 * client_module.MAX_IN_FLIGHT)))
    assert two.most_running == client_module.MAX_IN_FLIGHT


@asking(key="ENDPOINT_KEY")
async def test_the_key_is_sent_and_never_shown(client, endpoint):
    endpoint.key = KEY
    assert (await ask(client)).text == "It is red."
    assert KEY not in repr(client) and KEY not in str(client)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "names an environment variable"),
        (f"{KEY}\nsecond", "names holds no key"),
        (f"{KEY}é", "names holds no key"),
    ],
)
def test_a_missing_key_or_one_that_no_header_can_have_is_an_error_without_the_key(monkeypatch, key, problem):
    monkeypatch.setenv("ENDPOINT_KEY", key) if key else monkeypatch.delenv("ENDPOINT_KEY")
    with pytest.raises(ValueError, match=rf"engine\.api_key_env=ENDPOINT_KEY {problem}") as refused:
        EndpointClient(["http://127.0.0.1:9/v1"], MODEL, "ENDPOINT_KEY")
    assert KEY not in str(refused.value)


def test_a_key_is_removed_before_an_error_is_shortened():
    text = f"{'x' * 290} {KEY} {'y' * 300}"
    assert "sk-" not in quoted(text, lambda text: text.replace(KEY, "***"))
