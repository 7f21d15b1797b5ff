"""Programs on more CPU devices than cores end, however many of them are in flight."""

import os
import subprocess
import sys

import pytest

from paravt_jax.run.process import claim_threads

MANY_IN_FLIGHT = """
import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from paravt_jax.run.process import claim_resources

claim_resources()

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
parts = {"mesh": mesh, "in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
add = jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x @ x, "data"), **parts))
x = jnp.zeros((8 * 64, 64))
for _ in range(400):
    x = add(x)
jax.block_until_ready(x)
print(os.environ["PJRT_NPROC"])
"""


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        ("--xla_force_host_platform_device_count=1000", "4000"),
        ("--xla_force_host_platform_device_count=2 --xla_force_host_platform_device_count=1000", "4000"),
        ("--xla_force_host_platform_device_count=1", None),
        ("", None),
    ],
)
def test_virtual_devices_have_more_threads(flags, threads):
    environment = {"XLA_FLAGS": flags}
    claim_threads(environment)
    assert environment.get("PJRT_NPROC") == threads


def test_the_users_number_of_threads_is_kept():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "17"}
    claim_threads(environment)
    assert environment["PJRT_NPROC"] == "17"


@pytest.mark.slow
def test_many_programs_in_flight_on_one_core_end():
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    command = [sys.executable, "-c", MANY_IN_FLIGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (0, "32\n"), done.stderr
