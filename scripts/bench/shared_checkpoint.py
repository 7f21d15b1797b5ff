"""Saves and restores a learner's state as one of several processes, and measures its peak memory and time.

    python -m scripts.bench.shared_checkpoint FOLDER MIB NUM_DEVICES COORDINATOR NUM INDEX     started by bench hosts

A CPU device's arrays are in the process's memory. So the peak, minus the memory before the learner was built, is the
process's share of the state plus the buffers of saving or restoring.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from model_port.layout import CHECKPOINTS_DIR, HF_DIR
from model_port.sharding import make_mesh
from model_port.terminal import say
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import CheckpointConfig, HostsConfig
from paravt_jax.plan.run import PlannedRl
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.hosts import Hosts, joined
from paravt_jax.run.policy import first_collective
from scripts.bench.checkpoint import sized_model
from scripts.bench.convert import peak_rss_bytes

MIB, BYTES_PER_WEIGHT = 2**20, 4  # master weights; Adam's two moments are twice as much
PEAK_RESET = Path("/proc/self/clear_refs"), "5"  # resets the peak to the current memory


def main() -> None:
    folder, mib, num_devices, coordinator, num, index = sys.argv[1:]
    with joined(HostsConfig(coordinator, int(num), int(index))) as hosts:
        print(json.dumps(saved_and_restored(Path(folder), int(mib), int(num_devices), hosts)), flush=True)


def saved_and_restored(folder: Path, mib: int, num_devices: int, hosts: Hosts) -> dict[str, float]:
    mesh = make_mesh(fsdp=num_devices)
    first_collective(hosts, mesh)
    before_mib, _ = peak_mib(lambda: None)
    model = sized_model(mib * MIB / BYTES_PER_WEIGHT)
    config = config_of((1, num_devices, 1), rows=1, row_tokens=256)
    learner = make_learner(PlannedRl.of(config, model).update, model, mesh)
    leaves = jax.tree.leaves(jax.block_until_ready(learner.state))
    share_bytes = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    checkpoints = Checkpoints(folder / CHECKPOINTS_DIR, folder / HF_DIR, CheckpointConfig(), say, hosts=hosts)

    def save() -> None:
        checkpoints.save(learner, {})
        checkpoints.wait()

    def restore() -> None:
        checkpoints.restore(learner)
        jax.block_until_ready(learner.state)

    del leaves  # a restore frees the state array by array
    saving_mib, save_s = peak_mib(save)
    restoring_mib, restore_s = peak_mib(restore)
    checkpoints.close()
    return {
        "share_mib": share_bytes / MIB,
        "saving_mib": saving_mib - before_mib,
        "restoring_mib": restoring_mib - before_mib,
        "save_s": save_s,
        "restore_s": restore_s,
    }


def peak_mib(work: Callable[[], object]) -> tuple[float, float]:
    """Returns this process's peak memory during `work`, and seconds."""
    file, reset = PEAK_RESET
    file.write_text(reset)
    start_s = time.monotonic()
    work()
    return peak_rss_bytes(os.getpid()) / MIB, time.monotonic() - start_s


if __name__ == "__main__":
    main()
