"""One update: what trains moves, how a step is cut into batches does not matter, and a bad gradient ends nothing."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import model_port
from model_port.adapters import adapter_shapes, add_adapter, new_adapter
from model_port.config import LoraConfig
from model_port.inputs import Frame
from model_port.sharding import flat_params, make_mesh, num_row_parts
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import Dialogue, PackShape, pack
from paravt_jax.learner.programs import add_gradients, apply_gradients, encode_vision, score
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts

OPTIM = OptimConfig(learning_rate=1e-3)
LOSS = LossConfig(kl_coef=0.0)
PROGRAMS = (encode_vision, score, add_gradients, apply_gradients)
LORA = LoraConfig(rank=3)
ONE_ROW = PackShape(num_rows=1, row_tokens=96, row_patches=16)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Of logits, also in rows as short as these."""
    monkeypatch.setattr("paravt_jax.learner.learner.HEAD_CHUNK_TOKENS", 8)


@pytest.fixture(scope="module")
def frames(tiny_hf):
    values = model_port.load(tiny_hf).config.vision.patch_values
    return {"a": Frame(np.random.default_rng(0).standard_normal((16, values), np.float32), (4, 4))}


@pytest.fixture(scope="module")
def dialogues(tiny_hf):
    config = model_port.load(tiny_hf).config
    prompt = np.random.default_rng(1).integers(5, 900, 19)
    prompt[4:8] = config.image_token_id
    found = []
    for number in range(3):
        random = np.random.default_rng(10 + number)
        ids = np.r_[prompt, random.integers(5, 900, 13)]
        mask = np.arange(len(ids)) >= 20
        advantage = np.full(len(ids), [1.0, -0.5, 0.25][number], np.float32)
        classes = (np.arange(len(ids)) % 2).astype(np.int32)
        logp = np.full(len(ids), -6.0, np.float32)
        found.append(Dialogue(ids, ("a",), 19, 1, mask, logp, advantage, classes, number))
    return found


def learner(tiny_hf, optim=OPTIM, loss=LOSS, mesh=None, temperature=0.7) -> Learner:
    return Learner(model_port.load(tiny_hf, mesh=mesh), optim, loss, temperature=temperature, mesh=mesh)


def batches(tiny_hf, dialogues, frames, shape=ONE_ROW):
    return pack(dialogues, frames, model_port.load(tiny_hf).config, shape)


def params(learner) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flat_params(nnx.state(learner.model)).items()}


def assert_close(one, other, tolerance):
    for path, value in one.items():
        assert np.abs(value - other[path]).max() <= tolerance, path


NUM_TOKENS = 36.0
COUNTS = StepCounts(NUM_TOKENS, 3.0, 96.0)


@pytest.mark.slow
def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely(tiny_hf, dialogues, frames):
    ours = learner(tiny_hf)
    (batch,) = batches(tiny_hf, dialogues, frames)
    before = ours.log_probs(batch)
    metrics = [ours.update([StepPart([batch], COUNTS)], 3) for _ in range(5)]
    change = (ours.log_probs(batch) - before)[batch.loss_mask]
    sign = np.sign(batch.advantage[batch.loss_mask])
    assert np.mean(change * sign > 0) > 0.9
    assert int(ours.state.step) == 5
    assert all(np.isfinite(list(m.values())).all() for m in metrics)
    assert metrics[0]["loss/num_tokens"] == NUM_TOKENS
    assert metrics[0]["mismatch/behavior_kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", [LOSS, LossConfig("gspo", kl_coef=0.0)], ids=["tokens", "sequences"])
def test_however_a_step_is_cut_the_update_is_the_same(loss, tiny_hf, dialogues, frames):
    whole, cut = (learner(tiny_hf, loss=loss) for _ in range(2))
    alone = [replace(d, num_shared=0, num_shared_frames=0) for d in dialogues]
    pieces = batches(tiny_hf, alone, frames, PackShape(1, 40, 16))
    assert len(pieces) == 3
    expected = whole.update([StepPart(batches(tiny_hf, dialogues, frames), COUNTS)], 3)
    found = cut.update([StepPart(pieces, COUNTS)], 3)
    assert found["loss/num_tokens"] == NUM_TOKENS
    assert found["loss/total"] == pytest.approx(expected["loss/total"], rel=1e-4, abs=1e-6)
    assert_same_gradient(whole, cut)


