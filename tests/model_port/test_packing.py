"""Packing into rows, branches, padding and meshes does not change any result."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import DIVISIBLE, EXPERTS_DIVISIBLE, WINDOWS_DIVISIBLE, make_reference, relative_error, save_reference

import model_port
from model_port import loading
from model_port.inputs import Frame, RowSequence, Tokens, pack_text, pack_vision
from model_port.layers import Compute
from model_port.model import VLModel
from model_port.sharding import flat_params, make_mesh

pytestmark = pytest.mark.slow
CONFIG = DIVISIBLE
NIGHTLY = (DIVISIBLE, WINDOWS_DIVISIBLE)
CONFIGS = [EXPERTS_DIVISIBLE, *(pytest.param(each, marks=pytest.mark.nightly) for each in NIGHTLY)]
GRIDS = [(4, 6), (2, 2), (6, 4), (8, 2), (4, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> VLModel:
    return load(CONFIG, tmp_path_factory)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.family)
def each_model(request, tmp_path_factory) -> VLModel:
    """A model of each family."""
    return load(request.param, tmp_path_factory)


def load(config, tmp_path_factory) -> VLModel:
    path = tmp_path_factory.mktemp("divisible")
    save_reference(make_reference(config), path)
    return model_port.load(path)


@pytest.fixture
def double_model(model, float64) -> VLModel:
    return double(model)


def double(model: VLModel) -> VLModel:
    graphdef, state = nnx.split(model)
    double = nnx.merge(graphdef, jax.tree.map(lambda p: p.astype("float64"), state))
    double.compute = Compute(dtype="float64")
    return double


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    random, num_values = np.random.default_rng(11), CONFIG.vision.patch_values
    return [Frame(random.standard_normal((r * c, num_values)).astype(np.float32), (r, c)) for r, c in GRIDS]


@pytest.fixture(scope="module")
def dialogues(frames) -> list[tuple[Tokens, list[Tokens]]]:
    """(prompt, responses): three prompts with pictures, one with a picture in a response, and one with text only."""
    random = np.random.default_rng(12)

    def tokens(num_text: int, *numbers: int) -> Tokens:
        parts = [random.integers(0, 119, num_text)]
        for number in numbers:
            down, across = GRIDS[number]
            parts += [[122], [120] * (down * across // 4), [123], random.integers(0, 119, 3)]
        return Tokens(np.concatenate(parts).astype(np.int32), numbers)

    return [
        (tokens(5, 0, 1), [tokens(7), tokens(2), tokens(11)]),
        (tokens(3, 2), [tokens(5), tokens(3, 3)]),
        (tokens(13), [tokens(1), tokens(17)]),
        (tokens(2, 4, 0), [tokens(4), tokens(4), tokens(6), tokens(1)]),
    ]


@partial(jax.jit, static_argnums=0)
def gradient_and_logits(graphdef, params, text, vision, weight):
    def objective(params):
        logits = nnx.merge(graphdef, params)(text, vision)
        return jnp.sum(logits * weight), logits

    return jax.grad(objective, has_aux=True)(params)


def collect(model, rows, frames, num_tokens, row_patches=24, num_rows=None, mesh=None):
    """Returns the logits of every response by (dialogue, branch), and the gradient of their token-weighted sum."""
    vision, first_rows = pack_vision(frames, model.config.vision, row_patches, num_rows=None if mesh is None else 8)
    sequences = [[sequence for _, sequence in row] for row in rows]
    text = pack_text(sequences, frames, first_rows, model.config, num_tokens, num_rows)
    weight = np.zeros((*text.tokens.shape, 1), model.compute.dtype)
    spans = {}
    for b, row in enumerate(rows):
        at = 0
        for key, sequence in row:
            ends = np.cumsum([len(part.ids) for part in (sequence.trunk, *sequence.branches)])
            for branch, (first, last) in enumerate(pairwise(at + ends)):
                spans[(*key, branch)] = (b, slice(first, last))
                weight[spans[(*key, branch)]] = 1
            at += sequence.num_tokens
    of_token = np.random.default_rng(5).standard_normal(CONFIG.text.vocab_size).astype(model.compute.dtype)
    graphdef, params = nnx.split(model)
    gradient, logits = gradient_and_logits(graphdef, params, text, vision, weight * of_token)
    return {key: np.asarray(logits[where]) for key, where in spans.items()}, flat_params(gradient)


def assert_same(ours, reference, bound):
    (logits, gradient), (expected_logits, expected_gradient) = ours, reference
    assert len(logits) == len(expected_logits)
    for key, value in logits.items():
        assert relative_error(value, expected_logits[key]) < bound, key
    for path, value in gradient.items():
        assert relative_error(value, expected_gradient[path]) < bound, path


def branched(dialogues):
    return [((d, 0), RowSequence(prompt, tuple(responses))) for d, (prompt, responses) in enumerate(dialogues)]


def test_branches_behind_one_prompt_equal_separate_rows_to_ten_digits(each_model, float64, frames, dialogues):
    double_model = double(each_model)
    together = collect(double_model, [[item] for item in branched(dialogues)], frames, 97)
    rows = [
        [((d, g), RowSequence(prompt, (response,)))]  # each response with a copy of its prompt
        for d, (prompt, responses) in enumerate(dialogues)
        for g, response in enumerate(responses)
    ]
    logits, gradient = collect(double_model, rows, frames, 61)
    # (dialogue, g, 0), the keys of separate rows, become (dialogue, 0, g), the keys of branches.
    apart = {(d, 0, g): value for (d, g, _), value in logits.items()}
    assert_same(together, (apart, gradient), 1e-10)


def test_several_sequences_in_a_row_equal_one_each(double_model, frames, dialogues):
    items = branched(dialogues)
    packed = collect(double_model, [[items[2], items[0]], [items[3], items[1]]], frames, 173)
    assert_same(packed, collect(double_model, [[item] for item in items], frames, 97), 1e-10)


def test_padding_rows_tokens_and_patches_change_nothing(double_model, frames, dialogues):
    rows = [[item] for item in branched(dialogues)]
    padded = collect(double_model, rows, frames, 149, row_patches=76, num_rows=7)
    assert_same(padded, collect(double_model, rows, frames, 97), 1e-10)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(dict(data=8), marks=pytest.mark.nightly),
        pytest.param(dict(fsdp=4, tensor=2), marks=pytest.mark.nightly),
        dict(data=2, fsdp=2, tensor=2),
    ],
    ids=str,
)
def test_mesh_of_eight_devices_equals_one(each_model, frames, dialogues, shape):
    rows = [[item] for item in branched(dialogues)]
    alone = collect(each_model, rows, frames, 97, num_rows=8)
    mesh = make_mesh(**shape)
    places = loading.abstract_params(each_model, "float32", mesh)
    params = flat_params(nnx.state(each_model))
    on_mesh = {path: jax.device_put(leaf, places[path].sharding) for path, leaf in params.items()}
    with jax.set_mesh(mesh):
        spread = collect(loading.with_params(each_model, on_mesh), rows, frames, 97, num_rows=8, mesh=mesh)
    assert_same(spread, alone, 1e-5)
    kernels = [gradient for path, gradient in spread[1].items() if "kernel" in path]
    assert any(not gradient.sharding.is_fully_replicated for gradient in kernels) or "fsdp" not in shape
