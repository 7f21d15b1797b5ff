"""Checks the kernel for pages on the devices that it will run on, before the sampler uses it.

In decoding, rows of uneven lengths attend to a cache of random pages, and in prefill, a chunk of a prompt does, once
with the kernel and once with the plain form.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from model_port.attention.check import KernelCheck, Timed, all_passed, compare, fastest_ms
from model_port.config import TextConfig
from model_port.sampler.paged import TABLE_PAGES, Attend, on_each_device, walked
from model_port.sampler.pages import PAGE_TOKENS

ROW_PAGES = 4 * TABLE_PAGES
ROW_TOKENS = (1, 64, 65, 500, 1500, 2500, 4000, ROW_PAGES * PAGE_TOKENS)  # full and partly filled last pages
DECODED = np.array(ROW_TOKENS)[:, None] - 1  # slots of the rows' last tokens
PREFILLED = np.arange(1024, 2048)[None]  # slots of a chunk


def check_paged(kernel: Attend, text: TextConfig, dtype: str) -> KernelCheck:
    """Compares both forms on the current mesh, with the heads split over it. The times are decoding's."""
    both = [_inputs(text, dtype, slots) for slots in (DECODED, PREFILLED)]
    return all_passed(
        [compare("plain", *(partial(_run, attend, inputs) for attend in (walked, kernel))) for inputs in both]
    )


def _run(attend: Attend, inputs: list[Array]) -> Timed:
    """Returns the outputs of all tokens and the time per call."""
    call = jax.jit(on_each_device(attend))
    mixed = call(*inputs)
    return [np.asarray(mixed, np.float32).reshape(-1, *mixed.shape[2:])], fastest_ms(lambda: call(*inputs))


def _inputs(text: TextConfig, dtype: str, slots: np.ndarray) -> list[Array]:
    random = np.random.default_rng(0)
    rows, num_pages = len(slots), len(slots) * ROW_PAGES
    cache = (text.num_kv_heads, num_pages, PAGE_TOKENS, text.head_dim)
    shapes = ((*slots.shape, text.num_heads, text.head_dim), cache, cache)
    arrays = [jnp.asarray(random.standard_normal(shape, np.float32), dtype) for shape in shapes]
    table = random.permutation(num_pages).reshape(rows, ROW_PAGES)
    return [*arrays, jnp.asarray(table, jnp.int32), jnp.asarray(slots, jnp.int32)]
