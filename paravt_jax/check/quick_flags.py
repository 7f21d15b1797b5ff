"""Flags of XLA for tiny models, whose programs run for milliseconds and compile for seconds.

It does not import jax, which reads its environment when it is imported.
"""

from importlib.metadata import version

QUICK_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA aborts the process over a flag that it does not know, and later versions do not know this one.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
)
