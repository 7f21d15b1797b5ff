"""Collecting groups: failures make episodes missing, and groups without signal are replaced."""

import asyncio
import gc
import inspect
import math
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from agents import FakeFrames, call, call_of, is_subagent
from async_tests import async_test, until
from PIL import Image
from training import rollouts_of

from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.judge import Judge, JudgeConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rl import scheduler
from paravt_jax.rl.episodes import Rollout
from paravt_jax.rl.groups import records, rewards_of
from paravt_jax.rl.metrics import (
    deadline_remark,
    group_metrics,
    metrics_in_parts,
    missing_remark,
    no_room_remark,
    num_tokens,
    rollout_metrics,
    staleness_mean,
)
from paravt_jax.run import hosts
from rollout.engine.protocol import DeadlineExceeded, EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent
from rollout.video.store import MEMORY_PER_PIXEL_BYTE

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(5)]
OPEN_QUESTIONS = [Prompt(name, "What is it?", (f"/{name}.mp4",), "a dog", "oe") for name in ("one", "two")]
JUDGED = ("reward.oe_mode=llm", "judge.url=http://judge/v1", "judge.model=m")
COMMON = [
    *("train.prompts_per_step=2", "train.group_size=4", "train.max_resamples=0"),
    *("video.frame_budgets=[]", "video.overview_frames=3"),
]
RIGHT = "I have looked.</think><answer>A</answer><|im_end|>"
WRONG = "I have looked.</think><answer>B</answer><|im_end|>"
CALL = f"I look closer.</think>{call(3, 5)}<|im_end|>"


class GivenScores(Judge):
    """A judge with given scores; None is a missing verdict, and an exception is raised."""

    def __init__(self, *scores):
        super().__init__(JudgeConfig("http://judge/v1", "m"))
        self.scores = list(scores)

    async def judge(self, question, answer, prediction):
        score = self.scores.pop(0)
        if isinstance(score, type):
            raise score("broken")
        return score


@asynccontextmanager
async def opened(chat, say, *overrides, prompts=PROMPTS, cursor=None, judge=None, version=5):
    """Opens a scheduler. `say(episode, request)` returns the main agent's turn, awaitable or not, or raises."""
    config = load_config(None, *COMMON, *overrides)

    async def reply(request):
        text = "A report.<|im_end|>" if is_subagent(chat, request) else say(request.episode, request)
        return chat.encode(await text if inspect.isawaitable(text) else text).tolist()

    agent = Agent(ScriptedEngine(reply, version), FakeFrames(), chat, config.rollout)
    rollouts = rollouts_of(agent, SampleOrder(prompts, 0), cursor or Cursor(), config, judge)
    try:
        yield rollouts
    finally:
        await rollouts.close()


def collect(chat, say, *overrides, steps=1, **options):
    """Returns the groups of each step."""

    async def work():
        async with opened(chat, say, *overrides, **options) as rollouts:
            return [await rollouts.next_groups(step) for step in range(1, steps + 1)]

    return asyncio.run(work())


def right(episode, request):
    return RIGHT


def half_right(episode, request):
    return RIGHT if int(episode[-1]) % 2 else WRONG


def failing(problem, ending="", say=half_right):
    """Returns a `say` that raises the problem in episodes with this ending."""

    def say_or_fail(episode, request):
        if episode.endswith(ending):
            raise problem
        return say(episode, request)

    return say_or_fail


def before_calls(chat, request):
    return "A report" not in chat.decode(request.ids)


def calling(chat, endings="", say=half_right):
    """Returns a `say` that calls the tool first in episodes with one of these endings."""
    return lambda episode, request: (
        CALL if episode.endswith(endings) and before_calls(chat, request) else say(episode, request)
    )


def test_a_step_has_a_scored_group_per_prompt(chat):
    versions = set()

    def say(episode, request):
        versions.add(request.version)
        return half_right(episode, request)

    (groups,) = collect(chat, say)
    assert versions == {5}  # without staleness, no token may be of another policy
    assert [len(group.rollouts) for group in groups] == [4, 4]
    assert len({group.sample.item.id for group in groups}) == 2
    for group in groups:
        assert [rollout.terms.accuracy for rollout in group.rollouts] == [0, 1, 0, 1]
        assert group.advantages.sequence == pytest.approx([-1, 1, -1, 1], abs=1e-4)
        assert group.has_signal


def test_an_episode_that_fails_in_the_engine_is_missing(chat):
    (groups,) = collect(chat, failing(EngineError("the server is gone"), "/2"))
    for group in groups:
        assert [rollout.missing for rollout in group.rollouts] == [False, False, True, False]
        assert group.rollouts[2].problem == "EngineError: the server is gone"
        assert list(group.advantages.keep) == [True, True, False, True]
    metrics = group_metrics(groups)
    assert metrics["rollout/num_missing"] == 2
    assert metrics["rollout/accuracy_mean"] == pytest.approx(2 / 3)


