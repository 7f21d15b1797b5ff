"""Shared by the parts of `bench gpu_check`: input sizes, timing and failure reports."""

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from model_port.config import ModelConfig, preset
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.reference import missing_torch
from model_port.tiny import tiny_config

Row = dict[str, Any]
SHOWN_CHARS = 200
REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes for a GPU, or small ones to test the check on a CPU."""

    head_dims: tuple[int, ...]
    parity_tokens: int
    attention_tokens: int
    attention_heads: tuple[int, int]  # query heads; key/value heads
    update_tokens: tuple[int, ...]  # most important first
    frames: int  # frames per row of the update
    prompt: tuple[int, int]  # frames and text tokens of the prompt whose group is updated in several ways
    response_tokens: int
    num_episodes: int
    sampler_cases: tuple[tuple[int, int], ...]  # prompts sampled together, and the rank of adapters
    sampled: tuple[int, int]  # prompt tokens, and new tokens
    context_tokens: int  # limits of the sampler, as in a recipe
    cache_tokens: int


LARGE = Sizes(
    *((128, 72), 500, 8192, (32, 8), (8192, 16384, 4096, 32768), 64, (64, 200), 512, 8),
    *(((8, 0), (64, 0), (64, 64)), (2048, 128), 16384, 163840),
)
TINY = Sizes((12,), 40, 64, (4, 2), (64, 128), 1, (2, 11), 7, 3, ((2, 0), (2, 8)), (64, 32), 128, 256)


@dataclass(frozen=True)
class Check:
    """The input of a part."""

    tiny: bool
    folder: Path  # shared by all parts; contains the model for the ways

    @property
    def sizes(self) -> Sizes:
        return TINY if self.tiny else LARGE

    @property
    def torch_device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def full_model(self) -> ModelConfig:
        return tiny_config() if self.tiny else preset("8b")

    @property
    def group_model(self) -> ModelConfig:
        """The 8B's width with few layers and a small vocabulary, so that it also fits in torch."""
        if self.tiny:
            return tiny_config()
        model = preset("8b")
        text, vision = model.text, model.vision
        return replace(
            model,
            text=replace(text, num_layers=4, vocab_size=32_768),
            vision=replace(cast(Qwen3VisionConfig, vision), num_layers=4, deepstack_layers=(1, 2, 3)),
        )


def timed(work: Callable[[], Any], warm: bool = False) -> float:
    """Returns median seconds, without a first turn that compiles."""
    seconds = []
    for turn in range(REPEATS + (not warm)):
        start = time.perf_counter()
        work()
        if turn or warm:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def no_torch(check: Check) -> Row:
    """Returns a note if torch cannot run here."""
    if missing := missing_torch():
        return {"note": f"not compared: {missing}"}
    import torch

    if check.torch_device == "cuda" and not torch.cuda.is_available():
        return {"note": f"not compared: torch {torch.__version__} sees no GPU"}
    return {}


def torch_versions() -> str:
    import torch

    return f"torch {torch.__version__}, transformers {version('transformers')}"


def failure(problem: Exception, *, may_lack_room: bool = False) -> Row:
    """Reports an error as a problem, or as a note if a size that need not fit ran out of memory."""
    from paravt_jax.plan.devices import NO_ROOM

    traceback.print_exception(problem)
    noted = may_lack_room and NO_ROOM in str(problem)
    return {"note" if noted else "problem": f"{type(problem).__name__}: {problem}".partition("\n")[0][:SHOWN_CHARS]}
