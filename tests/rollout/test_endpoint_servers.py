"""Endpoint servers that run on this machine: they use separate GPUs, exit with their owner, and restart."""

import asyncio
import json
import os
import shlex
import signal
import sys
import urllib.request
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from async_tests import async_test, until

from rollout.endpoint import servers
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.servers import endpoint_settings, start_endpoints
from rollout.server import ServerSettings, VllmSettings

FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> Path:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def settings_of(program, **changed):
    options = {"device": "cuda", "dtype": "bfloat16", "context_length": 4096, "gpus": [], "num_servers": 1} | changed
    return endpoint_settings(program, Path("/models/m"), "org/m", **options)


def test_servers_split_the_gpus_and_keep_default_sampling():
    one, two = settings_of("vllm", gpus=[("0",), ("1",)])
    command = " ".join(one.command())
    for option in ("--generation-config vllm", "--max-model-len 4096", "--dtype bfloat16"):
        assert option in command
    assert (one.gpus, two.gpus) == (("0",), ("1",))
    (pair,) = settings_of("sglang", gpus=[("2", "3")])
    assert isinstance(pair, ServerSettings) and (pair.gpus, pair.tensor_parallel) == (("2", "3"), 2)
    own = ("--served-model-name", "org/m", "--sampling-defaults", "openai", "--mm-process-config", "{}")
    assert (pair.device, pair.dtype, pair.extra_args) == ("cuda", "bfloat16", own)
    assert [each.device for each in settings_of("sglang", device="cpu", num_servers=3)] == 3 * ["cpu"]


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_servers_for_the_released_protocol_have_its_context(program):
    (settings,) = settings_of(program, as_released=True)
    assert isinstance(settings, VllmSettings | ServerSettings) and settings.context_length == 65_536
    released = ("--generation-config auto", "--max-num-batched-tokens 131072", '--limit-mm-per-prompt {"video":1,')
    assert program == "sglang" or all(option in " ".join(settings.command()) for option in released)


def test_a_missing_program_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match="vllm is not on the PATH") as caught:
        settings_of("vllm")[0].settled()
    command = shlex.split(str(caught.value).rpartition(": ")[2])
    assert command[:3] == ["vllm", "serve", "/models/m"] and "org/m" in command


@async_test
async def test_no_server_starts_if_one_is_invalid(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(servers, "_start", lambda *_: pytest.fail("started"))
    with pytest.raises(RuntimeError, match="vllm is not on the PATH"):
        async with AsyncExitStack() as stack:
            await start_endpoints(settings_of("vllm", gpus=[("0",), ("1",)]), stack)


def pid_of(url: str) -> int:
    return json.loads(urllib.request.urlopen(f"{url}/models").read())["pid"]


@async_test
async def test_a_server_restarts_and_never_outlives_its_owner(vllm, capsys):
    async with AsyncExitStack() as stack:
        (url,), _ = await start_endpoints(settings_of("vllm", gpus=[("5",)]), stack)
        client = EndpointClient([url], "org/m")
        stack.push_async_callback(client.close)
        assert await client.models() == {url: ["org/m"]}
        first = await asyncio.to_thread(pid_of, url)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not (await client.health()).alive:
                await asyncio.sleep(0.1)
        second = await asyncio.to_thread(pid_of, url)
    assert first != second and url.endswith("/v1") and "restarting it" in capsys.readouterr().err
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))


@pytest.mark.parametrize(("most", "reason"), [(5, "vllm is not on the PATH"), (0, "after 0 restarts")])
@async_test
async def test_a_server_that_is_not_restarted_is_reported(vllm, monkeypatch, capsys, most, reason):
    monkeypatch.setattr(servers, "MAX_RESTARTS", most)
    async with AsyncExitStack() as stack:
        urls, give_up_s = await start_endpoints(settings_of("vllm", num_servers=2), stack)
        vllm.unlink()
        for url in urls:
            assert give_up_s() == servers.START_DEADLINE_S
            others = len(asyncio.all_tasks()) - 1
            os.kill(await asyncio.to_thread(pid_of, url), signal.SIGKILL)
            await until(partial(lambda others: len(asyncio.all_tasks()) == others, others), 20)
        assert give_up_s() == 0
        reported = capsys.readouterr().err
        assert reported.count(reason) == reported.count("is not restarted") == 2


@async_test
async def test_a_failed_start_shows_the_last_log_lines(vllm):
    vllm.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"exit code 3 before it was ready; its last lines:\n  \| no such model"):
        async with AsyncExitStack() as stack:
            await start_endpoints(settings_of("vllm"), stack)


@pytest.mark.parametrize("end", ["early failure", "failure", "cancellation"])
@async_test
async def test_ready_servers_stop_if_another_fails_to_start(vllm, monkeypatch, end):
    start, ready, this = servers._start, [], asyncio.current_task()

    async def start_one(settings):
        if settings.gpus == ("1",):
            await until(lambda: ready or end == "early failure", 20)
            assert "failure" in end or this.cancel()
            await asyncio.sleep(0.1)
            raise RuntimeError("no such GPU")
        ready.append(await start(settings))
        return ready[0]

    monkeypatch.setattr(servers, "_start", start_one)
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        async with AsyncExitStack() as stack:
            await start_endpoints(settings_of("vllm", gpus=[("0",), ("1",)]), stack)
    assert not ready[0].running