def assert_same_gradient(one, other):
    """Seen in Adam's moments, not in the weights: those it moves by the gradient over the root of its square, and where
    that is nearly zero, rounding decides about a whole step."""
    moments = [
        np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(_mu(each))]) for each in (one, other)
    ]
    assert np.linalg.norm(moments[0] - moments[1]) <= 1e-5 * np.linalg.norm(moments[0])


def _mu(learner):
    return nnx.to_pure_dict(learner.state.opt_state[1][0].mu)


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", [False, True])
def test_the_vision_tower_moves_only_when_it_trains(train_vision, tiny_hf, dialogues, frames):
    ours = learner(tiny_hf, replace(OPTIM, train_vision=train_vision))
    before = params(ours)
    ours.update([StepPart(batches(tiny_hf, dialogues, frames), COUNTS)], 3)
    after = params(ours)
    moved = {path for path, value in before.items() if not np.array_equal(value, after[path])}
    assert any(path.startswith("vision") for path in moved) == train_vision
    assert {path for path in before if path.startswith("text")} <= moved | {"text.embed.table_vd"}
    num_moments = sum(leaf.size for leaf in jax.tree.leaves(_mu(ours)))
    assert (num_moments == sum(value.size for value in before.values())) == train_vision


@pytest.mark.slow
def test_gradients_that_are_not_finite_skip_the_update_and_in_the_end_stop_the_run(
    tiny_hf, dialogues, frames, monkeypatch
):
    monkeypatch.setattr("paravt_jax.learner.learner.MAX_BAD_STEPS", 2)
    ours = learner(tiny_hf)
    (good,) = batches(tiny_hf, dialogues, frames)
    bad = replace(good, advantage=np.where(good.loss_mask, np.inf, 0).astype(np.float32))
    before = params(ours)
    assert ours.update([StepPart([bad], COUNTS)], 3)["optim/num_bad_steps"] == 1
    assert_close(params(ours), before, 0)
    assert ours.update([StepPart([good], COUNTS)], 3)["optim/num_bad_steps"] == 0  # the count is of updates in a row
    ours.update([StepPart([bad], COUNTS)], 3)
    with pytest.raises(RuntimeError, match="not finite in 2 updates in a row"):
        ours.update([StepPart([bad], COUNTS)], 3)


@pytest.mark.slow
def test_the_reference_is_what_training_began_with(tiny_hf, dialogues, frames):
    ours = learner(tiny_hf, loss=LossConfig(kl_coef=0.1))
    packed = batches(tiny_hf, dialogues, frames)
    kl = [ours.update([StepPart(packed, COUNTS)], 3)["loss/kl_ref"] for _ in range(3)]
    assert abs(kl[0]) < 1e-6
    assert min(kl[1:]) > 1e-6
    assert learner(tiny_hf)._ref is None  # none is held where it counts for nothing


@pytest.mark.slow
def test_log_probs_known_from_before_give_the_first_update_and_hold_the_later_ones(tiny_hf, dialogues, frames):
    fresh, prepared = (learner(tiny_hf, loss=LossConfig(kl_coef=0.1)) for _ in range(2))
    packed = batches(tiny_hf, dialogues, frames)
    fresh.update([StepPart(packed, COUNTS)], 3)
    old = [prepared.old_log_probs(batch) for batch in packed]
    first = prepared.update([StepPart(packed, COUNTS, old)], 3)
    assert_same_gradient(fresh, prepared)
    assert first["loss/clip_frac"] == 0  # the ratio is 1 everywhere
    for _ in range(4):
        later = prepared.update([StepPart(packed, COUNTS, old)], 3)
    assert later["loss/clip_frac"] > 0  # and moves away from it
    assert later["mismatch/behavior_kl"] == pytest.approx(first["mismatch/behavior_kl"])  # that of the old policy


