"""Times each host's own work, so that metrics show which host is slowest.

A collective takes equally long on all hosts, so its time does not show which host is slowest. These metrics compare the
time that each host works between collectives, and the time that its devices take for local matrix products.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from paravt_jax.run.hosts import Hosts

PRODUCT_WIDTH = 512
PROBE_S = 5e-3  # probe time per step on host 0's devices; longer than launching a program
TRIED_PRODUCTS = 8  # products in the trial that determines the number of products


class OwnTime:
    """Measures the time that a host works, without waiting times."""

    def __init__(self) -> None:
        self.seconds = 0.0  # result of the last measurement
        self._waited_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        start_s, self._waited_s = time.monotonic(), 0.0
        yield
        self.seconds = time.monotonic() - start_s - self._waited_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self._waited_s += time.monotonic() - start_s


class DeviceProbe:
    """Times a host's devices with matrix products."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._matrices: list[jax.Array] = []
        self._num_products = 0

    def seconds(self, after: Any) -> float:
        """Waits for the arrays in `after`, then times a fixed number of products on the slowest local device."""
        jax.block_until_ready(after)
        if not self._matrices:
            matrix = np.eye(PRODUCT_WIDTH, dtype=np.float32)
            self._matrices = [jax.device_put(matrix, device) for device in jax.local_devices()]
            self._time_products(TRIED_PRODUCTS)  # compile first
            num = round(TRIED_PRODUCTS * PROBE_S / self._time_products(TRIED_PRODUCTS))
            self._num_products = max(1, self._hosts.gather("probe", num)[0])
        return self._time_products(self._num_products)

    def _time_products(self, num: int) -> float:
        start_s = time.monotonic()
        jax.block_until_ready([products(matrix, num) for matrix in self._matrices])
        return time.monotonic() - start_s


@jax.jit
def products(matrix: jax.Array, num: int) -> jax.Array:
    return jax.lax.fori_loop(0, num, lambda _, product: product @ matrix, matrix)


def by_host(timings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each timing, the maximum and minimum over hosts, and the slowest host's index."""
    metrics: dict[str, float] = {}
    if len(timings) == 1:
        return metrics
    for name in timings[0]:
        seconds = [timings_of_host[name] for timings_of_host in timings]
        metrics[f"time/hosts/{name}_max_s"] = max(seconds)
        metrics[f"time/hosts/{name}_min_s"] = min(seconds)
        metrics[f"perf/hosts/{name}_slowest"] = float(np.argmax(seconds))
    return metrics
