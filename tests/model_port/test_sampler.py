"""The sampler samples from the model: greedy equals transformers' generate, and requests are independent."""

import random
import threading
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from on_use import torch
from reference import CONFIGS, IMAGE, Inputs, make_reference, prompts, save_reference

import model_port
import model_port.sampler.sampler as sampler_module
from model_port.adapters import adapter_shapes, add_adapter
from model_port.config import LoraConfig, ModelConfig
from model_port.inputs import Frame
from model_port.layers import split
from model_port.loading import abstract_model, frames_of
from model_port.sampler import Completion, Sampler, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.sampler.programs import copy_page, decode, encode, first_of_highest, prefill
from model_port.sharding import make_mesh, on_mesh
from model_port.tiny import make_tiny
from paravt_jax.run.compiles import COMPILED

CONFIG = CONFIGS["tied"]
PROGRAMS = (encode, prefill, copy_page, decode)
SETTINGS = dict(max_rows=3, max_context_tokens=192, tokens_per_step=5)


def frame(down: int, across: int) -> Frame:
    return Frame(np.zeros((down * across, CONFIG.vision.patch_values), np.float32), (down, across))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return load_pair(CONFIG, tmp_path_factory)


def load_pair(config, tmp_path_factory):
    reference = make_reference(config)
    path = tmp_path_factory.mktemp("sampled")
    save_reference(reference, path)
    return reference, model_port.load(path)


@pytest.fixture(scope="module")
def sampler(pair):
    return Sampler(pair[1], **SETTINGS)


def as_prompt(inputs: Inputs, config: ModelConfig = CONFIG) -> SamplerPrompt:
    ids = inputs.ids[None]  # as processors return them
    return SamplerPrompt(ids, frames_of(config, ids, **inputs.media))


@pytest.fixture(scope="module")
def requests() -> list[SamplerRequest]:
    """Returns more requests than rows, of all kinds and lengths, two with the same prompt."""
    made = {kind: as_prompt(inputs) for kind, inputs in prompts(CONFIG).items()}
    lengths = {"mixed": 7, "text": 23, "image": 1, "video": 11, "images": 17}
    requests = [SamplerRequest(made[kind], SamplingParams(n, seed=n, temperature=0.7)) for kind, n in lengths.items()]
    return [*requests, SamplerRequest(made["mixed"], SamplingParams(13, seed=2**40 + 1, temperature=0.7))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "mixed"])
def test_greedy_equals_transformers_generate(pair, sampler, kind):
    assert_greedy(pair[0], sampler, prompts(CONFIG)[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "experts"])
def test_greedy_of_other_families_equals_transformers_generate(name, tmp_path_factory):
    reference, ours = load_pair(CONFIGS[name], tmp_path_factory)
    assert_greedy(reference, Sampler(ours, **SETTINGS), prompts(ours.config)["images"])


def assert_greedy(reference, sampler, inputs: Inputs) -> None:
    arguments = inputs.arguments
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    greedy = dict(max_new_tokens=19, do_sample=False, eos_token_id=None, pad_token_id=0)
    out = reference.generate(**arguments, **greedy, return_dict_in_generate=True, output_logits=True)
    expected = out.sequences[0, len(inputs.ids) :].tolist()
    logp = torch.stack(out.logits)[:, 0].log_softmax(-1)[torch.arange(19), expected].numpy()
    prompt = as_prompt(inputs, sampler.config)
    [got] = sampler.generate([SamplerRequest(prompt, SamplingParams(19, temperature=0))])
    assert got.ids == expected
    np.testing.assert_allclose(got.behavior_logp, logp, atol=1e-4)


@pytest.mark.slow
def test_frame_intervals_are_part_of_the_cache_key(tmp_path_factory):
    _, ours = load_pair(CONFIGS["windows"], tmp_path_factory)
    sampler, inputs = Sampler(ours, **SETTINGS), prompts(ours.config)["mixed"]
    for seconds in ([0.5, 2.0], [3.0, 0.5]):
        inputs.media["second_per_grid_ts"] = np.array(seconds, np.float32)
        assert_scored(ours, sampler, inputs, temperature=1.0)


