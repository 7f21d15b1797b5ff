"""The sampler gives what the model says: greedy is transformers' generate, and no request notices its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from reference import CONFIGS, IMAGE, VIDEO, Inputs, make_reference, prompts, save_reference

import model_port
from model_port.inputs import order_frames, split_frames
from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams, decode, prefill
from model_port.sharding import make_mesh

CONFIG = CONFIGS["tied"]
PROGRAMS = (prefill, decode)
SETTINGS = dict(max_rows=3, max_context_tokens=192, token_bucket=32, patch_bucket=16, frame_bucket=4, tokens_per_step=5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    reference = make_reference(CONFIG)
    path = tmp_path_factory.mktemp("sampled")
    save_reference(reference, path)
    return reference, model_port.load(path)


@pytest.fixture(scope="module")
def sampler(pair):
    return Sampler(pair[1], **SETTINGS)


def as_prompt(inputs: Inputs) -> SamplerPrompt:
    images = split_frames(inputs.pixel_values, inputs.image_grid_thw)
    frames = images + split_frames(inputs.pixel_values_videos, inputs.video_grid_thw)
    sizes = [len(frame.patches) // 4 for frame in frames]
    order = order_frames(inputs.ids, range(len(images)), range(len(images), len(frames)), sizes, CONFIG)
    return SamplerPrompt(inputs.ids, tuple(frames[number] for number in order))


@pytest.fixture(scope="module")
def requests() -> list[SamplerRequest]:
    """More requests than rows, of all kinds and lengths, two of them on one prompt."""
    made = {kind: as_prompt(inputs) for kind, inputs in prompts(CONFIG).items()}
    lengths = {"mixed": 7, "text": 23, "image": 1, "video": 11, "images": 17}
    requests = [
        SamplerRequest(made[kind], SamplingParams(count, seed=count, temperature=0.7))
        for kind, count in lengths.items()
    ]
    return [*requests, SamplerRequest(made["mixed"], SamplingParams(13, seed=2**40 + 1, temperature=0.7))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images", "video", "mixed"])
def test_greedy_equals_transformers_generate(pair, sampler, kind):
    reference, _ = pair
    inputs = prompts(CONFIG)[kind]
    ids = torch.from_numpy(inputs.ids)[None]
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    media = {name: torch.from_numpy(value) for name, value in inputs.media.items()}
    out = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=kinds,
        **media,
        max_new_tokens=19,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = out.sequences[0, ids.shape[1] :].tolist()
    logp = torch.stack(out.logits)[:, 0].log_softmax(-1)[torch.arange(19), expected].numpy()
    [got] = sampler.generate([SamplerRequest(as_prompt(inputs), SamplingParams(19, temperature=0))])
    assert got.ids == expected
    np.testing.assert_allclose(got.behavior_logp, logp, atol=1e-4)


@pytest.mark.slow
def test_log_probs_are_of_the_tempered_distribution(pair, sampler):
    _, ours = pair
    inputs = prompts(CONFIG)["mixed"]
    [got] = sampler.generate([SamplerRequest(as_prompt(inputs), SamplingParams(9, seed=4, temperature=0.6))])
    scored = model_port.logits(ours, np.concatenate([inputs.ids, got.ids]), **inputs.media)
    rows = jnp.asarray(scored[len(inputs.ids) - 1 : -1])
    expected = jax.nn.log_softmax(rows / 0.6)[jnp.arange(9), jnp.asarray(got.ids)]
    np.testing.assert_allclose(got.behavior_logp, expected, atol=1e-4)


@pytest.mark.slow
def test_a_request_gives_the_same_tokens_in_any_company(sampler, requests):
    alone = [sampler.generate([request])[0] for request in requests]
    together = sampler.generate(requests)
    backwards = sampler.generate(requests[::-1])[::-1]
    assert len({tuple(completion.ids) for completion in alone}) == len(alone)
    for first, second, third in zip(alone, together, backwards, strict=True):
        assert first.ids == second.ids == third.ids
        np.testing.assert_allclose(first.behavior_logp, second.behavior_logp, atol=1e-5)


@pytest.mark.slow
def test_another_seed_gives_other_tokens(sampler, requests):
    prompt = requests[0].prompt
    seeds = [
        sampler.generate([SamplerRequest(prompt, SamplingParams(23, seed=seed))])[0].ids for seed in (1, 2, 2**32 + 1)
    ]
    assert seeds[0] != seeds[1] and seeds[0] != seeds[2]


@pytest.mark.slow
def test_sampled_frequencies_follow_the_tempered_distribution(pair):
    """Chi-square of the first token over 2000 seeds against log_softmax(z / T), pooled to expected counts above 5."""
    _, ours = pair
    inputs = prompts(CONFIG)["text"]
    sampler = Sampler(ours, **{**SETTINGS, "max_rows": 1, "tokens_per_step": 1})
    prompt, count = as_prompt(inputs), 2000
    first = [
        c.ids[0]
        for c in sampler.generate(
            SamplerRequest(prompt, SamplingParams(1, seed=s, temperature=0.8)) for s in range(count)
        )
    ]
    logits = model_port.logits(ours, inputs.ids)[-1] / 0.8
    expected = count * np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    observed = np.bincount(first, minlength=len(expected))
    common = expected > 5
    pairs = [*zip(observed[common], expected[common], strict=True), (observed[~common].sum(), expected[~common].sum())]
    degrees = len(pairs) - 1
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.slow
def test_sampling_stops_with_a_stop_token_and_keeps_it(sampler, requests):
    prompt = requests[1].prompt
    [free] = sampler.generate([SamplerRequest(prompt, SamplingParams(20, seed=3))])
    stop = free.ids[6]
    [stopped] = sampler.generate([SamplerRequest(prompt, SamplingParams(20, seed=3, stop_ids=(999, stop)))])
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert (stopped.finish, free.finish) == ("stop", "length")


@pytest.mark.slow
def test_one_compile_serves_a_bucket_and_every_sampler_of_its_model(pair):
    settings = {**SETTINGS, "max_context_tokens": 200, "token_bucket": 40}  # nobody else's
    before = [program._cache_size() for program in PROGRAMS]
    for length, programs in ((3, 1), (17, 1), (40, 1), (41, 2)):
        request = SamplerRequest(SamplerPrompt(np.arange(length)), SamplingParams(length))
        for _ in range(2):
            Sampler(pair[1], **settings).generate([request])
        more = [program._cache_size() - size for program, size in zip(PROGRAMS, before, strict=True)]
        assert more == [programs, 1]


@pytest.mark.slow
def test_abort_frees_the_row_and_leaves_the_others_alone(sampler, requests):
    expected = [sampler.generate([request])[0].ids for request in requests]
    numbers = [sampler.submit(request) for request in requests]
    finished = sampler.step()
    assert numbers[1] not in finished  # 23 tokens cannot be done in one step of 5
    aborted = sampler.abort(numbers[1])
    waiting = sampler.abort(numbers[5])
    assert aborted.finish == "abort" and aborted.ids == expected[1][: len(aborted.ids)] and waiting.ids == []
    while sampler.busy:
        finished |= sampler.step()
    assert {number: finished[number].ids for number in finished} == {
        number: ids for number, ids in zip(numbers, expected, strict=True) if number not in (numbers[1], numbers[5])
    }


@pytest.mark.slow
def test_new_weights_are_used_from_the_next_prompt_on(pair, requests, tmp_path):
    sampler = Sampler(pair[1], **SETTINGS)
    before = sampler.generate(requests[:2])
    other = make_reference(CONFIG, seed=8)
    save_reference(other, tmp_path)
    sampler.update(model_port.load(tmp_path))
    after = sampler.generate(requests[:2])
    fresh = Sampler(model_port.load(tmp_path), **SETTINGS).generate(requests[:2])
    assert [c.ids for c in after] == [c.ids for c in fresh] != [c.ids for c in before]


@pytest.mark.slow
def test_a_mesh_samples_the_same_tokens(tmp_path):
    from reference import DIVISIBLE

    save_reference(make_reference(DIVISIBLE), tmp_path)
    inputs = prompts(DIVISIBLE)["text"]
    requests = [SamplerRequest(SamplerPrompt(inputs.ids), SamplingParams(11, seed=seed)) for seed in range(4)]
    settings = {**SETTINGS, "max_rows": 4}
    alone = Sampler(model_port.load(tmp_path), **settings).generate(requests)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        spread = Sampler(model_port.load(tmp_path, mesh=mesh), **settings).generate(requests)
    assert [c.ids for c in spread] == [c.ids for c in alone]


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda p: SamplerRequest(p, SamplingParams(0)), "max_new_tokens=0"),
        (lambda p: SamplerRequest(p, SamplingParams(3, temperature=-1)), "temperature=-1"),
        (lambda p: SamplerRequest(p, SamplingParams(3, stop_ids=tuple(range(9)))), "9 stop ids"),
        (lambda p: SamplerRequest(p, SamplingParams(170)), "max_context_tokens=192"),
        (lambda p: SamplerRequest(SamplerPrompt(np.zeros(0, np.int32)), SamplingParams(3)), "at least one token"),
    ],
)
def test_impossible_requests_are_refused(sampler, requests, request_of, message):
    with pytest.raises(ValueError, match=message):
        sampler.submit(request_of(requests[1].prompt))
