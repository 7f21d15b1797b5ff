"""Sampling with a key/value cache: prompts are prefilled into rows, all rows decode together, free rows are refilled.

Shapes depend only on the sampler's settings and, in a prefill, on the bucket of the prompt's length, never on other
requests. Each request has its own random stream, from its seed and the token's number. So a request's tokens do not
depend on the batch. Requests with the same prompt object share its prefill, and samplers with the same model config and
sizes share compiled programs.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from model_port.attention import Layout, attention_of, blocked_attention
from model_port.config import TextConfig
from model_port.inputs import Frame, RowSequence, TextBatch, Tokens, VisionBatch, bucket, pack_text, pack_vision
from model_port.layers import Index
from model_port.model import Qwen3VL, row_layout
from model_port.sharding import constrain, everywhere
from model_port.text import Visual

MAX_STOP_IDS = 8


@dataclass(frozen=True, eq=False)
class SamplerPrompt:
    """Ids with expanded placeholders, and the placeholders' frames in order."""

    ids: Int[np.ndarray, " T"]
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    seed: int = 0
    temperature: float | int = 1.0  # 0: greedy, with log-probs at temperature 1
    stop_ids: tuple[int, ...] = ()  # sampling stops after the first of these, and keeps it

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 or a positive number")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(self.stop_ids)} stop ids were given, at most {MAX_STOP_IDS} are supported")


@dataclass(frozen=True)
class SamplerRequest:
    prompt: SamplerPrompt
    sampling: SamplingParams


@dataclass
class Completion:
    """Sampled ids and, for each, the log-prob under log_softmax(z / temperature)."""

    ids: list[int] = field(default_factory=list)
    behavior_logp: list[float] = field(default_factory=list)
    finish: Literal["stop", "length", "abort", "running"] = "running"


@flax.struct.dataclass
class Rows:
    """The state of all rows between two calls. `tokens` are the last sampled ones, which are not in the cache yet."""

    keys: Float[Any, "L B S K H"]
    values: Float[Any, "L B S K H"]
    tokens: Int[Any, " B"]
    num_cached: Int[Any, " B"]
    positions: Int[Any, " B"]
    seeds: UInt32[Any, "B 2"]
    num_sampled: Int[Any, " B"]
    max_new: Int[Any, " B"]
    temperatures: Float[Any, " B"]
    stop_ids: Int[Any, "B stops"]
    running: Bool[Any, " B"]


@flax.struct.dataclass
class Prefilled:
    """One prompt's keys and values, the logits of its last token, and the position of the next token."""

    keys: Float[Any, "L 1 T K H"]
    values: Float[Any, "L 1 T K H"]
    logits: Float[Any, "1 V"]
    num_tokens: Int[Any, ""]
    position: Int[Any, ""]


