"""Packing groups into an update: the tokens that count, their advantages and denominators."""

import asyncio
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from agents import FakeFrames, call_of
from async_tests import async_test
from training import SHORT_PROMPT, rollouts_of

import model_port
from model_port.processing import VisionContract
from model_port.sharding import make_mesh
from model_port.tiny import tiny_config
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.learner.credit import CLASSES
from paravt_jax.learner.learner import Learner
from paravt_jax.plan.run import PlannedRl
from paravt_jax.rl.batches import assign_parts
from paravt_jax.rl.setup import update_of
from paravt_jax.run.compiles import COMPILED
from paravt_jax.run.hosts import Hosts
from rollout.chat import Chat
from rollout.engine.protocol import EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(2)]
COMMON = [
    *(*SHORT_PROMPT, "model.dtype=float32", "loss.correction=none"),
    *("train.prompts_per_step=2", "train.group_size=4", "train.max_resamples=0"),
    *("video.frame_budgets=[]", "video.overview_frames=3"),
    # Short rows make updates fast.
    *("rollout.max_context_tokens=512", "rollout.max_new_tokens=64", "pack.row_tokens=512"),
]


def half_right(episode):
    letter, much = ("A", 1) if int(episode[-1]) % 2 else ("B", 3)
    return f"{'I have looked. ' * much}</think><answer>{letter}</answer><|im_end|>"


def trained(tiny_hf, *overrides, say=half_right, steps=1, do=lambda update, groups: update.run(groups), mesh=None):
    """Trains for some steps. Returns the learner and the metrics of every step."""
    config = load_config(None, *COMMON, *overrides)
    chat, contract = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf)
    model = model_port.load(tiny_hf, mesh=mesh)
    learner = Learner(model, config.optim, config.loss, temperature=0.7, mesh=mesh)
    update = update_of(learner, chat, contract, config)

    async def reply(request):
        return chat.encode(say(request.episode)).tolist()

    async def work():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config)
        return [do(update, await rollouts.next_groups(step)) for step in range(1, steps + 1)]

    return learner, asyncio.run(work())


def num_sampled(tiny_hf, episodes=range(8)):
    chat = Chat.from_hf(tiny_hf)
    return sum(len(chat.encode(half_right(str(number)))) for number in episodes)


@pytest.mark.slow
def test_every_sampled_token_of_an_episode_that_is_not_missing_counts_once(tiny_hf):
    _, (metrics,) = trained(tiny_hf, "pack.row_tokens=128", "rollout.max_context_tokens=128")
    assert metrics["loss/num_tokens"] == num_sampled(tiny_hf)
    slots = 128 * metrics["perf/num_batches"]
    assert metrics["perf/dummy_frac"] == 1 - metrics["perf/num_trained_tokens"] / slots
    assert metrics["perf/repeated_frac"] == 4 * 86 / slots  # six rows for two prompts of 86 tokens
    assert set(metrics) >= {f"mismatch/behavior_kl_{name}" for name in CLASSES}

    def one_lost(episode):
        if episode.endswith("/2"):
            raise EngineError("gone")
        return half_right(episode)

    (part,) = parts_of(tiny_hf, say=one_lost)
    assert part.counts.num_tokens == num_sampled(tiny_hf) - 2 * num_sampled(tiny_hf, [2])


@pytest.mark.slow
def test_a_step_without_signal_only_changes_the_version(tiny_hf):
    learner, metrics = trained(tiny_hf, "train.updates_per_step=2", say=lambda episode: half_right("1"), steps=2)
    assert int(learner.state.step) == 4
    assert all("loss/policy" not in of_step for of_step in metrics)
    tables = [np.asarray(model.text.embed.table_vd[...]) for model in (model_port.load(tiny_hf), learner.model)]
    assert np.array_equal(*tables)


@pytest.mark.slow
def test_the_likelihood_trains_the_tags_of_groups_without_spread(tiny_hf):
    def update_and_compare(update, groups):
        learner = update._learner
        batches = [batch for part in update.parts(groups) for batch in part.batches]
        before = [learner.log_probs(batch) for batch in batches]
        metrics = update.run(groups)
        change = [learner.log_probs(batch) - logp for batch, logp in zip(batches, before, strict=True)]
        return metrics, [own[batch.likelihood > 0] for own, batch in zip(change, batches, strict=True)]

    settings = ("advantage.credit=likelihood", "loss.kl_coef=0", "optim.learning_rate=1e-3")
    ((metrics, changes),) = trained(tiny_hf, *settings, say=lambda episode: half_right("1"), do=update_and_compare)[1]
    assert metrics["loss/policy"] == 0 < metrics["loss/total"]
    assert metrics["loss/num_tokens"] == 8 * num_sampled(tiny_hf, [1])
    assert all((change > 0).all() and change.size for change in changes)


