"""The attention kernels equal the oracle in interpret mode, without the accelerator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import ROWS, bfloat16_errors, interpreted, oracles, random_inputs, value_and_gradients

from model_port.attention import attention_of, choice, gpu, tpu, tpu_walk
from model_port.attention.check import MAX_ERROR, Heads, KernelCheck, check_kernel, max_error
from model_port.attention.flash import flash_attention, visible_blocks

KERNELS = {"tpu": tpu, "gpu": gpu}
TEXT, VISION = (128, 2, True), (72, 6, False)  # head dim, key/value heads of six, causal


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """Makes tiles small enough for a row to have several."""
    monkeypatch.setattr(tpu_walk, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(tpu_walk, "BLOCK_STEP", 8)
    monkeypatch.setattr(tpu_walk, "TILE_QUERIES", 32)
    monkeypatch.setattr(gpu, "TILES", {2: gpu.Tile(16, 8, 1), 4: gpu.Tile(8, 16, 1)})
    monkeypatch.setattr(gpu, "BLOCK_TOKENS", 16)
    return KERNELS[request.param]


@pytest.fixture(autouse=True)
def interpret_mode():
    with interpreted():
        yield


def attention(kernel):
    return flash_attention(kernel.forward, kernel.backward, kernel.block_tokens)


def outputs(attend, row=ROWS, values=None):
    """Returns the output of all tokens except padding."""
    q, k, v, _ = random_inputs(head_dim=16)
    mixed = jax.jit(partial(attend, layout=row, causal=True))(q, k, v if values is None else values(v))
    return np.asarray(mixed)[np.asarray(row.segment_ids) != 0]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "kv_heads", "causal"), [TEXT, pytest.param(*VISION, marks=pytest.mark.nightly)])
def test_a_kernel_equals_the_oracle_on_packed_and_branched_rows(kernel, head_dim, kv_heads, causal):
    shape = {"head_dim": head_dim, "kv_heads": kv_heads}
    found = value_and_gradients(attention(kernel), *random_inputs(**shape), causal=causal)
    for got, want in zip(found, oracles(causal, **shape), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("head_dim", "kv_heads", "causal"), [TEXT, VISION])
def test_a_bfloat16_kernel_is_as_accurate_as_the_oracle(kernel, head_dim, kv_heads, causal):
    for ours, of_oracle in bfloat16_errors(attention(kernel), causal, head_dim=head_dim, kv_heads=kv_heads):
        assert ours <= 2 * of_oracle


def without_first_keys(token):
    """Returns a function that also hides the first block of keys from a token's block of queries."""
    return lambda runs, queries, keys: visible_blocks(runs, queries, keys).at[0, token // queries, 0].set(False)


@pytest.mark.slow
def test_an_ignored_branch_and_a_skipped_block_are_detected(kernel, monkeypatch):
    """Token 19 is in a branch, and the first block of keys is its trunk."""
    expected, whole = outputs(attention_of("xla")), ROWS._replace(branch_ids=jnp.zeros_like(ROWS.branch_ids))
    np.testing.assert_allclose(outputs(attention(kernel)), expected, atol=1e-5)
    assert np.abs(outputs(attention(kernel), whole) - expected).max() > 0.1
    for module in (tpu_walk, gpu):
        monkeypatch.setattr(module, "visible_blocks", without_first_keys(19))
    assert np.abs(outputs(attention(kernel)) - expected).max() > 0.1


def test_fully_masked_blocks_are_not_loaded(kernel):
    """Padding with infinite values fills whole blocks, and would turn every output that reads it into NaN."""
    row = ROWS._replace(segment_ids=ROWS.segment_ids.at[:, 16:].set(0))
    poisoned = outputs(attention(kernel), row, lambda v: v.at[:, 16:].set(jnp.nan))
    np.testing.assert_allclose(poisoned, outputs(attention_of("xla"), row), atol=1e-5)


HEADS = Heads(4, 2, 16, causal=True), Heads(2, 2, 8, causal=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_the_check_accepts_correct_kernels(kernel, dtype):
    check = check_kernel(attention(kernel), *HEADS, dtype, num_tokens=64)
    assert not check.failure and 0 < check.error < MAX_ERROR / 2
    assert min(check.kernel_ms, check.plain_ms) > 0


@pytest.mark.slow
def test_the_check_rejects_a_kernel_that_skips_a_block(monkeypatch):
    monkeypatch.setattr(gpu, "TILES", {2: gpu.Tile(16, 16, 1)})
    monkeypatch.setattr(gpu, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(gpu, "visible_blocks", without_first_keys(32))  # the last queries of the first sequence
    check = check_kernel(attention(gpu), *HEADS, "bfloat16", num_tokens=64)
    assert not check.passed and str(check).startswith("scanned, because the kernel is wrong: max error ")


@pytest.mark.slow
def test_the_check_rejects_a_kernel_whose_gradient_is_wrong():
    def backward(*inputs):
        d_q, d_k, d_v = gpu.backward(*inputs)
        return d_q, 1.1 * d_k, d_v

    kernel = flash_attention(gpu.forward, backward, gpu.block_tokens)
    assert check_kernel(kernel, *HEADS, "float32", num_tokens=64).error == pytest.approx(0.1, rel=0.01)


def test_the_check_reports_a_kernel_that_raises():
    def kernel(*_):
        raise RuntimeError("no shared memory\nfor this")

    check = check_kernel(kernel, *HEADS, "bfloat16", num_tokens=64)
    assert not check.passed and str(check) == "scanned, because the kernel failed (RuntimeError: no shared memory)"


def test_a_vector_is_compared_with_its_own_length_or_the_root_mean_square():
    expected = np.array([[[3.0, 4.0]], [[0.0, 0.0]]])  # lengths 5 and 0, root mean square 5 / sqrt 2
    assert max_error(np.add(expected, [[[0, 0.5]], [[0, 0]]]), expected) == pytest.approx(0.1)
    assert max_error(np.add(expected, [[[0, 0]], [[0, 0.5]]]), expected) == pytest.approx(0.1 * 2**0.5)


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (KernelCheck(2e-3, 3.1, 9.8), "kernel, max error 0.002 of scanned, 3.1 against 9.8 ms"),
        (KernelCheck(2e-3, 9.8, 3.1), "scanned, because the kernel is slower: 9.8 against 3.1 ms"),
        (KernelCheck(0.4, 3.1, 9.8), "scanned, because the kernel is wrong: max error 0.4 of scanned, at most 0.03"),
        (KernelCheck(np.nan, 3.1, 9.8), "scanned, because the kernel is wrong: max error nan of scanned, at most 0.03"),
    ],
)
def test_auto_chooses_the_faster_correct_form_and_logs_it(check, line):
    assert str(check) == line
    assert check.passed == line.startswith("kernel")


@pytest.mark.slow
def test_auto_uses_a_kernel_only_if_its_check_passes(monkeypatch):
    monkeypatch.setattr(choice, "platform", lambda: "gpu")
    monkeypatch.setattr(choice, "kernel_of", lambda _: lambda q, k, v, layout, causal: jnp.zeros_like(q) - 1)
    (q, k, v, _), row = random_inputs(), ROWS
    monkeypatch.setattr(choice, "SHORT_ROW_ELSEWHERE", 16)
    np.testing.assert_allclose(attention_of("auto")(q, k, v, row, True), attention_of("scanned")(q, k, v, row, True))
    assert (attention_of("auto_kernel")(q, k, v, row, True) == -1).all()
