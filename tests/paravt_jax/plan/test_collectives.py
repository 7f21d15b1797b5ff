"""Collectives in a program's HLO text, and their time."""

import math

import pytest

from paravt_jax.plan.collectives import Collective, bytes_by_kind, collectives_of
from paravt_jax.plan.devices import DEVICES, Rates

TEXT = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %gather = (bf16[8,4]{1,0}, bf16[32,4]{1,0}) all-gather-start(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}
  %done = bf16[32,4]{1,0} all-gather-done(%gather)
  %scatter = ((f32[16]{0}, f32[8]{0}), (f32[4]{0}, f32[2]{0})) reduce-scatter-start(%p, %q), replica_groups=[2,4]<=[8]
  ROOT %out = (s32[], bf16[8,4]) tuple(%i, %p)
}

%condition (state: (s32[], bf16[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %loop = (s32[], bf16[8,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"36"}}
  %one = f32[2]{0} conditional(%c, %a, %b), branch_computations={%branch, %add}
  %plain = f32[6]{0} reduce-scatter(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %pair = (f32[3]{0}, bf16[5]{0}, pred[7]{0}, u8[9]{0}) all-reduce-start(%p, %q), replica_groups={{0,1}}, to_apply=%add
}

%branch (p: f32[2]) -> f32[2] {
  ROOT %whole = f32[2]{0} all-reduce(%p), replica_groups={{0,8},{1,9}}, to_apply=%add
}
"""

PERMUTE = """\
ENTRY %main (p: f32[450]) -> f32[450] {
  %swap = f32[450]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
"""


def test_collectives_count_per_trip_and_with_the_larger_of_input_and_output():
    gather, scatter, whole, plain, pair = collectives_of(TEXT)
    assert gather == Collective("all-gather", 36 * 32 * 4 * 2, 4, 1)
    assert scatter == Collective("reduce-scatter", 36 * (16 + 8) * 4, 4, 1)
    assert whole == Collective("all-reduce", 2 * 4, 2, 2)  # devices 0 and 8 are on two hosts
    assert plain == Collective("reduce-scatter", 2 * 6 * 4, 2, 1)  # the output is one of two parts
    assert pair == Collective("all-reduce", 3 * 4 + 5 * 2 + 7 + 9, 2, 1)


def test_without_an_annotation_the_trip_count_is_the_constant_in_the_condition():
    unannotated = TEXT.replace(', backend_config={"known_trip_count":{"n":"36"}}', "")
    assert collectives_of(unannotated)[0].num_bytes == 32 * 4 * 2  # unknown: once
    limit = "  %limit = s32[]{:T(128)} constant(28)\n"
    limited = unannotated.replace("  ROOT %less", limit + "  ROOT %less")
    assert collectives_of(limited)[0].num_bytes == 28 * 32 * 4 * 2
    assert collectives_of(limited.replace(limit, 2 * limit))[0].num_bytes == 32 * 4 * 2  # either may be the limit


@pytest.mark.parametrize(
    "call",
    [
        "conditional(%c, %a, %b), branch_computations={%add, %branch}",
        "conditional(%c, %a, %b), true_computation=%branch, false_computation=%add",
        "call(%p), to_apply=%branch",
        "fusion(%p), kind=kCustom, calls=%branch",
        "async-start(%p), calls=%branch",
    ],
)
def test_computations_that_a_loop_calls_count_per_trip_of_all_loops_around_them(call):
    loops = (
        "%outer (p: f32[2]) -> f32[2] {\n  %loop = f32[2]{0} while(%t), condition=%condition, body=%inner, "
        'backend_config={"known_trip_count":{"n":"3"}}\n}\n'
        f"%inner (p: f32[2]) -> f32[2] {{\n  %one = f32[2]{{0}} {call}\n}}\n"
    )
    first, *_ = collectives_of(TEXT.replace("body=%body", "body=%outer") + loops)
    assert first == Collective("all-reduce", 36 * 3 * 2 * 4, 2, 2)


@pytest.mark.parametrize(
    ("groups", "num_devices", "num_hosts"),
    [
        ("mesh['a'=4,'b'=4] {'b'}", 4, 1),
        ("mesh['a'=4,'b'=4], device_ids=([4,4]T(1,0)) {'b'}", 4, 2),  # 0, 4, 8, 12
        ("mesh['a'=4,'b'=4], device_ids=([16]) {'a','b'}", 16, 2),
        ("[4,4]<=[16]", 4, 1),
        ("[4,4]<=[4,4]T(1,0)", 4, 2),
        ("{{0,8},{1,9}}", 2, 2),
        ("{}", 1, 1),  # every device is alone
    ],
)
def test_device_groups_are_read_in_every_format(groups, num_devices, num_hosts):
    text = TEXT.replace("{{0,1}}", groups)
    *_, pair = collectives_of(text)
    assert (pair.num_devices, pair.num_hosts) == (num_devices, num_hosts)
    assert collectives_of(text, host_devices=16)[-1].num_hosts == 1


def test_an_unknown_format_of_device_groups_is_rejected():
    with pytest.raises(ValueError, match=r"unknown format of device groups .* 'replica_groups=sets\[4\]'"):
        collectives_of(TEXT.replace("{{0,1}}", "sets[4]"))


def test_bytes_are_summed_by_kind():
    assert bytes_by_kind(collectives_of(TEXT)) == {"all-gather": 9216, "all-reduce": 46, "reduce-scatter": 3504}


def test_seconds_of_a_ring():
    h100 = Rates(1.0, 1.0, link_bytes=450e9, network_bytes=50e9)
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert Collective(kind, 450 * 10**9, 8).seconds(h100) == pytest.approx(7 / 8)
    assert Collective("all-reduce", 450 * 10**9, 8).seconds(h100) == pytest.approx(2 * 7 / 8)
    assert Collective("all-gather", 450 * 10**9, 1).seconds(h100) == 0


def test_a_permute_sends_whole_arrays():
    """HLO names pairs of devices, and the bytes are a device's."""
    h100 = Rates(1.0, 1.0, link_bytes=450e9, network_bytes=50e9)
    (permute,) = collectives_of(PERMUTE)
    assert permute == Collective("collective-permute", 4 * 450, 2)
    assert permute.seconds(h100) == pytest.approx(4e-9)


@pytest.mark.parametrize(
    ("name", "num_devices", "links"),
    [
        ("v5p", 4, 2),  # 2x2x1: a neighbor in two of three dimensions, no wraparound
        ("v5p", 8, 3),  # 2x2x2
        ("v5p", 16, 3),  # 4x2x2
        ("v5p", 64, 6),  # 4x4x4 is a torus
        ("v6e", 4, 2),  # 2x2
        ("v6e", 16, 2),  # a corner of 4x4
        ("v6e", 256, 4),  # 16x16 is a torus
        ("v5e", 16, 2),
    ],
)
def test_a_chip_uses_the_links_that_its_slice_has(name, num_devices, links):
    gb_per_s = {"v5p": 100, "v6e": 100, "v5e": 50}[name]  # of a link in one direction
    rates = DEVICES[name].rates("bfloat16")
    assert rates.link_bytes_among(num_devices) == pytest.approx(0.75 * 1e9 * gb_per_s * links)


def test_a_collective_on_one_axis_of_a_slice_uses_the_links_of_that_axis():
    """All four chips of a v5p 2x2x1 have two links of 75 GB/s; two of them share one."""
    rates = DEVICES["v5p"].rates("bfloat16")
    assert Collective("all-gather", 300 * 10**9, 4).seconds(rates) == pytest.approx(3 / 4 * 300 / 150)
    assert Collective("all-gather", 300 * 10**9, 2).seconds(rates) == pytest.approx(1 / 2 * 300 / 75)


def test_traffic_between_hosts_is_shared_by_their_network_cards():
    h100 = Rates(1.0, 1.0, link_bytes=450e9, network_bytes=50e9)
    whole_hosts = Collective("all-gather", 400 * 10**9, 16, 2).seconds(h100)  # half comes by eight cards of 50 GB/s
    one_of_each = Collective("all-gather", 400 * 10**9, 2, 2).seconds(h100)  # half by one
    assert (whole_hosts, one_of_each) == (pytest.approx(15 / 16 * 400 / 450), pytest.approx(4.0))
    assert math.isinf(DEVICES["v5p"].network_gb_per_s)  # every chip of a slice has links
