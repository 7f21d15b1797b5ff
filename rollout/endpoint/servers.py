"""Starts vLLM or SGLang servers as endpoints on this machine, and restarts servers that exit.

The servers run under `rollout.supervisor`, like the SGLang servers of training, so no server outlives this process. A
server resizes pictures as the model's own files specify, but ignores the model's own sampling defaults.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from rollout.server import Device, Dtype, Server, ServerSettings, Startable, VllmSettings
from rollout.terminal import say

Program = Literal["vllm", "sglang"]
START_DEADLINE_S = 1800.0  # vLLM compiles for minutes
STOP_GRACE_S = 10.0
MAX_RESTARTS = 5  # per server
RELEASED_CONTEXT_TOKENS = 65_536
RELEASED_OPTIONS = {  # --generation-config=auto, vLLM's default, applies the model's own penalties
    "--generation-config": "auto",
    "--max-num-batched-tokens": 131_072,
    "--gpu-memory-utilization": "0.85",
    "--limit-mm-per-prompt": '{"video":1,"image":1024}',
    "--allowed-local-media-path": "/",
}


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
    settings: Sequence[Startable], stack: AsyncExitStack
) -> tuple[list[str], Callable[[], float]]:
    """Starts the servers. Returns their base URLs, and how long to wait for a restart: 0 s if none is restarted.

    Closing `stack` stops them.
    """
    settings = [each.settled() for each in settings]  # reports installation problems before any server starts
    supervisors: list[asyncio.Task[None]] = []

    async def start(each: Startable) -> Server:
        server = await _start(each)
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


async def _start(settings: Startable) -> Server:
    return await Server.start(settings, deadline_s=START_DEADLINE_S)


async def _supervise(server: Server) -> None:
    """Restarts a server on the same port if it exits, and stops it when this task is cancelled."""
    try:
        for _ in range(MAX_RESTARTS):
            await server.wait()
            say(f"{server.exit_error()}; restarting it")
            server = await _start(server.settings)
        await server.wait()
        say(f"{server.exit_error()}; after {MAX_RESTARTS} restarts it is not restarted")
    except (OSError, RuntimeError, ValueError) as problem:
        say(f"{problem}; it is not restarted")
    finally:
        await asyncio.shield(server.stop(STOP_GRACE_S))