@pytest.mark.slow
def test_log_probs_include_the_temperature(pair, sampler):
    assert_scored(pair[1], sampler, prompts(CONFIG)["mixed"], temperature=0.6)


def assert_scored(ours, sampler, inputs: Inputs, temperature: float) -> None:
    """Compares log-probs with the model's logits for the prompt and the sampled tokens."""
    sampling = SamplingParams(9, seed=4, temperature=temperature)
    [got] = sampler.generate([SamplerRequest(as_prompt(inputs, sampler.config), sampling)])
    scored = model_port.logits(ours, np.concatenate([inputs.ids, got.ids]), **inputs.media)
    rows = jnp.asarray(scored[len(inputs.ids) - 1 : -1])
    expected = jax.nn.log_softmax(rows / temperature)[jnp.arange(9), jnp.asarray(got.ids)]
    np.testing.assert_allclose(got.behavior_logp, expected, atol=1e-4)


@pytest.mark.slow
def test_a_mixtures_tokens_do_not_depend_on_other_requests(tmp_path_factory):
    """Its rows share expert blocks with other requests' rows."""
    _, ours = load_pair(CONFIGS["experts"], tmp_path_factory)
    texts = [SamplerPrompt(np.arange(start, start + 20)) for start in range(4)]
    requests = [SamplerRequest(text, SamplingParams(9 + n, seed=n)) for n, text in enumerate(texts)]
    alone = [Sampler(ours, **SETTINGS).generate([request])[0] for request in requests]
    assert Sampler(ours, **SETTINGS).generate(requests) == alone


@pytest.mark.slow
def test_seeds_give_different_tokens(sampler, requests):
    prompt = requests[0].prompt
    seeded = (SamplerRequest(prompt, SamplingParams(23, seed=seed)) for seed in (1, 2, 2**32 + 1))
    one, *others = (sampler.generate([request]) for request in seeded)
    assert one not in others


@pytest.mark.slow
def test_sampled_frequencies_follow_the_tempered_distribution(pair):
    """Chi-square test of the first token over 1000 seeds against log_softmax(z / T); rare tokens are pooled."""
    _, ours = pair
    inputs = prompts(CONFIG)["text"]
    sampler = Sampler(ours, **{**SETTINGS, "max_rows": 8, "tokens_per_step": 1})
    prompt, count = as_prompt(inputs), 1000
    requests = (SamplerRequest(prompt, SamplingParams(1, seed=seed, temperature=0.8)) for seed in range(count))
    first = [completion.ids[0] for completion in sampler.generate(requests)]
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
def test_compiled_programs_are_shared_by_lengths_and_samplers(pair, requests):
    settings = {**SETTINGS, "max_context_tokens": 200}  # a model that no other test uses
    before = [program._cache_size() for program in PROGRAMS]
    for length in (1, 64, 65, 129):
        request = SamplerRequest(SamplerPrompt(np.arange(length) % 100), SamplingParams(200 - length))
        Sampler(pair[1], **settings).generate([request, request, *requests])
    more = [program._cache_size() - size for program, size in zip(PROGRAMS, before, strict=True)]
    assert more[1:] == [1, 1, 1] and more[0] <= 3  # frames of three sizes


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}], ids=["one device", "fsdp=2"])
def test_decoding_is_compiled_once_beside_the_programs_that_run_before_it(mesh, tmp_path):
    compiled: list[tuple[str, str]] = []

    def on_event(event, duration_secs, **kwargs):
        if event == COMPILED:
            compiled.append((str(kwargs["fun_name"]), threading.current_thread().name))

    make_tiny(tmp_path / "hf")
    mesh = None if mesh is None else make_mesh(**mesh)
    jax.monitoring.register_event_duration_secs_listener(on_event)
    with on_mesh(mesh):
        sampler = Sampler(model_port.load(tmp_path / "hf", mesh=mesh), max_rows=3, max_context_tokens=100)
        sampler.generate([SamplerRequest(TEXT, SamplingParams(20))])
    threads = {name: thread for name, thread in compiled if name in ("jit(decode)", "jit(prefill)")}
    assert threads["jit(decode)"] != threads["jit(prefill)"]
    assert [name for name, _ in compiled].count("jit(decode)") == 1


