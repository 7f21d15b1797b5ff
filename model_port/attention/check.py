"""Checks a Pallas kernel on the device it will run on, before `auto` takes it.

One packed, branched row goes through the kernel and through the scanned form, forward and backward, with the heads of
the language tower and again with those of the vision tower. The kernel is taken if it agrees with the scanned form and
is faster in the language tower.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model_port.attention.flash import Attention
from model_port.attention.rule import Layout
from model_port.attention.scanned import scanned_attention

ROW_TOKENS = 4096
MAX_ERROR = 0.03  # correct forms differ by 0.008 in bfloat16; without one of 32 blocks of keys, by 0.28
TIMED_CALLS = 3


@dataclass(frozen=True)
class Heads:
    num: int
    num_kv: int
    dim: int
    causal: bool


@dataclass(frozen=True)
class KernelCheck:
    """The kernel against the scanned form. As a string, it completes the log line "attention: …"."""

    error: float = 0.0  # of outputs and gradients, see `max_error`
    kernel_ms: float = 0.0
    scanned_ms: float = 0.0
    failure: str = ""  # the error that the kernel raised

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= MAX_ERROR and self.kernel_ms < self.scanned_ms

    def __str__(self) -> str:
        if self.failure:
            return f"scanned, because the kernel failed ({self.failure})"
        if not self.error <= MAX_ERROR:  # also if it is NaN
            return f"scanned, because the kernel is wrong: max error {self.error:.1g} of scanned, at most {MAX_ERROR:g}"
        times = f"{self.kernel_ms:.1f} against {self.scanned_ms:.1f} ms"
        if not self.passed:
            return f"scanned, because the kernel is slower: {times}"
        return f"kernel, max error {self.error:.1g} of scanned, {times}"


def check_kernel(
    kernel: Attention, text: Heads, vision: Heads, dtype: str, num_tokens: int = ROW_TOKENS
) -> KernelCheck:
    """Runs both forms on this process's first device. A kernel that raises is a kernel that does not pass."""
    errors, times = [], []
    for heads in (text, vision):
        scanned, scanned_ms = _run(scanned_attention, heads, dtype, num_tokens)
        try:
            ours, kernel_ms = _run(kernel, heads, dtype, num_tokens)
        except Exception as problem:  # compilers and drivers raise errors of many types
            message = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            return KernelCheck(failure=message[:200])
        errors += [max_error(a, b) for a, b in zip(ours, scanned, strict=True)]
        times.append((kernel_ms, scanned_ms))
    return KernelCheck(float(np.max(errors)), *times[0])


def max_error(ours: Float[np.ndarray, "T N H"], expected: Float[np.ndarray, "T N H"]) -> float:
    """The largest relative error of a head's vector at a token.

    Vectors shorter than the root mean square are compared with that: many gradients are zero but for rounding.
    """
    length = np.linalg.norm(expected, axis=-1)
    floor = np.sqrt(np.mean(np.square(length)))
    return float(np.max(np.linalg.norm(ours - expected, axis=-1) / np.maximum(length, floor)))


def branched_row(num_tokens: int) -> Layout:
    """Two sequences, each a trunk with branches of uneven lengths, and padding at the end."""
    ends = [round(num_tokens * part) for part in (0.23, 0.31, 0.37, 0.52, 0.71, 0.83, 0.97, 1)]
    lengths = np.diff([0, *ends])
    segments = np.repeat([1, 1, 1, 1, 2, 2, 2, 0], lengths)
    branches = np.repeat([0, 1, 2, 3, 0, 1, 2, 0], lengths)
    return Layout(*(jnp.asarray(ids[None], jnp.int32) for ids in (segments, branches, np.arange(num_tokens))))


def _run(attend: Attention, heads: Heads, dtype: str, num_tokens: int) -> tuple[list[np.ndarray], float]:
    """The output and the three gradients of the tokens that are not padding, and the milliseconds of one call."""
    row = branched_row(num_tokens)
    real = row.segment_ids[0] != 0
    *inputs, weight = _inputs(heads, dtype, num_tokens)

    def objective(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out = jnp.where(real[None, :, None, None], attend(q, k, v, row, heads.causal), 0)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = jax.block_until_ready(gradients(*inputs))
    seconds = []
    for _ in range(TIMED_CALLS):
        start_s = time.perf_counter()
        jax.block_until_ready(gradients(*inputs))
        seconds.append(time.perf_counter() - start_s)
    arrays = [np.asarray(array[0], np.float32)[np.asarray(real)] for array in (out, *grads)]
    return arrays, 1e3 * min(seconds)


def _inputs(heads: Heads, dtype: str, num_tokens: int) -> Iterator[Array]:
    """Queries, keys, values, and a weight for each output."""
    random = np.random.default_rng(0)
    for num in (heads.num, heads.num_kv, heads.num_kv, heads.num):
        yield jnp.asarray(random.standard_normal((1, num_tokens, num, heads.dim), np.float32), dtype)
