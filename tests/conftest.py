"""Sets up eight CPU devices, a shared compilation cache and strict rank promotion for every test."""

# ruff: noqa: E402 (jax reads its environment when it is imported)

import ctypes
import gc
import os
import resource
import signal
from collections.abc import Generator
from functools import cache
from pathlib import Path

from paravt_jax.check.quick_flags import QUICK_FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
XLA_FLAGS = ("--xla_force_host_platform_device_count=8", *QUICK_FLAGS)  # the suite is mostly XLA compiling
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS))
# Outside the clone, like the cache of runs, so that all workers, later runs and other clones share compiled programs.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paravt_jax" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # most programs are small, and many are equal
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # no test needs source lines in HLO
# Threads of torch and numpy spin while they wait for each other, which takes half of the time on tiny arrays.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import httpcore2
import hypothesis
import jax
import psutil
import pytest
from jaxtyping import install_import_hook
from typechecks import CHECKED, check_shapes_only

check_shapes_only()
install_import_hook(CHECKED, "typechecks.checked")

from fake_gcs import fake_gcs
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from model_port.tiny import make_tiny
from paravt_jax.run.process import claim_threads
from rollout.chat import Chat

# Memory of a test process.
MAX_IDLE_BYTES = 2**30  # between modules
MAX_GROWTH_BYTES = 0.4 * 2**30  # growth within a module since compiled programs were last dropped
MAX_IDLE_GROWTH_BYTES = 0.15 * 2**30  # the same growth between modules
MAX_BYTES = 3 * 2**30  # at any time: four processes and their servers must fit in 16 GB

claim_threads()
jax.config.update("jax_numpy_rank_promotion", "raise")
# With Python's own handler, asyncio.run installs another one, which formats the task's whole result.
signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))
# Otherwise each client reads all system certificates.
httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)
kept_bytes = MAX_IDLE_BYTES  # memory after compiled programs were last dropped

# Timings never fail a test. In CI the examples are fixed, so that only the change under test can fail.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def float64():
    """Enables double precision, in which exact identities hold to ten digits or more."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model. Read-only: a test that modifies a model makes its own."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    make_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def chat(tiny_hf: Path) -> Chat:
    return Chat.from_hf(tiny_hf)


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with fake_gcs(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Drops compiled programs after each module, and fails a module whose memory exceeded MAX_BYTES."""
    earlier = peak_bytes()
    yield
    drop_programs_above(kept_bytes + MAX_IDLE_GROWTH_BYTES)
    assert peak_bytes() <= max(earlier, MAX_BYTES), f"peak memory of {peak_bytes() / 2**30:.2f} GiB exceeds 3"


@pytest.fixture(autouse=True)
def bounded_growth():
    """Drops compiled programs also within a module, before they accumulate."""
    yield
    drop_programs_above(kept_bytes + MAX_GROWTH_BYTES)


def drop_programs_above(num_bytes: float) -> None:
    """Drops JAX's compiled programs, each at least 2 MiB, which it otherwise keeps until the process exits."""
    global kept_bytes
    process = psutil.Process()
    if process.memory_info().rss > num_bytes:
        gc.collect()  # reference cycles keep programs and arrays, and automatic collection is rare
        jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)  # without it, glibc keeps the freed memory
        kept_bytes = max(MAX_IDLE_BYTES, process.memory_info().rss)


def peak_bytes() -> int:
    """This process's largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Files that take minutes start first, so that no process runs one alone at the end.
LONG_FILES = (
    *("test_real_server.py", "test_train.py", "test_hosts_run.py", "test_resume.py", "test_docs.py", "test_sft.py"),
    *("test_stats.py", "test_check.py", "test_batches.py", "test_parity.py", "test_machines.py", "test_plan.py"),
    *("test_learner.py", "test_mesh.py", "test_checkpoint.py", "test_video_reader.py", "test_sampler.py"),
    *("test_overfit.py", "test_packing.py", "test_chaos.py", "test_fuzz.py"),
)
TORCH_FILES = {
    *("test_parity.py", "test_packing.py", "test_sampler.py", "test_roundtrip.py", "test_tiny.py", "test_export.py"),
    *("test_processing.py", "test_verify.py", "test_card.py", "test_check.py", "test_release.py"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", type=float, default=0, metavar="MINUTES", help="duration of each target of test_fuzz.py")


class TorchInOneProcess(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "torch" if Path(path).name in TORCH_FILES else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Runs all quick tests that import torch in one process, because the import takes as long as many tests."""
    is_quick = config.getvalue("dist") == "loadfile" and "not slow" in config.getvalue("markexpr")
    return TorchInOneProcess(config, log) if is_quick else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes imported objects, and collects garbage less often, because each collection also runs JAX's hook."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))
