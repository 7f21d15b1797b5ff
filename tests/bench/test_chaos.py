"""A run keeps its guarantees under faults, and every check detects a violation."""

import argparse
import asyncio
import json
import mmap
import os
import shutil
import socket
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from agents import FakeFrames, call
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from async_tests import async_test
from learner_state import flip
from training import QUICK, SHORT_PROMPT, rollouts_of, train_here

import model_port
from model_port.processing import VisionContract
from paravt_jax.config import load_config
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import Cursor, SampleOrder
from paravt_jax.learner.learner import Learner
from paravt_jax.rl.batches import PolicyUpdate
from paravt_jax.rl.groups import records
from paravt_jax.rl.run import Run
from paravt_jax.rl.setup import update_of
from paravt_jax.sampling.local_copy import LocalCopy
from paravt_jax.sampling.weights import ModelWeights
from rollout.chat import Chat
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent
from rollout.supervisor import SHARED_MEMORY
from scripts.bench import chaos, smoke_run
from scripts.bench.chaos import left_in_memory, recovery_problems, stage, unexplained
from scripts.bench.chaos.account import accounting_problems
from scripts.bench.chaos.checks import problems_of
from scripts.bench.chaos.faults import KINDS, SERVICE_KINDS, schedule
from scripts.bench.chaos.recorder import Recorder
from scripts.bench.chaos.replay import replay
from scripts.bench.chaos.service import DEADLINE_S, LATE_S, ClientRequest, judged
from scripts.bench.chaos.stage import Exit, TrainerStage
from scripts.bench.smoke_run import CONFIG, SETTINGS

PROMPTS = [Prompt(f"p{n}", f"Question {n}? A or B", (f"/video{n}.mp4",), "A", "mcq") for n in range(2)]
ACCOUNT = [
    *SHORT_PROMPT,
    *("model.dtype=float32", "train.prompts_per_step=2", "train.group_size=4", "train.max_resamples=0"),
    *("train.updates_per_step=1", "train.subagent_loss=true", "video.frame_budgets=[]", "video.overview_frames=3"),
    *("rollout.max_context_tokens=512", "rollout.max_new_tokens=64", "pack.row_tokens=512", "loss.correction=none"),
]
SEED, MINUTES = 54_700, 0.19  # older weights in a server, missing videos and a killed trainer in eleven seconds


