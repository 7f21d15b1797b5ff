"""A tiny model that knows the format learns the right answer to one question."""

import asyncio

import numpy as np
import pytest
from agents import FakeFrames
from training import rollouts_of

import model_port
from model_port.processing import VisionContract
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.learner.advantages import EpisodeAdvantage
from paravt_jax.learner.credit import dialogues_of
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import BatchShape, pack
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.rewards.terms import reward_terms
from paravt_jax.rl.metrics import group_metrics
from paravt_jax.rl.setup import update_of
from paravt_jax.sampling.embedded import EmbeddedEngine
from paravt_jax.sampling.frames import frame_of
from paravt_jax.sampling.local_copy import LocalCopy
from paravt_jax.sampling.weights import ModelWeights
from rollout.chat import Chat
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.prompts import Prompts

PROMPT = Prompt("p", "Which letter? A, B, C or D", ("/video.mp4",), "C", "mcq")
PROMPTS = Prompts(without_tool="Answer.")
ROLLOUT = EpisodeConfig(dispatch="none", max_new_tokens=24, max_context_tokens=256, temperature=0.7, prompts=PROMPTS)
SFT_STEPS, RL_STEPS = 30, 25
COMMON = [
    *("model.dtype=float32", "rollout.dispatch=none", "rollout.max_new_tokens=24", "rollout.max_context_tokens=256"),
    *(f"rollout.prompts.without_tool={PROMPTS.without_tool}", "reward.tool=none"),
    *("video.frame_budgets=[2,4]", "video.overview_frames=4", "video.max_pixels=1024", "pack.row_tokens=512"),
    *("train.prompts_per_step=1", "train.group_size=16", "train.max_resamples=0"),
    *("optim.learning_rate=5e-4", "loss.kl_coef=0.001"),
]
ARMS = {"grpo": ["reward.anchor_weight=0", "reward.unclosed_penalty=0", "video.frame_budgets=[]"], "para_grpo": []}
# 1 for the letter; R_fmt of 0.7 + 0.1 without the anchor, its bound of 1 with it.
MAX_REWARD = {"grpo": 1.8, "para_grpo": 2.0}


def is_right(rewards: list[float], arm: str) -> bool:
    """Whether almost all answers of the last three steps of sixteen episodes are right."""
    return len(rewards) >= 3 and min(rewards[-3:]) > 0.9 * MAX_REWARD[arm]


def learner_of(model, optim, loss) -> Learner:
    return Learner(model, optim, loss, temperature=ROLLOUT.temperature)


@pytest.fixture(scope="module")
def cold_start(tiny_hf):
    """Weights that answer in the right format with any letter, trained by maximum likelihood (an advantage of 1)."""
    chat, contract, frames = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf), FakeFrames()
    model = model_port.load(tiny_hf)
    loss = LossConfig(kl_coef=0.0, correction="none")
    learner = learner_of(model, OptimConfig(learning_rate=3e-3), loss)

    async def episodes(number_of_frames):
        letters = iter("ABCD")

        async def reply(request):
            return chat.encode(f"I look at it.</think><answer>{next(letters)}</answer><|im_end|>").tolist()

        agent = Agent(ScriptedEngine(reply), frames, chat, ROLLOUT)
        overview = await agent.overview(Task("sft", PROMPT.question, PROMPT.videos, number_of_frames))
        return [await agent.run(overview, number) for number in range(4)]

    batches = []
    for number_of_frames in (2, 4):
        played = asyncio.run(episodes(number_of_frames))
        terms = reward_terms([], [], "A", "mcq")  # without effect, because every token has the same advantage
        dialogues = [d for n, e in enumerate(played) for d in dialogues_of(e, n, EpisodeAdvantage(1.0), terms, chat)]
        frames_of_step = {p.key: frame_of(p, contract) for episode in played for p in episode.ledger.pictures}
        batches += pack(dialogues, frames_of_step, model.config, BatchShape(1, 256, 16))
    num_tokens = float(sum(int(batch.loss_mask.sum()) for batch in batches))
    for _ in range(SFT_STEPS):
        learner.update([StepPart(batches, StepCounts(num_tokens, 8.0, num_tokens))], 8)
    return learner.model


@pytest.mark.nightly
@pytest.mark.parametrize("arm", ["grpo", "para_grpo"])
def test_the_policy_learns_the_right_answer(arm, cold_start, tiny_hf):
    config = load_config(None, *COMMON, *ARMS[arm])
    chat, contract = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf)
    copy = LocalCopy(cold_start, None, beside_update=True).of(cold_start)  # updates overwrite it
    learner = learner_of(copy, config.optim, config.loss)
    update = update_of(learner, chat, contract, config)

    async def train() -> list[float]:
        engine = EmbeddedEngine(learner.model, contract, max_rows=16, max_context_tokens=256)
        agent = Agent(engine, FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, SampleOrder([PROMPT], 0), Cursor(), config)
        rewards = []
        try:
            for step in range(1, RL_STEPS + 1):
                groups = await rollouts.next_groups(step)
                rewards.append(group_metrics(groups)["rollout/reward_mean"])
                update.run(groups)
                rollouts.cursor.done([group.sample.number for group in groups])
                await engine.publish(ModelWeights(learner.model, np.dtype(np.float32)), step)
                if is_right(rewards, arm):
                    break
        finally:
            await engine.close()
        return rewards

    rewards = asyncio.run(train())
    assert rewards[0] < 0.8 * MAX_REWARD[arm]  # the untrained policy is not already right
    assert is_right(rewards, arm), rewards
