"""Against the real SGLang server: what it samples is what the learner computes, and killing servers loses nothing."""

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import psutil
import pytest
from agents import ANSWER, FakeFrames, call, is_subagent
from flax import nnx

import model_port
from model_port.processing import VisionContract
from model_port.tiny import make_tiny
from paravt_jax.sampling.score import LearnerScorer
from paravt_jax.sampling.weights import ModelWeights
from rollout import check as gate
from rollout.chat import Chat
from rollout.check import ScoreRequest, check
from rollout.engine.protocol import Request, Sampling
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.episode import Agent, EpisodeConfig, Task
from rollout.server import Server, ServerSettings

pytestmark = pytest.mark.slow
FLOAT32 = np.dtype(np.float32)
CONFIG = EpisodeConfig(max_new_tokens=48, subagent_new_tokens=48, max_context_tokens=4096)
SMALL = dict(context_length=4096, max_total_tokens=16_384)
BOUND = gate.BOUNDS["float32"].max


@pytest.fixture(scope="module")
def chat(tiny_hf):
    return Chat.from_hf(tiny_hf)


@pytest.fixture(scope="module")
def contract(tiny_hf):
    return VisionContract.from_hf(tiny_hf)


@pytest.fixture(scope="module")
def model(tiny_hf):
    return model_port.load(tiny_hf)


@pytest.fixture(scope="module")
def new_vision(tmp_path_factory):
    """A model with other weights throughout."""
    directory = tmp_path_factory.mktemp("other") / "hf"
    make_tiny(directory, seed=1)
    return model_port.load(directory)


@pytest.fixture(scope="module")
def other(model, new_vision):
    """A model with other language weights, as training with a frozen vision tower makes them."""
    merged = nnx.clone(new_vision)
    merged.vision = nnx.clone(model.vision)
    return merged


@pytest.fixture(scope="module")
def second(sglang_python, tiny_hf):
    """A server for a vision tower that trains: it does not remember pictures."""
    settings = ServerSettings(tiny_hf, python=sglang_python, trainable_vision=True, **SMALL)
    server = asyncio.run(Server.start(settings, deadline_s=180))
    yield server
    asyncio.run(server.stop(20))


class Guided:
    """Lets the real engine answer everything, and then puts the calls of a script into the main agent's mouth.

    A random model calls no tool by itself; this way sub-agents and long dialogues run on the real server all the same.
    """

    def __init__(self, engine: SGLangEngine, chat: Chat, turns: list[str]):
        self.engine, self.chat, self.turns = engine, chat, turns
        self.requests: list[Request] = []
        self.answered: Counter[tuple[str, int]] = Counter()

    async def generate(self, request: Request):
        self.requests.append(request)
        found = await self.engine.generate(request)
        self.answered[request.episode, len(request.ids)] += 1
        if is_subagent(self.chat, request):
            return found
        number = self.chat.decode(request.ids).count("<tool_response>\n") and 1
        ids = self.chat.encode(self.turns[number])
        return replace(
            found,
            ids=ids,
            behavior_logp=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish="stop",
        )


TURNS = [f"Look.</think>{call(3, 9)}{call(20, 34)}{call(50, 60)}<|im_end|>", ANSWER]


def on(server, work, **settings):
    async def body():
        engine = await SGLangEngine.connect([server.url], SGLangSettings(device="cpu", **settings))
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(body())


def play(engine, chat, frames, num_episodes, deadline_s=120):
    agent = Agent(engine, frames, chat, replace(CONFIG, turn_deadline_s=deadline_s, call_deadline_s=deadline_s))

    async def run():
        overview = await agent.look(Task("t", "What is it?", ("/a.mp4",), 4))
        return await asyncio.gather(*(agent.run(overview, number) for number in range(num_episodes)))

    return run()


def test_servers_and_learner_agree_on_every_size_of_picture(server, model, contract, chat):
    (found,) = asyncio.run(check([server.url], LearnerScorer(model, contract), chat))
    assert found.problems == []
    assert len(set(LearnerScorer(model, contract).settled(gate.VIDEO_SIZES_PX))) >= 6
    assert {kind: d.num_tokens > 20 for kind, d in found.differences.items()} == dict.fromkeys(gate.KINDS, True)


