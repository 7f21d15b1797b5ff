"""Opens the engine (embedded, SGLang or your own) and the frame reader."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from model_port.config import read_config
from model_port.layout import is_checkpoint
from model_port.model import VLModel
from model_port.processing import VisionContract, settled_size
from model_port.terminal import say
from paravt_jax.config import EngineConfig, VideoConfig
from paravt_jax.run.directory import user_cache
from paravt_jax.run.gpu_assignment import Gpus
from paravt_jax.run.policy import Policy
from paravt_jax.sampling.embedded import EmbeddedEngine
from rollout.engine.discovery import listed_urls, unreachable
from rollout.engine.protocol import Engine
from rollout.engine.settings import Mixture
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.episode_config import EpisodeConfig
from rollout.server import ServerSettings
from rollout.user_code import call_user_code, load_function
from rollout.video.reader import FrameReader

MAX_LISTED = 3  # servers in a log line
MEMORY_BYTES, DISK_BYTES = 2 * 2**30, 64 * 2**30  # cache of decoded frames


async def open_engine(
    settings: EngineConfig,
    policy: Policy,
    rollout: EpisodeConfig,
    model: VLModel | None,
    version: int,
    phase: Callable[[str], None],
    *,
    trainable_vision: bool = False,
    gpus: Sequence[Gpus] = (),
    num_hosts: int = 1,
    run: str = "",
    take_over: bool = False,
    beside_update: bool = False,
) -> Engine:
    """Opens the engine. Only the embedded engine uses `model`.

    `gpus` lists the GPUs of each server that this run starts; empty without GPUs. `run` is the id of the run that
    publishes to the servers. `take_over` permits servers that another run publishes to. `beside_update` means that
    rollouts continue during updates.
    """
    if settings.kind == "jax":
        assert model is not None
        embedded = EmbeddedEngine(
            model,
            replace(policy.contract, max_pixels=policy.contract.max_pixels * rollout.detail_factor),
            version,
            mesh=policy.mesh,
            beside_update=beside_update,
            **settings.sampler_sizes(rollout.max_context_tokens, num_hosts),
        )
        if embedded.kernel_check is not None:
            say(f"decoding: {embedded.kernel_check}")
        return embedded
    if (make_engine := own_engine(settings)) is not None:
        engine = call_user_code(lambda: make_engine(settings, policy))
        engine = await engine if inspect.isawaitable(engine) else engine
        if not isinstance(engine, Engine):
            raise ValueError(f"engine.kind={settings.kind} returned {type(engine).__name__}, expected an Engine")
        return engine
    text = read_config(policy.hf_files).text
    sglang = SGLangSettings(
        run=run,
        take_over=take_over,
        weights_dir=settings.weights_dir,
        vocab_size=text.vocab_size,
        max_context_tokens=rollout.max_context_tokens,
        mixture=Mixture(text.num_layers, text.num_experts, text.token_experts) if text.num_experts else None,
    )
    if settings.urls_file:
        return await SGLangEngine.follow(settings.urls_file, sglang, phase)
    if settings.urls:
        return await SGLangEngine.connect(settings.urls, sglang, phase)
    if is_checkpoint(policy.source):
        raise ValueError(
            f"engine.kind=sglang starts servers from Hugging Face files, but {policy.source} is a checkpoint; "
            "set model.path to a Hugging Face directory or id, or engine.urls to running servers"
        )
    dtype: Any = policy.compute.dtype  # float64 is only for tests
    servers = [
        ServerSettings(
            policy.source,
            "cuda" if gpus else "cpu",
            dtype=dtype,
            context_length=rollout.max_context_tokens,
            trainable_vision=trainable_vision,
            tensor_parallel=max(1, len(server_gpus)),
            gpus=server_gpus,
        )
        for server_gpus in gpus or [()] * settings.num_servers
    ]
    phase("starting SGLang")
    return await SGLangEngine.launch(servers, sglang, phase)


async def report_unreachable(settings: EngineConfig) -> None:
    """Reports unreachable servers before the model is loaded. They may still be starting, so it does not raise."""
    if settings.kind != "sglang" or not settings.connects:
        return
    try:
        problems = await unreachable(listed_urls(settings.urls_file) if settings.urls_file else settings.urls)
    except (OSError, ValueError) as problem:
        problems = [str(problem)]
    if problems:
        more = f"; and {len(problems) - MAX_LISTED} more" * (len(problems) > MAX_LISTED)
        say(
            f"engine.urls: {'; '.join(problems[:MAX_LISTED])}{more}; if it is not starting, correct engine.urls or "
            f"start it: python -m rollout.serve --model MODEL"
        )


def own_engine(settings: EngineConfig) -> Callable[..., Any] | None:
    """Loads the user's function that makes the engine; None if `engine.kind` names a shipped engine."""
    return load_function("engine.kind", settings.kind) if settings.is_own else None


def frame_reader(video: VideoConfig, contract: VisionContract, detail_factor: int = 1) -> FrameReader:
    """Makes the frame reader. A zoomed detail may have `detail_factor` times the pixels of an overview frame."""
    detail_contract = replace(contract, max_pixels=contract.max_pixels * detail_factor)
    return FrameReader(
        lambda height, width: settled_size(height, width, contract),
        detail_size=lambda height, width: settled_size(height, width, detail_contract),
        num_workers=video.num_workers or None,
        memory_bytes=MEMORY_BYTES,
        disk_directory=video.disk_cache or None,
        disk_bytes=DISK_BYTES,
        ticks_directory=video.disk_cache or user_cache("ticks"),
    )