def test_an_episode_whose_request_is_aborted_is_missing(chat):
    (groups,) = collect(chat, failing(asyncio.CancelledError, "/2"))
    assert [[rollout.reason for rollout in group.rollouts if rollout.missing] for group in groups] == [["aborted"]] * 2


def test_rows_without_a_video_are_answered_in_one_turn_without_tools(chat, tmp_path):
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    prompts = [replace(prompt, videos=()) for prompt in PROMPTS[:2]]
    prompts[0] = replace(prompts[0], images=(f"{tmp_path}/a.png",))

    def say(episode, request):
        assert "# Tools" not in chat.decode(request.ids)
        return CALL if episode.endswith("/0") else half_right(episode, request)

    (groups,) = collect(chat, say, "video.frame_budgets=[2,4]", prompts=prompts)
    assert sorted(len(group.rollouts[0].episode.ledger.pictures) for group in groups) == [0, 1]
    for group in groups:
        assert [rollout.terms.accuracy for rollout in group.rollouts] == [0, 1, 0, 1]
        assert [len(rollout.episode.turns) for rollout in group.rollouts] == [1] * 4
        assert group.frame_budget == 0 and not group.rollouts[0].episode.calls


def test_an_unreadable_video_makes_its_group_missing(chat):
    prompts = [replace(PROMPTS[0], videos=("/missing.mp4",)), PROMPTS[1]]
    (groups,) = collect(chat, half_right, prompts=prompts)
    assert sorted(group.has_signal for group in groups) == [False, True]
    (lost,) = [group for group in groups if not group.has_signal]
    problem = "/missing.mp4: VideoError: the video cannot be opened"
    assert all(rollout.problem == problem for rollout in lost.rollouts)
    shown = f"4 of 4 episodes are missing; for example {lost.rollouts[0].id}: {problem}"
    assert missing_remark(lost.rollouts) == shown and missing_remark(lost.rollouts[:0]) is None


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *(("engine", kind) for kind in (EngineError, RecursionError, MemoryError)),
        *(("video", OSError), ("judge", TimeoutError), ("scoring", ValueError)),
    ],
)
def test_any_exception_only_invalidates_its_episode(where, kind, chat, monkeypatch):
    async def broken(*_, **__):
        raise kind("broken")

    prompts = [*OPEN_QUESTIONS]
    judge = GivenScores(*[1.0, 0.5] * 3, 1.0, kind if where == "judge" else 0.5)
    if where == "video":
        info = FakeFrames.info
        monkeypatch.setattr(FakeFrames, "info", lambda *args: (broken if "one" in args[1] else info)(*args))
    elif where == "scoring":
        prompts[0] = replace(prompts[0], answer="no letter", question_type="mcq")
    say = failing(kind("broken"), "/2") if where == "engine" else half_right
    (groups,) = collect(chat, say, *JUDGED, judge=judge, prompts=prompts)
    problems = [rollout.problem for group in groups for rollout in group.rollouts if rollout.missing]
    assert len(problems) == {"engine": 2, "video": 4, "judge": 1, "scoring": 4}[where]
    assert all(kind.__name__ in problem or where == "scoring" for problem in problems)


def test_too_many_missing_episodes_end_the_run(chat, monkeypatch):
    monkeypatch.setattr(hosts.ALONE, "all_failed", False)
    with pytest.raises(RuntimeError, match=r"8 of 8 episodes are missing, more than .*no server is left"):
        collect(chat, failing(EngineError("no server is left")))
    assert hosts.ALONE.all_failed


def test_an_answer_without_a_verdict_is_missing(chat):
    judge = GivenScores(1.0, None, 0.5, 0.0)
    prompts = [OPEN_QUESTIONS[0], PROMPTS[0]]  # the second episode is not judged
    (groups,) = collect(chat, half_right, *JUDGED, judge=judge, prompts=prompts)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert sorted(m.terms.accuracy for m in rollouts if not m.missing) == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert [m.problem for m in rollouts if m.missing] == ["no verdict of the judge"]


@pytest.mark.slow
def test_groups_without_spread_are_replaced_up_to_max_resamples(chat):
    (groups,) = collect(chat, right, "train.max_resamples=2")
    assert [group.has_signal for group in groups] == [False] * 6
    (groups,) = collect(chat, half_right, "train.max_resamples=2")
    assert [group.has_signal for group in groups] == [True] * 2
    (groups,) = collect(chat, right, "advantage.filter_zero_variance=false")
    assert group_metrics(groups)["rollout/num_groups_without_spread"] == 2 == sum(each.has_signal for each in groups)


