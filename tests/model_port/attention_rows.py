"""Rows for comparing attention implementations: packed, branched and padded, with a prime length."""

from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from model_port.attention import Layout, attention_of


def layout(segments: str, branches: str) -> Layout:
    ids = [jnp.array([[int(c) for c in text]]) for text in (segments, branches)]
    return Layout(ids[0], ids[1], jnp.arange(len(segments))[None])


#                two segments, the first a trunk of 9 with branches of 4 and 7; padding
PACKED = layout("1" * 20 + "2" * 11 + "0" * 6, "0" * 9 + "1" * 4 + "2" * 7 + "0" * 17)
#                a segment with a short trunk, a short segment, and a segment up to the end with a late branch
OTHER = layout("1" * 5 + "2" * 3 + "3" * 29, "1" * 2 + "2" * 3 + "0" * 3 + "0" * 13 + "1" * 16)
ROWS = Layout(*(jnp.concatenate(pair) for pair in zip(PACKED, OTHER, strict=True)))
NUM_TOKENS = 37


def value_and_gradients(attend, q, k, v, weight, row=ROWS, causal=True):
    """Returns the output, and the gradients of its weighted sum over all tokens except padding."""

    def objective(q, k, v):
        out = jnp.where((row.segment_ids != 0)[..., None, None], attend(q, k, v, row, causal), 0)
        return jnp.sum(out.astype(weight.dtype) * weight), out

    (_, out), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def random_inputs(num_rows=2, heads=6, kv_heads=3, head_dim=5, dtype="float32"):
    """Returns queries, keys, values, and output weights in at least float32."""
    random = np.random.default_rng(3)
    shapes = [(num_rows, NUM_TOKENS, num_heads, head_dim) for num_heads in (heads, kv_heads, kv_heads, heads)]
    inputs = [jnp.asarray(random.standard_normal(shape)) for shape in shapes]
    of_weight = jnp.promote_types(dtype, "float32")
    return [x.astype(of) for x, of in zip(inputs, (dtype, dtype, dtype, of_weight), strict=True)]


@contextmanager
def interpreted():
    """Runs Pallas kernels in interpret mode, on any device."""
    call = pl.pallas_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", lambda *args, **settings: call(*args, **settings | {"interpret": True}))
        yield


@cache
def oracles(causal=True, **inputs):
    """Returns the reference output and gradients."""
    return [np.asarray(x) for x in value_and_gradients(attention_of("xla"), *random_inputs(**inputs), causal=causal)]


def bfloat16_errors(attend, causal=True, **shape):
    """Yields, for the output and each gradient, the bfloat16 errors of `attend` and of the oracle to float32."""
    exact = oracles(causal, **shape)

    def errors(found):
        return [np.linalg.norm(np.asarray(got, np.float32) - want) for got, want in zip(found, exact, strict=True)]

    ours = value_and_gradients(attend, *random_inputs(**shape, dtype="bfloat16"), causal=causal)
    return zip(errors(ours), errors(oracles(causal, **shape, dtype="bfloat16")), strict=True)
