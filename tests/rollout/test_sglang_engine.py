"""However servers fail, each request is answered exactly once, or fails in time with a clear error."""

import asyncio
import http.server
import math
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from async_tests import async_test, given, until
from fake_server import FakeServer

from model_port.safetensors_io import HfTensors
from rollout.engine import fleet, http as http_module, publishing, routing, sglang
from rollout.engine.fleet import Fleet
from rollout.engine.http import KEEPALIVE_S, HttpClient
from rollout.engine.protocol import DeadlineExceeded, EngineError, Request, RequestRejected, Sampling, VersionMismatch
from rollout.engine.publishing import ADAPTER_INFO, ADAPTER_SCHEME, WRITERS, WeightFiles
from rollout.engine.settings import Mixture, ServerState
from rollout.engine.sglang import SGLangEngine, SGLangSettings, generate_body
from rollout.engine.weight_root import fits

PATIENT = dict(probe_deadline_s=5.0, control_deadline_s=5.0, load_deadline_s=10.0)  # a busy machine stalls for seconds
QUICK = SGLangSettings("t", vocab_size=1000, backoff_s=0.01, owner_answers_s=1.0, probe_every_s=0.05, **PATIENT)
IMPATIENT = replace(QUICK, probe_deadline_s=0.3, control_deadline_s=1.0, load_deadline_s=1.0)  # for servers that hang
SHAPES = {"scalar": (), "row": (3,), "last": (700, 1031)}  # written in two parts


class Tensors:
    num_bytes = 8

    def __init__(self, **tensors: np.ndarray):
        self.by_name = tensors

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.by_name.items()

    def write(self, directory: Path) -> None:
        raise AssertionError("servers get a file for each tensor")


class NoWeights(Tensors):
    """Minimal weights, to test that files are written and removed."""

    def __init__(self):
        super().__init__(x=np.zeros(2, np.float32))


@asynccontextmanager
async def writing_weights(engine: SGLangEngine, version: int) -> AsyncIterator[None]:
    """Publishes weights; their write lasts until the block ends."""
    began, unblock = threading.Event(), threading.Event()

    class Blocked(NoWeights):
        def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
            began.set()
            assert unblock.wait(5)
            yield from super().tensors()

    publishing = asyncio.create_task(engine.publish(Blocked(), version))
    await asyncio.to_thread(began.wait)
    yield
    unblock.set()
    await publishing


def trained(value: float) -> Tensors:
    return Tensors(frozen=np.zeros(2, np.float32), trained=np.full(2, value, np.float32))


def adapter(value: float) -> Tensors:
    matrices = {"a": np.zeros(2, np.float32), "b": np.full(2, value, np.float32)}
    return Tensors(**{ADAPTER_INFO: np.zeros(2, np.uint8)}, **matrices)


def request(episode="e", deadline_s=5.0, version=None, num_tokens=4, on_tokens=None) -> Request:
    sampling = Sampling(num_tokens, stop_ids=(99,))
    return Request(np.arange(3, dtype=np.int32), (), sampling, episode, deadline_s, version, on_tokens=on_tokens)


async def fakes(stack, num_servers):
    return [await stack.enter_async_context(FakeServer()) for _ in range(num_servers)]


async def opened(stack, opening: Awaitable[SGLangEngine]) -> SGLangEngine:
    """Opens an engine that the test's stack closes."""
    engine = await opening
    stack.push_async_callback(engine.close)
    return engine


async def engine_of(stack, urls, settings=QUICK):
    engine = await opened(stack, SGLangEngine.connect(urls, settings))
    await until(lambda: all(server.up for server in engine.fleet.servers))
    return engine


def with_fake_servers(num_servers):
    """Makes a test whose first arguments are a function that opens engines, and fake servers."""

    async def start(stack):
        return partial(opened, stack), *await fakes(stack, num_servers)

    return given(num_servers + 1, start)


def with_servers(num_servers, settings=QUICK):
    """Makes a test whose first arguments are an engine and its fake servers."""

    async def start(stack):
        servers = await fakes(stack, num_servers)
        return await engine_of(stack, [server.url for server in servers], settings), *servers

    return given(num_servers + 1, start)


@pytest.mark.parametrize("stop_ids", [(99,), ()])
def test_requests_override_the_models_sampling_defaults(stop_ids):
    sent = generate_body(np.arange(3), (), Sampling(4, 0.7, 0.9, stop_ids))["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.9, -1)
    assert (sent["stop_token_ids"], sent["ignore_eos"]) == ([*stop_ids], not stop_ids)
    assert sent["no_stop_trim"] and not sent["skip_special_tokens"]  # the response has every sampled id


@with_servers(1)
async def test_a_response_becomes_a_generation(engine, server):
    found = await engine.generate(request())
    assert found.ids.tolist() == [5, 6, 7, 8]
    assert found.behavior_logp.tolist() == [-0.5] * 4
    assert (found.versions.tolist(), found.finish, found.num_cached_tokens) == ([0] * 4, "length", 1)
    assert server.version == "t/0"  # a new server got its label
    assert engine.version == 0


@with_fake_servers(2)
async def test_servers_join_and_leave_with_the_lines_of_a_file(open_engine, first, second, tmp_path, capsys):
    file = tmp_path / "servers"
    file.write_text(f"# of today\n{first.url}/\n")
    engine = await open_engine(SGLangEngine.follow(file, QUICK))
    await engine.publish(NoWeights(), 1)
    file.write_text("")  # a partially written file
    await asyncio.sleep(3 * QUICK.probe_every_s)
    assert engine.urls == [first.url]
    file.write_text(f"{second.url}\n")
    await until(lambda: engine.urls == [second.url] and engine.fleet.servers[0].up)
    found = await engine.generate(request(version=1))
    assert found.server == second.url and second.version == "t/1"
    assert f"{first.url} gets no more requests: {file} no longer lists it" in capsys.readouterr().err


@with_fake_servers(1)
async def test_an_invalid_server_list_is_ignored_and_reported_once(open_engine, server, tmp_path, capsys):
    file = tmp_path / "servers"
    file.write_text(f"{server.url}\n")
    engine, printed = await open_engine(SGLangEngine.follow(file, QUICK)), []
    reads, read = [], sglang.listed_urls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang, "listed_urls", lambda file: reads.append(file) or read(file))
        for line in ("http://me:secret@10.0.0.2:30000", "", "http://me:secret@10.0.0.2:30000"):
            file.write_text(f"{server.url}\n{line}\n")
            reads.clear()
            await until(lambda: len(reads) >= 5)
            assert engine.urls == [server.url]
            printed.append(capsys.readouterr().err)
    assert [text.count("the list of servers is not updated") for text in printed] == [1, 0, 1]
    assert "line 2 of " in printed[0] and "secret" not in "".join(printed)


