"""The sidecar starts, serves, reports its errors, and leaves no process however it or its parent ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from async_tests import async_test
from processes import all_gone, ended, family, serve, start

from rollout.engine.sglang import SGLangEngine
from rollout.server import (
    KEPT_LINES,
    MAX_LINE_BYTES,
    PLUGIN,
    POLL_S,
    ServerFailed,
    ServerSettings,
    _listening_sockets,
)
from rollout.supervisor import SCAN_EVERY_S, supervised

FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def fake(tmp_path):
    """Returns settings of a fake SGLang with the given behavior."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/was_started\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")

    def settings(mode="serve", *extra, **kwargs):
        return ServerSettings(model=tmp_path, python=python, extra_args=("--fake", mode, *extra), **kwargs)

    return settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70_000}, r"port=70000 must be from 0 \(any free port\) to 65535"),
        ({"context_length": 0}, "context_length=0 must be at least 1"),
        ({"context_length": 100, "max_total_tokens": 99}, "max_total_tokens=99 must hold one context"),
        ({"memory_frac": 1.5}, "memory_frac=1.5 must be between 0 and 1"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 needs device=cuda"),
    ],
)
def test_invalid_settings_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(model=Path("m"), **wrong)


def test_dtype_and_pool_are_explicit_on_every_device(fake):
    bounds = {("cpu", "float32"): "--max-total-tokens", ("cuda", "bfloat16"): "--mem-fraction-static"}
    for (device, dtype), bound in bounds.items():
        command = fake(device=device).command()
        assert command[command.index("--dtype") + 1] == dtype
        assert bound in command
        assert int(command[command.index("--mm-preprocess-cache-size-mb") + 1]) > 0  # otherwise image ids may change


def test_the_learners_environment_is_not_inherited(fake, monkeypatch):
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.setenv(name, "the learner's")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{sys.prefix}/lib/cudnn:/driver")
    environment = fake(device="cuda").environment()
    assert not {"VIRTUAL_ENV", "SGLANG_USE_CPU_ENGINE"} & environment.keys()
    assert (environment["LD_LIBRARY_PATH"], environment["PYTHONPATH"]) == ("/driver", str(PLUGIN))


def test_image_embeddings_are_cached_only_for_a_frozen_tower(fake):
    assert fake(trainable_vision=True).environment()["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert int(fake(trainable_vision=False).environment()["SGLANG_VLM_CACHE_SIZE_MB"]) > 0


def test_a_port_in_use_is_rejected_before_anything_starts(fake, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\)"):
            start(fake(port=port))
    assert not (tmp_path / "was_started").exists()


@pytest.mark.parametrize(
    ("mode", "settings", "kind", "problem"),
    [
        ("serve", {"host": "192.0.2.1"}, ValueError, r"cannot listen on 192.0.2.1:\d+ \(Cannot assign"),
        ("text", {}, ValueError, "does not accept images"),
        ("crash", {}, ServerFailed, r"(?s)exit code 3 before it was ready.*loading weights.*no such tensor"),
    ],
)
def test_a_server_that_cannot_serve_is_an_error(mode, settings, kind, problem, fake):
    with pytest.raises(kind, match=problem):
        start(fake(mode, **settings))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


WITH_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6")


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("localhost", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
        pytest.param("::1", "[::1]", marks=WITH_IPV6),
        pytest.param("::", "[::1]", marks=WITH_IPV6),
    ],
)
def test_a_server_listens_on_names_and_on_all_addresses_of_both_families(host, reached, fake):
    server = start(fake(host=host))
    try:
        assert server.url == f"http://{reached}:{server.settings.port}"
        with pytest.raises(ValueError, match="Address already in use"):
            start(fake(host=host, port=server.settings.port))
    finally:
        asyncio.run(server.stop(grace_s=1))


@WITH_IPV6
def test_a_listener_on_all_ipv4_addresses_has_no_ipv6_address():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert _listening_sockets("127.0.0.1", port) and not _listening_sockets("::1", port)


