"""Opens a model behind endpoints for an evaluation or a question: starts servers if configured, and checks them."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from model_port.download import source_directory
from model_port.processing import VisionContract
from model_port.progress import Meter
from paravt_jax.config import MIN_PIXELS, TINY, EngineConfig
from paravt_jax.run.gpu_assignment import Gpus
from paravt_jax.run.threads import in_thread
from rollout.chat import TOKEN_PX
from rollout.endpoint.check import check_endpoint
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.servers import endpoint_settings, start_endpoints
from rollout.episode_config import EpisodeConfig
from rollout.server import Dtype

PATCH_PX = 16


def endpoint_contract(max_pixels: int) -> VisionContract:
    """The vision contract for any model, with Qwen3-VL's frame sizes. The endpoint may resize frames again."""
    half = (0.5, 0.5, 0.5)
    return VisionContract(PATCH_PX, TOKEN_PX // PATCH_PX, 2, MIN_PIXELS, max_pixels, half, half)


async def served_files(settings: EngineConfig, path: str) -> Path | None:
    """The directory of the model that this process will serve; None if it starts no servers."""
    if not settings.serve_with:
        return None
    if path == TINY:
        raise ValueError(f"engine.serve_with={settings.serve_with} serves model.path, which must not be {TINY}")
    return await in_thread(lambda: source_directory(path, "model.path=DIR"))


async def open_endpoint(
    settings: EngineConfig,
    model: str,
    files: Path | None,
    stack: AsyncExitStack,
    rollout: EpisodeConfig,
    *,
    gpus: Sequence[Gpus],
    dtype: Dtype,
    as_released: bool = False,
) -> EndpointClient:
    """Opens and checks a client. The client, and servers that it starts for `files`, end with `stack`."""
    if settings.serve_with and files is not None:
        servers = endpoint_settings(
            settings.serve_with,
            files,
            model,
            device="cuda" if gpus else "cpu",
            dtype=dtype,
            context_length=rollout.max_context_tokens,
            gpus=gpus,
            num_servers=settings.num_servers,
            as_released=as_released,
        )
        with Meter(f"starting {len(servers)} x {settings.serve_with}"):
            started = await start_endpoints(servers, stack)
        client = EndpointClient(started[0], model, settings.api_key_env, started[1])
    else:
        client = EndpointClient(settings.urls, model, settings.api_key_env)
    stack.push_async_callback(client.close)
    await check_endpoint(client, rollout.temperature)
    return client
