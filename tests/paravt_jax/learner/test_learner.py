"""One update: only trained parameters change, the split into batches has no effect, bad gradients are skipped."""

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
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.learner.ahead import UpdateCompiler
from paravt_jax.learner.batch_shape import shapes_of_batch
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import BatchShape, Dialogue, pack
from paravt_jax.learner.programs import apply_gradients, encode_vision, gradients, score
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.run.compiles import COMPILED

OPTIM = OptimConfig(learning_rate=1e-3)
LOSS = LossConfig(kl_coef=0.0)
LOSS_KL = LossConfig(kl_coef=0.1)
PROGRAMS = (encode_vision, score, gradients, apply_gradients)
LORA = LoraConfig(rank=3)
ONE_ROW = BatchShape(num_rows=1, row_tokens=96, row_patches=16)
NUM_TOKENS = 36.0
COUNTS = StepCounts(NUM_TOKENS, 3.0, 96.0)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Computes logits in several blocks even for short rows; the last block overlaps the one before it."""
    monkeypatch.setattr("paravt_jax.learner.head.MULTIPLE", 7)
    monkeypatch.setattr("paravt_jax.learner.head.WHOLE_TOKENS", 8)


@pytest.fixture(scope="module")
def config(tiny_hf):
    return model_port.load(tiny_hf).config


@pytest.fixture(scope="module")
def frames(config):
    patches = np.random.default_rng(0).standard_normal((16, config.vision.patch_values), np.float32)
    return {"a": Frame(patches, (4, 4))}


@pytest.fixture(scope="module")
def dialogues(config):
    prompt = np.random.default_rng(1).integers(5, 900, 19)
    prompt[4:8] = config.image_token_id

    def dialogue(number: int, advantage: float) -> Dialogue:
        ids = np.r_[prompt, np.random.default_rng(10 + number).integers(5, 900, 13)]
        n, classes = len(ids), (np.arange(len(ids)) % 2).astype(np.int32)
        advantages, logp = (np.full(n, value, np.float32) for value in (advantage, -7.0))
        return Dialogue(ids, ("a",), 19, 1, np.arange(n) >= 20, logp, advantages, classes, number)

    return [dialogue(number, advantage) for number, advantage in enumerate([1.0, -0.5, 0.25])]


@pytest.fixture(scope="module")
def unshared(dialogues):
    """Returns the same dialogues without a shared prompt."""
    return [replace(d, num_shared=0, num_shared_frames=0) for d in dialogues]


@pytest.fixture(scope="module")
def batches(dialogues, frames, config):
    return pack(dialogues, frames, config, ONE_ROW)


def make_learner(tiny_hf, optim=OPTIM, loss=LOSS, mesh=None, temperature=0.7) -> Learner:
    return Learner(model_port.load(tiny_hf, mesh=mesh), optim, loss, temperature=temperature, mesh=mesh)


def update(learner, batches, old=None, num_updates=1) -> list[dict[str, float]]:
    return [learner.update([StepPart(batches, COUNTS, old)], 6) for _ in range(num_updates)]


def params(learner) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flat_params(nnx.state(learner.model)).items()}


def changed(params, other_params) -> set[str]:
    return {path for path, value in params.items() if not np.array_equal(value, other_params[path])}


def adam_mu(learner):
    return nnx.to_pure_dict(learner.state.opt_state[1][0].mu)


def assert_same_gradient(first, second):
    """Compares Adam's moments, because its weights divide by the gradient's size and so amplify rounding."""
    leaves = [jax.tree.leaves(adam_mu(learner)) for learner in (first, second)]
    moments = [np.concatenate([np.asarray(leaf).ravel() for leaf in of_learner]) for of_learner in leaves]
    assert np.linalg.norm(moments[0] - moments[1]) <= 1e-5 * np.linalg.norm(moments[0])


@pytest.mark.slow
def test_an_update_raises_the_log_probs_of_good_tokens_and_lowers_those_of_bad_ones(tiny_hf, batches):
    learner, (batch,) = make_learner(tiny_hf), batches
    logp = learner.log_probs(batch)
    metrics = update(learner, batches, num_updates=5)
    change = (learner.log_probs(batch) - logp)[batch.loss_mask]
    assert np.mean(change * np.sign(batch.advantage[batch.loss_mask]) > 0) > 0.9
    assert int(learner.state.step) == 5
    assert all(np.isfinite(list(m.values())).all() for m in metrics)
    assert metrics[0]["loss/num_tokens"] == NUM_TOKENS
    assert metrics[0]["mismatch/behavior_kl"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rl", "imitation"])
def test_metrics_have_the_learning_rate_of_the_update(way, tiny_hf, batches):
    optim = replace(OPTIM, schedule="cosine")
    learner = Learner(model_port.load(tiny_hf), optim, LOSS, temperature=0.7, num_steps=60)
    learner.skip()
    metrics = learner.imitate(batches, NUM_TOKENS) if way == "imitation" else update(learner, batches)[0]
    assert metrics["optim/learning_rate"] == pytest.approx(optim.learning_rate / 3)  # step 1 of a warm-up of 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rl", "imitation"])
def test_an_update_of_a_mixture_reports_the_load_of_its_experts(way, batches, tmp_path):
    make_tiny(tmp_path / "hf", config=tiny_config("qwen3_vl_moe"))
    learner = make_learner(tmp_path / "hf")
    router = learner.state.trainable["text"]["layers"]["mlp"]["router_kernel_xm"]
    router.set_value(0 * router.get_value())  # ties: every token goes to experts 0 and 1 of 8, in all 4 layers
    metrics = learner.imitate(batches, NUM_TOKENS) if way == "imitation" else update(learner, batches)[0]
    assert (metrics["moe/expert_load_max"], metrics["moe/dead_experts"]) == (4.0, 4 * 6)


def subagents_of(dialogues, config) -> list[Dialogue]:
    """Returns one sub-agent dialogue per episode, without a shared prompt."""
    random = np.random.default_rng(2)

    def dialogue(d: Dialogue, n: int) -> Dialogue:
        fields = {name: getattr(d, name)[-n:] for name in ("behavior_logp", "advantage", "token_class")}
        return Dialogue(random.integers(5, 900, n), (), 0, 0, np.arange(n) >= 4, **fields, episode=d.episode)

    return [dialogue(d, 9 + d.episode) for d in dialogues]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "subagents"),
    [
        pytest.param(LOSS, True, id="tokens"),
        pytest.param(LOSS_KL, False, id="reference"),
        pytest.param(LossConfig("gspo", kl_coef=0.0), True, id="sequences", marks=pytest.mark.nightly),
        pytest.param(LOSS, False, id="tokens of main agents", marks=pytest.mark.nightly),
        pytest.param(LOSS_KL, True, id="reference of sub-agents", marks=pytest.mark.nightly),
        pytest.param(LossConfig("gspo", kl_coef=0.0), False, id="sequences of main agents", marks=pytest.mark.nightly),
    ],
)
def test_packing_does_not_change_an_update(subagents, loss, tiny_hf, dialogues, unshared, frames, config):
    """Whole groups in one row, a group cut over two rows, and a row per dialogue."""
    own = subagents_of(dialogues, config) if subagents else []
    shapes = (BatchShape(1, 96, 16), BatchShape(1, 48, 16), BatchShape(2, 48, 16))
    packed = [pack([*dialogues, *own], frames, config, shape) for shape in shapes]
    packed.append(pack([*unshared, *own], frames, config, BatchShape(1, 40, 16)))
    assert [len(batches) for batches in packed] == ([1, 3, 2, 4] if subagents else [1, 2, 1, 3])
    learners = [make_learner(tiny_hf, loss=loss) for _ in packed]
    for learner in learners:  # away from the reference, so that its KL has a gradient
        moved = jax.tree.map(lambda leaf: 1.001 * leaf, learner.state.trainable)
        learner.state = replace(learner.state, trainable=moved)
    (expected, *others) = (update(learner, batches)[0] for learner, batches in zip(learners, packed, strict=True))
    for metrics, learner in zip(others, learners[1:], strict=True):
        for key in ("loss/num_tokens", "loss/total", "loss/kl_ref", "optim/grad_norm"):
            assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6)
        assert_same_gradient(learners[0], learner)


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", [False, True])
def test_the_vision_tower_changes_only_if_it_is_trained(train_vision, tiny_hf, batches):
    learner = make_learner(tiny_hf, replace(OPTIM, train_vision=train_vision), LOSS_KL)
    first_params, (batch,) = params(learner), batches
    first_logp = learner.log_probs(batch)
    update(learner, batches)
    ref_logp = learner.old_log_probs(batch).ref_logp  # with its own vision tower
    np.testing.assert_allclose(ref_logp, first_logp, atol=1e-5)
    moved = changed(first_params, params(learner))
    assert any(path.startswith("vision") for path in moved) == train_vision
    assert {path for path in first_params if path.startswith("text")} <= moved | {"text.embed.table_vd"}
    num_moments = sum(leaf.size for leaf in jax.tree.leaves(adam_mu(learner)))
    assert (num_moments == sum(value.size for value in first_params.values())) == train_vision


@pytest.mark.slow
def test_an_sft_update_compiled_ahead_compiles_nothing_later(tiny_hf, batches, monkeypatch):
    names: list[str] = []

    def on_event(event, duration_secs, **kwargs):
        if event == COMPILED:
            names.append(str(kwargs["fun_name"]))

    def lack_memory(*_):
        raise MemoryError

    jax.clear_caches()
    learner = make_learner(tiny_hf)
    jax.monitoring.register_event_duration_secs_listener(on_event)
    learner.imitation_compiler().compile(shapes_of_batch(batches[0], None))
    assert {"jit(encode_vision)", "jit(gradients)", "jit(apply_gradients)"} <= set(names)
    names.clear()
    learner.imitate(batches, NUM_TOKENS)
    assert names == []
    for part in ("gradients", "apply_gradients"):  # compiled in threads
        monkeypatch.setattr(UpdateCompiler, part, lack_memory)
        with pytest.raises(MemoryError):
            learner.imitation_compiler().compile(shapes_of_batch(batches[0], None))
        monkeypatch.undo()


@pytest.mark.slow
def test_non_finite_gradients_skip_the_update_and_several_in_a_row_stop_the_run(tiny_hf, batches, monkeypatch):
    monkeypatch.setattr("paravt_jax.learner.learner.MAX_BAD_STEPS", 2)
    learner, (good,) = make_learner(tiny_hf), batches
    bad = [replace(good, advantage=np.where(good.loss_mask, np.inf, 0).astype(np.float32))]
    first_params = params(learner)
    assert update(learner, bad)[0]["optim/num_bad_steps"] == 1
    assert not changed(first_params, params(learner))
    assert update(learner, [good])[0]["optim/num_bad_steps"] == 0  # counts updates in a row
    assert all(np.isfinite(value).all() for value in params(learner).values())  # the moments were kept too
    update(learner, bad)
    with pytest.raises(RuntimeError, match="not finite in 2 updates in a row; the weights are from step 2"):
        update(learner, bad)


@pytest.mark.slow
def test_the_reference_is_the_first_policy(tiny_hf, batches):
    kl = [metrics["loss/kl_ref"] for metrics in update(make_learner(tiny_hf, loss=LOSS_KL), batches, num_updates=3)]
    assert abs(kl[0]) < 1e-6
    assert min(kl[1:]) > 1e-6
    assert make_learner(tiny_hf)._ref is None  # without KL there is none in memory


@pytest.mark.slow
def test_old_log_probs_give_the_same_first_update_and_clip_the_later_ones(tiny_hf, dialogues, frames, config):
    fresh, prepared = (make_learner(tiny_hf, loss=LOSS_KL) for _ in range(2))
    batches = pack(dialogues, frames, config, replace(ONE_ROW, row_tokens=48))  # two batches
    update(fresh, batches)
    old = [prepared.old_log_probs(batch) for batch in batches]
    (first,) = update(prepared, batches, old)
    assert_same_gradient(fresh, prepared)
    assert first["loss/clip_frac"] == 0  # the ratio is 1 everywhere
    *_, last = update(prepared, batches, old, num_updates=4)
    assert last["loss/clip_frac"] > 0
    assert last["mismatch/behavior_kl"] == pytest.approx(first["mismatch/behavior_kl"])  # of the old policy


@pytest.mark.slow
def test_the_metrics_of_a_step_in_parts_cover_all_its_tokens(tiny_hf, dialogues, frames, config):
    clip, bounds = {"clip_low": 1e-3, "clip_high": 1e-3}, {"max_weight": 1.0}
    loss, counts = replace(LOSS_KL, params=clip, correction_bounds=bounds), StepCounts(12.0, 1.0, 32.0)
    learner, other = (make_learner(tiny_hf, loss=loss) for _ in range(2))
    first = replace(dialogues[0], token_class=np.ones_like(dialogues[0].token_class))
    batches = [pack([dialogue], frames, config, ONE_ROW)[0] for dialogue in (first, *dialogues[1:])]
    parts = [StepPart([batch], counts, [learner.old_log_probs(batch)]) for batch in batches]
    logp = np.concatenate([learner.log_probs(batch)[batch.loss_mask] for batch in batches])
    metrics, of_parts = learner.update([*parts, StepPart([], counts)], 1), [other.update([part], 1) for part in parts]
    assert int(learner.state.step) == 4  # a part without batches is also a version
    assert metrics["loss/num_tokens"] == NUM_TOKENS
    behavior = np.concatenate([batch.behavior_logp[batch.loss_mask] for batch in batches])
    k3 = np.exp(logp - behavior) - 1 - (logp - behavior)
    assert metrics["mismatch/behavior_kl"] == pytest.approx(k3.mean(), rel=1e-4)
    structural = np.r_[np.ones(12, bool), np.tile(np.arange(20, 32) % 2 == 1, 2)]
    assert metrics["mismatch/behavior_kl_structural"] == pytest.approx(k3[structural].mean(), rel=1e-4)
    assert metrics["loss/ratio_p01"] < 1 < metrics["loss/ratio_p99"]  # parts after the first differ from their prox
    assert 0 < metrics["loss/entropy"] < np.log(config.text.vocab_size)
    of_classes = [metrics["loss/entropy_plain"], metrics["loss/entropy_structural"]]
    assert metrics["loss/entropy"] == pytest.approx(np.average(of_classes, weights=[12, 24]), rel=1e-4)
    assert metrics["mismatch/behavior_kl_first_of_turn"] == 0  # no token of this class
    assert "loss/entropy_first_of_turn" not in metrics
    both = metrics["loss/clip_low_frac"] + metrics["loss/clip_high_frac"]
    assert metrics["loss/clip_frac"] == pytest.approx(both)
    fracs = [f"loss/{name}_frac" for name in ("clip_low", "clip_high", "capped")]
    for name in (*fracs, "loss/total", "loss/policy", "loss/kl_ref", "mismatch/behavior_kl", "optim/grad_norm"):
        assert metrics[name] == pytest.approx(np.mean([own[name] for own in of_parts])) and metrics[name] != 0, name


@pytest.mark.slow
def test_kl_in_the_reward_penalizes_the_dialogue_that_differs_from_the_reference(tiny_hf, batches):
    learner = make_learner(tiny_hf, loss=replace(LOSS_KL, kl="reward"))
    of_first = [replace(b, advantage=np.where(b.dialogue == 0, b.advantage, 0).astype(np.float32)) for b in batches]

    def penalties(batches):
        return learner.kl_penalties(StepPart(batches, COUNTS, [learner.old_log_probs(b) for b in batches]), 3)

    np.testing.assert_allclose(penalties(batches), 0, atol=1e-6)
    update(learner, of_first, num_updates=3)
    own = penalties(batches)
    assert own.argmax() == 0 and own[0] > 1e-4
    np.testing.assert_allclose(penalties([*batches, *batches]), 2 * own)


def test_a_skipped_step_is_a_version_with_the_same_weights(tiny_hf):
    learner = make_learner(tiny_hf)
    first_params = params(learner)
    learner.skip()
    assert int(learner.state.step) == 1
    assert not changed(first_params, params(learner))


@pytest.mark.slow
def test_new_numeric_settings_compile_nothing_and_clipping_keeps_the_reported_norm(tiny_hf, batches):
    (first,) = update(make_learner(tiny_hf, replace(OPTIM, max_grad_norm=1e-3), LOSS_KL), batches)
    sizes = [program._cache_size() for program in PROGRAMS]
    (second,) = update(make_learner(tiny_hf, replace(OPTIM, max_grad_norm=1e3), LOSS_KL), batches)
    assert second["optim/grad_norm"] == pytest.approx(first["optim/grad_norm"]) and first["optim/grad_norm"] > 1e-3
    clip, bounds = {"clip_low": 0.1, "clip_high": 0.4}, {"max_weight": 3.0}
    loss = replace(LOSS_KL, kl_coef=0.2, params=clip, correction_bounds=bounds)
    optim = replace(OPTIM, learning_rate=1e-4, weight_decay=0.1, max_grad_norm=2.0)
    learner = make_learner(tiny_hf, optim, loss, temperature=0.9)
    learner.update([StepPart(batches, StepCounts(72.0, 4.0, 200.0))], 4)
    assert [program._cache_size() for program in PROGRAMS] == sizes
    update(make_learner(tiny_hf, loss=replace(LOSS_KL, correction="token_tis")), batches)
    assert gradients._cache_size() > sizes[PROGRAMS.index(gradients)]  # another loss is another program


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), pytest.param((1, 2, 2), marks=pytest.mark.nightly)])
def test_offloaded_moments_and_reference_change_no_bit_of_an_update(shape, tiny_hf, dialogues, frames, config):
    mesh = make_mesh(*shape) if shape != (1, 1, 1) else None
    optims = [replace(OPTIM, offload=offload) for offload in (False, True)]
    on_device, on_host = (make_learner(tiny_hf, optim, LOSS_KL, mesh) for optim in optims)
    parts = num_row_parts(mesh)
    batches = pack(dialogues, frames, config, replace(ONE_ROW, num_rows=parts, num_parts=parts))
    for learner, memory in ((on_device, "device"), (on_host, "pinned_host")):
        update(learner, batches, num_updates=2)
        arrays = jax.tree.leaves((learner.state.opt_state, learner._ref))
        assert {leaf.sharding.memory_kind for leaf in arrays} == {memory}
    assert not changed(params(on_device), params(on_host))


def test_masters_in_half_precision_are_rejected(tiny_hf):
    with pytest.raises(ValueError, match="the masters must be float32, got bfloat16"):
        Learner(model_port.load(tiny_hf, "bfloat16"), OPTIM, LOSS, temperature=0.7)


@pytest.mark.slow
def test_eight_devices_make_the_same_update_as_one(tiny_hf, unshared, frames, config):
    batches = pack(unshared, frames, config, BatchShape(num_rows=8, row_tokens=40, row_patches=16))
    single = make_learner(tiny_hf)
    update(single, batches)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        eight = make_learner(tiny_hf, mesh=mesh)
        update(eight, batches)
        assert len(flat_params(eight.state.trainable)["text.embed.table_vd"].sharding.device_set) == 8
    assert_same_gradient(single, eight)


def learner_with_adapters(tiny_hf, loss=LOSS, mesh=None, params=None) -> Learner:
    model = model_port.load(tiny_hf, mesh=mesh)
    add_adapter(model, LORA, params or new_adapter(model.config, LORA, seed=0), mesh)
    return Learner(model, OPTIM, loss, temperature=0.7, mesh=mesh)


@pytest.mark.slow
def test_only_adapters_change_and_the_reference_is_the_model_without_them(tiny_hf, batches):
    learner, (batch,) = learner_with_adapters(tiny_hf, LOSS_KL), batches
    base, first_params = make_learner(tiny_hf).log_probs(batch), params(learner)
    frozen = jax.tree.leaves(learner.state.frozen)
    np.testing.assert_array_equal(learner.log_probs(batch), base)
    kl = [metrics["loss/kl_ref"] for metrics in update(learner, batches, num_updates=3)]
    assert abs(kl[0]) < 1e-9 and min(kl[1:]) > 1e-6
    np.testing.assert_array_equal(learner.old_log_probs(batch).ref_logp, base)
    adapters = {path for path in first_params if "_lora." in path}
    assert changed(first_params, params(learner)) == adapters
    assert all(leaf is first for leaf, first in zip(jax.tree.leaves(learner.state.frozen), frozen, strict=True))
    num_adapters = sum(first_params[path].size for path in adapters)
    assert sum(leaf.size for leaf in jax.tree.leaves((adam_mu(learner), learner._ref))) == 2 * num_adapters
    losses = [learner.imitate([batch], NUM_TOKENS)["loss/imitation"] for _ in range(2)]
    assert losses[0] > losses[1]


@pytest.mark.nightly
def test_adapters_have_the_same_update_on_a_mesh_as_on_one_device(tiny_hf, unshared, frames, config):
    batches = pack(unshared, frames, config, BatchShape(num_rows=4, row_tokens=40, row_patches=16))
    random, shapes = np.random.default_rng(4), adapter_shapes(config, LORA.rank)
    weights = {path: (0.05 * random.standard_normal(shape)).astype(np.float32) for path, shape in shapes.items()}
    single, mesh = learner_with_adapters(tiny_hf, params=weights), make_mesh(data=1, fsdp=2, tensor=2)
    update(single, batches)
    with jax.set_mesh(mesh):
        four = learner_with_adapters(tiny_hf, mesh=mesh, params=weights)
        update(four, batches)
    down = flat_params(four.state.trainable)["text.layers.mlp.down_lora.kernel_zf"]
    assert down.sharding.spec == PartitionSpec(None, None, "tensor")
    assert_same_gradient(single, four)
