"""Access control, and cleanup after a killed server."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from served import question, serving, with_service

from paravt_jax import serve as serve_module
from paravt_jax.asking.access import AccessControl, access_control
from paravt_jax.serve import CLIENT_FILES
from rollout.owned_directory import owned_directory

openai = pytest.importorskip("openai")
KEY = "sk-secret"


async def get(served, path, **headers):
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}{path}", headers=headers) as response:
        return response.status


@serving(access=AccessControl(KEY))
async def test_only_requests_with_the_key_are_accepted(served):
    answer = await served.ask_with(KEY)
    for wrong in ("none", f"{KEY}a", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as raised:
            await served.ask_with(wrong)
        assert raised.value.code == "invalid_api_key" and KEY not in raised.value.message
    status_of = {path: await get(served, path) for path in ("/v1/models", "/metrics", "/health", "/none")}
    basic = await get(served, "/v1/models", Authorization=f"Basic {KEY}")
    assert await get(served, "/v1/models", Authorization="Bearer é") == 401
    right = await get(served, "/v1/models", Authorization=f"bearer {KEY}")
    assert answer.choices[0].message.content == "A" and basic == 401 and right == 200
    assert status_of == {"/v1/models": 401, "/metrics": 401, "/health": 200, "/none": 401}


FOREIGN = [
    ("Host", "evil.example"),
    ("Host", "127.0.0.1.evil.example:8000"),
    ("Host", "[::1"),
    ("Host", ""),
    ("Origin", "https://evil.example"),
    ("Origin", "null"),
    ("Origin", "http://localhost.evil.example"),
]


@pytest.mark.parametrize(("header", "name"), FOREIGN)
@pytest.mark.parametrize("key", ["", KEY])
def test_a_foreign_host_or_origin_is_rejected_on_loopback(chat, videos, header, name, key):
    async def work(served):
        async with aiohttp.ClientSession() as session:
            headers = {header: name, "Authorization": f"Bearer {KEY}"}
            url = f"{served.url}/v1/chat/completions"
            async with session.post(url, json=question(), headers=headers) as response:
                return response.status, (await response.json())["error"], len(served.engine.requests)

    status, error, num_requests = with_service(chat, videos, work, access=AccessControl(key))
    assert (status, error["code"], num_requests) == (403, "foreign_host", 0) and header in error["message"]


@pytest.mark.parametrize("name", ["localhost:1", "127.0.0.1", "[::1]:8000", "127.0.0.2:80", "my-host"])
@serving(access=AccessControl("", ("my-host",)))
async def test_names_of_this_machine_are_accepted(served, name):
    assert await get(served, "/v1/models", Host=name) == 200
    assert await get(served, "/v1/models", Origin=f"http://{name}") == 200


@serving(access=AccessControl(loopback_only=False))
async def test_a_public_server_accepts_any_host_name(served):
    assert await get(served, "/v1/models", Host="gpu-7.example") == 200


def bound_to(host):
    listener = socket.socket()
    listener.bind((host, 0))
    return listener


def test_a_public_server_needs_a_key_or_no_api_key():
    with bound_to("127.0.0.1") as local, bound_to("0.0.0.0") as public:
        assert access_control(local, "127.0.0.1", "", False) == AccessControl("", ("127.0.0.1",), True)
        with pytest.raises(ValueError, match=r"--host 0.0.0.0 .* PARAVT_API_KEY.* --api-key.* --no-api-key"):
            access_control(public, "0.0.0.0", "", False)
        assert access_control(public, "0.0.0.0", KEY, False) == AccessControl(KEY, ("0.0.0.0",), False)
        assert access_control(public, "0.0.0.0", "", True) == AccessControl("", ("0.0.0.0",), False)
        for key, without_key in ((KEY, True), ("two words", False), ("schlüssel", False)):
            with pytest.raises(ValueError, match=r"an API key .*(cannot be combined|printable ASCII)") as raised:
                access_control(local, "127.0.0.1", key, without_key)
            assert key not in str(raised.value)


def test_the_key_comes_from_the_environment_unless_the_command_has_one(monkeypatch):
    monkeypatch.setenv("PARAVT_API_KEY", KEY)
    assert serve_module.make_parser().parse_args([]).api_key == KEY
    assert serve_module.make_parser().parse_args(["--api-key", "other"]).api_key == "other"
    assert KEY not in serve_module.make_parser().format_help()


KEEPS_FILES = """
import asyncio, tempfile
from pathlib import Path
from paravt_jax.serve import CLIENT_FILES, stop_on_signals
from rollout.owned_directory import owned_directory

async def run():
    with owned_directory(Path(tempfile.gettempdir()), CLIENT_FILES) as directory:
        (directory / "video").write_text("of a client")
        stop = stop_on_signals(directory)
        print(directory, flush=True)
        await stop.wait()
        print("draining", flush=True)
        await asyncio.sleep(60)

asyncio.run(run())
"""


@pytest.fixture
def server(tmp_path):
    """A process with client files that takes a minute to stop, and their directory."""
    command, environment = [sys.executable, "-c", KEEPS_FILES], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_exits_at_once_and_removes_client_files(server, number):
    process, directory = server
    process.send_signal(number)
    assert process.stdout.readline() == "draining\n" and (directory / "video").exists()
    process.send_signal(number)
    start_s = time.monotonic()
    assert process.wait(20) == 1 and time.monotonic() - start_s < 20
    assert not directory.exists()


@pytest.mark.slow
def test_the_next_start_removes_files_of_a_killed_server_and_keeps_files_of_a_running_one(server, tmp_path):
    process, directory = server
    with owned_directory(tmp_path, CLIENT_FILES) as ours:
        assert (directory / "video").exists() and ours != directory
    process.send_signal(signal.SIGKILL)
    process.wait()
    (link := tmp_path / f"{CLIENT_FILES}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    with owned_directory(tmp_path, CLIENT_FILES) as ours:
        assert not directory.exists() and ours.is_dir() and link.is_symlink()
        assert (tmp_path / "elsewhere" / "file").exists()
    assert not ours.exists()
