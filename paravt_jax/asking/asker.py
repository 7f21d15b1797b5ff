"""Opens a model for questions, with the prompts and pixel budgets that it was trained with."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import model_port
from model_port.download import source_directory
from model_port.hf_files import RECIPE_FILE
from model_port.layers import Compute
from model_port.layout import hf_files_of
from model_port.model import Qwen3VL
from model_port.processing import VisionContract
from model_port.progress import Meter
from model_port.terminal import say
from paravt_jax.asking.answerer import Answerer
from paravt_jax.config import EngineConfig, VideoConfig
from paravt_jax.run.policy import Policy
from paravt_jax.run.recipe import Recipe, read_recipe
from paravt_jax.run.start import describe_devices, find_devices, size_of, start_line
from paravt_jax.run.threads import in_thread
from paravt_jax.sampling.engines import frame_reader, open_engine
from rollout.chat import Chat
from rollout.episode import Agent
from rollout.episode_config import Dispatch

MAX_ROWS = 16  # concurrent requests of the embedded engine


def recipe_for(source: Path, *, num_frames: int | None, dispatch: Dispatch | None) -> Recipe:
    """The recipe in the model's files, with the user's overrides."""
    recipe = read_recipe(hf_files_of(source))
    if recipe is None:
        say(f"{source} has no {RECIPE_FILE}: using this project's default prompts, which may differ from its training")
        recipe = Recipe()
    rollout = replace(recipe.rollout, temperature=0.0, dispatch=dispatch or recipe.rollout.dispatch)
    return replace(recipe, num_frames=num_frames or recipe.num_frames, rollout=rollout)


@asynccontextmanager
async def open_asker(
    model: str, urls: list[str], *, num_frames: int | None, dispatch: Dispatch | None, num_questions: int = 1
) -> AsyncIterator[Answerer]:
    """Expects `num_questions` at the same time. Without `urls` of SGLang servers, it loads the model itself."""
    source = await in_thread(lambda: source_directory(model, "--model DIR"))
    recipe = recipe_for(source, num_frames=num_frames, dispatch=dispatch)
    hf_files = hf_files_of(source)
    contract = replace(VisionContract.from_hf(hf_files), min_pixels=recipe.min_pixels, max_pixels=recipe.max_pixels)
    devices = [] if urls else await in_thread(find_devices)
    dtype = "float32" if devices and devices[0].platform == "cpu" else "bfloat16"
    device_names = "of the SGLang servers" if urls else describe_devices(devices)
    say(start_line(device_names, size_of(hf_files), dtype, dtype, model=source))
    policy = Policy(None, contract, Chat.from_hf(hf_files), hf_files, source, Compute(dtype))

    def load() -> Qwen3VL:
        with Meter(f"loading {source}"):
            return model_port.load(source, dtype)

    rollout, max_rows = recipe.rollout, min(MAX_ROWS, num_questions * max(1, recipe.rollout.calls_per_turn))
    settings = EngineConfig("sglang", urls) if urls else EngineConfig("jax", max_rows=max_rows)
    async with AsyncExitStack() as stack:
        frames = await stack.enter_async_context(frame_reader(VideoConfig(), contract, rollout.detail_factor))
        engine = await open_engine(
            settings,
            policy,
            None if urls else await in_thread(load),
            0,
            say,
            dtype=dtype,
            max_context_tokens=rollout.max_context_tokens,
            max_pixels=recipe.max_pixels * rollout.detail_factor,
        )
        stack.push_async_callback(engine.close)
        yield Answerer(Agent(engine, frames, policy.chat, rollout), recipe.num_frames, samples_top_p=bool(urls))
