"""An SFT run as a user starts it: it learns, writes checkpoints, and resumes after a kill."""

import asyncio
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import hosts as several
import numpy as np
import pytest
from agents import FakeFrames
from async_tests import async_test
from training import ROOT, arrays_of, episodes_of, metrics_of

from model_port.config import ModelConfig
from model_port.processing import VisionContract
from model_port.tiny import tiny_config
from paravt_jax.config import SftConfig, load_config
from paravt_jax.data.sample_order import SampleOrder
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.imitation.batches import RENDERED_AHEAD, Position, TraceBatch, TraceBatches
from paravt_jax.imitation.render import TraceRenderer
from paravt_jax.imitation.run import SftRun
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.packing import TrainBatch
from paravt_jax.run.hosts import ALONE
from paravt_jax.run.process import Stopping
from paravt_jax.run.training import RunDirectory, Training
from paravt_jax.view.page import make_page
from rollout.chat import Chat
from scripts.miniature.model import make_model
from scripts.miniature.traces import Mixture, rows_of
from scripts.miniature.world import make_world, write_rows

CONFIG = ROOT / "configs" / "miniature" / "sft.yaml"
STEPS = 4
FIRST = Position()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    scenes = make_world(directory, 0, 6)
    write_rows(directory / "train.jsonl", rows_of(scenes[:4], (4, 8), Mixture(), 0))
    (directory / "broken.mp4").touch()
    broken = [{"type": "video_url", "video_url": {"url": "broken.mp4"}}, {"type": "text", "text": "When?"}]
    messages = [{"role": "user", "content": broken}, {"role": "assistant", "content": "Now."}]
    rows = [*rows_of(scenes[4:], (4, 8), Mixture(), 0), {"messages": messages}]
    write_rows(directory / "validation.jsonl", rows)
    make_model(directory / "tiny.hf")
    return directory


def arguments(world: Path, run_dir: Path, *overrides: str) -> list[str]:
    settings = [f"data.{part}={world / part}.jsonl" for part in ("train", "validation")]
    settings += [f"run_dir={run_dir}", f"model.path={world / 'tiny.hf'}", f"sft.num_steps={STEPS}"]
    settings += ["sft.rows_per_step=2", "pack.num_rows=2", "validation.every_steps=2"]
    settings += ["checkpoint.every_steps=2", "checkpoint.keep=5"]
    return ["--config", str(CONFIG), *settings, *overrides]