@with_servers(1)
async def test_a_list_that_is_invalid_only_once_is_not_reported(engine, server, capsys):
    polls = []

    async def list_urls() -> list[str]:
        polls.append(server.url)
        if len(polls) % 2:
            raise ValueError("half written")
        return polls[:1]

    engine.fleet.watch("the list", list_urls)
    await until(lambda: len(polls) == 6)
    assert capsys.readouterr().err == "" and engine.urls == [server.url]


@with_servers(2)
async def test_an_engine_adopts_a_version_that_another_engine_published(engine, first, second):
    other = await SGLangEngine.connect(engine.urls, QUICK)
    await until(lambda: all(server.up for server in other.fleet.servers))
    await engine.publish(NoWeights(), 1)
    second.version = "t/0"  # simulates a server restart
    await other.adopt(1)
    await until(lambda: "weights of version 0" in other.fleet.servers[1].problem)
    assert [server.up for server in other.fleet.servers] == [True, False]
    found = await other.generate(request(version=1))
    assert found.server == first.url and set(found.versions.tolist()) == {1}
    second.version = "t/1"  # the publishing engine has updated it
    await until(lambda: other.fleet.servers[1].up)
    await engine.publish(NoWeights(), 2)  # before the other engine adopts it
    assert (await other.generate(request())).versions.tolist() == [2] * 4
    await other.close()


async def behind_a_router(stack, settings=QUICK):
    """Yields an engine with a router's URL, and this router with two servers."""
    router, *behind = await fakes(stack, 3)
    router.behind = behind
    return await engine_of(stack, [router.url], settings), router


@given(2, behind_a_router)
async def test_with_a_router_requests_use_it_and_weights_go_to_every_server(engine, router):
    assert engine.urls == [server.url for server in router.behind]
    await engine.publish(NoWeights(), 1)
    assert [server.version for server in router.behind] == ["t/1", "t/1"]
    found = [await engine.generate(request(f"{n // 4}", version=1)) for n in range(32)]
    assert {one.server for one in found} == {router.url} and router.requests["/generate"] == 32
    shares = [server.requests["/generate"] for server in router.behind]
    assert min(shares) >= 4 and [share % 4 for share in shares] == [0, 0]  # related requests use one server


@given(2, behind_a_router)
async def test_with_a_router_aborts_go_to_every_server(engine, router):
    for server in router.behind:
        server.delay_s = 30
    with pytest.raises(DeadlineExceeded, match=r"within the 0\.2 s"):
        await engine.generate(request(deadline_s=0.2))
    await until(lambda: all(server.requests["/abort_request"] == 1 for server in router.behind))
    sent = router.bodies["/generate"][0]["rid"]
    assert [server.bodies["/abort_request"] for server in router.behind] == [[{"rid": sent}]] * 2


@given(2, behind_a_router)
async def test_servers_join_and_leave_behind_a_router(engine, router):
    await engine.publish(NoWeights(), 1)
    gone = router.behind[0]
    async with FakeServer() as new:
        router.behind = [router.behind[1], new]
        await until(lambda: gone.url not in engine.urls and new.version == "t/1")


@given(2, behind_a_router)
async def test_a_router_must_be_the_only_url(engine, router, tmp_path):
    (tmp_path / "servers").write_text(router.url)
    with pytest.raises(ValueError, match=f"{router.url} is an sglang-router"):
        await SGLangEngine.connect([router.url, *engine.urls], QUICK)
    with pytest.raises(ValueError, match=f"{router.url}, which is an sglang-router"):
        await SGLangEngine.follow(tmp_path / "servers", QUICK)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# none\n", "lists no server"),
        ("10.0.0.2:30000\n", "line 1 of .* is not a URL"),
        ("\udcff\n", "servers is not text; write one URL per line"),
        *((f"http://{host}\n", "line 1 of .* is not a URL") for host in ("a:b", ":1", "a:99999")),
    ],
)
def test_a_file_without_servers_is_rejected(text, message, tmp_path):
    (tmp_path / "servers").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        asyncio.run(SGLangEngine.follow(tmp_path / "servers", QUICK))


SECRETS = ("http://me:hunter2@10.0.0.2:1", "https://hunter2@host", "me:hunter2@10.0.0.2:1", "http://hunter2@ho\u2100st")


