"""Our model equals transformers, forward and gradient, through the files on disk; and each feature is needed for it."""

import inspect
import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from on_use import torch
from reference import (
    CONFIGS,
    Inputs,
    make_reference,
    prompts,
    reference_gradients,
    reference_logits,
    relative_error,
    save_reference,
)

import model_port
from model_port import loading, one_sequence
from model_port.attention.rule import query_runs
from model_port.config import PRESETS, ModelConfig, config_to_hf
from model_port.experts import route
from model_port.inputs import place_tokens, split_frames
from model_port.layers import Compute, gated_silu
from model_port.qwen3_vl.config import interpolation
from model_port.rope import rotation, text_frequencies
from model_port.sharding import flat_params
from model_port.weights import hf_tensors, module_name

KINDS = [
    "mixed",  # text with pictures and videos of unequal sizes
    pytest.param("text", marks=pytest.mark.slow),
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("image", "images", "video")),
]
# The quick tests use the smallest model of each family.
QUICK = ("one_map", "windows", "experts")
NIGHTLY = ("few_experts", "windows_untied")  # its parts are covered by the other prompts
SHOWN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow)
    for name in CONFIGS
]


@pytest.fixture(scope="module", autouse=True)
def blocks_of_experts():
    """Uses the blocked experts, as for rows with many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_port.experts.FEW_TOKENS", 0)
        yield


@pytest.fixture(scope="session")
def load_pair(tmp_path_factory):
    """(transformers' model, ours read from the files it wrote, config) by the config's name."""

    @cache
    def load(name):
        reference = make_reference(CONFIGS[name])
        path = tmp_path_factory.mktemp(name)
        save_reference(reference, path)
        return reference, model_port.load(path), CONFIGS[name]

    return load


@pytest.fixture(scope="session", params=SHOWN)
def pair(request, load_pair):
    return load_pair(request.param)


def assert_parity(pair, kind: str, atol: float = 1e-4) -> None:
    reference, ours, config = pair
    inputs = prompts(config)[kind]
    with torch.no_grad():
        expected = reference_logits(reference, inputs).numpy()
    assert expected.std() > 0.1  # comparing zeros would prove nothing
    np.testing.assert_allclose(model_port.logits(ours, inputs.ids, **inputs.media), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(pair, kind):
    assert_parity(pair, kind)


def our_gradients(model, inputs: Inputs, weights: np.ndarray) -> dict[str, np.ndarray]:
    text, frames = one_sequence(model.config, inputs.ids, **inputs.media)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: jnp.sum(model(text, frames)[0, : len(weights)] * weights))(model)

    return {name: np.asarray(x) for name, x in hf_tensors(model.config, flat_params(gradients(model)))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("text", marks=pytest.mark.nightly), "mixed"])
def test_gradients_equal_transformers(pair, kind):
    reference, ours, config = pair
    inputs = prompts(config)[kind]
    weights = np.random.default_rng(7).standard_normal((len(inputs.ids), config.text.vocab_size)).astype(np.float32)
    expected = reference_gradients(reference, inputs, weights)
    got = {module_name(config, name): value for name, value in our_gradients(ours, inputs, weights).items()}
    assert len(expected) == (len(got) if kind == "mixed" else sum("visual" not in name for name in got))
    for name, gradient in expected.items():
        # Gradients that are zero in exact arithmetic, such as a key bias's, are rounding noise on both sides.
        scale = max(np.linalg.norm(gradient), 1e-3)
        assert np.linalg.norm(got[name] - gradient) / scale < 1e-4, name


class TestStages:
    """Each stage, given the reference's input, must return its output to 1e-5."""

    def test_vision_tower_and_every_deepstack_map(self, pair):
        reference, ours, config = pair
        inputs = prompts(config)["images"]
        with torch.no_grad():
            out = reference.model.visual(inputs.arguments["pixel_values"], inputs.arguments["image_grid_thw"])
        _, frames = one_sequence(config, inputs.ids, **inputs.media)
        visual = jax.jit(lambda frames: ours.encode_vision(frames))(frames)
        real = np.asarray(frames.segment_ids).reshape(-1)[:: config.vision.merge_unit] > 0
        order = reference_order(config, inputs)
        np.testing.assert_allclose(np.asarray(visual.table)[0][real][order], out.pooler_output.numpy(), atol=1e-5)
        maps = getattr(out, "deepstack_features", [])
        assert len(maps) == len(visual.deepstack)
        for ours_map, expected in zip(visual.deepstack[:, 0], maps, strict=True):
            np.testing.assert_allclose(np.asarray(ours_map)[real][order], expected.numpy(), atol=1e-5)

    def test_language_tower_after_the_final_norm(self, pair):
        reference, ours, config = pair
        inputs = prompts(config)["text"]
        with torch.no_grad():
            expected = reference.model(input_ids=torch.from_numpy(inputs.ids)[None]).last_hidden_state.numpy()
        text, _ = one_sequence(config, inputs.ids)
        hidden = jax.jit(lambda text: ours.hidden(text))(text)
        np.testing.assert_allclose(np.asarray(hidden[:, : len(inputs.ids)]), expected, atol=1e-5)

    def test_mrope_positions(self, pair):
        reference, _, config = pair
        for inputs in prompts(config).values():
            given = {name: value for name, value in inputs.arguments.items() if "pixel" not in name}
            expected, _ = reference.model.get_rope_index(**given)
            text, _ = one_sequence(config, inputs.ids, **inputs.media)
            np.testing.assert_array_equal(text.positions[0, : len(inputs.ids)], expected[:, 0].numpy().T)


@pytest.mark.parametrize("name", ["8b", "qwen2.5-vl-7b"])
def test_distant_tokens_are_rotated_like_transformers(name):
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    hf, positions = config_to_hf(PRESETS[name]), np.repeat([[100], [32_767], [262_143]], 3, axis=1)
    theirs = Qwen3VLTextRotaryEmbedding(AutoConfig.for_model(hf.pop("model_type"), **hf).text_config)
    given = torch.from_numpy(positions.T)[:, None]
    expected = [turn[0, :, :64].numpy() for turn in theirs(torch.zeros(1), given)]
    got = rotation(jnp.asarray(positions)[None], text_frequencies(PRESETS[name].text))
    np.testing.assert_allclose(np.concatenate(got), expected, atol=5e-4)  # a float32 angle of 262,143 has 0.016 steps


def reference_order(config: ModelConfig, inputs: Inputs) -> np.ndarray:
    """Returns the rows of our visual table (packed first-fit) in the order of the reference's concatenation."""
    text, frames = one_sequence(config, inputs.ids, **inputs.media)
    rows = text.visual_index[text.visual_index >= 0]
    real = np.flatnonzero(np.asarray(frames.segment_ids).reshape(-1)[:: config.vision.merge_unit])
    return np.searchsorted(real, rows)


# With a feature switched off parity must fail, which shows that tolerance and inputs can detect it.


def assert_detected(pair, kind="mixed"):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_parity(pair, kind)


GELU = jax.nn.gelu


def chunked(config):
    return text_frequencies(config)[0], np.repeat(np.arange(3), config.mrope_sections)


def whole_row(layout, *, causal):
    frames = layout.segment_ids if causal else jnp.minimum(layout.segment_ids, 1)
    return query_runs(layout._replace(segment_ids=frames), causal=causal)


def nearest(grid, config):
    index, weight = interpolation(grid, config)
    return index, (weight == weight.max(axis=1, keepdims=True)).astype(np.float32)


def all_text(tokens, frames, first_rows, config, start=0):
    positions, index, _ = place_tokens(tokens, frames, first_rows, config, start)
    return start + np.repeat(np.arange(len(positions))[:, None], 3, axis=1), index, start + len(positions)


def fresh(frames, grids, intervals=None):
    return [replace(frame, clip_time=None) for frame in split_frames(frames, grids, intervals)]


def not_normalised(logits, count, replayed):
    return jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)


