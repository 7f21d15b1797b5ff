"""A run in a bucket: checkpoints are exact and atomic, logs are copied, and only one run uses it at a time."""

import asyncio
import errno
import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import jax
import pytest
from learner_state import adapted, bits, make_learner, set_state

import model_port
from model_port import bucket as bucket_module
from model_port.bucket import PARTIAL, UPLOADING, Bucket
from paravt_jax.config import CheckpointConfig, load_config, to_record
from paravt_jax.run import checkpoint, lease as lease_module, training
from paravt_jax.run.bucket_checkpoint import BucketCheckpoints
from paravt_jax.run.checkpoint_files import verify
from paravt_jax.run.directory import LogCopies, locked_for_bucket
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.run.lease import OWNER, token_of
from paravt_jax.run.process import Stopping

ADDRESS = "gs://bkt/runs/x"
CHECKPOINTS = "bkt/runs/x/checkpoints/"


@pytest.fixture
def gcs(gcs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("RENEW_S", 0.1), ("LEASE_S", 0.6), ("LOOK_S", 0.05)):
        monkeypatch.setattr(lease_module, name, seconds)
    return gcs


@pytest.fixture(scope="module")
def subject(tiny_hf):
    return make_learner(tiny_hf)


def open_checkpoints(tiny_hf, messages=None, before_commit=lambda: None, keep=2, adapter=None):
    messages = [] if messages is None else messages
    directory = Bucket.of(ADDRESS) / "checkpoints"
    return BucketCheckpoints(
        directory, tiny_hf, CheckpointConfig(keep=keep), messages.append, adapter, ALONE, before_commit=before_commit
    )


def saved(tiny_hf, subject, *steps, **options):
    """Saves checkpoints. Returns the bits of each step."""
    checkpoints, expected = open_checkpoints(tiny_hf, **options), {}
    for step in steps:
        expected[step] = bits(set_state(subject, step))
        checkpoints.save(subject, {"step": step})
    checkpoints.close()
    return expected


def restored(tiny_hf, subject, messages=None):
    checkpoints = open_checkpoints(tiny_hf, messages)
    try:
        return checkpoints.restore(set_state(subject, 99))
    finally:
        checkpoints.close()


@pytest.mark.slow
def test_a_checkpoint_restores_bit_for_bit_loads_and_verifies(gcs, tiny_hf, subject):
    expected = saved(tiny_hf, subject, 1, 2, 3)
    of_first = [name for method, name in gcs.requests if method == "DELETE" and name.startswith(f"{CHECKPOINTS}1/")]
    assert of_first[:2] == [f"{CHECKPOINTS}1/{UPLOADING}", f"{CHECKPOINTS}1/state.json"]  # the record before the blocks
    Bucket.of(f"{ADDRESS}/checkpoints/3/{UPLOADING}").write(b"{}")  # the run died before it removed the mark
    assert {name.split("/")[0] for name in gcs.names(CHECKPOINTS)} == {"2", "3"}  # only the newest two are kept
    assert restored(tiny_hf, subject) == {"step": 3} and bits(subject) == expected[3]
    assert not [name for name in gcs.objects if name.endswith(UPLOADING)]
    assert [problem for _, problem in verify(Bucket.of(ADDRESS) / "checkpoints")] == ["", ""]
    loaded = model_port.load(f"{ADDRESS}/checkpoints/3")
    assert loaded.config == subject.model.config


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["blocks", "record", "commit"])
def test_an_incomplete_checkpoint_is_never_read_and_is_removed(failure, gcs, tiny_hf, subject):
    expected = saved(tiny_hf, subject, 1)
    messages = []
    object_name = {"blocks": "2/params/text.embed.table_vd/0", "record": "2/state.json", "commit": "nothing"}[failure]

    def fail():
        if failure == "commit":
            raise ValueError("refused")

    gcs.fault = lambda method, name: 403 if method == "POST" and f"{CHECKPOINTS}{object_name}" in name else None
    saved(tiny_hf, subject, 2, messages=messages, before_commit=fail)
    (message,) = messages
    assert "The checkpoint of step 2 could not be written" in message and "step 1" in message
    gcs.fault = lambda method, name: None
    assert [name for name in gcs.names(CHECKPOINTS) if name.startswith("2/")]
    with pytest.raises(ValueError, match="is incomplete"):
        model_port.load(f"{ADDRESS}/checkpoints/2")
    assert restored(tiny_hf, subject) == {"step": 1} and bits(subject) == expected[1]
    assert not [name for name in gcs.names(CHECKPOINTS) if name.startswith("2/")]


