"""Checks a Pallas kernel on the device that it will run on, before `auto` uses it.

The kernel and the scanned form compute the same packed, branched row, forward and backward, once with the language
tower's heads and once with the vision tower's. `auto` uses the kernel if it agrees with the scanned form and is faster
in the language tower.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from model_port.attention.flash import Attention
from model_port.attention.rule import Layout
from model_port.attention.scanned import scanned_attention

ROW_TOKENS = 4096
MAX_ERROR = 0.03  # correct forms differ by 0.008 in bfloat16; if one of 32 key blocks is left out, by 0.28
TIMED_CALLS = 3

Timed = tuple[list[np.ndarray], float]  # results as vectors per head, and the milliseconds per call


@dataclass(frozen=True)
class Heads:
    num: int
    num_kv: int
    dim: int
    causal: bool


@dataclass(frozen=True)
class KernelCheck:
    """The comparison of a kernel with a form in plain XLA. Its string completes the log line "attention: …"."""

    error: float = 0.0  # the largest of all results; see `max_error`
    kernel_ms: float = 0.0
    plain_ms: float = 0.0
    failure: str = ""  # the error that the kernel raised
    plain: str = "scanned"  # the plain form's name

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= MAX_ERROR and self.kernel_ms < self.plain_ms

    def __str__(self) -> str:
        plain, error = self.plain, f"max error {self.error:.1g} of {self.plain}"
        if self.failure:
            return f"{plain}, because the kernel failed ({self.failure})"
        if not self.error <= MAX_ERROR:  # also true for NaN
            return f"{plain}, because the kernel is wrong: {error}, at most {MAX_ERROR:g}"
        times = f"{self.kernel_ms:.3g} against {self.plain_ms:.3g} ms"
        return f"kernel, {error}, {times}" if self.passed else f"{plain}, because the kernel is slower: {times}"


def check_kernel(
    kernel: Attention, text: Heads, vision: Heads, dtype: str, num_tokens: int = ROW_TOKENS
) -> KernelCheck:
    """Runs both forms on this process's first device, and compares outputs and gradients."""
    with ThreadPoolExecutor() as pool:  # compiles all programs at once
        programs = [
            [pool.submit(_compile, attend, heads, dtype, num_tokens) for attend in (scanned_attention, kernel)]
            for heads in (text, vision)
        ]
    return all_passed([compare("scanned", *(partial(_run, program) for program in pair)) for pair in programs])


def all_passed(checks: Sequence[KernelCheck]) -> KernelCheck:
    """Combines checks: the largest error, the first failure, and the first check's times."""
    error = float(np.max([check.error for check in checks]))
    return replace(checks[0], error=error, failure=next((check.failure for check in checks if check.failure), ""))


def compare(name: str, plain: Callable[[], Timed], kernel: Callable[[], Timed]) -> KernelCheck:
    """Runs both forms and compares them. A kernel that raises an error does not pass."""
    expected, plain_ms = plain()
    try:
        results, kernel_ms = kernel()
    except Exception as problem:  # compilers and drivers raise errors of many types
        message = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        return KernelCheck(failure=message[:200], plain=name)
    errors = [max_error(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]
    return KernelCheck(float(np.max(errors)), kernel_ms, plain_ms, plain=name)


def fastest_ms(work: Callable[[], object]) -> float:
    """Returns the milliseconds of the fastest call, after a first call that compiles."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(TIMED_CALLS):
        start_s = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - start_s)
    return 1e3 * min(seconds)


def max_error(ours: Float[np.ndarray, "T N H"], expected: Float[np.ndarray, "T N H"]) -> float:
    """Returns the largest relative error of any head's vector at any token.

    The error is relative to the vector's length or to the root mean square of all lengths, whichever is larger, because
    many gradients are zero except for rounding.
    """
    length = np.linalg.norm(expected, axis=-1)
    floor = np.sqrt(np.mean(np.square(length)))
    return float(np.max(np.linalg.norm(ours - expected, axis=-1) / np.maximum(length, floor)))


def branched_row(num_tokens: int) -> Layout:
    """Returns a row of two sequences, each a trunk with branches of uneven lengths, and padding at the end."""
    ends = [round(num_tokens * part) for part in (0.23, 0.31, 0.37, 0.52, 0.71, 0.83, 0.97, 1)]
    lengths = np.diff([0, *ends])
    segments = np.repeat([1, 1, 1, 1, 2, 2, 2, 0], lengths)
    branches = np.repeat([0, 1, 2, 3, 0, 1, 2, 0], lengths)
    return Layout(*(jnp.asarray(ids[None], jnp.int32) for ids in (segments, branches, np.arange(num_tokens))))


def _compile(attend: Attention, heads: Heads, dtype: str, num_tokens: int) -> Callable[[], Any]:
    """Returns a program for the output and the three gradients of random inputs."""
    row = branched_row(num_tokens)
    real = (row.segment_ids != 0)[..., None, None]
    *inputs, weight = _inputs(heads, dtype, num_tokens)

    def objective(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out = jnp.where(real, attend(q, k, v, row, heads.causal), 0)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))
    return partial(gradients.lower(*inputs).compile(), *inputs)


def _run(compiled: Future[Callable[[], Any]]) -> Timed:
    """Returns the results of tokens that are not padding, and the time per call."""
    program = compiled.result()
    (_, out), grads = program()
    real = np.asarray(branched_row(out.shape[1]).segment_ids[0]) != 0
    return [np.asarray(array[0], np.float32)[real] for array in (out, *grads)], fastest_ms(program)


def _inputs(heads: Heads, dtype: str, num_tokens: int) -> Iterator[Array]:
    """Yields random queries, keys and values, and a weight for each output."""
    random = np.random.default_rng(0)
    for num in (heads.num, heads.num_kv, heads.num_kv, heads.num):
        yield jnp.asarray(random.standard_normal((1, num_tokens, num, heads.dim), np.float32), dtype)
