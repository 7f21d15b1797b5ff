"""Packing does not change the gradient: a shared prompt, any split into rows and any mesh give the same."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import model_port
from model_port.config import ModelConfig
from model_port.inputs import NOT_REPLAYED, Frame
from model_port.loading import abstract_params, with_params
from model_port.model import VLModel
from model_port.sharding import flat_params, make_mesh, num_row_parts
from paravt_jax.learner import packing
from paravt_jax.learner.head import token_scores
from paravt_jax.learner.learner import on_devices
from paravt_jax.learner.packing import BatchShape, Dialogue, PackSizes, PromptGroup, TrainBatch, pack
from paravt_jax.learner.programs import action_scores

SHAPE = BatchShape(num_rows=2, row_tokens=160, row_patches=48)
SMALL = replace(SHAPE, num_rows=1, row_tokens=80)
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def several_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paravt_jax.learner.head.MULTIPLE", 7)  # the last block overlaps the one before it
        patch.setattr("paravt_jax.learner.head.WHOLE_TOKENS", 7)
        yield


@pytest.fixture(scope="module")
def model(tiny_hf):
    return model_port.load(tiny_hf)


@pytest.fixture(scope="module")
def frames(model):
    random, num_values = np.random.default_rng(0), model.config.vision.patch_values
    grids = {"a": (2, 4), "b": (4, 4), "c": (4, 6)}
    return {
        key: Frame(random.standard_normal((a * b, num_values), np.float32), (a, b)) for key, (a, b) in grids.items()
    }


def dialogue(model, episode, frames=("a", "b"), shared=31, own=17, prompt_seed=0) -> Dialogue:
    """Makes a prompt with frames, followed by a forced token and sampled tokens."""
    config = model.config
    counts = {"a": 2, "b": 4, "c": 6}
    prompt = np.random.default_rng(prompt_seed).integers(5, 900, shared)
    at = 3
    for key in frames:
        prompt[at : at + counts[key]] = config.image_token_id
        at += counts[key] + 2
    random = np.random.default_rng(100 + episode)
    own_ids = random.integers(5, 900, own)
    mask = np.r_[np.zeros(shared, bool), False, random.random(own - 1) < 0.7]
    logp = -random.random(shared + own).astype(np.float32)
    advantage = random.standard_normal(shared + own).astype(np.float32)
    ids = np.r_[prompt, own_ids]
    classes, likelihood = np.arange(len(ids), dtype=np.int32) % 3, random.random(len(ids), np.float32)
    return Dialogue(ids, frames, shared, len(frames), mask, logp, advantage, classes, episode, likelihood)


@pytest.fixture(scope="module")
def group(model):
    return [dialogue(model, n, own=13 + 2 * n) for n in range(4)]


@partial(jax.jit, static_argnums=0)
def value_and_gradient(graphdef, params, batch):
    def value(params):
        model = nnx.merge(graphdef, params)
        visual = None if batch.vision is None else model.encode_vision(batch.vision)
        logp, _, _ = action_scores(model, batch, visual, TEMPERATURE)
        return jnp.where(batch.loss_mask, batch.advantage * logp, 0).sum()

    return jax.value_and_grad(value)(params)


def objective_and_gradient(model, batches, mesh=None):
    graphdef, params = nnx.split(model)
    total, grads = 0.0, None
    for batch in batches:
        value, grad = value_and_gradient(graphdef, params, on_devices(batch, mesh))
        total += float(value)
        grads = grad if grads is None else jax.tree.map(jnp.add, grads, grad)
    return total, np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(grads)])


def packed(dialogues, frames, config: ModelConfig, shape: BatchShape) -> list[TrainBatch]:
    """Packs with fixed sizes, so that each shape compiles one program."""
    return pack(dialogues, frames, config, shape, agree=lambda sizes: sizes._replace(num_actions=64, num_frame_rows=1))


def test_the_experts_of_a_mixture_are_packed_with_their_tokens(model, frames):
    config = replace(model.config, text=replace(model.config.text, num_experts=8, token_experts=2))
    group = [dialogue(model, n, own=13 + 2 * n) for n in range(3)]
    shape = (config.text.num_layers, config.text.token_experts)
    known = [replace(d, experts=np.broadcast_to(d.ids[:, None, None] % 8, (len(d.ids), *shape))) for d in group[:2]]
    batches = packed([*known, group[2]], frames, config, SHAPE)
    for batch in batches:
        ids, experts = batch.text.tokens, batch.text.experts
        replayed = experts[..., 0, 0] != NOT_REPLAYED
        assert (experts == np.where(replayed, ids % 8, NOT_REPLAYED)[..., None, None]).all()
    own = len(group[2].ids) - group[2].num_shared
    assert packing.replayed_frac(batches) == 1 - own / count_tokens(batches)
    assert all(batch.text.experts is None for batch in packed(group, frames, model.config, SHAPE))


def count_tokens(batches) -> int:
    return sum(np.count_nonzero(batch.text.segment_ids) for batch in batches)


def unshared(dialogues) -> list[Dialogue]:
    """Returns the same dialogues without a shared prompt."""
    return [replace(d, num_shared=0, num_shared_frames=0) for d in dialogues]


def assert_same(first, second, tolerance):
    (value, gradient), (other_value, other_gradient) = first, second
    assert abs(value - other_value) <= tolerance * abs(value)
    assert np.linalg.norm(gradient - other_gradient) <= tolerance * np.linalg.norm(gradient)


@pytest.mark.slow
def test_the_entropy_of_a_token_is_of_the_tempered_logits_and_has_no_gradient():
    random = np.random.default_rng(0)
    hidden, head = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((2, 5, 3), (17, 3)))
    target = jnp.asarray(random.integers(0, 17, (2, 5)), jnp.int32)

    def entropy(hidden, head):
        return token_scores(hidden, head, target, TEMPERATURE)[1]

    logits = np.einsum("BAD,VD->BAV", hidden, head).astype(np.float64) / TEMPERATURE
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -(probability * np.log(probability)).sum(-1)
    np.testing.assert_allclose(entropy(hidden, head), expected, rtol=1e-5)
    gradients = jax.grad(lambda *arrays: entropy(*arrays).sum(), argnums=(0, 1))(hidden, head)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.slow
def test_a_shared_prompt_is_exact_in_double_precision(model, group, frames, float64):
    graphdef, params = nnx.split(model)
    wide = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params))
    wide.compute = replace(model.compute, dtype="float64")
    shared, separate = (packed(dialogues, frames, model.config, SHAPE) for dialogues in (group, unshared(group)))
    assert count_tokens(shared) < count_tokens(separate)
    assert_same(objective_and_gradient(wide, shared), objective_and_gradient(wide, separate), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "row_tokens"), [(1, 80), (3, 128)])
def test_any_order_split_and_padding_give_the_same_gradient(num_rows, row_tokens, model, group, frames):
    more = [dialogue(model, 7, frames=("c",), prompt_seed=1), dialogue(model, 9, frames=(), own=29, prompt_seed=2)]
    expected = objective_and_gradient(model, packed([*group, *more], frames, model.config, SHAPE))
    shape = BatchShape(num_rows, row_tokens, 48)
    repacked = packed([*more, *reversed(group)], frames, model.config, shape)
    assert_same(expected, objective_and_gradient(model, repacked), 1e-5)


@cache
def divisible(tied: bool, config: ModelConfig) -> VLModel:
    """Makes a random model whose sharded axes are divisible by four."""
    text = replace(config.text, num_kv_heads=4, vocab_size=4 * -(-config.text.vocab_size // 4))
    vision = replace(config.vision, num_heads=4)
    return VLModel(replace(config, text=text, vision=vision, tie_embeddings=tied), rngs=nnx.Rngs(0))


def spread(model, mesh):
    """Returns the model with its parameters sharded over the mesh."""
    sharded = abstract_params(model, "float32", mesh)
    params = flat_params(nnx.state(model))
    return with_params(model, {path: jax.device_put(leaf, sharded[path].sharding) for path, leaf in params.items()})


def in_parts(model, frames, num_parts):
    """Packs one row with a group of two and three rows with one dialogue each; rows share frames."""
    group = [dialogue(model, n, own=13 + 2 * n) for n in range(2)]
    more = [dialogue(model, n, frames=tuple("bca"[: n - 4]), own=20 + n, prompt_seed=n) for n in range(5, 8)]
    return pack([*group, *more], frames, model.config, BatchShape(4, 80, 24, num_parts=num_parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tied"), [((2, 2, 2), False), pytest.param((1, 1, 4), True, marks=pytest.mark.nightly)], ids=str
)
def test_a_mesh_gives_the_gradient_of_one_device(shape, tied, model, frames, monkeypatch):
    monkeypatch.setattr("model_port.text.LONG_ROW_TOKENS", 64)  # so these are long rows
    mesh, single = make_mesh(*shape), divisible(tied, model.config)
    expected = objective_and_gradient(single, in_parts(single, frames, 1))
    with jax.set_mesh(mesh):
        sharded = objective_and_gradient(spread(single, mesh), in_parts(single, frames, num_row_parts(mesh)), mesh)
    assert_same(expected, sharded, 1e-5)


def test_each_part_of_a_batch_has_the_frames_of_its_rows(model, frames):
    (undivided,), (batch,) = (in_parts(model, frames, num_parts) for num_parts in (1, 4))
    # Each part has one row, in order.
    np.testing.assert_array_equal(batch.text.tokens, undivided.text.tokens)
    of_token = model.config.vision.merge_unit * model.config.vision.patch_values
    of_batch, of_parts = undivided.vision.patches.reshape(-1, of_token), batch.vision.patches.reshape(4, -1, of_token)
    for part, own, shared in zip(of_parts, batch.text.visual_index, undivided.text.visual_index, strict=True):
        np.testing.assert_array_equal(own >= 0, shared >= 0)
        np.testing.assert_array_equal(part[own[own >= 0]], of_batch[shared[shared >= 0]])
    num_frames = batch.vision.segment_ids.max(axis=-1).reshape(4, -1).sum(axis=-1)  # frames of a row are numbered
    np.testing.assert_array_equal(num_frames, [2, 3, 2, 1])


def test_the_rows_of_all_hosts_are_the_batch(model, frames):
    (batch,) = in_parts(model, frames, 4)
    hosts = [packing.rows_of_host(batch, host, 2) for host in range(2)]
    assert [host.vision.num_parts for host in hosts] == [2, 2]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *hosts)
    for rows, expected in zip(jax.tree.leaves(joined), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(rows, expected)
    assert packing.rows_of_host(batch, 0, 1) is batch
    assert BatchShape(2, 64, 16, 1, 8, 4).of_hosts(3) == BatchShape(6, 64, 16, 3, 8, 12)


def test_a_host_with_fewer_dialogues_adds_empty_batches_of_the_agreed_sizes(model, frames):
    def agree(sizes):
        return PackSizes(sizes.num_batches + 2, 2 * sizes.num_actions, sizes.num_frame_rows + 3)

    dialogues = [dialogue(model, 0, own=20)]
    (own, *empty) = pack(dialogues, frames, model.config, BatchShape(2, 80, 24), first_number=5, agree=agree)
    assert len(empty) == 2 and set(own.dialogue[own.loss_mask]) == {5}
    assert not any(batch.loss_mask.any() or batch.text.segment_ids.any() for batch in empty)
    nothing = pack([], frames, model.config, BatchShape(2, 80, 24), agree=lambda _: PackSizes(3, 40, 7))
    assert len(nothing) == 3 and nothing[0].target.shape[1] >= 40 and len(nothing[0].vision.patches) == 8
    shapes = [[leaf.shape for leaf in jax.tree.leaves(batch)] for batch in (own, *empty)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_every_scored_token_is_in_exactly_one_batch_with_its_values(model, group, frames):
    dialogues = [*group, dialogue(model, 7, frames=("c",), prompt_seed=1)]
    batches = pack(dialogues, frames, model.config, SMALL)
    fields = ("behavior_logp", "advantage", "token_class", "likelihood")
    entries, expected = [], []
    for batch in batches:
        columns = [getattr(batch, name)[batch.loss_mask].tolist() for name in ("dialogue", "target", *fields)]
        entries += zip(*columns, strict=True)
    for number, d in enumerate(dialogues):
        columns = [getattr(d, name)[d.loss_mask].tolist() for name in ("ids", *fields)]
        expected += [(number, *values) for values in zip(*columns, strict=True)]
    assert sorted(entries) == sorted(expected)
    for batch in batches:
        segment_ids = np.take_along_axis(batch.text.segment_ids, batch.source, 1)
        assert (segment_ids[batch.loss_mask] > 0).all()


def test_a_sampled_placeholder_is_a_target_without_a_frame(model, group, frames):
    first = group[0]
    ids, mask = first.ids.copy(), first.loss_mask.copy()
    ids[-1], mask[-1] = model.config.image_token_id, True
    (expected,) = pack([replace(first, loss_mask=mask), *group[1:]], frames, model.config, SHAPE)
    (batch,) = pack([replace(first, ids=ids, loss_mask=mask), *group[1:]], frames, model.config, SHAPE)
    (changed,) = np.flatnonzero(batch.target[0] != expected.target[0])
    assert batch.target[0, changed] == model.config.image_token_id
    np.testing.assert_array_equal(batch.text.visual_index, expected.text.visual_index)
    np.testing.assert_array_equal(batch.source, expected.source)


def test_the_first_token_of_a_branch_is_predicted_by_the_last_of_the_prompt(model, frames):
    twins = [dialogue(model, n) for n in range(2)]
    for twin in twins:
        twin.loss_mask[twin.num_shared] = True
    (batch,) = pack(twins, frames, model.config, SHAPE)
    firsts = [(batch.source[0, a], batch.target[0, a]) for a in np.flatnonzero(batch.loss_mask[0])]
    for twin in twins:
        assert (twin.num_shared - 1, twin.ids[twin.num_shared]) in firsts


def test_a_shared_prompt_is_computed_once(model, group, frames):
    together = pack(group, frames, model.config, replace(SHAPE, num_rows=1))
    apart = pack(unshared(group), frames, model.config, replace(SHAPE, num_rows=1))
    assert [count_tokens(batches) for batches in (together, apart)] == [31 + 64, 4 * 31 + 64]
    same_text = [group[0], replace(group[0], frames=("other", "b"))]  # of another video
    (batch,) = pack(same_text, frames | {"other": frames["a"]}, model.config, replace(SHAPE, num_rows=1))
    assert count_tokens([batch]) == 2 * len(group[0].ids)
    assert packing.num_packed(together) == 31 + 64 and packing.used_frac(together) == pytest.approx((31 + 64) / 160)


def test_a_dialogue_longer_than_a_row_a_wrong_id_and_loss_tokens_in_a_shared_prompt_are_rejected(model, group, frames):
    with pytest.raises(ValueError, match=r"of 50 tokens does not fit into pack\.row_tokens=49; raise it"):
        pack(group, frames, model.config, replace(SHAPE, row_tokens=49))
    assert pack(group, frames, model.config, replace(SHAPE, row_tokens=50))
    beyond = replace(group[0], ids=np.append(group[0].ids[:-1], model.config.text.vocab_size))
    with pytest.raises(ValueError, match=r"episode 0 has the id .*, but the vocabulary ends at .*another model's"):
        pack([beyond], frames, model.config, SHAPE)
    wrong = [replace(d, loss_mask=np.ones(len(d.ids), bool)) for d in group]
    with pytest.raises(ValueError, match="loss tokens in the prompt that its group shares"):
        pack(wrong, frames, model.config, SHAPE)


def random_groups(seed: int) -> list[PromptGroup]:
    """Makes prompts of 4 to 64 frames as published, and responses of very different lengths."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(6.1, 0.5, (7, 8)).clip(32, 6144).astype(int).tolist()
    return [PromptGroup(500 + 60 * int(random.choice([4, 8, 16, 32, 64])), own) for own in lengths]


