"""Which form of attention is taken, by name or by what the machine and the length of a row call for."""

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

Form = Literal["auto", "xla", "blocked", "scanned", "kernel"]

# Rows up to here are `blocked`. On a CPU that was measured to be faster as long as the scores of a layer fit; on an
# accelerator the border is not measured, and stands where these scores are small beside what else a layer makes.
SHORT_ROW_TOKENS = {"cpu": 4096}
SHORT_ROW_ELSEWHERE = 1024

KERNEL_PLATFORMS = ("tpu", "gpu")


def attention_of(form: Form) -> Attention:
    def attend(q: Array, k: Array, v: Array, layout: Layout, causal: bool) -> Array:
        target = platform()
        return _program(form_of(form, q.shape[1], target), target)(q, k, v, layout, causal)

    return attend


def form_of(form: Form, num_tokens: int, platform: str) -> Form:
    """What `auto` is for rows of so many tokens: in long ones memory grows with the row, not with its square.

    Any other is what it is.
    """
    if form == "kernel" and platform not in KERNEL_PLATFORMS:
        raise ValueError(f"model.attention=kernel, but there is none for {platform}; take auto or scanned")
    if form != "auto":
        return form
    if num_tokens <= SHORT_ROW_TOKENS.get(platform, SHORT_ROW_ELSEWHERE):
        return "blocked"
    return "kernel" if platform in KERNEL_PLATFORMS else "scanned"


def computed_pairs(form: Form, num_tokens: int, queries_per_key: int, platform: str) -> int:
    """Pairs of tokens of a full causal row whose scores are computed: blocks are computed whole."""
    form = form_of(form, num_tokens, platform)
    if form == "xla":
        return num_tokens**2
    if form == "blocked":
        return sum((block.stop - block.start) * end for block, end in score_blocks(num_tokens, num_tokens, True))
    block_tokens = scanned.block_tokens if form == "scanned" else _kernel(platform)[1]
    size = block_tokens(num_tokens, queries_per_key)
    blocks = -(-num_tokens // size)
    return size**2 * blocks * (blocks + 1) // 2


def _program(form: Form, platform: str) -> Attention:
    return _kernel(platform)[0] if form == "kernel" else FORMS[form]


def _kernel(platform: str) -> tuple[Attention, Callable[[int, int], int]]:
    """And the tokens of its blocks. Loaded where it is wanted: a CPU needs nothing of Pallas."""
    if platform == "tpu":
        from model_port.attention.tpu import block_tokens, tpu_attention

        return tpu_attention, block_tokens
    from model_port.attention.gpu import block_tokens, gpu_attention

    return gpu_attention, block_tokens


def _of_rows(attend: Callable[..., Array]) -> Attention:
    """Of rows that attend to themselves."""
    return lambda q, k, v, layout, causal: attend(q, k, v, layout, layout, causal)


FORMS: dict[Form, Attention] = {
    "xla": _of_rows(xla_attention),
    "blocked": _of_rows(blocked_attention),
    "scanned": scanned_attention,
}
