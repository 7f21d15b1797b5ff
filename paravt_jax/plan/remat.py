"""Chooses the backward pass's recomputation for `model.remat=auto`: the least that fits the largest planned batch.

The choice depends on the settings and the device's data sheet, so all hosts make the same choice. All layers use one
value; if memory is left, the first layers use the next lighter value. `dots` has no lighter value: it repeats no
products. If nothing leaves the margin, the choice is `full`.
"""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from model_port.layers import LIGHTER, Compute, Remat
from paravt_jax.plan.devices import GIB, DeviceSpec, device_of
from paravt_jax.plan.memory import Memory, SamplerShape, memory_of
from paravt_jax.plan.run import PlannedRl, PlannedRun

MOST_FRAC = 0.95  # fraction of usable memory to plan with, because XLA for GPUs needs up to 4 % more than planned
LEAST_FIRST: tuple[Remat, ...] = ("none", "dots", "attention", "full")
AnyRun = TypeVar("AnyRun", bound=PlannedRun)


def planned_memory(run: PlannedRun, device: DeviceSpec) -> Memory:
    """Plans a run's memory. Raises if the mesh does not divide the model or the hosts do not divide the mesh."""
    return _memory(with_remat(run, device), device)


def with_remat(run: AnyRun, device: DeviceSpec) -> AnyRun:
    """The run with the chosen recomputation; unchanged without model.remat=auto."""
    if run.update.policy.remat != "auto":
        return run
    if not _is_predicted(device):
        return recomputing(run, "full")
    uniform = (recomputing(run, remat) for remat in LEAST_FIRST)
    run = next((each for each in uniform if _leaves_margin(each, device)), recomputing(run, "full"))
    if run.update.remat not in LIGHTER:
        return run

    def with_lighter(number: int) -> AnyRun:
        return run.with_update(lighter_layers=number)

    most = run.model.text.num_layers - 1
    return with_lighter(largest(lambda number: _leaves_margin(with_lighter(number), device), most))


def remat_line(run: PlannedRun, device: DeviceSpec | None) -> str:
    """Describes the choice for a run and its reason, for the log and the plan."""
    if run.update.policy.remat != "auto":
        return f"remat: {run.update.remat}, by model.remat"
    if device is None or not _is_predicted(device):
        return "remat: full, because the plan does not predict this device's memory closely enough"
    chosen, layers = with_remat(run, device), run.model.text.num_layers
    update, peak_gib = chosen.update, _memory(chosen, device).peak_bytes / GIB
    name: str = update.remat
    if update.lighter_layers:
        name = f"{LIGHTER[update.remat]} in {update.lighter_layers} of {layers} layers, {name} in the others"
    line = f"remat: {name}, {peak_gib:.1f} of {device.usable_bytes / GIB:.1f} GiB planned"
    full_gib = _memory(recomputing(run, "full"), device).peak_bytes / GIB
    return line if update.layers_by_remat(layers) == {"full": layers} else f"{line}; full would need {full_gib:.1f}"


def chosen_for(compute: Compute, run: PlannedRun, devices: Sequence[Any]) -> tuple[Compute, str]:
    """The compute settings of a run on these devices, and the log line about the choice."""
    device = device_of(devices[0].device_kind)
    chosen = (run if device is None else with_remat(run, device)).update
    return replace(compute, remat=chosen.remat, lighter_layers=chosen.lighter_layers), remat_line(run, device)


def largest(fits: Callable[[int], bool], most: int, low: int = 0) -> int:
    """The largest number up to `most` that fits, if all between it and `low` fit too; `low` if none fits."""
    return low + bisect(range(low + 1, most + 1), False, key=lambda number: not fits(number))


def recomputing(run: AnyRun, remat: Remat) -> AnyRun:
    """The run with one recomputation in all layers."""
    return run.with_update(policy=replace(run.update.policy, remat=remat), lighter_layers=0)


def _is_predicted(device: DeviceSpec) -> bool:
    """Whether the plan predicts memory well enough. On TPUs XLA needs up to 14 % more, and a v5p gains no time."""
    return device.platform == "gpu" and not math.isinf(device.usable_bytes)


def _leaves_margin(run: PlannedRun, device: DeviceSpec) -> bool:
    return _memory(run, device).peak_bytes <= MOST_FRAC * device.usable_bytes


def _memory(run: PlannedRun, device: DeviceSpec) -> Memory:
    hosts, sampler = run.num_hosts(device), None
    local = run.mesh_of_host(device)
    if isinstance(run, PlannedRl) and run.engine.kind == "jax":
        sizes = run.engine.sampler_sizes(run.rollout.max_context_tokens, hosts)
        sampler = SamplerShape(sizes["max_rows"], sizes["cache_tokens"], local, run.train.max_staleness > 0)
    return memory_of(run.update, run.model, run.largest_batch(), sampler, device.platform)
