"""Accelerators with figures from their data sheets.

GPUs: NVIDIA's data sheets of H100, H200, A100, L4 and DGX B200, with dense bfloat16, NVLink in one direction (PCIe for
L4), and one network card per GPU as in machines with eight GPUs. TPUs: Google Cloud's system architecture pages of v5e,
v5p and v6e, with all links of a chip in one direction. Memory is the value that the runtime reports.
"""

import math
from dataclasses import dataclass, replace

from paravt_jax.run.process import RESERVE_FRAC

GIB = 2**30
NO_ROOM = "RESOURCE_EXHAUSTED"  # part of XLA's out-of-memory errors
DEVICES_OF_A_HOST = 8  # GPUs
CHIPS_OF_A_HOST = 4  # TPUs, as their compiler counts hosts

PEAK_FRAC, MEMORY_FRAC, LINK_FRAC = 0.7, 0.8, 0.75  # fractions of the data sheet's figures that large operations reach


@dataclass(frozen=True)
class Links:
    """A TPU's interconnect, with two links per dimension."""

    dimensions: int
    ring_side: int  # slices with all sides at least this long have wraparound links

    def used_frac(self, num_devices: int) -> float:
        """The smallest fraction of a chip's links that lead to other devices of the group.

        Without wraparound, a corner has one link per dimension, and none in a dimension of size 1. The group is assumed
        to be as close to a cube (or a square, with two dimensions) as powers of two allow.
        """
        sides = [1] * self.dimensions
        for number in range(round(math.log2(num_devices))):
            sides[number % self.dimensions] *= 2
        in_each = 2 if min(sides) >= self.ring_side else 1
        return in_each * sum(side > 1 for side in sides) / (2 * self.dimensions)


@dataclass(frozen=True)
class Rates:
    """Sustained rates of a device, per second."""

    flops: float
    memory_bytes: float
    link_bytes: float  # to the devices of its host or slice, over all links
    network_bytes: float = math.inf  # to other hosts
    links: Links | None = None  # None: all links reach every device

    def link_bytes_among(self, num_devices: int) -> float:
        """Bandwidth from a device to the others in a group of `num_devices`."""
        return self.link_bytes * (1.0 if self.links is None else self.links.used_frac(num_devices))

    def shared_by(self, num_devices: int) -> "Rates":
        """Rates per virtual device if several share this device, for example on a CPU."""
        names = ("flops", "memory_bytes", "link_bytes", "network_bytes")
        return replace(self, **{name: getattr(self, name) / num_devices for name in names})


@dataclass(frozen=True)
class DeviceSpec:
    """An accelerator's data sheet, and the rates that follow from it."""

    name: str
    kind: str  # the runtime's name of the device
    memory_gib: float | None  # as the runtime reports it; None: unlimited
    peak_tflops: float | None  # dense, in bfloat16
    memory_tb_per_s: float | None
    link_gb_per_s: float | None  # one way, over all links within its host or slice
    network_gb_per_s: float = math.inf  # one way, to other hosts; TPUs of a slice have links to them
    platform: str = "gpu"
    links: Links | None = None  # a TPU's

    def rates(self, dtype: str) -> "Rates | None":
        """Sustained rates with activations of this dtype; None without a data sheet."""
        if self.peak_tflops is None or self.memory_tb_per_s is None or self.link_gb_per_s is None:
            return None
        return Rates(
            PEAK_FRAC * 1e12 * self.peak_tflops * self.peak_frac(dtype),
            MEMORY_FRAC * 1e12 * self.memory_tb_per_s,
            LINK_FRAC * 1e9 * self.link_gb_per_s,
            LINK_FRAC * 1e9 * self.network_gb_per_s,
            self.links,
        )

    def peak_frac(self, dtype: str) -> float:
        """Peak relative to bfloat16. By default, float32 products use TF32 on GPUs and bfloat16 on TPUs."""
        return 0.5 if dtype == "float32" and self.platform == "gpu" else 1.0

    @property
    def host_devices(self) -> int:
        """The usual number of devices per host; 0: all devices."""
        return {"gpu": DEVICES_OF_A_HOST, "tpu": CHIPS_OF_A_HOST}.get(self.platform, 0)

    def num_hosts(self, num_devices: int) -> int:
        return -(-num_devices // (self.host_devices or num_devices))

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_gib is None else self.memory_gib * GIB * (1 - RESERVE_FRAC)


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("h100", "NVIDIA H100 80GB HBM3", 79.1, 989.0, 3.35, 450.0, 50.0),
        DeviceSpec("h200", "NVIDIA H200", 139.0, 989.0, 4.8, 450.0, 50.0),
        DeviceSpec("b200", "NVIDIA B200", 178.3, 2250.0, 8.0, 900.0, 50.0),
        DeviceSpec("a100", "NVIDIA A100-SXM4-80GB", 79.1, 312.0, 2.04, 300.0, 25.0),
        DeviceSpec("a100-40", "NVIDIA A100-SXM4-40GB", 39.4, 312.0, 1.56, 300.0, 25.0),
        DeviceSpec("l4", "NVIDIA L4", 22.0, 121.0, 0.3, 32.0, 12.5),
        DeviceSpec("v5p", "TPU v5", 95.0, 459.0, 2.77, 600.0, platform="tpu", links=Links(3, ring_side=4)),
        DeviceSpec("v6e", "TPU v6 lite", 31.2, 918.0, 1.64, 400.0, platform="tpu", links=Links(2, ring_side=16)),
        DeviceSpec("v5e", "TPU v5 lite", 15.7, 197.0, 0.82, 200.0, platform="tpu", links=Links(2, ring_side=16)),
        DeviceSpec("cpu", "cpu", None, None, None, None, platform="cpu"),
    )
}


# Slice names contain the number of cores for v5p, with two cores per chip, and the number of chips for other TPUs.
V5P_SLICES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}
FLAT_SLICES = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SLICES = {
    f"{kind}-{number}": f"{kind}:{shape}"
    for kind, shapes in {"v5p": V5P_SLICES, "v5e": FLAT_SLICES, "v6e": FLAT_SLICES}.items()
    for number, shape in shapes.items()
}


def device_of(kind: str) -> DeviceSpec | None:
    """Finds a device by the runtime's exact name, because an H100 PCIe is no H100 SXM and an L40S no L4."""
    return next((device for device in DEVICES.values() if device.kind == kind), None)


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 FLOP/s from the data sheet; None if it is unknown."""
    device = device_of(kind)
    return None if device is None or device.peak_tflops is None else 1e12 * device.peak_tflops
