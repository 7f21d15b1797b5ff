"""The embedded engine: the learner's model samples in the learner's process.

The engine needs no second environment and samples on this host's devices, from the weights or a copy of them. A request
with the same seed gets the same tokens, independent of other requests. One thread owns the sampler; the event loop only
waits.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from model_port.inputs import Frame
from model_port.model import VLModel
from model_port.processing import VisionContract, expand_placeholders
from model_port.sampler import Completion, Sampler, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.sharding import on_mesh
from paravt_jax.sampling.frames import frame_of
from paravt_jax.sampling.local_copy import LocalCopy
from paravt_jax.sampling.weights import ModelWeights
from rollout.engine.protocol import (
    DeadlineExceeded,
    EngineError,
    Generation,
    Health,
    Request,
    RequestRejected,
    ServerHealth,
    VersionMismatch,
    Weights,
)
from rollout.picture import Picture

Result = TypeVar("Result")
NAME = "embedded"
FRAME_BYTES = 2**30  # cache of patches; a frame at the recipe's largest size takes 1.2 MB


@dataclass(eq=False)
class Running:
    """A request in the sampler. `versions` lags behind: it covers tokens up to the last publish or the end."""

    episode: str
    done: asyncio.Future[Completion] | None = None  # set by `generate`
    number: int | None = None  # number in the sampler, once the request is submitted
    num_prompt_tokens: int = 0
    on_tokens: Callable[[Sequence[int]], object] | None = None
    sampled: list[int] = field(default_factory=list)  # tokens so far, for `on_tokens`
    versions: Int[np.ndarray, " n"] = field(default_factory=lambda: np.zeros(0, np.int32))

    def notify(self, ended: Completion | Exception | None) -> None:
        """Passes the result, or the tokens so far, to the caller."""
        if self.on_tokens is not None and not isinstance(ended, Exception):
            try:
                self.on_tokens(self.sampled if ended is None else ended.ids)
            except Exception as problem:  # the caller's error only fails this request
                ended = problem
        if ended is None or self.done is None or self.done.done():
            return
        if isinstance(ended, Exception):
            self.done.set_exception(ended)
        else:
            self.done.set_result(ended)


class EmbeddedEngine:
    """Implements the engine protocol: requests go to the sampler's thread, completions return to the event loop."""

    def __init__(
        self,
        model: VLModel,
        contract: VisionContract,
        version: int = 0,
        *,
        mesh: Mesh | None = None,
        beside_update: bool = False,
        **sampler: Any,
    ):
        """Starts the sampler on the model's `mesh` with its options. `beside_update`: it samples during updates."""
        self._copy, self._model = LocalCopy(model, mesh, beside_update=beside_update), model
        with on_mesh(self._copy.mesh):
            self._sampler = Sampler(self._copy.of(model), **sampler)
        self.kernel_check = self._sampler.kernel_check
        self._contract = contract
        self._version = version
        self._running: dict[int, Running] = {}  # by number in the sampler; used only in the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        self._submitted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._frames: OrderedDict[str, Frame] = OrderedDict()
        self._frame_bytes = 0

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Generation:
        if self._failure is not None:
            raise EngineError(f"the embedded engine has failed: {self._failure!r}") from self._failure
        if request.version not in (None, self._version):
            raise VersionMismatch(f"the engine has version {self._version}, expected version {request.version}")
        started_s = time.monotonic()
        if self._pump is None:
            self._pump = asyncio.create_task(self._sample())
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        running = Running(request.episode, done, on_tokens=request.on_tokens)
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._in_thread(lambda: self._submit(request, running))
                self._submitted.set()
                if self._failure is not None:  # the sampler failed before the request was submitted
                    running.notify(self._failure)
                completion = await done
        except TimeoutError:
            raise DeadlineExceeded(f"the embedded engine did not finish a request in {request.deadline_s} s") from None
        finally:
            if not done.done() or done.cancelled() or done.exception() is not None:
                await asyncio.shield(self._in_thread(lambda: self._stop(running)))
        assert completion.finish != "running"
        if request.version is not None and (running.versions != request.version).any():  # newly published
            versions = sorted(set(running.versions.tolist()))
            raise VersionMismatch(f"the engine sampled with versions {versions}, expected version {request.version}")
        return Generation(
            np.array(completion.ids, np.int32),
            np.array(completion.behavior_logp, np.float32),
            running.versions,
            completion.finish,
            running.num_prompt_tokens,
            server=NAME,
            latency_s=time.monotonic() - started_s,
        )

    async def publish(self, weights: Weights, version: int) -> None:
        """Loads new weights. Running requests continue with them, but keep the KV cache of the old weights."""
        if not isinstance(weights, ModelWeights):
            raise EngineError(f"the embedded engine expects ModelWeights, got {type(weights).__name__}")

        def update() -> None:
            for number, running in self._running.items():
                self._mark_version(running, len(self._sampler.sampled(number)))
            self._model, self._version = weights.model, version
            self._sampler.update(self._copy.of(weights.model))

        await self._in_thread(update)

    async def health(self) -> Health:
        return Health((ServerHealth(NAME, self._failure is None, self._version, repr(self._failure or "")),))

    async def abort(self, episode: str | None = None) -> None:
        def stop_all() -> list[tuple[Running, Completion | None]]:
            chosen = [running for running in self._running.values() if episode in (None, running.episode)]
            return [(running, self._stop(running)) for running in chosen]

        for running, completion in await self._in_thread(stop_all):
            if completion is not None:
                running.notify(completion)

    async def close(self) -> None:
        await self.abort()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        self._thread.shutdown()

    async def _sample(self) -> None:
        """Runs the sampler while there are requests."""
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                finished = await self._in_thread(self._step)
                while finished or self._sampler.busy:
                    for running, completion in finished:
                        running.notify(completion)
                    finished = await self._in_thread(self._step)
        except Exception as problem:  # sampling cannot continue, so every caller gets the error
            self._failure = problem
            for running in [*self._running.values()]:
                running.notify(problem)

    # Methods that run in the sampler's thread

    def _step(self) -> Sequence[tuple[Running, Completion | Exception | None]]:
        """Runs a step. Returns the running requests, each with its completion if it ended."""
        was_running = dict(self._running)
        if self._sampler.busy and not self._sampler.params:
            self._sampler.params = nnx.state(self._copy.of(self._model))
        finished = self._sampler.step() if self._sampler.busy else {}
        for number, completion in finished.items():
            self._mark_version(self._running.pop(number), len(completion.ids))
        for number, running in self._running.items():
            if running.on_tokens is not None:
                running.sampled = self._sampler.sampled(number)
        self._delete_if_idle()
        return [(running, finished.get(number)) for number, running in was_running.items()]

    def _stop(self, running: Running) -> Completion | None:
        """Ends a request. A request that was cancelled before it was submitted has no number."""
        if running.number is None or self._running.pop(running.number, None) is None:
            return None
        completion = self._sampler.abort(running.number)
        self._mark_version(running, len(completion.ids))
        self._delete_if_idle()
        return completion

    def _delete_if_idle(self) -> None:
        """Deletes a temporary copy of the weights if the sampler is idle, because an update may follow."""
        if self._copy.is_temporary and not self._sampler.busy:
            self._sampler.params = nnx.State({})

    def _submit(self, request: Request, running: Running) -> None:
        sampling = request.sampling
        if sampling.top_p != 1:
            raise RequestRejected(f"the embedded engine samples from all tokens: set top_p=1, not {sampling.top_p}")
        try:
            settings = SamplingParams(sampling.max_new_tokens, sampling.seed, sampling.temperature, sampling.stop_ids)
            prompt = self._prompt(request)
            running.number = self._sampler.submit(SamplerRequest(prompt, settings))
        except ValueError as problem:
            raise RequestRejected(str(problem)) from None
        running.num_prompt_tokens = len(prompt.ids)
        self._running[running.number] = running

    def _prompt(self, request: Request) -> SamplerPrompt:
        frames = tuple(self._frame(picture) for picture in request.pictures)
        counts = [len(frame.patches) // self._sampler.config.vision.merge_unit for frame in frames]
        return SamplerPrompt(expand_placeholders(request.ids, counts, self._sampler.config.image_token_id), frames)

    def _frame(self, picture: Picture) -> Frame:
        frame = self._frames.pop(picture.key, None)
        if frame is None:
            frame = frame_of(picture, self._contract)
            self._frame_bytes += frame.patches.nbytes
        self._frames[picture.key] = frame
        while self._frame_bytes > FRAME_BYTES:
            self._frame_bytes -= self._frames.popitem(last=False)[1].patches.nbytes
        return frame

    def _mark_version(self, running: Running, num_sampled: int) -> None:
        """Labels tokens since the last call with the current version; called before a publish and at the end."""
        running.versions = np.pad(
            running.versions, (0, num_sampled - len(running.versions)), constant_values=self._version
        )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        def on_our_mesh() -> Result:
            with on_mesh(self._copy.mesh):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, on_our_mesh)
