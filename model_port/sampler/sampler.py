"""Fills rows with requests, decodes them together, and returns completions.

Each request has its own random stream, from its seed and the token's number, and its own rows in every program, so its
tokens depend neither on other requests nor on the content of the cache. Prompts are prefilled in chunks at fixed
positions. If the cache has a prompt's prefix, frames included, only the rest is prefilled. This is how the rollouts of
a group, the turns of an episode and sub-agents with the same instructions share work. A request's sampled tokens are
prefilled again in the next turn, because prefill and decoding round differently.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from model_port.inputs import NOT_VISUAL, Frame, bucket, pack_vision
from model_port.model import VLModel
from model_port.sampler.check import check_paged
from model_port.sampler.frames import FrameTable
from model_port.sampler.paged import TABLE_PAGES, kernel_of, walked
from model_port.sampler.pages import PAGE_TOKENS, PagePool
from model_port.sampler.programs import Chunk, copy_page, decode, empty_cache, empty_frames, encode, no_rows, prefill
from model_port.sampler.requests import MAX_STOP_IDS, Completion, PreparedPrompt, SamplerRequest
from model_port.sharding import on_mesh, platform, shapes_of

# Tokens that are prefilled together, in whole pages. A chunk of 256 tokens of the 8B took 25 ms on an H200, four times
# as long as its matrix products need.
CHUNK_TOKENS = {"cpu": 128}
CHUNK_TOKENS_ELSEWHERE = 1024
FRAME_ROWS = 8  # frames that are encoded together
MIN_ROW_PATCHES = 16


@dataclass(eq=False)
class BusyRow:
    number: int
    request: SamplerRequest
    completion: Completion
    pages: list[int]


class Sampler:
    """Owns the cache and the rows. Use `submit` and `step` for continuous batching, or `generate` for a batch.

    At most `max_rows` requests run at a time; a step decodes up to `tokens_per_step` tokens of each. Prompt and
    `max_new_tokens` of a request may have `max_context_tokens` together. All requests share a cache of `cache_tokens`,
    in which each reserves this number. By default the cache has a full context for every row.
    """

    def __init__(
        self,
        model: VLModel,
        *,
        max_rows: int = 8,
        max_context_tokens: int = 4096,
        cache_tokens: int | None = None,
        tokens_per_step: int = 16,
    ):
        self.config = model.config
        self.max_context_tokens = max_context_tokens
        cache_tokens = max_rows * max_context_tokens if cache_tokens is None else cache_tokens
        if cache_tokens < max_context_tokens:
            raise ValueError(f"cache_tokens={cache_tokens} is less than max_context_tokens={max_context_tokens}")
        self._graphdef, self.params = nnx.split(model)
        self._tokens_per_step = tokens_per_step
        self._pool = PagePool(1 + -(-cache_tokens // PAGE_TOKENS) + max_rows)
        self._table_pages = bucket(-(-max_context_tokens // PAGE_TOKENS), TABLE_PAGES)
        dtype = model.compute.dtype
        kernel = kernel_of(model.config.text.head_dim)
        self.kernel_check = None if kernel is None else check_paged(kernel, model.config.text, dtype)
        self._attend = kernel if kernel and self.kernel_check and self.kernel_check.passed else walked
        self._cache = empty_cache(model.config, dtype, self._pool.num_pages, PAGE_TOKENS)
        self._table = FrameTable()
        self._chunk_tokens = chunk_tokens(platform())
        self._frames = empty_frames(model.config, dtype, self._table.num_tokens)
        self._rows: list[BusyRow | None] = [None] * max_rows
        self._state = no_rows(max_rows, self._table_pages, MAX_STOP_IDS)  # the programs' input, kept on the host
        self._waiting: deque[tuple[int, SamplerRequest, PreparedPrompt]] = deque()
        self._num_submitted = 0
        self._compiled: Future[Any] | None = None  # of decoding

    def update(self, model: VLModel) -> None:
        """Uses a model's parameters for all further tokens; running requests keep their old keys and values."""
        self.params = nnx.state(model)
        self._pool.forget()
        self._table.forget()

    def submit(self, request: SamplerRequest) -> int:
        """Queues a request for `step` and returns its number. Raises ValueError if the request is invalid."""
        prompt = PreparedPrompt.of(request.prompt, self.config)
        if (needed := _num_tokens(request, prompt)) > self.max_context_tokens:
            raise ValueError(
                f"a prompt of {len(prompt.ids)} tokens with max_new_tokens={request.sampling.max_new_tokens} needs "
                f"{needed} tokens of context, but the sampler has max_context_tokens={self.max_context_tokens}"
            )
        largest = max((end - start for start, end in prompt.frame_spans), default=0)
        if 2 * largest + self._chunk_tokens > self._table.num_tokens:
            most = (self._table.num_tokens - self._chunk_tokens) // 2
            raise ValueError(f"a frame has {largest} tokens, but the sampler supports at most {most}")
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        self._waiting.append((number, request, prompt))
        return number

    def sampled(self, number: int) -> list[int]:
        """Returns the ids sampled so far for a request; empty once it has finished or was aborted."""
        return next((list(row.completion.ids) for row in self._rows if row is not None and row.number == number), [])

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or any(row is not None for row in self._rows)

    def step(self) -> dict[int, Completion]:
        """Fills free rows, decodes a few tokens in all rows, and returns the finished completions."""
        if self._compiled is None:
            self._compiled = self._compile_decoding()
        self._fill_rows()
        if not any(row is not None for row in self._rows):
            return {}
        self._compiled.result()
        self._cache, *results = decode(
            self._graphdef, self._tokens_per_step, self._attend, self.params, self._cache, self._state
        )
        tokens, logp, counts = jax.device_get(results)
        for counter in (self._state.slots, self._state.positions, self._state.num_sampled):
            counter += counts
        finished = {}
        for index, row in enumerate(self._rows):
            if row is None:
                continue
            count, completion, sampling = int(counts[index]), row.completion, row.request.sampling
            completion.ids += tokens[index, :count].tolist()
            completion.behavior_logp += logp[index, :count].tolist()
            self._state.tokens[index] = last = completion.ids[-1]
            if last in sampling.stop_ids:
                completion.finish = "stop"
            elif len(completion.ids) == sampling.max_new_tokens:
                completion.finish = "length"
            if completion.finish != "running":
                finished[row.number] = self._free(index, row)
        return finished

    def abort(self, number: int) -> Completion:
        """Ends a request that has not finished and returns its tokens so far; its row is free at the next step."""
        for waiting in self._waiting:
            if waiting[0] == number:
                self._waiting.remove(waiting)
                return Completion(finish="abort")
        for index, row in enumerate(self._rows):
            if row is not None and row.number == number:
                row.completion.finish = "abort"
                return self._free(index, row)
        raise ValueError(f"request {number} is not running")

    def generate(self, requests: Iterable[SamplerRequest]) -> list[Completion]:
        """Samples all requests to the end and returns the completions in the order of the requests.

        If a request is invalid, none is sampled. Completions of requests from `submit` are lost; use `step` for them.
        """
        numbers: list[int] = []
        try:
            for request in requests:
                numbers.append(self.submit(request))
        except BaseException:
            for number in numbers:
                self.abort(number)
            raise
        done: dict[int, Completion] = {}
        try:
            while self.busy:
                done |= self.step()
        except BaseException:
            self._clear()
            raise
        return [done[number] for number in numbers]

    def _clear(self) -> None:
        """Drops all requests and the cache, because an interrupted step may have stored only a part of a prompt."""
        self._waiting.clear()
        for index, row in enumerate(self._rows):
            if row is not None:
                self._free(index, row)
        self._pool = PagePool(self._pool.num_pages)
        self._table.forget()

    def _compile_decoding(self) -> Future[Any]:
        """Compiles decoding in a thread, while this one compiles encoding and prefill."""
        statics, mesh = (self._graphdef, self._tokens_per_step, self._attend), jax.sharding.get_mesh()
        shapes = shapes_of((self.params, self._cache))

        def compile() -> Any:
            with on_mesh(None if mesh.empty else mesh):
                return decode.lower(*statics, *shapes, self._state).compile()

        return ThreadPoolExecutor(1, thread_name_prefix="compile").submit(compile)

    def _free(self, index: int, row: BusyRow) -> Completion:
        self._rows[index] = None
        self._state.running[index], self._state.slots[index] = False, 0
        self._state.table[index] = 0  # free rows write to page 0
        self._pool.release(row.pages)
        return row.completion

    def _fill_rows(self) -> None:
        """Starts waiting requests in order, as long as rows and pages are free."""
        for index, row in enumerate(self._rows):
            if row is not None:
                continue
            if not self._waiting:
                return
            number, request, prompt = self._waiting[0]
            if (pages := self._cached(prompt, -(-_num_tokens(request, prompt) // PAGE_TOKENS))) is None:
                return
            self._waiting.popleft()
            self._rows[index] = BusyRow(number, request, Completion(), pages)
            last, sampling, state = prompt.num_cached, request.sampling, self._state
            state.tokens[index], state.slots[index] = prompt.ids[last], last
            state.positions[index], state.table[index] = prompt.positions[last, 0], self._page_table(pages)
            state.seeds[index] = int(sampling.seed) >> 32 & 0xFFFFFFFF, int(sampling.seed) & 0xFFFFFFFF
            state.num_sampled[index], state.max_new[index] = 0, sampling.max_new_tokens
            state.temperatures[index], state.running[index] = sampling.temperature, True
            state.stop_ids[index] = [*sampling.stop_ids, *[-1] * (MAX_STOP_IDS - len(sampling.stop_ids))]

    def _cached(self, prompt: PreparedPrompt, num_pages: int) -> list[int] | None:
        """Allocates a request's pages and prefills all tokens of its prompt but the last.

        Returns None if there are not enough free pages yet.
        """
        digests = prompt.page_digests
        held = self._pool.find(digests)
        self._pool.hold(held)
        num_whole = prompt.num_cached // PAGE_TOKENS
        shared, copied = held[:num_whole], held[num_whole:]
        if num_pages - len(shared) > self._pool.num_available:
            self._pool.release(held)
            return None
        pages = [*shared, *self._pool.take(num_pages - len(shared))]
        for page in copied:  # a copy, because the request will write after the prompt's end in this page
            self._cache = copy_page(
                self._cache, self.config.text.num_layers, np.int32(page), np.int32(pages[num_whole])
            )
        self._pool.release(copied)
        if len(held) < len(digests):
            self._prefill(prompt, pages, len(held))
            for page, digest in zip(pages, digests, strict=False):
                self._pool.label(page, digest)
        return pages

    def _prefill(self, prompt: PreparedPrompt, pages: list[int], num_shared: int) -> None:
        """Computes the pages after the first `num_shared`, from the start of the chunk in which they begin."""
        table, chunk_tokens = self._page_table(pages), self._chunk_tokens
        size = chunk_tokens // PAGE_TOKENS
        for first in range(num_shared // size * size, -(-prompt.num_cached // PAGE_TOKENS), size):
            begin = first * PAGE_TOKENS
            count = min(chunk_tokens, prompt.num_cached - begin)
            tokens, positions = np.zeros(chunk_tokens, np.int32), np.zeros((chunk_tokens, 3), np.int32)
            visual_index = np.full(chunk_tokens, NOT_VISUAL, np.int32)
            part = slice(begin, begin + count)
            tokens[:count], positions[:count] = prompt.ids[part], prompt.positions[part]
            visual_index[:count] = self._table_rows(prompt, prompt.visual_index[part])
            written = table[first : first + size].copy()
            written[: max(0, num_shared - first)] = 0  # do not write pages that other requests read
            written[-(-count // PAGE_TOKENS) :] = 0
            slots = np.minimum(begin + np.arange(chunk_tokens, dtype=np.int32), begin + count - 1)
            chunk = Chunk(tokens[None], positions[None], visual_index[None], slots[None], table[None], written)
            self._cache = prefill(self._graphdef, self._attend, self.params, self._cache, self._frames, chunk)

    def _table_rows(self, prompt: PreparedPrompt, visual_index: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        """Encodes the missing frames of a chunk, and returns the table rows of its visual tokens."""
        is_visual = visual_index != NOT_VISUAL
        own = visual_index[is_visual]
        number = np.searchsorted(prompt.frame_starts, own, side="right") - 1  # of the frame
        spans, seen = prompt.frame_spans, np.unique(number).tolist()
        missing = self._table.place([(prompt.frames[n], spans[n][1] - spans[n][0]) for n in seen])
        self._encode(missing)
        first = np.zeros(len(prompt.frames) + 1, np.int32)
        first[seen] = [self._table[prompt.frames[n]] - spans[n][0] for n in seen]
        rows = np.full_like(visual_index, NOT_VISUAL)
        rows[is_visual] = own + first[number]
        return rows

    def _encode(self, frames: list[Frame]) -> None:
        """Encodes frames, those of similar size together, so that few programs are compiled."""
        by_size: dict[int, list[Frame]] = {}
        for frame in frames:
            size = max(MIN_ROW_PATCHES, 1 << (len(frame.patches) - 1).bit_length())
            by_size.setdefault(size, []).append(frame)
        for row_patches, alike in by_size.items():
            for at in range(0, len(alike), FRAME_ROWS):
                batch = alike[at : at + FRAME_ROWS]
                vision, first_rows = pack_vision(batch, self.config.vision, row_patches, FRAME_ROWS)
                merged = self.config.vision.merge_unit
                to = np.full(FRAME_ROWS * row_patches // merged, self._table.num_tokens, np.int32)
                for frame, row in zip(batch, first_rows, strict=True):
                    size = len(frame.patches) // merged
                    to[row : row + size] = self._table[frame] + np.arange(size)
                self._frames = encode(self._graphdef, self.params, vision, self._frames, to)

    def _page_table(self, pages: list[int]) -> Int[np.ndarray, " W"]:
        table = np.zeros(self._table_pages, np.int32)
        table[: len(pages)] = pages
        return table


def chunk_tokens(platform: str) -> int:
    return CHUNK_TOKENS.get(platform, CHUNK_TOKENS_ELSEWHERE)


def _num_tokens(request: SamplerRequest, prompt: PreparedPrompt) -> int:
    return len(prompt.ids) + request.sampling.max_new_tokens
