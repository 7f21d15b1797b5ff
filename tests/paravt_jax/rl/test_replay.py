"""A replay rebuilds a run's groups exactly from its log, and rejects logs that do not suffice."""

import asyncio
import json
from pathlib import Path

import pytest
from agents import DRAWS, FakeFrames, call, call_of, is_subagent
from data_rows import write_lines
from training import rollouts_of

from paravt_jax import train
from paravt_jax.config import Config, load_config, to_record
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.rewards.judge import Judge, JudgeConfig
from paravt_jax.rl.episodes import RolloutWorker
from paravt_jax.rl.groups import records
from paravt_jax.rl.metrics import group_metrics, num_tokens, staleness_mean
from paravt_jax.rl.replay import LoggedSteps, Replay, differing, no_reply
from rollout.engine.protocol import DeadlineExceeded, EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent

PROMPTS = [
    Prompt("p0", "Which? A or B", ("/a.mp4", "/b.mp4"), "A", "mcq"),
    Prompt("p1", "What is it?", ("/c.mp4",), "a dog", "oe"),
    Prompt("p2", "What is it?", ("/missing.mp4",), "a dog", "oe"),
]
SETTINGS = [
    *("train.prompts_per_step=3", "train.group_size=6", "train.max_resamples=0", "train.max_missing_frac=0.9"),
    *("video.frame_budgets=[3]", "reward.oe_mode=llm", "judge.url=http://judge/v1", "judge.model=m"),
]
ASKS = """
import numpy as np
from rollout.picture import Picture
from rollout.toolbox import Tool, ToolArgs
from rollout.tools import ToolSpec, make_schema
from rollout.video.info import TimedPicture

class Compares(Tool):
    spec = ToolSpec(make_schema("compares", "Compares."), usage="compares", effect="done")
    def check(self, arguments, videos): return ToolArgs()
    async def run(self, args, context):
        frames = [await context.prompter.frames_at(path, [5.0, 9.0]) for path in sorted(context.videos.infos)]
        drawn = TimedPicture(1.0, Picture.of(np.full((32, 32, 3), (9, 90, 200), np.uint8)))
        closeup = context.prompter.closeup_of([*frames[0], *frames[1], drawn], "They:", "This looks closely.")
        return await context.ask(closeup, "all")
"""
LOOK = f"I look.</think>{call(3, 5)}<|im_end|>".replace("video.mp4", "video_1.mp4")


class Counting(Judge):
    """A judge whose scores differ and one of which is missing."""

    def __init__(self):
        super().__init__(JudgeConfig("http://judge/v1", "m"))
        self.scores = iter([0.5, None, 0.0, 1.0])

    async def judge(self, question, answer, prediction):
        return next(self.scores)


@pytest.fixture(scope="module")
def played(chat):
    """Plays groups with calls, two videos, a missing verdict, a timeout in the second turn, and a missing video."""
    config = load_config(None, *SETTINGS)
    turns = {}

    async def reply(request):
        turn = turns[request.episode] = turns.get(request.episode, 0) + (not is_subagent(chat, request))
        if is_subagent(chat, request):
            return chat.encode("A report.<|im_end|>").tolist()
        if request.episode.endswith("/5"):
            raise EngineError("gone")
        if request.episode.endswith("/4") and turn == 2:
            raise DeadlineExceeded("too late")
        looks, letter = "-p0/" in request.episode and turn == 1, "AB"[int(request.episode[-1]) % 2]
        return chat.encode(LOOK if looks else f"So.</think><answer>{letter}</answer><|im_end|>").tolist()

    async def work():
        agent = Agent(ScriptedEngine(reply, version=3), FakeFrames(), chat, config.rollout)
        return await rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config, Counting()).next_groups(1)

    return asyncio.run(work())


def write_log(run_dir, groups, chat, step=1):
    write_lines(run_dir / "episodes" / f"{step:06d}.jsonl", records(groups, step, chat))
    (run_dir / "config.json").write_text(json.dumps({"config": {"judge": {"model": "m"}}}))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    return run_dir


def logged_steps(run_dir, config):
    return LoggedSteps.of(run_dir, config.run_dir, needs_verdicts=config.judge.is_set)


def replayed(run_dir, chat, *overrides, frames=None, prompts=PROMPTS):
    config = load_config(None, *SETTINGS, *overrides)
    agent = Agent(ScriptedEngine(no_reply), frames or FakeFrames(), chat, config.rollout)
    worker = RolloutWorker(agent, config.reward, None, config.seed)
    log, order = logged_steps(run_dir, config), SampleOrder(prompts, 0)
    replay = Replay(log, worker, order, Cursor(), config.train, config.advantage)
    return asyncio.run(replay.next_groups(1)), replay


