"""The sampler's pages and frames, and all forms of attention over pages."""

import random
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import interpreted
from flax import nnx
from hypothesis import given, strategies as st
from jax.experimental.pallas import tpu as pltpu
from reference import DIVISIBLE

from model_port.inputs import Frame
from model_port.model import VLModel
from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams, sampler as sampler_module
from model_port.sampler.check import check_paged
from model_port.sampler.frames import FrameTable
from model_port.sampler.paged import gpu_kernel, tpu_kernel, walked
from model_port.sampler.pages import PagePool


@given(st.integers(0, 2**32), st.integers(4, 12))
def test_pages_are_never_allocated_twice_and_all_are_freed(seed, num_pages):
    """Random prompts over a small alphabet of pages often share prefixes."""
    chance, pool, running = random.Random(seed), PagePool(num_pages), []
    content = {}  # of labelled pages
    for _ in range(60):
        if running and chance.random() < 0.5:
            pool.release(running.pop(chance.randrange(len(running))))
            continue
        if chance.random() < 0.05:
            pool.forget()
            content.clear()
        digests = [bytes(chance.choices(b"ab", k=length)) for length in range(1, chance.randint(2, 5))]
        digests = [digests[-1][: length + 1] for length in range(len(digests))]
        held = pool.find(digests)
        assert [content[page] for page in held] == digests[: len(held)]
        pool.hold(held)
        if len(digests) - len(held) > pool.num_available:
            pool.release(held)
            continue
        new = pool.take(len(digests) - len(held))
        for page, digest in zip(new, digests[len(held) :], strict=True):
            content[page] = digest
            pool.label(page, digest)
        running.append([*held, *new])
        users = Counter(page for pages in running for page in pages)
        assert 0 not in users and len({*new}) == len(new)
        assert all(users[page] == 1 for page in new)
        assert pool.num_available == num_pages - 1 - len(users)
    for pages in running:
        pool.release(pages)
    assert pool.num_available == num_pages - 1


def test_the_least_recently_used_prompts_pages_are_evicted_from_its_end():
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(2)
    for pages, name in ((first, b"f"), (second, b"s")):
        for number, page in enumerate(pages):
            pool.label(page, name + bytes([number]))
        pool.release(pages)
    assert pool.take(2)[1] == first[1]  # after the unused page
    assert pool.find([b"f\0", b"f\1"]) == first[:1] and pool.find([b"s\0", b"s\1"]) == second


def test_a_digest_keeps_its_first_page():
    pool = PagePool(3)
    first, second = pool.take(2)
    for page in (first, second):
        pool.label(page, b"a")
    assert pool.find([b"a"]) == [first]
    pool.release([first, second])
    assert pool.take(2) == [second, first] and pool.find([b"a"]) == []  # the page without a digest is free


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), max_size=30))
def test_frames_in_use_have_disjoint_rows_in_the_table(batches):
    frames = [Frame(np.full((size, 1), size, np.float32), (size, 1)) for size in range(1, 10)]
    table, content = FrameTable(24), {}
    for batch in batches:
        wanted = [(frames[number], len(frames[number].patches)) for number in {*batch}]
        if sum(size for _, size in wanted) > 24:
            continue
        for frame in table.place(wanted):
            start = table[frame]
            content.update(dict.fromkeys(range(start, start + len(frame.patches)), frame.digest))
        for frame, size in wanted:
            assert {content[row] for row in range(table[frame], table[frame] + size)} == {frame.digest}
            assert table[frame] + size <= 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "context", "heads", "atol"),
    [
        (gpu_kernel, interpreted, 10, 2e-6),
        (gpu_kernel, interpreted, 34, 2e-6),  # 17 per key/value head, more than the smallest tile
        (tpu_kernel, pltpu.force_tpu_interpret_mode, 8, 2e-2),  # the kernel multiplies in bfloat16
    ],
    ids=["gpu", "gpu-wide", "tpu"],
)
def test_a_kernel_decodes_as_the_plain_form_does(kernel, context, heads, atol):
    slots = jnp.array([[0], [70], [767], [768]], jnp.int32)  # the last two end a page and start one
    inputs = random_pages(heads, slots)
    with context():
        got = jax.jit(kernel)(*inputs)
    np.testing.assert_allclose(got, walked(*inputs), atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [10, 34])
