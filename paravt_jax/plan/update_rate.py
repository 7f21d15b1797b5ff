"""Computes trained tokens per second and device, and model FLOPs utilization (MFU)."""

from dataclasses import dataclass

from paravt_jax.plan.devices import peak_flops
from paravt_jax.plan.run import PlannedRun
from paravt_jax.plan.workload import active_params


@dataclass(frozen=True)
class UpdateRate:
    num_devices: int
    token_flops: float
    peak_flops: float | None  # per device; None: unknown

    @classmethod
    def of(cls, run: PlannedRun, device_kind: str) -> "UpdateRate":
        """Counts only the language layers' products, once each: no head, attention scores, frames or padding."""
        update = run.update
        frozen = update.lora.rank > 0  # frozen weights have no gradients
        passes = 3 - frozen + update.num_scores  # in forward passes; gradients of inputs and of weights each cost one
        return cls(run.num_devices, 2.0 * passes * active_params(run.model), peak_flops(device_kind))

    def metrics(self, num_tokens: float, update_s: float) -> dict[str, float]:
        """Metrics of an update that computed `num_tokens` on all devices; empty without tokens."""
        if not num_tokens:
            return {}
        tokens_per_s = num_tokens / update_s / self.num_devices
        metrics = {"perf/trained_tokens_per_s_device": tokens_per_s}
        if self.peak_flops is not None:
            metrics["perf/mfu"] = tokens_per_s * self.token_flops / self.peak_flops
        return metrics
