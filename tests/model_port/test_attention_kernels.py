"""The kernels against the oracle, in interpret mode: what they compute, not what a chip makes of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import ROWS, bfloat16_errors, oracles, random_inputs, value_and_gradients

from model_port.attention import attention_of, gpu, tpu, tpu_walk
from model_port.attention.flash import flash_attention, seen_blocks

KERNELS = {"tpu": tpu, "gpu": gpu}
SHAPES = [(128, 2, True), (72, 6, False)]  # head dim, key/value heads of six, causal


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """With tiles so small that the rows have several."""
    monkeypatch.setattr(tpu_walk, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(tpu_walk, "BLOCK_STEP", 8)
    monkeypatch.setattr(tpu_walk, "TILE_QUERIES", 32)
    monkeypatch.setattr(
        gpu, "TILES", {2: gpu.Tiles(*[gpu.Tile(16, 8, 1)] * 3), 4: gpu.Tiles(*[gpu.Tile(8, 16, 1)] * 3)}
    )
    monkeypatch.setattr(gpu, "BLOCK_TOKENS", 16)
    return KERNELS[request.param]


def attention(kernel):
    interpreted = (partial(one, interpret=True) for one in (kernel.forward, kernel.backward))
    return flash_attention(*interpreted, kernel.block_tokens)


def outputs(attend, row=ROWS, values=None):
    """Of all tokens that are no padding."""
    q, k, v, _ = random_inputs(head_dim=16)
    mixed = jax.jit(partial(attend, layout=row, causal=True))(q, k, v if values is None else values(v))
    return np.asarray(mixed)[np.asarray(row.segment_ids) != 0]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "kv_heads", "causal"), SHAPES)
def test_a_kernel_equals_the_oracle_on_packed_and_branched_rows(kernel, head_dim, kv_heads, causal):
    shape = {"head_dim": head_dim, "kv_heads": kv_heads}
    found = value_and_gradients(attention(kernel), *random_inputs(**shape), causal=causal)
    for got, want in zip(found, oracles(causal, **shape), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "kv_heads", "causal"), SHAPES)
def test_in_bfloat16_a_kernel_is_as_near_to_float32_as_the_oracle(kernel, head_dim, kv_heads, causal):
    for ours, of_oracle in bfloat16_errors(attention(kernel), causal, head_dim=head_dim, kv_heads=kv_heads):
        assert ours <= 2 * of_oracle


def test_a_pair_of_blocks_left_out_too_many_is_noticed(kernel, monkeypatch):
    """Token 19 is in a branch, and the first block of keys is its trunk."""

    def one_too_few(seen, query_tokens, key_tokens):
        return seen_blocks(seen, query_tokens, key_tokens).at[0, 19 // query_tokens, 0].set(False)

    expected = outputs(attention_of("xla"))
    np.testing.assert_allclose(outputs(attention(kernel)), expected, atol=1e-5)
    for module in (tpu_walk, gpu):
        monkeypatch.setattr(module, "seen_blocks", one_too_few)
    assert np.abs(outputs(attention(kernel)) - expected).max() > 0.1


def test_without_branches_a_kernel_computes_something_else(kernel):
    whole = ROWS._replace(branch_ids=jnp.zeros_like(ROWS.branch_ids))
    assert np.abs(outputs(attention(kernel), whole) - outputs(attention_of("xla"))).max() > 0.1


def test_blocks_that_nobody_sees_are_not_loaded(kernel):
    """Infinite values of padding that fills whole blocks would make no number of every mean that they are in."""
    row = ROWS._replace(segment_ids=ROWS.segment_ids.at[:, 16:].set(0))
    poisoned = outputs(attention(kernel), row, lambda v: v.at[:, 16:].set(jnp.nan))
    np.testing.assert_allclose(poisoned, outputs(attention_of("xla"), row), atol=1e-5)
