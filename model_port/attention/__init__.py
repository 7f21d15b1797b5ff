"""Attention in packed rows: one mask (rule.py) and several implementations, which must all agree with `xla`.

    xla      the reference: computes all scores at once
    blocked  independent blocks of queries: the fastest on a CPU for short rows
    scanned  loops over pairs of query and key blocks: O(T) memory on every platform
    kernel   the same as Pallas kernels, for TPU (tpu.py) and NVIDIA GPUs (gpu.py)

`auto` computes short rows with `blocked` and long rows with `scanned`, or with the kernel if it has passed its check
(choice.py, check.py). The vision tower's rows are short in the published recipe: a frame has 196 patches.
"""

from model_port.attention.blocked import blocked_attention
from model_port.attention.choice import Form, allow_kernel, attention_of, computed_pairs, form_of
from model_port.attention.flash import Attention
from model_port.attention.rule import ATTENTION_OUT, Layout

__all__ = [
    "ATTENTION_OUT",
    "Attention",
    "Form",
    "Layout",
    "allow_kernel",
    "attention_of",
    "blocked_attention",
    "computed_pairs",
    "form_of",
]