def test_the_gpu_kernel_prefills_as_the_plain_form_does(heads):
    """The second chunk's padding repeats its last token's slot."""
    slots = jnp.array([[*range(128)], [*range(640, 700), *[699] * 68]], jnp.int32)
    inputs = random_pages(heads, slots)
    with interpreted():
        got = jax.jit(gpu_kernel)(*inputs)
    np.testing.assert_allclose(got, walked(*inputs), atol=2e-6)


def test_the_tpu_kernel_leaves_prefill_to_the_plain_form():
    inputs = random_pages(10, jnp.arange(128, dtype=jnp.int32)[None])
    np.testing.assert_array_equal(tpu_kernel(*inputs), walked(*inputs))


def random_pages(heads, slots):
    """Returns queries, a cache, and a page table with up to 13 pages per row."""
    rng = np.random.default_rng(0)
    (rows, num_tokens), kv_heads, head_dim, page_tokens, num_pages, width = slots.shape, 2, 128, 64, 53, 16
    q = jnp.asarray(rng.normal(size=(rows, num_tokens, heads, head_dim)), jnp.float32)
    keys, values = jnp.asarray(rng.normal(size=(2, kv_heads, num_pages, page_tokens, head_dim)), jnp.float32)
    table = jnp.asarray(rng.permutation(num_pages)[: rows * 13].reshape(rows, 13), jnp.int32)
    return q, keys, values, jnp.pad(table, ((0, 0), (0, width - 13))), slots


TEXT = replace(DIVISIBLE.text, head_dim=128, mrope_sections=(24, 20, 20))


def without_the_last_token(q, keys, values, table, slots):
    return walked(q, keys, values, table, jnp.maximum(slots - 1, 0))


def without_a_page(q, keys, values, table, slots):
    return walked(q, keys, values, table.at[:, 1].set(table[:, 0]), slots)


def wrong_in_prefill(q, keys, values, table, slots):
    return (walked if q.shape[1] == 1 else without_a_page)(q, keys, values, table, slots)


def failing_in_prefill(q, keys, values, table, slots):
    if q.shape[1] > 1:
        raise NotImplementedError("no prefill")
    return walked(q, keys, values, table, slots)


@pytest.mark.slow
def test_a_correct_kernel_passes_its_check():
    check = check_paged(lambda *inputs: walked(*inputs), TEXT, "bfloat16")
    assert check.error < 0.01 and min(check.kernel_ms, check.plain_ms) > 0
    faster = replace(check, kernel_ms=1.0, plain_ms=2.0)
    assert faster.passed and str(faster).startswith("kernel, max error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (without_the_last_token, "is wrong: max error "),
        pytest.param(without_a_page, "is wrong: max error ", marks=pytest.mark.nightly),
        (wrong_in_prefill, "is wrong: max error "),
        (failing_in_prefill, "failed (NotImplementedError: no prefill)"),
    ],
)
def test_the_check_rejects_a_wrong_kernel(kernel, reason):
    check = check_paged(kernel, TEXT, "bfloat16")
    assert not check.passed and reason in str(check) and str(check).startswith("plain, because the kernel ")


@pytest.mark.slow
@pytest.mark.parametrize("works", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_the_sampler_uses_the_kernel_only_if_it_passes_its_check(monkeypatch, works):
    kernel = (lambda *inputs: walked(*inputs)) if works else without_a_page
    monkeypatch.setattr(sampler_module, "kernel_of", lambda head_dim: kernel)
    monkeypatch.setattr(
        sampler_module,
        "check_paged",
        lambda *arguments: replace(check_paged(*arguments), kernel_ms=1.0, plain_ms=2.0),
    )
    sampler = Sampler(VLModel(replace(DIVISIBLE, text=TEXT), rngs=nnx.Rngs(0)), max_rows=1, max_context_tokens=64)
    assert sampler.kernel_check.passed is works and sampler._attend is (kernel if works else walked)
    assert len(sampler.generate([SamplerRequest(SamplerPrompt(np.arange(5)), SamplingParams(3))])[0].ids) == 3
