"""What the benches of rollouts make of times and logs, without a server: costs, scripts, and the two side by side."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paravt_jax.bench.rollout import SIMULATED_CORES, SIMULATED_SERVERS, simulated_turns
from paravt_jax.bench.service import BURST, TEXTS, Probe, decoding, fitted, service_of
from paravt_jax.config import load_config
from paravt_jax.plan.service import ServiceTimes
from paravt_jax.plan.simulation import CallScript, TurnScript
from rollout.chat import Chat
from rollout.engine.scripted import ScriptedEngine
from scripts.bench import simulation
from scripts.bench.simulation import ARMS, FIRST_STEPS, OTHERWISE, compared, mean_service, scripts_of
from scripts.bench.smoke_run import CONFIG, SETTINGS

SERVICE = ServiceTimes(1.0, 0.01, 0.0, 0.0, 0.1, 0.0, 0.0)


def segment(kind: str, length: int, frames: int = 0) -> dict:
    pictures = {"pictures": [{"key": "k", "size_px": [64, 96]}] * frames} if frames else {}
    return {"kind": kind, "ids": [7] * length, **pictures}


def record(visit: int = 3) -> dict:
    """Two turns, the second after a report; 5 of the 20 ids of the prompt are pictures of 6 tokens."""
    report = [segment("prompt", 12, frames=2), segment("sampled", 9)]
    calls = [{"window_s": [1, 4], "segments": report}, {"window_s": None, "segments": None}]
    return {
        "visit": visit,
        "segments": [
            segment("prompt", 20, frames=5),
            segment("forced", 4),
            segment("sampled", 11),
            segment("environment", 13),
            segment("forced", 4),
            segment("sampled", 6),
            segment("sampled", 1),  # of other weights
            segment("environment", 1),
        ],
        "turns": [{"token_span": [20, 35], "calls": calls}, {"token_span": [48, 59], "calls": []}],
    }


def test_a_logged_episode_becomes_the_script_that_it_followed():
    first, second = scripts_of([record(3), record(3), record(4)], token_px=32)
    assert (first.prompt_tokens, first.frames, len(first.episodes)) == (15 + 5 * 6, 5, 2)
    assert second.name != first.name and len(second.episodes) == 1
    turns = (TurnScript(11, 4, (CallScript("3 [1, 4]", 10 + 2 * 6, 2, 9),)), TurnScript(7, 13 + 4))
    assert first.episodes == (turns, turns)


def write_run(directory: Path, steps: list[dict]) -> None:
    """Steps with an episode each."""
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({'step': n} | s)}\n" for n, s in enumerate(steps, 1))
    )
    (directory / "episodes").mkdir()
    for number in range(1, len(steps) + 1):
        (directory / "episodes" / f"{number:06d}.jsonl").write_text(f"{json.dumps(record(number))}\n")


def test_a_log_is_compared_with_what_its_service_times_say(tmp_path):
    write_run(tmp_path, [{"time/rollout_s": 5.0, "time/step_s": 9.0, "time/update_s": 3.0, "time/publish_s": 1.0}] * 4)
    found = compared(tmp_path, [SERVICE], num_servers=1, token_px=32)
    # 1 + 49 x 0.01 + 10 x 0.1, the report 1 + 22 x 0.01 + 8 x 0.1, and 1 + 17 x 0.01 + 6 x 0.1.
    assert found["simulated"]["rollout_s"] == pytest.approx(2.49 + 2.02 + 1.77)
    assert found["simulated"]["step_s"] == pytest.approx(2.49 + 2.02 + 1.77 + 3 + 1)
    assert found["measured"]["step_s"] == 9.0
    row = simulation.table({"rows": [{"arm": "one server", **found}]}).splitlines()[-1]
    assert row == "| one server | 5.00 | 6.28 | +26% | 9.00 (9.00 to 9.00) | 10.28 | +14% |"


def test_rollouts_ahead_are_simulated_ahead_and_the_ends_of_the_log_do_not_count(tmp_path):
    """Rollouts of 6.28 s, three at a time, are ready before an update of 60 s ends; else each step waits."""
    counted = {"time/rollout_s": 0.5, "time/step_s": 61.5, "time/update_s": 60.0, "time/publish_s": 1.0}
    other = dict.fromkeys(counted, 99.0)
    write_run(tmp_path, [*[other] * (FIRST_STEPS + 2), *[counted] * 4, *[other] * 2])
    alone = compared(tmp_path, [SERVICE], num_servers=1, token_px=32)
    ahead = compared(tmp_path, [SERVICE], num_servers=1, token_px=32, steps_ahead=2)
    assert ahead["measured"] == {key.removeprefix("time/"): value for key, value in counted.items()}
    assert ahead["all_step_s"] == [61.5] * 4 and 99.0 in alone["all_step_s"]
    assert ahead["simulated"]["rollout_s"] == pytest.approx(0.0) and ahead["simulated"]["step_s"] == pytest.approx(61.0)
    assert alone["simulated"]["rollout_s"] == pytest.approx(6.28)


def test_the_arm_with_rollouts_ahead_has_the_staleness_of_the_8b_files():
    config = load_config(CONFIG, *SETTINGS, *OTHERWISE, *ARMS["one server, ahead"])
    assert config.train.max_staleness == load_config(CONFIG.with_name("paragrpo_8b.yaml")).train.max_staleness
    assert config.train.steps_ahead == 2


def test_services_before_and_after_are_averaged():
    service = mean_service([SERVICE, replace(SERVICE, request_s=2.0, share=0.5)], publish_s=0.25)
    assert (service.request_s, service.share, service.publish_s) == (1.5, 0.5, 0.25)


def test_costs_are_found_from_the_times_that_they_make():
    costs = np.array([0.02, 1e-4, 0.003])
    features = [(1, 64, 0), (1, 448, 0), (1, 96, 4), (1, 0, 4)]
    times = {one: [*[float(np.dot(one, costs))] * 2, 99.0] for one in features}
    assert fitted(times) == pytest.approx(costs)


def test_no_cost_is_negative():
    falling = {(1.0, 1.0): [0.3], (1.0, 8.0): [0.1]}
    assert (fitted(falling) >= 0).all() and fitted(falling)[1] == 0


def test_decoding_takes_time_also_where_the_times_grow_faster_than_the_context():
    class BusyProbe(Probe):
        async def seconds(self, prompts, num_tokens=1, server="one"):
            return num_tokens * (len(prompts) * len(prompts[0].ids)) ** 2 * 1e-8

    times = asyncio.run(decoding(BusyProbe(ScriptedEngine(None), None, (64, 96)), repeats=1))
    assert times[0] + times[1] > 0
    ServiceTimes(1.0, 0.01, 0.0, 0.0, *map(float, times))


def test_a_probe_asks_for_what_nobody_has_seen_and_then_again(tiny_hf):
    async def reply(request):
        return [5] * request.sampling.max_new_tokens

    chat, engine = Chat.from_hf(tiny_hf), ScriptedEngine(reply)
    probe = Probe(engine, chat, (64, 96))
    assert len({probe.text(TEXTS[1]).ids.tobytes() for _ in range(BURST)}) == BURST
    service = asyncio.run(service_of(engine, chat, frame_px=(64, 96), token_px=32, repeats=1, num_servers=2, share=0.5))
    assert 0.5 <= service.share <= 1
    shown = [request for request in engine.requests if request.pictures]
    keys = {tuple(picture.key for picture in request.pictures) for request in shown}
    assert len(shown) == 2 * 2 * BURST and len(keys) == 2 * BURST


def test_more_servers_help_as_far_as_there_are_cores():
    share = 1 / len(os.sched_getaffinity(0))  # a core
    rows = simulated_turns(replace(SERVICE, share=share), CallScript("w", 100, 0, 21))
    ratios = {row["cores"]: dict(zip(SIMULATED_SERVERS, row["ratios"], strict=True)) for row in rows}
    assert ratios[2][2] <= ratios[2][4] <= ratios[2][8]  # which decode fewer sequences together
    assert ratios[max(SIMULATED_CORES)][8] == pytest.approx(1)
    assert ratios[8][1] > ratios[8][2] > ratios[8][4] > ratios[8][8]
