"""How long an engine's server takes for what it is asked, as `paravt_jax.plan.service` counts it.

Everything is asked in bursts, as a step does, and divided by their size: what a server overlaps is in the figures. The
costs are those that fit the times of all bursts best, relative to each, and none of them is negative.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paravt_jax.plan.service import ServiceTimes
from rollout.chat import Chat
from rollout.engine.protocol import Engine, Request, Sampling
from rollout.picture import Picture

BURST = 8  # requests at once: more, and an engine gives some to another server
TEXTS = (64, 448)  # tokens of a short prompt and of a long one
FRAMES = 4  # of a prompt that shows some
DECODED_TOKENS = 33  # the first is read's
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
FEWER_IDS = 200  # of a vocabulary, to draw from: bytes in all of ours
DEADLINE_S = 600.0
APART_S = 0.05
LEAST_S = 1e-6  # of decoding: a busy machine may have taken longer to read alone


Features = tuple[float | int, ...]


class ProbePrompt(NamedTuple):
    ids: np.ndarray
    pictures: tuple[Picture, ...] = ()


class Probe:
    """Asks an engine for prompts that nobody has seen, and says how long it took."""

    def __init__(self, engine: Engine, chat: Chat, frame_px: tuple[int, int]) -> None:
        self._engine, self._chat, self._frame_px = engine, chat, frame_px
        self._random = np.random.default_rng(0)
        self._numbers = itertools.count()

    def text(self, num_tokens: int) -> ProbePrompt:
        return ProbePrompt(self._random.integers(0, FEWER_IDS, num_tokens).astype(np.int32))

    def shown(self) -> ProbePrompt:
        pixels = self._random.integers(0, 256, (FRAMES, *self._frame_px, 3), np.uint8)
        ids = np.concatenate([self.text(TEXTS[0]).ids, *[self._chat.encode(SHOWN)] * FRAMES])
        return ProbePrompt(ids, tuple(map(Picture.of, pixels)))

    async def seconds(self, prompts: Sequence[ProbePrompt], num_tokens: int = 1, server: str = "one") -> float:
        """Of a burst. Equal names of a server mean the same one, as far as there are as many."""
        begun_s = time.perf_counter()
        await asyncio.gather(*(self._ask(prompt, num_tokens, server) for prompt in prompts))
        return time.perf_counter() - begun_s

    async def _ask(self, prompt: ProbePrompt, num_tokens: int, server: str) -> None:
        number = next(self._numbers)
        sampling = Sampling(num_tokens, temperature=1.0, seed=number)
        await self._engine.generate(Request(*prompt, sampling, f"probe-{number}", DEADLINE_S, affinity=server))


async def reading(probe: Probe, repeats: int, frame_tokens: int) -> np.ndarray:
    """Seconds of a request, of a token, of a frame that is shown, and of one that is new."""
    short, long = TEXTS
    bursts: list[tuple[tuple[int, int, int, int], Callable[[], list[ProbePrompt]]]] = [
        ((1, short, 0, 0), lambda: [probe.text(short) for _ in range(BURST)]),
        ((1, long, 0, 0), lambda: [probe.text(long) for _ in range(BURST)]),
        ((1, short + FRAMES * (2 + frame_tokens), FRAMES, FRAMES), lambda: [probe.shown() for _ in range(BURST)]),
    ]
    costs: dict[Features, list[float]] = {}
    for repeat in range(1 + repeats):  # the first one compiles
        for (request, tokens, frames, new), make in bursts:
            prompts = make()
            times = {(request, tokens, frames, new): await probe.seconds(prompts)}
            times[request, 0, frames, 0] = await probe.seconds([prompts[-1]] * BURST)
            for features, seconds in times.items():
                costs.setdefault(features, []).extend([seconds / BURST] * (repeat > 0))
    return fitted(costs)


async def decoding(probe: Probe, repeats: int) -> np.ndarray:
    """Seconds of a token, of a sequence more in it, and of a token more of context."""
    costs: dict[Features, list[float]] = {}
    for repeat in range(1 + repeats):
        for num_tokens, rows in itertools.product(TEXTS, (1, BURST)):
            prompts = [probe.text(num_tokens)] * rows
            await probe.seconds(prompts[:1])
            read_s, all_s = await probe.seconds(prompts), await probe.seconds(prompts, DECODED_TOKENS)
            context = rows * (num_tokens + DECODED_TOKENS / 2)
            seconds = max(LEAST_S, all_s - read_s) / (DECODED_TOKENS - 1)
            costs.setdefault((1, rows, context), []).extend([seconds] * (repeat > 0))
    return np.maximum(fitted(costs), (LEAST_S, 0, 0))  # an uneven machine's times may fit the contexts alone


async def slowdown(probe: Probe, num_servers: int, repeats: int) -> float:
    """How many times as long a server takes while all of them compute."""
    prompts = [probe.text(TEXTS[0])] * BURST

    async def decoded_s(number: int) -> float:
        await asyncio.sleep(number * APART_S)  # so that each finds a server that has nothing to do
        return await probe.seconds(prompts, DECODED_TOKENS, f"server-{number}")

    ratios = []
    for _ in range(1 + repeats):
        alone_s = await decoded_s(0)
        ratios.append(max(await asyncio.gather(*map(decoded_s, range(num_servers)))) / alone_s)
    return statistics.median(ratios[1:])


def fitted(costs: dict[Features, list[float]]) -> np.ndarray:
    """The costs of which the times are made, each time the median of its repeats."""
    features = np.array(list(costs))
    times = np.array([statistics.median(values) for values in costs.values()])
    features, times = features / times[:, None], np.ones(len(times))
    kept, found = list(range(features.shape[1])), np.zeros(features.shape[1])
    while kept:
        solved = np.linalg.lstsq(features[:, kept], times, rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved
            break
        del kept[int(np.argmin(solved * features[:, kept].max(0)))]
    return found


async def service_of(
    engine: Engine,
    chat: Chat,
    *,
    frame_px: tuple[int, int],
    token_px: int,
    repeats: int,
    num_servers: int = 1,
    share: float = 0.0,
    **known: float | int,
) -> ServiceTimes:
    """`share` is what a server takes of the learner's machine as far as one knows; of several it is measured."""
    probe = Probe(engine, chat, frame_px)
    request_s, token_s, shown_s, frame_s = await reading(probe, repeats, frame_px[0] * frame_px[1] // token_px**2)
    step_s, row_s, context_token_s = await decoding(probe, repeats)
    if share and num_servers > 1:
        share = max(share, await slowdown(probe, num_servers, repeats) / num_servers)
    costs = (request_s, token_s, shown_s, frame_s, step_s, row_s, context_token_s)
    return ServiceTimes(*map(float, costs), share=min(1.0, share), **known)  # type: ignore[arg-type]