@pytest.mark.slow
def test_transient_errors_cost_no_checkpoint(gcs, tiny_hf, subject):
    failures, messages = iter(["lost"] * 5), []
    lock = threading.Lock()

    def fail_five_times(method, name):
        with lock:
            return next(failures, None) if method == "POST" else None

    gcs.fault = fail_five_times
    expected = saved(tiny_hf, subject, 1, messages=messages)
    assert not messages and restored(tiny_hf, subject) == {"step": 1} and bits(subject) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bits", "missing"])
def test_a_damaged_checkpoint_is_set_aside_for_an_earlier_one(damage, gcs, tiny_hf, subject):
    expected, messages = saved(tiny_hf, subject, 1, 2), []
    names = [name for name in sorted(gcs.objects) if name.startswith(f"{CHECKPOINTS}2/optimizer/")]
    name = next(name for name in names if name[-1] == "0")
    generation, content = gcs.objects[name]
    if damage == "missing":
        del gcs.objects[name]
    else:
        gcs.objects[name] = generation, content[:-1] + bytes([content[-1] ^ 1])
    assert restored(tiny_hf, subject, messages) == {"step": 1} and bits(subject) == expected[1]
    assert "checkpoints/2 is broken" in messages[0] and "trying step 1 next" in messages[0]
    renamed = [("POST", f"{CHECKPOINTS}2/broken.json"), ("DELETE", f"{CHECKPOINTS}2/state.json")]
    assert [request for request in gcs.requests if request in renamed] == renamed
    assert open_checkpoints(tiny_hf).steps == [1]
    Bucket.of(f"{ADDRESS}/checkpoints/1").clear()
    with pytest.raises(RuntimeError, match=r"no intact checkpoint left \(2/broken\.json\)"):
        restored(tiny_hf, subject)
    saved(tiny_hf, subject, 2)
    assert f"{CHECKPOINTS}2/broken.json" not in gcs.objects


@pytest.mark.slow
def test_a_read_error_does_not_prove_damage(gcs, tiny_hf, subject):
    saved(tiny_hf, subject, 1)
    objects = dict(gcs.objects)
    gcs.fault = lambda method, name: 403 if method == "GET" and "/params/" in name else None
    with pytest.raises(RuntimeError, match="could not be read"):
        restored(tiny_hf, subject)
    assert gcs.objects == objects


def test_a_second_record_of_a_step_is_rejected(gcs, tiny_hf, subject):
    def another_was_faster():
        Bucket.of(f"{ADDRESS}/checkpoints/1/state.json").write(b"{}")

    messages = []
    saved(tiny_hf, subject, 1, messages=messages, before_commit=another_was_faster)
    assert "was written by another process at the same time" in messages[0]


def test_a_second_run_is_rejected_and_a_dead_runs_lease_is_taken_over(gcs, tmp_path, monkeypatch, capsys):
    bucket = Bucket.of(ADDRESS)
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        assert directory == tmp_path / "runs" / "x"
        assert f"are in {ADDRESS}" in capsys.readouterr().err
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(RuntimeError, match=rf"process \d+ on .* uses {ADDRESS}; wait for it"):
            locked_for_bucket(bucket, ALONE).__enter__()
    owner, other = f"bkt/runs/x/{OWNER}", b'{"token": "of a machine that was deleted", "who": "process 1 on tpu-0"}'
    assert owner not in gcs.objects
    for content, who in ((other, "process 1 on tpu-0"), (b"[]", "an unknown process"), (b"{", "an unknown process")):
        gcs.objects[owner] = 77, content
        with locked_for_bucket(bucket, ALONE) as (directory, _):
            assert f"was last locked by {who}" in capsys.readouterr().err
    another_is_faster = {owner: (76, other)}
    gcs.fault = lambda method, _: gcs.objects.update(another_is_faster) if method == "POST" else None
    with pytest.raises(RuntimeError, match=rf"process 1 on tpu-0 uses {ADDRESS}; wait for it"):
        locked_for_bucket(bucket, ALONE).__enter__()
    gcs.fault = lambda *_: None
    del gcs.objects[owner]
    monkeypatch.setattr(lease_module, "LEASE_S", 10.0)
    start_s = time.monotonic()
    gcs.objects[owner] = 78, json.dumps({"token": token_of(directory, bucket)}).encode()  # a dead run from here
    with locked_for_bucket(bucket, ALONE):
        pass
    gcs.objects[owner] = 79, other
    threading.Timer(0.5, gcs.objects.pop, [owner]).start()  # the other run ends
    monkeypatch.setattr(lease_module, "RENEW_S", 60.0)
    with locked_for_bucket(bucket, ALONE):
        assert time.monotonic() - start_s < 10
        gcs.objects[owner] = 80, other
    assert gcs.objects[owner] == (80, other)  # the release deletes no other run's lease