@pytest.mark.slow
def test_tokens_do_not_depend_on_limits_other_rows_or_the_cache(pair, requests):
    text = np.arange(5, 2005) % 100
    prompts = [text, np.append(1, text[1:])]  # equal pages after different ones
    all_requests = [*requests, *(SamplerRequest(SamplerPrompt(ids), SamplingParams(40, seed=2)) for ids in prompts)]
    expected = [Sampler(pair[1], **SETTINGS).generate([request])[0] for request in requests]
    wide = Sampler(pair[1], **{**SETTINGS, "max_context_tokens": 4096})
    first = wide.generate(all_requests)
    again = wide.generate(all_requests[::-1])[::-1]  # with their prompts in the cache
    assert first == again and first[: len(requests)] == expected
    assert len({tuple(completion.ids) for completion in expected}) == len(expected)


@pytest.mark.slow
def test_shared_prefixes_and_frames_are_computed_once(pair, requests, monkeypatch):
    calls = Counter()
    for name in ("encode", "prefill", "copy_page"):
        program = getattr(sampler_module, name)
        monkeypatch.setattr(
            sampler_module, name, lambda *a, name=name, program=program: calls.update([name]) or program(*a)
        )
    settings = {**SETTINGS, "max_context_tokens": 1280}
    sampler = Sampler(pair[1], **settings, cache_tokens=1280)  # two long prompts fit only because they share pages
    text, mixed = np.arange(5, 605) % 100, requests[0].prompt

    def work(*prompts: SamplerPrompt) -> dict[str, int]:
        calls.clear()
        sampler.generate(SamplerRequest(prompt, SamplingParams(3, seed=seed)) for seed, prompt in enumerate(prompts))
        return dict(calls)

    assert work(SamplerPrompt(text)) == {"prefill": 5}  # chunks of 128 tokens
    assert work(*[SamplerPrompt(text)] * 3) == {"copy_page": 3}  # the partial page
    assert work(SamplerPrompt(np.concatenate([text, text]))) == {"prefill": 6}  # from token 512 on
    assert work(SamplerPrompt(text[1:])) == {"prefill": 5}
    assert work(mixed) == {"encode": 3, "prefill": 1}  # frames of three sizes
    assert work(SamplerPrompt(np.concatenate([mixed.ids[0], [7]]), mixed.frames)) == {"prefill": 1}  # frames are cached
    changed = replace(mixed.frames[0], patches=mixed.frames[0].patches + 1)
    assert work(SamplerPrompt(mixed.ids, (changed, *mixed.frames[1:]))) == {"encode": 1, "prefill": 1}
    at_the_start_of_a_page, zeros = np.array([*text[:64], *[IMAGE] * 4, 1]), frame(4, 4)
    for picture in (zeros, replace(zeros, patches=zeros.patches + 1)):
        assert work(SamplerPrompt(at_the_start_of_a_page, (picture,))) == {"encode": 1, "prefill": 1}