def oversampled(chat, say, *overrides, steps=1):
    """Collects with oversampling. Returns each step's groups and metrics, and the cursor."""
    cursor, collected = Cursor(), []

    async def work():
        async with opened(chat, say, "train.oversample=2", *overrides, cursor=cursor) as rollouts:
            for step in range(1, steps + 1):
                groups = await rollouts.next_groups(step)
                collected.append((groups, rollouts.metrics()))
                cursor.done([group.sample.number for group in groups])

    asyncio.run(work())
    return collected, cursor


@pytest.mark.parametrize("abort", [ScriptedEngine.abort, lambda *_: asyncio.sleep(0), lambda *_: asyncio.sleep(60)])
def test_groups_are_aborted_and_given_back_once_enough_have_signal(chat, monkeypatch, caplog, abort):
    monkeypatch.setattr(ScriptedEngine, "abort", abort)
    slow = {"000000", "000002"}  # samples

    async def say(episode, request):
        if episode[:6] in slow and not episode.endswith("/0"):
            await asyncio.sleep(60)
        return half_right(episode, request)

    ((groups, metrics),), cursor = oversampled(chat, say)
    assert [group.sample.number for group in groups] == [1, 3]
    assert cursor.to_record() == {"next": 4, "again": [0, 2]}
    assert metrics["rollout/num_groups_aborted"] == 2
    assert metrics["rollout/aborted_tokens_frac"] == pytest.approx(2 / (2 + 8), abs=0.02)  # their first rollouts
    gc.collect()  # asyncio would log an error that nothing retrieved
    assert not caplog.records


def test_the_next_step_waits_for_an_aborted_prompt(chat):
    tries = {}

    async def say(episode, request):
        tries[episode] = tries.get(episode, 0) + 1
        slow = int(episode[:6]) < 2
        await asyncio.sleep((60 if tries[episode] == 1 else 0.2) if slow else 0)
        return half_right(episode, request)

    steps, cursor = oversampled(chat, say, steps=2)
    assert [[group.sample.number for group in groups] for groups, _ in steps] == [[2, 3], [0, 1]]
    assert cursor.to_record() == {"next": 6, "again": [4, 5]}
    assert all(group.has_signal for groups, _ in steps for group in groups)


@pytest.mark.slow
def test_oversampling_runs_every_sample_once(chat):
    chance = random.Random(0)

    async def say(episode, request):
        await asyncio.sleep(chance.choice([0, 0.01, 0.03]))
        return RIGHT if "p3" in episode else half_right(episode, request)  # a group without signal

    steps, cursor = oversampled(chat, say, "train.max_resamples=1", steps=6)
    numbers = [group.sample.number for groups, _ in steps for group in groups]
    record = cursor.to_record()
    assert sorted([*numbers, *record["again"]]) == list(range(record["next"]))
    assert all(sum(group.has_signal for group in groups) <= 2 for groups, _ in steps)
    assert sum(metrics["rollout/num_groups_aborted"] for _, metrics in steps) > 0


def test_without_oversampling_there_are_no_metrics_of_it(chat):
    ((_, metrics),), _ = oversampled(chat, half_right, "train.oversample=0")
    assert metrics == {}


@pytest.mark.slow
def test_every_sample_runs_once_over_several_steps(chat):
    for ahead in (0, 2):
        cursor = Cursor()
        steps = collect(chat, half_right, "train.num_steps=4", f"train.max_staleness={ahead}", steps=4, cursor=cursor)
        numbers = [group.sample.number for groups in steps for group in groups]
        assert sorted(numbers) == list(range(8))
        epochs = [group.sample.item.id for groups in steps for group in groups][:5]
        assert len(set(epochs)) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "stale"), [(1, 0), (1, 1), (1, 3), (2, 0), (2, 3), (2, 6), (3, 0), (3, 5), (3, 8)])
@async_test
async def test_no_trained_token_is_older_than_max_staleness(updates, stale, chat):
    settings = ["train.prompts_per_step=3", f"train.updates_per_step={updates}", f"train.max_staleness={stale}"]
    ages, version = [], 0
    async with opened(chat, half_right, *settings, version=version) as rollouts:
        for step in range(1, 7):
            groups = await rollouts.next_groups(step)
            for _ in range(updates):
                ages.extend(version - s.version for g in groups for m in g.rollouts for s in m.episode.ledger.sampled)
                version += 1
            await rollouts.worker.agent.engine.publish(None, version)
    allowed = stale or updates - 1  # without rollouts ahead, only the step's own updates age its tokens
    assert allowed - updates < max(ages) <= allowed