def test_without_a_clone_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke_run, "CONFIG", tmp_path / "none.yaml")
    with pytest.raises(RuntimeError, match="run this benchmark from a clone of the repository"):
        chaos.run(argparse.Namespace(minutes=1.0, seed=0, serve=False, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_seed_determines_the_faults_and_many_seeds_cover_all():
    assert schedule(3, 600.0) == schedule(3, 600.0) != schedule(4, 600.0)
    for kinds in (KINDS, SERVICE_KINDS):
        faults = {(fault.kind, fault.role) for seed in range(9) for fault in schedule(seed, 900.0, kinds)}
        assert faults == {(kind, role) for _, kind, role, _ in kinds}
    mixed = {(stage.num_hosts_of(seed), seed % 2, seed % 3 == 2) for seed in range(10)}
    assert {(2, 1, False), (2, 0, True), (1, 0, False), (1, 1, False), (1, 0, True), (1, 1, True)} <= mixed


def test_leftover_shared_memory_is_distinguished_from_memory_in_use():
    at_start = set(SHARED_MEMORY.iterdir())
    with tempfile.NamedTemporaryFile(prefix="psm_", dir=SHARED_MEMORY) as file:
        file.write(b"x")
        file.flush()
        path = Path(file.name)
        assert left_in_memory(at_start) == set()
        with mmap.mmap(file.fileno(), 1):
            file.file.close()
            assert left_in_memory(at_start) == set()
        assert left_in_memory(at_start) == {path.name}
        assert left_in_memory({*at_start, path}) == set()


class LeakingStage:
    """A stage whose trainer, this process, leaks a file or connection in every step."""

    def __init__(self, keep):
        self.keep = keep

    async def steps_more(self, number):
        self.keep()
        await asyncio.sleep(0.01)

    def targets(self, role):
        return [[os.getpid()]]


@pytest.mark.parametrize(("many", "message"), [(9, "open files"), (97, "connections")])
def test_files_and_connections_left_open_are_detected(many, message):
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=4 * 97) as server:

        def keep_one():
            if message == "connections":
                stack.enter_context(socket.create_connection(server.getsockname()))
            else:
                stack.enter_context(Path(os.devnull).open())

        assert asyncio.run(recovery_problems(LeakingStage(keep_one))) == []
        (problem,) = asyncio.run(recovery_problems(LeakingStage(lambda: [keep_one() for _ in range(many)])))
        assert f"{message} during a step" in problem


@pytest.fixture(scope="module")
def step(tiny_hf):
    """A step's groups, their log lines, and the update's inputs."""
    config = load_config(None, *ACCOUNT)
    chat, contract = Chat.from_hf(tiny_hf), VisionContract.from_hf(tiny_hf)
    learner = Learner(model_port.load(tiny_hf), config.optim, config.loss, temperature=0.7)

    async def reply(request):
        calls = "" if "tool_response>" in chat.decode(request.ids) else call(3, 9)
        answer = "<answer>A</answer>" if int(request.episode[-1]) % 2 else "<answer>B</answer>"
        # Tokens after an image are not trained.
        image = "<|image_pad|>" if request.episode.endswith("/2") and not calls else ""
        return chat.encode(f"This is {request.episode}.</think>{calls or image + answer}<|im_end|>").tolist()

    async def run_step():
        agent = Agent(ScriptedEngine(reply), FakeFrames(), chat, config.rollout)
        return await rollouts_of(agent, SampleOrder(PROMPTS, 0), Cursor(), config).next_groups(1)

    groups = asyncio.run(run_step())
    lines = json.loads(json.dumps(records(groups, 1, chat)))
    assert any(turn["calls"] for line in lines for turn in line["turns"])
    return groups, lines, update_of(learner, chat, contract, config), chat


@pytest.mark.slow
def test_an_update_of_every_episode_once_is_accounted_for(step):
    groups, lines, update, chat = step
    assert accounting_problems(1, lines, update.parts(groups), chat.visual_ids, subagents=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (lambda dialogues: dialogues[:-1], "used 0 times"),
        (lambda dialogues: [*dialogues, replace(dialogues[1])], "used 2 times"),
        (lambda dialogues: [*dialogues[:-1], replace(dialogues[-1], ids=dialogues[-1].ids + 1)], "is not in the log"),
    ],
    ids=["left out", "used twice", "other tokens"],
)
def test_an_episode_left_out_or_used_twice_is_detected(sabotage, message, step, monkeypatch):
    groups, lines, update, chat = step
    make_dialogues = PolicyUpdate._dialogues
    monkeypatch.setattr(PolicyUpdate, "_dialogues", lambda self, groups: sabotage(make_dialogues(self, groups)))
    problems = accounting_problems(1, lines, update.parts(groups), chat.visual_ids, subagents=True)
    assert any(message in problem for problem in problems)


@pytest.mark.nightly
def test_weights_one_version_behind_their_label_are_detected(tmp_path, monkeypatch):
    published = []

    def weights(self):
        """Returns the weights of step 1 in every step."""
        model = self.training.learner.model
        copy = LocalCopy(model, None, beside_update=True).of(model)
        published.append(ModelWeights(copy, np.dtype(np.float32)))
        return published[0]

    monkeypatch.setattr(Run, "_weights", weights)
    settings = [*SETTINGS, *QUICK, *stage.FRESH, "train.num_steps=3"]  # forced calls: rewards differ
    train_here(tmp_path / "run", *settings)
    problems = problems_of(tmp_path / "run", load_config(CONFIG, *settings).train)
    (violation,) = [problem for problem in problems if "differ from it by a KL of" in problem]
    assert violation.startswith("step 3: ")


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        (Exit(137, ""), None),
        (Exit(0, ""), None),
        (Exit(1, "error: no server is left"), None),
        (Exit(134, "", follows=True), None),
        (Exit(134, ""), "the trainer ended with 134: no error message"),
        (Exit(1, "error: KeyError: not expected"), "the trainer ended with 1: error: KeyError"),
        (Exit(2, "", follows=False), "the trainer ended with 2"),
    ],
)
def test_an_exit_without_a_fault_or_a_message_is_detected(host, problem):
    problems = unexplained("trainer", [host], Counter())
    assert problems == [] if problem is None else problems[0].startswith(problem)
    assert unexplained("trainer", [host], Counter({"no memory trainer": 1})) == []


