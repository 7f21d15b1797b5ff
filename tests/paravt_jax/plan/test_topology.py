"""Accelerators by name: valid topologies, rejected ones, and missing compilers."""

import re

import pytest

from paravt_jax.plan import topology as topologies
from paravt_jax.plan.devices import DEVICES, SLICES
from paravt_jax.plan.topology import GPU_CHIPS, KNOWN, topology


@pytest.mark.parametrize(
    ("name", "platform", "num_devices", "num_hosts"),
    [("h100:8", "gpu", 8, 1), ("h200:4", "gpu", 4, 1), ("b200:24", "gpu", 24, 3), ("a100-40:16", "gpu", 16, 2)],
)
def test_a_gpu_topology_has_a_kind_and_a_number(name, platform, num_devices, num_hosts):
    machine = topology(name)
    assert machine.device is DEVICES[name.partition(":")[0]] and machine.device.platform == platform
    assert (machine.num_devices, machine.num_hosts) == (num_devices, num_hosts)


def test_a_tpu_slice_has_the_product_of_its_sides():
    counts = {name: topology(name).num_devices for name in ("v5p:2x2x2", "v6e:4x4", "v5e:2x4", "v5p:4x4x8")}
    assert counts == {"v5p:2x2x2": 8, "v6e:4x4": 16, "v5e:2x4": 8, "v5p:4x4x8": 128}


def test_a_slice_has_as_many_chips_as_its_name_says():
    assert topology("v5p-8") == topology("v5p:2x2x1")
    for name in SLICES:
        kind, _, number = name.partition("-")
        assert topology(name).num_devices == int(number) // (2 if kind == "v5p" else 1)


@pytest.mark.parametrize("name", ["h100", "h100:0", "h100:2x2", "v5p:8", "v5p:2", "v4:2x2x1", "cpu:2", "tpu", ""])
def test_an_unknown_topology_is_rejected_with_examples(name):
    with pytest.raises(ValueError, match=r"is unknown; choose from h100:8, .* v5p-8 or v5p:2x2x1, "):
        topology(name)


def test_every_topology_that_the_error_names_is_known():
    names = re.findall(r"\b[a-z]+\d+[a-z]?(?:-40)?[:-][\dx]+\b", KNOWN)
    assert len(names) == 12 and all(topology(name) for name in names)


def test_more_than_eight_gpus_must_be_a_multiple_of_eight():
    with pytest.raises(ValueError, match="--topology h100:12: a number of GPUs above 8 must be a multiple of it"):
        topology("h100:12")


@pytest.mark.parametrize("name", ["v6e:4x3", "v6e:1x8", "v5p:3x3x3"])
def test_a_slice_over_hosts_must_consist_of_2x2_chips(name):
    with pytest.raises(ValueError, match=f"--topology {name}: a slice over several hosts consists of 2x2 chips"):
        topology(name)


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "aot-gpu"), ("v5p:2x2x2", "aot-tpu")])
def test_a_missing_compiler_is_reported_with_its_package(monkeypatch, name, extra):
    monkeypatch.setattr(topologies, "PACKAGES", {"gpu": ("no_such.plugin", "aot-gpu"), "tpu": ("no_such", "aot-tpu")})
    with pytest.raises(ValueError, match=rf"not installed; .* pip install 'paravt_jax\[{extra}\]' \(in a clone -e "):
        topology(name).devices()


def test_every_gpu_of_the_plan_has_a_description_for_xla():
    assert set(GPU_CHIPS) == {name for name, device in DEVICES.items() if device.platform == "gpu"}
    text = GPU_CHIPS["h200"].as_text(DEVICES["h200"])
    assert "memory_bandwidth: 4800000000000 " in text and f"device_memory_size: {139 * 2**30} " in text
    assert text.count("{") == text.count("}") == 3