class Sampler:
    """Owns the rows and their cache. Use `submit` and `step` for continuous batching, or `generate` for a batch."""

    def __init__(
        self,
        model: Qwen3VL,
        *,
        max_rows: int = 8,
        max_context_tokens: int = 4096,
        token_bucket: int = 128,
        patch_bucket: int = 64,
        frame_bucket: int = 8,
        tokens_per_step: int = 16,
    ):
        self.config = model.config
        self.max_rows = max_rows
        self.max_context_tokens = max_context_tokens
        self.token_bucket, self.patch_bucket, self.frame_bucket = token_bucket, patch_bucket, frame_bucket
        self._graphdef, self.params = nnx.split(model)
        self._tokens_per_step = tokens_per_step
        self._rows: Rows = _empty_rows(model.config.text, model.compute.dtype, max_rows, max_context_tokens)
        self._occupants: list[int | None] = [None] * max_rows
        self._waiting: deque[int] = deque()
        self._requests: dict[int, SamplerRequest] = {}
        self._completions: dict[int, Completion] = {}
        self._prefilled: tuple[SamplerPrompt, Prefilled] | None = None
        self._num_submitted = 0

    def update(self, model: Qwen3VL) -> None:
        """Uses a model's parameters for all further tokens; prompts in the cache keep their old keys and values."""
        self.params = nnx.state(model)
        self._prefilled = None

    def submit(self, request: SamplerRequest) -> int:
        """Queues a request and returns its number; `step` computes it."""
        needed = len(request.prompt.ids) + request.sampling.max_new_tokens
        if len(request.prompt.ids) == 0:
            raise ValueError("a prompt needs at least one token")
        if needed > self.max_context_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt.ids)} tokens with max_new_tokens={request.sampling.max_new_tokens} "
                f"needs {needed} tokens of context, the sampler has max_context_tokens={self.max_context_tokens}"
            )
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._requests[number] = request
        self._completions[number] = Completion()
        self._waiting.append(number)
        return number

    def has(self, number: int) -> bool:
        """Whether a request is neither finished nor aborted."""
        return number in self._requests

    def sampled(self, number: int) -> list[int]:
        """The ids sampled so far for a request; empty once it is finished or aborted."""
        completion = self._completions.get(number)
        return [] if completion is None else list(completion.ids)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(number is not None for number in self._occupants)

    def step(self) -> dict[int, Completion]:
        """Fills free rows, decodes a few tokens in all rows, and returns the finished completions."""
        finished = self._fill_rows()
        if not any(number is not None for number in self._occupants):
            return finished
        self._rows, sampled, logp, was_running = decode(self._graphdef, self._tokens_per_step, self.params, self._rows)
        sampled, logp, was_running, running = jax.device_get((sampled, logp, was_running, self._rows.running))
        for row, number in enumerate(self._occupants):
            if number is not None:
                count = int(was_running[row].sum())
                self._extend(number, sampled[row, :count].tolist(), logp[row, :count].tolist())
                if not running[row]:
                    finished[number] = self._finish(row)
        return finished

    def abort(self, number: int) -> Completion:
        """Ends a request with the tokens sampled so far; its row is free at the next step."""
        if number in self._waiting:
            self._waiting.remove(number)
        elif number in self._occupants:
            row = self._occupants.index(number)
            self._rows = stop(self._rows, row)
            self._occupants[row] = None
        else:
            raise ValueError(f"request {number} is not running")
        del self._requests[number]
        completion = self._completions.pop(number)
        completion.finish = "abort"
        return completion

    def generate(self, requests: Iterable[SamplerRequest]) -> list[Completion]:
        """Samples all requests to the end and returns the completions in the order of the requests."""
        numbers = [self.submit(request) for request in requests]
        done: dict[int, Completion] = {}
        while self.busy:
            done |= self.step()
        return [done[number] for number in numbers]

    def _fill_rows(self) -> dict[int, Completion]:
        finished: dict[int, Completion] = {}
        for row, occupant in enumerate(self._occupants):
            if occupant is not None or not self._waiting:
                continue
            number = self._waiting.popleft()
            self._occupants[row] = number
            request = self._requests[number]
            prefilled = self._prefill_once(request.prompt)
            sampling = request.sampling
            stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
            stop_ids[: len(sampling.stop_ids)] = sampling.stop_ids
            seed = np.array([sampling.seed >> 32 & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF], np.uint32)
            settings = (seed, np.int32(sampling.max_new_tokens), np.float32(sampling.temperature), stop_ids)
            self._rows, token, logp = admit(self._rows, np.int32(row), prefilled, *settings)
            token, logp, running = jax.device_get((token, logp, self._rows.running))
            self._extend(number, [int(token)], [float(logp)])
            if not running[row]:
                finished[number] = self._finish(row)
        return finished

    def _prefill_once(self, prompt: SamplerPrompt) -> Prefilled:
        if self._prefilled is None or self._prefilled[0] is not prompt:
            self._prefilled = (prompt, self._compute_prefill(prompt))
        return self._prefilled[1]

    def _compute_prefill(self, prompt: SamplerPrompt) -> Prefilled:
        visual, first_rows = None, []
        if prompt.frames:
            row_patches = bucket(max(len(frame.patches) for frame in prompt.frames), self.patch_bucket)
            num_rows = bucket(len(prompt.frames), self.frame_bucket)
            vision, first_rows = pack_vision(prompt.frames, self.config.vision, row_patches, num_rows)
            visual = encode_vision(self._graphdef, self.params, vision)
        num_tokens = min(bucket(len(prompt.ids), self.token_bucket), self.max_context_tokens)
        sequence = RowSequence(Tokens(np.asarray(prompt.ids), tuple(range(len(prompt.frames)))))
        text = pack_text([[sequence]], prompt.frames, first_rows, self.config, num_tokens)
        last = len(prompt.ids) - 1
        # Text after a prompt continues from the largest position so far on any axis.
        position = np.int32(next_position(text.positions[0, : last + 1]))
        keys, values, logits = prefill(self._graphdef, self.params, text, visual, np.int32(last))
        return Prefilled(keys, values, logits, np.int32(len(prompt.ids)), position)

    def _extend(self, number: int, ids: list[int], logp: list[float]) -> None:
        completion = self._completions[number]
        completion.ids += ids
        completion.behavior_logp += logp

    def _finish(self, row: int) -> Completion:
        number = self._occupants[row]
        assert number is not None
        self._occupants[row] = None
        completion = self._completions.pop(number)
        stopped = completion.ids[-1] in self._requests.pop(number).sampling.stop_ids
        completion.finish = "stop" if stopped else "length"
        return completion


