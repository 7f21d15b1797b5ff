"""Eight CPU devices, a shared compilation cache, and no silent broadcasting, for every test."""

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
# Outside the clone, where runs keep theirs: every worker, every run and the next clone find what was compiled before.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paravt_jax" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # most programs are small, and many are equal
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # nobody reads in which line an instruction was traced
# Threads of torch and numpy wait for each other by spinning: on tiny arrays that is half of what they compute.
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
from rollout.chat import Chat

MAX_IDLE_BYTES = 2**30  # of a process between modules
MAX_GROWTH_BYTES = 0.4 * 2**30  # of a process within a module, since it last dropped its programs
MAX_IDLE_GROWTH_BYTES = 0.15 * 2**30  # the same between modules
MAX_BYTES = 3 * 2**30  # of a process at any time: four of them and their servers run on 16 GB

jax.config.update("jax_numpy_rank_promotion", "raise")
# Beside Python's own handler asyncio.run sets another, and with it writes out all that its task returned.
signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))
httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)  # a client reads all certificates of the system
kept_bytes = MAX_IDLE_BYTES  # at least, by the process after it last dropped its programs

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


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's directory, to be read: a test that writes into one makes its own."""
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
    """After a module, drops compiled programs and checks the peak: a module that exceeds MAX_BYTES is an error."""
    earlier = peak_bytes()
    yield
    drop_programs_above(kept_bytes + MAX_IDLE_GROWTH_BYTES)
    assert peak_bytes() <= max(earlier, MAX_BYTES), f"{peak_bytes() / 2**30:.2f} GiB in memory, more than 3"


@pytest.fixture(autouse=True)
def bounded_growth():
    """Drops compiled programs within a module as well, before they add up."""
    yield
    drop_programs_above(kept_bytes + MAX_GROWTH_BYTES)


def drop_programs_above(num_bytes: float) -> None:
    """JAX keeps each compiled program, 2 MiB or more, as long as the process lives."""
    global kept_bytes
    process = psutil.Process()
    if process.memory_info().rss > num_bytes:
        gc.collect()  # it runs seldom otherwise, and cycles keep programs and arrays
        jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)  # without it, glibc keeps the freed memory
        kept_bytes = max(MAX_IDLE_BYTES, process.memory_info().rss)


def peak_bytes() -> int:
    """This process's largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# What takes minutes begins first, so that no process is left alone with it at the end.
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
    parser.addoption("--long", type=float, default=0, metavar="MINUTES", help="so long for each target of test_fuzz.py")


class TorchInOneProcess(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "torch" if Path(path).name in TORCH_FILES else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Of the quick tests one process runs all that import torch, because the import takes as long as many of them."""
    is_quick = config.getvalue("dist") == "loadfile" and "not slow" in config.getvalue("markexpr")
    return TorchInOneProcess(config, log) if is_quick else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What it imports stays: garbage is looked for later, among the rest, and less often, as JAX does so each time."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))
