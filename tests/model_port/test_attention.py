"""The attention mask in examples, and all forms of attention against the oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import NUM_TOKENS, ROWS, bfloat16_errors, layout, oracles, random_inputs, value_and_gradients
from jax.sharding import AbstractDevice, AbstractMesh

from model_port.attention import Layout, attention_of, blocked, form_of, scanned
from model_port.attention.flash import even_blocks, neighbors, visible_blocks
from model_port.attention.plain import xla_attention
from model_port.attention.rule import attend_mask, query_runs
from model_port.layers import REMAT_POLICIES
from model_port.sharding import MESH_AXES, make_mesh, on_mesh, platform


def test_a_branch_attends_to_its_trunk_and_itself_only():
    #               one sequence: trunk of 2, branches of 2 and 1; another of 1; padding
    row = layout("111112" + "0", "001120" + "0")
    expected = [
        "1......",
        "11.....",
        "111....",
        "1111...",
        "11..1..",  # the second branch skips the first
        ".....1.",
        ".......",  # padding attends to nothing
    ]
    mask = np.asarray(attend_mask(row, causal=True)[0])
    assert ["".join("1" if runs else "." for runs in line) for line in mask] == expected


def test_vision_tokens_attend_to_their_own_frame_only():
    row = layout("11220", "00000")
    mask = np.asarray(attend_mask(row, causal=False)[0]).astype(int).tolist()
    assert mask == [[1, 1, 0, 0, 0]] * 2 + [[0, 0, 1, 1, 0]] * 2 + [[0, 0, 0, 0, 0]]


def test_attention_by_hand():
    """One head, head_dim 1: q = 1, keys ln 1 and ln 3, values 2 and 6 -> (1*2 + 3*6) / 4 = 5."""
    q, k, v = (jnp.array(values)[None, :, None, None] for values in ([1.0, 1.0], [0.0, np.log(3.0)], [2.0, 6.0]))
    row = layout("11", "00")
    np.testing.assert_allclose(xla_attention(q, k, v, row, True)[0, :, 0, 0], [2.0, 5.0], rtol=1e-6)


@pytest.mark.parametrize("form", ["xla", "blocked", "scanned"])
def test_padding_gives_no_nan(form):
    q = jnp.ones((1, 3, 2, 5))
    k = v = jnp.ones((1, 3, 1, 5))
    row = layout("000", "000")
    assert np.isfinite(np.asarray(attention_of(form)(q, k, v, row, True))).all()


def with_blocks(monkeypatch, form, block_tokens, max_blocks=16):
    monkeypatch.setattr(blocked, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(blocked, "MAX_BLOCKS", max_blocks)
    monkeypatch.setattr(scanned, "BLOCK_TOKENS", block_tokens)
    return attention_of(form)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("form", "block_tokens", "max_blocks"),
    [("blocked", 128, 16), ("blocked", 8, 16), ("blocked", 8, 2), ("scanned", 128, 16), ("scanned", 8, 16)],
)
def test_every_form_equals_the_oracle_on_branched_rows(monkeypatch, float64, causal, form, block_tokens, max_blocks):
    attend = with_blocks(monkeypatch, form, block_tokens, max_blocks)
    found = value_and_gradients(attend, *random_inputs(dtype="float64"), causal=causal)
    for got, want in zip(found, oracles(causal, dtype="float64"), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(72, 6), (128, 2)])
def test_a_bfloat16_form_is_as_accurate_as_the_oracle(monkeypatch, head_dim, kv_heads):
    attend = with_blocks(monkeypatch, "scanned", 8)
    for ours, of_oracle in bfloat16_errors(attend, head_dim=head_dim, kv_heads=kv_heads):
        assert ours <= 2 * of_oracle


@pytest.mark.parametrize("causal", [True, False])
def test_the_queries_that_attend_to_a_key_are_contiguous(causal):
    queries = jnp.arange(NUM_TOKENS)[None, :, None]
    runs = query_runs(ROWS, causal=causal)
    mask = (runs.first[:, None] <= queries) & (queries <= runs.last[:, None])
    np.testing.assert_array_equal(mask, attend_mask(ROWS, causal=causal))


@pytest.mark.slow
def test_masked_blocks_are_skipped():
    row = layout("1" * 4 + "1" * 4 + "1" * 4 + "2" * 4 + "0" * 4, "0" * 4 + "1" * 4 + "2" * 4 + "0" * 8)
    blocks, numbers = neighbors(visible_blocks(query_runs(row, causal=True), 4, 4))
    visited = [line[:number].tolist() for line, number in zip(blocks[0], numbers[0], strict=True)]
    assert visited == [[0], [0, 1], [0, 2], [3], []]  # trunk, both branches, the other sequence, padding


def test_blocks_of_queries_and_keys_may_differ():
    runs = query_runs(layout("1" * 9 + "2" * 7, "0" * 16), causal=True)
    visible = ["11......", "1111....", "111111..", "....1111"]  # the third has a token of the first segment
    np.testing.assert_array_equal(visible_blocks(runs, 4, 2)[0], [[c == "1" for c in line] for line in visible])


def test_blocks_are_even():
    assert even_blocks(1024, 512, 8) == 512
    assert even_blocks(1100, 512, 8) == 368  # three of 366.7
    assert even_blocks(37, 512, 8) == 40
    assert even_blocks(37, 512, 128) == 128


@pytest.fixture(scope="module")
def four_rows():
    """Inputs with two key/value heads in four rows, and the oracle's output on one device."""
    inputs = random_inputs(4, 4, 2)
    rows = Layout(*(jnp.concatenate([part, part]) for part in ROWS))
    return (*inputs, rows), value_and_gradients(attention_of("xla"), *inputs, rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["blocked", "scanned"])
