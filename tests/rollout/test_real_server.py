"""The real SGLang server agrees with the learner, loses no episode when killed, and leaves nothing behind.

A start takes at least ten seconds, so all tests except nightly ones share one server, which the last test stops.
"""

import asyncio
import base64
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosts as several
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from agents import ANSWER, FakeFrames, call, is_subagent
from async_tests import async_test, make_test, until
from flax import nnx
from on_use import pil_processing
from PIL import Image
from processes import Served, all_gone, ended, family, serve, served, start
from published import VIDEOS, make_copy
from tokenizers import Tokenizer
from training import QUICK, SMOKE, arguments, episodes_of, metrics_of
from wide_model import make_wide, with_layer_of

import model_port
from model_port import one_sequence
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, base_checksum, new_adapter
from model_port.config import LoraConfig
from model_port.inputs import NOT_REPLAYED
from model_port.model import VLModel
from model_port.processing import VisionContract
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.check import round_trip
from paravt_jax.check.target import Target
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.data.splits import SPLITS
from paravt_jax.eval import run_eval
from paravt_jax.sampling.score import LearnerScorer
from paravt_jax.sampling.weights import AdapterWeights, ModelWeights
from paravt_jax.train import train
from rollout import check as gate
from rollout.chat import Chat
from rollout.check import check
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import EndpointError
from rollout.engine.fleet import Fleet
from rollout.engine.protocol import EngineError, Request, Sampling
from rollout.engine.publishing import WeightFiles
from rollout.engine.settings import Mixture, ServerState
from rollout.engine.sglang import SGLangEngine, SGLangSettings
from rollout.engine.weight_root import WEIGHTS_PREFIX
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.parity import KINDS, SHOWN, ScoreRequest
from rollout.prompter import Task
from rollout.records import Episode
from rollout.server import Server, ServerFailed, ServerSettings, sidecar_python
from rollout.video.encode import write_video

CONFIGS = Path(__file__).parents[2] / "configs"
pytestmark = pytest.mark.slow
FLOAT32 = np.dtype(np.float32)
RUN = "tests-1"  # the run that owns the servers
CONFIG = EpisodeConfig(max_new_tokens=48, subagent_new_tokens=48, max_context_tokens=4096, turn_deadline_s=120)
RECIPE_SIZES = ((224, 224), (160, 288), (192, 256), (32, 1024), (32, 32))
PUBLISHED_BOUNDS = dict(min_pixels=65_536, max_pixels=16_777_216)
BFLOAT16 = ("--dtype", "bfloat16")
START_DEADLINE_S = 180  # it takes 20 s on an idle machine
# Routes related requests to one server, as our engine does, and soon detects a dead server.
ROUTING = ("--policy", "manual", "--assignment-mode", "min_load", "--health-check-interval-secs", "5")
BOUND = 1e-4  # nats, in float32 with the logits of the tiny model


@pytest.fixture(scope="module")
def contract(tiny_hf):
    return VisionContract.from_hf(tiny_hf)


@pytest.fixture(scope="module")
def model(tiny_hf):
    return model_port.load(tiny_hf)


@pytest.fixture(scope="module")
def new_vision(tmp_path_factory):
    """A model in which all weights differ."""
    directory = tmp_path_factory.mktemp("other") / "hf"
    make_tiny(directory, seed=1)
    return model_port.load(directory)


@pytest.fixture(scope="module")
def other(model, new_vision):
    """A model with other language weights, as after training with a frozen vision tower."""
    merged = nnx.clone(new_vision)
    merged.vision = nnx.clone(model.vision)
    return merged


@pytest.fixture(scope="module")
def sglang_python() -> Path:
    try:
        return sidecar_python()
    except RuntimeError as problem:  # the skip message names the command to run
        pytest.fail(str(problem))


@pytest.fixture(scope="module")
def tiny_hf_published(tmp_path_factory) -> Path:
    """The same weights with the published pixel bounds, which enlarge every frame of the recipe."""
    directory = tmp_path_factory.mktemp("hf") / "tiny"
    make_tiny(directory, **PUBLISHED_BOUNDS)
    return directory


@pytest.fixture(scope="module")
def qwen25_hf(tmp_path_factory) -> Path:
    """A Qwen2.5-VL whose processor files also enlarge frames."""
    directory = tmp_path_factory.mktemp("hf") / "qwen25"
    make_tiny(directory, config=tiny_config("qwen2_5_vl"), **PUBLISHED_BOUNDS)
    return directory


@pytest.fixture(scope="module")
def server(sglang_python, tiny_hf_published):
    """A server with the weights of `tiny_hf`; every test must restore them and leave no request running."""
    with served(ServerSettings(tiny_hf_published, python=sglang_python)) as started:
        yield started


@pytest.fixture(scope="module")
def second(sglang_python, tiny_hf):
    """A server for training the vision tower, without an image cache."""
    with served(ServerSettings(tiny_hf, python=sglang_python), "--trainable-vision") as started:
        yield started


@pytest.fixture(scope="module")
def qwen25_server(sglang_python, qwen25_hf):
    """A server of Qwen2.5-VL for training the vision tower."""
    with served(ServerSettings(qwen25_hf, python=sglang_python), "--trainable-vision") as started:
        yield started


