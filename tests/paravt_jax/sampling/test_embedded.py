"""The embedded engine's tokens are the sampler's, independent of other requests, with the version of each token."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from async_tests import make_test, until
from flax import nnx

import model_port
from model_port.adapters import add_adapter, new_adapter
from model_port.config import LoraConfig
from model_port.processing import VisionContract, expand_placeholders
from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.sharding import flat_params, make_mesh
from model_port.tiny import make_tiny
from paravt_jax.sampling import local_copy
from paravt_jax.sampling.embedded import EmbeddedEngine
from paravt_jax.sampling.frames import frame_of
from paravt_jax.sampling.local_copy import LocalCopy
from paravt_jax.sampling.score import LearnerScorer
from paravt_jax.sampling.weights import ModelWeights
from rollout.engine.protocol import DeadlineExceeded, EngineError, Request, RequestRejected, Sampling, VersionMismatch
from rollout.parity import ScoreRequest
from rollout.picture import Picture

SETTINGS = dict(max_rows=4, max_context_tokens=512)


@pytest.fixture(scope="module")
def model(tiny_hf):
    return model_port.load(tiny_hf)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other") / "hf"
    make_tiny(directory, seed=1)
    return model_port.load(directory)


@pytest.fixture(scope="module")
def contract(tiny_hf):
    return VisionContract.from_hf(tiny_hf)


NOISE = [np.random.default_rng(n).integers(0, 255, size) for n, size in enumerate([(64, 32, 3), (32, 96, 3)])]
PICTURES = tuple(Picture.of(pixels.astype(np.uint8)) for pixels in NOISE)


def request(chat, episode="e", seed=0, max_new_tokens=24, **kwargs) -> Request:
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": episode}]
    ids = chat.prompt([{"role": "user", "content": content}])
    sampling = Sampling(max_new_tokens, temperature=0.7, seed=seed, stop_ids=chat.stop_ids)
    return Request(ids, PICTURES, sampling, episode, **{"deadline_s": 60, **kwargs})


def run(work, model, contract):
    async def body():
        engine = EmbeddedEngine(model, contract, **SETTINGS)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(body())


def sampling(work):
    """Makes a test whose first argument is an engine of the tiny model; the others are fixtures."""
    return make_test(work, 1, run)


@pytest.fixture(params=["cpu", "gpu"])
def machine(request, monkeypatch):
    monkeypatch.setattr(local_copy, "platform", lambda: request.param)
    return request.param


@pytest.mark.slow
@sampling
async def test_tokens_are_the_samplers_alone_or_with_other_requests(engine, chat, model, contract, machine):
    """On a GPU the engine samples from a copy, which is deleted after the last request."""
    alone = await engine.generate(request(chat, "a", seed=5))
    assert bool(engine._sampler.params) == (machine == "cpu")
    _, _, with_others, *_ = await asyncio.gather(*(engine.generate(request(chat, e, seed=5)) for e in "xyazwv"))
    waiting = asyncio.create_task(engine.generate(request(chat, "b", max_new_tokens=150)))
    while not engine._running:
        await asyncio.sleep(0)
    await engine.abort("b")
    assert (await waiting).finish == "abort"
    assert bool(engine._sampler.params) == (machine == "cpu")
    np.testing.assert_array_equal(alone.ids, with_others.ids)
    np.testing.assert_array_equal(alone.behavior_logp, with_others.behavior_logp)
    alone_request = request(chat, "a", seed=5)
    ids = expand_placeholders(alone_request.ids, [2, 3], model.config.image_token_id)
    prompt = SamplerPrompt(ids, tuple(frame_of(picture, contract) for picture in PICTURES))
    sampling = SamplingParams(24, 5, 0.7, chat.stop_ids)
    (expected,) = Sampler(model, **SETTINGS).generate([SamplerRequest(prompt, sampling)])
    assert alone.ids.tolist() == expected.ids
    assert (alone.num_prompt_tokens, alone.finish) == (len(ids), expected.finish)


@pytest.mark.slow
@sampling
async def test_a_picture_in_a_tools_response_has_the_learners_log_probs(engine, chat, model, contract):
    """This also holds with cached earlier turns; the same picture at another position has other log-probs."""
    first = request(chat, "t", seed=5)
    turn = np.concatenate([first.ids, chat.encode("I look.</think><|im_end|>")])
    ids = np.concatenate([turn, chat.after_turn(turn, [["Here: ", PICTURES[1]], ["And: ", PICTURES[0]]])])
    later = replace(first, ids=ids, pictures=(*PICTURES, PICTURES[1], PICTURES[0]))
    await engine.generate(first)
    sampled = await engine.generate(later)
    scorer = LearnerScorer(model, contract)
    whole = np.concatenate([ids, sampled.ids])
    scored = [
        scorer.score([ScoreRequest(whole, pictures, 0.7)])[0].logp[-len(sampled.ids) :]
        for pictures in (later.pictures, (*PICTURES, PICTURES[1], PICTURES[1].resized(64, 32)))
    ]
    np.testing.assert_allclose(sampled.behavior_logp, scored[0], atol=1e-4)
    assert np.abs(sampled.behavior_logp - scored[1]).max() > 1e-3


@pytest.mark.slow
@sampling
async def test_rollouts_of_a_group_share_one_prefill(engine, chat):
    prefills = []
    prefill = engine._sampler._prefill
    engine._sampler._prefill = lambda *arguments: prefills.append(arguments) or prefill(*arguments)
    await asyncio.gather(*(engine.generate(request(chat, "g", seed=n)) for n in range(4)))
    assert len(prefills) == 1


@pytest.mark.slow
def test_tokens_after_a_publish_have_the_new_version(model, other, contract, chat):
    async def work(engine):
        task = asyncio.create_task(engine.generate(request(chat, "r", seed=3, max_new_tokens=300)))
        await until(lambda: any(engine._sampler.sampled(n) for n in list(engine._running)))
        await engine.publish(ModelWeights(other, np.dtype(np.float32)), 7)
        fresh = await engine.generate(request(chat, "f", seed=3, version=7))
        return await task, fresh

    mixed, fresh = run(work, model, contract)
    changes = np.flatnonzero(np.diff(mixed.versions))
    assert len(changes) == 1
    assert (mixed.versions[0], mixed.versions[-1], set(fresh.versions.tolist())) == (0, 7, {7})

    async def from_scratch(engine):
        return await engine.generate(request(chat, "f", seed=3))

    np.testing.assert_array_equal(fresh.ids, run(from_scratch, other, contract).ids)


@pytest.mark.slow
@sampling
async def test_weights_that_arrive_before_the_last_token_are_an_error_for_a_request_of_one_version(engine, other, chat):
    task = asyncio.create_task(engine.generate(request(chat, "r", seed=3, max_new_tokens=300, version=0)))
    await until(lambda: any(engine._sampler.sampled(n) for n in list(engine._running)))
    await engine.publish(ModelWeights(other, np.dtype(np.float32)), 7)
    with pytest.raises(VersionMismatch, match=r"versions \[0, 7\], expected version 0"):
        await task


@pytest.mark.slow
@sampling
async def test_a_publish_right_after_the_last_token_does_not_change_its_version(engine, other, chat):
    await engine.generate(request(chat, "w", max_new_tokens=8))  # compiles
    step, stepping = engine._sampler.step, threading.Event()

    def slow_step():
        stepping.set()
        time.sleep(0.1)
        return step()

    engine._sampler.step = slow_step
    task = asyncio.create_task(engine.generate(request(chat, "r", max_new_tokens=8)))
    await asyncio.to_thread(stepping.wait)
    publishing = asyncio.create_task(engine.publish(ModelWeights(other, np.dtype(np.float32)), 7))
    await asyncio.sleep(0)  # it waits for the step
    while engine.version != 7:
        time.sleep(0.01)  # the loop is busy
    await publishing
    assert set((await task).versions.tolist()) == {0}


@pytest.mark.slow
@sampling
async def test_on_tokens_receives_the_tokens_while_they_are_sampled(engine, chat):
    received = []
    streamed = await engine.generate(request(chat, "h", seed=5, on_tokens=received.append))
    silent = await engine.generate(request(chat, "h", seed=5))
    assert len(received) > 1 and all(len(first) < len(second) for first, second in itertools.pairwise(received))
    assert received[-1] == streamed.ids.tolist() == silent.ids.tolist()


@sampling
async def test_a_request_for_another_version_is_an_error(engine, chat):
    with pytest.raises(VersionMismatch, match="expected version 3"):
        await engine.generate(request(chat, version=3))


@pytest.mark.slow
@sampling
async def test_abort_returns_the_tokens_so_far_and_frees_the_row(engine, chat):
    tasks = [asyncio.create_task(engine.generate(request(chat, e, max_new_tokens=400))) for e in "ab"]
    while len(engine._running) < 2 or not all(engine._sampler.sampled(n) for n in list(engine._running)):
        await asyncio.sleep(0.01)
    await engine.abort("a")
    assert len(engine._running) == 1
    first = await tasks[0]
    await engine.abort()
    second, third = await tasks[1], await engine.generate(request(chat, "c"))
    assert (first.finish, second.finish) == ("abort", "abort")
    assert 0 < len(first.ids) < 400
    assert third.finish in ("stop", "length")


@sampling
async def test_timeouts_and_cancelled_callers_leave_no_request_running(engine, chat):
    with pytest.raises(DeadlineExceeded, match=r"did not finish a request in 0\.05 s"):
        await engine.generate(request(chat, max_new_tokens=450, deadline_s=0.05))
    task = asyncio.create_task(engine.generate(request(chat, max_new_tokens=450)))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and not engine._running and not engine._sampler.busy


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(max_new_tokens=600), "max_context_tokens=512"),
        (dict(pictures=PICTURES[:1]), "placeholder"),
        (dict(pictures=(PICTURES[0], Picture.of(np.zeros((40, 64, 3), np.uint8)))), "resize frames"),
        (dict(top_p=0.5), "samples from all tokens"),
    ],
)
@sampling
async def test_an_invalid_request_is_rejected_and_the_next_one_works(engine, change, complaint, chat):
    right = request(chat)
    limits = {"max_new_tokens": 8, "top_p": 1.0} | {name: value for name, value in change.items() if name != "pictures"}
    sampling = Sampling(**limits, stop_ids=chat.stop_ids, temperature=0.7)
    wrong = Request(right.ids, change.get("pictures", right.pictures), sampling, "e", 60)
    with pytest.raises(RequestRejected, match=complaint):
        await engine.generate(wrong)
    assert len((await engine.generate(right)).ids)


@sampling
async def test_every_request_gets_the_error_of_a_failed_sampler(engine, chat):
    def broken():
        raise RuntimeError("out of memory")

    engine._sampler.step = broken
    results = await asyncio.gather(*(engine.generate(request(chat, e)) for e in "ab"), return_exceptions=True)
    assert all(isinstance(result, RuntimeError) for result in results)
    with pytest.raises(EngineError, match="has failed"):
        await engine.generate(request(chat))
    assert not (await engine.health()).alive


@sampling
async def test_a_request_that_arrives_while_the_sampler_fails_gets_the_error(engine, chat):
    submit, stepping = engine._submit, threading.Event()

    def broken():
        stepping.set()
        time.sleep(0.2)
        raise RuntimeError("out of memory")

    def submit_slowly(*arguments):
        if stepping.is_set():
            time.sleep(0.2)  # its pictures are converted
        submit(*arguments)

    engine._sampler.step, engine._submit = broken, submit_slowly
    first = asyncio.create_task(engine.generate(request(chat, "a")))
    await asyncio.to_thread(stepping.wait)
    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.generate(request(chat, "b", deadline_s=5))
    await asyncio.gather(first, return_exceptions=True)


@sampling
async def test_a_callback_that_raises_ends_only_its_own_request(engine, chat):
    def broken(ids):
        raise KeyError("my display")

    requests = [request(chat, "a", max_new_tokens=400, on_tokens=broken), request(chat, "b")]
    failed, other = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert isinstance(failed, KeyError) and len(other.ids)
    assert (await engine.health()).alive and not engine._sampler.busy


def test_cached_frames_are_bounded_in_bytes(model, contract, chat, monkeypatch):
    """A zoomed detail takes as much memory as sixteen frames."""
    frame_bytes = frame_of(PICTURES[0], contract).patches.nbytes
    monkeypatch.setattr("paravt_jax.sampling.embedded.FRAME_BYTES", 20 * frame_bytes)
    sizes = [(64, 32)] * 3 + [(256, 128)] + [(64, 32)] * 2 + [(256, 128)]
    pictures = [Picture.of(np.full((*size, 3), n, np.uint8)) for n, size in enumerate(sizes)]

    async def work(engine):
        first = engine._frame(pictures[0])
        for picture in (*pictures[1:3], pictures[0], *pictures[3:6]):  # the first is used again
            engine._frame(picture)
        assert engine._frame(pictures[0]) is first
        engine._frame(pictures[6])
        return [*engine._frames]

    kept = run(work, model, replace(contract, max_pixels=256 * 128))
    assert kept == [pictures[n].key for n in (4, 5, 0, 6)]


@pytest.mark.slow
def test_weights_of_a_model_are_the_tensors_of_its_files(model, tiny_hf, tmp_path):
    from safetensors.numpy import load_file

    weights = ModelWeights(model, np.dtype(np.float32))
    expected = load_file(tiny_hf / "model.safetensors")
    sent = dict(weights.tensors())
    assert sent.keys() == expected.keys()
    for name, tensor in sent.items():
        np.testing.assert_array_equal(tensor, expected[name])
    weights.write(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size >= weights.num_bytes
    assert load_file(tmp_path / "model.safetensors").keys() == expected.keys()
    half = ModelWeights(model, np.dtype(jnp.bfloat16))
    assert half.num_bytes * 2 == weights.num_bytes


@pytest.mark.slow
def test_weights_of_an_adapted_model_are_merged_and_its_copy_shares_the_base(tiny_hf):
    model, lora = model_port.load(tiny_hf), LoraConfig(rank=3)
    adapters = new_adapter(model.config, lora, seed=0)
    add_adapter(model, lora, {path: value + 0.1 for path, value in adapters.items()})
    copy = LocalCopy(model, None, beside_update=True).of(model)
    params, copied = (flat_params(nnx.state(each)) for each in (model, copy))
    shared = {path for path in params if params[path] is copied[path]}
    assert shared == {path for path in params if "_lora." not in path}
    sent = dict(ModelWeights(copy, np.dtype(np.float32)).tensors())
    name = "model.language_model.layers.2.mlp.down_proj.weight"
    a, b = (params[f"text.layers.mlp.down_lora.kernel_{side}"][2] for side in ("zf", "dz"))
    expected = params["text.layers.mlp.down_kernel_df"][2] + lora.scale * b @ a
    np.testing.assert_allclose(sent[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_on_a_mesh_the_cache_and_a_copy_of_the_weights_are_split_over_heads(tiny_hf, contract):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    engine = EmbeddedEngine(model_port.load(tiny_hf, mesh=mesh), contract, mesh=mesh, **SETTINGS)
    sampler = engine._sampler
    kernel = flat_params(sampler.params)["text.layers.attn.k_kernel_khd"]
    for array, axis in ((sampler._cache.keys, 0), (kernel, 1)):
        shard = array.sharding.shard_shape(array.shape)
        split = [whole // part for whole, part in zip(array.shape, shard, strict=True)]
        assert split == [2 if at == axis else 1 for at in range(array.ndim)]  # the tiny model has two key heads