@pytest.mark.slow
def test_the_metrics_of_a_step_in_parts_are_of_all_its_tokens(tiny_hf, dialogues, frames):
    ours = learner(tiny_hf)
    classed = [replace(dialogues[0], token_class=np.ones_like(dialogues[0].token_class)), dialogues[1], dialogues[2]]
    counts = StepCounts(12.0, 1.0, 32.0)
    packed = [batches(tiny_hf, [one], frames) for one in classed]
    parts = [StepPart(one, counts, [ours.old_log_probs(batch) for batch in one]) for one in packed]
    before = np.concatenate([ours.log_probs(one[0])[one[0].loss_mask] for one in packed])
    found = ours.update([*parts, StepPart([], counts)], 1)
    assert int(ours.state.step) == 4  # a part without anything to learn from is a version too
    assert found["loss/num_tokens"] == NUM_TOKENS
    behavior = np.concatenate([one[0].behavior_logp[one[0].loss_mask] for one in packed])
    k3 = np.exp(before - behavior) - 1 - (before - behavior)
    assert found["mismatch/behavior_kl"] == pytest.approx(k3.mean(), rel=1e-4)
    odd = np.r_[np.ones(12, bool), np.tile(np.arange(20, 32) % 2 == 1, 2)]
    assert found["mismatch/behavior_kl_structural"] == pytest.approx(k3[odd].mean(), rel=1e-4)
    assert found["loss/ratio_p01"] < 1 < found["loss/ratio_p99"]  # a part later than the first is off its prox
    assert 0 < found["loss/entropy"] < np.log(ours.model.config.text.vocab_size)
    of_classes = [found["loss/entropy_plain"], found["loss/entropy_structural"]]
    assert found["loss/entropy"] == pytest.approx(np.average(of_classes, weights=[12, 24]), rel=1e-4)
    assert found["loss/clip_frac"] == found["loss/clip_low_frac"] + found["loss/clip_high_frac"]


@pytest.mark.slow
def test_kl_in_the_reward_is_taken_from_the_dialogue_that_left_the_reference(tiny_hf, dialogues, frames):
    ours = learner(tiny_hf, loss=LossConfig(kl_coef=0.1, kl_in="reward"))
    packed = batches(tiny_hf, dialogues, frames)
    only_first = [replace(b, advantage=np.where(b.dialogue == 0, b.advantage, 0).astype(np.float32)) for b in packed]

    def penalties():
        part = StepPart(packed, COUNTS, [ours.old_log_probs(batch) for batch in packed])
        return ours.kl_penalties(part, 3)

    np.testing.assert_allclose(penalties(), 0, atol=1e-6)
    for _ in range(3):
        ours.update([StepPart(only_first, COUNTS)], 3)
    assert penalties().argmax() == 0
    assert penalties()[0] > 1e-4


def test_a_step_without_anything_to_learn_is_a_version_with_the_same_weights(tiny_hf):
    ours = learner(tiny_hf)
    before = params(ours)
    ours.skip()
    assert int(ours.state.step) == 1
    assert_close(params(ours), before, 0)


@pytest.mark.slow
def test_clipping_bounds_the_gradient_and_not_its_report(tiny_hf, dialogues, frames):
    packed = batches(tiny_hf, dialogues, frames)
    norms = [
        learner(tiny_hf, replace(OPTIM, max_grad_norm=n)).update([StepPart(packed, COUNTS)], 3)["optim/grad_norm"]
        for n in (1e-3, 1e3)
    ]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-3


@pytest.mark.slow
def test_no_coefficient_compiles_a_program_of_its_own(tiny_hf, dialogues, frames):
    packed = batches(tiny_hf, dialogues, frames)
    loss = LossConfig(kl_coef=0.1)
    learner(tiny_hf, loss=loss).update([StepPart(packed, COUNTS)], 3)
    sizes = [program._cache_size() for program in PROGRAMS]
    numbers = {"clip_low": 0.1, "clip_high": 0.4}
    other = replace(loss, kl_coef=0.2, params=numbers, behavior_cap=3.0)
    optim = replace(OPTIM, learning_rate=1e-4, weight_decay=0.1, max_grad_norm=2.0)
    ours = learner(tiny_hf, optim, other, temperature=0.9)
    ours.update([StepPart(packed, StepCounts(72.0, 4.0, 200.0))], 4)
    assert [program._cache_size() for program in PROGRAMS] == sizes
    learner(tiny_hf, loss=replace(loss, behavior_correction="truncate")).update([StepPart(packed, COUNTS)], 3)
    assert add_gradients._cache_size() > sizes[PROGRAMS.index(add_gradients)]  # another loss is another program


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_moments_and_reference_that_wait_on_the_host_change_no_bit_of_an_update(shape, tiny_hf, dialogues, frames):
    mesh, loss = make_mesh(*shape) if shape != (1, 1, 1) else None, LossConfig(kl_coef=0.1)
    on_device, on_host = (learner(tiny_hf, replace(OPTIM, offload=offload), loss, mesh) for offload in (False, True))
    parts = num_row_parts(mesh)
    packed = batches(tiny_hf, dialogues, frames, replace(ONE_ROW, num_rows=parts, num_parts=parts))
    for ours in (on_device, on_host):
        for _ in range(2):
            ours.update([StepPart(packed, COUNTS)], 3)
    assert_close(params(on_device), params(on_host), 0.0)
    for ours, memory in ((on_device, "device"), (on_host, "pinned_host")):
        waiting = jax.tree.leaves((ours.state.opt_state, ours._ref))
        assert {leaf.sharding.memory_kind for leaf in waiting} == {memory}