@pytest.mark.nightly
def test_kl_in_the_reward_changes_the_second_step_and_not_the_first(tiny_hf):
    # Normalised, two kinds of episodes would always be ±1.
    common = ("advantage.normalise=none", "optim.learning_rate=1e-3")
    in_reward = trained(tiny_hf, *common, "loss.kl_coef=1", "loss.kl=reward", steps=2)[1]
    nowhere = trained(tiny_hf, *common, "loss.kl_coef=0", steps=2)[1]
    assert in_reward[0]["loss/policy"] == pytest.approx(nowhere[0]["loss/policy"], abs=1e-6)
    assert in_reward[1]["loss/policy"] != pytest.approx(nowhere[1]["loss/policy"], abs=1e-3)
    assert in_reward[1]["loss/kl_ref"] > 0


@pytest.mark.slow
def test_the_kl_penalty_is_not_divided_by_its_own_std(tiny_hf):
    """Equal rewards, texts of different lengths and so of different KL: advantages differ by the KL, not by ±1."""

    def right_at_length(episode):
        return f"{'I have looked. ' * (1 + int(episode[-1]))}</think><answer>A</answer><|im_end|>"

    def move_from_the_reference(update, groups):
        state = update._learner.state
        further = jax.tree.map(lambda leaf: 1.001 * leaf, state.trainable)
        update._learner.state = replace(state, trainable=further)
        return update.parts(groups)

    settings = ("loss.kl=reward", "loss.kl_coef=0.5", "advantage.filter_zero_variance=false")
    ((part,),) = trained(tiny_hf, *settings, say=right_at_length, do=move_from_the_reference)[1]
    advantage, kl_sum = np.zeros(8), np.zeros(8)
    for batch, old in zip(part.batches, part.old, strict=True):
        kl = np.asarray(old.prox_logp - old.ref_logp, np.float64)
        for number in np.unique(batch.dialogue[batch.loss_mask]):
            own = batch.loss_mask & (batch.dialogue == number)
            (advantage[number],) = set(batch.advantage[own].tolist())
            kl_sum[number] = kl[own].sum()
    assert (kl_sum != 0).all() and (np.abs(kl_sum) < 0.1).all()
    of_groups = kl_sum.reshape(2, 4)
    expected = 0.5 * (of_groups.mean(axis=1, keepdims=True) - of_groups)
    np.testing.assert_allclose(advantage.reshape(2, 4), expected, atol=1e-2 * np.abs(expected).max())


class FirstOfTwo(Hosts):
    """Host 0 of two hosts, of which only the other has dialogues."""

    def __init__(self):
        super().__init__(0, 2)

    def gather(self, name, value):
        return [value, {"dialogues": (4, 60, 4), "sizes": (1, 60, 4)}.get(name, value)]


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["reward", "returns"])
def test_a_host_without_dialogues_participates_in_an_update_with_a_kl_penalty(tiny_hf, kl):
    def parts_without_own(update, groups):
        update._hosts = FirstOfTwo()
        return update.parts([replace(group, is_remote=True) for group in groups])

    ((part,),) = trained(tiny_hf, f"loss.kl={kl}", "advantage.normalise=tokens", do=parts_without_own)[1]
    assert part.counts.num_tokens == 60
    assert [(batch.loss_mask.any(), batch.advantage.any()) for batch in part.batches] == [(False, False)]


RELEASE = [
    *("loss.kl=returns", "loss.kl_coef=0.5", "advantage.credit=sequence"),
    *("advantage.normalise=tokens", "advantage.filter_zero_variance=false"),
]


def tokens_of(tiny_hf, *overrides):
    """Returns a step's scored tokens: dialogue, sampler's and reference's log-probs, advantage."""

    def moved(update, groups):
        state = update._learner.state
        further = jax.tree.map(lambda leaf: 1.01 * leaf, state.trainable)
        update._learner.state = replace(state, trainable=further)
        return update.parts(groups), [group.advantages.sequence for group in groups]

    ((parts, sequences),) = trained(tiny_hf, *RELEASE, *overrides, do=moved)[1]
    columns = [
        np.stack(
            [values[batch.loss_mask] for values in (batch.dialogue, batch.behavior_logp, old.ref_logp, batch.advantage)]
        )
        for part in parts
        for batch, old in zip(part.batches, part.old, strict=True)
    ]
    return np.concatenate(columns, axis=1).T.astype(np.float64), np.concatenate(sequences)


@pytest.fixture(scope="module")
def release(tiny_hf):
    return tokens_of(tiny_hf)