@async_test
async def test_tokens_count_when_they_are_sampled(chat):
    """With staleness, a step trains on tokens that were sampled during earlier ones."""
    released, trained, popped, start_s = asyncio.Event(), [], [], time.monotonic()

    async def say(episode, request):
        if episode > "000002" and episode.endswith("/3"):  # after the first step
            await released.wait()
        return half_right(episode, request)

    async with opened(chat, say, "train.num_steps=4", "train.max_staleness=1") as rollouts:
        for step in range(1, 5):
            groups = await rollouts.next_groups(step)
            trained.append(sum(rollout.episode.num_sampled for group in groups for rollout in group.rollouts))
            if step == 1:
                await until(lambda: any(group.num_sampled for group in rollouts._sampling))
                popped.append(rollouts.pop_sampled())
                released.set()
            await asyncio.gather(*rollouts._running.values())  # during the update
            popped.append(rollouts.pop_sampled())
            await asyncio.sleep(0.05)  # validates
    (early, *sampled), seconds = zip(*popped, strict=True)
    assert trained[0] < early
    assert (early + sampled[0], *sampled[1:]) == (trained[0] + trained[1], trained[2], trained[3], 0)
    assert min(seconds[2:]) >= 0.05 and sum(seconds) <= time.monotonic() - start_s


def test_rollouts_start_ahead_only_as_far_as_staleness_allows(chat):
    cursor = Cursor()
    collect(chat, half_right, "train.num_steps=9", "train.max_staleness=2", cursor=cursor)
    assert cursor.to_record()["next"] == 2 * (1 + 2)


def test_episode_records_have_rewards_and_problems(chat):
    (groups,) = collect(chat, calling(chat, "/0", failing(EngineError("gone"), "/3", right)))
    rows = records(groups, 7, chat)
    assert len(rows) == 8
    first, lost = rows[0], rows[3]
    assert (first["step"], first["frame_budget"], first["question_type"]) == (7, 3, "mcq")
    assert first["turns"][0]["calls"][0]["outcome"] == "ok"
    assert math.fsum(c["value"] for c in first["reward"]["credits"] if c["term"] == "tool") == first["reward"]["tool"]
    assert (lost["missing"], lost["problem"], "reward" in lost) == (True, "EngineError: gone", False)
    assert lost["id"] == groups[0].rollouts[3].id


def test_an_episode_record_has_the_advantage_of_every_character(chat):
    def say(episode, request):
        return RIGHT if episode.endswith("/0") else WRONG.replace("</think>", "") if episode.endswith("/1") else WRONG

    ((group, _),) = collect(chat, say)
    row, thoughtless = records([group], 1, chat)[:2]
    sequence, anchor = row["advantage"]["sequence"], row["advantage"]["anchor"]
    text, places = row["turns"][0]["text"], row["advantage"]["places"]
    sampled = {(turn, text[start:end], round(value - sequence, 6)) for turn, start, end, value in places}
    assert anchor > 0.1 and {(0, "</think><answer>", round(anchor, 6)), (0, "A", 0)} <= sampled
    assert places[-1][1:3] == [len(text)] * 2  # the token that ended the turn
    assert "<think>" not in "".join(text[start:end] for _, start, end, _ in places)  # forced, not sampled
    assert thoughtless["advantage"]["anchor"] < 0
    left_out = replace(group, rollouts=[replace(rollout, left_out=True) for rollout in group.rollouts])
    assert [record["advantage"]["places"] for record in records([left_out], 1, chat)] == [[]] * 4


def test_the_metrics_of_a_step_by_hand(chat):
    (groups,) = collect(chat, calling(chat, "/0"))
    metrics = group_metrics(groups)
    assert metrics["rollout/tool_calls_mean"] == metrics["rollout/tool_use_frac"] == 0.25  # one of four
    assert metrics["rollout/calls_ok"] == 2 and metrics["rollout/failed_calls_mean"] == 0
    assert metrics["rollout/parseable_frac"] == 1
    assert metrics["rollout/accuracy_mean"] == 0.5
    assert metrics["rollout/frame_budget_mean"] == 3
    assert metrics["rollout/turns_mean"] == 1.25
    assert staleness_mean(groups, 7) == 2
    assert staleness_mean([], 7) is None
    main, report = (called := groups[0].rollouts[0]).episode.ledgers
    assert called.stats.versions == {"5": main.num_sampled + report.num_sampled}
    ledgers = [ledger for group in groups for rollout in group.rollouts for ledger in rollout.episode.ledgers]
    assert num_tokens(groups, chat) == sum(len(ledger.ids) for ledger in ledgers)  # a frame is one token here
    assert rollout_metrics([])["num_episodes"] == 0