@pytest.fixture(scope="module")
def routed(server, second, tmp_path_factory):
    """The real sglang-router before both servers."""
    pytest.importorskip("sglang_router", reason="sglang-router is not installed; bash scripts/setup.sh dev does that")
    port, of_metrics = several.free_port(), several.free_port()
    command = [sys.executable, "-m", "sglang_router", "launch", "--worker-urls", server.url, second.url, *ROUTING]
    command += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", of_metrics]
    with (tmp_path_factory.mktemp("router") / "log").open("w") as log:
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        process.kill()
        process.wait()


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the JSON response; posts `body` if given."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture
def router(routed, model):
    """The router with both servers registered and their weights and labels equal."""

    async def ready(engine):
        await all_up(engine, model)

    give_up_s, num_behind = time.monotonic() + START_DEADLINE_S, 0
    while num_behind < 2:
        assert time.monotonic() < give_up_s and routed.process.poll() is None
        time.sleep(0.1)
        with suppress(OSError):
            num_behind = fetch(f"{routed.url}/workers")["total"]
    on(routed, ready, probe_every_s=0.5)
    return routed


@pytest.fixture(params=["server", pytest.param("router", marks=pytest.mark.nightly)])
def front(request):
    """A URL for a run: a server, or an sglang-router with two servers."""
    return request.getfixturevalue(request.param)


def generate(url, model, height, width):
    """Samples one token after a picture. Returns the response's meta_info."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode("system<|vision_start|><|image_pad|><|vision_end|>user").ids
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
    body = {
        "input_ids": ids,
        "image_data": [base64.b64encode(buffer.getvalue()).decode()],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
    }
    return fetch(f"{url}/generate", body)["meta_info"], len(ids)


class Guided:
    """Samples every request with the real engine, then replaces the main agent's turns by scripted calls.

    A random model calls no tools, so this gives sub-agents and long dialogues on the real server.
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
        zeros = dict(behavior_logp=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), np.int32))
        return replace(found, ids=ids, finish="stop", **zeros)


TURNS = [f"Look.</think>{call(3, 9)}{call(20, 34)}{call(50, 60)}<|im_end|>", ANSWER]


def on(server, work, *others, **settings):
    """Runs `work` with an engine of one or more servers."""

    async def body():
        urls = [each.url for each in (server, *others)]
        engine = await SGLangEngine.connect(urls, SGLangSettings(RUN, **settings))
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(body())


def on_front(work):
    """Makes a test whose first argument is an engine of `front`; the others are fixtures."""
    return make_test(work, 1, lambda work, front: on(front, work))


async def publish(engine: SGLangEngine, model: VLModel) -> None:
    await engine.publish(ModelWeights(model, FLOAT32), engine.version + 1)


def take_back(server: Served, model: VLModel) -> None:
    """Takes a server over from a run with another name."""
    on(server, lambda engine: engine.publish(ModelWeights(model, FLOAT32), 8), take_over=True)


async def play(engine, chat, frames, num_episodes) -> list[Episode]:
    agent = Agent(engine, frames, chat, CONFIG)
    overview = await agent.overview(Task("t", "What is it?", ("/a.mp4",), 4))
    return await asyncio.gather(*(agent.run(overview, number) for number in range(num_episodes)))


