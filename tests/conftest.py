"""Eight CPU devices, quick compilation into a cache that all share, and no silent broadcasting, for every test."""

import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # The suite compiles much that runs for milliseconds: unoptimised, XLA is done in a fifth of the time.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # A later XLA does not know this one, and aborts the process over what it does not know.
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Timings are never tests. In CI the examples are the same every time: a change is judged by what it changed.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def float64():
    """Runs a test in double precision, where an exact identity shows to ten digits and more."""
    with jax.enable_x64(True):
        yield