@pytest.mark.slow
def test_the_advantages_of_the_release_are_returns_normalised_over_all_tokens_of_the_step(release):
    tokens, sequence = release
    expected = []
    for number in np.unique(tokens[:, 0]).astype(int):
        _, behavior, ref, _ = tokens[tokens[:, 0] == number].T
        for n in range(len(ref)):
            expected.append(sequence[number] - 0.5 * (behavior[n:] - ref[n:]).sum())
    expected = np.array(expected)
    expected = (expected - expected.mean()) / (expected.std(ddof=1) + 1e-5)
    own = np.concatenate([tokens[tokens[:, 0] == number, 3] for number in np.unique(tokens[:, 0])])
    np.testing.assert_allclose(own, expected, atol=2e-4)
    assert abs(own.mean()) < 1e-5 and own.std(ddof=1) == pytest.approx(1, abs=1e-4)
    assert len(np.unique(own.round(4))) > 8  # tokens of an episode differ


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["pack.row_tokens=1024", "train.updates_per_step=2"])
def test_neither_packing_nor_the_parts_of_a_step_change_the_advantages_of_the_release(release, tiny_hf, setting):
    first, other = release[0], tokens_of(tiny_hf, setting)[0]
    assert len(first) == len(other)
    np.testing.assert_allclose(np.sort(first[:, 3]), np.sort(other[:, 3]), atol=2e-4)


@pytest.mark.nightly
def test_the_weight_of_a_dr_grpo_token_does_not_depend_on_lengths(tiny_hf):
    common = ("loss.kl_coef=0", "advantage.normalise=none")
    losses = ("loss.name=para_grpo", "loss.name=dr_grpo")
    published, dr_grpo = (trained(tiny_hf, *common, loss)[1][0]["loss/policy"] for loss in losses)
    turns = load_config(None).rollout.tool_turns + 1
    assert dr_grpo == pytest.approx(published * num_sampled(tiny_hf) / (8 * 64 * turns), rel=1e-4)


def parts_of(tiny_hf, *overrides, **options):
    """Returns the data of a step's updates."""
    return trained(tiny_hf, *overrides, do=lambda update, groups: update.parts(groups), **options)[1][0]


def targets(parts):
    return sorted(int(token) for part in parts for batch in part.batches for token in batch.target[batch.loss_mask])


@pytest.mark.slow
def test_the_parts_of_a_step_split_its_tokens_and_have_their_own_counts(tiny_hf):
    (undivided,) = parts_of(tiny_hf)
    assert undivided.counts.max_tokens == 2 * 4 * 64 * 4  # prompts, episodes, tokens of a turn, turns
    parts = parts_of(tiny_hf, "train.updates_per_step=2", "loss.kl_coef=0")
    assert targets(parts) == targets([undivided])
    for part in parts:
        assert part.counts.num_tokens == sum(batch.loss_mask.sum() for batch in part.batches) > 0
        assert (part.counts.num_episodes, part.counts.max_tokens) == (4, undivided.counts.max_tokens / 2)
        assert len({dialogue.episode // 4 for dialogue in part.dialogues}) == 1  # a whole group
        assert all(np.isfinite(old.prox_logp).all() for old in part.old)
    assert len({part.batches[0].text.tokens.shape for part in parts}) == 1  # one program
    assert undivided.old is None


def test_groups_are_assigned_to_parts_evenly_by_seed_and_version():
    parts = [assign_parts(8, 3, seed, version).tolist() for seed, version in ((0, 5), (0, 5), (1, 5), (0, 8))]
    assert all(sorted(part) == [0, 0, 0, 1, 1, 1, 2, 2] for part in parts)
    assert parts[0] == parts[1]
    assert parts[0] != parts[2] and parts[0] != parts[3]
    assert assign_parts(4, 1, 0, 5).tolist() == [0] * 4


def test_pixel_bounds_can_differ_from_the_models(tiny_hf, tmp_path):
    from model_port.hf_files import read_side_files, with_pixel_bounds, write_side_files

    contract = VisionContract.from_hf(tiny_hf)
    files = read_side_files(tiny_hf)
    flat = json.loads(files["preprocessor_config.json"])
    files["processor_config.json"] = json.dumps({"image_processor": flat}).encode()  # as transformers 5 writes it
    files = with_pixel_bounds(files, 1024, 2048)
    write_side_files(files, tmp_path)
    bounded = replace(contract, min_pixels=1024, max_pixels=2048)
    assert VisionContract.from_hf(tmp_path) == bounded
    assert VisionContract.from_hf(tiny_hf) == contract
    for section in (json.loads(files["preprocessor_config.json"]), json.loads(files["processor_config.json"])):
        section = section.get("image_processor", section)
        # Without torchvision, transformers 4.57 reads only the first two.
        assert [section["min_pixels"], section["max_pixels"], *section["size"].values()] == [1024, 2048, 1024, 2048]


@pytest.mark.slow
@async_test
async def test_a_zoomed_detail_can_be_larger_than_a_frame(tiny_hf):
    zoom = f"I look.</think>{call_of('zoom_frame', time=3, box=[0, 0, 1, 1])}<|im_end|>"
    settings = ["rollout.tools=[zoom_frame]", "rollout.subagent_max_frames=4", "video.max_pixels=1024"]
    config = load_config(None, *COMMON, *settings, "train.subagent_loss=true")
    chat, contract = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf)
    learner = Learner(model_port.load(tiny_hf), config.optim, config.loss, temperature=0.7)
    update = update_of(learner, chat, replace(contract, max_pixels=1024), config)

    async def reply(request):
        begins = len(request.pictures) == 3 and "tool_response" not in chat.decode(request.ids)
        return chat.encode(zoom if begins else half_right(request.episode)).tolist()

    agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
    groups = await rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config).next_groups(1)
    (part,) = update.parts(groups)
    assert part.counts.num_episodes == 8  # with their sub-agents
    rows = [row for batch in part.batches for row in batch.vision.segment_ids]
    assert {int(size) for row in rows for size in np.bincount(row)[1:]} == {4, 16}  # patches: frames, details


