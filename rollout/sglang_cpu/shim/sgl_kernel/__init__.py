"""Import-only stand-in for sgl-kernel on a CPU without AMX (PyPI has no CPU build of it).

With SGLANG_USE_CPU_ENGINE=1 sglang 0.5.23 reads some kernel names at import time (KV-cache
moves and speculative decoding helpers; Qwen3.5 / Mamba / GDN kernels, pulled in because
multimodal/processors/qwen_vl.py imports models/qwen3_5.py).  Without AMX none is called on the
path of a Qwen3-VL, dense or a mixture: every fast path is guarded by cpu_has_amx_support().  A call of
any of them raises, so nothing is silently faked."""

import torch

_OPS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)
_lib = torch.library.Library("sgl_kernel", "FRAGMENT")
for _op in _OPS:
    _lib.define(f"{_op}(Tensor x) -> Tensor")  # name only: no implementation registered


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: no CPU build here (shim)")

    missing.__name__ = name
    return missing
