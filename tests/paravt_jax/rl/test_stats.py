"""Several hosts sample and pack a step in parts: same groups, sums and update as on a single host."""

import asyncio
import json
import pickle
import time
from dataclasses import replace

import hosts as several
import jax
import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call
from async_tests import async_test
from flax import nnx
from training import rollouts_of

import model_port
from model_port.processing import VisionContract
from model_port.sharding import make_mesh, on_host
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.learner.learner import LANGUAGE, Learner
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rl import batches
from paravt_jax.rl.groups import Group, over_step, rewards_of
from paravt_jax.rl.metrics import group_metrics, num_tokens, staleness_mean
from paravt_jax.rl.scheduler import interleave, scatter
from paravt_jax.rl.setup import update_of
from paravt_jax.run import host_times
from paravt_jax.run.host_times import DeviceProbe, by_host
from paravt_jax.run.hosts import Hosts, as_json
from rollout.chat import Chat
from rollout.engine.protocol import EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(3)]
SLOW_S = 1.5
SETTINGS = [
    *("model.dtype=float32", "rollout.prompts.system=Call crop_video.", "rollout.prompts.system_has_tools=true"),
    "train.prompts_per_step=3",  # two prompts for one host, one for the other
    *("train.group_size=4", "train.updates_per_step=2", "train.max_resamples=1"),
    *("video.frame_budgets=[]", "video.overview_frames=3"),
    *("rollout.max_context_tokens=512", "rollout.max_new_tokens=64", "pack.row_tokens=512"),
    *("pack.num_rows=2", "mesh.fsdp=2", "advantage.normalise=batch"),
    *("loss.correction=none", "loss.kl_coef=0.1", "loss.kl=reward", "optim.learning_rate=1e-3"),
]


OVER_TOKENS = ["advantage.normalise=tokens", "loss.kl=returns"]  # the release's


def reply_text(episode):
    letter, repeats = ("A", 1) if int(episode[-1]) % 2 else ("B", 3)
    if episode.startswith("000001"):  # a group without spread, which is replaced
        letter, repeats = "A", 1
    return f"{'I have looked. ' * repeats}</think><answer>{letter}</answer><|im_end|>"


def slow(work):
    def slowly(*arguments, **named):
        time.sleep(SLOW_S)
        return work(*arguments, **named)

    return slowly


def find_slow_hosts(hosts, rollouts, update, groups, learner):
    """Host 0 packs slowly and host 1 has slow devices; sampling is not slow."""
    probe = DeviceProbe(hosts)
    probe.seconds(learner.state)  # compiles
    if hosts.index == 0:
        batches.pack = slow(batches.pack)
    else:
        host_times.products = slow(host_times.products)
    update.run(groups)
    own = {"rollout": rollouts.rollout_s, "update": update.own_time.seconds, "devices": probe.seconds(learner.state)}
    times = by_host(hosts.gather("times", own))
    assert (times["perf/hosts/update_slowest"], times["perf/hosts/devices_slowest"]) == (0, 1)
    for name in ("update", "devices"):
        assert times[f"time/hosts/{name}_max_s"] > SLOW_S > times[f"time/hosts/{name}_min_s"]
    assert 0 < times["time/hosts/rollout_min_s"] <= times["time/hosts/rollout_max_s"]


def two_steps(hosts, tiny_hf, file, overrides):
    """Runs two steps on the mesh of all hosts; host 0 writes parameters, moments and metrics to a file."""
    config = load_config(None, *SETTINGS, *overrides)
    chat, contract, mesh = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf), make_mesh(fsdp=2)
    learner = Learner(model_port.load(tiny_hf, mesh=mesh), config.optim, config.loss, temperature=0.7, mesh=mesh)
    update = update_of(learner, chat, contract, config, hosts)

    async def reply(request):
        return chat.encode(reply_text(request.episode)).tolist()

    async def work():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config, hosts=hosts)
        metrics = []
        for step in (1, 2):
            groups = await rollouts.next_groups(step)
            rollouts.cursor.done([group.sample.number for group in groups])
            tokens = sum(hosts.gather("tokens", num_tokens(groups, chat)))
            metrics.append(group_metrics(groups) | update.run(groups) | {"tokens": tokens})
        return metrics, rollouts, groups

    metrics, rollouts, groups = asyncio.run(work())
    cursor = rollouts.cursor.to_record()
    parts = learner.state.trainable, learner.state.opt_state
    weights, moments = ([on_host(leaf) for leaf in jax.tree.leaves(part)] for part in parts)
    if hosts.num > 1:
        find_slow_hosts(hosts, rollouts, update, groups, learner)
    if hosts.leads:
        file.write_bytes(pickle.dumps((weights, moments, metrics, cursor)))