TWO_ROWS = ["pack.num_rows=2", "optim.learning_rate=1e-3"]


@pytest.mark.slow
def test_the_one_shape_of_short_rows_pads_batches_and_does_not_change_their_update(tiny_hf):
    def parts_and_metrics(update, groups):
        return update.parts(groups), update.run(groups)

    learners, metrics, shapes = [], [], []
    for row_tokens in (512, 8192):
        learner, (((part,), own),) = trained(tiny_hf, *TWO_ROWS, f"pack.row_tokens={row_tokens}", do=parts_and_metrics)
        sizes = [(batch.text.tokens.shape, batch.target.shape, len(batch.vision.patches)) for batch in part.batches]
        shapes.append(sizes)
        learners.append(learner)
        metrics.append({name: value for name, value in own.items() if not name.startswith("perf/")})
    assert shapes[0] == [((2, 512), (2, 512), 8)]  # two overviews of three frames
    assert [tokens for tokens, *_ in shapes[1]] == [(2, 256)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    for one, other in zip(*(jax.tree.leaves(learner.state.trainable) for learner in learners), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)  # Adam's step is 1e-3, however small a gradient


@pytest.mark.slow
def test_batches_of_short_rows_have_the_planned_size(tiny_hf):
    settings = (*TWO_ROWS, "mesh.fsdp=2", "video.max_pixels=4096")
    (part,) = parts_of(tiny_hf, *settings, mesh=make_mesh(fsdp=2))
    run = PlannedRl.of(load_config(None, *COMMON, *settings), tiny_config())
    planned = run.largest_batch()
    for batch in part.batches:
        assert batch.text.tokens.shape == (planned.num_rows, planned.row_tokens)
        assert batch.source.shape == (planned.num_rows, planned.row_actions)
        assert batch.vision.patches.shape[:2] == (planned.num_frame_rows, planned.row_patches)
    assert run.typical_step().shape == planned and planned.num_frame_rows == 2 * 8  # two overviews of three frames


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_sizes", [None, pytest.param({"fsdp": 2}, marks=pytest.mark.nightly)], ids=["one device", "fsdp=2"]
)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], marks=pytest.mark.nightly),
        pytest.param(["optim.train_vision=true"], marks=pytest.mark.nightly),
        pytest.param(["loss.kl=reward"], marks=pytest.mark.nightly),
        pytest.param(["loss.kl=returns"], marks=pytest.mark.nightly),
        ["loss.kl_coef=0", "train.updates_per_step=2"],
    ],
    ids=" ".join,
)
def test_updates_compiled_ahead_compile_nothing_later(tiny_hf, overrides, mesh_sizes):
    names: list[str] = []

    def on_event(event, duration_secs, **kwargs):
        if event == COMPILED:
            names.append(str(kwargs["fun_name"]))

    def compiled_by(work, *arguments):
        names.clear()
        work(*arguments)
        return [*names]

    def ahead_then_update(update, groups):
        return compiled_by(update.compile_ahead()), compiled_by(update.run, groups)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    jax.clear_caches()
    mesh = None if mesh_sizes is None else make_mesh(**mesh_sizes)
    _, steps = trained(tiny_hf, *TWO_ROWS, *overrides, do=ahead_then_update, mesh=mesh, steps=2)
    (ahead, first), (_, second) = steps
    assert {"jit(gradients)", "jit(add)", "jit(apply_gradients)"} <= set(ahead)
    assert first == second == []
