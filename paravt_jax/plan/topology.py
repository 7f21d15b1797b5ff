"""Describes accelerators for ahead-of-time compilation, for example h100:8 or v5p:2x2x2.

XLA compiles for a description of devices. It needs the compiler's package: libtpu for TPUs, and for GPUs jax's CUDA
plugin, which needs no driver.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from paravt_jax.plan.devices import CHIPS_OF_A_HOST, DEVICES, DEVICES_OF_A_HOST, GIB, SLICES, DeviceSpec

PACKAGES = {"tpu": ("libtpu", "aot-tpu"), "gpu": ("jax_plugins.xla_cuda12", "aot-gpu")}  # module, extra to install
KNOWN = (
    "h100:8, h200:8, b200:8, a100:8, a100-40:8, l4:8 (a number of GPUs), v5e-16 or v5e:4x4, v5p-8 or v5p:2x2x1, "
    "v6e-16 or v6e:4x4 (a slice of TPUs)"
)
MIB = 2**20
COMPILES_ONLY = {  # without a TPU, libtpu needs no lock, and must not search for metadata, which would log a warning
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # does not affect programs for --topology
}


@dataclass(frozen=True)
class GpuChip:
    """GPU figures for XLA's cost model, from NVIDIA's data sheets."""

    capability: tuple[int, int]
    cores: int
    fpus_of_a_core: int
    clock_ghz: float
    cache_bytes: int
    shared_bytes_of_a_core: int

    def as_text(self, device: DeviceSpec) -> str:
        """Formats XLA's GpuTargetConfigProto as text."""
        assert device.memory_gib is not None and device.memory_tb_per_s is not None
        major, minor = self.capability
        info = {
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
            "memory_bandwidth": int(device.memory_tb_per_s * 1e12),
            "l2_cache_size": self.cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": int(device.memory_gib * GIB),
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        lines = " ".join(f"{name}: {value}" for name, value in info.items())
        return (
            f"gpu_device_info {{ {lines} cuda_compute_capability {{major: {major} minor: {minor}}} }} "
            f'platform_name: "CUDA" dnn_version_info {{major: 9 minor: 8}} device_description_str: "{device.kind}"'
        )


GPU_CHIPS = {
    "h100": GpuChip((9, 0), 132, 128, 1.98, 50 * MIB, 228 * 1024),
    "h200": GpuChip((9, 0), 132, 128, 1.98, 50 * MIB, 228 * 1024),
    "b200": GpuChip((10, 0), 148, 128, 1.97, 126 * MIB, 228 * 1024),
    "a100": GpuChip((8, 0), 108, 64, 1.41, 40 * MIB, 164 * 1024),
    "a100-40": GpuChip((8, 0), 108, 64, 1.41, 40 * MIB, 164 * 1024),
    "l4": GpuChip((8, 9), 58, 128, 2.04, 48 * MIB, 100 * 1024),
}


@dataclass(frozen=True)
class Topology:
    """A topology of devices: GPUs in hosts of eight, or a TPU slice."""

    name: str
    device: DeviceSpec
    num_devices: int

    @property
    def num_hosts(self) -> int:
        return self.device.num_hosts(self.num_devices)

    def without_gpus(self, server_gpus: Sequence[int]) -> list[int]:
        """The indices of devices that remain if servers use these GPUs on every host."""
        of_a_host = self.num_devices // self.num_hosts
        num_gpus = of_a_host if self.device.platform == "gpu" else 0
        if absent := [number for number in server_gpus if number >= num_gpus]:
            raise ValueError(
                f"engine.gpus={list(server_gpus)}: a host of --topology {self.name} has no GPU {absent[0]}; it has "
                f"{num_gpus}, counted from 0"
            )
        return [number for number in range(self.num_devices) if number % of_a_host not in server_gpus]

    def devices(self) -> Any:
        """Makes abstract devices, for which programs can be compiled but not run."""
        check_compiler(self.device.platform)
        os.environ |= COMPILES_ONLY
        from jax.errors import JaxRuntimeError
        from jax.experimental import topologies

        try:
            if self.device.platform == "tpu":
                return topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"1x{self.num_hosts}x{min(self.num_devices, DEVICES_OF_A_HOST)}",
                target_config=GPU_CHIPS[self.device.name].as_text(self.device),
            ).devices
        except JaxRuntimeError as problem:
            raise ValueError(f"the compiler rejects --topology {self.name}: {_sentence(problem)}") from None


def topology(name: str) -> Topology:
    """Parses a name such as h100:8 (a number of GPUs), v5p:2x2x1 or v5p-8 (a TPU slice)."""
    name = SLICES.get(name, name)
    kind, _, shape = name.partition(":")
    device = DEVICES.get(kind)
    if device is not None and device.platform == "gpu" and re.fullmatch(r"[1-9]\d*", shape):
        count = int(shape)
        if count > DEVICES_OF_A_HOST and count % DEVICES_OF_A_HOST:
            raise ValueError(f"--topology {name}: a number of GPUs above {DEVICES_OF_A_HOST} must be a multiple of it")
        return Topology(name, device, count)
    if device is not None and device.platform == "tpu" and re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        sides = [int(side) for side in shape.split("x")]
        if math.prod(sides) > CHIPS_OF_A_HOST and (sides[0] % 2 or sides[1] % 2):
            raise ValueError(f"--topology {name}: a slice over several hosts consists of 2x2 chips per host")
        return Topology(name, device, math.prod(sides))
    raise ValueError(f"--topology {name} is unknown; choose from {KNOWN}")


def check_compiler(platform: str) -> None:
    module, extra = PACKAGES[platform]
    try:
        is_installed = find_spec(module) is not None
    except ModuleNotFoundError:  # the module's parent package is missing
        is_installed = False
    if not is_installed:
        raise ValueError(
            f"the compiler for this topology is not installed; it needs no device: pip install 'paravt_jax[{extra}]' "
            f"(in a clone -e '.[{extra}]'); --plan-only estimates without it"
        )


def _sentence(problem: Exception) -> str:
    return " ".join(str(problem).split("===")[0].split())[:300]