def test_losing_the_port_during_a_start_is_detected(fake):
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", 0))
        port = thief.getsockname()[1]  # bound but not listening, so SO_REUSEADDR would still succeed
        with pytest.raises(ServerFailed, match=f"another process took port {port} while the server was starting"):
            start(fake("hang", port=port), on_progress=lambda line: thief.listen())


def test_a_directory_without_a_model_is_rejected(fake, tmp_path):
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="is not a Hugging Face model directory"):
        start(fake())


def descendants():
    """Returns this process's descendants; a server shared with other tests may be among them."""
    return psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_a_start_timeout_shows_the_last_lines_and_leaves_no_process(fake):
    before, seen = descendants(), []

    def progress(line):
        seen.extend(p for p in descendants() if p not in before and p not in seen)

    with pytest.raises(ServerFailed, match=r"(?s)not ready within the deadline of 2 s.*loading weights"):
        start(fake("hang"), deadline_s=2, on_progress=progress)
    assert len(seen) >= 3  # the supervisor, the server and its child
    assert all_gone(seen, within_s=0)


@pytest.mark.parametrize("modes", [["hang"], ["serve", "hang"]])
@async_test
async def test_a_cancelled_launch_leaves_no_process(modes, fake):
    before, started = descendants(), []
    launching = asyncio.create_task(SGLangEngine.launch(list(map(fake, modes))))
    async with asyncio.timeout(20):
        # The three tasks are this one, the launch, and the hung start.
        while len(started) < 3 * len(modes) or len(asyncio.all_tasks()) > 3:
            await asyncio.sleep(0.1)
            started = [p for p in descendants() if p not in before]
    launching.cancel()
    await asyncio.wait([launching])
    assert launching.cancelled() and all_gone(started, within_s=0)


def test_a_server_that_crashes_ends_a_launch_at_once(fake):
    before = descendants()
    with pytest.raises(ServerFailed, match=r"(?s)exit code 3 before it was ready.*no such tensor"):
        asyncio.run(asyncio.wait_for(SGLangEngine.launch([fake("hang"), fake("crash")]), 20))
    assert [p for p in descendants() if p not in before] == []


def test_a_full_disk_loses_log_lines_but_not_the_server(fake):
    server = start(fake("chatty"), log_file=Path("/dev/full"))
    asyncio.run(server.stop(5))
    assert "line 9999" in server.last_lines(KEPT_LINES)


def test_output_is_bounded_in_memory_and_complete_in_the_file(fake, tmp_path):
    log_file = tmp_path / "server.log"
    server = start(fake("chatty"), log_file=log_file)
    asyncio.run(server.stop(5))
    lines = server.last_lines(1_000_000)
    assert len(lines) == KEPT_LINES and "line 9999" in lines
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert log_file.stat().st_size > 1_000_000