def test_the_gate_notices_other_weights_and_other_pictures(server, model, other, contract, chat):
    class Blurred(LearnerScorer):
        def score(self, requests):
            shifted = [
                ScoreRequest(r.ids, tuple(p.of(np.roll(p.pixels, 1, axis=1)) for p in r.pictures), r.temperature)
                for r in requests
            ]
            return super().score(shifted)

    for scorer in (LearnerScorer(other, contract), Blurred(model, contract)):
        (found,) = asyncio.run(check([server.url], scorer, chat, num_episodes=1))
        assert any("log-probs of 'dialogue' tokens differ" in problem for problem in found.problems)


def test_sixteen_episodes_with_sub_agents_at_once_are_exactly_what_the_server_saw(server, chat):
    async def work(engine):
        guided = Guided(engine, chat, TURNS)
        return guided, await play(guided, chat, FakeFrames(size_px=(64, 96)), 16)

    guided, episodes = on(server, work)
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == 16 * 5
    for episode in episodes:
        assert episode.ledger.num_sampled > 0
        for ledger in episode.ledgers:
            assert any(np.array_equal(r.ids, ledger.ids[: len(r.ids)]) for r in guided.requests)
    cached = sum(episode.num_cached_tokens for episode in episodes)
    assert cached > 0.5 * sum(episode.num_prompt_tokens for episode in episodes)  # the group shares its prompts


def sampled_against_learner(engine, chat, model, contract) -> asyncio.Future:
    """The largest difference between the log-probs of fresh samples and the learner's."""

    async def run():
        frames = FakeFrames(size_px=(64, 96))
        episodes = await play(engine, chat, frames, 4)
        scorer, worst = LearnerScorer(model, contract), 0.0
        for ledger in itertools.chain.from_iterable(episode.ledgers for episode in episodes):
            if any(not chat.visual_ids.isdisjoint(segment.ids.tolist()) for segment in ledger.sampled):
                continue
            (ours,) = scorer.score([ScoreRequest(ledger.ids, ledger.pictures, CONFIG.temperature)])
            difference = ours.logp[gate.sampled_positions(ledger, chat)] - ledger.behavior_logp[ledger.sampled_mask]
            worst = max(worst, float(np.abs(difference).max()))
        return worst, episodes

    return run()


@pytest.mark.parametrize("route", ["disk", "tensors"])
def test_after_publishing_the_server_samples_from_the_learners_weights(route, server, model, other, contract, chat):
    async def work(engine):
        begin = engine.version
        before, _ = await sampled_against_learner(engine, chat, other, contract)
        await engine.publish(ModelWeights(other, FLOAT32), begin + 1)
        worst, episodes = await sampled_against_learner(engine, chat, other, contract)
        assert {v for e in episodes for v in e.ledger.versions} == {begin + 1}
        await engine.publish(ModelWeights(model, FLOAT32), begin + 2)
        back, _ = await sampled_against_learner(engine, chat, model, contract)
        return before, worst, back

    before, worst, back = on(server, work, route=route)
    assert before > 100 * BOUND  # the two models can be told apart
    assert worst < BOUND
    assert back < BOUND


def test_a_vision_tower_that_trains_needs_a_server_that_does_not_remember_pictures(
    server, second, model, new_vision, contract, chat
):
    async def work(engine):
        await sampled_against_learner(engine, chat, model, contract)  # shows the pictures
        await engine.publish(ModelWeights(new_vision, FLOAT32), engine.version + 1)
        worst, _ = await sampled_against_learner(engine, chat, new_vision, contract)
        await engine.publish(ModelWeights(model, FLOAT32), engine.version + 1)
        return worst

    assert on(second, work) < BOUND
    assert on(server, work) > BOUND  # if this fails, SGLang has learnt to forget, and the rule can go


def long_request(chat, episode, num_tokens=2000) -> Request:
    ids = chat.prompt([{"role": "user", "content": "Tell me everything."}])
    return Request(ids, (), Sampling(num_tokens, temperature=1.0), episode, 120)