@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 1, 4)])
def test_attention_on_a_mesh_equals_one_device(monkeypatch, four_rows, mesh, form):
    """Shards four rows over data and fsdp, and two key/value heads over tensor, also where they do not divide."""
    attend = with_blocks(monkeypatch, form, 8)
    inputs, expected = four_rows
    with on_mesh(make_mesh(*mesh)):
        for got, want in zip(value_and_gradients(attend, *inputs), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("form", ["blocked", "scanned"])
def test_a_remat_policy_can_save_what_the_backward_pass_reads(monkeypatch, form):
    """The forward pass has two products. The backward pass repeats those whose results were not saved."""
    attend, (q, k, v, _) = with_blocks(monkeypatch, form, 128), random_inputs()

    def num_products(policy):
        mixed = jax.checkpoint(partial(attend, layout=ROWS, causal=True), policy=REMAT_POLICIES[policy])
        gradient = jax.grad(lambda *qkv: mixed(*qkv).sum(), argnums=(0, 1, 2))
        return str(jax.make_jaxpr(gradient)(q, k, v)).count("dot_general")

    assert num_products("full") - num_products("attention") == 2


@pytest.mark.parametrize(
    ("platform", "num_tokens", "form"),
    [
        ("cpu", 4096, "blocked"),
        ("cpu", 4097, "scanned"),
        ("tpu", 1024, "blocked"),
        ("tpu", 1025, "kernel"),
        ("gpu", 1025, "kernel"),
        ("rocm", 1025, "scanned"),
    ],
)
def test_auto_never_uses_quadratic_memory_for_long_rows(platform, num_tokens, form):
    assert form_of("auto", num_tokens, platform) == form


def test_an_unavailable_kernel_is_rejected_with_the_available_ones():
    with pytest.raises(ValueError, match=r"attention=kernel, but there is no kernel for cpu; set auto or scanned"):
        form_of("kernel", 8192, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "of", "expected"),
    [
        ("TPU v5", "tpu", "tpu"),
        ("NVIDIA H100 80GB HBM3", "gpu", "gpu"),
        ("AMD Instinct MI300X", "gpu", "rocm"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_the_kernel_is_chosen_for_the_mesh_not_for_this_machine(kind, of, expected):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=of)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 1), MESH_AXES, abstract_device=device)):
        assert platform() == expected
    assert platform() == "cpu"
