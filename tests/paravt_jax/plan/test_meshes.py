"""Estimates from compiled programs, without a compiler: memory, and work scaled to the batches of a typical step."""

from dataclasses import replace

import pytest

from model_port.config import preset
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.learner.settings import LossConfig
from paravt_jax.plan import meshes
from paravt_jax.plan.aot import NoRoom, Program
from paravt_jax.plan.collectives import Collective
from paravt_jax.plan.devices import DEVICES, GIB
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.meshes import UNCOMPILED, UNPRINTED, UNTIMED, MeshEstimate, compiled_bytes, estimate
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.roofline import batch_works
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.workload import Step

H100 = DEVICES["h100"]
CONFIG = config_of((1, 8, 1), rows=1, row_tokens=8192, dtype="bfloat16", loss=LossConfig(kl_coef=0.1))
RUN = PlannedRl.of(CONFIG, preset("2b"))
LARGEST = RUN.largest_batch()
STEP = Step(replace(LARGEST, row_tokens=2048, row_actions=64), num_batches=3, num_updates=2, num_tokens=40_000)
OF_LARGEST, OF_STEP = (batch_works(RUN.update, RUN.model, shape, "gpu") for shape in (LARGEST, STEP.shape))
GATHERED = 10**9  # bytes of each program's only collective


def program(name: str, flops: float = 0.0, gib: int = 5, collectives: tuple | None = (GATHERED,)) -> Program:
    sent = None if collectives is None else [Collective("all-gather", num_bytes, 8) for num_bytes in collectives]
    return Program(name, gib * GIB, 0, 0, 0, flops, sent)


@pytest.fixture
def compiled(monkeypatch):
    """Returns the estimate of a step whose programs have these attributes and twice the planned FLOPs."""

    def estimated(**attributes) -> MeshEstimate:
        halves = [program(name, 8 * work.flops, **attributes) for name, work in OF_LARGEST.items() for _ in range(2)]
        monkeypatch.setattr(meshes, "compiled_update", lambda *_: halves)
        return estimate(RUN, STEP, H100, devices=())

    monkeypatch.setattr(meshes, "make_mesh", lambda *_: None)
    return estimated


def test_compiled_work_is_scaled_from_the_largest_batch_to_those_of_a_step(compiled):
    both, rates = compiled(), H100.rates("bfloat16")
    flops = 3 * 2 * sum(work.flops for work in OF_STEP.values())  # of a device, in three batches
    assert both.compiled_flops == pytest.approx(8 * flops) and both.model_flops < both.compiled_flops / 2
    assert both.seconds.products == pytest.approx(flops / rates.flops)
    ratios = {name: OF_STEP[name].sent_bytes / (OF_LARGEST[name].sent_bytes or 1) for name in OF_STEP}
    ratios["apply_gradients"] = 1.0  # its work does not depend on the batch
    sent = 2 * GATHERED * sum((2 if name == "apply_gradients" else 3) * ratio for name, ratio in ratios.items())
    assert both.collective_bytes == {"all-gather": pytest.approx(sent)} and not both.unknown
    moved = sum((2 if name == "apply_gradients" else 3) * work.memory_bytes for name, work in OF_STEP.items())
    assert both.seconds.memory == pytest.approx(moved / rates.memory_bytes)
    assert both.tokens_per_s == 40_000 / both.seconds.total and both.compile_s is not None


def test_a_program_that_cannot_be_printed_has_the_planned_collectives(compiled):
    without = compiled(collectives=None)
    assert without.collective_bytes is None and without.unknown == UNPRINTED
    assert without.seconds.collectives == estimate(RUN, STEP, H100, devices=None).seconds.collectives > 0


def test_the_largest_program_decides_whether_a_mesh_fits(compiled, monkeypatch):
    small, large = compiled(gib=5), compiled(gib=72)
    assert (small.fits, small.hbm_gib, small.problem) == (True, 5.0, None)
    assert (large.fits, large.hbm_gib, large.problem) == (False, 72.0, "72.0 GiB of 71.2 usable")

    memory = planned_memory(RUN, H100)
    for num_bytes, reason, hbm_bytes in (
        (memory.peak_bytes, "usable", memory.peak_bytes),
        (sum(memory.resident.values()), "are always resident", sum(memory.resident.values())),
    ):
        device = replace(H100, memory_gib=0.999 * num_bytes / H100.usable_bytes * H100.memory_gib)
        rejected = estimate(RUN, STEP, device, devices=None)
        assert not rejected.fits and reason in rejected.problem and rejected.hbm_gib == hbm_bytes / GIB
        assert (rejected.seconds is None) == (reason != "usable")

    def no_room(*_):
        raise NoRoom("needs 99 GiB")

    monkeypatch.setattr(meshes, "compiled_update", no_room)
    assert estimate(RUN, STEP, H100, devices=()) == MeshEstimate((1, 8, 1), problem="needs 99 GiB")


@pytest.mark.parametrize(("program_gib", "peak_gib"), [(12, 20), (30, 33)])
def test_an_engine_on_the_same_device_is_beside_the_programs_or_alone(program_gib, peak_gib):
    sizes = {"cache": 3 * GIB}
    phases = {"rollout": {"prefill": 5 * GIB}, "publish": {"copy": 7 * GIB}, "backward": {"any": 99 * GIB}}
    memory = Memory({"masters": 10 * GIB} | sizes, phases, sizes)
    assert compiled_bytes([program("gradients", gib=program_gib)], memory) == peak_gib * GIB
    swapped = {"rollout": phases["publish"], "publish": phases["rollout"]}
    assert compiled_bytes([program("gradients", gib=1)], replace(memory, phases=swapped)) == 20 * GIB


def test_given_rates_replace_the_devices_and_without_rates_no_seconds_are_known():
    given = replace(H100.rates("bfloat16"), flops=H100.rates("bfloat16").flops / 2)
    usual, slow = (estimate(RUN, STEP, H100, None, rates).seconds for rates in (None, given))
    assert slow == usual._replace(products=2 * usual.products)
    assert estimate(RUN, STEP, DEVICES["cpu"], None).unknown.keys() == {*UNCOMPILED, *UNTIMED}