@pytest.mark.slow
def test_requests_wait_for_free_pages(pair):
    prompts = [SamplerPrompt(np.arange(start, start + 60)) for start in range(5)]
    requests = [SamplerRequest(prompt, SamplingParams(100, seed=1)) for prompt in prompts]  # three pages each
    expected = [completion.ids for completion in Sampler(pair[1], **SETTINGS).generate(requests)]
    scarce = Sampler(pair[1], **SETTINGS, cache_tokens=192)
    numbers = [scarce.submit(request) for request in requests]
    most, done = 0, {}
    while scarce.busy:
        done |= scarce.step()
        most = max(most, sum(row is not None for row in scarce._rows))
        assert scarce._pool.num_available >= 0
    assert [done[number].ids for number in numbers] == expected and most == 2  # of three rows
    assert scarce._pool.num_available == scarce._pool.num_pages - 1  # all except the reserved page


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_layers_of_separate_arrays_sample_the_same_tokens(rank, pair, requests):
    model, lora = nnx.merge(*nnx.split(pair[1])), LoraConfig(rank=rank)
    shapes = adapter_shapes(model.config, rank)
    add_adapter(model, lora, {path: np.full(shape, 0.1, np.float32) for path, shape in shapes.items()})
    expected = Sampler(model, **SETTINGS).generate(requests)
    model.text.layers = split(model.text.layers, [1] * model.config.text.num_layers)
    for layer in model.text.layers if rank else ():
        layer.join(2)
    for got, want in zip(Sampler(model, **SETTINGS).generate(requests), expected, strict=True):
        assert got.ids == want.ids
        np.testing.assert_allclose(got.behavior_logp, want.behavior_logp, atol=1e-5)


@pytest.mark.slow
def test_abort_frees_the_row_and_leaves_the_others_alone(sampler, requests):
    expected = [sampler.generate([request])[0].ids for request in requests]
    numbers = [sampler.submit(request) for request in requests]
    finished = sampler.step()
    assert numbers[1] not in finished  # 23 tokens need more than one step of 5
    aborted = sampler.abort(numbers[1])
    waiting = sampler.abort(numbers[5])
    assert aborted.finish == "abort" and aborted.ids == expected[1][: len(aborted.ids)] and waiting.ids == []
    while sampler.busy:
        finished |= sampler.step()
    left = dict(zip(numbers, expected, strict=True))
    del left[numbers[1]], left[numbers[5]]
    assert {number: completion.ids for number, completion in finished.items()} == left


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


TEXT, ENDS_WITH_A_FRAME = SamplerPrompt(np.arange(20)), SamplerPrompt(np.array([IMAGE] * 4), (frame(4, 4),))
LARGE_FRAME = SamplerPrompt(np.array([*[IMAGE] * 4096, 1]), (frame(128, 128),))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        (TEXT, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (TEXT, {"max_new_tokens": 1.5}, r"max_new_tokens=1\.5, .* must be integers"),
        (TEXT, {"stop_ids": (1.5,)}, r"stop_ids=\(1.5,\) must be integers"),
        *(
            (TEXT, {"temperature": value}, f"temperature={value} must")
            for value in (-1, 1e-40, float("inf"), float("nan"))
        ),
        (TEXT, {"stop_ids": tuple(range(9))}, "9 stop ids"),
        (TEXT, {"max_new_tokens": 8190}, "needs 8210 tokens of context, but the sampler has max_context_tokens=8192"),
        (SamplerPrompt(np.zeros(0, np.int32)), {}, "at least one token"),
        (SamplerPrompt(np.array([1, CONFIG.text.vocab_size])), {}, "input_ids from 1 to 131 are not all in the vocab"),
        (ENDS_WITH_A_FRAME, {}, "a prompt must end with text"),
        (LARGE_FRAME, {}, "a frame has 4096 tokens, but the sampler supports at most 4032"),
    ],
)
def test_invalid_requests_are_rejected(prompt, sampling, message):
    sampler = Sampler(abstract_model(CONFIG), max_rows=1, max_context_tokens=8192)
    with pytest.raises(ValueError, match=message):
        sampler.submit(SamplerRequest(prompt, SamplingParams(**{"max_new_tokens": 3, **sampling})))


@pytest.mark.parametrize("program", ["encode", "prefill"])
def test_an_interrupted_call_leaves_no_requests_and_no_unfinished_cache(program, pair, requests, monkeypatch):
    sampler, fresh = (Sampler(pair[1], **SETTINGS) for _ in range(2))

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, program, interrupt)
        with pytest.raises(KeyboardInterrupt):
            sampler.generate(requests)
    assert not sampler.busy and sampler._pool.num_available == sampler._pool.num_pages - 1
    assert [c.ids for c in sampler.generate(requests)] == [c.ids for c in fresh.generate(requests)]


