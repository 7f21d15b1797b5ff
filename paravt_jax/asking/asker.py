"""Opens a model to answer questions, with the prompts and pixel budgets of its training."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import model_port
from model_port.download import source_directory
from model_port.hf_files import RECIPE_FILE
from model_port.layers import Compute
from model_port.loading import files_directory
from model_port.model import VLModel
from model_port.progress import Meter
from model_port.terminal import say
from paravt_jax.asking.answerer import Answerer
from paravt_jax.config import EngineConfig, VideoConfig
from paravt_jax.run.policy import Policy, contract_of_run
from paravt_jax.run.process import ended_by_interrupt
from paravt_jax.run.recipe import Recipe, read_recipe
from paravt_jax.run.start import describe_devices, find_devices, size_of, start_line
from paravt_jax.run.threads import in_thread
from paravt_jax.sampling.endpoint import endpoint_contract, open_endpoint
from paravt_jax.sampling.engines import frame_reader, open_engine
from paravt_jax.sampling.local_copy import by_layer
from rollout.chat import Chat
from rollout.endpoint.agent import EndpointAgent
from rollout.endpoint.errors import EndpointError
from rollout.engine.discovery import check_url
from rollout.episode import Agent
from rollout.episode_config import Dispatch

MAX_ROWS = 16  # concurrent requests of the embedded engine
FLAGS = {"engine.urls": "--endpoint", "engine.model": "--model", "engine.api_key_env": "--endpoint-key-env"}


def engine_of(model: str, urls: list[str], endpoints: list[str], key_env: str) -> EngineConfig | None:
    """The engine settings from command-line flags; None if the model is loaded in process."""
    if key_env and not endpoints:
        raise ValueError("--endpoint-key-env has no effect without --endpoint")
    for url in urls:
        check_url("--url", url)
    if endpoints:
        with flags_in_errors():
            return EngineConfig("openai", endpoints, model, key_env)
    return EngineConfig("sglang", urls) if urls else None


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Replaces settings in the errors of an endpoint by the command's flags."""
    try:
        yield
    except (ValueError, EndpointError) as problem:
        message = str(problem)
        for setting, flag in FLAGS.items():
            message = message.replace(setting, flag)
        problem.args = (message,)
        raise


@asynccontextmanager
async def open_asker(
    model: str,
    engine: EngineConfig | None,
    *,
    num_frames: int | None,
    dispatch: Dispatch | None,
    num_questions: int = 1,
) -> AsyncIterator[Answerer]:
    """Opens an answerer for `num_questions` concurrent questions. Without an engine, it loads the model in process.

    `num_frames` and `dispatch` override the recipe in the model's files.
    """

    def overridden(recipe: Recipe) -> Recipe:
        rollout = replace(recipe.rollout, temperature=0.0, dispatch=dispatch or recipe.rollout.dispatch)
        return replace(recipe, num_frames=num_frames or recipe.num_frames, rollout=rollout)

    async with AsyncExitStack() as stack:
        with ended_by_interrupt():
            if engine is not None and engine.kind == "openai":
                stack.enter_context(flags_in_errors())
                answerer = await _behind_endpoint(engine, overridden(Recipe()), stack)
            else:
                answerer = await _of_model(model, engine, overridden, num_questions, stack)
        yield answerer


async def _behind_endpoint(engine: EngineConfig, recipe: Recipe, stack: AsyncExitStack) -> Answerer:
    client = await open_endpoint(engine, engine.model, None, stack, recipe.rollout, gpus=(), dtype="bfloat16")
    contract = endpoint_contract(recipe.max_pixels)
    frames = await stack.enter_async_context(frame_reader(VideoConfig(), contract, recipe.rollout.detail_factor))
    say(f"model: {engine.model}, behind an endpoint")
    return Answerer(EndpointAgent(client, frames, recipe.rollout), recipe.num_frames)


async def _of_model(
    model: str,
    engine: EngineConfig | None,
    overridden: Callable[[Recipe], Recipe],
    num_questions: int,
    stack: AsyncExitStack,
) -> Answerer:
    source = await in_thread(lambda: source_directory(model, "--model DIR", weights=engine is None))
    hf_files = await in_thread(lambda: files_directory(source, weights=engine is None))
    if (stored := read_recipe(hf_files)) is None:
        say(
            f"{hf_files} has no {RECIPE_FILE}: using this project's default prompts, which may differ from its training"
        )
    recipe = overridden(stored or Recipe())
    contract = contract_of_run(hf_files, recipe.max_pixels)
    devices = [] if engine else await in_thread(find_devices)
    dtype = "float32" if devices and devices[0].platform == "cpu" else "bfloat16"
    device_names = "of the SGLang servers" if engine else describe_devices(devices)
    say(start_line(device_names, size_of(hf_files), dtype, dtype, model=source))
    policy = Policy(None, contract, Chat.from_hf(hf_files), hf_files, source, Compute(dtype))

    def load() -> VLModel:
        with Meter(f"loading {source}"):
            return by_layer(model_port.load(source, dtype))

    rollout, max_rows = recipe.rollout, min(MAX_ROWS, num_questions * max(1, recipe.rollout.calls_per_turn))
    frames = await stack.enter_async_context(frame_reader(VideoConfig(), contract, rollout.detail_factor))
    settings, loaded = engine or EngineConfig("jax", max_rows=max_rows), None if engine else await in_thread(load)
    sampling_engine = await open_engine(settings, policy, rollout, loaded, 0, say)
    stack.push_async_callback(sampling_engine.close)
    agent = Agent(sampling_engine, frames, policy.chat, rollout)
    return Answerer(agent, recipe.num_frames, samples_top_p=engine is not None)
