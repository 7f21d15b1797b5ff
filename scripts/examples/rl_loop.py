"""PARA-GRPO from its parts, on a tiny model, in two minutes on a laptop:   python scripts/examples/rl_loop.py

`paravt_jax.train` runs the same method with servers, checkpoints, resume and logs. Read this file first.
"""

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import model_port
from model_port.processing import VisionContract
from model_port.tiny import make_tiny
from paravt_jax.config import VideoConfig
from paravt_jax.data.prompts import Prompt, load_prompts
from paravt_jax.data.synthetic import make_synthetic
from paravt_jax.learner.advantages import group_advantages, group_rewards
from paravt_jax.learner.credit import dialogues_of
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import BatchShape, pack
from paravt_jax.learner.settings import AdvantageConfig, LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.rewards import RewardConfig, reward_terms
from paravt_jax.sampling.embedded import EmbeddedEngine
from paravt_jax.sampling.engines import frame_reader
from paravt_jax.sampling.frames import frame_of
from paravt_jax.sampling.weights import ModelWeights
from rollout.chat import Chat
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.records import Episode

STEPS, PROMPTS_PER_STEP, GROUP_SIZE, FRAME_BUDGETS = 2, 2, 4, (3, 4)
REWARD, ADVANTAGE = RewardConfig(), AdvantageConfig(filter_zero_variance=False)
EPISODE = EpisodeConfig(max_new_tokens=16, max_context_tokens=2048, max_turns=2)


async def main(directory: Path) -> None:
    make_tiny(directory / "model")
    prompts = load_prompts(str(make_synthetic(directory / "data")), video_root="", max_bad_frac=0.0).prompts
    chat = Chat.from_hf(directory / "model")
    contract = replace(VisionContract.from_hf(directory / "model"), min_pixels=784, max_pixels=6144)
    policy = model_port.load(directory / "model")
    learner = Learner(policy, OptimConfig(), LossConfig(), temperature=EPISODE.temperature)
    engine = EmbeddedEngine(policy, contract, max_rows=8, max_context_tokens=EPISODE.max_context_tokens)
    async with frame_reader(VideoConfig(num_workers=1), contract) as frames:
        agent = Agent(engine, frames, chat, EPISODE)
        for step in range(STEPS):
            chosen = random.Random(step).sample(prompts, PROMPTS_PER_STEP)
            groups = [await sample_group(agent, prompt, step) for prompt in chosen]
            metrics = update(learner, chat, contract, chosen, groups)
            await engine.publish(ModelWeights(learner.model, np.dtype(np.float32)), step + 1)
            print(f"step {step + 1}: " + ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
    await engine.close()


async def sample_group(agent: Agent, prompt: Prompt, step: int) -> list[Episode]:
    """Samples GROUP_SIZE episodes that share an overview; its number of frames is random per prompt."""
    budget = random.Random(f"{step} {prompt.id}").choice(FRAME_BUDGETS)
    overview = await agent.overview(Task(f"{step}-{prompt.id}", prompt.question, prompt.videos, budget))
    return list(await asyncio.gather(*(agent.run(overview, number, seed=step) for number in range(GROUP_SIZE))))


def update(learner: Learner, chat: Chat, contract: VisionContract, prompts, groups) -> dict[str, float]:
    """Scores the episodes, turns rewards into one advantage per token, packs the tokens and updates the weights."""
    dialogues, rewards = [], []
    for first, (prompt, episodes) in enumerate(zip(prompts, groups, strict=True)):
        terms = [
            reward_terms([turn.text for turn in e.turns], e.outcomes, prompt.answer, prompt.question_type, REWARD)
            for e in episodes
        ]
        rewards += [each.total for each in terms]
        scale = REWARD.anchor_weight * REWARD.format_weight
        advantages = group_advantages(group_rewards(terms, anchor_scale=scale, config=ADVANTAGE), ADVANTAGE)
        for number, episode in enumerate(episodes):
            index = first * GROUP_SIZE + number
            dialogues += dialogues_of(episode, index, advantages.of(number), terms[number], chat)
    pictures = {picture.key: picture for episodes in groups for e in episodes for picture in e.ledger.pictures}
    frames = {key: frame_of(picture, contract) for key, picture in pictures.items()}
    batches = pack(dialogues, frames, learner.model.config, BatchShape(num_rows=2, row_tokens=1024, row_patches=64))
    num_tokens = float(sum(dialogue.loss_mask.sum() for dialogue in dialogues))
    counts = StepCounts(num_tokens, float(len(dialogues)), float(len(dialogues) * EPISODE.max_new_tokens))
    metrics = learner.update([StepPart(batches, counts)], num_dialogues=len(dialogues))
    names = ("loss/policy", "loss/kl_ref", "mismatch/behavior_kl", "optim/grad_norm")
    return {"reward": float(np.mean(rewards)), **{name: metrics[name] for name in names}}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