@pytest.fixture(scope="module")
def finished_run(world, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    assert forked.run("paravt_jax.sft", *arguments(world, run_dir)).returncode == 0
    return run_dir


@pytest.mark.slow
def test_a_run_learns_validates_and_exports(finished_run, tmp_path):
    losses = [metrics["loss/imitation"] for metrics in metrics_of(finished_run)]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    for line in map(json.loads, (finished_run / "metrics.jsonl").read_text().splitlines()):
        trained = line["perf/trained_tokens_per_s_device"] * line["time/update_s"]  # on one device
        assert trained == pytest.approx(line["perf/tokens_per_s"] * line["time/step_s"])  # traces share no prompt
        assert "perf/mfu" not in line and "perf/sampled_tokens_per_s" not in line
    held_out = [json.loads(line) for line in (finished_run / "validation.jsonl").read_text().splitlines()]
    assert [(row["step"], row["validation/num_left_out"]) for row in held_out] == [(0, 1), (2, 1), (4, 1)]
    log = (finished_run / "log.txt").read_text()
    assert log.count("broken.mp4: the video cannot be decoded: the file is empty") == 1
    assert held_out[2]["validation/loss"] < held_out[1]["validation/loss"] < held_out[0]["validation/loss"]
    assert held_out[0]["validation/loss"] == pytest.approx(losses[0], rel=0.02)  # the same model
    source = finished_run / "checkpoints" / str(STEPS)
    assert forked.run("model_port.export", "--src", source, "--dst", tmp_path / "hf").returncode == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


@pytest.mark.slow
def test_every_step_logs_a_sample_that_the_page_shows(finished_run):
    page = make_page([finished_run], 100, frames=True).decode()
    records = [json.loads(line) for line in page.split('id="records">')[1].split("</script>")[0].splitlines()]
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    assert all(record["turns"][0]["num_sampled"] > 3 and record["reward"] is None for record in records)
    assert any(video["pictures"] for record in records for video in record["videos"])
    assert '"kind":"imitation"' in page


@pytest.mark.nightly
def test_a_killed_run_resumes_and_ends_like_an_uninterrupted_one(finished_run, world, tmp_path):
    output, state = tmp_path / "output", tmp_path / "checkpoints" / "2" / "state.json"
    process = forked.start("paravt_jax.sft", arguments(world, tmp_path), str(output))
    try:
        forked.wait_until(state.exists, process, output)
    finally:
        process.kill()
        process.join()
    assert forked.run("paravt_jax.sft", *arguments(world, tmp_path)).returncode == 0
    assert metrics_of(tmp_path) == metrics_of(finished_run)
    assert arrays_of(tmp_path, STEPS) == arrays_of(finished_run, STEPS)


@pytest.mark.nightly
def test_a_run_that_lost_a_video_resumes_at_its_position(finished_run, world, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    video = min(world.glob("videos/*.mp4"))
    more = arguments(world, run_dir, f"sft.num_steps={STEPS + 1}", "data.max_bad_frac=0.9")
    video.rename(tmp_path / video.name)
    try:
        done = forked.run("paravt_jax.sft", *more)
    finally:
        (tmp_path / video.name).rename(video)
    assert done.returncode == 0, done.stderr
    assert "(missing file: " in done.stderr and "; rows with lost files keep their place" in done.stderr
    before, after = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[-2:])
    assert before["data/epoch"] < after["data/epoch"]


@pytest.mark.nightly
def test_ctrl_c_saves_and_exits_130(world, tmp_path):
    output = tmp_path / "output"
    process = forked.start("paravt_jax.sft", arguments(world, tmp_path), str(output))
    try:
        forked.wait_until(lambda: "step 1/" in output.read_text(), process, output)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 130, output.read_text()
    assert (tmp_path / "checkpoints" / str(len(metrics_of(tmp_path)))).is_dir()


@pytest.mark.nightly
def test_only_adapters_are_trained_and_exported_alone_or_merged(world, tmp_path):
    run = tmp_path / "run"
    settings = ("lora.rank=8", "optim.train_vision=false", "optim.learning_rate=1e-2")
    assert forked.run("paravt_jax.sft", *arguments(world, run, *settings)).returncode == 0
    losses = [metrics["loss/imitation"] for metrics in metrics_of(run)]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    source = run / "checkpoints" / str(STEPS)
    for name, flags, file in (("adapter", ["--adapter"], "adapter_model.safetensors"), ("hf", [], "model.safetensors")):
        done = forked.run("model_port.export", "--src", source, "--dst", tmp_path / name, *flags)
        assert done.returncode == 0 and (tmp_path / name / file).is_file(), done.stderr


def batches_of(
    tiny_hf: Path,
    traces: list[Trace],
    first: Position = FIRST,
    most_frame_rows: int = 1000,
    num_row_parts: int = 1,
    **pack: int,
) -> TraceBatches:
    config = load_config(None, "data.train=traces.jsonl", "sft.rows_per_step=2", "pack.num_rows=2", schema=SftConfig)
    video = replace(config.video, overview_frames=4, max_pixels=32**2)
    config = replace(config, pack=replace(config.pack, **pack), video=video)
    contract, model = VisionContract.from_hf(tiny_hf), tiny_config()
    assert isinstance(model, ModelConfig)
    renderer = TraceRenderer(FakeFrames(), Chat.from_hf(tiny_hf), contract, config.rollout)
    parts = {"num_row_parts": num_row_parts, "most_frame_rows": most_frame_rows}
    settings = {"pack": config.pack, "video": config.video, "imitation": config.sft, "seed": 0, **parts}
    return TraceBatches(renderer, SampleOrder(traces, 0), first, model, contract, **settings)


def next_batches(batches: TraceBatches, num: int) -> list[TraceBatch]:
    async def body() -> list[TraceBatch]:
        try:
            return [await batches.next_batch() for _ in range(num)]
        finally:
            await batches.close()

    return asyncio.run(body())


def trace(number: int, answer: str = "Red.", path: str = "/a.mp4") -> Trace:
    question = Message("user", (Media("video", path), f"Question {number}?"))
    return Trace(str(number), (question, Message("assistant", (answer,))))


def tokens_of(step: TraceBatch) -> list[list[int]]:
    return [batch.text.tokens.tolist() for batch in step.batches]


@pytest.mark.slow
def test_a_step_depends_only_on_the_position_before_it(tiny_hf):
    traces = [trace(number, "word " * (5 * number)) for number in range(9)]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=1024), 4)
    resumed = next_batches(batches_of(tiny_hf, traces, first=steps[1].after, row_tokens=1024), 2)
    assert [tokens_of(step) for step in resumed] == [tokens_of(step) for step in steps[2:]]
    assert [step.after for step in resumed] == [step.after for step in steps[2:]]


