"""Accelerators by the figures of their data sheets.

NVIDIA's of H100, H200, A100 and DGX B200: dense bfloat16, one of NVLink's two directions, and the network card that a
box of eight has for each GPU. Google Cloud's pages on the system architecture of TPU v5e, v5p and v6e: one of the two
directions of a chip's links, which reach every chip of its slice. Memory is what the runtime leaves of it.
"""

import math
from dataclasses import dataclass

GIB = 2**30
DEVICES_OF_A_HOST = 8  # GPUs
RESERVE_FRAC = 0.1  # of a device's memory, for what no plan sees: layouts, collectives, fragments, the runtime


@dataclass(frozen=True)
class DeviceSpec:
    name: str
    memory_gib: float | None  # as its runtime reports it; None: not judged
    peak_tflops: float | None  # dense, in bfloat16
    memory_tb_per_s: float | None
    link_gb_per_s: float | None  # one way, to the devices of its host or slice
    network_gb_per_s: float = math.inf  # one way, to other hosts; TPUs of a slice have links to them
    platform: str = "gpu"

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_gib is None else self.memory_gib * GIB * (1 - RESERVE_FRAC)


DEVICES = {
    device.name: device
    for device in (
        DeviceSpec("h100", 79.1, 989.0, 3.35, 450.0, 50.0),
        DeviceSpec("h200", 139.0, 989.0, 4.8, 450.0, 50.0),
        DeviceSpec("b200", 178.3, 2250.0, 8.0, 900.0, 50.0),
        DeviceSpec("a100", 79.1, 312.0, 2.04, 300.0, 25.0),
        DeviceSpec("a100-40", 39.4, 312.0, 1.56, 300.0, 25.0),
        DeviceSpec("v5p", 95.0, 459.0, 2.77, 600.0, platform="tpu"),
        DeviceSpec("v6e", 31.2, 918.0, 1.64, 400.0, platform="tpu"),
        DeviceSpec("v5e", 15.7, 197.0, 0.82, 200.0, platform="tpu"),
        DeviceSpec("cpu", None, None, None, None, platform="cpu"),
    )
}
