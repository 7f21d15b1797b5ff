"""The hosts of a plan: their number, the work of each, and meshes that they cannot split."""

import re
from dataclasses import replace

import jax
import pytest

from model_port.config import preset
from model_port.sharding import make_mesh
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import HostsConfig, MeshConfig, SftConfig, load_config
from paravt_jax.plan.aot import abstract_learner
from paravt_jax.plan.devices import DEVICES, GIB
from paravt_jax.plan.plan import make_plan
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.tables import plan_of

H100, V5P = DEVICES["h100"], DEVICES["v5p"]
TWO_HOSTS = ("model.path=8b", "model.dtype=bfloat16", "mesh.data=2", "mesh.fsdp=8", "mesh.tensor=1", "pack.num_rows=16")
EIGHT_B = preset("8b")


@pytest.mark.parametrize(
    ("device", "num_devices", "num_hosts"),
    [("h100", 8, 1), ("h100", 24, 3), ("v5p", 4, 1), ("v6e", 16, 4), ("cpu", 64, 1)],
)
def test_the_number_of_hosts_follows_from_the_number_of_devices(device, num_devices, num_hosts):
    assert DEVICES[device].num_hosts(num_devices) == num_hosts


@pytest.mark.slow
def test_a_plan_has_the_number_of_hosts_and_the_work_of_each():
    text = plan_of(load_config("configs/paragrpo_8b.yaml", *TWO_HOSTS))
    assert text.startswith("16 x h100 of 79.1 GiB on 2 hosts, mesh data 2 x fsdp 8 x tensor 1\n")
    work = r"rows per batch +8\n  prompts per step, at most +4\n  frames decoded per step +611\n"  # 4 · (24.8 + 8 · 16)
    assert re.search(rf"per host, of 2\n  {work}", text)  # of 16 rows and of 7 prompts
    alone = plan_of(load_config("configs/paragrpo_8b.yaml", *TWO_HOSTS, "mesh.data=1", "pack.num_rows=8"))
    assert alone.startswith("8 x h100 of 79.1 GiB, mesh") and "per host" not in alone


@pytest.mark.slow
def test_the_gpus_of_servers_are_no_devices_of_the_learner():
    """Eight devices beside four servers are on two hosts of eight GPUs, as in `bench mesh --topology h100:16`."""
    config = load_config("configs/8b_8x80gb.yaml", "mesh.data=2", "pack.num_rows=8")
    run = PlannedRl.of(config, EIGHT_B)
    assert run.num_hosts(H100) == 2 and plan_of(config).startswith("8 x h100 of 79.1 GiB on 2 hosts, ")


def test_hosts_num_overrides_the_number_of_hosts():
    config = load_config("configs/paragrpo_8b.yaml", *TWO_HOSTS)
    named = replace(config, hosts=HostsConfig("a:1", 4, 0))
    assert PlannedRl.of(named, EIGHT_B).num_hosts(H100) == 4


def test_the_hosts_of_a_config_have_the_same_number_of_devices():
    config = replace(load_config("configs/paragrpo_8b.yaml"), hosts=HostsConfig("a:1", 3, 0))
    with pytest.raises(ValueError, match=r"8 devices do not split evenly over hosts\.num=3"):
        PlannedRl.of(config, EIGHT_B)


@pytest.mark.slow
def test_collectives_cross_the_hosts_of_the_config():
    """A GPU sends 7/8 at 450 GB/s to seven of its host; with two on each of four hosts, 3/8 at 50 GB/s to others."""
    config = load_config("configs/paragrpo_8b.yaml", "model.path=2b")
    hosts = HostsConfig(), HostsConfig("a:1", 4, 0)
    one, four = (make_plan(PlannedRl.of(replace(config, hosts=each), preset("2b")), H100).update for each in hosts)
    assert four.collectives / one.collectives == pytest.approx((3 / 8 / 50) / (7 / 8 / 450), rel=0.01)


def test_the_plan_of_a_cold_start_has_the_number_of_hosts():
    config = load_config("configs/sft_8b.yaml", "mesh.data=4", "pack.num_rows=32", schema=SftConfig)
    assert " on 4 hosts, mesh data 4" in plan_of(config)


@pytest.mark.slow
def test_a_mesh_that_hosts_cannot_split_is_rejected():
    config = load_config("configs/paragrpo_8b.yaml", *TWO_HOSTS, "mesh.data=1", "mesh.fsdp=2", "mesh.tensor=8")
    run = PlannedRl.of(config, EIGHT_B)
    make_plan(run, H100)
    with pytest.raises(ValueError, match=r"mesh data=1 x fsdp=2 does not split over 4 hosts: .* tensor=8 must stay"):
        make_plan(run, V5P)


@pytest.mark.slow
def test_the_planned_checkpoint_has_the_size_of_the_state():
    config, model = config_of((2, 2, 1), rows=1, row_tokens=128, hosts=HostsConfig("a:1", 2, 0)), tiny_config()
    run = PlannedRl.of(config, model)
    arrays = jax.tree.leaves(abstract_learner(run.update, model, make_mesh(2, 2, 1)).state)
    planned_bytes = make_plan(run, DEVICES["cpu"]).host_work["checkpoint size, GiB"] * GIB
    assert planned_bytes == pytest.approx(sum(leaf.size * 4 for leaf in arrays) / 2, rel=0.01)


@pytest.mark.slow
def test_received_bytes_grow_with_the_number_of_hosts_and_one_host_receives_none():
    config, received = load_config("configs/paragrpo_8b.yaml", *TWO_HOSTS), []
    for num in (1, 2, 4):
        hosts, mesh = HostsConfig("a:1" * (num > 1), num, 0), MeshConfig(num, 8 // num, 1)
        plan = make_plan(PlannedRl.of(replace(config, hosts=hosts, mesh=mesh), EIGHT_B), H100)
        received.append(plan.host_work["MB about episodes from other hosts per step"])
    assert 0 == received[0] < received[1] < received[2]