@pytest.mark.parametrize("role", ["server", "trainer", "decoder"])
def test_a_process_that_has_just_started_is_not_a_target(role, tmp_path):
    started = TrainerStage(tmp_path, [])
    without_a_command = SimpleNamespace(pid=-1, returncode=None)  # a supervisor that has not started its command yet
    started._servers, started._hosts = {0: without_a_command}, [without_a_command]
    assert started.targets(role) == []


def hosts_ending(tmp_path, monkeypatch, first, second, steps):
    """Runs two hosts that are shell scripts; `steps` are logged before the first host exits."""
    monkeypatch.setattr(stage, "LAST_HOST_S", 0.5)

    async def body():
        two = TrainerStage(tmp_path, [], 2)
        two.run_dir.mkdir()
        run = [two.run(["/bin/sh", "-c", script], stderr=asyncio.subprocess.PIPE) for script in (first, second)]
        two._hosts = [await host for host in run]
        (two.run_dir / "metrics.jsonl").write_text("{}\n" * steps)
        await two._all_hosts_end(0)
        assert two.survivors() == []
        return two

    return asyncio.run(body())


def test_hosts_that_exit_together_are_not_a_violation(tmp_path, monkeypatch):
    ended = hosts_ending(tmp_path, monkeypatch, "echo 'error: lost' >&2; exit 1", "sleep 0.2; exit 134", 1)
    assert ended.violations == []
    assert ended.exits == [Exit(1, "error: lost", follows=False), Exit(134, "", follows=True)]


@pytest.mark.parametrize(("steps", "problems"), [(1, ["host 1 ran 0.5 s longer than another one"]), (0, [])])
def test_a_host_that_outlives_another_after_a_step_is_killed_and_detected(steps, problems, tmp_path, monkeypatch):
    assert hosts_ending(tmp_path, monkeypatch, "exit 1", "sleep 60", steps).violations == problems


def answer(text):
    return json.dumps({"choices": [{"message": {"reasoning_content": text, "content": ""}}]})


OWN = ["<think>another turn", "blue, because the wall is blue"]
REQUEST = ClientRequest("Question 3?", 0.0, 2.0, 200, answer(f"Look at it. {OWN[1]}"))


@pytest.mark.parametrize(
    ("request_", "roles", "outcome", "problem"),
    [
        (REQUEST, set(), "answered", ""),
        (REQUEST._replace(body=answer("red, as in another question")), set(), "answered", "no server sampled for it"),
        (REQUEST._replace(body="{}"), set(), "answered", "is not an answer"),
        (REQUEST._replace(status=429), set(), "busy", ""),
        (REQUEST._replace(status=503), {"server"}, "unavailable", ""),
        (REQUEST._replace(status=400), {"videos"}, "no video", ""),
        (REQUEST._replace(status=400), {"server"}, "400", "had the response 400"),
        (REQUEST._replace(status=500), {"server"}, "500", "had the response 500"),
        (REQUEST._replace(status=0), {"service"}, "connection lost", ""),
        (REQUEST._replace(status=0), {"server"}, "connection lost", "the service did not end"),
        (REQUEST._replace(end_s=DEADLINE_S + LATE_S + 1), {"service"}, "late", "no response after 86 s"),
    ],
)
def test_a_request_without_an_answer_or_a_clear_error_is_detected(request_, roles, outcome, problem):
    judged_outcome, reason = judged(request_, OWN, roles)
    assert judged_outcome == outcome and (problem in reason if problem else reason == "")


@async_test
async def test_a_roll_back_loads_the_previous_weights_with_their_own_label_or_a_false_one(tmp_path):
    loads, new = [], tmp_path / "new"
    new.mkdir()

    async def load(request):
        """Loads weights as an SGLang server does."""
        body = await request.json()
        loads.append(((Path(body["model_path"]) / "weights").read_text(), body["weight_version"]))
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", load)
    async with TestServer(app) as server, ClientSession() as client:
        recorder = Recorder(lambda sent, answer: None, tmp_path / "kept")
        recorder.server_url = str(server.make_url("")).rstrip("/")
        await recorder.start()

        async def publish(content, version):
            (new / "weights").write_text(content)
            load = {"model_path": str(new), "weight_version": f"run/{version}"}
            (await client.post(f"{recorder.url}/update_weights_from_disk", json=load)).raise_for_status()

        try:
            await publish("1", 1)
            assert not await recorder.roll_back()
            for version in (2, 3):
                await publish(str(version), version)
            await publish("2 again", 2)  # the trainer restarted from a checkpoint
            await publish("3 again", 3)
            assert await recorder.roll_back() and await recorder.roll_back(claim_current=True)
            for version in range(4, 12):
                await publish(str(version), version)
            assert await recorder.roll_back()
        finally:
            await recorder.close()
    assert [loads[5], loads[6], loads[-1]] == [("2 again", "run/2"), ("2 again", "run/3"), ("10", "run/10")]
    assert len(list((tmp_path / "kept").iterdir())) == 5