@async_test
async def test_sampled_tokens_include_sub_agents_and_missing_episodes(chat):
    say = calling(chat, say=failing(EngineError("gone"), "/1", right))
    async with opened(chat, say, "train.prompts_per_step=1", "train.max_missing_frac=0.5") as rollouts:
        await rollouts.next_groups(1)
        num, _ = rollouts.pop_sampled()
    call, report, answer = (len(chat.encode(text)) for text in (CALL, "A report.<|im_end|>", RIGHT))
    assert num == 4 * (call + report) + 3 * answer  # an agent fails before its answer


def test_calls_that_were_not_executed_do_not_count_as_tool_calls(chat):
    def say(episode, request):
        if not before_calls(chat, request):
            return RIGHT
        return CALL.replace("crop_video", "cut_video") if episode.endswith(("/0", "/1")) else CALL

    metrics = group_metrics(collect(chat, say)[0])
    assert metrics["rollout/tool_calls_mean"] == metrics["rollout/tool_use_frac"] == 0.5
    assert metrics["rollout/failed_calls_mean"] == 2 * 3 / 4  # two of four, in each of three turns


def test_metrics_by_frame_budget_and_question_type(chat):
    prompts = [PROMPTS[0], Prompt("oe", "What is it?", ("/a.mp4", "/b.mp4", "/c.mp4", "/d.mp4"), "a dog", "oe")]

    def say(episode, request):
        return CALL.replace("video.mp4", "video_1.mp4") if "oe" in episode and before_calls(chat, request) else RIGHT

    metrics = group_metrics(collect(chat, say, prompts=prompts)[0])
    by_budget = {key: metrics[f"rollout/{key}"] for key in ("accuracy_mean_k3", "accuracy_mean_k4")}
    assert by_budget == {"accuracy_mean_k3": 1.0, "accuracy_mean_k4": 0.0}  # the second has a frame of each video
    assert (metrics["rollout/tool_calls_mean_mcq"], metrics["rollout/tool_calls_mean_oe"]) == (0.0, 1.0)
    assert metrics["rollout/accuracy_mean"] == 0.5
    assert not {"rollout/accuracy_mean_tvg", "rollout/accuracy_mean_k64"} & set(metrics)


def test_the_signal_fraction_and_quantiles_by_hand(chat):
    def say(episode, request):
        return RIGHT if "p0" in episode else half_right(episode, request)

    metrics = group_metrics(collect(chat, say, "advantage.normalise=none", prompts=PROMPTS[:2])[0])
    assert metrics["rollout/taught_frac"] == 0.5
    assert [metrics[f"rollout/advantage_{p}"] for p in ("p10", "p50", "p90")] == pytest.approx([-0.5, 0, 0.5])
    assert metrics["rollout/sampled_tokens_p10"] == metrics["rollout/sampled_tokens_p90"]  # all are as long
    untaught = group_metrics(collect(chat, right)[0])
    assert untaught["rollout/taught_frac"] == 0 and "rollout/advantage_p50" not in untaught


def test_episodes_that_time_out_are_counted_and_reported(chat):
    groups = collect(chat, calling(chat, say=failing(DeadlineExceeded("no answer within 600 s"), "/1")))[0]
    metrics = group_metrics(groups)
    assert (metrics["rollout/missing_deadline"], metrics["rollout/num_missing"]) == (2, 2)
    assert metrics["rollout/deadline_tokens_mean"] == len(chat.encode(CALL))
    record = records(groups, 1, chat)[1]
    assert (record["reason"], record["num_lost"]) == ("deadline", len(chat.encode(CALL)))
    of_endpoint = Rollout("p/0", problem="429", reason="refused")
    without_episode = rollout_metrics([of_endpoint])
    assert without_episode["missing_engine"] == 1
    assert not [name for name in without_episode if not name.startswith(("num_", "calls_", "missing_"))]
    assert metrics_in_parts([("k4", of_endpoint)]) == {}  # without an episode there is no mean
    remark = deadline_remark(metrics, 600.0)
    assert remark is not None
    assert remark.startswith("2 of 8 episodes are missing because of rollout.turn_deadline_s=600: they had")
    assert deadline_remark(metrics | {"rollout/num_episodes": 38.0}, 600.0) is None  # 5 % are not reported
    assert deadline_remark(metrics | {"rollout/num_episodes": 0.0}, 600.0) is None  # none is left to compare with
    assert deadline_remark(metrics | {"rollout/num_episodes": 37.0}, 600.0) is not None


