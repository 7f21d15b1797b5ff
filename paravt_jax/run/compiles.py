"""Counts, times and logs XLA compilations, and sets up the compilation cache."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import jax

from model_port.compiling import purpose
from model_port.terminal import say
from paravt_jax.run.directory import user_cache

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # recorded right before a program is compiled
COMPILED = "/jax/core/compile/backend_compile_duration"  # recorded when the program is compiled or read from the cache
SHOWN_AFTER_S = 5.0  # faster compilations are not logged
AGAIN_EVERY_S = 30.0
POLL_S = 0.5
MIN_CACHED_S = 0.1  # programs that compile faster are not cached


class Compiles:
    """Counts, times and names compilations, to detect runs that compile in every step."""

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        """Starts counting. With `say`, slow compilations are logged while they run and when they end."""
        self._number, self._seconds, self._say = 0, 0.0, say
        self._running: dict[threading.Thread, _Compilation] = {}
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        if say is not None:
            threading.Thread(target=self._watch, name="compile log", daemon=True).start()

    def running(self) -> list[str]:
        return [running.name for running in [*self._running.values()]]

    def pop_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        metrics = {"perf/num_compiles": float(self._number), "time/compile_s": self._seconds}
        self._number, self._seconds = 0, 0.0
        return metrics

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        thread = threading.current_thread()
        if event == LOWERED:
            self._running[thread] = _Compilation(_name_of(str(kwargs.get("fun_name", ""))), time.monotonic())
        elif event == COMPILED:
            self._number += 1
            self._seconds += duration_secs
            if (running := self._running.pop(thread, None)) and duration_secs >= SHOWN_AFTER_S:
                self._log(f"compiled {running.name} in {duration_secs:.0f} s")

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            for thread, running in [*self._running.items()]:
                seconds = time.monotonic() - running.start_s
                if thread.is_alive() and seconds >= running.next_s:
                    running.next_s += AGAIN_EVERY_S
                    self._log(f"compiling {running.name}, {seconds:.0f} s so far")

    def _log(self, line: str) -> None:
        if self._say is not None and jax.process_index() == 0:
            self._say(line)


@dataclass
class _Compilation:
    name: str
    start_s: float
    next_s: float = field(default_factory=lambda: SHOWN_AFTER_S)  # seconds after the start when the next line is due


@cache  # a notebook's second run must not log everything twice
def set_up_compilation() -> None:
    """Caches compiled programs on disk, so that resumed runs do not compile again, and logs slow compilations."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("xla")))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_CACHED_S)
    Compiles(say)


def _name_of(function: str) -> str:
    """The name of a compilation, for example `update 3 of 4 (8 x 4096 tokens): gradients`."""
    name = function.removeprefix("jit(").removesuffix(")")
    return ": ".join(filter(None, [purpose(), name]))