@pytest.mark.parametrize("answer", [None, "stall"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_releases_the_lease(number, answer, gcs, monkeypatch):
    monkeypatch.setattr(lease_module, "RELEASE_S", 0.5 if answer else 20.0)
    monkeypatch.setattr(bucket_module, "DEADLINE_S", 60.0)
    has_lease_at_exit, begin_s = [], time.monotonic()

    def exit_process(code: int) -> None:
        has_lease_at_exit.append(f"bkt/runs/x/{OWNER}" in gcs.objects)
        gcs.fault = lambda *_: None
        raise SystemExit(code)

    async def stopped() -> None:
        with ExitStack() as stack:
            training.RunDirectory.acquire(ADDRESS, stack, to_record(load_config(None)), False, ALONE)
            gcs.fault = lambda method, _: answer if method == "DELETE" else None
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)

    monkeypatch.setattr("os._exit", exit_process)
    with pytest.raises(SystemExit) as ended:
        asyncio.run(stopped())
    assert ended.value.code == 128 + number
    assert has_lease_at_exit == [answer == "stall"] and time.monotonic() < begin_s + 30


def test_a_run_that_lost_its_lease_cannot_commit_a_checkpoint(gcs, monkeypatch):
    monkeypatch.setattr(training, "BucketCheckpoints", lambda *_, before_commit: before_commit)
    bucket = Bucket.of(ADDRESS)
    with locked_for_bucket(bucket, ALONE) as (path, lease):
        run = training.RunDirectory(path, Stopping(), 0, {}, {}, False, ALONE, bucket, lease)
        before_commit = run.checkpoints(LogCopies(path, bucket))
        (path / "metrics.jsonl").write_text('{"step": 1}\n')
        before_commit()
        assert gcs.names("bkt/runs/x/") == {OWNER, "metrics.jsonl"}
        gcs.objects[f"bkt/runs/x/{OWNER}"] = (10**6, b'{"token": "other", "who": "process 9 on tpu-9"}')
        (path / "log.txt").write_text("of the run that lost the lease")
        with pytest.raises(RuntimeError, match=(taken_over := "was taken over by process 9 on tpu-9")):
            before_commit()
        assert taken_over in lease.lost  # ends the run at its next checkpoint
        assert gcs.names("bkt/runs/x/") == {OWNER, "metrics.jsonl"}
    assert json.loads(gcs.objects[f"bkt/runs/x/{OWNER}"][1])["token"] == "other"


def test_a_renewal_whose_answer_was_lost_keeps_the_lease(gcs, monkeypatch):
    monkeypatch.setattr(bucket_module, "DEADLINE_S", 0.0)
    with locked_for_bucket(Bucket.of(ADDRESS), ALONE) as (_, lease):
        faults = iter(["lost"])  # executed, but the run learns neither this nor the generation
        gcs.fault = lambda method, _: next(faults, 503) if method == "POST" else None
        with pytest.raises(RuntimeError, match="could not be written"):
            lease.renew()
        gcs.fault = lambda *_: None
        lease.renew()
        assert not lease.lost
        gcs.fault = lambda *_: 403  # renewals are tried again, and the run ends without an error
        gcs.requests.clear()
        while len(gcs.requests) < 3:
            time.sleep(0.01)


def test_the_verify_command_takes_the_address_of_a_run(gcs, tiny_hf, subject, monkeypatch, capsys):
    saved(tiny_hf, subject, 1)
    for address in (ADDRESS, f"{ADDRESS}/checkpoints", f"{ADDRESS}/checkpoints/1"):
        monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", address])
        checkpoint.main()
        assert capsys.readouterr().out == f"{ADDRESS}/checkpoints/1: intact\n"
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", "gs://bkt/runs/typo"])
    with pytest.raises(ValueError, match="gs://bkt/runs/typo is neither a run with checkpoints nor one of them"):
        checkpoint.main()


def test_a_first_start_on_a_full_disk_leaves_no_partial_token(gcs, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            locked_for_bucket(Bucket.of(ADDRESS), ALONE).__enter__()
    with locked_for_bucket(Bucket.of(ADDRESS), ALONE):
        pass


def uploads(gcs):
    return [name for method, name in gcs.requests if method == "POST" and OWNER not in name]


def test_logs_are_copied_and_downloaded_to_an_empty_disk(gcs, tmp_path, monkeypatch):
    bucket = Bucket.of(ADDRESS)
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        (directory / "episodes").mkdir()
        (directory / "episodes" / "000001.jsonl").write_text("{}\n")
        (directory / f"episodes/000002.jsonl{PARTIAL}").write_text("{")
        (directory / "metrics.jsonl").write_text('{"step": 0}\n')
        (directory / "hf_files").mkdir()
        (directory / "hf_files" / "config.json").write_text("{}")
        copies = LogCopies(directory, bucket)
        copies.copy()
        gcs.requests.clear()
        copies.copy()
        assert not uploads(gcs)
        (directory / "metrics.jsonl").write_text('{"step": 1}\n')
        copies.copy()
        LogCopies(directory, bucket).copy()  # after a restart
        assert uploads(gcs) == 2 * ["bkt/runs/x/metrics.jsonl"]  # of all steps' episodes, none
        (bucket / "checkpoints/1/state.json").write(b"{}")
    assert gcs.names("bkt/runs/x/") == {"episodes/000001.jsonl", "metrics.jsonl", "checkpoints/1/state.json"}
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        assert (directory / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert (directory / "episodes" / "000001.jsonl").is_file() and not (directory / "checkpoints").exists()


@pytest.mark.parametrize(("metric", "kept"), [("kappa", False), ("reward", True)])
def test_a_disk_keeps_its_log_unless_another_machine_trained_the_newest_checkpoint(gcs, metric, kept):
    """The log in the bucket may have later steps, whose checkpoint was not committed."""

    def row(step, **metrics):
        return json.dumps({"step": step, "policy_version": 2.0 * step} | metrics) + "\n"

    bucket, own = Bucket.of(ADDRESS), row(1, reward=0.5) + row(2, reward=0.6)
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        (directory / "metrics.jsonl").write_text(own)
    (bucket / "metrics.jsonl").write((row(1, **{metric: 0.5}) + row(2, reward=0.7) + row(3)).encode())
    for name in ("1", "2", "4.damaged"):
        (bucket / f"checkpoints/{name}/state.json").write(b"{}")
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        assert ((directory / "metrics.jsonl").read_text() == own) == kept


def test_other_hosts_download_what_they_read_and_no_host_the_parts_of_a_killed_run(gcs):
    bucket = Bucket.of(ADDRESS)
    for name in ("metrics.jsonl", "config.json", "episodes/000001.jsonl", "episodes/.000002.host1.part"):
        (bucket / name).write(b'{"step": 1, "config": {}}\n')
    (bucket / "checkpoints/1/state.json").write(b"{}")
    for host, episodes in ((0, ["000001.jsonl"]), (1, [])):
        with locked_for_bucket(bucket, Hosts(host)) as (directory, _):
            assert {"metrics.jsonl", "config.json"} <= {path.name for path in directory.iterdir()}
            assert [path.name for path in directory.glob("episodes/*")] == episodes


def test_the_directory_of_a_model_is_not_used(gcs):
    (Bucket.of(ADDRESS) / "config.json").write(b'{"model_type": "qwen3_vl"}')
    for hosts in (ALONE, Hosts(1)):
        with pytest.raises(
            ValueError, match=rf"^run_dir={ADDRESS} has a config.json that is not a run's, perhaps a mo"
        ):
            locked_for_bucket(Bucket.of(ADDRESS), hosts).__enter__()
    assert [*gcs.objects] == [f"{ADDRESS.removeprefix('gs://')}/config.json"]


def test_a_local_directory_with_other_files_is_not_used(gcs, tmp_path):
    for hosts, name in ((ALONE, "x"), (Hosts(1), "x.host1")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("{}")
        message = rf"runs/{name} would hold the local files of gs://bkt/runs/x, but has other files, such as metrics"
        with pytest.raises(ValueError, match=message):
            locked_for_bucket(Bucket.of(ADDRESS), hosts).__enter__()
    with locked_for_bucket(Bucket.of("gs://bkt/runs/y"), ALONE):
        pass
    with pytest.raises(ValueError, match="has the local files of gs://bkt/runs/y, not of gs://other/y"):
        locked_for_bucket(Bucket.of("gs://other/y"), ALONE).__enter__()


@pytest.mark.slow
def test_an_adapter_restores_bit_for_bit(gcs, tiny_hf):
    subject, info = adapted(tiny_hf, seed=0)
    checkpoints = open_checkpoints(tiny_hf, adapter=info)
    expected = bits(subject)
    checkpoints.save(subject, {"step": 0})
    checkpoints.wait()
    subject.state = replace(subject.state, trainable=jax.tree.map(lambda leaf: leaf + 1, subject.state.trainable))
    assert bits(subject) != expected
    assert checkpoints.restore(subject) == {"step": 0} and bits(subject) == expected
    checkpoints.close()