def test_groups_rebuilt_from_a_log_equal_the_logged_groups(played, chat, tmp_path):
    groups, replay = replayed(write_log(tmp_path, played, chat), chat)
    metrics = group_metrics(played)
    assert metrics["rollout/calls_ok"] == 4 and metrics["rollout/missing_deadline"] == 1
    assert metrics["rollout/missing_video"] == 6 and metrics["rollout/missing_judge"] == 1
    assert records(groups, 1, chat) == records(played, 1, chat)
    assert group_metrics(groups) == metrics
    assert staleness_mean(groups, 7) == staleness_mean(played, 7)
    assert num_tokens(groups, chat) == num_tokens(played, chat)
    assert replay.cursor.to_record() == {"next": 3, "again": [0, 1, 2]}  # open until the update


def test_a_replay_recomputes_rewards_with_its_settings(played, chat, tmp_path):
    run_dir = write_log(tmp_path, played, chat)
    replays = replayed(run_dir, chat), replayed(run_dir, chat, "reward.format_weight=0")
    rewards = [group_metrics(groups)["rollout/reward_mean"] for groups, _ in replays]
    assert rewards[0] != rewards[1]


def test_a_replayed_step_trains_on_no_more_groups_than_prompts_per_step(played, chat, tmp_path):
    assert sum(group.has_signal for group in played) == 2
    groups, replay = replayed(write_log(tmp_path, played, chat), chat, "train.prompts_per_step=1")
    assert [group.has_signal for group in groups].count(True) == 1
    assert len(groups) == 2  # and the group without signal
    (remaining,) = {0, 1, 2} - {group.sample.number for group in groups}
    replay.cursor.done([group.sample.number for group in groups])
    assert replay.cursor.take(1) == [remaining]


def test_a_log_of_other_data_videos_or_versions_is_rejected(played, chat, tmp_path):
    run_dir = write_log(tmp_path, played, chat)
    with pytest.raises(ValueError, match=r"has 00000\d-p\d as sample \d, but data.train now has 00000\d-p\d"):
        replayed(run_dir, chat, prompts=PROMPTS[::-1])
    with pytest.raises(ValueError, match=r"train\.group_size=5, but 00000\d-p\d has 6 episodes in"):
        replayed(run_dir, chat, "train.group_size=5")
    with pytest.raises(ValueError, match="frames differ from the run"):
        replayed(run_dir, chat, frames=FakeFrames(duration_s=32))
    path = run_dir / "episodes" / "000001.jsonl"
    log = path.read_text()
    path.write_text(log.replace("</tool_call>", "</call>").replace("<tool_call>", "<call>"))
    with pytest.raises(ValueError, match=r"has 1 calls in a turn of .*, but 0 are found now: set rollout\.tools as"):
        replayed(run_dir, chat)
    path.write_text(log.replace('"reason"', '"why"'))
    message = "of step 1 has no 'reason', because another version logged it; replay it with"
    with pytest.raises(ValueError, match=message):
        replayed(run_dir, chat)


def test_a_directory_without_a_run_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--replay", str(tmp_path)])
    with pytest.raises(ValueError, match=r"^--replay \S+: it has no config.json; give the run_dir of train$"):
        train.main()


@pytest.mark.parametrize(
    ("steps", "logged", "message"),
    [
        ([], 0, "is not a run, because it has no metrics.jsonl"),
        ([], 3, "has no RL episodes; choose a run of paravt_jax.train"),
        ([1, 2, 4, 5], 5, "lacks the episodes of step 3, but has earlier and later steps"),
        ([3, 4, 5], 5, "start with step 3, but it has no checkpoint of step 2"),
    ],
)
def test_an_incomplete_log_is_rejected(steps, logged, message, tmp_path):
    (tmp_path / "episodes").mkdir()
    for step in steps:
        (tmp_path / "episodes" / f"{step:06d}.jsonl").touch()
    if logged:
        write_lines(tmp_path / "metrics.jsonl", [{"step": step + 1} for step in range(logged)])
    with pytest.raises(ValueError, match=message):
        logged_steps(tmp_path, Config())


def test_a_replay_needs_its_own_directory_and_logged_verdicts(played, chat, tmp_path):
    run_dir = write_log(tmp_path, played, chat)
    with pytest.raises(ValueError, match="is the run to replay; choose another run_dir"):
        logged_steps(run_dir, Config(run_dir=str(run_dir / ".." / run_dir.name)))
    (run_dir / "config.json").write_text(json.dumps({"config": {"judge": None}}))
    with pytest.raises(ValueError, match=r"reward\.oe_mode=llm needs a judge's verdicts"):
        logged_steps(run_dir, load_config(None, *SETTINGS))


def test_changed_settings_are_reported(played, chat, tmp_path):
    run_dir, config = write_log(tmp_path, played, chat), Config(seed=1)
    (run_dir / "config.json").write_text(json.dumps({"config": to_record(Config())}))
    (run_dir / "settings.jsonl").write_text('{"after_step": 0}\n{"after_step": 3}\n')
    assert logged_steps(run_dir, config).remarks(to_record(config)) == [
        f"replaying steps 1 to 1 of {run_dir}; seed: 0 -> 1",
        "its settings changed after step 3; the replay uses the last ones",
    ]


