"""Attention in packed rows, by several programs for one rule (rule.py); each must equal `xla`, which spells it out.

    xla      the oracle: all scores at once
    blocked  blocks of queries side by side: the fastest on a CPU while rows are short
    scanned  blocks of queries and keys one after the other: O(T) memory, wherever XLA runs
    kernel   the same on the chip itself, for TPU (tpu.py) and NVIDIA GPUs (gpu.py)

Unless another is named, short rows are `blocked` everywhere, those of the vision tower too (a frame has 196 patches in
the published recipe), and long ones are `kernel` where there is one and `scanned` elsewhere (choice.py).
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