def next_position(positions: Int[np.ndarray, "T 3"]) -> int:
    """The position after the largest so far, because a frame advances text by its longer side."""
    return int(positions.max()) + 1


@partial(jax.jit, static_argnums=0)
def encode_vision(graphdef: nnx.GraphDef[Qwen3VL], params: nnx.State, vision: VisionBatch) -> Visual:
    return nnx.merge(graphdef, params).encode_vision(vision)


@partial(jax.jit, static_argnums=0)
def prefill(
    graphdef: nnx.GraphDef[Qwen3VL], params: nnx.State, text: TextBatch, visual: Visual | None, last: Int[Array, ""]
) -> tuple[Array, Array, Array]:
    """A prompt's keys and values, and the logits of its last token."""
    model = nnx.merge(graphdef, params)
    layout, attention = row_layout(text), attention_of(model.compute.attention)

    def attend(q: Array, k: Array, v: Array, index: Index, cache: None) -> tuple[Array, None, tuple[Array, Array]]:
        return attention(q, k, v, layout, True), None, (k, v)

    hidden, _, (keys, values) = model.text(
        jnp.asarray(text.tokens),
        jnp.asarray(text.positions),
        jnp.asarray(text.visual_index),
        visual,
        attend,
        None,
        model.compute,
    )
    end = jax.lax.dynamic_slice_in_dim(hidden, last, 1, axis=1)
    return keys, values, model.text.logits(end)[:, 0]