def test_tokens_before_and_after_a_publish_in_the_middle_have_their_own_versions(server, model, other, chat):
    async def work(engine):
        begin = engine.version
        task = asyncio.create_task(engine.generate(long_request(chat, "e")))
        await asyncio.sleep(1.0)
        await engine.publish(ModelWeights(other, FLOAT32), begin + 1)
        await asyncio.sleep(1.0)
        await engine.abort("e")
        found = await task
        await engine.publish(ModelWeights(model, FLOAT32), begin + 2)
        return begin, found

    begin, found = on(server, work)
    assert sorted(set(found.versions.tolist())) == [begin, begin + 1]
    assert (np.diff(found.versions) >= 0).all()
    assert found.finish == "abort"


def test_abort_ends_one_episode_and_leaves_the_others(server, chat):
    async def work(engine):
        kept = asyncio.create_task(engine.generate(long_request(chat, "kept", 400)))
        ended = asyncio.create_task(engine.generate(long_request(chat, "ended")))
        await asyncio.sleep(0.7)
        await engine.abort("ended")
        return await ended, await kept

    ended, kept = on(server, work)
    assert (ended.finish, kept.finish) == ("abort", "length")
    assert 0 < len(ended.ids) < 2000
    assert len(kept.ids) == 400


def scheduler_of(server) -> psutil.Process:
    """The process that computes."""
    return max(psutil.Process(server.pid).children(recursive=True), key=lambda process: process.memory_info().rss)


def test_a_server_killed_in_the_middle_loses_and_doubles_no_episode_and_comes_back_with_the_weights(
    sglang_python, tiny_hf, other, contract, chat
):
    settings = ServerSettings(tiny_hf, python=sglang_python, **SMALL)

    async def body():
        engine = await SGLangEngine.launch([settings, settings], SGLangSettings(probe_every_s=1))
        try:
            await engine.publish(ModelWeights(other, FLOAT32), 1)
            guided = Guided(engine, chat, TURNS)
            playing = asyncio.create_task(play(guided, chat, FakeFrames(size_px=(64, 96)), 16))
            while sum(guided.answered.values()) < 8:
                await asyncio.sleep(0.01)
            victim = engine._servers[0]
            os.kill(scheduler_of(victim.managed).pid, signal.SIGKILL)
            episodes = await playing
            async with asyncio.timeout(150):
                while not (victim.up and victim.num_restarts == 1):
                    await asyncio.sleep(0.1)
            worst, _ = await sampled_against_learner(engine, chat, other, contract)
            health = await engine.health()
            return guided, episodes, worst, health
        finally:
            await engine.close()

    guided, episodes, worst, health = asyncio.run(body())
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == sum(guided.answered.values()) == 16 * 5
    assert [(server.alive, server.version) for server in health.servers] == [(True, 1)] * 2
    assert worst < BOUND


def test_a_stopped_server_is_ejected_and_comes_back_with_the_weights(server, second, model, other, chat):
    settings = SGLangSettings(probe_every_s=0.5, probe_deadline_s=4, control_deadline_s=5)

    async def body():
        engine = await SGLangEngine.connect([second.url, server.url], settings)
        try:
            async with asyncio.timeout(30):
                while not all(one.up for one in engine._servers):
                    if any("another server" in one.problem for one in engine._servers):
                        await engine.publish(ModelWeights(model, FLOAT32), engine.version + 1)
                    await asyncio.sleep(0.1)
            guided = Guided(engine, chat, TURNS)
            playing = asyncio.create_task(play(guided, chat, FakeFrames(size_px=(64, 96)), 16))
            while sum(guided.answered.values()) < 8:
                await asyncio.sleep(0.01)
            os.killpg(second.pid, signal.SIGSTOP)
            try:
                started_s = time.monotonic()
                episodes = await playing
                lasted_s = time.monotonic() - started_s
                await engine.publish(ModelWeights(other, FLOAT32), engine.version + 1)
            finally:
                os.killpg(second.pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                while not engine._servers[0].up:
                    await asyncio.sleep(0.1)
            versions = [one.version for one in engine._servers]
            await engine.publish(ModelWeights(model, FLOAT32), engine.version + 1)
            return guided, episodes, lasted_s, versions, engine.version
        finally:
            await engine.close()

    guided, episodes, lasted_s, versions, version = asyncio.run(body())
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == sum(guided.answered.values()) == 16 * 5
    assert lasted_s < 60
    assert versions == [version - 1] * 2
