"""Pictures in later turns: the learner equals transformers on them, and each belongs to its branch."""

import asyncio
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from flax import nnx
from on_use import torch
from torch_gradients import error, first_moments, joined

import model_port
from model_port.inputs import RowSequence, Tokens, pack_text, pack_vision
from model_port.processing import VisionContract, process_images
from model_port.tiny import make_tiny
from paravt_jax.learner.advantages import EpisodeAdvantage
from paravt_jax.learner.credit import dialogues_of
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.packing import BatchShape, pack
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.rewards.terms import reward_terms
from paravt_jax.sampling.frames import frame_of
from rollout.chat import Chat
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from scripts.bench.torch_update import load_reference

pytestmark = pytest.mark.slow

SIZE_PX = (64, 32)
TURNS = (  # three rollouts of a group: two look at the same second, one at two other seconds in two turns
    [f"I look.</think>{call(5, 6)}<|im_end|>", ANSWER],
    [f"I look closely.</think>{call(5, 7)}{call(40, 41)}<|im_end|>", ANSWER],
    [f"Hm.</think>{call(20, 21)}<|im_end|>", f"Again.</think>{call(30, 31)}<|im_end|>", ANSWER],
)
SHAPE = BatchShape(num_rows=1, row_tokens=1024, row_patches=8)


class Case:
    def __init__(self, folder):
        make_tiny(folder, seed=3)
        self.folder, self.chat = folder, Chat.from_hf(folder)
        self.contract = VisionContract.from_hf(folder)
        self.model = model_port.load(folder)
        self.episodes = asyncio.run(self._play())
        self.dialogues = [self._dialogue(number, episode) for number, episode in enumerate(self.episodes)]
        pictures = {p.key: p for episode in self.episodes for p in episode.ledger.pictures}
        self.frames = {key: frame_of(picture, self.contract) for key, picture in pictures.items()}

    async def _play(self):
        config = EpisodeConfig(crop_returns="frames", max_new_tokens=256, max_context_tokens=2048)
        frames, task = FakeFrames(size_px=SIZE_PX), Task("t", "What is it?", ("/a.mp4",), 2)
        agents = [Agent(script(self.chat, turns), frames, self.chat, config) for turns in TURNS]
        overview = await agents[0].overview(task)
        return [await agent.run(overview, number) for number, agent in enumerate(agents)]

    def _dialogue(self, number, episode):
        terms = reward_terms([turn.text for turn in episode.turns], episode.outcomes, "A", "mcq")
        earned = EpisodeAdvantage(1.0)
        (dialogue,) = dialogues_of(episode, number, earned, terms, self.chat)
        return replace(dialogue, advantage=dialogue.loss_mask.astype(np.float32))

    @property
    def num_loss_tokens(self) -> float:
        return float(sum(dialogue.loss_mask.sum() for dialogue in self.dialogues))


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("later") / "hf")


def torch_inputs(case: Case, dialogue, pictures) -> "dict[str, torch.Tensor]":
    ids = torch.from_numpy(np.asarray(dialogue.ids, np.int64))[None]
    patches, grids = process_images([picture.pixels for picture in pictures], case.contract)
    is_picture = (ids == case.model.config.image_token_id).int()
    values, grid = torch.from_numpy(patches), torch.from_numpy(grids)
    return {"input_ids": ids, "mm_token_type_ids": is_picture, "pixel_values": values, "image_grid_thw": grid}


@partial(jax.jit, static_argnums=0)
def forward(graphdef, state, text, vision):
    return nnx.merge(graphdef, state)(text, vision)


def our_logits(case: Case, dialogue) -> np.ndarray:
    """Returns our logits, with rows and frames padded to one shape for all dialogues."""
    config, frames = case.model.config, [case.frames[key] for key in dialogue.frames]
    vision, first_rows = pack_vision(frames, config.vision, SHAPE.row_patches, num_rows=8)
    row = RowSequence(Tokens(dialogue.ids, tuple(range(len(frames)))))
    text = pack_text([[row]], frames, first_rows, config, SHAPE.row_tokens)
    return np.asarray(forward(*nnx.split(case.model), text, vision)[0, : len(dialogue.ids)])


def test_the_episodes_show_pictures_in_later_turns(case):
    assert [len(dialogue.frames) - dialogue.num_shared_frames for dialogue in case.dialogues] == [1, 3, 2]
    assert len({dialogue.shared for dialogue in case.dialogues}) == 1


def test_logits_equal_those_of_transformers(case):
    model = load_reference(case.folder).eval()
    for dialogue, episode in zip(case.dialogues, case.episodes, strict=True):
        with torch.no_grad():
            expected = model(**torch_inputs(case, dialogue, episode.ledger.pictures)).logits[0].numpy()
        np.testing.assert_allclose(our_logits(case, dialogue), expected, atol=1e-4)


def imitated(case: Case, dialogues) -> np.ndarray:
    """Returns the SFT gradient of a batch in which the group shares its prompt."""
    model, loss = model_port.load(case.folder), LossConfig(kl_coef=0.0)
    learner = Learner(model, OptimConfig(max_grad_norm=1e9), loss, temperature=1.0)
    learner.imitate(pack(dialogues, case.frames, learner.model.config, SHAPE), case.num_loss_tokens)
    return joined(first_moments(learner))


def test_a_picture_of_another_branch_changes_the_gradient(case):
    first, second, third = case.dialogues
    swapped = [replace(first, frames=(*first.frames[:-1], third.frames[-1])), second, third]
    assert error(imitated(case, swapped), imitated(case, case.dialogues)) > 1e-3


def test_vision_computes_a_frame_that_two_members_show_once(case):
    (batch,) = pack(case.dialogues, case.frames, case.model.config, SHAPE)
    shown = [key for dialogue in case.dialogues for key in dialogue.frames[dialogue.num_shared_frames :]]
    assert len(shown) == 6 and len({*shown}) == 5
    num_computed = sum(len({*row} - {0}) for row in np.asarray(batch.vision.segment_ids).tolist())
    assert num_computed == 2 + 5  # the overview's frames and the rollouts'
