"""Starts vLLM or SGLang servers as endpoints on this machine, and restarts servers that exit.

The servers run under `rollout.supervisor`, like the SGLang servers of training, so no server outlives this process. A
server resizes pictures as the model's own files specify, but ignores the model's own sampling defaults.
"""

import asyncio
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import aiohttp

from rollout.server import Device, Dtype, Server, ServerSettings, Startable, environment_of, settled_port
from rollout.terminal import say

Program = Literal["vllm", "sglang"]
START_DEADLINE_S = 1800.0  # vLLM compiles for minutes
STOP_GRACE_S = 10.0
MAX_RESTARTS = 5  # per server
LOOPBACK = "127.0.0.1"
RELEASED_CONTEXT_TOKENS = 65_536
RELEASED_OPTIONS = {  # --generation-config=auto, vLLM's default, applies the model's own penalties
    "--generation-config": "auto",
    "--max-num-batched-tokens": 131_072,
    "--gpu-memory-utilization": "0.85",
    "--limit-mm-per-prompt": '{"video":1,"image":1024}',
    "--allowed-local-media-path": "/",
}


@dataclass(frozen=True)
class VllmSettings:
    """A vLLM server's settings."""

    model: Path
    name: str  # the model's name in requests
    dtype: Dtype
    context_length: int
    gpus: tuple[str, ...] = ()
    host: str = LOOPBACK
    port: int = 0  # 0: any free port
    program: Path | None = None
    options: Mapping[str, str | int] = field(default_factory=dict)  # override or extend the defaults

    def settled(self) -> Self:
        settings = replace(self, port=settled_port(self.host, self.port))
        program = shutil.which("vllm")
        if program is None:
            raise RuntimeError(
                f"engine.serve_with=vllm: vllm is not on the PATH; install vLLM in a separate environment "
                f"and put its bin directory on the PATH, or start it elsewhere and set engine.urls=[URL/v1] and "
                f"engine.model={self.name}: {shlex.join(settings.command())}"
            )
        return replace(settings, program=Path(program).absolute())

    def command(self) -> list[str]:
        options = {
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--max-model-len": self.context_length,
            "--tensor-parallel-size": max(1, len(self.gpus)),
            "--generation-config": "vllm",  # otherwise the model's own penalties would change the sampling
            **self.options,
        }
        pairs = [str(part) for option in options.items() for part in option]
        return [str(self.program or "vllm"), "serve", str(self.model), *pairs]

    def environment(self) -> dict[str, str]:
        assert self.program is not None
        return environment_of(self.program, self.gpus)

    async def is_ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def endpoint_settings(
    program: Program,
    model: Path,
    name: str,
    *,
    device: Device,
    dtype: Dtype,
    context_length: int,
    gpus: Sequence[tuple[str, ...]],
    num_servers: int,
    as_released: bool = False,
) -> list[Startable]:
    """Returns the settings of one server for each element of `gpus`, or of `num_servers` servers without GPUs.

    `as_released` selects the released evaluation's context length and, for vLLM, its other options.
    """
    gpus_each = [*gpus] or [()] * num_servers
    context_length = RELEASED_CONTEXT_TOKENS if as_released else context_length
    if program == "vllm":
        options = RELEASED_OPTIONS if as_released else {}
        return [VllmSettings(model, name, dtype, context_length, gpus=each, options=options) for each in gpus_each]
    own = ("--served-model-name", name, "--sampling-defaults", "openai", "--mm-process-config", "{}")
    return [
        ServerSettings(
            model,
            device,
            dtype=dtype,
            context_length=context_length,
            tensor_parallel=max(1, len(each)),
            gpus=each,
            extra_args=own,
        )
        for each in gpus_each
    ]


async def start_endpoints(
    settings: Sequence[Startable], stack: AsyncExitStack, on_progress: Callable[[str], None]
) -> tuple[list[str], Callable[[], float]]:
    """Starts the servers. Returns their base URLs, and how long to wait for a restart: 0 s if none is restarted.

    Closing `stack` stops them.
    """
    settings = [each.settled() for each in settings]  # reports installation problems before any server starts
    supervisors: list[asyncio.Task[None]] = []

    async def start(each: Startable) -> Server:
        server = await _start(each, on_progress)
        supervisors.append(asyncio.create_task(_supervise(server)))
        return server

    async def stop() -> None:
        await asyncio.sleep(0)  # a task that is cancelled before it runs would not stop its server
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)

    stack.push_async_callback(stop)
    started = await asyncio.gather(*map(start, settings), return_exceptions=True)
    for problem in started:
        if isinstance(problem, BaseException):
            raise problem
    urls = [f"{server.url}/v1" for server in started if isinstance(server, Server)]
    return urls, lambda: 0.0 if all(supervisor.done() for supervisor in supervisors) else START_DEADLINE_S


async def _start(settings: Startable, on_progress: Callable[[str], None]) -> Server:
    return await Server.start(settings, deadline_s=START_DEADLINE_S, on_progress=on_progress)


async def _supervise(server: Server) -> None:
    """Restarts a server on the same port if it exits, and stops it when this task is cancelled."""
    try:
        for _ in range(MAX_RESTARTS):
            await server.wait()
            say(f"{server.exit_error()}; restarting it")
            server = await _start(server.settings, lambda line: None)
        await server.wait()
        say(f"{server.exit_error()}; it ended {MAX_RESTARTS} times and is not restarted")
    except (OSError, RuntimeError, ValueError) as problem:
        say(f"{problem}; it is not restarted")
    finally:
        await asyncio.shield(server.stop(STOP_GRACE_S))
