"""Estimates step time as an interval, from the parts of a step at the best and worst rates."""

from collections.abc import Mapping
from dataclasses import dataclass

from paravt_jax.plan.devices import DeviceSpec
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_parts import StepParts
from paravt_jax.plan.step_rates import PUBLISHED, Interval, StepRates, best, worst

ON_DEVICES = ("vision tower", "prefill", "decode")


@dataclass(frozen=True)
class StepTime:
    seconds: Interval
    parts: dict[str, Interval]
    depends_on: tuple[str, ...]  # the rates with the largest effect, with their ranges

    def __str__(self) -> str:
        return f"{self.seconds} s, bound by {self.bound_by}; depends most on: {', '.join(self.depends_on)}"

    @property
    def bound_by(self) -> str:
        return max(self.parts, key=lambda name: sum(self.parts[name]))


def step_time(
    run: PlannedRl, device: DeviceSpec, update_s: float | None, rates: StepRates = PUBLISHED
) -> StepTime | None:
    """Estimates the step time; None if the device has no data sheet. `update_s` is the update's roofline time."""
    if update_s is None or device.rates("bfloat16") is None:
        return None

    def parts(values: Mapping[str, float], *, overlaps: bool = False) -> Mapping[str, float]:
        return StepParts(run, device, values, overlaps).seconds(update_s)

    middle = {name: Interval(rate.best, rate.worst).middle for name, rate in rates.items()}

    def change(name: str) -> float:
        """The change of step time from a rate's best to worst value, with all other rates in the middle."""
        best_s, worst_s = (sum(parts(middle | {name: end}).values()) for end in (rates[name].best, rates[name].worst))
        return worst_s - best_s

    low, high = parts(best(rates), overlaps=True), parts(worst(rates))
    sampler_s = sum(low[name] for name in ON_DEVICES)
    cpus_s = max(low["frames on CPUs"], low["pictures on servers' CPUs"])
    if not run.train.steps_ahead:
        step_s = max(sampler_s, cpus_s) + low["update"]
    elif run.engine.kind == "jax":  # sampler and update share devices
        step_s = max(sampler_s + low["update"], cpus_s)
    else:
        step_s = max(sampler_s, cpus_s, low["update"])
    changes = {name: change(name) for name in rates}
    most = sorted((name for name in changes if changes[name] > 0), key=lambda name: -changes[name])[:2]
    return StepTime(
        Interval(step_s + low["publish"], sum(high.values())),
        {name: Interval(low[name], high[name]) for name in low if high[name]},
        tuple(str(rates[name]) for name in most),
    )
