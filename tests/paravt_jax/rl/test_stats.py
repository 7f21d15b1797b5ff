"""What hosts play and pack by parts is one step: the same groups, the same sums, the same update as on one host."""

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
from flax import nnx
from training import rollouts_of, update_of

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
from paravt_jax.run import host_times
from paravt_jax.run.host_times import DeviceProbe, by_host
from paravt_jax.run.hosts import Hosts
from rollout.chat import Chat
from rollout.engine.protocol import EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(3)]
SLOW_S = 1.5
SETTINGS = [
    "model.dtype=float32",
    "rollout.prompts.system=Call crop_video.",
    "rollout.prompts.system_has_tools=true",
    "train.prompts_per_step=3",  # two for one host, one for the other
    "train.group_size=4",
    "train.updates_per_step=2",
    "train.max_resamples=1",
    "video.gating=false",
    "video.overview_frames=3",
    "rollout.max_context_tokens=1024",
    "rollout.max_new_tokens=256",
    "pack.row_tokens=1024",
    "pack.num_rows=2",
    "mesh.fsdp=2",
    "advantage.normalise=batch",
    "loss.behavior_correction=none",
    "loss.kl_coef=0.1",
    "loss.kl_in=reward",
    "optim.learning_rate=1e-3",
]


def said(episode):
    letter, much = ("A", 1) if int(episode[-1]) % 2 else ("B", 3)
    dull = episode.startswith("000001")  # a group without spread, which is played again
    return f"{'I have looked. ' * (1 if dull else much)}</think><answer>{'A' if dull else letter}</answer><|im_end|>"


def slow(work):
    def slowly(*arguments, **named):
        time.sleep(SLOW_S)
        return work(*arguments, **named)

    return slowly


def find_slow_hosts(hosts, rollouts, update, groups, learner):
    """Host 0 packs slowly, host 1 has slow devices; nobody plays slowly."""
    probe = DeviceProbe(hosts)
    probe.seconds(learner.state)  # compiles
    if hosts.index == 0:
        batches.pack = slow(batches.pack)
    else:
        host_times.products = slow(host_times.products)
    update.run(groups)
    own = {
        "rollout": rollouts.rollout_s,
        "update": update.own_time.seconds,
        "devices": probe.seconds(learner.state),
    }
    found = by_host(hosts.gather("times", own))
    assert (found["perf/hosts/update_slowest"], found["perf/hosts/devices_slowest"]) == (0, 1)
    for what in ("update", "devices"):
        assert found[f"time/hosts/{what}_max_s"] > SLOW_S > found[f"time/hosts/{what}_min_s"]
    assert 0 < found["time/hosts/rollout_min_s"] <= found["time/hosts/rollout_max_s"]


def two_steps(hosts, tiny_hf, file):
    """Two steps on the mesh of all hosts; host 0 leaves parameters and metrics in a file."""
    config = load_config(None, *SETTINGS)
    chat, contract, mesh = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf), make_mesh(fsdp=2)
    learner = Learner(model_port.load(tiny_hf, mesh=mesh), config.optim, config.loss, temperature=0.7, mesh=mesh)
    update = update_of(learner, chat, contract, config, hosts)

    async def reply(request):
        return chat.encode(said(request.episode)).tolist()

    async def work():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config, hosts=hosts)
        found = []
        for step in (1, 2):
            groups = await rollouts.next_groups(step)
            rollouts.cursor.done([group.sample.number for group in groups])
            tokens = sum(hosts.gather("tokens", num_tokens(groups, chat, contract.unit_px)))
            found.append(group_metrics(groups) | update.run(groups) | {"tokens": tokens})
        return found, rollouts, groups

    metrics, rollouts, groups = asyncio.run(work())
    cursor = rollouts.cursor.to_record()
    weights = [on_host(leaf) for leaf in jax.tree.leaves(learner.state.trainable)]
    if hosts.num > 1:
        find_slow_hosts(hosts, rollouts, update, groups, learner)
    if hosts.leads:
        file.write_bytes(pickle.dumps((weights, metrics, cursor)))