def test_masters_in_half_precision_are_refused(tiny_hf):
    with pytest.raises(ValueError, match="the masters must be float32, got bfloat16"):
        Learner(model_port.load(tiny_hf, "bfloat16"), OPTIM, LOSS, temperature=0.7)


@pytest.mark.slow
def test_eight_devices_make_the_same_update_as_one(tiny_hf, dialogues, frames):
    shape = PackShape(num_rows=8, row_tokens=96, row_patches=16)
    alone = [replace(d, num_shared=0, num_shared_frames=0) for d in dialogues]
    packed = batches(tiny_hf, alone, frames, replace(shape, row_tokens=40))
    one = learner(tiny_hf)
    one.update([StepPart(packed, COUNTS)], 3)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        eight = learner(tiny_hf, mesh=mesh)
        eight.update([StepPart(packed, COUNTS)], 3)
        table = flat_params(eight.state.trainable)["text.embed.table_vd"]
        assert (
            table.sharding.spec == jax.tree.leaves(_mu(eight))[0].sharding.spec or len(table.sharding.device_set) == 8
        )
    assert_same_gradient(one, eight)


def with_adapters(tiny_hf, loss=LOSS, mesh=None, params=None) -> Learner:
    model = model_port.load(tiny_hf, mesh=mesh)
    add_adapter(model, LORA, params or new_adapter(model.config, LORA, seed=0), mesh)
    return Learner(model, OPTIM, loss, temperature=0.7, mesh=mesh)


@pytest.mark.slow
def test_adapters_alone_move_and_the_reference_is_the_model_without_them(tiny_hf, dialogues, frames):
    ours, (batch,) = with_adapters(tiny_hf, LossConfig(kl_coef=0.1)), batches(tiny_hf, dialogues, frames)
    base, before, frozen = learner(tiny_hf).log_probs(batch), params(ours), jax.tree.leaves(ours.state.frozen)
    np.testing.assert_array_equal(ours.log_probs(batch), base)
    kl = [ours.update([StepPart([batch], COUNTS)], 3)["loss/kl_ref"] for _ in range(3)]
    assert abs(kl[0]) < 1e-9 and min(kl[1:]) > 1e-6
    np.testing.assert_array_equal(ours.old_log_probs(batch).ref_logp, base)
    after = params(ours)
    assert {path for path, value in before.items() if not np.array_equal(value, after[path])} == {
        path for path in before if "_lora." in path
    }
    assert all(one is other for one, other in zip(jax.tree.leaves(ours.state.frozen), frozen, strict=True))
    num_adapters = sum(value.size for path, value in before.items() if "_lora." in path)
    assert sum(leaf.size for leaf in jax.tree.leaves((_mu(ours), ours._ref))) == 2 * num_adapters
    assert ours.imitate([batch], NUM_TOKENS)["loss/imitation"] > ours.imitate([batch], NUM_TOKENS)["loss/imitation"]


@pytest.mark.slow
def test_adapters_learn_on_a_mesh_what_they_learn_on_one_device(tiny_hf, dialogues, frames):
    alone = [replace(d, num_shared=0, num_shared_frames=0) for d in dialogues]
    packed = batches(tiny_hf, alone, frames, PackShape(num_rows=4, row_tokens=40, row_patches=16))
    random, shapes = np.random.default_rng(4), adapter_shapes(model_port.load(tiny_hf).config, LORA.rank)
    begun = {path: (0.05 * random.standard_normal(shape)).astype(np.float32) for path, shape in shapes.items()}
    one, mesh = with_adapters(tiny_hf, params=begun), make_mesh(data=1, fsdp=2, tensor=2)
    one.update([StepPart(packed, COUNTS)], 3)
    with jax.set_mesh(mesh):
        four = with_adapters(tiny_hf, mesh=mesh, params=begun)
        four.update([StepPart(packed, COUNTS)], 3)
    pair = flat_params(four.state.trainable)
    assert pair["text.layers.mlp.down_lora.kernel_zf"].sharding.spec == PartitionSpec(None, None, "tensor")
    assert_same_gradient(one, four)
