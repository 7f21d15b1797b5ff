"""The numbers that a step's seconds depend on, at their best and at their worst.

docs/machines.md, section "Seconds per step", lists the source of each number. A run's log replaces some of them
(calibrate.py).
"""

import math
from typing import NamedTuple


class StepRates(NamedTuple):
    calls: float  # per episode
    turns: float  # requests per main agent; each sends all pictures again
    length: float  # sampled tokens over the plan's assumption
    tail: float  # the longest dialogue over the mean
    matmul_frac: float  # fraction of peak FLOPs, in prefill and the vision tower
    memory_frac: float  # fraction of memory bandwidth, in decoding
    weight_passes: float  # times a token moves the weights, if one device samples from the learner's own arrays
    copy_passes: float  # the same, if the embedded sampler has a copy
    hop_s: float  # latency of an all-reduce over a sampler's devices
    overview_s: float  # CPU core seconds to decode the frames of an overview
    picture_s: float  # server CPU seconds per picture in a request
    publish_bytes_per_s: float  # from the learner into all servers
    update: float  # an update's time relative to its roofline


TEXTS = {  # name, factor of the printed unit, unit
    "calls": ("calls per episode", 1, ""),
    "turns": ("requests of a main agent", 1, ""),
    "length": ("sampled tokens over the assumed", 1, ""),
    "tail": ("the longest dialogue over the mean", 1, ""),
    "matmul_frac": ("prefill, of peak FLOPs", 100, " %"),
    "memory_frac": ("decoding, of memory bandwidth", 100, " %"),
    "weight_passes": ("passes over the learner's weights per token", 1, ""),
    "copy_passes": ("passes over the sampler's copy per token", 1, ""),
    "hop_s": ("an all-reduce of the sampler", 1e6, " µs"),
    "overview_s": ("an overview on a CPU core", 1, " s"),
    "picture_s": ("a picture on the server's CPU", 1e3, " ms"),
    "publish_bytes_per_s": ("new weights into servers", 1e-9, " GB/s"),
    "update": ("an update over its roofline", 1, ""),
}


class RateRange(NamedTuple):
    """All rates at their best and at their worst."""

    low: StepRates
    high: StepRates

    def middle_but(self, name: str, end: StepRates) -> StepRates:
        """All rates in the middle, but this one at one end."""
        middle = StepRates(*(math.sqrt(best * worst) for best, worst in zip(self.low, self.high, strict=True)))
        return middle._replace(**{name: getattr(end, name)})

    def text(self, name: str) -> str:
        """For example `a picture on the server's CPU (8 to 30 ms)`."""
        return f"{TEXTS[name][0]} ({self.values(name)})"

    def values(self, name: str) -> str:
        _, factor, unit = TEXTS[name]
        best, worst = (f"{factor * value:.2g}" for value in (getattr(self.low, name), getattr(self.high, name)))
        return f"{best if best == worst else f'{best} to {worst}'}{unit}"


PUBLISHED = RateRange(
    StepRates(0.21, 2.0, 1.0, 1.3, 0.56, 0.81, 1.0, 1.0, 6e-6, 5.0, 0.008, 2e9, 0.85),
    StepRates(2.5, 4.0, 1.0, 3.0, 0.26, 0.5, 3.5, 1.84, 2.6e-5, 22.0, 0.030, 1e9, 1.5),
)
