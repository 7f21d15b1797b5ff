"""Requests to the sampler, and their completions."""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from jaxtyping import Int

from model_port.config import ModelConfig
from model_port.inputs import NOT_VISUAL, Frame, Tokens, checked_ids, place_tokens
from model_port.sampler.pages import PAGE_TOKENS

MIN_TEMPERATURE = 1e-6  # below, logits overflow; SGLang then samples greedily
MAX_STOP_IDS = 8


@dataclass(frozen=True, eq=False)
class SamplerPrompt:
    """The ids of a prompt with expanded placeholders, and the frames of these placeholders in order."""

    ids: Int[np.ndarray, "*batch T"]  # a single sequence
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How to sample the tokens of a request. Temperature 0 is greedy."""

    max_new_tokens: int
    seed: int = 0
    temperature: float | int = 1.0  # 0: greedy, with log-probs at temperature 1
    stop_ids: tuple[int, ...] = ()  # sampling stops after the first of these ids, and keeps it

    def __post_init__(self) -> None:
        if not all(hasattr(number, "__index__") for number in (self.max_new_tokens, self.seed, *self.stop_ids)):
            numbers = f"max_new_tokens={self.max_new_tokens}, seed={self.seed} and stop_ids={self.stop_ids}"
            raise ValueError(f"{numbers} must be integers")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 or a number from {MIN_TEMPERATURE:g}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(self.stop_ids)} stop ids were given, at most {MAX_STOP_IDS} are supported")


@dataclass(frozen=True)
class SamplerRequest:
    """A prompt, and how to sample its continuation."""

    prompt: SamplerPrompt
    sampling: SamplingParams


@dataclass
class Completion:
    """Sampled ids and the log-prob of each, from log_softmax(logits / temperature); at temperature 0, of the logits."""

    ids: list[int] = field(default_factory=list)
    behavior_logp: list[float] = field(default_factory=list)
    finish: Literal["stop", "length", "abort", "running"] = "running"


@dataclass(frozen=True, eq=False)
class PreparedPrompt:
    """A prompt with the arrays that the programs need."""

    ids: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, "T 3"]
    visual_index: Int[np.ndarray, " T"]  # row among the prompt's own visual tokens, or NOT_VISUAL
    frames: tuple[Frame, ...]
    frame_starts: tuple[int, ...]  # each frame's first visual token, and the end of the last frame

    @classmethod
    def of(cls, prompt: SamplerPrompt, config: ModelConfig) -> "PreparedPrompt":
        ids = checked_ids(config, prompt.ids).astype(np.int32)
        if len(ids) == 0:
            raise ValueError("a prompt needs at least one token")
        sizes = (len(frame.patches) // config.vision.merge_unit for frame in prompt.frames)
        starts = tuple(accumulate(sizes, initial=0))
        tokens = Tokens(ids, tuple(range(len(prompt.frames))))
        positions, visual_index, _ = place_tokens(tokens, prompt.frames, starts, config)
        if visual_index[-1] != NOT_VISUAL:
            raise ValueError("a prompt must end with text, but this prompt ends with a frame")
        return cls(ids, positions, visual_index, prompt.frames, starts)

    @property
    def num_cached(self) -> int:
        """The number of tokens to prefill. The last token is decoded, which gives the first new token's logits."""
        return len(self.ids) - 1

    @property
    def frame_spans(self) -> list[tuple[int, int]]:
        return list(pairwise(self.frame_starts))

    @cached_property
    def page_digests(self) -> list[bytes]:
        """A digest for each page to prefill; the last page may be partly filled.

        Equal digests mean equal tokens, frames and positions from the prompt's start to the page's end.
        """
        starts = np.flatnonzero(self.visual_index != NOT_VISUAL)[list(self.frame_starts[:-1])]  # in tokens
        digests, chain = [], b""
        for begin in range(0, self.num_cached, PAGE_TOKENS):
            end = min(begin + PAGE_TOKENS, self.num_cached)
            tokens = self.ids[begin:end].tobytes() + self.positions[begin:end].tobytes()
            digest = blake2b(chain + tokens, digest_size=16)
            for number in np.flatnonzero((begin <= starts) & (starts < end)):
                digest.update(self.frames[number].digest)
            chain = digest.digest()
            digests.append(chain)
        return digests