def test_prompts_longer_than_the_context_are_reported(chat):
    groups = collect(chat, half_right, "rollout.max_context_tokens=64", "rollout.max_new_tokens=16")[0]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert no_room_remark(rollouts, 64) == (
        f"8 of 8 episodes have no turn, because their prompts leave no room in rollout.max_context_tokens=64; for "
        f"example {rollouts[0].id}. Raise it, or show fewer or smaller frames (video.frame_budgets, "
        f"video.overview_frames, video.max_pixels)"
    )
    (group, *_), *_ = collect(chat, half_right)
    missing = [replace(rollout, problem="aborted", reason="aborted") for rollout in rollouts]
    assert no_room_remark([*group.rollouts, *missing, Rollout("p/0", problem="429", reason="refused")], 64) is None


@pytest.mark.slow
def test_the_format_reward_does_not_depend_on_reward_settings(chat):
    arms = [["reward.anchor_weight=0", "reward.unclosed_penalty=0"], ["reward.format_weight=0.1"], []]
    results = [group_metrics(collect(chat, half_right, *arm)[0]) for arm in arms]
    assert len({metrics["rollout/format_reward"] for metrics in results}) == 1
    assert len({metrics["rollout/reward_mean"] for metrics in results}) == 3


def test_the_anchor_has_its_weight_within_the_format_reward():
    reward = RewardConfig(anchor_weight=0.5, format_weight=0.2)
    lost = Rollout("p/0", problem="lost")
    assert rewards_of([lost], reward, AdvantageConfig()).anchor_scale == pytest.approx(0.1)


PLUGINS = """
from paravt_jax.rewards import OwnTerm, Place

def reward(question, answer, question_type, turns, calls, outcomes):
    if "B" in turns[-1]:
        raise KeyError("no letter but A")
    return [OwnTerm("looked", len(calls), (Place(0, 0, 5),), weight=0.5)]

def seen(completions, labels):
    return [float(label in text) if "lost" not in text else None for text, label in zip(completions, labels)]

def broken(completions):
    raise KeyError("labels")
"""
ALONE = ("reward.accuracy_weight=0", "reward.format_weight=0", "reward.tool=none", "train.prompts_per_step=1")
CAPTIONS = [Prompt("c", "Describe it.", ("/a.mp4",), "", "caption", columns=(("labels", "dog"),))]
DESCRIBED = "I have looked.</think><answer>a {}</answer><|im_end|>"


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGINS)
    return lambda name: f"reward.plugin={tmp_path}/mine.py:{name}"


def test_plugin_terms_are_in_the_reward_the_log_and_the_metrics(chat, plugin):
    settings = (plugin("reward"), "train.prompts_per_step=1", "reward.tool=none")
    (groups,) = collect(chat, calling(chat, ("/0", "/1"), right), *settings)
    assert [rollout.terms.total for rollout in groups[0].rollouts] == [2.5, 2.5, 2.0, 2.0]
    assert groups[0].advantages.sequence == pytest.approx([1, 1, -1, -1], abs=1e-4)
    reward = records(groups, 1, chat)[0]["reward"]
    assert reward["own"] == [{"name": "looked", "value": 1.0, "places": ((0, 0, 5),), "weight": 0.5}]
    assert reward["credits"][-1] == {"name": "looked", "term": "looked", "value": 0.5, "places": ((0, 0, 5),)}
    assert group_metrics(groups)["rollout/reward_looked_mean"] == 0.5


def test_a_failing_plugin_makes_its_episode_missing(chat, plugin):
    (groups,) = collect(chat, half_right, plugin("reward"))
    for group in groups:
        assert [rollout.missing for rollout in group.rollouts] == [True, False, True, False]
        assert group.rollouts[0].problem == "reward.plugin: KeyError: 'no letter but A'"
        assert group.rollouts[0].episode is not None
    assert group_metrics(groups)["rollout/num_missing"] == 4


def test_a_function_of_completions_replaces_the_reward_of_any_question_type(chat, plugin):
    def describe(episode, request):
        return DESCRIBED.format("dog" if episode.endswith("/3") else "cat")

    say = failing(asyncio.CancelledError, "/1", describe)  # aborted: an episode without a score
    for prompts in (CAPTIONS, [replace(PROMPTS[0], columns=CAPTIONS[0].columns)]):
        (groups,) = collect(chat, say, plugin("seen"), *ALONE, prompts=prompts)
        assert [rollout.terms and rollout.terms.total for rollout in groups[0].rollouts] == [0.0, None, 0.0, 1.0]
        assert list(groups[0].keep) == [True, False, True, True]
        metrics = group_metrics(groups)
        assert metrics["rollout/reward_seen_mean"] == pytest.approx(1 / 3)
        assert ("rollout/accuracy_mean" in metrics) == (prompts is not CAPTIONS)
        assert metrics["rollout/format_reward"] == 1.0


