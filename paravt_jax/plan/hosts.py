"""Each host's part of a run: of a step, of a checkpoint, and the bytes it receives from other hosts."""

from dataclasses import dataclass

from paravt_jax.config import HostsConfig
from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.workload import Workload

MASTER_BYTES, TRAINED_BYTES = 4, 12  # of a parameter in a checkpoint; of a trained one, with its moments
EPISODE_BYTES = 1000  # of the numbers that other hosts get of an episode, at most


@dataclass(frozen=True)
class HostPart:
    """The most that a host has; of a step all that it does for rollouts."""

    num_hosts: int
    rows: int  # of a batch
    visits: int
    frames: int  # decoded: overviews once for a group, and the windows of calls
    checkpoint_bytes: int
    received_bytes: int  # the numbers of all other hosts' episodes


def num_hosts(hosts: HostsConfig, num_devices: int, device: DeviceSpec) -> int:
    """From the config, or the usual number of devices per host."""
    return hosts.num if hosts.num > 1 else device.num_hosts(num_devices)


def host_part(work: Workload, hosts: int, *, num_masters: int, num_trainable: int) -> HostPart:
    visits = -(-work.num_groups // hosts)
    checkpoint_bytes = MASTER_BYTES * (num_masters - num_trainable) + TRAINED_BYTES * num_trainable
    return HostPart(
        num_hosts=hosts,
        rows=work.batch_rows // hosts,
        visits=visits,
        frames=round(visits * (work.frames + work.group_size * work.calls * work.call_frames)),
        checkpoint_bytes=checkpoint_bytes // hosts,
        received_bytes=(work.num_groups - work.num_groups // hosts) * work.group_size * EPISODE_BYTES,
    )
