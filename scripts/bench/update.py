"""Runs one whole update of a group of episodes, with the learner or in torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model_port.config import ModelConfig
from model_port.inputs import Frame
from model_port.layers import ComputeDtype
from paravt_jax.learner.packing import Dialogue
from paravt_jax.learner.settings import LossConfig

FRAME_GRID = (14, 14)  # the recipe's frames: 224 x 224 pixels, 49 tokens
TEMPERATURE = 0.7
TORCH_ROWS_AT_ONCE = 4  # fastest on CPU
AGREED = ("loss/total", "optim/grad_norm")
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Example:
    ids: np.ndarray
    frames: list[Frame]


def random_example(config: ModelConfig, seed: int, num_frames: int, num_text: int, grid: tuple[int, int]) -> Example:
    random = np.random.default_rng(seed)
    down, across = grid
    plain = min(config.image_token_id, config.vision_start_token_id)
    frame_ids = [
        config.vision_start_token_id,
        *[config.image_token_id] * (down * across // 4),
        config.vision_end_token_id,
    ]
    shape = (down * across, config.vision.patch_values)
    frames = [Frame(random.standard_normal(shape, np.float32), grid) for _ in range(num_frames)]
    return Example(np.array([*frame_ids * num_frames, *random.integers(0, plain, num_text)]), frames)


class Update(NamedTuple):
    run: Callable[[], dict[str, float]]
    encode_vision: Callable[[], object] | None = None  # runs the vision tower alone


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """A prompt's episodes: its ids with placeholders expanded, its frames, and the responses' ids."""

    config: ModelConfig
    prompt: np.ndarray
    frames: list[Frame]
    responses: list[np.ndarray]

    def dialogues(self, way: str) -> tuple[list[Dialogue], dict[str, Frame]]:
        """Builds dialogues with noisy behavior log-probs, and advantages of both signs that vary by token."""
        dialogues: list[Dialogue] = []
        frames_by_key: dict[str, Frame] = {}
        shared = way.startswith("branches")
        for number, response in enumerate(self.responses):
            ids = np.r_[self.prompt, response]
            # A frame is identified by its key, not by its pixels.
            keys = tuple(f"{number if way == 'own frames' else 0}/{n}" for n in range(len(self.frames)))
            frames_by_key.update(zip(keys, self.frames, strict=True))
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
        return dialogues, frames_by_key

    @property
    def num_loss_tokens(self) -> float:
        return float(sum(map(len, self.responses)))


def loss_of(way: str) -> LossConfig:
    return LossConfig(kl_coef=0.0) if way.endswith("no reference") else LossConfig()


def check_agreement(turn: dict[str, dict[str, float]], tolerance: float) -> None:
    for name in AGREED:
        values = {way: done[name] for way, done in turn.items()}
        spread = max(values.values()) - min(values.values())
        if not np.isfinite([*values.values()]).all() or spread > tolerance * max(1.0, *values.values()):
            raise RuntimeError(f"the ways disagree on {name}: {values}")


def our_update(way: str, folder: Path, dtype: ComputeDtype, group: EpisodeGroup) -> Update:
    import jax
    from flax import nnx

    import model_port
    from model_port.attention import allow_kernel
    from paravt_jax.learner.learner import Learner, StepPart
    from paravt_jax.learner.packing import BatchShape, pack
    from paravt_jax.learner.settings import OptimConfig
    from paravt_jax.learner.variants import StepCounts

    dialogues, frames = group.dialogues(way)
    model = model_port.load(folder)
    model.compute = replace(model.compute, dtype=dtype, attention=allow_kernel("auto"))
    learner = Learner(model, OptimConfig(), loss_of(way), temperature=TEMPERATURE)
    counts = StepCounts(group.num_loss_tokens, float(len(dialogues)), group.num_loss_tokens)
    own_tokens = [len(dialogue.ids) - dialogue.num_shared for dialogue in dialogues]
    row_patches = max(len(frame.patches) for frame in group.frames)
    if way.startswith("branches"):
        shape = BatchShape(1, len(group.prompt) + sum(own_tokens), row_patches)
    else:
        shape = BatchShape(len(dialogues), max(own_tokens), row_patches)

    def update() -> dict[str, float]:
        batches = pack(dialogues, frames, group.config, shape)
        metrics = learner.update([StepPart(batches, counts)], len(dialogues))
        jax.block_until_ready(learner.state)
        return metrics

    tower = nnx.jit(lambda model, vision: model.encode_vision(vision))
    vision = jax.device_put(pack(dialogues, frames, group.config, shape)[0].vision)
    return Update(update, lambda: jax.block_until_ready(tower(learner.model, vision)))


def torch_update(way: str, folder: Path, dtype: str, group: EpisodeGroup, device: str = "cpu") -> Update:
    from paravt_jax.learner.settings import OptimConfig
    from scripts.bench.torch_update import TorchLearner

    dialogues, frames = group.dialogues(way)
    learner = TorchLearner(
        folder,
        OptimConfig(),
        loss_of(way),
        temperature=TEMPERATURE,
        dtype=dtype,
        rows_at_once=TORCH_ROWS_AT_ONCE,
        device=device,
    )
    return Update(lambda: learner.update(dialogues, frames, group.num_loss_tokens))
