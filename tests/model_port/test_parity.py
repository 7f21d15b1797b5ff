"""Our model equals transformers, forward and gradient, through the files on disk; and each feature is needed for it."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from reference import (
    CONFIGS,
    Inputs,
    as_hf,
    make_reference,
    prompts,
    reference_gradients,
    reference_logits,
    relative_error,
    save_reference,
)

import model_port
from model_port import experts, loading, one_sequence, rope
from model_port.attention.rule import query_runs
from model_port.config import ModelConfig
from model_port.layers import Compute
from model_port.sharding import flat_params
from model_port.weights import module_name

KINDS = ("text", "image", "images", "video", "mixed")


# The quick part has the smallest of each family.
QUICK = ("one_map", "windows", "experts")
NIGHTLY = ("few_experts", "windows_untied")  # whose parts are in the others
SHOWN = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow)
    for name in CONFIGS
]


@pytest.fixture(scope="module", autouse=True)
def blocks_of_experts():
    """As for rows of many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_port.experts.FEW_TOKENS", 0)
        yield


@pytest.fixture(scope="session", params=SHOWN)
def pair(request, tmp_path_factory):
    """(transformers' model, ours read from the files it wrote, config)"""
    return load_pair(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def tied_pair(tmp_path_factory):
    return load_pair("tied", tmp_path_factory)


def load_pair(name, tmp_path_factory):
    reference = make_reference(CONFIGS[name])
    path = tmp_path_factory.mktemp(name)
    save_reference(reference, path)
    return reference, model_port.load(path), CONFIGS[name]


def assert_parity(pair, kind: str, atol: float = 1e-4) -> None:
    reference, ours, config = pair
    inputs = prompts(config)[kind]
    with torch.no_grad():
        expected = reference_logits(reference, inputs).numpy()
    assert expected.std() > 0.1  # a parity of zeros would prove nothing
    np.testing.assert_allclose(model_port.logits(ours, inputs.ids, **inputs.media), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(pair, kind):
    assert_parity(pair, kind)


def our_gradients(model, inputs: Inputs, weights: np.ndarray) -> dict[str, np.ndarray]:
    text, frames = one_sequence(model.config, inputs.ids, **inputs.media)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: jnp.sum(model(text, frames)[0, : len(weights)] * weights))(model)

    return as_hf(model.config, flat_params(gradients(model)))


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
        # A gradient that is zero in exact arithmetic (a key bias shifts all scores alike) is only noise in both.
        scale = max(np.linalg.norm(gradient), 1e-3)
        assert np.linalg.norm(got[name] - gradient) / scale < 1e-4, name


class TestStages:
    """Each stage gets the reference's own input and must give its output to 1e-5."""

    def test_vision_tower_and_every_deepstack_map(self, pair):
        reference, ours, config = pair
        inputs = prompts(config)["images"]
        with torch.no_grad():
            out = reference.model.visual(torch.from_numpy(inputs.pixel_values), torch.from_numpy(inputs.image_grid_thw))
        _, frames = one_sequence(config, inputs.ids, **inputs.media)
        visual = jax.jit(lambda frames: ours.encode_vision(frames))(frames)
        real = np.asarray(frames.segment_ids).reshape(-1)[:: config.vision.merge_unit] > 0
        order = reference_order(config, inputs)
        np.testing.assert_allclose(np.asarray(visual.table)[0][real][order], out.pooler_output.numpy(), atol=1e-5)
        maps = getattr(out, "deepstack_features", [])
        assert len(maps) == len(visual.deepstack)
        for ours_map, expected in zip(visual.deepstack[:, 0], maps, strict=True):
            np.testing.assert_allclose(np.asarray(ours_map)[real][order], expected.numpy(), atol=1e-5)

    def test_patch_embedding_with_interpolated_positions_or_in_windows(self, pair):
        reference, ours, config = pair
        inputs = prompts(config)["image"]
        grid = torch.from_numpy(inputs.image_grid_thw)
        kept = {}
        hook = reference.model.visual.blocks[0].register_forward_pre_hook(lambda _, args: kept.update(x=args[0]))
        with torch.no_grad():
            reference.model.visual(torch.from_numpy(inputs.pixel_values), grid)
        hook.remove()
        _, frames = one_sequence(config, inputs.ids, **inputs.media)
        tower = ours.vision
        got = tower.patch_embed(jnp.asarray(frames.patches))
        if hasattr(tower, "pos_embed"):
            got += tower.pos_embed(frames.extra["interp_index"], frames.extra["interp_weight"])
        np.testing.assert_allclose(np.asarray(got[0]), kept["x"].numpy(), atol=1e-5)

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
            ids = torch.from_numpy(inputs.ids)[None]
            kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
            media = {k: torch.from_numpy(v) for k, v in inputs.media.items() if "pixel" not in k}
            expected, _ = reference.model.get_rope_index(ids, kinds, **media)
            text, _ = one_sequence(config, inputs.ids, **inputs.media)
            np.testing.assert_array_equal(text.positions[0, : len(inputs.ids)], expected[:, 0].numpy().T)


def reference_order(config: ModelConfig, inputs: Inputs) -> np.ndarray:
    """Rows of our visual table (packed first fit) in the order of the reference's concatenation."""
    text, frames = one_sequence(config, inputs.ids, **inputs.media)
    rows = text.visual_index[text.visual_index >= 0]
    real = np.flatnonzero(np.asarray(frames.segment_ids).reshape(-1)[:: config.vision.merge_unit])
    return np.searchsorted(real, rows)


@pytest.mark.slow
class TestAblations:
    """With a feature switched off, parity must fail: the tolerance and the inputs are able to see it."""

    @pytest.fixture(autouse=True)
    def traced_anew(self, monkeypatch):
        """The programs of before know nothing of what a test takes away."""
        forward = inspect.unwrap(loading._logits)
        monkeypatch.setattr(loading, "_logits", jax.jit(lambda *inputs: forward(*inputs), static_argnums=0))

    def assert_noticed(self, pair, kind="mixed"):
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_parity(pair, kind)

    def test_deepstack(self, tied_pair, monkeypatch):
        monkeypatch.setattr("model_port.text.add_deepstack", lambda x, **_: x)
        self.assert_noticed(tied_pair)

    def test_interleaved_mrope(self, tied_pair, monkeypatch):
        def chunked(config):
            radians, _ = interleaved(config)
            return radians, np.repeat(np.arange(3), config.mrope_sections)

        interleaved = rope.text_frequencies
        monkeypatch.setattr("model_port.text.text_frequencies", chunked)
        self.assert_noticed(tied_pair)

    def test_attention_within_a_frame(self, tied_pair, monkeypatch):
        def whole_row(layout, *, causal):
            frames = layout.segment_ids if causal else jnp.minimum(layout.segment_ids, 1)
            return query_runs(layout._replace(segment_ids=frames), causal=causal)

        monkeypatch.setattr("model_port.attention.flash.query_runs", whole_row)
        self.assert_noticed(tied_pair)

    @pytest.mark.parametrize("everywhere", [True, False], ids=["exact in the merger", "tanh in the blocks"])
    def test_gelu(self, everywhere, tied_pair, monkeypatch):
        gelu = jax.nn.gelu
        monkeypatch.setattr("jax.nn.gelu", lambda x, approximate=True: gelu(x, approximate=everywhere))
        self.assert_noticed(tied_pair)

    def test_position_interpolation(self, tied_pair, monkeypatch):
        def nearest(grid, config):
            index, weight = stretched(grid, config)
            return index, (weight == weight.max(axis=1, keepdims=True)).astype(np.float32)

        from model_port.qwen3_vl import config

        stretched = config.interpolation
        monkeypatch.setattr(config, "interpolation", nearest)
        self.assert_noticed(tied_pair)

    def test_vision_rotary(self, tied_pair, monkeypatch):
        monkeypatch.setattr(
            "model_port.inputs.patch_positions", lambda grid, merge: np.zeros((grid[0] * grid[1], 2), int)
        )
        self.assert_noticed(tied_pair)

    def test_one_time_per_video_frame(self, tied_pair, monkeypatch):
        from model_port import inputs

        place = inputs.place_tokens

        def all_text(tokens, frames, first_rows, config, start=0):
            positions, index, _ = place(tokens, frames, first_rows, config, start)
            return start + np.repeat(np.arange(len(positions))[:, None], 3, axis=1), index, start + len(positions)

        monkeypatch.setattr(inputs, "place_tokens", all_text)
        self.assert_noticed(tied_pair, "video")


@pytest.fixture(scope="session")
def windows_pair(tmp_path_factory):
    return load_pair("windows", tmp_path_factory)


def no_bias(bias: nnx.Param) -> nnx.Param:
    return nnx.Param(jnp.zeros_like(bias[...]))


WITHOUT = {  # a feature of Qwen2.5-VL: what is changed to switch it off, and where
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
def test_parity_needs_each_feature_of_qwen2_5(feature, windows_pair, monkeypatch):
    _, ours, _ = windows_pair
    *path, name = WITHOUT[feature][0].split(".")
    owner, change = ours, WITHOUT[feature][1]
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_parity(windows_pair, "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["order of windows", "one start for a clip", "exact GELU"])
def test_parity_needs_what_the_host_does(broken, windows_pair, monkeypatch):
    def fresh(frames, grids, intervals=None):
        return [replace(frame, clip_time=None) for frame in split(frames, grids, intervals)]

    split, gelu = loading.split_frames, jax.nn.gelu
    forward = inspect.unwrap(loading._logits)
    monkeypatch.setattr(loading, "_logits", jax.jit(lambda *inputs: forward(*inputs), static_argnums=0))
    target, value = {
        "order of windows": ("model_port.inputs.table_rows", lambda grid, config: np.arange(grid[0] * grid[1] // 4)),
        "one start for a clip": ("model_port.loading.split_frames", fresh),
        "exact GELU": ("jax.nn.gelu", lambda x, approximate=True: gelu(x, approximate=True)),
    }[broken]
    monkeypatch.setattr(target, value)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_parity(windows_pair, "mixed")


@pytest.fixture(scope="session")
def experts_pair(tmp_path_factory):
    return load_pair("experts", tmp_path_factory)


ROUTE, SILU = experts.route, experts.gated_silu


def not_normalised(logits, count, replayed):
    return jax.lax.top_k(jax.nn.softmax(logits, axis=-1), count)


def one_fewer(logits, count, replayed):
    """The last one has no weight."""
    weights, _ = ROUTE(logits, count - 1)
    return jnp.pad(weights, ((0, 0), (0, 0), (0, 1))), ROUTE(logits, count)[1]


OTHER_EXPERTS = {  # a feature of the mixtures: the function without it
    "several experts": ("route", one_fewer),
    "weights with a sum of one": ("route", not_normalised),
    "weights from the router": ("route", lambda *a: (jnp.full_like((routed := ROUTE(*a))[0], 1 / 3), routed[1])),
    "experts from the router": ("route", lambda logits, count, replayed: ROUTE(jnp.roll(logits, 1, axis=-1), count)),
    "gate before up": ("gated_silu", lambda gate, up: SILU(up, gate)),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", OTHER_EXPERTS)
def test_parity_needs_each_feature_of_the_mixtures(feature, experts_pair, monkeypatch):
    forward, (name, change) = inspect.unwrap(loading._logits), OTHER_EXPERTS[feature]
    monkeypatch.setattr(loading, "_logits", jax.jit(lambda *inputs: forward(*inputs), static_argnums=0))
    monkeypatch.setattr("model_port.experts." + name, change)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_parity(experts_pair, "mixed")


@pytest.fixture(scope="module")
def gradients(tied_pair):
    """Of the model with this way to compute."""
    _, ours, config = tied_pair
    inputs = prompts(config)["mixed"]
    weights = np.random.default_rng(7).standard_normal((len(inputs.ids), config.text.vocab_size)).astype(np.float32)
    return lambda compute: our_gradients(with_compute(ours, compute), inputs, weights)


@pytest.fixture(scope="module")
def plain(gradients):
    return gradients(Compute())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scan", "remat", "lighter_layers"),
    [
        (True, "full", 0),
        (True, "offload", 0),
        (False, "none", 0),
        (True, "attention", 2),
        (False, "attention", 1),
        pytest.param(True, "dots", 0, marks=pytest.mark.nightly),
        pytest.param(True, "attention", 0, marks=pytest.mark.nightly),
        pytest.param(False, "full", 0, marks=pytest.mark.nightly),
        pytest.param(True, "full", 1, marks=pytest.mark.nightly),
    ],
)
def test_how_it_is_computed_changes_no_gradient_beyond_rounding(gradients, plain, scan, remat, lighter_layers):
    other = gradients(Compute(scan=scan, remat=remat, lighter_layers=lighter_layers))
    for name, gradient in plain.items():
        assert relative_error(other[name], gradient) < 1e-4 or np.linalg.norm(gradient) < 1e-3, name


def with_compute(model, compute: Compute):
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, state)
    model.compute = compute
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in CONFIGS]
)
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