def test_an_episode_of_your_own_question_type_without_a_score_is_missing(chat, plugin):
    def say(episode, request):
        return DESCRIBED.format("lost dog" if episode.endswith("/0") else "dog")

    soft = "train.truncated=soft"  # the length penalty is no score
    (groups,) = collect(chat, say, plugin("seen"), *ALONE, soft, prompts=CAPTIONS)
    assert [rollout.missing for rollout in groups[0].rollouts] == [True, False, False, False]
    assert groups[0].rollouts[0].problem == "reward.plugin: no score, and a question of type caption has no other"


def test_a_failing_function_of_completions_makes_its_group_missing(chat, plugin):
    with pytest.raises(RuntimeError, match=r"4 of 4 episodes are missing, .*: reward\.plugin: KeyError: 'labels'$"):
        collect(chat, half_right, plugin("broken"), *ALONE)


def test_a_judge_that_is_cancelled_or_exits_only_invalidates_its_episode(chat):
    judge = GivenScores(1.0, asyncio.CancelledError, SystemExit, KeyboardInterrupt)
    settings = (*JUDGED, "train.prompts_per_step=1", "train.max_missing_frac=0.9")
    (groups,) = collect(chat, half_right, *settings, judge=judge, prompts=OPEN_QUESTIONS)
    kinds = ("CancelledError", "KeyboardInterrupt", "SystemExit")
    assert sorted(m.problem for m in groups[0].rollouts) == ["", *(f"RuntimeError: {kind}: broken" for kind in kinds)]
    assert group_metrics(groups)["rollout/missing_other"] == 3


@async_test
async def test_a_cancelled_step_ends_at_once(chat):
    requested = asyncio.Event()

    async def say(episode, request):
        requested.set()
        await asyncio.sleep(60)

    async with opened(chat, say) as rollouts:
        step = asyncio.create_task(rollouts._collect())
        await requested.wait()
        step.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait([step])
        assert step.cancelled()


def test_needed_calls_are_rewarded_by_their_group(chat):
    say = calling(chat, "/0", lambda episode, _: RIGHT if episode.endswith(("/0", "/1")) else WRONG)

    def tools(kind):
        (groups,) = collect(chat, say, f"reward.tool={kind}", "train.prompts_per_step=1")
        return [rollout.terms.tool for rollout in groups[0].rollouts]

    assert tools("published") == pytest.approx([0.8, 0, 0, 0])
    assert tools("needed") == pytest.approx([1 - 1 / 3 - 0.03, 0, 0, 0])


def test_normalise_batch_divides_all_groups_by_the_same_std(chat):
    def say(episode, request):
        return half_right(episode, request) if "p1" in episode else RIGHT if episode.endswith("/0") else WRONG

    settings = ("advantage.normalise=std", "advantage.normalise=batch")
    alone, together = (collect(chat, say, setting, prompts=PROMPTS[:2])[0] for setting in settings)
    spread = [[float(group.advantages.sequence.std()) for group in groups] for groups in (alone, together)]
    assert spread[0] == pytest.approx([1, 1], abs=1e-4)
    assert np.sqrt(np.mean(np.square(spread[1]))) == pytest.approx(1, abs=1e-4)
    assert sorted(spread[1]) == pytest.approx([0.9258, 1.0690], abs=1e-3)  # √0.75 and 1 over √0.875


LONG = "I have looked. " * 40 + "</think><answer>A</answer><|im_end|>"


def test_cut_off_episodes_are_trained_on_left_out_or_penalised(chat):
    def one_cut_off(episode, request):
        """Rollouts 0 and 1 are wrong and right; rollout 3 is truncated before its right answer."""
        return LONG if episode.endswith("/3") else half_right(episode, request)

    groups = {}
    for truncated in ("learn", "leave_out", "soft"):
        settings = ("rollout.max_new_tokens=64", f"train.truncated={truncated}")
        ((groups[truncated], _),) = collect(chat, one_cut_off, *settings)
    rewards = {truncated: [rollout.terms.total for rollout in group.rollouts] for truncated, group in groups.items()}
    assert groups["learn"].rollouts[3].episode.finish == "length"
    assert groups["learn"].keep.all() and groups["soft"].keep.all()
    assert groups["leave_out"].keep.tolist() == [True, True, True, False]
    # It still counts in its group's mean and std.
    assert groups["leave_out"].advantages.sequence.tolist() == groups["learn"].advantages.sequence.tolist()
    assert rewards["leave_out"] == rewards["learn"]
    assert rewards["soft"] == [*rewards["learn"][:3], rewards["learn"][3] - 1]
    assert group_metrics([groups["soft"]])["rollout/reward_length_mean"] == -0.25
    assert [record["reward"]["own"][0]["value"] for record in records([groups["soft"]], 1, chat)] == [0, 0, 0, -1]
    kept = [record["advantage"]["keep"] for record in records([groups["leave_out"]], 1, chat)]
    assert kept == [True, True, True, False]