@pytest.mark.parametrize(("row_tokens", "batch_rows"), [(12_288, 1), (6656, 8), (16_384, 3)])
def test_rows_have_every_branch_once_with_its_prompt_and_none_is_too_long(row_tokens, batch_rows):
    groups = random_groups(0)
    rows = packing.place(groups, row_tokens, batch_rows)
    branches = [(piece.group, branch) for row in rows for piece in row for branch in piece.branches]
    assert sorted(branches) == [(n, branch) for n, group in enumerate(groups) for branch in range(8)]
    for row in rows:
        pieces = [PromptGroup(groups[n].prompt, [groups[n].branches[b] for b in branches]) for n, branches in row]
        assert sum(piece.num_tokens for piece in pieces) <= row_tokens
    assert len(branches) > 0 and len(rows) <= batch_rows * packing.num_batches(groups, row_tokens, batch_rows)


def test_a_group_is_cut_only_if_no_row_is_left_for_it():
    groups = [PromptGroup(10, [20, 20]), PromptGroup(10, [30, 20])]
    assert packing.place(groups, 60, 2) == [[(1, [0, 1])], [(0, [0, 1])]]
    assert packing.place(groups, 40, 4) == [[(1, [0])], [(0, [0])], [(0, [1])], [(1, [1])]]


