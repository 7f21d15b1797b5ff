"""Who may attend to whom, spelled out."""

import jax.numpy as jnp
import numpy as np

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