@pytest.mark.parametrize(("finish", "max_context_tokens"), [("length", 4096), ("context", 64)])
def test_a_group_with_all_episodes_left_out_has_no_signal(chat, finish, max_context_tokens):
    limits = (f"rollout.max_context_tokens={max_context_tokens}", "rollout.max_new_tokens=32")
    settings = ("train.truncated=leave_out", "advantage.filter_zero_variance=false")
    (groups,) = collect(chat, lambda *_: LONG, *limits, *settings)
    assert not any(group.has_signal for group in groups)
    assert {rollout.episode.finish for group in groups for rollout in group.rollouts} == {finish}


@pytest.mark.parametrize(("tools", "earned"), [("crop_video,zoom_frame", 0.1), ("crop_video", 0.0)])
def test_the_reward_knows_the_tools_of_the_run(chat, tools, earned):
    late_zoom = f"I look closer.</think>{call_of('zoom_frame', time=99, box=[0, 0, 1, 1])}<|im_end|>"

    def say(episode, request):
        return WRONG if "Error: " in chat.decode(request.ids) else late_zoom

    (groups,) = collect(chat, say, f"rollout.tools=[{tools}]")
    terms = [rollout.terms for group in groups for rollout in group.rollouts]
    assert [term.tool for term in terms] == pytest.approx([earned] * 8)
    assert all(term.parseable for term in terms)


def test_episodes_search_the_subtitles_of_their_row(chat, tmp_path):
    (tmp_path / "a.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nA heron.\n")
    prompts = [replace(prompt, subtitles=(str(tmp_path / "a.srt"),)) for prompt in PROMPTS]
    search = f"I search.</think>{call_of('search_subtitles', query='heron')}<|im_end|>"

    def say(episode, request):
        return RIGHT if "1.0 to 2.0 seconds: A heron." in chat.decode(request.ids) else search

    (groups,) = collect(chat, say, "rollout.tools=[search_subtitles]", prompts=prompts)
    assert [rollout.terms.accuracy for group in groups for rollout in group.rollouts] == [1.0] * 8


def frames_between_steps(chat, *overrides, prompts=PROMPTS, num_steps=2):
    """Returns the overviews decoded between collecting step 1 and starting step 2, and the groups of step 2."""
    settings = ["video.frame_budgets=[2,3,5]", f"train.num_steps={num_steps}", *overrides]

    async def work():
        async with opened(chat, half_right, *settings, prompts=prompts) as rollouts:
            await rollouts.next_groups(1)
            record, requests = rollouts.cursor.to_record(), rollouts.worker.agent.frames.requests
            requests.clear()
            for _ in range(100):
                await asyncio.sleep(0)
            ahead = {path: len(times_s) for path, times_s in requests}
            assert rollouts.cursor.to_record() == record
            return ahead, await rollouts.next_groups(2) if num_steps > 1 else []

    return asyncio.run(work())


def test_the_next_steps_overviews_are_prefetched_during_the_update(chat):
    ahead, second = frames_between_steps(chat)
    assert ahead == {group.sample.item.videos[0]: group.frame_budget for group in second} and len(ahead) == 2


def test_prefetching_frames_stops_at_the_end_the_memory_bound_and_with_staleness(chat, monkeypatch):
    assert frames_between_steps(chat, num_steps=1)[0] == {}
    assert frames_between_steps(chat, "train.max_staleness=1", num_steps=4)[0] == {}
    frame_bytes = 3 * 50_176 * MEMORY_PER_PIXEL_BYTE
    budgets = [group.frame_budget for group in frames_between_steps(chat)[1]]
    monkeypatch.setattr(scheduler, "MEMORY_BYTES", 2 * frame_bytes * budgets[0])
    assert list(frames_between_steps(chat)[0].values()) == budgets[:1]


def test_a_video_that_fails_to_prefetch_is_reported_by_its_own_step(chat):
    broken = SampleOrder(PROMPTS, 0)[2].item  # the first prompt of the second step
    prompts = [replace(prompt, videos=("/missing.mp4",)) if prompt == broken else prompt for prompt in PROMPTS]
    ahead, second = frames_between_steps(chat, prompts=prompts)
    assert len(ahead) == 1
    assert [{rollout.reason for rollout in group.rollouts if rollout.missing} for group in second] == [{"video"}, set()]