def test_rows_are_as_long_as_the_work_needs():
    lengths = packing.row_lengths(1024, 4)
    assert lengths == [128, 256, 384, 512, 640, 768, 896, 1024]
    group = PromptGroup(100, [100, 100])  # 300 tokens

    def chosen(groups, batch_rows):
        return packing.best_row_tokens(lengths, [packing.num_batches(groups, n, batch_rows) for n in lengths])

    assert chosen([group], 1) == 384
    assert chosen([group], 2) == 256  # a branch in each row
    assert chosen(3 * [group], 1) == 1024  # one batch instead of three
    assert packing.num_batches([group], 128, 1) == float("inf") and chosen([PromptGroup(0, [2000])], 1) == 1024
    assert packing.num_batches([], 128, 1) == 0 and packing.num_batches([PromptGroup(100, [28])], 128, 1) == 1
    assert packing.best_row_tokens([256, 896], [3.0, 1.0]) == 896  # more tokens, but in one batch


@pytest.mark.parametrize(("batch_rows", "least"), [(8, 0.83), (4, 0.9), (1, 0.94)])
def test_the_published_lengths_fill_their_rows(batch_rows, least):
    lengths, slots, used = packing.row_lengths(32_768), 0, 0
    for groups in map(random_groups, range(20)):
        needed = [packing.num_batches(groups, n, batch_rows) for n in lengths]
        row_tokens = packing.best_row_tokens(lengths, needed)
        rows = packing.place(groups, row_tokens, batch_rows)
        slots += row_tokens * batch_rows * -(-len(rows) // batch_rows)
        used += sum(groups[n].prompt + sum(groups[n].branches[b] for b in own) for row in rows for n, own in row)
    assert used / slots >= least


def test_sizes_waste_little_and_are_few():
    sizes = {packing.round_up(count, 4, 4) for count in range(1, 4097)}
    assert all(count <= packing.round_up(count, 4, 4) <= max(count + 3, 1.25 * count) for count in range(1, 4097))
    assert len(sizes) < 50
    assert all(packing.round_up(size, 4, 4) == size for size in sizes)
    assert [packing.halve_while_fits(100, count) for count in (1, 13, 14, 51, 100)] == [13, 13, 25, 100, 100]


def test_tokens_know_the_length_of_their_episode_wherever_its_sub_agents_are_packed(model, group, frames):
    """Two dialogues of one episode, and two episodes with one each, over several batches."""
    dialogues = [replace(d, episode=max(number, 1)) for number, d in enumerate(group)]
    batches = pack(dialogues, frames, model.config, SMALL)
    assert len(batches) > 1
    length = np.bincount([d.episode for d in dialogues], [d.loss_mask.sum() for d in dialogues])
    episodes = np.array([d.episode for d in dialogues])
    for batch in batches:
        own = batch.dialogue[batch.loss_mask]
        np.testing.assert_array_equal(batch.episode_tokens[batch.loss_mask], length[episodes[own]])