def one_fewer(logits, count, replayed):
    """Gives the last of the chosen experts no weight."""
    weights, _ = route(logits, count - 1)
    return jnp.pad(weights, ((0, 0), (0, 0), (0, 1))), route(logits, count)[1]


def every_gelu(approximate):
    return lambda x, **_: GELU(x, approximate=approximate)


FEATURES = {  # the model with the feature, and the function that lacks it
    "DeepStack": ("tied", "model_port.text.add_deepstack", lambda x, **_: x),
    "interleaved M-RoPE": ("tied", "model_port.text.text_frequencies", chunked),
    "attention within a frame": ("tied", "model_port.attention.flash.query_runs", whole_row),
    "exact GELU in the merger": ("tied", "jax.nn.gelu", every_gelu(approximate=True)),
    "tanh GELU in the blocks": ("tied", "jax.nn.gelu", every_gelu(approximate=False)),
    "interpolated positions": ("tied", "model_port.qwen3_vl.config.interpolation", nearest),
    "vision rotary": ("tied", "model_port.inputs.patch_positions", lambda grid, _: np.zeros((math.prod(grid), 2), int)),
    "one time per video frame": ("tied", "model_port.inputs.place_tokens", all_text),
    "order of windows": ("windows", "model_port.inputs.table_rows", lambda grid, _: np.arange(math.prod(grid) // 4)),
    "one start for a clip": ("windows", "model_port.loading.split_frames", fresh),
    "exact GELU of Qwen2.5-VL": ("windows", "jax.nn.gelu", every_gelu(approximate=True)),
    "several experts": ("experts", "model_port.experts.route", one_fewer),
    "weights with a sum of one": ("experts", "model_port.experts.route", not_normalised),
    "weights from the router": (
        *("experts", "model_port.experts.route"),
        lambda *a: (jnp.full_like((routed := route(*a))[0], 1 / 3), routed[1]),
    ),
    "experts from the router": (
        *("experts", "model_port.experts.route"),
        lambda logits, count, replayed: route(jnp.roll(logits, 1, axis=-1), count),
    ),
    "gate before up": ("experts", "model_port.experts.gated_silu", lambda gate, up: gated_silu(up, gate)),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_parity_needs_each_feature(feature, load_pair, monkeypatch):
    name, target, change = FEATURES[feature]
    forward = inspect.unwrap(loading._logits)
    # A new function object forces a new trace.
    monkeypatch.setattr(loading, "_logits", jax.jit(lambda *inputs: forward(*inputs), static_argnums=0))
    monkeypatch.setattr(target, change)
    assert_detected(load_pair(name), "video" if feature == "one time per video frame" else "mixed")


def no_bias(bias: nnx.Param) -> nnx.Param:
    return nnx.Param(jnp.zeros_like(bias[...]))


WITHOUT = {  # a feature of Qwen2.5-VL, and the change that switches it off
    "windows": ("vision.config", lambda c: replace(c, full_layers=(0, 1, 2))),
    "full attention in some layers": ("vision.config", lambda c: replace(c, full_layers=())),
    "chunked M-RoPE": ("text.config", lambda c: replace(c, interleaved_mrope=True)),
    "positions by the second": ("config", lambda c: replace(c, vision=replace(c.vision, tokens_per_second=4))),
    "bias of queries": ("text.layers.attn.q.bias", no_bias),
    "bias of keys": ("text.layers.attn.k.bias", no_bias),
    "bias of values": ("text.layers.attn.v.bias", no_bias),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", WITHOUT)
def test_parity_needs_each_setting_of_qwen2_5(feature, load_pair, monkeypatch):
    _, ours, _ = pair = load_pair("windows")
    *path, name = WITHOUT[feature][0].split(".")
    owner, change = ours, WITHOUT[feature][1]
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert_detected(pair)


@pytest.fixture(scope="module")
def gradients(load_pair):
    """Returns a function that computes the model's gradients with compute options."""
    _, ours, config = load_pair("tied")
    inputs = prompts(config)["mixed"]
    weights = np.random.default_rng(7).standard_normal((len(inputs.ids), config.text.vocab_size)).astype(np.float32)
    return lambda compute: our_gradients(with_compute(ours, compute), inputs, weights)


@pytest.fixture(scope="module")
def plain(gradients):
    return gradients(Compute())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "lighter_layers"),
    [
        *(("full", 0), ("attention", 2)),
        *(pytest.param(remat, 0, marks=pytest.mark.nightly) for remat in ("offload", "dots", "attention")),
        pytest.param("full", 1, marks=pytest.mark.nightly),
    ],
)
def test_compute_options_change_gradients_only_by_rounding(gradients, plain, remat, lighter_layers):
    other = gradients(Compute(remat=remat, lighter_layers=lighter_layers))
    for name, gradient in plain.items():
        assert relative_error(other[name], gradient) < 1e-4 or np.linalg.norm(gradient) < 1e-3, name


def with_compute(model, compute: Compute):
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, state)
    model.compute = compute
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "experts")) for n in CONFIGS])
def test_bf16_error_is_within_twice_that_of_transformers(name, tmp_path):
    config = CONFIGS[name]
    reference = make_reference(config)
    inputs = prompts(config)["mixed"]
    save_reference(reference, tmp_path)
    with torch.no_grad():
        exact = reference_logits(reference, inputs).numpy()
        theirs = reference_logits(reference.to(torch.bfloat16), inputs).float().numpy()
    bound = 2 * relative_error(theirs, exact)
    pure = model_port.load(tmp_path, "bfloat16")
    with_masters = with_compute(model_port.load(tmp_path, "float32"), Compute(dtype="bfloat16"))
    for model in (pure, with_masters):
        got = model_port.logits(model, inputs.ids, **inputs.media)
        assert 0 < relative_error(got, exact) <= bound
