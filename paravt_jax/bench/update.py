"""One whole update of one group of episodes, done in several ways: seconds and peak memory of each.

`branches` is what the learner does: the prompt once with all responses behind it, and every frame seen once. `rows`
repeats the prompt for every episode, `own frames` repeats the vision tower as well, `torch` is the same update there.
Each way is a process of its own, so that its memory is nobody else's. Turns of the two that are compared alternate,
so that a slow minute of the machine hits both, and in every turn they must agree on loss and norm of the gradient.
"""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from model_port.config import ModelConfig
from model_port.inputs import Frame
from paravt_jax.learner.packing import Dialogue

COMPARED = {
    ("rows", "branches"): {"update_s": "a row per episode → branches"},
    ("own frames", "rows"): {
        "update_s": "frames seen per row → once",
        "vision_s": "the same, the vision tower alone",
    },
    ("torch", "branches"): {"update_s": "torch → branches"},
}  # the slower way first
TEMPERATURE = 0.7
TORCH_ROWS_AT_ONCE = 4  # where it is fastest
AGREED = ("loss/total", "optim/grad_norm")
IMPORTS = {
    "torch": ("paravt_jax.bench.torch_update", "torch", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    "jax": ("paravt_jax.learner.learner", "model_port"),
}  # the peak is what a process takes beyond them
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """Episodes of one prompt: ids with placeholders expanded, the frames that the prompt shows, and the responses."""

    config: ModelConfig
    prompt: np.ndarray
    frames: list[Frame]
    responses: list[np.ndarray]

    def dialogues(self, way: str) -> tuple[list[Dialogue], dict[str, Frame]]:
        """Good and bad episodes, with more for some of the tokens, sampled by an engine that is a little off."""
        dialogues: list[Dialogue] = []
        shown: dict[str, Frame] = {}
        shared = way == "branches"
        for number, response in enumerate(self.responses):
            ids = np.r_[self.prompt, response]
            # The same pixels under another name are another frame.
            keys = tuple(f"{number if way == 'own frames' else 0}/{n}" for n in range(len(self.frames)))
            shown.update(zip(keys, self.frames, strict=True))
            noise = np.random.default_rng(number).normal(scale=0.3, size=len(ids))
            advantage = (-1.0 if number % 2 else 1.5) + (np.arange(len(ids)) % 8 == 0)
            dialogues.append(
                Dialogue(
                    ids=ids,
                    frames=keys,
                    num_shared=len(self.prompt) * shared,
                    num_shared_frames=len(keys) * shared,
                    loss_mask=np.arange(len(ids)) >= len(self.prompt),
                    behavior_logp=(noise - np.log(self.config.text.vocab_size)).astype(np.float32),
                    advantage=advantage.astype(np.float32),
                    token_class=np.zeros(len(ids), np.int32),
                    episode=number,
                )
            )
        return dialogues, shown

    @property
    def num_loss_tokens(self) -> float:
        return float(sum(map(len, self.responses)))


def compare(folder: Path, dtype: str, group: EpisodeGroup, repeats: int) -> list[dict[str, Any]]:
    """Medians of both ways of each comparison, for the model in `folder`, a Hugging Face directory."""
    rows = []
    for (slow, fast), measures in COMPARED.items():
        turns = _alternating((slow, fast), folder, dtype, group, repeats)
        for measure, name in measures.items():
            rows.append({"compared": name, "measure": measure, "slow": turns[slow], "fast": turns[fast]})
    return rows


def _alternating(
    ways: tuple[str, str], folder: Path, dtype: str, group: EpisodeGroup, repeats: int
) -> dict[str, dict[str, Any]]:
    pools = {way: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for way in ways}
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for way, pool in pools.items():
            pool.submit(_set_up, way, folder, dtype, group).result()
        for turn in range(repeats + 1):
            for way, pool in pools.items():
                turns[way].append(pool.submit(_turn).result())
                print(f"{dtype} update {turn}: {way} {_said(turns[way][-1])}", file=sys.stderr, flush=True)
            check_agreement({way: done[-1] for way, done in turns.items()}, TOLERANCES[dtype])
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)
    return {way: {"way": way, **_medians(done[1:])} for way, done in turns.items()}  # the first warms up


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0] if name not in AGREED}


