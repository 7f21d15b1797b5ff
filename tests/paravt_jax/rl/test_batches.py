"""Groups become an update: who counts, with which advantage, over how many tokens."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from agents import FakeFrames
from training import rollouts_of, update_of

import model_port
from model_port.processing import VisionContract
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.visits import Cursor, Visits
from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.learner import Learner
from rollout.chat import Chat
from rollout.engine.protocol import EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(2)]
COMMON = [
    "model.dtype=float32",
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.max_resamples=0",
    "video.gating=false",
    "video.overview_frames=3",
    "rollout.max_context_tokens=2048",
    "pack.row_tokens=2048",
    "loss.behavior_correction=none",
]


def half_right(episode):
    letter, much = ("A", 1) if int(episode[-1]) % 2 else ("B", 3)
    return f"{'I have looked. ' * much}</think><answer>{letter}</answer><|im_end|>"


def taught(tiny_hf, *overrides, say=half_right, steps=1):
    """The learner and the metrics of every step."""
    config = load_config(None, *COMMON, *overrides)
    chat, contract = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf)
    learner = Learner(model_port.load(tiny_hf), config.optim, config.loss, temperature=0.7)
    update = update_of(learner, chat, contract, config)

    async def reply(request):
        return chat.encode(say(request.episode)).tolist()

    async def work():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, Visits(PROMPTS, 0), Cursor(), config)
        return [update.run(await rollouts.take(step), geometric_mask=False) for step in range(1, steps + 1)]

    return learner, asyncio.run(work())


def num_sampled(tiny_hf, episodes=range(8)):
    chat = Chat.from_hf(tiny_hf)
    return sum(len(chat.encode(half_right(str(number)))) for number in episodes)


@pytest.mark.slow
def test_every_sampled_token_counts_once_and_the_missing_do_not(tiny_hf):
    _, (metrics,) = taught(tiny_hf)
    assert metrics["loss/num_tokens"] == num_sampled(tiny_hf)
    assert set(metrics) >= {f"mismatch/behavior_kl_{name}" for name in CLASSES}

    def one_lost(episode):
        if episode.endswith("/2"):
            raise EngineError("gone")
        return half_right(episode)

    _, (metrics,) = taught(tiny_hf, say=one_lost)
    assert metrics["loss/num_tokens"] == num_sampled(tiny_hf) - 2 * num_sampled(tiny_hf, [2])


@pytest.mark.slow
def test_a_step_without_spread_moves_the_version_and_nothing_else(tiny_hf):
    learner, found = taught(tiny_hf, "train.updates_per_step=2", say=lambda episode: half_right("1"), steps=2)
    assert int(learner.state.step) == 4
    assert all("loss/policy" not in metrics for metrics in found)
    untouched = model_port.load(tiny_hf)
    before, after = (np.asarray(model.text.embed.table_vd[...]) for model in (untouched, learner.model))
    assert np.array_equal(before, after)


@pytest.mark.slow
def test_batch_normalisation_gives_the_advantages_of_a_step_mean_0(tiny_hf):
    """Wrong answers are three times as long here, so without it the mean over tokens is far below 0."""
    plain, normal = (
        taught(tiny_hf, "reward.anchor_weight=0", "loss.kl_coef=0", f"advantage.batch_normalise={on}")[1][0][
            "loss/policy"
        ]
        for on in ("false", "true")
    )
    assert plain > 0.2  # the loss of the first update is minus the mean advantage
    assert normal == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_kl_in_the_reward_changes_the_second_step_and_not_the_first(tiny_hf):
    common = ("advantage.normalise=none", "optim.learning_rate=1e-3")  # two kinds of episodes are ±1 whatever they earn
    in_reward = taught(tiny_hf, *common, "loss.kl_coef=1", "loss.kl_in=reward", steps=2)[1]
    nowhere = taught(tiny_hf, *common, "loss.kl_coef=0", steps=2)[1]
    assert in_reward[0]["loss/policy"] == pytest.approx(nowhere[0]["loss/policy"], abs=1e-6)
    assert in_reward[1]["loss/policy"] != pytest.approx(nowhere[1]["loss/policy"], abs=1e-3)
    assert in_reward[1]["loss/kl_ref"] > 0


@pytest.mark.slow
def test_a_constant_denominator_does_not_depend_on_the_lengths(tiny_hf):
    tokens, constant = (
        taught(tiny_hf, "loss.kl_coef=0", "rollout.max_new_tokens=64", f"loss.denominator={kind}")[1][0]["loss/policy"]
        for kind in ("tokens", "constant")
    )
    turns = load_config(None).rollout.tool_turns + 1
    assert constant == pytest.approx(tokens * num_sampled(tiny_hf) / (8 * 64 * turns), rel=1e-4)


def test_pixels_may_be_bounded_otherwise_than_the_model_says(tiny_hf, tmp_path):
    from model_port.hf_files import read_side_files, with_pixel_bounds, write_side_files

    contract = VisionContract.from_hf(tiny_hf)
    files = with_pixel_bounds(read_side_files(tiny_hf), 1024, 2048)
    write_side_files(files, tmp_path)
    bounded = replace(contract, min_pixels=1024, max_pixels=2048)
    assert VisionContract.from_hf(tmp_path) == bounded
    assert VisionContract.from_hf(tiny_hf) == contract