@partial(jax.jit, donate_argnums=0)
def admit(
    rows: Rows,
    row: Int[Array, ""],
    prompt: Prefilled,
    seed: UInt32[Array, "2"],
    max_new: Int[Array, ""],
    temperature: Float[Array, ""],
    stop_ids: Int[Array, " stops"],
) -> tuple[Rows, Int[Array, ""], Float[Array, ""]]:
    """Puts a prefilled prompt into a row and samples its first token."""
    token, logp = _sample(prompt.logits, seed[None], jnp.zeros(1, jnp.int32), temperature[None])
    rows = replace(
        rows,
        keys=jax.lax.dynamic_update_slice(rows.keys, prompt.keys, (0, row, 0, 0, 0)),
        values=jax.lax.dynamic_update_slice(rows.values, prompt.values, (0, row, 0, 0, 0)),
        tokens=rows.tokens.at[row].set(token[0]),
        num_cached=rows.num_cached.at[row].set(prompt.num_tokens),
        positions=rows.positions.at[row].set(prompt.position),
        seeds=rows.seeds.at[row].set(seed),
        num_sampled=rows.num_sampled.at[row].set(1),
        max_new=rows.max_new.at[row].set(max_new),
        temperatures=rows.temperatures.at[row].set(temperature),
        stop_ids=rows.stop_ids.at[row].set(stop_ids),
        running=rows.running.at[row].set((max_new > 1) & ~jnp.any(token[0] == stop_ids)),
    )
    return replace(rows, running=everywhere(rows.running)), everywhere(token[0]), everywhere(logp[0])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(
    graphdef: nnx.GraphDef[Qwen3VL], num_steps: int, params: nnx.State, rows: Rows
) -> tuple[Rows, Int[Array, "B n"], Float[Array, "B n"], Bool[Array, "B n"]]:
    """Up to `num_steps` tokens in every running row; the flags mark the valid ones."""
    model = nnx.merge(graphdef, params)
    every_row = jnp.arange(len(rows.tokens))
    slots = jnp.arange(rows.keys.shape[2])[None]

    def one_token(rows: Rows, _: None) -> tuple[Rows, tuple[Array, Array, Array]]:
        slot = rows.num_cached
        filled = (slots <= slot[:, None]).astype(jnp.int32)
        key_layout = Layout(filled, jnp.zeros_like(filled), jnp.broadcast_to(slots, filled.shape))
        ones = jnp.ones_like(slot)[:, None]
        query_layout = Layout(ones, jnp.zeros_like(ones), slot[:, None])

        def attend(q: Array, k: Array, v: Array, index: Index, cache: Any) -> tuple[Array, Any, None]:
            keys, values = cache
            keys = keys.at[index, every_row, slot].set(k[:, 0])
            values = values.at[index, every_row, slot].set(v[:, 0])
            mixed = blocked_attention(q, keys[index], values[index], query_layout, key_layout, True)
            return mixed, (keys, values), None

        positions = jnp.broadcast_to(rows.positions[:, None, None], (len(slot), 1, 3))
        no_visual = jnp.full((len(slot), 1), -1)
        hidden, (keys, values), _ = model.text(
            rows.tokens[:, None], positions, no_visual, None, attend, (rows.keys, rows.values), model.compute
        )
        token, logp = _sample(model.text.logits(hidden)[:, 0], rows.seeds, rows.num_sampled, rows.temperatures)
        was_running = rows.running
        advance = was_running.astype(jnp.int32)
        num_sampled = rows.num_sampled + advance
        stopped = jnp.any(token[:, None] == rows.stop_ids, axis=1) | (num_sampled >= rows.max_new)
        rows = replace(
            rows,
            keys=keys,
            values=values,
            tokens=jnp.where(was_running, token, rows.tokens),
            num_cached=rows.num_cached + advance,
            positions=rows.positions + advance,
            num_sampled=num_sampled,
            running=was_running & ~stopped,
        )
        return rows, (token, logp, was_running)

    rows, outs = jax.lax.scan(one_token, rows, None, length=num_steps)
    sampled, logp, was_running = (everywhere(out.T) for out in outs)
    return replace(rows, running=everywhere(rows.running)), sampled, logp, was_running


@partial(jax.jit, donate_argnums=0)
def stop(rows: Rows, row: Int[Array, ""]) -> Rows:
    return replace(rows, running=rows.running.at[row].set(False))


def _sample(
    logits: Float[Array, "B V"], seeds: UInt32[Array, "B 2"], number: Int[Array, " B"], temperatures: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Gumbel-max sampling; each row's noise depends only on its seed and the token's number."""

    def noise(seed: UInt32[Array, "2"], number: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)
        return jax.random.gumbel(key, logits.shape[1:])

    warm = (temperatures > 0)[:, None]
    scaled = logits / jnp.where(warm, temperatures[:, None], 1.0)
    token = jnp.argmax(jnp.where(warm, scaled + jax.vmap(noise)(seeds, number), scaled), axis=-1)
    logp = jnp.take_along_axis(jax.nn.log_softmax(scaled, axis=-1), token[:, None], axis=1)[:, 0]
    return token.astype(jnp.int32), logp


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_rows(c: TextConfig, dtype: str, max_rows: int, max_context_tokens: int) -> Rows:
    shape = (c.num_layers, max_rows, max_context_tokens, c.num_kv_heads, c.head_dim)

    def cache() -> Array:
        return constrain(jnp.zeros(shape, dtype), "lbskh")

    def count() -> Array:
        return jnp.zeros(max_rows, jnp.int32)

    return Rows(
        keys=cache(),
        values=cache(),
        tokens=count(),
        num_cached=count(),
        positions=count(),
        seeds=jnp.zeros((max_rows, 2), jnp.uint32),
        num_sampled=count(),
        max_new=count(),
        temperatures=jnp.zeros(max_rows, jnp.float32),
        stop_ids=jnp.full((max_rows, MAX_STOP_IDS), -1, jnp.int32),
        running=jnp.zeros(max_rows, bool),
    )
