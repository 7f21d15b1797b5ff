"""Rows to compare forms of attention on: packed, branched and padded, of a length that is no multiple of anything."""

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
#                the same tokens otherwise: one segment whose branches begin at once, a short one, one to the very end
OTHER = layout("1" * 5 + "2" * 3 + "3" * 29, "1" * 2 + "2" * 3 + "0" * 3 + "0" * 13 + "1" * 16)
ROWS = Layout(*(jnp.concatenate(pair) for pair in zip(PACKED, OTHER, strict=True)))
NUM_TOKENS = 37


def value_and_gradients(attend, q, k, v, weight, row=ROWS, causal=True):
    """Of a weighted sum over all tokens that are no padding."""

    def objective(q, k, v):
        out = jnp.where((row.segment_ids != 0)[..., None, None], attend(q, k, v, row, causal), 0)
        return jnp.sum(out.astype(weight.dtype) * weight), out

    (_, out), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def random_inputs(num_rows=2, heads=6, kv_heads=3, head_dim=5, dtype="float32"):
    """Queries, keys, values, and a weight for each output in no less than float32."""
    random = np.random.default_rng(3)
    inputs = [
        jnp.asarray(random.standard_normal((num_rows, NUM_TOKENS, n, head_dim)))
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    of_weight = jnp.promote_types(dtype, "float32")
    return [x.astype(of) for x, of in zip(inputs, (dtype, dtype, dtype, of_weight), strict=True)]


@contextmanager
def interpreted():
    """Runs Pallas kernels without their chip."""
    call = pl.pallas_call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", lambda *args, **settings: call(*args, **settings | {"interpret": True}))
        yield


@cache
def oracles(causal=True, **inputs):
    """What every form is compared with."""
    return [np.asarray(x) for x in value_and_gradients(attention_of("xla"), *random_inputs(**inputs), causal=causal)]


def bfloat16_errors(attend, causal=True, **shape):
    """Of the output and each gradient, against the oracle in float32: of `attend` and of the oracle in bfloat16."""
    exact = oracles(causal, **shape)

    def errors(found):
        return [np.linalg.norm(np.asarray(got, np.float32) - want) for got, want in zip(found, exact, strict=True)]

    ours = value_and_gradients(attend, *random_inputs(**shape, dtype="bfloat16"), causal=causal)
    return zip(errors(ours), errors(oracles(causal, **shape, dtype="bfloat16")), strict=True)
