"""Makes the start line of every command: devices, model, data and precision.

A run that uses a CPU by mistake seems to hang. So if jax cannot use the GPU, the line explains how to fix it, and large
models train on a CPU only with JAX_PLATFORMS=cpu.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from model_port.cli import one_line
from model_port.config import read_config
from model_port.weights import in_words, num_params
from paravt_jax.config import MeshConfig
from paravt_jax.run.gpu_assignment import VISIBLE

PLATFORMS = "JAX_PLATFORMS"
MAX_CPU_PARAMS = 100_000_000  # largest model that trains on a CPU without JAX_PLATFORMS=cpu
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
NVIDIA_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg")  # a driver's files in /dev, also in containers and WSL


def find_devices() -> Sequence[Any]:
    """Finds the run's devices. Raises if jax has no devices for JAX_PLATFORMS."""
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as problem:  # AssertionError: a platform without hardware
        platforms = os.environ.get(PLATFORMS, "")
        why = _no_gpu() if {"cuda", "gpu"} & set(platforms.split(",")) else one_line(problem)
        raise RuntimeError(
            f"{PLATFORMS}={platforms}, but jax finds no such device: {why}; fix that, unset {PLATFORMS} to use any "
            f"device, or set {PLATFORMS}=cpu"
        ) from None


def fell_back(devices: Sequence[Any]) -> bool:
    """Whether jax uses a CPU although JAX_PLATFORMS does not ask for one."""
    return devices[0].platform == "cpu" and os.environ.get(PLATFORMS, "").split(",")[0] != "cpu"


def _gpu_is_visible() -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in NVIDIA_FILES)


def _cuda_is_installed() -> bool:
    return any(map(find_spec, CUDA_PLUGINS))


def _no_gpu() -> str:
    """The reason why jax uses no NVIDIA GPU."""
    if not _cuda_is_installed():
        visible = "an NVIDIA GPU is" if _gpu_is_visible() else "no NVIDIA GPU is"
        return f"{visible} visible, and jax's CUDA plugin is not installed (`pip install 'jax[cuda12]'`)"
    hidden = f", and {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
    if not _gpu_is_visible():
        return f"jax's CUDA plugin is installed, but no NVIDIA GPU is visible (`nvidia-smi` lists them){hidden}"
    try:
        jax.devices("cuda")
        return "jax could use an NVIDIA GPU, but a setting prevents it"
    except (AssertionError, RuntimeError) as problem:
        return f"an NVIDIA GPU is visible, but jax's CUDA plugin cannot use it{hidden}: {one_line(problem)}"


def describe_devices(devices: Sequence[Any], num_hosts: int = 1) -> str:
    """Describes devices, for example `8 x NVIDIA H100 80GB HBM3`. Explains why jax does not use a visible GPU."""
    why = _no_gpu() if fell_back(devices) and (_gpu_is_visible() or _cuda_is_installed()) else ""
    on_hosts = f" on {num_hosts} hosts" if num_hosts > 1 else ""
    return f"{len(devices)} x {devices[0].device_kind}{on_hosts}" + f" ({why})" * bool(why)


def size_of(hf_dir: Path) -> int:
    """Number of parameters, computed from config.json."""
    return num_params(read_config(hf_dir))


def check_cpu_size(model: str, size: int, devices: Sequence[Any]) -> None:
    """Raises if a large model would train on a CPU by mistake."""
    if fell_back(devices) and size > MAX_CPU_PARAMS:
        raise RuntimeError(
            f"model.path={model} has {in_words(size)} parameters, and jax would train it on "
            f"{describe_devices(devices)}: start it where jax.devices() shows a GPU or TPU, or set {PLATFORMS}=cpu to "
            f"train it on the CPU"
        )


def start_line(
    devices: str, size: int, dtype: str, written: str, *, mesh: MeshConfig | None = None, **items: object
) -> str:
    """Formats the start line. `size` counts parameters, `written` is the dtype in the settings, `items` follow."""
    parts: dict[str, object] = {"devices": devices}
    if mesh is not None:
        axes = " ".join(f"{name}={number}" for name, number in vars(mesh).items())
        parts["mesh"] = axes if mesh.num_devices > 1 else "one device"
    slow = f" (model.dtype={written} is slower and takes more memory on a CPU)" if dtype != written else ""
    parts["parameters"] = f"{in_words(size)} in {dtype}{slow}"
    return " | ".join(f"{name}: {value}" for name, value in (parts | items).items() if value)