@pytest.mark.slow
def test_batches_never_become_smaller_so_that_updates_are_compiled_once(tiny_hf):
    traces = [trace(number, "word " * (1 if number % 6 else 120)) for number in range(12)]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=1024), 6)
    batches = [batch for step in steps for batch in step.batches]
    num_scored = [int(batch.loss_mask.sum(1).max()) for batch in batches]
    num_entries = [batch.loss_mask.shape[1] for batch in batches]
    assert num_scored[-1] < 128 < max(num_scored)
    assert num_entries == sorted(num_entries)


@pytest.mark.slow
def test_rows_may_become_shorter_when_a_run_resumes(tiny_hf):
    """The checkpoint has the scored tokens of longer rows."""
    traces = [trace(number) for number in range(4)]
    (step,) = next_batches(batches_of(tiny_hf, traces, first=Position(1, 2048, 1), row_tokens=1024), 1)
    assert step.batches[0].loss_mask.shape == (2, 1024)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "num_rows", "expected"), [(1000, 2, 14), (1000, 1, 7), (10, 2, 10), (4, 2, 8)])
def test_the_first_batches_have_room_for_more_frames(tiny_hf, most, num_rows, expected):
    """The traces have 8 frames. Batches have room for 1.75 times as many, up to the largest batch's frames."""
    traces = [trace(number, "word " * 120, f"/{number}.mp4") for number in range(4)]
    steps = next_batches(batches_of(tiny_hf, traces, most_frame_rows=most, row_tokens=900, num_rows=num_rows), 2)
    visions = [batch.vision for step in steps for batch in step.batches]
    assert [len(vision.patches) for vision in visions if vision is not None] == [expected] * (4 // num_rows)


@pytest.mark.slow
def test_a_run_that_resumes_on_a_larger_mesh_has_room_for_the_same_frames(tiny_hf):
    traces = [trace(number, "word " * 120, f"/{number}.mp4") for number in range(4)]
    (one,) = next_batches(batches_of(tiny_hf, traces, row_tokens=900), 1)
    (two,) = next_batches(batches_of(tiny_hf, traces, one.after, num_row_parts=2, row_tokens=900), 1)
    assert [len(step.batches[0].vision.patches) for step in (one, two)] == [14, 14]


@pytest.mark.slow
def test_a_step_has_no_batch_for_traces_that_its_rows_do_not_hold(tiny_hf):
    """A long trace and two short ones fill a row, but the planner puts the longest together first."""
    traces = [trace(number, "word " * (5 if number % 3 else 100)) for number in range(9)]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=760 + 2 * 475), 20)
    assert {len(step.batches) for step in steps} == {1}


