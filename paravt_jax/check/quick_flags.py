"""XLA flags for tiny models, whose programs run for milliseconds and compile for seconds.

This module does not import jax, because jax reads its environment when it is imported.
"""

from importlib.metadata import version

QUICK_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # XLA aborts the process if it does not know a flag, and later versions do not know this flag.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
)