def line_of(server, start, within_s=10.0):
    """Waits for a log line that begins with `start`; a server may answer before its lines are read."""
    deadline = time.monotonic() + within_s
    while not (lines := [line for line in server.last_lines(9) if line.startswith(start)]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lines[0]


@pytest.mark.slow
def test_a_server_that_ignores_sigterm_is_killed_after_the_grace_period(fake):
    server = start(fake("stubborn"))
    processes = family(server.pid)
    asyncio.run(server.stop(grace_s=1))
    assert len(processes) >= 3 and all_gone(processes, within_s=0)
    assert not server.running


def test_a_server_outlives_the_loop_and_thread_that_started_it(fake):
    with ThreadPoolExecutor() as pool:
        server = pool.submit(start, fake()).result()
    time.sleep(2 * POLL_S)
    assert server.running
    asyncio.run(server.stop(5))
    assert asyncio.run(server.wait()) == 128 + signal.SIGTERM


@pytest.mark.parametrize("options", [["--same-group"], []])
def test_a_killed_supervisor_also_kills_the_server(options, fake):
    server = start(fake("serve", *options))
    processes = family(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    asyncio.run(asyncio.wait_for(server.wait(), 10))
    assert len(processes) >= 3 and all_gone(processes) and "ended with SIGKILL" in str(server.exit_error())


@pytest.mark.slow
@pytest.mark.parametrize("kill", [lambda server: asyncio.run(server.stop(0)), lambda server: os.kill(server.pid, 9)])
def test_a_killed_server_leaves_nothing_in_shared_memory(kill, fake):
    server = start(fake("serve", "--semaphore"))
    semaphore = Path("/dev/shm") / f"sem.{line_of(server, 'semaphore').rpartition('/')[2]}"
    assert semaphore.exists()
    pids = (family(server.pid)[1].pid, os.getpid())
    image, stranger = (Path("/dev/shm") / f"sgl_shm_mm_{pid}_{os.urandom(4).hex()}" for pid in pids)
    try:
        for path in (image, stranger):  # no process has them open
            path.write_bytes(b"x")
        time.sleep(SCAN_EVERY_S)
        kill(server)
        asyncio.run(asyncio.wait_for(server.wait(), 10))
        assert not semaphore.exists() and not image.exists() and stranger.exists()
    finally:
        image.unlink(missing_ok=True)
        stranger.unlink(missing_ok=True)


SHORT_LIVED = """
import mmap, os, signal, sys, time
time.sleep(0.7)  # so that the supervisor has looked once
child = os.fork()
if not child:
    file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4096)
    mapped = mmap.mmap(file, 4096)
    time.sleep(600)
time.sleep(0.7)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_shared_memory_of_a_process_that_is_killed_soon_after_it_starts_is_removed():
    segment = Path("/dev/shm") / f"short_lived_{os.getpid()}"
    try:
        done = subprocess.run(supervised([sys.executable, "-c", SHORT_LIVED, str(segment)]), timeout=30)
        assert done.returncode == 0 and not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_the_url_and_stops_on_signals(fake, number):
    settings = fake()
    command = serve(settings)
    url, model = command.stdout.readline().split()
    with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
        assert reply.status == 200
    processes = family(command.pid)
    command.send_signal(number)
    code, output, errors = ended(command)
    assert (code, output, model) == (0, "", str(settings.model))
    assert "ready after" in errors and "error" not in errors
    assert len(processes) >= 4 and all_gone(processes)


@pytest.mark.slow
def test_the_command_can_be_stopped_while_it_starts(fake):
    command = serve(fake("hang"))
    while len(processes := family(command.pid)) < 4:
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    code, output, errors = ended(command)
    assert (code, output) == (0, "") and "stopped while starting" in errors
    assert all_gone(processes)


@pytest.mark.slow
def test_the_command_prints_the_time_to_failure(fake):
    code, _, errors = ended(serve(fake("crash")))
    assert code == 1 and errors.index("starting, ") < errors.index("failed after ") < errors.index("error: ")


@pytest.mark.slow
def test_the_command_fails_if_its_server_dies(fake):
    command = serve(fake(), "--json")
    shown = json.loads(command.stdout.readline())
    processes = family(shown["pid"])
    with pytest.raises(OSError, match=r"closed connection|reset"):
        urllib.request.urlopen(f"{shown['url']}/die", timeout=5)
    code, _, errors = ended(command)
    assert code == 1
    assert "ended with exit code 7; its last lines:" in errors and "out of luck" in errors and "Traceback" not in errors
    assert all_gone(processes)


@pytest.mark.slow
def test_a_sigkilled_command_leaves_no_process(fake):
    command = serve(fake("stubborn"))
    command.stdout.readline()
    processes = family(command.pid)
    command.kill()
    ended(command)
    assert len(processes) >= 4 and all_gone(processes)


@pytest.mark.slow
def test_an_invalid_weights_port_is_named(fake):
    code, _, errors = ended(serve(fake(), "--weights-port", "65536"))
    assert (code, errors) == (1, "error: --weights-port 65536 must be from 0 (any free port) to 65535\n")


@pytest.mark.slow
def test_the_command_prints_a_stack_trace_only_with_debug(fake, tmp_path):
    (tmp_path / "config.json").unlink()
    code, _, errors = ended(serve(fake()))
    (line,) = errors.splitlines()  # not "failed after 0.0 s" before it
    assert code == 1 and line.startswith("error: model=")
    assert "Traceback" in ended(serve(fake(), "--debug"))[2]