@pytest.mark.slow
@async_test
async def test_the_first_batch_is_known_before_the_first_step(tiny_hf):
    batches = batches_of(tiny_hf, [trace(number) for number in range(7)], row_tokens=1024)
    try:
        assert await batches.peek_batch() is await batches.next_batch()
    finally:
        await batches.close()


@pytest.mark.slow
def test_every_trace_is_used_once_per_epoch(tiny_hf):
    traces = [trace(number) for number in range(7)]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=1024), 5)
    assert steps[-1].after.next_visit == sum(step.num_traces for step in steps) > 7
    assert all(step.num_loss_tokens == sum(int(b.loss_mask.sum()) for b in step.batches) for step in steps)


@pytest.mark.slow
def test_traces_that_do_not_fit_or_cannot_be_read_are_skipped_and_reported(tiny_hf):
    traces = [trace(0), trace(1, "word " * 2000), trace(2, path="/missing.mp4"), trace(3)]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=1024), 5)
    assert sum(step.num_traces + step.num_left_out for step in steps) == steps[-1].after.next_visit > 3 * len(traces)
    too_long, missing = sorted(problem for step in steps for problem in step.problems)  # once, not in every epoch
    assert too_long == "1, /a.mp4: 6460 tokens are more than pack.row_tokens=1024"
    assert missing.startswith("2, /missing.mp4: the video cannot be opened")


def test_bad_traces_at_the_end_of_an_epoch_and_the_start_of_the_next_do_not_end_the_run(tiny_hf):
    traces = [trace(0), trace(1, path="/missing.mp4")]
    steps = next_batches(batches_of(tiny_hf, traces, row_tokens=461), 8)  # the first trace just fits
    assert all(step.num_traces for step in steps)


@pytest.mark.parametrize(
    ("num_bad", "num_good", "message"),
    [(2, 0, "3 consecutive traces cannot be used"), (2, 1, "33 of the last .* traces cannot be read; the last: ")],
)
def test_a_corpus_without_enough_readable_traces_ends_the_run(tiny_hf, num_bad, num_good, message):
    traces = [*(trace(n, path="/missing.mp4") for n in range(num_bad)), *(trace(2 + n) for n in range(num_good))]
    with pytest.raises(RuntimeError, match=message):
        next_batches(batches_of(tiny_hf, traces, row_tokens=1024), 20)


@async_test
async def test_a_signal_ends_a_validation_at_its_next_traces(tiny_hf, tmp_path):
    """It is not logged, and the resumed run repeats it."""
    stopping, num_scored = Stopping(), 0

    def log_probs(batch: TrainBatch) -> np.ndarray:
        nonlocal num_scored
        num_scored += 1
        stopping.set()
        stopping.signal = signal.SIGTERM
        return np.zeros_like(batch.behavior_logp)

    training: Any = object.__new__(Training)
    training.step, training.num_steps = 0, 5
    training.log = SimpleNamespace(phase=lambda text: None, validated=())  # logs nothing
    training.directory = RunDirectory(tmp_path, stopping, 0, {}, {}, False, ALONE)
    training.learner = SimpleNamespace(log_probs=log_probs)
    run: Any = object.__new__(SftRun)
    run.training, run.hosts, run.validation = training, ALONE, load_config(None).validation
    run.held_out = [trace(number) for number in range(RENDERED_AHEAD + 8)]
    run.batches = batches_of(tiny_hf, [trace(0)], row_tokens=32_768)
    await run.validate_if_due()
    assert num_scored == 1 and training.validation_stopped
    assert repr(run) == f"SftRun(Training(step=0, num_steps=5, path='{tmp_path}'))"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nums", [(1, 2), (4, 2, 8)])
