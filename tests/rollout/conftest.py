"""The real SGLang server on a tiny model, shared by the tests that need one; those are marked slow."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_port.tiny import make_tiny
from rollout.server import Server, ServerSettings, sidecar_python

START_DEADLINE_S = 180  # alone it takes 20; the machine may be busy
STOP_GRACE_S = 20
SMALL = {"context_length": 4_096, "max_total_tokens": 16_384}


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    try:
        return sidecar_python()
    except RuntimeError as problem:  # its message names the command to run
        pytest.fail(str(problem))


@pytest.fixture(scope="session")
def tiny_hf_published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with the published bounds in the processor files: they enlarge every frame of the recipe."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    make_tiny(directory, dtype="float32", min_pixels=65_536, max_pixels=16_777_216)
    return directory


@pytest.fixture(scope="session")
def server(sglang_python: Path, tiny_hf_published: Path) -> Iterator[Server]:
    """Serves the weights of `tiny_hf`, for tests that leave it as they found it: weights, version, nothing running."""
    server = _start(ServerSettings(model=tiny_hf_published, python=sglang_python, **SMALL))
    yield server
    asyncio.run(server.stop(STOP_GRACE_S))


@pytest.fixture
def start_server(sglang_python: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server of the test's own: `start_server(model, **settings)`. It is stopped with the test."""
    started = []

    def start(model: Path, **settings: Any) -> Server:
        started.append(_start(ServerSettings(**{"model": model, "python": sglang_python, **SMALL, **settings})))
        return started[-1]

    yield start
    for server in started:
        asyncio.run(server.stop(STOP_GRACE_S))


def _start(settings: ServerSettings) -> Server:
    return asyncio.run(Server.start(settings, deadline_s=START_DEADLINE_S))