def difference(leaves, reference):
    """Returns the difference relative to the reference's norm."""
    first, second = (np.concatenate([np.asarray(leaf).ravel() for leaf in each]) for each in (leaves, reference))
    return np.linalg.norm(first - second) / np.linalg.norm(second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], pytest.param(OVER_TOKENS, marks=pytest.mark.nightly)], ids=["batch", "tokens"]
)
def test_two_hosts_compute_the_same_update_as_one(tiny_hf, tmp_path, overrides):
    results = []
    for num in (1, 2):
        several.run_work(tmp_path, two_steps, num, tiny_hf, tmp_path / f"of{num}", overrides, devices=2 // num)
        results.append(pickle.loads((tmp_path / f"of{num}").read_bytes()))
    (single, moments, metrics, cursor), (double, double_moments, double_metrics, double_cursor) = results
    assert cursor == double_cursor and [row["rollout/num_groups"] for row in metrics] == [4, 3]
    initial = jax.tree.leaves(nnx.split(model_port.load(tiny_hf), LANGUAGE, ...)[1])
    assert difference(double_moments, moments) < 1e-5
    assert difference(single, double) < 1e-3 * difference(single, initial)
    for expected, step in zip(metrics, double_metrics, strict=True):
        expected = {key: value for key, value in expected.items() if not key.startswith("perf/")}
        assert {key: step[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_host_times_have_maximum_minimum_and_the_slowest_host():
    assert by_host([{"rollout": 3.0, "publish": 1.0}, {"rollout": 2.0, "publish": 5.0}]) == {
        "time/hosts/rollout_max_s": 3.0,
        "time/hosts/rollout_min_s": 2.0,
        "perf/hosts/rollout_slowest": 0.0,
        "time/hosts/publish_max_s": 5.0,
        "time/hosts/publish_min_s": 1.0,
        "perf/hosts/publish_slowest": 1.0,
    }


@async_test
async def test_groups_reach_another_host_with_all_their_numbers(tiny_hf):
    """Each group has a missing episode and calls whose arguments are not JSON."""
    odd = "</think>\n\n<tool_code>crop_video({1, 2}, b'3', ...)</tool_code>\n" + call(3, 9)
    larger = ("rollout.max_context_tokens=1024", "rollout.max_new_tokens=256", "pack.row_tokens=1024")
    config, chat = load_config(None, *SETTINGS[1:], *larger), Chat.from_hf(tiny_hf)

    async def reply(request):
        if request.episode.endswith("/3"):
            raise EngineError("down")
        text = f"Look.{odd}<|im_end|>" if "tool_response>\n" not in chat.decode(request.ids) else ANSWER
        return chat.encode(text).tolist()

    agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
    groups = await rollouts_of(agent, order := SampleOrder(PROMPTS, 0), Cursor(), config).next_groups(1)
    calls = groups[0].rollouts[0].episode.calls
    assert [done.outcome for done in calls] == ["invalid", "ok"] and calls[0].call.arguments
    advantage = replace(config.advantage, normalise="batch")
    rewards = [rewards_of(group.rollouts, RewardConfig(), advantage) for group in groups]
    messages = [group.to_message(own) for group, own in zip(groups, rewards, strict=True)]
    sent = json.dumps(messages, default=as_json)
    remote = [Group.from_message(message, order[message["sample"]]) for message in json.loads(sent)]
    assert all(group.is_remote for group in remote)
    assert len(sent) < 1000 * sum(len(group.rollouts) for group in remote)
    metrics = group_metrics(groups)
    assert metrics["rollout/missing_engine"] == 6 and metrics["rollout/calls_ok"] > 0
    assert group_metrics(remote) == metrics and staleness_mean(remote, 7) == staleness_mean(groups, 7) == 7
    normalised = [over_step(each, RewardConfig(), advantage) for each in (groups, remote)]
    sequences = [[group.advantages.sequence.tolist() for group in each] for each in normalised]
    assert sequences[0] == sequences[1]


def test_interleave_restores_the_order_of_scattered_items():
    items = list(range(7))
    parts = [scatter(items, Hosts(host, 3)) for host in range(3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]] and interleave(parts) == items
