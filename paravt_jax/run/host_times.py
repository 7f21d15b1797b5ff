"""Times each host's own work, so that the metrics show the slowest host.

In a collective, all hosts take as long as the slowest, so it does not show which host that is. These metrics compare
the time that a host works between two collectives, and the time its devices take for local matrix products.
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
TRIED_PRODUCTS = 8  # products in the trial that determines their number


class OwnTime:
    """Measures a host's working time without its waiting time."""

    def __init__(self) -> None:
        self.seconds = 0.0  # the last measurement
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
    """Times a host's devices."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._matrices: list[jax.Array] = []
        self._num_products = 0

    def seconds(self, after: Any) -> float:
        """The slowest local device's time for a fixed number of products, once the arrays in `after` are ready."""
        jax.block_until_ready(after)
        if not self._matrices:
            matrix = np.eye(PRODUCT_WIDTH, dtype=np.float32)
            self._matrices = [jax.device_put(matrix, device) for device in jax.local_devices()]
            self._took_s(TRIED_PRODUCTS)  # compile first
            num = round(TRIED_PRODUCTS * PROBE_S / self._took_s(TRIED_PRODUCTS))
            self._num_products = max(1, self._hosts.gather("probe", num)[0])
        return self._took_s(self._num_products)

    def _took_s(self, num: int) -> float:
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