@pytest.mark.parametrize("url", SECRETS)
@with_fake_servers(2)
async def test_a_password_in_a_url_is_rejected_and_not_printed(open_engine, router, server, url, tmp_path):
    file = tmp_path / "servers"
    file.write_text(f"# mine\nhttp://10.0.0.1:30000\n{url}\n")
    router.behind = [server, SimpleNamespace(url=url)]
    for connect, where in [
        (lambda: SGLangEngine.follow(file, QUICK), "line 3 of .*/servers"),
        (lambda: SGLangEngine.connect([router.url], QUICK), "server 2 behind http://127.*"),
        (lambda: SGLangEngine.connect([url], QUICK), "URL 1 of the engine"),
    ]:
        with pytest.raises(ValueError, match=rf"{where} (contains a user|is not a URL)") as refused:
            await connect()
        assert "hunter2" not in str(refused.value)


@with_servers(1)
async def test_on_tokens_receives_every_token(engine, server):
    chunks = []
    streamed = await engine.generate(request(on_tokens=chunks.append))
    assert chunks == [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    whole = await engine.generate(request())
    assert streamed.ids.tolist() == whole.ids.tolist() and streamed.finish == whole.finish
    assert streamed.behavior_logp.tolist() == whole.behavior_logp.tolist()


BAD = ["500", "429", "drop", "garbage", "endless", "wrong"]
WHOLE, STREAMED = ([*BAD, "redirect", "nested"], None), ([*BAD, "broken off", "pieces"], len)


@pytest.mark.parametrize(("mode", "on_tokens"), [(mode, call) for modes, call in (WHOLE, STREAMED) for mode in modes])
@with_servers(2)
async def test_a_bad_response_costs_only_a_retry(engine, bad, good, mode, on_tokens):
    bad.mode = mode
    found = await asyncio.gather(*(engine.generate(request(f"e{n}", on_tokens=on_tokens)) for n in range(8)))
    assert all(len(one.ids) == 4 and one.server == good.url for one in found)
    assert bad.requests["/generate"] >= 1
    assert bad.sent_bytes < 2**26 and bad.requests["/elsewhere"] == 0


@with_servers(2, replace(QUICK, probe_every_s=60))
async def test_an_unreachable_host_costs_only_a_retry(engine, gone, good):
    """The host drops all packets, so connections are not even refused."""
    port = int(gone.url.rpartition(":")[2])
    await gone.__aexit__()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_module, "CONNECT_DEADLINE_S", 0.1)
        listener, *fillers = (stack.enter_context(socket.socket()) for _ in range(4))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for filler in fillers:  # Linux drops connection requests beyond the backlog
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        found = await asyncio.gather(*(engine.generate(request(f"e{n}")) for n in range(4)))
    assert {one.server for one in found} == {good.url}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [("version", "9" * 5000, "ValueError"), ("model", 1.0, "another model than version 0")],
)
@with_servers(2)
async def test_a_server_that_returns_with_another_model_gets_no_requests(engine, swapped, good, name, value, problem):
    before, swapped.healthy = getattr(swapped, name), False
    await until(lambda: not engine.fleet.servers[0].up)
    setattr(swapped, name, value)
    swapped.healthy = True
    await until(lambda: problem in engine.fleet.servers[0].problem)
    found = [await engine.generate(request(f"e{n}")) for n in range(4)]
    assert {one.server for one in found} == {good.url}
    setattr(swapped, name, before)
    await until(lambda: engine.fleet.servers[0].up)


@with_servers(2)
async def test_a_publish_ejects_a_server_whose_model_differs_afterwards(engine, first, second):
    second.model = 1.0
    await engine.publish(NoWeights(), 1)
    assert [server.up for server in engine.fleet.servers] == [True, False]
    await until(lambda: second.requests["/update_weights_from_disk"] > 1)  # the load may have been incomplete


@with_servers(1)
async def test_the_first_publish_replaces_other_weights_that_a_server_was_started_with(engine, server):
    await engine.publish(NoWeights(), 0)
    assert server.weights == "t/0" and (await engine.generate(request(version=0))).server == server.url


@with_servers(1)
async def test_attempts_are_bounded_and_all_errors_are_reported(engine, server):
    server.mode = "500"
    with pytest.raises(EngineError, match=r"failed 4 times: .*answered 500: Internal Server Error"):
        await engine.generate(request())
    assert server.requests["/generate"] == 4


@with_servers(2)
async def test_a_rejected_request_is_not_retried(engine, first, second):
    first.mode = second.mode = "400"
    with pytest.raises(RequestRejected, match="too long"):
        await engine.generate(request())
    assert first.requests["/generate"] + second.requests["/generate"] == 1


