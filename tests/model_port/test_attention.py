"""Who may attend to whom, spelled out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_port import attention
from model_port.attention import Layout, attend_mask, xla_attention


def layout(segments: str, branches: str) -> Layout:
    ids = [jnp.array([[int(c) for c in text]]) for text in (segments, branches)]
    return Layout(ids[0], ids[1], jnp.arange(len(segments))[None])


def test_a_branch_sees_the_trunk_and_itself_but_no_sibling_and_no_neighbour():
    #               one sequence: trunk of 2, branches of 2 and 1; another of 1; padding
    row = layout("111112" + "0", "001120" + "0")
    expected = [
        "1......",
        "11.....",
        "111....",
        "1111...",
        "11..1..",  # the second branch skips the first
        ".....1.",
        ".......",  # padding sees nothing
    ]
    mask = np.asarray(attend_mask(row, row, causal=True)[0])
    assert ["".join("1" if seen else "." for seen in line) for line in mask] == expected


def test_vision_sees_its_whole_frame_and_nothing_else():
    row = layout("11220", "00000")
    mask = np.asarray(attend_mask(row, row, causal=False)[0]).astype(int).tolist()
    assert mask == [[1, 1, 0, 0, 0]] * 2 + [[0, 0, 1, 1, 0]] * 2 + [[0, 0, 0, 0, 0]]


def test_attention_by_hand():
    """One head, head_dim 1: q = 1, keys ln 1 and ln 3, values 2 and 6 -> (1*2 + 3*6) / 4 = 5."""
    q, k, v = (jnp.array(values)[None, :, None, None] for values in ([1.0, 1.0], [0.0, np.log(3.0)], [2.0, 6.0]))
    row = layout("11", "00")
    np.testing.assert_allclose(xla_attention(q, k, v, row, row, True)[0, :, 0, 0], [2.0, 5.0], rtol=1e-6)


def test_padding_gives_no_nan():
    q = jnp.ones((1, 3, 2, 5))
    k = v = jnp.ones((1, 3, 1, 5))
    row = layout("000", "000")
    assert np.isfinite(np.asarray(xla_attention(q, k, v, row, row, True))).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_tokens", "block_tokens", "max_blocks"), [(37, 128, 16), (37, 8, 16), (37, 8, 2)])
def test_blocks_equal_the_oracle_on_packed_and_branched_rows(
    monkeypatch, float64, causal, num_tokens, block_tokens, max_blocks
):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(attention, "MAX_BLOCKS", max_blocks)
    random = np.random.default_rng(3)
    q, k, v, weight = (jnp.asarray(random.standard_normal((2, num_tokens, n, 5))) for n in (6, 3, 3, 6))
    row = layout("1" * 20 + "2" * 11 + "0" * 6, "0" * 9 + "1" * 4 + "2" * 7 + "0" * 17)
    row = Layout(*(jnp.concatenate([part, part]) for part in row))

    def value_and_gradients(kernel):
        def objective(q, k, v):
            out = kernel(q, k, v, row, row, causal)
            return jnp.sum(jnp.where((row.segment_ids != 0)[..., None, None], out * weight, 0)), out

        (_, out), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return out[:, :31], *gradients

    expected = value_and_gradients(xla_attention)
    for got, want in zip(value_and_gradients(attention.blocked_attention), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_blocks_serve_a_query_that_decodes_against_a_cache():
    random = np.random.default_rng(4)
    q, k, v = (
        jnp.asarray(random.standard_normal(shape), "float32") for shape in ((3, 1, 4, 7), (3, 11, 2, 7), (3, 11, 2, 7))
    )
    slots = jnp.broadcast_to(jnp.arange(11), (3, 11))
    key = Layout((slots < jnp.array([[2], [7], [11]])).astype(int), slots * 0, slots)
    query = Layout(jnp.ones((3, 1), int), jnp.zeros((3, 1), int), jnp.array([[1], [6], [10]]))
    got, want = (kernel(q, k, v, query, key, True) for kernel in (attention.blocked_attention, xla_attention))
    np.testing.assert_allclose(got, want, atol=1e-6)