def test_steps_without_metrics_are_not_replayed(played, chat, tmp_path):
    run_dir = write_log(tmp_path, played, chat)
    (run_dir / "episodes" / "000002.jsonl").touch()  # a kill between episodes and metrics
    assert logged_steps(run_dir, Config()).last == 1


def test_times_are_not_compared_and_nan_is_null():
    logged = {"loss/total": 0.5, "loss/kl_ref": None, "time/step_s": 1.0, "perf/rows": 3.0}
    assert differing(logged, {"loss/total": 0.5, "loss/kl_ref": float("nan"), "time/step_s": 9.0}) == []
    assert differing(logged, {"loss/total": 0.5000001, "loss/new": 1.0}) == ["loss/total", "loss/new"]


def test_the_first_step_with_different_metrics_is_reported(tmp_path):
    def write(name: str, losses: list[float]) -> Path:
        rows = [{"step": n + 1, "loss/total": loss, "time/step_s": n} for n, loss in enumerate(losses)]
        return write_lines(tmp_path / name / "metrics.jsonl", rows).parent

    log = LoggedSteps(write("run", [1.0, 2.0, 3.0]), 1, 3, None)
    assert log.compared(write("unlogged", [])).startswith("no step was logged")
    assert log.compared(write("same", [1.0, 2.0])).startswith("all 2 steps have the same metrics as in ")
    message = log.compared(write("other", [1.0, 2.5, 3.5]))
    assert message.startswith("2 of 3 steps have other metrics than ")
    assert message.endswith("first step 2: loss/total is 2.5 and was 2.0")


def move_videos(run_dir):
    """Changes the log as if the videos had been in another directory."""
    path = run_dir / "episodes" / "000001.jsonl"
    path.write_text(path.read_text().replace('"/a.mp4"', '"/old/a.mp4"').replace('"/b.mp4"', '"/old/b.mp4"'))


def all_pictures(groups):
    ledgers = [ledger for group in groups for rollout in group.rollouts for ledger in rollout.episode.ledgers]
    return [picture for ledger in ledgers for picture in ledger.pictures]


class Shifted(FakeFrames):
    """Frames that differ from the logged ones where a call looks at the second video."""

    async def frames(self, path, times_s, deadline_s, box=None):
        later = [time_s + 1 for time_s in times_s] if (path, len(times_s)) == ("/b.mp4", 2) else times_s
        return await super().frames(path, later, deadline_s, box)


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("code", "tool", "setting", "num_pictures"),
    [
        (DRAWS, "Draws", "rollout.crop_returns=frames", [3 + 2 + 1]),
        (ASKS, "Compares", "train.subagent_loss=true", [3, 2, 5]),
    ],
    ids=["in a response", "of a sub-agent"],
)
def test_pictures_of_a_users_tool_are_replayed(chat, tmp_path, moved, code, tool, setting, num_pictures):
    """Frames are read again, also of videos that have moved; a tool's drawing comes from the log.

    The sub-agent's tool shows frames of several videos, without a window, and a drawing.
    """
    (tmp_path / "own.py").write_text(code)
    settings = (setting, f"rollout.tools=[crop_video,{tmp_path / 'own.py'}:{tool}]")
    config = load_config(None, *SETTINGS, *settings)

    async def reply(request):
        if is_subagent(chat, request):
            return chat.encode("A report.<|im_end|>").tolist()
        looks = "<tool_response>" not in chat.decode(request.ids)
        calls = LOOK.replace("<|im_end|>", call_of(tool.lower()) + "<|im_end|>")
        letter = "AB"[int(request.episode[-1]) % 2]
        return chat.encode(calls if looks else f"So.</think><answer>{letter}</answer><|im_end|>").tolist()

    async def play():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        return await rollouts_of(agent, SampleOrder(PROMPTS[:1], 0), Cursor(), config, Counting()).next_groups(1)

    groups = asyncio.run(play())
    assert [len(ledger.pictures) for ledger in groups[0].rollouts[0].episode.ledgers] == num_pictures
    run_dir = write_log(tmp_path / "run", groups, chat)
    if moved:
        move_videos(run_dir)
    again, _ = replayed(run_dir, chat, *settings, prompts=PROMPTS[:1])
    for one, other in zip(*(all_pictures(of) for of in (groups, again)), strict=True):
        assert one.key == other.key and (one.pixels == other.pixels).all()
    assert records(again, 1, chat) == records(groups, 1, chat)
    with pytest.raises(ValueError, match="frames differ from the run"):
        replayed(run_dir, chat, *settings, prompts=PROMPTS[:1], frames=Shifted())
