"""The rates that a step's seconds depend on, each with its best and worst value.

docs/machines.md, section "Seconds per step", lists the source of each number. A run's log replaces some of them
(calibrate.py).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def __str__(self) -> str:
        """Formats both ends with two digits."""
        low, high = (f"{float(f'{end:.2g}'):g}" for end in self)
        return low if low == high else f"{low} to {high}"


class Rate(NamedTuple):
    title: str
    best: float
    worst: float
    factor: float = 1.0  # factor from the rate to the printed unit
    unit: str = ""

    @property
    def values(self) -> str:
        return f"{Interval(self.factor * self.best, self.factor * self.worst)}{self.unit}"

    def __str__(self) -> str:
        """Formats a rate, for example `a picture on the server's CPU (8 to 30 ms)`."""
        return f"{self.title} ({self.values})"


StepRates = Mapping[str, Rate]

PUBLISHED: StepRates = {
    "calls": Rate("calls per episode", 0.21, 2.5),
    "turns": Rate("requests of a main agent", 2.0, 4.0),  # each request repeats all pictures
    "length": Rate("sampled tokens over the assumed", 1.0, 1.0),
    "tail": Rate("the longest dialogue over the mean", 1.3, 3.0),
    "matmul_frac": Rate("prefill, of peak FLOPs", 0.56, 0.26, 100, " %"),  # also for the vision tower
    "memory_frac": Rate("decoding, of memory bandwidth", 0.81, 0.5, 100, " %"),
    "weight_passes": Rate("passes over the sampler's weights per token", 1.0, 1.84),
    "hop_s": Rate("an all-reduce of the sampler", 6e-6, 2.6e-5, 1e6, " µs"),  # latency only
    "overview_s": Rate("an overview on a CPU core", 5.0, 22.0, 1, " s"),
    "picture_s": Rate("a picture on the server's CPU", 0.008, 0.030, 1e3, " ms"),
    "publish_bytes_per_s": Rate("new weights into servers", 2e9, 1e9, 1e-9, " GB/s"),  # into all servers together
    "update": Rate("an update over its roofline", 0.85, 1.5),
}


def best(rates: StepRates) -> dict[str, float]:
    return {name: rate.best for name, rate in rates.items()}


def worst(rates: StepRates) -> dict[str, float]:
    return {name: rate.worst for name, rate in rates.items()}