def _said(turn: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in turn.items())


def check_agreement(turn: dict[str, dict[str, float]], tolerance: float) -> None:
    for name in AGREED:
        values = {way: done[name] for way, done in turn.items()}
        if max(values.values()) - min(values.values()) > tolerance * max(1.0, *values.values()):
            raise RuntimeError(f"the ways disagree on {name}, so they do not compute the same: {values}")


_own: dict[str, Any] = {}  # what a way's process holds


def _set_up(way: str, folder: Path, dtype: str, group: EpisodeGroup) -> None:
    for module in IMPORTS["torch" if way == "torch" else "jax"]:
        import_module(module)
    _own["imports_mib"] = _status_mib("VmRSS")
    _own["update"] = (torch_update if way == "torch" else our_update)(way, folder, dtype, group)


def _turn() -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: compiling and loading are not the update's
    start = time.perf_counter()
    metrics = _own["update"]()
    turn = {"update_s": time.perf_counter() - start, "peak_mib": _status_mib("VmHWM") - _own["imports_mib"]}
    if "see" in _own:
        start = time.perf_counter()
        _own["see"]()
        turn["vision_s"] = time.perf_counter() - start
    return turn | {name: metrics[name] for name in AGREED}


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def our_update(way: str, folder: Path, dtype: str, group: EpisodeGroup) -> Callable[[], dict[str, float]]:
    import jax
    from flax import nnx

    import model_port
    from paravt_jax.learner.learner import Learner, StepPart
    from paravt_jax.learner.packing import PackShape, pack
    from paravt_jax.learner.settings import LossConfig, OptimConfig
    from paravt_jax.learner.variants import StepCounts

    dialogues, frames = group.dialogues(way)
    model = model_port.load(folder)
    model.compute = replace(model.compute, dtype=dtype)
    learner = Learner(model, OptimConfig(), LossConfig(), temperature=TEMPERATURE)
    counts = StepCounts(group.num_loss_tokens, float(len(dialogues)), group.num_loss_tokens)
    own_tokens = [len(dialogue.ids) - dialogue.num_shared for dialogue in dialogues]
    row_patches = max(len(frame.patches) for frame in group.frames)
    if way == "branches":
        shape = PackShape(1, len(group.prompt) + sum(own_tokens), row_patches)
    else:
        shape = PackShape(len(dialogues), max(own_tokens), row_patches)

    def update() -> dict[str, float]:
        batches = pack(dialogues, frames, group.config, shape)
        metrics = learner.update([StepPart(batches, counts)], len(dialogues))
        jax.block_until_ready(learner.state)
        return metrics

    tower = nnx.jit(lambda model, vision: model.encode_vision(vision))
    vision = jax.device_put(pack(dialogues, frames, group.config, shape)[0].vision)
    _own["see"] = lambda: jax.block_until_ready(tower(learner.model, vision))
    return update


def torch_update(
    way: str, folder: Path, dtype: str, group: EpisodeGroup, device: str = "cpu"
) -> Callable[[], dict[str, float]]:
    from paravt_jax.bench.torch_update import TorchLearner
    from paravt_jax.learner.settings import LossConfig, OptimConfig

    dialogues, frames = group.dialogues(way)
    learner = TorchLearner(
        folder,
        OptimConfig(),
        LossConfig(),
        temperature=TEMPERATURE,
        dtype=dtype,
        rows_at_once=TORCH_ROWS_AT_ONCE,
        device=device,
    )
    return lambda: learner.update(dialogues, frames, group.num_loss_tokens)