def test_a_run_on_changing_numbers_of_hosts_trains_like_one_host(nums, world, tmp_path):
    """One step for each number; every mesh sums floats in another order."""
    several_runs = [("several", num, step) for step, num in enumerate(nums, 1)]
    for run, num, steps in (*several_runs, ("one", 1, len(nums))):
        rows = 2 * max(nums[:2])
        settings = [f"sft.rows_per_step={rows}", f"pack.num_rows={rows}", "optim.schedule=constant"]
        settings += ["optim.train_vision=false", "data.validation="]
        command = arguments(world, tmp_path / run, *settings, f"sft.num_steps={steps}", f"mesh.fsdp={num}")
        ended = several.start_command(tmp_path / f"output {run}{num}", "paravt_jax.sft", command, num).wait()
        assert [host.code for host in ended] == [0] * num, "\n\n".join(host.output[-3000:] for host in ended)
    for line, num in zip((tmp_path / "several" / "metrics.jsonl").read_text().splitlines(), nums, strict=True):
        row = json.loads(line)
        assert num == 1 or all(row[f"perf/hosts/{part}_slowest"] in range(num) for part in ("data", "devices"))
    ours, theirs = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "several")
    assert [row["step"] for row in theirs] == [*range(1, len(nums) + 1)]
    assert ours[-1]["loss/imitation"] < ours[0]["loss/imitation"] - 0.05
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert their_row == pytest.approx(our_row, rel=1e-3)
    ids, several_ids = ([episode["id"] for episode in episodes_of(tmp_path / run)] for run in ("one", "several"))
    assert ids == several_ids


def validate_slowly(*command):
    score = Learner.log_probs

    def log_probs(learner: Learner, batch: TrainBatch) -> np.ndarray:
        print("scoring", flush=True)
        time.sleep(1)
        return score(learner, batch)

    Learner.log_probs = log_probs
    several.command(*command)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_hosts_that_are_stopped_in_the_last_validation_repeat_it(world, tmp_path):
    """The first start could leave host 0's programs in the compilation cache, and the second one would hang."""
    settings = ["mesh.fsdp=2", "sft.num_steps=1", "validation.every_steps=1"]
    commands = [arguments(world, tmp_path / run, *settings) for run in ("run", "undisturbed")]
    started = several.start_command(tmp_path / "output", "paravt_jax.sft", commands[0], work=validate_slowly)
    output = started.files[0]
    forked.wait_until(lambda: "scoring" in output.read_text().partition("step 1/1")[2], started.processes[0], output)
    os.kill(started.processes[1].pid, signal.SIGTERM)
    for host, ended in enumerate(started.wait()):
        assert ended.code == 143, ended.output
        assert host or "1 of 1 steps are done without the last validation" in ended.last_line
    assert (tmp_path / "run" / "validation.jsonl").read_text().count("\n") == 1
    for command in commands:
        ended = several.start_command(tmp_path / "again", "paravt_jax.sft", command).wait()
        assert [host.code for host in ended] == [0, 0], "\n\n".join(host.output[-3000:] for host in ended)
    assert arrays_of(tmp_path / "run", 1) == arrays_of(tmp_path / "undisturbed", 1)
    ours, theirs = ((tmp_path / run / "validation.jsonl").read_text() for run in ("run", "undisturbed"))
    assert ours == theirs and ours.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "video"),
    [pytest.param("train", "seed0_0000_3.mp4", marks=pytest.mark.nightly), ("validation", "seed0_0004_3.mp4")],
)
def test_a_video_that_one_host_cannot_read_ends_all_with_its_name_in_that_hosts_log(part, video, world, tmp_path):
    """The hosts would otherwise compute with different batches."""
    other = shutil.copytree(world, tmp_path / "other")
    (other / "videos" / video).write_bytes(bytes((world / "videos" / video).stat().st_size))
    command = arguments(world, tmp_path / "run", "mesh.fsdp=2", f"data.{part}=${{oc.env:ROWS}}")
    rows = [{"ROWS": str(folder / f"{part}.jsonl")} for folder in (world, other)]
    hosts = several.start_command(tmp_path / "output", "paravt_jax.sft", command, own=rows).wait()
    for host, ended in enumerate(hosts):
        assert ended.code == 1 and "all hosts must be able to read the same videos" in ended.last_line, ended.output
        assert (f"{video}: the video cannot be decoded" in ended.output) == (host == 1)
