"""Selects the form of attention by name, or by platform and row length."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Array

from model_port.attention import scanned
from model_port.attention.blocked import blocked_attention, score_blocks
from model_port.attention.flash import Attention
from model_port.attention.plain import xla_attention
from model_port.attention.rule import Layout
from model_port.attention.scanned import scanned_attention
from model_port.sharding import platform

# auto_kernel is auto with the kernel for long rows; a run uses it after `check_kernel` has passed on its device.
Form = Literal["auto", "auto_kernel", "xla", "blocked", "scanned", "kernel"]

# Rows up to this length are `blocked`. On a CPU, measurements showed this form to be faster if a layer's scores fit in
# memory. On accelerators the limit is not measured; it keeps the scores small relative to a layer's other activations.
SHORT_ROW_TOKENS = {"cpu": 4096}
SHORT_ROW_ELSEWHERE = 1024

KERNEL_PLATFORMS = ("tpu", "gpu")


def attention_of(form: Form) -> Attention:
    """Returns the function that computes attention. `auto` never uses a kernel here, because nothing has checked it."""

    def attend(q: Array, k: Array, v: Array, layout: Layout, causal: bool) -> Array:
        target = platform()
        resolved = form_of(form, q.shape[1], target)
        resolved = "scanned" if form == "auto" and resolved == "kernel" else resolved
        return (kernel_of(target) if resolved == "kernel" else FORMS[resolved])(q, k, v, layout, causal)

    return attend


def allow_kernel(form: Form) -> Form:
    """Returns `auto_kernel` for `auto`, and any other form unchanged."""
    return "auto_kernel" if form == "auto" else form


def form_of(form: Form, num_tokens: int, platform: str) -> Form:
    """Returns the form for rows of this many tokens, assuming that the platform's kernel passes its check.

    For long rows `auto` uses a form whose memory grows with the row's length, not with its square.
    """
    if form == "kernel" and platform not in KERNEL_PLATFORMS:
        raise ValueError(f"model.attention=kernel, but there is no kernel for {platform}; set auto or scanned")
    if form not in ("auto", "auto_kernel"):
        return form
    if num_tokens <= SHORT_ROW_TOKENS.get(platform, SHORT_ROW_ELSEWHERE):
        return "blocked"
    return "kernel" if platform in KERNEL_PLATFORMS else "scanned"


def computed_pairs(form: Form, num_tokens: int, queries_per_key: int, platform: str) -> int:
    """Returns how many token pairs' scores are computed in a full causal row. Blocks are computed entirely."""
    form = form_of(form, num_tokens, platform)
    if form == "xla":
        return num_tokens**2
    if form == "blocked":
        return sum((block.stop - block.start) * end for block, end in score_blocks(num_tokens, causal=True))
    block_tokens = scanned.block_tokens if form == "scanned" else _kernel_and_blocks(platform)[1]
    size = block_tokens(num_tokens, queries_per_key)
    blocks = -(-num_tokens // size)
    return size**2 * blocks * (blocks + 1) // 2


def kernel_of(platform: str) -> Attention:
    return _kernel_and_blocks(platform)[0]


def _kernel_and_blocks(platform: str) -> tuple[Attention, Callable[[int, int], int]]:
    """Returns the kernel and its block size. They are imported on use, because a CPU does not need Pallas."""
    if platform == "tpu":
        from model_port.attention.tpu import block_tokens, tpu_attention

        return tpu_attention, block_tokens
    from model_port.attention.gpu import block_tokens, gpu_attention

    return gpu_attention, block_tokens


FORMS: dict[Form, Attention] = {"xla": xla_attention, "blocked": blocked_attention, "scanned": scanned_attention}
