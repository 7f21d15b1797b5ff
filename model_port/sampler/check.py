"""Checks the decoding kernel on the devices that it will run on, before the sampler uses it.

Rows of uneven lengths attend to a cache of random pages, once with the kernel and once with the plain form.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from model_port.attention.check import KernelCheck, Timed, compare, fastest_ms
from model_port.config import TextConfig
from model_port.sampler.paged import TABLE_PAGES, Decode, decode_attention
from model_port.sampler.pages import PAGE_TOKENS

ROW_PAGES = 4 * TABLE_PAGES
ROW_TOKENS = (1, 64, 65, 500, 1500, 2500, 4000, ROW_PAGES * PAGE_TOKENS)  # full and partly filled last pages


def check_decoding(kernel: Decode, text: TextConfig, dtype: str) -> KernelCheck:
    """Compares both forms on the current mesh, with the heads split over it."""
    inputs = _inputs(text, dtype)
    return compare("plain", *(partial(_run, form, inputs) for form in (None, kernel)))


def _run(kernel: Decode | None, inputs: list[Array]) -> Timed:
    """Returns the rows' outputs and the time per call."""
    attend = jax.jit(decode_attention(kernel))
    mixed, _, _ = attend(*inputs)
    return [np.asarray(mixed, np.float32)], fastest_ms(lambda: attend(*inputs))


def _inputs(text: TextConfig, dtype: str) -> list[Array]:
    random = np.random.default_rng(0)
    rows, num_pages = len(ROW_TOKENS), len(ROW_TOKENS) * ROW_PAGES
    new = [(rows, num, text.head_dim) for num in (text.num_heads, text.num_kv_heads, text.num_kv_heads)]
    cache = (text.num_kv_heads, num_pages, PAGE_TOKENS, text.head_dim)
    arrays = [jnp.asarray(random.standard_normal(shape, np.float32), dtype) for shape in (*new, cache, cache)]
    table = random.permutation(num_pages).reshape(rows, ROW_PAGES)
    return [*arrays, jnp.asarray(table, jnp.int32), jnp.asarray(ROW_TOKENS, jnp.int32) - 1]
