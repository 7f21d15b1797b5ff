"""Counts and times XLA compilations, and sets up the compilation cache."""

import os

import jax

from paravt_jax.run.directory import user_cache


class Compiles:
    """Counts and times compilations: a run that compiles in every step is slow."""

    def __init__(self) -> None:
        self._number, self._seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._number += 1
            self._seconds += duration_secs

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        metrics = {"perf/num_compiles": float(self._number), "time/compile_s": self._seconds}
        self._number, self._seconds = 0, 0.0
        return metrics


def use_compilation_cache() -> None:
    """Caches compiled programs on disk, so that a resumed run need not compile again."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("xla")))
