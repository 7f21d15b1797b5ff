"""Accelerators that are not here, as their compilers know them: h100:8, v5p:2x2x2.

XLA compiles for a description of devices; none of them has to be there. It needs the compiler's package: libtpu for a
TPU, the CUDA plugin of jax (without a driver) for a GPU.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

GPUS_OF_A_HOST = 8
PACKAGES = {"tpu": ("libtpu", "aot-tpu"), "cuda": ("jax_plugins.xla_cuda12", "aot-gpu")}  # module, extra to install
TPU_KINDS = ("v5e", "v5p", "v6e")


@dataclass(frozen=True)
class GpuKind:
    """What XLA's cost model asks of a GPU; from NVIDIA's data sheets."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_of_a_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: float
    cache_bytes: int
    shared_bytes_of_a_core: int

    @property
    def as_text(self) -> str:
        """As a text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_bytes_of_a_core,
            "shared_memory_per_block_optin": self.shared_bytes_of_a_core - 1024,
            "core_count": self.cores,
            "fpus_per_core": self.fpus_of_a_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": int(self.memory_bytes_per_s),
            "l2_cache_size": self.cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "cuda_compute_capability": f"{{major: {major} minor: {minor}}}",
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        lines = [f"{name}: {value}".replace(": {", " {") for name, value in device.items()]
        return (
            f'gpu_device_info {{ {" ".join(lines)} }} platform_name: "CUDA" dnn_version_info {{major: 9 minor: 8}} '
            f'device_description_str: "{self.name}"'
        )


MIB, GIB = 2**20, 2**30


def _hopper(name: str, memory_bytes: int, memory_tb_per_s: float) -> GpuKind:
    return GpuKind(name, (9, 0), 132, 128, 1.98, memory_bytes, memory_tb_per_s * 1e12, 50 * MIB, 228 * 1024)


def _ampere(name: str, memory_bytes: int, memory_tb_per_s: float) -> GpuKind:
    return GpuKind(name, (8, 0), 108, 64, 1.41, memory_bytes, memory_tb_per_s * 1e12, 40 * MIB, 164 * 1024)


GPU_KINDS = {
    "h100": _hopper("NVIDIA H100 80GB HBM3", 84_942_979_072, 3.35),
    "h200": _hopper("NVIDIA H200", 150_121_000_000, 4.8),
    "a100": _ampere("NVIDIA A100-SXM4-80GB", 85_000_000_000, 2.04),
    "a100-40": _ampere("NVIDIA A100-SXM4-40GB", 42_300_000_000, 1.56),
    "b200": GpuKind("NVIDIA B200", (10, 0), 148, 128, 1.97, 191_500_000_000, 8e12, 126 * MIB, 228 * 1024),
}


@dataclass(frozen=True)
class Topology:
    """So many devices of one kind, and how they are connected."""

    name: str
    kind: str  # of plan.DEVICES
    platform: str  # tpu or cuda
    num_devices: int

    @property
    def num_hosts(self) -> int:
        """As they are rented: eight GPUs in a box; of TPUs four chips at most, and a v5e or v6e of eight."""
        if self.platform == "cuda":
            return -(-self.num_devices // GPUS_OF_A_HOST)
        return 1 if self.kind != "v5p" and self.num_devices <= GPUS_OF_A_HOST else -(-self.num_devices // 4)

    def devices(self) -> Any:
        """For a mesh to compile for; nothing can run on them."""
        _check_compiler(self.platform)
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
        from jax.experimental import topologies

        if self.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices
        shape = f"1x{self.num_hosts}x{min(self.num_devices, GPUS_OF_A_HOST)}"
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=shape, target_config=GPU_KINDS[self.kind].as_text
        ).devices


def topology(name: str) -> Topology:
    """By a name such as h100:8 (a number of GPUs) or v5p:2x2x2 (a slice of TPUs, as it is rented)."""
    kind, _, shape = name.partition(":")
    if kind in GPU_KINDS and re.fullmatch(r"[1-9]\d*", shape):
        count = int(shape)
        if count > GPUS_OF_A_HOST and count % GPUS_OF_A_HOST:
            raise ValueError(f"--topology {name}: more than {GPUS_OF_A_HOST} GPUs come in boxes of {GPUS_OF_A_HOST}")
        return Topology(name, kind, "cuda", count)
    if kind in TPU_KINDS and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        return Topology(name, kind, "tpu", math.prod(map(int, shape.split("x"))))
    raise ValueError(
        f"--topology {name} is not known; there are {', '.join(f'{kind}:8' for kind in GPU_KINDS)} (a number of GPUs) "
        f"and v5e:4x4, v5p:2x2x2, v6e:4x4 (a slice of TPUs)"
    )


def _check_compiler(platform: str) -> None:
    from importlib.util import find_spec

    module, extra = PACKAGES[platform]
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    if not found:
        raise ValueError(
            f"the compiler for this topology is not installed: pip install 'paravt_jax[{extra}]' (it needs no device)"
        )