@with_servers(1)
async def test_cancelling_a_caller_aborts_its_request_on_the_server(engine, server):
    server.delay_s = 30
    task = asyncio.create_task(engine.generate(request()))
    await until(lambda: server.running == 1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await until(lambda: server.requests["/abort_request"] == 1)


@with_servers(2, IMPATIENT)
async def test_a_hung_servers_requests_are_answered_once_by_another(engine, first, second, capsys):
    for server in (first, second):
        server.delay_s = 0.2
    tasks = [asyncio.create_task(engine.generate(request(f"e{n}"))) for n in range(8)]
    await until(lambda: first.running == second.running == 4)
    first.mode = "hung"
    found = await asyncio.gather(*tasks)
    assert [one.server for one in found].count(second.url) == 8
    health = await engine.health()
    assert [server.alive for server in health.servers] == [False, True]
    first.mode = "ok"
    await until(lambda: engine.fleet.servers[0].up)
    assert first.requests["/abort_request"] == 4  # aborts of requests that were retried elsewhere
    await engine.publish(NoWeights(), 1)
    ejected, back = capsys.readouterr().err.splitlines()
    assert ejected.startswith(f"{first.url} gets no requests until it recovers: {first.url}/health did not answer")
    assert back.startswith(f"{first.url} gets requests again, after ")


@with_fake_servers(1)
async def test_excess_requests_wait_without_blocking_probes(open_engine, server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_module, "MAX_CONNECTIONS", 4)
        engine = await open_engine(SGLangEngine.connect([server.url], QUICK))
        server.delay_s = 0.4
        found = await asyncio.gather(*(engine.generate(request(f"e{n}", deadline_s=30)) for n in range(40)))
        assert len(found) == server.requests["/generate"] == 40


@with_servers(1, replace(QUICK, probe_every_s=0.3))
async def test_one_missed_probe_does_not_eject_a_server(engine, server):
    state = engine.fleet.servers[0]
    server.fail_paths.add("/health")
    await until(lambda: state.missed_probes)
    assert state.up and state.missed_probes == 1
    server.fail_paths.clear()
    await until(lambda: not state.missed_probes)  # only consecutive ones count
    server.fail_paths.add("/health")
    await until(lambda: not state.up)
    assert state.missed_probes == 2


@with_servers(2, replace(QUICK, max_missed_probes=1000))
async def test_a_refused_connection_ejects_a_server_at_once(engine, gone, kept):
    await gone.__aexit__()
    await until(lambda: [server.up for server in engine.fleet.servers] == [False, True], 5)


@async_test
async def test_restarts_of_a_crashing_server_are_bounded(monkeypatch, capsys):
    starts = []

    async def start(settings: object, deadline_s: float) -> SimpleNamespace:
        starts.append(settings)
        await asyncio.sleep(0)
        assert len(starts) < 9
        return ended

    async def stop(grace_s: float) -> None:
        pass

    ended = SimpleNamespace(running=False, settings="s", exit_error=lambda: RuntimeError("it ended"), stop=stop)
    monkeypatch.setattr(fleet.Server, "start", start)
    with pytest.raises(EngineError, match=r"it ended \(gave up after 3 restarts\)"):
        await SGLangEngine.open([ServerState("http://127.0.0.1:9", ended)], replace(QUICK, max_restarts=3))
    assert starts == ["s"] * 3
    *restarts, given_up = capsys.readouterr().err.splitlines()
    assert restarts == [f"restart {number} of 3: it ended" for number in (1, 2, 3)]
    assert given_up.startswith("http://127.0.0.1:9 gets no more requests: it ended (gave up")


@with_servers(1)
async def test_a_server_loads_a_complete_adapter_and_nothing_else(engine, server):
    """The server merges adapters into its weights, so it needs both matrices even if only one has changed."""
    for version, weights in enumerate([trained(1), adapter(2), adapter(3), trained(4)], 1):
        await engine.publish(weights, version)
    assert server.read == ["frozen trained", "a adapter b", "a adapter b", "frozen trained"]
    paths = [body["model_path"] for body in server.bodies["/update_weights_from_disk"]]
    assert [path.startswith(ADAPTER_SCHEME) for path in paths] == [False, True, True, False]


@with_servers(2)
async def test_a_failed_adapter_merge_is_reported_and_keeps_the_servers_weights(engine, good, bad):
    bad.fail_paths = {"/update_weights_from_disk"}
    await engine.publish(adapter(1), 1)
    refused = engine.fleet.servers[1]
    assert refused.retired and "rollout.serve --model" in refused.problem
    assert (bad.version, bad.paused) == ("t/0", False) and good.version == "t/1"
    good.fail_paths = {"/update_weights_from_disk"}
    with pytest.raises(EngineError, match=r"no server is left|rollout\.serve --model"):
        await asyncio.wait_for(engine.publish(adapter(2), 2), 5)  # fails at once, because a retry cannot help


@with_servers(3)
async def test_episodes_are_spread_and_each_stays_on_its_server(engine, *servers):
    for server in servers:
        server.delay_s = 0.05
    found = await asyncio.gather(*(engine.generate(request(f"e{n}")) for n in range(6)))
    homes = [one.server for one in found]
    assert sorted(homes.count(server.url) for server in servers) == [2, 2, 2]
    again = await asyncio.gather(*(engine.generate(request(f"e{n}")) for n in range(6)))
    assert [one.server for one in again] == homes


@with_servers(2)
async def test_a_shared_prefix_stays_on_its_server_until_it_is_overloaded(engine, first, second):
    first.delay_s = second.delay_s = 0.2
    asked = [replace(request(f"e{n}"), affinity="group") for n in range(20)]
    found = await asyncio.gather(*(engine.generate(one) for one in asked))
    on_first = [one.server for one in found].count(first.url)
    assert (on_first, len(found) - on_first) == (14, 6)
    assert (await engine.generate(asked[0])).server == first.url


@with_servers(2)
async def test_the_latest_prefixes_are_remembered(engine, first, second):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MAX_HOMES", 2)
        for affinity in ("a", "b", "a", "c"):
            await engine.generate(replace(request(), affinity=affinity))
    assert list(engine._routing._homes) == ["a", "c"]


@with_servers(1)
async def test_without_servers_a_request_fails_with_the_reasons(engine, server):
    server.healthy = False
    await until(lambda: not engine.fleet.servers[0].up)
    with pytest.raises(EngineError, match=r"no server answers: .*answered 503"):
        await engine.generate(request(deadline_s=0.2))
    server.healthy = True
    assert len((await engine.generate(request())).ids) == 4  # waits for its return


def test_connecting_without_servers_is_one_error():
    with pytest.raises(EngineError, match=r"^no server answers: http://127\.0\.0\.1:9: .*reached: Connection refused;"):
        asyncio.run(SGLangEngine.connect(["http://127.0.0.1:9"], IMPATIENT))
    with pytest.raises(ValueError, match=r"engine\.urls is empty"):
        asyncio.run(SGLangEngine.connect([], QUICK))


@with_servers(2)
async def test_a_publish_pauses_loads_labels_and_resumes_all_servers(engine, *servers):
    engine.fleet.servers[0].num_restarts = 2
    await engine.publish(NoWeights(), 3)
    assert engine.fleet.servers[0].num_restarts == 0  # otherwise weeks of training would use them up
    for server in servers:
        assert server.version == "t/3"
        assert server.bodies["/pause_generation"] == [{"mode": "retract"}]
        assert server.requests["/flush_cache"] == server.requests["/continue_generation"] == 1
    (body,) = servers[0].bodies["/update_weights_from_disk"]
    assert list(Path(body["model_path"]).iterdir()) != []  # kept for returning servers
    assert (await engine.generate(request(version=3))).versions.tolist() == [3] * 4
    await engine.close()
    assert not Path(body["model_path"]).exists()


@with_servers(1)
async def test_servers_sample_while_weights_are_written(engine, server):
    async with writing_weights(engine, 3):
        found = await engine.generate(request(version=engine.version, deadline_s=1))
        assert found.versions.tolist() == [0] * 4 and not server.requests["/pause_generation"]
    assert (await engine.generate(request(version=3))).versions.tolist() == [3] * 4


@with_servers(3)
async def test_a_server_may_restart_or_disappear_while_weights_are_written(engine, kept, again, taken):
    async with writing_weights(engine, 3):
        again.version, taken.version = "default", "u/"
        await until(lambda: not any(server.up for server in engine.fleet.servers[1:]))
    await until(lambda: engine.fleet.servers[1].up and engine.fleet.servers[2].retired)
    assert [server.version for server in (kept, again, taken)] == ["t/3", "t/3", "u/"]
    assert [server.requests["/update_weights_from_disk"] for server in (kept, again, taken)] == [1, 1, 0]
    kept.healthy = again.healthy = False
    await until(lambda: not any(server.up for server in engine.fleet.servers))
    waiting = asyncio.create_task(engine.generate(request(version=3)))
    await asyncio.sleep(QUICK.probe_every_s)
    again.healthy = True
    assert (await waiting).server == again.url


@with_servers(2, replace(QUICK, probe_every_s=60))
async def test_a_server_loads_only_changed_tensors_unless_it_was_restarted(engine, kept, restarted):
    await engine.publish(trained(1), 1)
    await engine.publish(trained(2), 2)
    restarted.version = "default"  # not yet detected by a probe
    await engine.publish(trained(3), 3)
    await engine.publish(trained(3), 4)
    assert kept.read == ["frozen trained", "trained", "trained", "trained"]  # SGLang cannot load no tensor
    assert restarted.read == ["frozen trained", "trained", "frozen trained", "trained"]
    assert kept.version == restarted.version == "t/4"


@with_servers(3, IMPATIENT)
async def test_a_server_that_missed_a_publish_loads_all_tensors(engine, kept, late, failing):
    await engine.publish(trained(1), 1)
    late.healthy, failing.fail_paths = False, {"/update_weights_from_disk"}
    await until(lambda: not engine.fleet.servers[1].up)
    for version in (2, 3):
        await engine.publish(trained(version), version)
    late.healthy, failing.fail_paths = True, set()
    await until(lambda: all(server.up for server in engine.fleet.servers))
    assert kept.read == ["frozen trained", "trained", "trained"]
    assert late.read == failing.read == ["frozen trained"] * 2


@with_servers(2, IMPATIENT)
async def test_a_server_can_be_awaited_until_it_has_the_current_weights(engine, kept, late):
    late.healthy = False
    await until(lambda: not engine.fleet.servers[1].up)
    await engine.publish(trained(1), 1)
    assert (kept.version, late.version) == ("t/1", "t/0")
    with pytest.raises(EngineError, match=rf"^no server answers: {late.url}: {late.url}/health answered 503"):
        await engine.wait_for(late.url)
    late.healthy, late.load_s = True, 0.2
    await engine.wait_for(late.url)
    assert late.version == "t/1"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@async_test
async def test_the_files_have_the_bits_of_the_latest_tensors(tmp_path, dtype):
    random = np.random.default_rng(0)
    first = {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    second = first | {"last": first["last"].copy()}
    second["last"][-1, -1] += 1
    files = WeightFiles(tmp_path)
    for tensors in (first, second):
        await files.write(Tensors(**tensors))
    directory = files.directory(ServerState(""))
    read = {name: HfTensors(directory, f"{name}.safetensors").read(name) for name in SHAPES}
    sizes = {name: (directory / f"{name}.safetensors").stat().st_size for name in SHAPES}
    assert files.changed_frac == sizes["last"] / sum(sizes.values())
    assert {path.stem for path in (directory.parent / "changed").iterdir()} == {"last"}
    assert all(read[name].tobytes() == second[name].tobytes() and read[name].dtype == dtype for name in SHAPES)


@pytest.mark.parametrize("path", ["/pause_generation", "/flush_cache"])
@with_servers(2, IMPATIENT)
async def test_a_server_that_fails_a_publish_is_ejected_until_it_has_the_weights(engine, bad, good, path):
    bad.fail_paths = {path}
    await engine.publish(NoWeights(), 3)
    found = await asyncio.gather(*(engine.generate(request(f"e{n}", version=3)) for n in range(4)))
    assert {one.server for one in found} == {good.url}
    bad.fail_paths = set()
    await until(lambda: engine.fleet.servers[0].up)
    assert bad.version == "t/3"


@with_servers(2)
async def test_a_publish_does_not_pause_the_others_for_a_server_that_does_not_answer(engine, hung, good):
    hung.fail_paths = {"/model_info"}
    await engine.publish(NoWeights(), 3)
    assert (hung.requests["/pause_generation"], good.version) == (0, "t/3")
    assert [server.up for server in engine.fleet.servers] == [False, True]
    hung.fail_paths = set()
    await until(lambda: engine.fleet.servers[0].up)
    assert hung.version == "t/3"


@with_fake_servers(1)
async def test_a_fake_server_left_paused_by_a_killed_run_is_resumed(open_engine, server):
    server.paused = True
    engine = await open_engine(SGLangEngine.connect([server.url], IMPATIENT))
    assert len((await engine.generate(request())).ids) == 4


@with_servers(1, replace(IMPATIENT, load_deadline_s=10.0))
async def test_a_load_longer_than_the_probe_timeout_does_not_eject_a_server(engine, server):
    server.load_s, server.delay_s = 5 * IMPATIENT.probe_deadline_s, 0.1
    running = asyncio.create_task(engine.generate(request()))
    await until(lambda: server.running)
    publishing = asyncio.create_task(engine.publish(NoWeights(), 3))
    await until(lambda: server.paused)
    while server.paused:
        assert engine.fleet.servers[0].up
        await asyncio.sleep(0.01)
    assert server.version == "t/3" and server.requests["/continue_generation"] == 1
    await publishing
    assert len((await running).ids) == 4 and server.requests["/generate"] == 1


@with_servers(1)
async def test_a_publish_waits_for_a_returning_server(engine, server):
    server.healthy, server.fail_paths = False, {"/pause_generation"}
    publishing = asyncio.create_task(engine.publish(NoWeights(), 3))
    await until(lambda: not engine.fleet.servers[0].up)
    server.healthy, server.fail_paths = True, set()
    await publishing
    assert server.version == "t/3"


@pytest.mark.slow
@async_test
async def test_weights_of_a_killed_process_are_removed(tmp_path):
    writer = (
        "import asyncio, os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_sglang_engine import NoWeights, ServerState, WeightFiles\n"
        "files = WeightFiles(sys.argv[1]); asyncio.run(files.write(NoWeights()))\n"
        "print(files.directory(ServerState('')), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    killed = subprocess.run([sys.executable, "-c", writer, tmp_path, *paths], stdout=subprocess.PIPE, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir() and left.is_relative_to(tmp_path)
    first, second = WeightFiles(tmp_path), WeightFiles(tmp_path)
    await first.write(NoWeights())
    await second.write(NoWeights())
    assert all(files.directory(ServerState("")).is_dir() for files in (first, second)) and not left.exists()
    await first.close()
    await second.close()


@async_test
async def test_a_weights_directory_without_space_is_one_error(tmp_path):
    with pytest.raises(EngineError, match=r"do not fit into .*gone \(no directory\); .* engine\.weights_dir"):
        await WeightFiles(tmp_path / "gone").write(NoWeights())


@async_test
async def test_few_tensors_are_in_memory_at_a_time(tmp_path, monkeypatch):
    written, in_memory = [], []

    class Many(NoWeights):
        def tensors(self):
            for index in range(5 * WRITERS):
                in_memory.append(index - len(written))
                yield f"{index}", np.full(3, index)

    def write(root, name, tensor):
        time.sleep(0.01)
        written.append(name)

    monkeypatch.setattr(publishing, "_write", write)
    monkeypatch.setattr(publishing, "num_bytes", lambda _: 1)
    await WeightFiles(tmp_path).write(Many())
    assert set(written) == set(map(str, range(5 * WRITERS))) and 2 <= max(in_memory) <= WRITERS


@async_test
async def test_a_failed_write_of_weights_leaves_no_files(tmp_path, monkeypatch):
    files = WeightFiles(tmp_path)
    with pytest.raises(KeyError, match="int64"):
        await files.write(Tensors(first=np.zeros(3, np.float32), second=np.zeros(3, np.int64)))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(publishing, "_write", lambda *_: Path("/dev/full").write_text("a tensor"))
    with pytest.raises(EngineError, match=rf"into {tmp_path}/\S+ \(No space left on device\); .* engine\.weights_dir$"):
        await files.write(NoWeights())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("num_bytes", "fit"), [(8, True), (8 * 10**9, True), (9 * 10**9, False)])
def test_weights_fit_on_a_large_nearly_full_disk(num_bytes, fit, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**15, free=10**10))
    assert fits(tmp_path, num_bytes) == fit


@with_servers(1)
async def test_tokens_of_another_version_are_never_accepted(engine, server):
    await engine.publish(NoWeights(), 3)
    with pytest.raises(VersionMismatch, match=r"versions \[3\], expected version 2"):
        await engine.generate(request(version=2))


NOT_GIVEN = ["default", "v1.5 (final)", "t/2", "t/4", "t/"]  # the run t gave the server version 3
NO_PROBES = replace(QUICK, probe_every_s=60)


@pytest.mark.parametrize("label", NOT_GIVEN)
@with_servers(1, NO_PROBES)
async def test_a_response_with_an_unknown_label_ejects_its_server_until_a_publish(engine, server, label):
    await engine.publish(NoWeights(), 3)
    server.version = label  # a new process at the same address, or another run's label
    found = await engine.generate(request(version=3))
    assert (server.version, found.versions.tolist()) == ("t/3", [3] * 4)
    assert server.requests["/update_weights_from_disk"] == 2
    assert server.requests["/generate"] == 2  # no request in between


@pytest.mark.parametrize("label", ["default", "t/2"])
@with_servers(2)
async def test_an_unknown_label_is_detected_by_probes(engine, first, second, label):
    await engine.publish(NoWeights(), 3)
    first.version = label
    await until(lambda: first.requests["/update_weights_from_disk"] == 2 and engine.fleet.servers[0].up)
    assert first.version == "t/3" and second.requests["/update_weights_from_disk"] == 1


@pytest.mark.parametrize("label", ["default", "t/2"])
@given(2, behind_a_router)
async def test_with_a_router_a_restarted_server_gets_weights_before_requests(engine, router, label):
    await engine.publish(NoWeights(), 3)
    router.behind[0].version = label
    found = await asyncio.gather(*(engine.generate(request(f"e{n}", version=3)) for n in range(16)))
    assert all(one.versions.tolist() == [3] * 4 for one in found)
    assert [server.version for server in router.behind] == ["t/3", "t/3"]
    assert [server.requests["/update_weights_from_disk"] for server in router.behind] == [2, 1]


@given(2, lambda stack: behind_a_router(stack, NO_PROBES))
async def test_a_publish_includes_servers_that_only_the_router_sends_requests_to(engine, router):
    first, second = engine.fleet.servers
    first.up = second.up = False
    second.missed_probes = 1  # it would delay the others
    await engine.publish(NoWeights(), 1)
    assert [server.version for server in router.behind] == ["t/1", "t/0"]


def test_a_requests_oldest_version_is_the_minimum_over_servers():
    versions = {3: True, 5: True, 2: False, None: True}
    servers = [ServerState(f"http://{version}", up=up, version=version) for version, up in versions.items()]
    assert Fleet.oldest(servers) == 3 and Fleet.oldest(servers[1:]) == 5 and Fleet.oldest(servers[3:]) == 0


@with_servers(1)
async def test_a_non_publishing_host_waits_for_the_publisher(engine, server):
    """A non-publishing host may detect a server's restart first."""
    await engine.publish(NoWeights(), 3)
    other = await SGLangEngine.connect(engine.urls, QUICK)
    await other.adopt(3)
    server.version = "default"
    found = await other.generate(request(version=3))
    assert found.versions.tolist() == [3] * 4 and server.requests["/update_weights_from_disk"] == 2
    labels = [body["new_version"] for body in server.bodies["/update_weight_version"]]
    assert labels == ["t/0"]  # since the start of the run
    await other.close()


OTHER = replace(QUICK, run="u")


def connected(server, settings=OTHER, progress=None):
    return SGLangEngine.connect([server.url], settings, ([] if progress is None else progress).append)


@with_servers(1)
async def test_a_server_of_another_live_run_is_rejected_and_unchanged(engine, server):
    await engine.publish(NoWeights(), 3)
    server.delay_s = 0.3
    running = [asyncio.create_task(engine.generate(request(f"e{n}", version=3))) for n in range(4)]
    await until(lambda: server.running == 4)
    refused = rf"{server.url} cannot have weights of two runs: another live run, t, publishes to it"
    with pytest.raises(EngineError, match=refused):
        await connected(server)
    assert "t/?u" in [body["new_version"] for body in server.bodies["/update_weight_version"]]
    assert all(one.versions.tolist() == [3] * 4 for one in await asyncio.gather(*running))
    assert server.version == "t/3" and server.requests["/generate"] == 4
    assert server.requests["/update_weights_from_disk"] == 1 and server.requests["/abort_request"] == 0


@with_servers(1)
async def test_a_run_is_alive_while_it_writes_weights(engine, server):
    async with writing_weights(engine, 3):
        with pytest.raises(EngineError, match="t, publishes to it"):
            await connected(server)
    assert server.version == "t/3" and engine.fleet.servers[0].up


@with_servers(2)
async def test_a_run_is_alive_while_one_of_its_servers_loads_weights(engine, restarted, server):
    await engine.publish(NoWeights(), 3)
    restarted.load_s, restarted.version = 4 * QUICK.owner_answers_s, "default"
    await until(lambda: restarted.paused)
    with pytest.raises(EngineError, match="t, publishes to it"):
        await connected(server)
    assert restarted.paused and server.version == "t/3"


@with_fake_servers(1)
async def test_a_run_is_alive_between_claim_and_first_publish(open_engine, server):
    server.version = "v/8"  # left by a dead run
    engine = await open_engine(connected(server, QUICK))
    with pytest.raises(EngineError, match="t, publishes to it"):
        await connected(server)
    await engine.publish(NoWeights(), 3)
    assert server.version == "t/3"


@with_fake_servers(1)
async def test_a_dead_runs_server_is_taken_over_and_samples_after_a_publish(open_engine, server):
    server.version, progress = "t/12", []
    engine = await open_engine(connected(server, replace(NO_PROBES, run="u"), progress))
    assert "has weights of another run, t: waiting up to" in progress[0]
    assert server.version == "u/" and not engine.fleet.servers[0].up
    with pytest.raises(EngineError, match="nothing is published; publish, or restart"):
        await engine.generate(request(deadline_s=0.1))
    await engine.publish(NoWeights(), 1)
    assert (await engine.generate(request(version=1))).versions.tolist() == [1] * 4


@with_fake_servers(1)
async def test_a_run_reclaims_its_own_servers_at_once(open_engine, server):
    server.version = "t/12"
    engine = await open_engine(connected(server, replace(QUICK, owner_answers_s=60)))
    assert engine.version == 12 and server.requests["/update_weight_version"] == 0
    await engine.publish(NoWeights(), 10)  # the version of its newest checkpoint
    assert (await engine.generate(request(version=10))).versions.tolist() == [10] * 4


@pytest.mark.parametrize("settings", [QUICK, NO_PROBES])
@with_fake_servers(1)
async def test_a_run_ends_if_its_server_is_taken_over(open_engine, server, settings):
    engine = await open_engine(connected(server, settings))
    await engine.publish(NoWeights(), 3)
    other = await open_engine(connected(server, replace(OTHER, take_over=True)))
    await other.publish(NoWeights(), 1)
    with pytest.raises(EngineError, match=r"no server is left: .*taken over by another run, u, and"):
        await engine.generate(request())
    with pytest.raises(EngineError, match=r"no server took the weights of version 4: .*taken over by"):
        await engine.publish(NoWeights(), 4)
    assert server.version == "u/1" and server.requests["/update_weights_from_disk"] == 2
    assert (await other.generate(request(version=1))).versions.tolist() == [1] * 4


@with_servers(2, NO_PROBES)
async def test_a_publish_does_not_undo_an_unnoticed_takeover(engine, server, kept):
    await engine.publish(NoWeights(), 3)
    server.version = "u/"
    await engine.publish(NoWeights(), 4)
    assert (server.version, kept.version) == ("u/", "t/4")
    found = [await engine.generate(request(f"e{n}", version=4)) for n in range(4)]
    assert {one.server for one in found} == {kept.url}


@with_fake_servers(1)
async def test_only_one_of_two_runs_takes_over_a_dead_runs_server(open_engine, server):
    server.version = "gone/12"
    started = await asyncio.gather(connected(server, QUICK), connected(server), return_exceptions=True)
    engines = [one for one in started if isinstance(one, SGLangEngine)]
    (refused,) = [one for one in started if isinstance(one, EngineError)]
    assert len(engines) == 1 and "asks for it too" in str(refused)
    await engines[0].publish(NoWeights(), 1)
    assert server.version == f"{engines[0].settings.run}/1"
    await engines[0].close()


@with_servers(1)
async def test_a_newly_listed_server_of_another_live_run_is_unchanged(engine, theirs, tmp_path):
    file = tmp_path / "servers"
    await engine.publish(NoWeights(), 3)
    async with FakeServer() as own:
        file.write_text(own.url)
        other = await SGLangEngine.follow(file, OTHER)
        await other.publish(NoWeights(), 1)
        file.write_text(f"{own.url}\n{theirs.url}")
        await until(lambda: other.fleet.servers[-1].retired)
        assert "another live run, t, publishes to it" in other.fleet.servers[-1].problem
        await other.publish(NoWeights(), 2)
        assert (own.version, theirs.version) == ("u/2", "t/3")
        await other.close()


@pytest.mark.parametrize("label", ["default", "v1.5", "u/7"])
@with_fake_servers(1)
async def test_a_sampling_only_engine_sets_no_label_and_keeps_its_version(open_engine, server, label):
    server.version = label
    engine = await open_engine(connected(server, replace(QUICK, run="")))
    versions = (await engine.generate(request())).versions.tolist()
    assert versions == [7 if label == "u/7" else 0] * 4 and server.version == label
    server.version = "u/8"
    with pytest.raises(EngineError, match=r"the weights u/8|weights of version 8"):
        await engine.generate(request(deadline_s=0.5))
    assert server.requests["/update_weight_version"] == 0


@with_servers(1, replace(QUICK, mixture=Mixture(2, 8, 2)))
async def test_experts_are_requested_unless_the_response_is_streamed(engine, server):
    await engine.generate(request())
    await engine.generate(request(on_tokens=lambda ids: None))
    assert [body.get("return_routed_experts") for body in server.bodies["/generate"]] == [True, None]


@pytest.mark.slow
@async_test
async def test_a_connection_close_to_its_keepalive_timeout_is_not_reused():
    class Server(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept
        answered_s = math.inf

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if time.monotonic() > self.answered_s + KEEPALIVE_S:
                self.close_connection = True  # already closed when the request arrived
                return
            self.answered_s = time.monotonic()
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with HttpClient() as client:
            for _ in range(2):
                assert await client.post(f"http://127.0.0.1:{server.server_port}/", {}, 5) == {}
                await asyncio.sleep(KEEPALIVE_S + 0.1)
        server.shutdown()


@with_fake_servers(2)
async def test_servers_of_different_versions_are_not_mixed(open_engine, first, second):
    first.version, second.version = "t/4", "t/5"
    engine = await open_engine(SGLangEngine.connect([first.url, second.url], QUICK))
    await until(lambda: any("another server" in s.problem for s in engine.fleet.servers))
    assert sum(server.up for server in engine.fleet.servers) == 1
