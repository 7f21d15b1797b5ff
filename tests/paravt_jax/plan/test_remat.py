"""model.remat=auto: the least recomputation that fits, by layer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from model_port.config import preset
from model_port.layers import Compute
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import load_config
from paravt_jax.plan.devices import DEVICES, GIB
from paravt_jax.plan.memory import Memory
from paravt_jax.plan.plan import make_plan
from paravt_jax.plan.remat import MOST_FRAC, chosen_for, planned_memory, remat_line, with_remat
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.workload import batch_flops
from paravt_jax.run.process import RESERVE_FRAC

RUN = PlannedRl.of(config_of((1, 8, 1), rows=1, row_tokens=32768, dtype="bfloat16", remat="auto"), preset("8b"))
LAYERS = RUN.model.text.num_layers
H100 = DEVICES["h100"]


def recomputing(remat: str, lighter_layers: int = 0) -> PlannedRl:
    return RUN.with_update(policy=replace(RUN.update.policy, remat=remat), lighter_layers=lighter_layers)


def memory(remat: str, lighter_layers: int = 0) -> Memory:
    return planned_memory(recomputing(remat, lighter_layers), H100)


def device_for(run_memory: Memory, more_bytes: int = 0, most_frac: float = MOST_FRAC):
    """Returns a device whose memory fits exactly `run_memory` plus reserve and margin."""
    usable_gib = (run_memory.peak_bytes + more_bytes + 1000) / most_frac / GIB
    return replace(H100, memory_gib=usable_gib / (1 - RESERVE_FRAC))


def chosen_on(device) -> tuple[str, int]:
    update = with_remat(RUN, device).update
    return update.remat, update.lighter_layers


@pytest.mark.parametrize("remat", ["none", "dots", "attention", "full"])
def test_a_device_with_just_enough_memory_for_a_value_uses_it(remat):
    assert chosen_on(device_for(memory(remat))) == (remat, 0)


@pytest.mark.parametrize(("remat", "heavier"), [("none", "dots"), ("dots", "attention"), ("attention", "full")])
def test_a_value_that_leaves_less_than_the_margin_is_not_used(remat, heavier):
    assert chosen_on(device_for(memory(remat), most_frac=0.96))[0] == heavier


@pytest.mark.slow
def test_full_may_use_the_margin_too():
    assert make_plan(RUN, device_for(memory("full"), most_frac=1.0)).fit.fits
    assert not make_plan(RUN, device_for(memory("full"), -2000, most_frac=1.0)).fit.fits


@pytest.mark.parametrize(("remat", "layers"), [("full", 20), ("attention", 7), ("attention", 19)])
def test_memory_left_saves_more_in_as_many_layers_as_fit(remat, layers):
    assert chosen_on(device_for(memory(remat, layers))) == (remat, layers)
    assert chosen_on(device_for(memory(remat, layers), -2000)) == (remat, layers - 1)


def test_a_device_that_is_too_small_recomputes_everything():
    assert chosen_on(device_for(memory("full"), -GIB)) == ("full", 0)


def test_an_explicit_value_is_kept():
    run = recomputing("offload")
    assert with_remat(run, DEVICES["b200"]) is run
    assert remat_line(run, H100) == "remat: offload, by model.remat"


def test_less_recomputation_takes_fewer_flops_and_more_memory():
    ladder = [("full", 0), ("attention", 0), ("attention", 5), ("attention", 20), ("dots", 0), ("none", 0)]
    peaks = [memory(*value).peak_bytes for value in ladder]
    runs = [recomputing(*value) for value in ladder]
    flops = [batch_flops(run.update, run.model, run.largest_batch(), "gpu") for run in runs]
    again = [of_run["update, recomputation"] for of_run in flops]
    assert peaks == sorted(peaks) and again == sorted(again, reverse=True) and again[0] > again[3] > again[4]


def test_the_log_has_the_choice_and_the_memory_of_full():
    device = device_for(memory("attention", 7))
    sizes = device.usable_bytes, memory("attention", 7).peak_bytes, memory("full").peak_bytes
    usable, peak, full = (num_bytes / GIB for num_bytes in sizes)
    line = f"remat: dots in 7 of {LAYERS} layers, attention in the others, {peak:.1f} of {usable:.1f} GiB planned"
    assert remat_line(RUN, device) == f"{line}; full would need {full:.1f}"


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GeForce RTX 4090", "TPU v5"])
def test_a_device_of_unknown_memory_recomputes_everything(kind):
    compute, line = chosen_for(Compute("bfloat16"), RUN, [SimpleNamespace(device_kind=kind)])
    assert (compute.remat, compute.lighter_layers) == ("full", 0)
    assert line == "remat: full, because the plan does not predict this device's memory closely enough"


@pytest.mark.slow
def test_every_host_of_a_run_chooses_the_same():
    config = load_config("configs/32b_64.yaml", "hosts.coordinator=10.0.0.1:8476", "hosts.num=8")
    device = [SimpleNamespace(device_kind=H100.kind)]
    configs = [replace(config, hosts=replace(config.hosts, index=index)) for index in (0, 7)]
    runs = [PlannedRl.of(of_host, preset("32b")) for of_host in configs]
    choices = {chosen_for(Compute("bfloat16"), run, device) for run in runs}
    assert len(choices) == 1 and next(iter(choices))[0].remat != "full"
