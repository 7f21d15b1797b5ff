"""What a program's text says of its collectives, and how long they take."""

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

%branch (p: f32[2]) -> f32[2] {
  ROOT %whole = f32[2]{0} all-reduce(%p), replica_groups={{0,8},{1,9}}, to_apply=%add
}

ENTRY %main (p: bf16[8,4]) -> bf16[8,4] {
  %loop = (s32[], bf16[8,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"36"}}
  %one = f32[2]{0} conditional(%c, %a, %b), branch_computations={%branch, %add}
  %plain = f32[6]{0} reduce-scatter(%p), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %pair = (f32[3]{0}, bf16[5]{0}) all-reduce(%p, %q), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_a_loop_counts_as_often_as_it_turns_and_a_pair_as_its_larger_side():
    gather, scatter, whole, plain, pair = collectives_of(TEXT)
    assert gather == Collective("all-gather", 36 * 32 * 4 * 2, 4, 1)
    assert scatter == Collective("reduce-scatter", 36 * (16 + 8) * 4, 4, 1)
    assert whole == Collective("all-reduce", 2 * 4, 2, 2)  # devices 0 and 8 are in two boxes
    assert plain == Collective("reduce-scatter", 2 * 6 * 4, 2, 1)  # what comes out is one of two parts
    assert pair == Collective("all-reduce", 3 * 4 + 5 * 2, 2, 1)


def test_a_loop_whose_turns_are_not_said_goes_up_to_what_its_counter_is_compared_with():
    unsaid = TEXT.replace(', backend_config={"known_trip_count":{"n":"36"}}', "")
    assert collectives_of(unsaid)[0].num_bytes == 32 * 4 * 2  # by data
    limit = "  %limit = s32[]{:T(128)} constant(28)\n"
    limited = unsaid.replace("  ROOT %less", limit + "  ROOT %less")
    assert collectives_of(limited)[0].num_bytes == 28 * 32 * 4 * 2


@pytest.mark.parametrize(
    ("groups", "num_devices", "num_hosts"),
    [
        ("mesh['a'=4,'b'=4] {'b'}", 4, 1),
        ("mesh['a'=4,'b'=4], device_ids=([4,4]T(1,0)) {'b'}", 4, 2),  # 0, 4, 8, 12
        ("mesh['a'=4,'b'=4], device_ids=([16]) {'a','b'}", 16, 2),
        ("[4,4]<=[16]", 4, 1),
        ("[4,4]<=[4,4]T(1,0)", 4, 2),
        ("{{0,8},{1,9}}", 2, 2),
    ],
)
def test_who_takes_part_is_read_however_it_is_written(groups, num_devices, num_hosts):
    text = TEXT.replace("{{0,1}}", groups)
    *_, pair = collectives_of(text)
    assert (pair.num_devices, pair.num_hosts) == (num_devices, num_hosts)


def test_groups_that_are_not_understood_are_no_single_device():
    with pytest.raises(ValueError, match=r"replica_groups=sets\[4\]. of a compiled program is not understood"):
        collectives_of(TEXT.replace("{{0,1}}", "sets[4]"))


def test_bytes_are_summed_up_by_kind():
    assert bytes_by_kind(collectives_of(TEXT)) == {"all-gather": 9216, "all-reduce": 30, "reduce-scatter": 3504}


def test_seconds_are_those_of_a_ring():
    h100 = Rates(1.0, 1.0, link_bytes=450e9, network_bytes=50e9)
    assert Collective("all-gather", 450 * 10**9, 8).seconds(h100) == pytest.approx(7 / 8)
    assert Collective("all-reduce", 450 * 10**9, 8).seconds(h100) == pytest.approx(2 * 7 / 8)
    assert Collective("all-gather", 450 * 10**9, 1).seconds(h100) == 0


def test_what_crosses_boxes_shares_the_cards_of_those_that_take_part():
    h100 = Rates(1.0, 1.0, link_bytes=450e9, network_bytes=50e9)
    whole_boxes = Collective("all-gather", 400 * 10**9, 16, 2).seconds(h100)  # half comes by eight cards of 50 GB/s
    one_of_each = Collective("all-gather", 400 * 10**9, 2, 2).seconds(h100)  # half by one
    assert (whole_boxes, one_of_each) == (pytest.approx(15 / 16 * 400 / 450), pytest.approx(4.0))
    assert math.isinf(DEVICES["v5p"].network_gb_per_s)  # every chip of a slice has links