def test_images_keep_their_size_with_the_published_bounds(server, tiny_hf_published):
    processor = pil_processing.Qwen2VLImageProcessorPil.from_pretrained(tiny_hf_published)
    for height, width in RECIPE_SIZES:
        answer, num_ids = generate(server.url, tiny_hf_published, height, width)
        assert answer["prompt_tokens"] == num_ids - 1 + (height // 32) * (width // 32)
        enlarged = processor(images=[np.zeros((height, width, 3), np.uint8)])["image_grid_thw"][0]
        assert enlarged.prod() // 4 > (height // 32) * (width // 32)  # the size that the model's files request
    with pytest.raises(urllib.error.HTTPError):  # the patches do not divide it: an error, not a resize
        generate(server.url, tiny_hf_published, 100, 90)
    answer, _ = generate(server.url, tiny_hf_published, 64, 64)
    assert answer["completion_tokens"] == 1  # the server survives this error


def test_the_gate_detects_other_weights_and_pictures(server, model, other, contract, chat):
    class OneSize(LearnerScorer):
        def settled(self, sizes_px):
            return super().settled(sizes_px)[-1:]

    class Blurred(OneSize):
        def score(self, requests):
            shifted = [
                ScoreRequest(r.ids, tuple(p.of(np.roll(p.pixels, 1, axis=1)) for p in r.pictures), r.temperature)
                for r in requests
            ]
            return super().score(shifted)

    for scorer in (OneSize(other, contract), Blurred(model, contract)):
        (found,) = asyncio.run(check([server.url], scorer, chat, num_episodes=1))
        assert any("log-probs of 'dialogue' tokens differ" in problem for problem in found.problems)


@pytest.mark.nightly
def test_the_check_compares_a_server_with_the_model(server, tiny_hf_published, tmp_path):
    fetch(f"{server.url}/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    lines = list(round_trip.round_trip(Target(str(tmp_path), str(tiny_hf_published), server=server.url)))
    by_case = {line.case: line.value for line in lines}
    assert by_case["16 greedy ids = SGLang's"] == "16 of 16" and "tokens" in str(by_case["parity gate"])
    assert not [line for line in lines if line.failed or line.skipped]


@pytest.mark.nightly
def test_servers_and_learner_agree_on_picture_sizes(server, model, contract, chat):
    scorer = LearnerScorer(model, contract)
    (found,) = asyncio.run(check([server.url], scorer, chat))
    assert found.problems == []
    assert len(set(scorer.settled(gate.VIDEO_SIZES_PX))) >= 6
    assert {name for name, d in found.differences.items() if d.num_tokens > 20} == {*KINDS, SHOWN}


class TwoSizes(LearnerScorer):
    def settled(self, sizes_px):
        return super().settled(sizes_px)[-2:]


class AnotherShown(TwoSizes):
    """Gives the learner another picture in the tool response than the server."""

    def score(self, requests):
        return super().score([self.first_shown(request) for request in requests])

    def first_shown(self, request):
        """Changes only responses; prompts and the gate's own wrong dialogue, with a repeated picture, stay."""
        pictures = request.pictures
        has_response = len(pictures) > gate.FRAME_BUDGET and pictures[-1] is not pictures[-2]
        return replace(request, pictures=(*pictures[:-1], pictures[0])) if has_response else request


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_mixture_of_experts_agrees_with_the_learner_also_after_a_publish(sglang_python, tmp_path):
    """Publishes all weights, then an adapter, which the server merges into its weights."""
    models = []
    for seed in range(2):
        make_tiny(tmp_path / str(seed), seed, tiny_config("qwen3_vl_moe"))
        models.append(model_port.load(tmp_path / str(seed)))
    before, after = models
    after.vision = nnx.clone(before.vision)  # as with a frozen vision tower
    contract, chat = VisionContract.from_hf(tmp_path / "0"), Chat.from_hf(tmp_path / "0")

    async def problems(url, model):
        (found,) = await check([url], LearnerScorer(model, contract), chat, num_episodes=1)
        return found.problems

    async def work(engine):
        url = engine.fleet.servers[0].url
        assert await problems(url, before) == []
        await publish(engine, after)
        assert await problems(url, after) == [] != await problems(url, before)
        adapter = adapter_of(before, tmp_path / "0", 1)
        await engine.publish(adapter, engine.version + 1)
        assert await problems(url, adapter.model) == [] != await problems(url, before)

    with served(ServerSettings(tmp_path / "0", python=sglang_python)) as server:
        on(server, work)


@pytest.mark.nightly
@pytest.mark.parametrize("computed_in", ["float32", "bfloat16"])
def test_replaying_experts_reduces_the_kl_to_a_bfloat16_server(computed_in, sglang_python, tmp_path):
    """If two experts score nearly equal, rounding decides which expert a token gets."""
    make_tiny(tmp_path / "hf", config=tiny_config("qwen3_vl_moe"))
    model, prompt = model_port.load(tmp_path / "hf", computed_in), np.arange(100, 124, dtype=np.int32)
    text = model.config.text
    mixture = Mixture(text.num_layers, text.num_experts, text.token_experts)

    async def sampled(engine):
        sampling = Sampling(96, temperature=1.0, stop_ids=(model.config.image_token_id, model.config.video_token_id))
        requests = [Request(prompt + n, (), sampling, str(n), 300.0) for n in range(12)]
        return [(request.ids, await engine.generate(request)) for request in requests]

    def kl(pairs, *, replays):
        """Returns the behavior KL of the sampled tokens."""
        terms = []
        for prompt, generation in pairs:
            ids = np.concatenate([prompt, generation.ids[:-1]])
            batch, _ = one_sequence(model.config, ids)
            experts = np.array(batch.experts)
            experts[0, : len(ids)] = generation.experts if replays else NOT_REPLAYED
            logits = model(replace(batch, experts=jnp.asarray(experts)))[0, len(prompt) - 1 : len(ids)]
            logp = jax.nn.log_softmax(logits.astype(jnp.float32))[np.arange(len(generation.ids)), generation.ids]
            change = np.asarray(logp) - generation.behavior_logp
            terms.append(np.expm1(change) - change)
        return float(np.concatenate(terms).mean())

    with served(ServerSettings(tmp_path / "hf", python=sglang_python), *BFLOAT16) as server:
        pairs = on(server, sampled, mixture=mixture)
        assert all(len(generation.experts) == len(prompt) + len(generation.ids) - 1 for _, generation in pairs)
        assert kl(pairs, replays=True) < kl(pairs, replays=False) / 4


@pytest.mark.nightly
def test_a_correct_bfloat16_server_is_accepted_and_another_picture_or_layer_rejected(sglang_python, tmp_path):
    """The logits are as wide as a trained model's, and the learner has float32 masters as in training."""
    right, contract = make_wide(tmp_path / "right"), VisionContract.from_hf(tmp_path / "right")
    model, another = model_port.load(right), model_port.load(make_wide(tmp_path / "other", seed=1))
    model.compute = replace(model.compute, dtype="bfloat16")

    async def judged(url, kind=TwoSizes):
        (found,) = await check([url], kind(model, contract), Chat.from_hf(right), num_episodes=8)
        return found

    async def work(engine):
        url = engine.fleet.servers[0].url
        before, another_shown = await judged(url), await judged(url, AnotherShown)
        weights = ModelWeights(with_layer_of(model, another), np.dtype("bfloat16"))
        await engine.publish(weights, engine.version + 1)
        return before, another_shown, await judged(url)

    with served(ServerSettings(right, python=sglang_python), *BFLOAT16) as server:
        before, another_shown, after = on(server, work)
    (shown,) = before.differences[SHOWN].statistics
    assert before.problems == [] and abs(shown.server) < shown.allowed / 2
    assert any(f"'{SHOWN}' tokens differ" in problem for problem in another_shown.problems)
    assert np.abs(before.differences["dialogue"].offsets[0]).mean() > 0.04  # nats, from bfloat16 rounding only
    assert any("log-probs of 'dialogue' tokens differ" in problem for problem in after.problems)


@on_front
async def test_sixteen_concurrent_episodes_record_exactly_what_the_server_sampled(engine, chat):
    guided = Guided(engine, chat, TURNS)
    episodes = await play(guided, chat, FakeFrames(size_px=(64, 96)), 16)
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == 16 * 5
    for episode in episodes:
        assert episode.ledger.num_sampled > 0
        for ledger in episode.ledgers:
            assert any(np.array_equal(r.ids, ledger.ids[: len(r.ids)]) for r in guided.requests)
    cached = sum(episode.num_cached_tokens for episode in episodes)
    assert cached > 0.5 * sum(episode.num_prompt_tokens for episode in episodes)  # the group shares its prompts


async def sampled_against_learner(engine, chat, model, contract) -> tuple[float, list[Episode]]:
    """Returns the largest difference between the server's log-probs of new samples and the learner's."""
    frames = FakeFrames(size_px=(2 * chat.token_px, 3 * chat.token_px))
    episodes = await play(engine, chat, frames, 4)
    scorer, worst = LearnerScorer(model, contract), 0.0
    for ledger in itertools.chain.from_iterable(episode.ledgers for episode in episodes):
        if any(not chat.visual_ids.isdisjoint(segment.ids.tolist()) for segment in ledger.sampled):
            continue
        (ours,) = scorer.score([ScoreRequest(ledger.ids, ledger.pictures, CONFIG.temperature)])
        difference = ours.logp[gate.sampled_positions(ledger, chat)] - ledger.behavior_logp[ledger.sampled_mask]
        worst = max(worst, float(np.abs(difference).max()))
    return worst, episodes


def test_after_publishing_the_server_samples_from_the_learners_weights(front, model, other, contract, chat, tmp_path):
    async def work(engine):
        begin = engine.version
        before, _ = await sampled_against_learner(engine, chat, other, contract)
        await publish(engine, other)
        worst, episodes = await sampled_against_learner(engine, chat, other, contract)
        assert {s.version for e in episodes for s in e.ledger.sampled} == {begin + 1}
        await publish(engine, model)
        assert not list(tmp_path.glob("*/changed/*visual*")) and list(tmp_path.glob("*/changed/*"))
        back, _ = await sampled_against_learner(engine, chat, model, contract)
        return before, worst, back

    before, worst, back = on(front, work, weights_dir=str(tmp_path))
    assert before > 100 * BOUND  # the two models differ measurably
    assert worst < BOUND and back < BOUND


@pytest.mark.nightly
def test_a_server_without_the_learners_files_gets_weights_by_network(server, model, other, contract, chat, tmp_path):
    async def work(engine):
        engine.fleet.files = WeightFiles(tmp_path)  # a directory that the server's command does not know
        received, differences = [], []
        for weights in (other, model):
            await publish(engine, weights)
            info = await asyncio.to_thread(fetch, f"{server.url}/model_info")
            received.append(Path(info["model_path"]))
            worst, _ = await sampled_against_learner(engine, chat, weights, contract)
            differences.append(worst)
        assert not list(tmp_path.glob("*/changed/*visual*")) and list(tmp_path.glob("*/changed/*"))
        return received, differences

    received, differences = on(server, work)
    assert max(differences) < BOUND
    assert not any(path.exists() or path.is_relative_to(tmp_path) for path in received)  # removed after loading
    assert len(set(received)) == 2 and all(path.parent.name.startswith(WEIGHTS_PREFIX) for path in received)


@pytest.mark.nightly
def test_training_vision_needs_a_server_without_an_image_cache(server, second, model, new_vision, contract, chat):
    async def work(engine):
        await sampled_against_learner(engine, chat, model, contract)  # shows the pictures
        await publish(engine, new_vision)
        worst, _ = await sampled_against_learner(engine, chat, new_vision, contract)
        await publish(engine, model)
        return worst

    assert on(second, work) < BOUND
    assert on(server, work) > BOUND  # if this fails, SGLang invalidates its cache now, and the rule can be removed


def adapter_of(model: VLModel, base: Path, seed: int) -> AdapterWeights:
    lora, random, copy = LoraConfig(rank=4, alpha=8.0), np.random.default_rng(seed), nnx.clone(model)
    pairs = {
        path: 0.1 * random.standard_normal(array.shape, np.float32)
        for path, array in new_adapter(model.config, lora, seed=0).items()
    }
    add_adapter(copy, lora, pairs)
    return AdapterWeights(copy, AdapterInfo(lora, AdapterBase(str(base), "float32", base_checksum(model, "float32"))))


@pytest.fixture(scope="module")
def adapted(model, tiny_hf):
    """Two versions of an adapter of the servers' model."""
    return [adapter_of(model, tiny_hf, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def qwen25(qwen25_hf):
    """The learner's model, a contract that does not resize, and the chat."""
    contract = replace(VisionContract.from_hf(qwen25_hf), min_pixels=1, max_pixels=50_176)
    return model_port.load(qwen25_hf), contract, Chat.from_hf(qwen25_hf)


@pytest.mark.nightly
def test_a_server_of_qwen2_5_vl_agrees_with_the_learner(qwen25_server, qwen25, qwen25_hf):
    """Frames keep their size, and ids that no text encodes to are unchanged."""
    model, contract, chat = qwen25
    answer, num_ids = generate(qwen25_server.url, qwen25_hf, 56, 84)
    assert answer["prompt_tokens"] == num_ids - 1 + 2 * 3
    (found,) = asyncio.run(check([qwen25_server.url], TwoSizes(model, contract), chat, num_episodes=4))
    assert found.problems == [] and all(found.differences[kind].num_tokens for kind in (*KINDS, SHOWN))


@pytest.mark.nightly
def test_a_server_of_qwen2_5_vl_takes_weights_of_both_towers_and_adapters(qwen25_server, qwen25, qwen25_hf, tmp_path):
    model, contract, chat = qwen25
    make_tiny(tmp_path / "hf", 1, tiny_config("qwen2_5_vl"))
    new = model_port.load(tmp_path / "hf")

    async def work(engine):
        differences = []
        for weights in (ModelWeights(new, FLOAT32), adapter_of(model, qwen25_hf, 1), ModelWeights(model, FLOAT32)):
            await engine.publish(weights, engine.version + 1)
            worst, episodes = await sampled_against_learner(engine, chat, weights.model, contract)
            assert {s.version for e in episodes for s in e.ledger.sampled} == {engine.version}
            differences.append(worst)
        other, _ = await sampled_against_learner(engine, chat, new, contract)
        return max(differences), other

    worst, other = on(qwen25_server, work)
    assert worst < BOUND < 100 * BOUND < other


@pytest.mark.nightly
def test_a_step_of_qwen2_5_vl_samples_from_the_policy_before_and_after(qwen25_server, qwen25_hf, tmp_path):
    settings = [*QUICK, "engine.kind=sglang", f"engine.urls=[{qwen25_server.url}]", f"model.path={qwen25_hf}"]
    settings += ["train.num_steps=2", "optim.learning_rate=0.01"]
    asyncio.run(train(load_config(SMOKE, f"run_dir={tmp_path / 'run'}", *settings), take_over=True))
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 2 and all(step["mismatch/behavior_kl"] < 1e-6 for step in steps)


@pytest.mark.nightly
def test_a_server_that_retokenizes_qwen2_5_vl_is_rejected(sglang_python, qwen25_hf, qwen25):
    """SGLang retokenizes by default if frames keep a size that the processor files would change."""
    model, contract, chat = qwen25
    settings = ServerSettings(qwen25_hf, python=sglang_python, extra_args=("--mm-preprocess-cache-size-mb", "0"))
    with served(settings) as server:
        (found,) = asyncio.run(check([server.url], TwoSizes(model, contract), chat, num_episodes=2))
    assert len(found.wrong_ids) == 2 and all("the server re-encodes the text" in one for one in found.wrong_ids)


@pytest.mark.nightly
@pytest.mark.parametrize("by", ["files", "network"])
def test_a_server_merges_every_published_adapter_into_its_base(server, model, adapted, contract, chat, tmp_path, by):
    """Also after a simulated restart, which leaves other weights and SGLang's default label."""
    (tmp_path / "other").mkdir()

    async def work(engine):
        if by == "network":
            engine.fleet.files = WeightFiles(tmp_path / "other")  # a directory that the server's command does not know
        differences, logps = [], []
        for weights in adapted:
            await engine.publish(weights, engine.version + 1)
            worst, episodes = await sampled_against_learner(engine, chat, weights.model, contract)
            assert {s.version for e in episodes for s in e.ledger.sampled} == {engine.version}
            differences.append(worst)
            sent = sum(path.stat().st_size for path in tmp_path.rglob("all/*.safetensors"))
            assert weights.num_bytes < sent < 2 * weights.num_bytes < 0.1 * ModelWeights(model, FLOAT32).num_bytes
        logps.append(await asyncio.to_thread(scored, server.url))
        # No flush, because it fails while the scheduler has a request; publishing flushes.
        restarted = {"model_path": str(new_files), "flush_cache": False, "weight_version": "default"}
        await asyncio.to_thread(fetch, f"{server.url}/update_weights_from_disk", restarted)
        again, _ = await sampled_against_learner(engine, chat, adapted[1].model, contract)
        await engine.publish(ModelWeights(adapted[1].model, FLOAT32), engine.version + 1)
        logps.append(await asyncio.to_thread(scored, server.url))
        await publish(engine, model)
        return [*differences, again], logps

    new_files = tmp_path / "restarted"
    make_tiny(new_files, seed=1)
    differences, logps = on(server, work, weights_dir=str(tmp_path) if by == "files" else "")
    assert max(differences) < BOUND
    np.testing.assert_allclose(*logps, atol=1e-5)


def scored(url: str) -> list[float]:
    """Returns the log-probs of a fixed prompt."""
    body = {"input_ids": list(range(5, 60)), "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    answer = fetch(f"{url}/generate", body | {"logprob_start_len": 0})
    return [logp for logp, *_ in answer["meta_info"]["input_token_logprobs"][1:]]


def refuses(server: Served, weights: AdapterWeights, message: str) -> None:
    """Checks that the server rejects a publish and keeps its weights."""

    async def work(engine):
        with pytest.raises(EngineError, match=message):
            await asyncio.wait_for(engine.publish(weights, engine.version + 1), 60)

    before = scored(server.url)
    on(server, work)
    assert scored(server.url) == before


def test_a_server_with_another_base_rejects_the_adapter(server, adapted):
    base = replace(adapted[0].info.base, name="the/base", sum="0")
    weights = AdapterWeights(adapted[0].model, replace(adapted[0].info, base=base))
    refuses(server, weights, r"has other weights than the adapter's base, the/base.*rollout\.serve")


@pytest.mark.nightly
def test_a_server_without_the_plugin_rejects_adapters(sglang_python, tiny_hf, adapted, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    with served(ServerSettings(tiny_hf, python=sglang_python)) as server:
        refuses(server, adapted[0], r"rollout\.serve --model")


@pytest.mark.nightly
def test_a_run_with_adapters_publishes_only_adapters(server, model, tiny_hf, tmp_path, monkeypatch):
    sent, write = [], WeightFiles.write

    async def counted(files, weights):
        await write(files, weights)
        sent.append(sum(path.stat().st_size for path in files.root.glob("all/*")))

    monkeypatch.setattr(WeightFiles, "write", counted)
    settings = [*QUICK, "engine.kind=sglang", f"engine.urls=[{server.url}]", f"model.path={tiny_hf}", "lora.rank=4"]
    settings += ["train.num_steps=2", "optim.learning_rate=0.01"]
    asyncio.run(train(load_config(SMOKE, f"run_dir={tmp_path / 'run'}", *settings), take_over=True))
    monkeypatch.undo()
    take_back(server, model)
    assert len(sent) == 3 and max(sent) < 0.1 * ModelWeights(model, FLOAT32).num_bytes
    assert all(step["mismatch/behavior_kl"] < 1e-6 for step in metrics_of(tmp_path / "run"))


def long_request(chat, episode, num_tokens=2000) -> Request:
    ids = chat.prompt([{"role": "user", "content": "Tell me everything."}])
    return Request(ids, (), Sampling(num_tokens, temperature=1.0), episode, 120)


@on_front
async def test_tokens_before_and_after_a_mid_turn_publish_have_their_versions(engine, model, other, chat):
    begin = engine.version
    task = asyncio.create_task(engine.generate(long_request(chat, "e")))
    await asyncio.sleep(1.0)
    await publish(engine, other)
    await asyncio.sleep(1.0)
    await engine.abort("e")
    found = await task
    await publish(engine, model)
    assert sorted(set(found.versions.tolist())) == [begin, begin + 1]
    assert (np.diff(found.versions) >= 0).all()
    assert found.finish == "abort"


def test_a_servers_weights_survive_a_second_run_and_a_restart(server, tiny_hf, model, other, contract, chat):
    """The simulated restart leaves the weights of the model's files and SGLang's default label."""

    async def work(engine):
        await publish(engine, other)
        version = engine.version
        running = asyncio.create_task(engine.generate(long_request(chat, "e")))
        await asyncio.sleep(1)
        with pytest.raises(EngineError, match=f"another live run, {RUN}, publishes to it"):
            await SGLangEngine.connect([server.url], SGLangSettings("tests-2"))
        await engine.abort("e")
        undisturbed = await running
        restarted = {"model_path": str(tiny_hf), "flush_cache": True, "weight_version": "default"}
        await asyncio.to_thread(fetch, f"{server.url}/update_weights_from_disk", restarted)
        worst, episodes = await sampled_against_learner(engine, chat, other, contract)
        thief = await SGLangEngine.connect([server.url], SGLangSettings("tests-2", take_over=True))
        try:
            await thief.publish(ModelWeights(model, FLOAT32), 7)
            with pytest.raises(EngineError, match="taken over by another run, tests-2"):
                await engine.generate(long_request(chat, "late", 8))
        finally:
            await thief.close()
        versions = {int(s.version) for episode in episodes for s in episode.ledger.sampled}
        return version, undisturbed, worst, versions

    try:
        version, undisturbed, worst, versions = on(server, work, probe_every_s=1)
    finally:
        take_back(server, model)
    assert undisturbed.finish == "abort" and len(undisturbed.ids) > 10
    assert set(undisturbed.versions.tolist()) == {version}
    assert versions == {version} and worst < BOUND


@on_front
async def test_abort_ends_only_one_episode(engine, chat):
    requests = (long_request(chat, "kept", 400), long_request(chat, "ended"))
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.7)
    await engine.abort("ended")
    kept, ended = await asyncio.gather(*tasks)
    assert (ended.finish, kept.finish) == ("abort", "length")
    assert 0 < len(ended.ids) < 2000 and len(kept.ids) == 400


async def all_up(engine, model) -> None:
    """Waits until all servers are up with the weights of `model`."""
    async with asyncio.timeout(60):
        while not all(one.up for one in engine.fleet.servers):
            if any("another server" in one.problem for one in engine.fleet.servers):
                await publish(engine, model)
            await asyncio.sleep(0.1)


@pytest.mark.nightly
@async_test
async def test_a_killed_server_loses_no_episode_and_returns_with_current_weights(
    server, sglang_python, tiny_hf, model, other, contract, chat
):
    settings = ServerSettings(tiny_hf, python=sglang_python, context_length=4096, max_total_tokens=16_384)
    managed = await Server.start(settings, deadline_s=START_DEADLINE_S)
    servers = [ServerState(managed.url, managed), ServerState(server.url)]
    engine = await SGLangEngine.open(servers, SGLangSettings(RUN, probe_every_s=1))
    try:
        await all_up(engine, model)
        await publish(engine, other)
        guided = Guided(engine, chat, TURNS)
        playing = asyncio.create_task(play(guided, chat, FakeFrames(size_px=(64, 96)), 16))
        await until(lambda: guided.answered.total() >= 8)
        victim, processes = engine.fleet.servers[0], psutil.Process(managed.pid).children(recursive=True)
        max(processes, key=lambda process: process.memory_info().rss).kill()  # the scheduler
        episodes = await playing
        await until(lambda: victim.up and victim.num_restarts == 1, 150)
        worst, _ = await sampled_against_learner(engine, chat, other, contract)
        health, version = await engine.health(), engine.version
        await publish(engine, model)
    finally:
        await engine.close()
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == guided.answered.total() == 16 * 5
    assert [(server.alive, server.version) for server in health.servers] == [(True, version)] * 2
    assert worst < BOUND


@pytest.mark.nightly
def test_a_stopped_server_is_ejected_and_returns_with_current_weights(server, second, model, other, chat):
    async def work(engine):
        await all_up(engine, model)
        guided = Guided(engine, chat, TURNS)
        playing = asyncio.create_task(play(guided, chat, FakeFrames(size_px=(64, 96)), 16))
        await until(lambda: guided.answered.total() >= 8)
        os.killpg(second.pid, signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            episodes = await playing
            lasted_s = time.monotonic() - started_s
            await publish(engine, other)
        finally:
            os.killpg(second.pid, signal.SIGCONT)
        await until(lambda: engine.fleet.servers[0].up)
        versions = [one.version for one in engine.fleet.servers]
        await publish(engine, model)
        return guided, episodes, lasted_s, versions, engine.version

    settings = dict(probe_every_s=0.5, probe_deadline_s=4, control_deadline_s=5)
    guided, episodes, lasted_s, versions, version = on(second, work, server, **settings)
    assert [episode.outcomes for episode in episodes] == [["ok"] * 3] * 16
    assert len(guided.requests) == guided.answered.total() == 16 * 5
    assert lasted_s < 60
    assert versions == [version - 1] * 2


@pytest.mark.nightly
def test_greedy_answers_of_every_split_equal_the_embedded_engines(server, tiny_hf, tmp_path):
    pictures = [np.full((32, 64, 3), 40 * second, np.uint8) for second in range(6)]
    write_video(tmp_path / "video.mp4", pictures, 1)
    sglang, ours = f"engine.urls=[{server.url}]", ("engine.urls=[]", "engine.max_rows=2")
    for split in SPLITS:
        copy = make_copy(split, tmp_path / split, 2)
        for video in VIDEOS[split]:
            shutil.copy(tmp_path / "video.mp4", copy / video)
        turns = greedy(split, copy, tiny_hf, "engine.kind=sglang", sglang)
        assert len(turns) == 2 and turns == greedy(split, copy, tiny_hf, "engine.kind=jax", *ours), split


def greedy(split: str, copy: Path, model: Path, *engine: str) -> dict[str, list[str]]:
    """Returns a policy's greedy turns for every sample of a split."""
    run_dir = copy / engine[0].partition("=")[2]
    settings = [f"data.split={split}", f"data.validation={copy}", f"run_dir={run_dir}", f"model.path={model}"]
    settings += ["model.dtype=float32", "video.max_pixels=2048", "video.num_workers=1", "rollout.max_new_tokens=16"]
    settings += ["rollout.max_context_tokens=4096", "eval.frame_budgets=[2]", "eval.dispatches=[none]"]
    config = load_config(CONFIGS / "eval_8b.yaml", *settings, *engine, schema=EvalConfig)
    asyncio.run(run_eval(config))
    lines = map(json.loads, (run_dir / "samples_none_2.jsonl").read_text().splitlines())
    return {line["id"]: [turn["text"] for turn in line["episodes"][0]["turns"]] for line in lines}


def endpoint_config(copy: Path, run_dir: Path, *engine: str) -> EvalConfig:
    """Returns the config of an evaluation that takes seconds."""
    settings = [f"data.validation={copy}", "data.split=longvideobench", f"run_dir={run_dir}", "model.dtype=float32"]
    settings += ["video.max_pixels=2048", "video.num_workers=1", "rollout.max_new_tokens=16", "engine.kind=openai"]
    settings += ["rollout.max_context_tokens=4096", "eval.frame_budgets=[2]", "eval.dispatches=[parallel]"]
    return load_config(None, *settings, *engine, schema=EvalConfig)


@pytest.fixture(scope="module")
def lids(tmp_path_factory):
    copy = make_copy("longvideobench", tmp_path_factory.mktemp("lids"), 2)
    for video in VIDEOS["longvideobench"]:
        write_video(copy / video, [np.full((32, 64, 3), 40 * second, np.uint8) for second in range(6)], 1)
    return copy


def served_name(url: str) -> str:
    """Returns the served model's name, which a publish from files changes."""
    return fetch(f"{url}/v1/models")["data"][0]["id"]


def test_a_real_server_is_an_endpoint(server, lids, tmp_path):
    name = served_name(server.url)
    config = endpoint_config(lids, tmp_path / "run", f"engine.urls=[{server.url}/v1]", f"engine.model={name}")
    (cell,) = asyncio.run(run_eval(config))
    assert cell["n"]["answered"] + cell["n"]["unanswered"] == 2 and cell["n"]["missing"] == {}
    assert 0 < cell["metrics"]["sampled_tokens_mean"] <= 64 and cell["frames"]["min"] == 2
    with pytest.raises(EngineError, match=rf"does not serve engine\.model=other; it serves {name}"):
        asyncio.run(run_eval(endpoint_config(lids, tmp_path, f"engine.urls=[{server.url}/v1]", "engine.model=other")))


@async_test
async def test_a_real_server_streams_and_its_errors_are_recognized(server):
    client, texts = EndpointClient([f"{server.url}/v1"], served_name(server.url)), []
    request: dict[str, Any] = dict(temperature=0.0, deadline_s=60.0)
    try:
        short = [{"role": "user", "content": "Hello"}]
        reply = await client.complete(short, max_tokens=8, on_text=texts.append, **request)
        with pytest.raises(EndpointError) as caught:
            await client.complete([{"role": "user", "content": "word " * 9000}], max_tokens=8, **request)
    finally:
        await client.close()
    assert texts[-1] == reply.text and caught.value.reason == "context"


@pytest.mark.nightly
def test_an_evaluation_starts_and_stops_its_own_endpoints(tiny_hf, lids, tmp_path, sglang_python):
    engine = ("engine.serve_with=sglang", f"model.path={tiny_hf}", "engine.model=tiny/model")
    (cell,) = asyncio.run(run_eval(endpoint_config(lids, tmp_path / "run", *engine)))
    assert cell["n"]["missing"] == {} and cell["model"]["path"] == "tiny/model"
    assert cell["engines"] == [{"kind": "openai", "serve_with": "sglang"}] and len(cell["model"]["digest"]) == 24
    assert "tiny/model" not in "".join(" ".join(process.cmdline()) for process in psutil.Process().children(True))


def train_and_find_servers_late(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    admit = Fleet._admit

    async def late(pool: Fleet, server: ServerState) -> None:
        await asyncio.sleep(4 * ("hosts.index=1" in arguments))
        await admit(pool, server)

    Fleet._admit = late
    several.command(module, arguments, environment)


@pytest.mark.nightly
def test_two_hosts_that_share_a_server_train_like_one_host(server, model, tiny_hf, tmp_path):
    """One host connects to the server later; the other must not pause the server before."""
    run_dir, replay_dir = tmp_path / "run", tmp_path / "replay"
    settings = ["--take-over", *QUICK, "engine.kind=sglang", f"engine.urls=[{server.url}]", f"model.path={tiny_hf}"]
    settings += ["train.prompts_per_step=2", "train.num_steps=2", "mesh.fsdp=2", "pack.num_rows=2"]
    command = ("paravt_jax.train", arguments(run_dir, *settings))
    ended = several.start_command(tmp_path / "output", *command, work=train_and_find_servers_late).wait(280)
    assert [one.code for one in ended] == [0, 0], "\n\n".join(one.output[-3000:] for one in ended)
    alone = ("hosts.coordinator=", "hosts.num=1", "hosts.index=0", f"run_dir={replay_dir}")
    asyncio.run(train(load_config(run_dir / "config.json", *alone), replay=run_dir))
    for ours, theirs in zip(metrics_of(replay_dir), metrics_of(run_dir), strict=True):
        assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)  # float sums have another order
    for episode in episodes_of(run_dir):
        sampled = [segment for segment in episode["segments"] if segment["kind"] == "sampled"]
        assert {segment["version"] for segment in sampled} == {episode["step"] - 1}
    take_back(server, model)


def test_a_server_left_paused_by_a_killed_run_is_resumed(server):
    fetch(f"{server.url}/pause_generation", {"mode": "retract"})

    async def answers(engine):
        return await engine.generate(Request(np.arange(5, dtype=np.int32), (), Sampling(2), "e", 30.0))

    assert len(on(server, answers, probe_deadline_s=2.0).ids) == 2


def test_the_real_server_stops_without_leftovers(server):
    processes = family(server.pid)
    server.command.send_signal(signal.SIGTERM)
    code, _, errors = ended(server.command)
    assert code == 0, errors
    assert len(processes) >= 4 and all_gone(processes, within_s=0)  # supervisor, server, scheduler, detokenizer


@pytest.mark.nightly
def test_the_real_server_dies_with_a_killed_parent(second):
    processes = family(second.command.pid)
    assert len(processes) >= 5
    second.command.kill()
    ended(second.command)
    assert all_gone(processes)


@pytest.mark.nightly
def test_the_real_server_dies_with_a_parent_killed_while_it_loads(sglang_python, tiny_hf):
    command = serve(ServerSettings(tiny_hf, python=sglang_python), "--context-length", "4096")
    while len(processes := family(command.pid)) < 4:  # the scheduler has just started and does not watch its parent yet
        time.sleep(0.05)
        assert command.poll() is None
    command.kill()
    ended(command)
    assert all_gone(processes)


@pytest.mark.nightly
def test_the_real_server_reports_an_invalid_model(sglang_python, tiny_hf, tmp_path):
    model = shutil.copytree(tiny_hf, tmp_path / "broken")
    (model / "model.safetensors").write_bytes(b"no tensors")
    settings = ServerSettings(model=model, python=sglang_python, context_length=4_096)
    with pytest.raises(ServerFailed, match=r"(?s)before it was ready.*its last lines:.*[Ss]afetensor"):
        start(settings, deadline_s=120)


@pytest.mark.nightly
def test_the_real_server_accepts_the_flags_for_cuda(sglang_python, tiny_hf):
    cuda = ServerSettings(model=tiny_hf, python=sglang_python, device="cuda", max_total_tokens=100_000)
    code = (
        "import sys; from sglang.srt.server_args import prepare_server_args as parse; print(parse(sys.argv[1:]).device)"
    )
    parse = [str(sglang_python), "-W", "ignore", "-c", code, *cuda.command()[3:]]
    environment = replace(cuda, device="cpu").environment()  # only needed to import it on this machine
    assert subprocess.run(parse, env=environment, capture_output=True, text=True, check=True).stdout == "cuda\n"