def largest_difference(one, other):
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_two_hosts_learn_what_one_learns_from_the_same_episodes(tiny_hf, tmp_path):
    found = []
    for num in (1, 2):
        several.run_work(tmp_path, two_steps, num, tiny_hf, tmp_path / f"of{num}", devices=2 // num)
        found.append(pickle.loads((tmp_path / f"of{num}").read_bytes()))
    (one, metrics, cursor), (two, theirs, their_cursor) = found
    assert cursor == their_cursor and [row["rollout/num_groups"] for row in metrics] == [4, 3]
    begun = jax.tree.leaves(nnx.split(model_port.load(tiny_hf), LANGUAGE, ...)[1])
    assert largest_difference(one, two) < 1e-6 < 1e-3 * largest_difference(one, begun)
    for ours, others in zip(metrics, theirs, strict=True):
        same = {key for key in ours if not key.startswith("perf/")}
        assert {key: others[key] for key in same} == pytest.approx({key: ours[key] for key in same}, rel=1e-4, abs=1e-6)


def test_of_what_hosts_took_the_most_the_least_and_whose_the_most_is():
    assert by_host([{"rollout": 3.0, "publish": 1.0}, {"rollout": 2.0, "publish": 5.0}]) == {
        "time/hosts/rollout_max_s": 3.0,
        "time/hosts/rollout_min_s": 2.0,
        "perf/hosts/rollout_slowest": 0.0,
        "time/hosts/publish_max_s": 5.0,
        "time/hosts/publish_min_s": 1.0,
        "perf/hosts/publish_slowest": 1.0,
    }


def test_groups_arrive_on_another_host_with_all_their_numbers(tiny_hf):
    """One of them is missing, and calls have arguments that are not JSON."""
    odd = "</think>\n\n<tool_code>crop_video({1, 2}, b'3', ...)</tool_code>\n" + call(3, 9)
    config, chat = load_config(None, *SETTINGS[1:]), Chat.from_hf(tiny_hf)

    async def reply(request):
        if request.episode.endswith("/3"):
            raise EngineError("down")
        said = f"Look.{odd}<|im_end|>" if "tool_response>\n" not in chat.decode(request.ids) else ANSWER
        return chat.encode(said).tolist()

    async def run():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        rollouts = rollouts_of(agent, order := SampleOrder(PROMPTS, 0), Cursor(), config)
        return await rollouts.next_groups(1), order

    groups, order = asyncio.run(run())
    calls = groups[0].rollouts[0].episode.calls
    assert [one.outcome for one in calls] == ["invalid", "ok"] and calls[0].call.arguments
    advantage = replace(config.advantage, normalise="batch")
    rewards = [rewards_of(group.rollouts, RewardConfig(), advantage) for group in groups]
    sent = json.dumps([group.to_message(own) for group, own in zip(groups, rewards, strict=True)])
    remote = [Group.from_message(message, order[message["sample"]]) for message in json.loads(sent)]
    assert all(group.is_remote for group in remote)
    assert len(sent) < 1000 * sum(len(group.rollouts) for group in remote)
    metrics = group_metrics(groups)
    assert metrics["rollout/missing_engine"] == 6 and metrics["rollout/calls_ok"] > 0
    assert group_metrics(remote) == metrics and staleness_mean(remote, 7) == staleness_mean(groups, 7) == 7
    for one, other in zip(*(over_step(each, RewardConfig(), advantage) for each in (groups, remote)), strict=True):
        assert one.advantages.sequence.tolist() == other.advantages.sequence.tolist()


def test_scattered_items_are_interleaved_in_their_order():
    items = list(range(7))
    parts = [scatter(items, Hosts(host, 3)) for host in range(3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]] and interleave(parts) == items
