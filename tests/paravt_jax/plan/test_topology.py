"""Accelerators by name: what is known, what is refused, and what is missing here."""

import pytest

from paravt_jax.plan import topology as topologies
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.topology import GPU_CHIPS, topology


@pytest.mark.parametrize(
    ("name", "platform", "num_devices", "num_hosts"),
    [("h100:8", "gpu", 8, 1), ("h200:4", "gpu", 4, 1), ("b200:24", "gpu", 24, 3), ("a100-40:16", "gpu", 16, 2)],
)
def test_a_name_says_how_many_gpus_of_what_kind(name, platform, num_devices, num_hosts):
    found = topology(name)
    assert found.device is DEVICES[name.partition(":")[0]] and found.device.platform == platform
    assert (found.num_devices, found.num_hosts) == (num_devices, num_hosts)


def test_a_slice_of_tpus_has_as_many_as_its_sides_multiply_to():
    counts = {name: topology(name).num_devices for name in ("v5p:2x2x2", "v6e:4x4", "v5e:2x4", "v5p:4x4x8")}
    assert counts == {"v5p:2x2x2": 8, "v6e:4x4": 16, "v5e:2x4": 8, "v5p:4x4x8": 128}


@pytest.mark.parametrize("name", ["h100", "h100:0", "h100:2x2", "v5p:8", "v5p:2", "v4:2x2x1", "cpu:2", "tpu", ""])
def test_what_is_no_topology_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=r"is unknown; choose from h100:8, .* v5e:4x4, v5p:2x2x2, v6e:4x4"):
        topology(name)


def test_more_gpus_than_a_box_has_come_in_whole_boxes():
    with pytest.raises(ValueError, match="--topology h100:12: more than 8 GPUs come in boxes of so many"):
        topology("h100:12")


@pytest.mark.parametrize("name", ["v6e:4x3", "v6e:1x8", "v5p:3x3x3"])
def test_a_slice_that_hosts_do_not_make_is_refused(name):
    with pytest.raises(ValueError, match=f"--topology {name}: a slice of several hosts is made of the 2x2 chips of"):
        topology(name)


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "aot-gpu"), ("v5p:2x2x2", "aot-tpu")])
def test_a_missing_compiler_is_named_with_what_to_install(monkeypatch, name, extra):
    monkeypatch.setattr(topologies, "PACKAGES", {"gpu": ("no_such.plugin", "aot-gpu"), "tpu": ("no_such", "aot-tpu")})
    with pytest.raises(ValueError, match=rf"not installed; .* in a clone, pip install -e '\.\[{extra}\]'$"):
        topology(name).devices()


def test_every_gpu_of_the_plan_has_its_chip_and_its_memory_in_what_xla_is_told():
    assert set(GPU_CHIPS) == {name for name, device in DEVICES.items() if device.platform == "gpu"}
    text = GPU_CHIPS["h200"].as_text(DEVICES["h200"])
    assert "memory_bandwidth: 4800000000000 " in text and f"device_memory_size: {139 * 2**30} " in text
    assert text.count("{") == text.count("}") == 3
