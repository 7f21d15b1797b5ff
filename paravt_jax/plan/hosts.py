"""Computes each host's part of a step and of a checkpoint, and the bytes it receives from other hosts."""

from dataclasses import dataclass

from model_port.sharding import over_hosts
from paravt_jax.config import MeshConfig
from paravt_jax.plan.workload import Workload

MASTER_BYTES, TRAINED_BYTES = 4, 12  # checkpoint bytes per parameter: frozen, or trained with moments
EPISODE_BYTES = 1000  # upper bound per episode for the numbers that hosts exchange


@dataclass(frozen=True)
class HostPart:
    """The largest part of a host in a batch, a step's rollouts and a checkpoint."""

    rows: int  # per batch
    prompts: int  # per step
    frames: int  # decoded: an overview per group, and the windows of calls
    checkpoint_bytes: int
    received_bytes: int  # for the episodes of all other hosts


def mesh_of_host(mesh: MeshConfig, num_hosts: int) -> MeshConfig:
    """The learner's mesh within one host. Raises if the hosts do not divide the mesh."""
    over_data, over_fsdp = over_hosts(mesh.data, mesh.fsdp, mesh.tensor, num_hosts)
    return MeshConfig(mesh.data // over_data, mesh.fsdp // over_fsdp, mesh.tensor)


def host_part(work: Workload, hosts: int, *, num_masters: int, num_trainable: int) -> HostPart:
    prompts = -(-work.num_groups // hosts)
    checkpoint_bytes = MASTER_BYTES * (num_masters - num_trainable) + TRAINED_BYTES * num_trainable
    return HostPart(
        rows=work.batch_rows // hosts,
        prompts=prompts,
        frames=round(prompts * (work.frames + work.group_size * work.calls * work.call_frames)),
        checkpoint_bytes=checkpoint_bytes // hosts,
        received_bytes=(work.num_groups - work.num_groups // hosts) * work.group_size * EPISODE_BYTES,
    )
