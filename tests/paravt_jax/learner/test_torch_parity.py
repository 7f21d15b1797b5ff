"""Loss and gradient of an update equal the results of transformers' model, for RL and for imitation."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from on_use import torch
from torch_gradients import error, first_moments, gradients_of, joined

import model_port
from model_port.inputs import Frame
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.learner.learner import LANGUAGE, Learner, StepPart
from paravt_jax.learner.packing import BatchShape, Dialogue, pack
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from scripts.bench.torch_update import TorchLearner, load_reference

pytestmark = pytest.mark.slow

OPTIM = OptimConfig(max_grad_norm=1e9)  # no gradient is clipped
LOSS = LossConfig(kl_coef=0.01)
TEMPERATURE = 0.7
GRIDS = {"a": (4, 6), "b": (2, 4), "c": (6, 2), "d": (4, 4)}
SHAPE = BatchShape(num_rows=1, row_tokens=128, row_patches=24)
TYPICAL_LOGP = -7.6  # of a vocabulary of this size


@dataclass(frozen=True)
class Case:
    policy: Path
    ref: Path  # another language tower with the same vision tower
    dialogues: list[Dialogue]
    frames: dict[str, Frame]

    @property
    def num_loss_tokens(self) -> float:
        return float(sum(dialogue.loss_mask.sum() for dialogue in self.dialogues))


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    folder = tmp_path_factory.mktemp("parity")
    policy, ref = folder / "policy", folder / "ref"
    config, random = make_tiny(policy, seed=3), np.random.default_rng(0)
    model = load_reference(policy)
    for name, parameter in model.named_parameters():
        if "visual" not in name:
            parameter.data = parameter.data.flatten()[random.permutation(parameter.numel())].view_as(parameter)
    model.save_pretrained(ref)
    frames = {
        key: Frame(random.standard_normal((down * across, config.vision.patch_values), np.float32), (down, across))
        for key, (down, across) in GRIDS.items()
    }

    def tokens(*parts: int | str) -> np.ndarray:
        """Makes ids; each part is a number of text tokens, or the name of a frame."""
        ids = []
        for part in parts:
            if isinstance(part, str):
                down, across = GRIDS[part]
                image = [config.image_token_id] * (down * across // config.vision.merge_unit)
                ids += [config.vision_start_token_id, *image, config.vision_end_token_id]
            else:
                ids += random.integers(5, 900, part).tolist()
        return np.array(ids)

    def dialogue(prompt: np.ndarray, own: np.ndarray, visible: str, shared: int) -> Dialogue:
        ids = np.r_[prompt, own]
        sampled = (np.arange(len(ids)) >= len(prompt)) & (ids < 900)
        sampled[len(prompt) + 5 : len(prompt) + 8] = False  # environment tokens
        structural = np.arange(len(ids)) % 4 == 0
        advantage = random.choice([-1.0, 1.0]) * random.uniform(0.3, 1.5) + structural * random.normal()
        return Dialogue(
            ids=ids,
            frames=tuple(visible),
            num_shared=len(prompt),
            num_shared_frames=shared,
            loss_mask=sampled,
            behavior_logp=(TYPICAL_LOGP + random.normal(size=len(ids))).astype(np.float32),
            advantage=advantage.astype(np.float32),
            token_class=np.zeros(len(ids), np.int32),
            episode=0,
        )

    prompt, second_prompt = tokens(3, "a", 2, "b", 7), tokens(9, "c", 4)
    dialogues = [
        dialogue(prompt, tokens(17), "ab", 2),
        dialogue(prompt, tokens(8, "d", 13), "abd", 2),
        dialogue(prompt, tokens(5, "a", 29), "aba", 2),
        dialogue(second_prompt, tokens(23), "c", 1),
        dialogue(second_prompt, tokens(11), "c", 1),
        dialogue(tokens(6), tokens(19), "", 0),
    ]
    return Case(policy, ref, dialogues, frames)


@pytest.fixture(scope="module", autouse=True)
def several_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt_jax.learner.head.MULTIPLE", 7)  # the last block overlaps the one before it
        patch.setattr("paravt_jax.learner.head.WHOLE_TOKENS", 16)
        yield


def our_update(case: Case) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    learner = Learner(model_port.load(case.ref), OPTIM, LOSS, temperature=TEMPERATURE)
    model = model_port.load(case.policy)
    learner.state = replace(learner.state, trainable=nnx.state(model, LANGUAGE))
    batches = pack(case.dialogues, case.frames, model.config, SHAPE)
    assert len(batches) > 1
    metrics = learner.update([StepPart(batches, StepCounts(case.num_loss_tokens, 6.0, 1.0))], len(case.dialogues))
    return metrics, first_moments(learner)


def torch_gradients(
    case: Case, loss: LossConfig = LOSS, temperature: float = TEMPERATURE
) -> tuple[float, dict[str, np.ndarray]]:
    learner = TorchLearner(case.policy, OPTIM, loss, temperature=temperature, rows_at_once=4, ref_folder=case.ref)
    total = learner.add_gradients(case.dialogues, case.frames, case.num_loss_tokens)
    return total, gradients_of(learner.model)


@pytest.fixture(scope="module")
def ours(case) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    return our_update(case)


def test_the_gradient_of_every_language_weight_equals_that_of_torch(case, ours):
    metrics, got = ours
    total, expected = torch_gradients(case)
    assert set(got) == set(expected) and not any("visual" in name for name in got)
    assert metrics["loss/total"] == pytest.approx(total, rel=1e-5)
    assert metrics["optim/grad_norm"] == pytest.approx(np.linalg.norm(joined(expected)), rel=1e-5)
    for name, gradient in expected.items():
        assert error(got[name], gradient) <= 1e-4, name
    assert error(joined(got), joined(expected)) <= 1e-4


def test_the_case_exercises_the_loss(case, ours):
    metrics, _ = ours
    assert 0.05 < metrics["loss/capped_frac"] < 0.5 and metrics["loss/kl_ref"] > 0.1
    advantages = [dialogue.advantage[dialogue.loss_mask] for dialogue in case.dialogues]
    assert all(len(np.unique(values)) == 2 for values in advantages)  # structural tokens and others
    assert min(map(np.min, advantages)) < -0.5 and max(map(np.max, advantages)) > 0.5


@pytest.mark.parametrize(
    "change",
    [
        dict(temperature=1.0),
        dict(loss=replace(LOSS, correction_bounds={"max_weight": float("inf")})),
        dict(loss=replace(LOSS, kl_coef=0.0)),
    ],
    ids=["without temperature", "without cap", "without KL"],
)
def test_another_loss_changes_the_gradient_of_every_weight(change, case, ours):
    _, expected = torch_gradients(case, **change)
    assert all(error(ours[1][name], gradient) > 1e-3 for name, gradient in expected.items())


def test_advantages_shifted_by_one_token_change_the_gradient(case, ours):
    shifted = [replace(d, advantage=np.roll(d.advantage, 1)) for d in case.dialogues]
    _, expected = torch_gradients(replace(case, dialogues=shifted))
    assert error(joined(ours[1]), joined(expected)) > 1e-3


def imitated(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    learner = Learner(model_port.load(case.policy), OPTIM, replace(LOSS, kl_coef=0.0), temperature=1.0)
    batches = pack(case.dialogues, case.frames, learner.model.config, SHAPE)
    assert len(batches) > 1
    loss = learner.imitate(batches, case.num_loss_tokens)["loss/imitation"]
    return loss, first_moments(learner)


def imitated_by_torch(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """Computes transformers' mean cross-entropy from labels, one dialogue at a time."""
    model = load_reference(case.policy)
    model.model.visual.requires_grad_(False)
    total = 0.0
    for dialogue in case.dialogues:
        ids = torch.from_numpy(np.asarray(dialogue.ids))[None]
        labels = torch.where(torch.from_numpy(dialogue.loss_mask), ids, -100)
        inputs = {"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        frames = [case.frames[key] for key in dialogue.frames]
        if frames:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([frame.patches for frame in frames]))
            inputs["image_grid_thw"] = torch.tensor([[1, *frame.grid] for frame in frames])
        loss = model(**inputs).loss * int(dialogue.loss_mask[1:].sum()) / case.num_loss_tokens
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def test_imitation_of_a_packed_batch_equals_transformers(case):
    (loss, got), (total, expected) = imitated(case), imitated_by_torch(case)
    assert loss == pytest.approx(total, rel=1e-5)
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        assert error(got[name], gradient) <= 1e-4, name


def test_imitating_tokens_of_the_environment_changes_the_gradient(case):
    picture = tiny_config().image_token_id
    loose = [replace(d, loss_mask=(np.arange(len(d.ids)) >= d.num_shared) & (d.ids != picture)) for d in case.dialogues]
    _, expected = imitated_by_torch(case)
    _, got = imitated(replace(case, dialogues=loose))
    assert error(joined(got), joined(expected)) > 1e-2