def test_a_rejected_request_leaves_no_others_of_its_call_in_the_queue():
    sampler = Sampler(abstract_model(CONFIG), max_rows=1, max_context_tokens=64)
    valid = SamplerRequest(TEXT, SamplingParams(3))
    number = sampler.submit(valid)
    with pytest.raises(ValueError, match="at least one token"):
        sampler.generate([valid, SamplerRequest(SamplerPrompt(np.zeros(0, np.int32)), SamplingParams(3))])
    sampler.abort(number)
    assert not sampler.busy


def test_a_cache_smaller_than_a_row_is_rejected():
    with pytest.raises(ValueError, match="cache_tokens=64 is less than max_context_tokens=128"):
        Sampler(abstract_model(CONFIG), max_context_tokens=128, cache_tokens=64)


def test_the_first_of_the_highest_logits_is_chosen():
    logits = np.array([[1, 3, 2, 3], [5, 5, 5, 5], [-np.inf, -np.inf, -1, -2]], np.float32)
    assert first_of_highest(jnp.asarray(logits)).tolist() == logits.argmax(axis=1).tolist() == [1, 0, 2]


def random_request(chance: random.Random) -> SamplerRequest:
    """Draws a request; many prompts share a prefix that ends at or near a page boundary."""
    ids = np.arange(5, 5 + chance.choice([63, 64, 65, 128, 129])) % 100
    prompt = SamplerPrompt(ids[: chance.choice([len(ids), len(ids), chance.randint(1, 60)])])
    if chance.random() < 0.2:
        prompt = as_prompt(prompts(CONFIG)["mixed"])
    tokens, stop_ids = chance.randint(1, 50), tuple(chance.sample(range(150), 3))
    return SamplerRequest(prompt, SamplingParams(tokens, chance.randrange(2**64), chance.choice([0, 0.7]), stop_ids))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_requests_aborts_and_updates_keeps_tokens_and_pages(seed, pair, tmp_path):
    save_reference(make_reference(CONFIG, seed=8), tmp_path)
    models, chance = [pair[1], model_port.load(tmp_path)], random.Random(seed)
    sampler = Sampler(pair[1], **SETTINGS, cache_tokens=chance.choice([192, 320, 640]))
    running: dict[int, SamplerRequest] = {}
    first: dict[int, tuple[int, int]] = {}  # model -> number of a request's tokens sampled from it
    ended: list[tuple[int, int, SamplerRequest, Completion]] = []
    newest = 0
    for _ in range(60):
        event = chance.choice([*["submit"] * 3, *["step"] * 4, "abort", "update"])
        done = sampler.step() if event == "step" else {}
        if event == "submit":
            request = random_request(chance)
            running[sampler.submit(request)] = request
        elif event == "abort" and running:
            number = chance.choice(list(running))
            done = {number: sampler.abort(number)}
        elif event == "update":
            for number in running:
                if sampled := sampler.sampled(number):
                    first.setdefault(number, (newest, len(sampled)))
            newest = 1 - newest
            sampler.update(models[newest])
        for number, completion in done.items():
            ended.append((*first.get(number, (newest, len(completion.ids))), running.pop(number), completion))
        users = Counter(page for row in sampler._rows if row is not None for page in row.pages)
        assert [users[page] for page in range(sampler._pool.num_pages)] == sampler._pool._users
        assert sampler._pool.num_available == sampler._pool.num_pages - 1 - len(users)
    for model, num, request, completion in ended:
        (alone,) = Sampler(models[model], **SETTINGS).generate([request])
        assert completion.ids[:num] == alone.ids[:num] and completion.behavior_logp[:num] == alone.behavior_logp[:num]
        assert completion.finish in (alone.finish, "abort") or num < len(completion.ids)
