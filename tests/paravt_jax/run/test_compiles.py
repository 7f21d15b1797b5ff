"""Long compilations are logged, with their purpose, while they run and when they end."""

import threading
import time

import jax
import jax.numpy as jnp

from model_port.compiling import compiling
from paravt_jax.run import compiles
from paravt_jax.run.compiles import COMPILED, LOWERED, Compiles, set_up_compilation


def test_a_long_compilation_is_logged_with_its_purpose_while_it_runs_and_when_it_ends(monkeypatch):
    monkeypatch.setattr(compiles, "SHOWN_AFTER_S", 0.05)
    monkeypatch.setattr(compiles, "POLL_S", 0.01)
    lines: list[str] = []
    log = Compiles(lines.append)
    with compiling("update 2 of 3 (8 x 4096 tokens)"), compiling("inner"):
        log._on_event(LOWERED, 0.1, fun_name="jit(score)")
    deadline_s = time.monotonic() + 60
    while not lines and time.monotonic() < deadline_s:
        time.sleep(0.01)
    log._on_event(COMPILED, 40.0, fun_name="jit(score)")
    assert lines == [
        "compiling update 2 of 3 (8 x 4096 tokens): score, 0 s so far",
        "compiled update 2 of 3 (8 x 4096 tokens): score in 40 s",
    ]


def test_a_second_run_in_a_process_does_not_log_compilations_twice(monkeypatch):
    logs: list[object] = []
    monkeypatch.setattr(compiles, "Compiles", logs.append)
    set_up_compilation.cache_clear()
    for _ in range(2):
        set_up_compilation()
    assert len(logs) == 1


def test_a_program_is_named_while_it_is_compiled():
    compiles, named = Compiles(), []

    def record(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in (LOWERED, COMPILED):
            named.append(compiles.running())

    jax.monitoring.register_event_duration_secs_listener(record)

    def triple_of_test(x):
        return 3 * x

    numbers = jnp.ones(3)
    named.clear()
    with compiling("update"):
        jax.jit(triple_of_test)(numbers)
    assert named == [["update: triple_of_test"], []]


def test_a_program_of_jax_is_logged_and_a_fast_one_is_not(monkeypatch):
    lines: list[str] = []
    Compiles(lines.append)

    def compile_new(number: int) -> None:
        def double_of_test(x):
            return 2 * x + number

        jax.jit(double_of_test)(jnp.ones(3)).block_until_ready()

    compile_new(1)
    assert lines == []
    monkeypatch.setattr(compiles, "SHOWN_AFTER_S", 0.0)
    worker = threading.Thread(target=compile_new, args=(2,))
    worker.start()
    worker.join()
    assert any(line.startswith("compiled double_of_test in ") for line in lines)
