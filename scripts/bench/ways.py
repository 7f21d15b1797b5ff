"""Measures time and peak memory of one whole update of a group of episodes, done in several ways.

`branches` is the learner's way: the prompt once, with all responses after it, and every frame encoded once. `rows`
repeats the prompt for every episode, `own frames` also repeats the vision tower, `torch` is the same update in torch.
Both sides score a reference policy, or neither does (`no reference`).
Every way runs in its own process, so that their memory is separate. Turns of two ways alternate, so that a slow minute
of the machine affects both, and in every turn they must agree on the loss and the gradient norm.
"""

import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from model_port.layers import ComputeDtype
from scripts.bench.update import AGREED, TOLERANCES, EpisodeGroup, check_agreement, our_update, torch_update

COMPARED = {
    ("rows", "branches"): {"update_s": "a row per episode → branches"},
    ("own frames", "rows"): {
        "update_s": "frames seen per row → once",
        "vision_s": "the same, the vision tower alone",
    },
    ("torch", "branches"): {"update_s": "torch → branches", "cpu_s": "the same, processor seconds"},
    ("torch, no reference", "branches, no reference"): {
        "update_s": "torch → branches, both without a reference",
        "cpu_s": "the same, processor seconds",
    },
}  # each pair has its slower way first
IMPORTS = {
    "torch": ("scripts.bench.torch_update", "torch", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    "jax": ("paravt_jax.learner.learner", "model_port"),
}  # the peak is memory beyond these imports


def compare_ways(folder: Path, dtype: ComputeDtype, group: EpisodeGroup, repeats: int) -> list[dict[str, Any]]:
    """Returns medians of both ways in each comparison; `folder` is the model's Hugging Face directory."""
    rows = []
    for (slow, fast), measures in COMPARED.items():
        turns = _alternating((slow, fast), folder, dtype, group, repeats)
        for measure, name in measures.items():
            rows.append({"compared": name, "measure": measure, "slow": turns[slow], "fast": turns[fast]})
    return rows


def _alternating(
    ways: tuple[str, str], folder: Path, dtype: ComputeDtype, group: EpisodeGroup, repeats: int
) -> dict[str, dict[str, Any]]:
    pools = {way: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for way in ways}
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for way, pool in pools.items():
            pool.submit(_set_up, way, folder, dtype, group).result()
        for turn in range(repeats + 1):
            for way, pool in pools.items():
                turns[way].append(pool.submit(_turn).result())
                print(f"{dtype} update {turn}: {way} {_formatted(turns[way][-1])}", file=sys.stderr, flush=True)
            check_agreement({way: done[-1] for way, done in turns.items()}, TOLERANCES[dtype])
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)
    return {way: {"way": way, **_medians(done[1:])} for way, done in turns.items()}  # the first turn warms up


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0] if name not in AGREED}


def _formatted(turn: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in turn.items())


_own: dict[str, Any] = {}  # set in the process of a way


def _set_up(way: str, folder: Path, dtype: ComputeDtype, group: EpisodeGroup) -> None:
    in_torch = way.startswith("torch")
    for module in IMPORTS["torch" if in_torch else "jax"]:
        import_module(module)
    _own["imports_mib"] = _status_mib("VmRSS")
    _own["update"] = (torch_update if in_torch else our_update)(way, folder, dtype, group)


def _turn() -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: compiling and loading do not count
    start, start_cpu = time.perf_counter(), time.process_time()
    metrics = _own["update"].run()
    turn = {"update_s": time.perf_counter() - start, "cpu_s": time.process_time() - start_cpu}
    turn["peak_mib"] = _status_mib("VmHWM") - _own["imports_mib"]
    if encode_vision := _own["update"].encode_vision:
        start = time.perf_counter()
        encode_vision()
        turn["vision_s"] = time.perf_counter() - start
    return turn | {name: metrics[name] for name in AGREED}


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
