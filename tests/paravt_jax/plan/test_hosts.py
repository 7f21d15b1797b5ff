"""How many hosts a plan counts, what each has, and the meshes that they do not split."""

from dataclasses import replace

import jax
import pytest

from model_port.config import preset
from model_port.sharding import make_mesh
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import HostsConfig, MeshConfig, SftConfig, load_config
from paravt_jax.plan.aot import _AbstractLearner
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.plan import make_plan
from paravt_jax.plan.tables import imitation_plan_of, plan_of

H100, V5P = DEVICES["h100"], DEVICES["v5p"]
TWO = ("model.path=8b", "model.dtype=bfloat16", "mesh.data=2", "mesh.fsdp=8", "mesh.tensor=1", "pack.num_rows=16")


@pytest.mark.parametrize(
    ("device", "num_devices", "num_hosts"),
    [("h100", 8, 1), ("h100", 24, 3), ("v5p", 4, 1), ("v6e", 16, 4), ("cpu", 64, 1)],
)
def test_hosts_are_counted_by_the_devices_that_one_has(device, num_devices, num_hosts):
    assert DEVICES[device].num_hosts(num_devices) == num_hosts


def test_a_plan_says_how_many_hosts_there_are_and_what_each_has():
    config = load_config("configs/paragrpo_8b.yaml", *TWO)
    told = plan_of(config)
    assert told.startswith("16 x h100 of 79.1 GiB on 2 hosts, mesh data 2 x fsdp 8 x tensor 1\n")
    host = make_plan(config, preset("8b"), device=H100).host
    assert (host.rows, host.visits) == (8, 4)  # of 16 and of 7
    assert f"frames decoded for them  {host.frames:,}".split() == next(
        line.split() for line in told.splitlines() if "frames decoded" in line
    )
    alone = plan_of(load_config("configs/paragrpo_8b.yaml", *TWO, "mesh.data=1", "pack.num_rows=8"))
    assert alone.startswith("8 x h100 of 79.1 GiB, mesh") and "each of" not in alone


def test_hosts_that_the_config_names_count_instead():
    config = load_config("configs/paragrpo_8b.yaml", *TWO)
    named = replace(config, hosts=HostsConfig("a:1", 4, 0))
    assert make_plan(named, preset("8b"), device=H100).host.num_hosts == 4


def test_a_plan_of_imitation_counts_hosts_too():
    config = load_config("configs/sft_8b.yaml", "mesh.data=4", "pack.num_rows=32", schema=SftConfig)
    assert " on 4 hosts, mesh data 4" in imitation_plan_of(config)


def test_a_mesh_that_its_hosts_do_not_split_is_refused():
    config = load_config("configs/paragrpo_8b.yaml", *TWO, "mesh.data=1", "mesh.fsdp=2", "mesh.tensor=8")
    make_plan(config, preset("8b"), device=H100)
    with pytest.raises(ValueError, match=r"mesh data=1 x fsdp=2 does not split over 4 hosts: .* tensor=8 stays within"):
        make_plan(config, preset("8b"), device=V5P)


def test_the_bytes_of_a_checkpoint_are_those_of_the_state():
    config, model = config_of((2, 2, 1), rows=1, row_tokens=128), tiny_config()
    learner = _AbstractLearner(config, model, make_mesh(2, 2, 1))
    arrays = jax.tree.leaves((learner.masters, learner.frozen, learner.opt_state))
    named = replace(config, hosts=HostsConfig("a:1", 2, 0))
    held = make_plan(named, model, device=DEVICES["cpu"]).host.checkpoint_bytes
    assert held == pytest.approx(sum(leaf.size * 4 for leaf in arrays) / 2, rel=0.01)


def test_received_bytes_grow_with_the_episodes_of_others_and_a_single_host_receives_none():
    config = load_config("configs/paragrpo_8b.yaml", *TWO)
    received = [
        make_plan(
            replace(config, hosts=HostsConfig("a:1" * (num > 1), num, 0), mesh=MeshConfig(num, 8 // num, 1)),
            preset("8b"),
            device=H100,
        ).host.received_bytes
        for num in (1, 2, 4)
    ]
    assert 0 == received[0] < received[1] < received[2]
