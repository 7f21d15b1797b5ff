"""How long each host takes for what it does by itself, so that the slowest shows in the metrics.

Where hosts add up, all of them take as long as the slowest, and nobody can tell which that is. So what is compared is
what a host does between two waits for others, and how long its devices take for products that nobody else waits for.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from paravt_jax.run.hosts import Hosts

PRODUCT_WIDTH = 512
PROBE_S = 5e-3  # of the devices of host 0, a step: longer than it takes to start a program
TRIED_PRODUCTS = 8  # to find out how many these are


class OwnTime:
    """Seconds of work, without those in which it waits."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the last one
        self._waited_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        begun_s, self._waited_s = time.monotonic(), 0.0
        yield
        self.seconds = time.monotonic() - begun_s - self._waited_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self._waited_s += time.monotonic() - begun_s


class DeviceProbe:
    """Times the devices of a host by themselves."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._matrices: list[jax.Array] = []
        self._num_products = 0

    def seconds(self, after: Any) -> float:
        """Of the slowest device here, for as many products as on every host; once the arrays of `after` are there."""
        jax.block_until_ready(after)
        if not self._matrices:
            matrix = np.eye(PRODUCT_WIDTH, dtype=np.float32)
            self._matrices = [jax.device_put(matrix, device) for device in jax.local_devices()]
            self._took_s(TRIED_PRODUCTS)  # compiles
            num = round(TRIED_PRODUCTS * PROBE_S / self._took_s(TRIED_PRODUCTS))
            self._num_products = max(1, self._hosts.gather("probe", num)[0])
        return self._took_s(self._num_products)

    def _took_s(self, num: int) -> float:
        begun_s = time.monotonic()
        jax.block_until_ready([products(matrix, num) for matrix in self._matrices])
        return time.monotonic() - begun_s


@jax.jit
def products(matrix: jax.Array, num: int) -> jax.Array:
    return jax.lax.fori_loop(0, num, lambda _, product: product @ matrix, matrix)


def by_host(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what each of several hosts took so many seconds for: the most, the least, and which took the most."""
    metrics: dict[str, float] = {}
    if len(told) == 1:
        return metrics
    for what in told[0]:
        seconds = [of_host[what] for of_host in told]
        metrics[f"time/hosts/{what}_max_s"] = max(seconds)
        metrics[f"time/hosts/{what}_min_s"] = min(seconds)
        metrics[f"perf/hosts/{what}_slowest"] = float(np.argmax(seconds))
    return metrics