@pytest.mark.nightly
@pytest.mark.timeout(900)
@async_test
async def test_servers_with_older_weights_and_the_current_label_are_detected(tmp_path):
    """The trainer cannot detect this, but the step's KL shows it."""
    both = TrainerStage(tmp_path, stage.settings_of(0))
    try:
        await both.start(0)
        await both.steps_more(2)
        for number in range(stage.NUM_SERVERS):
            assert await both.roll_back(number, claim_current=True)
        await both.steps_more(2)
        await both.finish()
    finally:
        await both.close()
    problems = problems_of(both.run_dir, load_config(CONFIG, *SETTINGS, *both.settings).train)
    assert problems and all("differ from it by a KL of" in problem for problem in problems)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_under_faults_loses_and_repeats_no_episode_and_leaves_no_files(tmp_path):
    result = chaos.run(argparse.Namespace(minutes=MINUTES, seed=SEED, serve=False, out=tmp_path / "out"))
    assert result["violations"] == [], chaos.table(result)
    assert sum(result["faults"].values()) >= 2 and result["steps"] >= 3
    assert result["answers_given"] >= result["answers_logged"] > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run without faults, and its settings."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [*SETTINGS, *QUICK, *stage.FRESH, "train.num_steps=3"]
    train_here(folder / "run", *settings)
    return folder / "run", settings


def lose_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    del lines[number]
    path.write_text("".join(lines))


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))


def edit(run: Path, change) -> None:
    """Changes the first sampled segment with a nonzero advantage."""
    for path in sorted((run / "episodes").iterdir()):
        episodes = [json.loads(line) for line in path.read_text().splitlines()]
        trained_on = [episode for episode in episodes if episode["advantage"]["sequence"]]
        if sampled := [s for episode in trained_on for s in episode["segments"] if s["kind"] == "sampled"]:
            change(sampled[0])
            path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
            return
    raise AssertionError("no episode differs from its group")


FAULTS = {
    "lost episode": lambda run: lose_line(run / "episodes" / "000002.jsonl", -1),
    "doubled sample": lambda run: shutil.copy(run / "episodes" / "000001.jsonl", run / "episodes" / "000002.jsonl"),
    "lost step": lambda run: lose_line(run / "metrics.jsonl", 1),
    "future version": lambda run: edit(run, lambda segment: segment.update(version=segment["version"] + 1)),
    "lost checkpoint": lambda run: newest_checkpoint(run).rename(run / "checkpoints" / "999"),
    "other bytes": lambda run: flip(next((newest_checkpoint(run) / "params").rglob("0.0")), at=100),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lost episode", "step 2: prompt samples and rollouts are"),
        ("doubled sample", "step 2: prompt samples and rollouts are"),
        ("lost step", "the log has metrics of steps"),
        ("future version", ", the newest is"),
        ("lost checkpoint", "has no checkpoint"),
        ("other bytes", "does not match its checksum"),
    ],
)
def test_every_check_of_the_log_can_fail(fault, message, trained, tmp_path):
    source, settings = trained
    run, train = shutil.copytree(source, tmp_path / "run"), load_config(CONFIG, *settings).train
    assert problems_of(run, train) == []
    FAULTS[fault](run)
    assert any(message in problem for problem in problems_of(run, train))


@pytest.mark.nightly
def test_a_replay_detects_changed_log_probs(trained, tmp_path):
    source, settings = trained
    run = shutil.copytree(source, tmp_path / "run")
    problems, sampled = asyncio.run(replay(run, settings, tmp_path / "replay"))
    assert problems == [] and sampled.total() > 0
    edit(run, lambda segment: segment["behavior_logp"].__setitem__(0, segment["behavior_logp"][0] - 0.5))
    problems, _ = asyncio.run(replay(run, settings, tmp_path / "other"))
    assert any("differs between the run and its replay" in problem for problem in problems)
