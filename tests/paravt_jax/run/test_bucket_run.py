"""A run in a bucket: checkpoints there, bit for bit and whole or not there; its logs beside them; one run at a time."""

import json
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from fake_gcs import fake_gcs

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, new_adapter, sum_of_base
from model_port.bucket import UPLOADING, Bucket
from model_port.config import LoraConfig
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.run import lease as lease_module
from paravt_jax.run.bucket_checkpoint import BucketCheckpoints
from paravt_jax.run.checkpoint_read import verify
from paravt_jax.run.directory import LogCopies, locked_for_bucket
from paravt_jax.run.hosts import ALONE
from paravt_jax.run.lease import OWNER

ADDRESS = "gs://bkt/runs/x"
CHECKPOINTS = "bkt/runs/x/checkpoints/"


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("RENEW_S", 0.1), ("LEASE_S", 0.6), ("LOOK_S", 0.05)):
        monkeypatch.setattr(lease_module, name, seconds)
    with fake_gcs(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def subject(tiny_hf):
    return Learner(model_port.load(tiny_hf), OptimConfig(), LossConfig(kl_coef=0.0), temperature=1.0)


def at_step(learner, step):
    def draw(leaf):
        if leaf.ndim == 0:
            return jax.numpy.array(step, leaf.dtype)
        bits = np.random.default_rng([step, leaf.size]).integers(0, 2**30, leaf.shape, np.uint32)
        return jax.device_put(bits.view(np.float32), leaf.sharding)

    learner.state = jax.tree.map(draw, learner.state)
    return learner


def bits(learner):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(learner.state)]


def opened(tiny_hf, said=None, before_commit=lambda: None, keep=2, adapter=None):
    said = [] if said is None else said
    place = Bucket.of(ADDRESS) / "checkpoints"
    return BucketCheckpoints(
        place, tiny_hf, CheckpointConfig(keep=keep), said.append, adapter, ALONE, before_commit=before_commit
    )


def saved(tiny_hf, subject, *steps, **options):
    """The bits of each step."""
    checkpoints, expected = opened(tiny_hf, **options), {}
    for step in steps:
        expected[step] = bits(at_step(subject, step))
        checkpoints.save(subject, {"step": step})
    checkpoints.close()
    return expected


def restored(tiny_hf, subject, said=None):
    checkpoints = opened(tiny_hf, said)
    try:
        return checkpoints.restore(at_step(subject, 99))
    finally:
        checkpoints.close()


def test_a_checkpoint_comes_back_bit_for_bit_and_is_one_that_loads_and_verifies(gcs, tiny_hf, subject):
    expected = saved(tiny_hf, subject, 1, 2, 3)
    assert restored(tiny_hf, subject) == {"step": 3} and bits(subject) == expected[3]
    assert {name.split("/")[0] for name in gcs.names(CHECKPOINTS)} == {"2", "3"}  # the newest two are kept
    assert not [name for name in gcs.objects if name.endswith(UPLOADING)]
    assert [problem for _, problem in verify(Bucket.of(ADDRESS) / "checkpoints")] == ["", ""]
    loaded = model_port.load(f"{ADDRESS}/checkpoints/3")
    assert loaded.config == subject.model.config


@pytest.mark.parametrize("where", ["blocks", "record", "commit"])
def test_half_a_checkpoint_is_never_believed_and_is_cleared(where, gcs, tiny_hf, subject):
    expected = saved(tiny_hf, subject, 1)
    said = []
    wanted = {"blocks": "2/params/", "record": "2/state.json", "commit": "nothing"}[where]

    def fail():
        if where == "commit":
            raise ValueError("refused")

    gcs.trouble = lambda method, name: 403 if method == "POST" and f"{CHECKPOINTS}{wanted}" in name else None
    saved(tiny_hf, subject, 2, said=said, before_commit=fail)
    assert len(said) == 1 and "The checkpoint of step 2 could not be written" in said[0] and "step 1" in said[0]
    gcs.trouble = lambda method, name: None
    assert [name for name in gcs.names(CHECKPOINTS) if name.startswith("2/")]
    with pytest.raises(ValueError, match="is incomplete"):
        model_port.load(f"{ADDRESS}/checkpoints/2")
    assert restored(tiny_hf, subject) == {"step": 1} and bits(subject) == expected[1]
    assert not [name for name in gcs.names(CHECKPOINTS) if name.startswith("2/")]


@pytest.mark.parametrize("trouble", [503, "stall", "lost"])
def test_passing_trouble_costs_no_checkpoint(trouble, gcs, tiny_hf, subject):
    left = {"n": 5}
    lock = threading.Lock()

    def some(method, name):
        with lock:
            if method == "POST" and left["n"]:
                left["n"] -= 1
                return trouble
        return None

    gcs.trouble, said = some, []
    expected = saved(tiny_hf, subject, 1, said=said)
    assert not said and restored(tiny_hf, subject) == {"step": 1} and bits(subject) == expected[1]


@pytest.mark.parametrize("damage", ["bits", "cut", "gone"])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(damage, gcs, tiny_hf, subject):
    expected, said = saved(tiny_hf, subject, 1, 2), []
    name = next(
        name for name in sorted(gcs.objects) if name.startswith(f"{CHECKPOINTS}2/optimizer/") and name[-1] == "0"
    )
    generation, content = gcs.objects[name]
    if damage == "gone":
        del gcs.objects[name]
    else:
        gcs.objects[name] = generation, content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])
    assert restored(tiny_hf, subject, said) == {"step": 1} and bits(subject) == expected[1]
    assert "checkpoints/2 is broken" in said[0] and "step 1 is tried next" in said[0]
    assert f"{CHECKPOINTS}2/broken.json" in gcs.objects and opened(tiny_hf).steps == [1]


def test_a_bucket_that_does_not_answer_is_no_proof_against_a_checkpoint(gcs, tiny_hf, subject):
    saved(tiny_hf, subject, 1)
    before = dict(gcs.objects)
    gcs.trouble = lambda method, name: 403 if method == "GET" and "/params/" in name else None
    with pytest.raises(RuntimeError, match="could not be read"):
        restored(tiny_hf, subject)
    assert gcs.objects == before


def test_a_second_record_of_a_step_is_refused(gcs, tiny_hf, subject):
    def another_was_faster():
        Bucket.of(f"{ADDRESS}/checkpoints/1/state.json").write(b"{}")

    said = []
    saved(tiny_hf, subject, 1, said=said, before_commit=another_was_faster)
    assert "was written by another process at the same time" in said[0]


def test_two_runs_in_one_directory_are_refused_and_a_dead_one_is_taken_over(gcs, tmp_path, monkeypatch, capsys):
    bucket = Bucket.of(ADDRESS)
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        assert directory == tmp_path / "runs" / "x"
        assert f"are in {ADDRESS}" in capsys.readouterr().err
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(RuntimeError, match=rf"process \d+ on .* trains in {ADDRESS}; wait for it"):
            locked_for_bucket(bucket, ALONE).__enter__()
    assert f"bkt/runs/x/{OWNER}" not in gcs.objects
    gcs.objects[f"bkt/runs/x/{OWNER}"] = (77, b'{"token": "of a machine that is gone", "who": "process 1 on tpu-0"}')
    with locked_for_bucket(bucket, ALONE):
        assert "was last held by process 1 on tpu-0" in capsys.readouterr().err


def test_a_run_that_was_taken_over_ends_and_writes_no_checkpoint(gcs):
    with locked_for_bucket(Bucket.of(ADDRESS), ALONE) as (_, lease):
        lease.renew()
        gcs.objects[f"bkt/runs/x/{OWNER}"] = (10**6, b'{"token": "other", "who": "process 9 on tpu-9"}')
        with pytest.raises(RuntimeError, match="was taken over by process 9 on tpu-9"):
            lease.renew()
    assert json.loads(gcs.objects[f"bkt/runs/x/{OWNER}"][1])["token"] == "other"


def test_logs_are_copied_and_come_back_on_a_fresh_disk(gcs, tmp_path, monkeypatch):
    bucket = Bucket.of(ADDRESS)
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        (directory / "episodes").mkdir()
        (directory / "episodes" / "000001.jsonl").write_text("{}\n")
        (directory / "metrics.jsonl").write_text('{"step": 1}\n')
        (directory / "hf_files").mkdir()
        (directory / "hf_files" / "config.json").write_text("{}")
        copies = LogCopies(directory, bucket)
        copies.copy()
        gcs.requests.clear()
        copies.copy()
        assert not [name for method, name in gcs.requests if method == "POST" and OWNER not in name]
        (bucket / "checkpoints/1/state.json").write(b"{}")
    assert gcs.names("bkt/runs/x/") == {"episodes/000001.jsonl", "metrics.jsonl", "checkpoints/1/state.json"}
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")
    with locked_for_bucket(bucket, ALONE) as (directory, _):
        assert (directory / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert (directory / "episodes" / "000001.jsonl").is_file() and not (directory / "checkpoints").exists()


def test_a_directory_of_another_run_here_is_not_used(gcs, tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "metrics.jsonl").write_text("{}")
    with pytest.raises(
        ValueError, match=r"runs/x is where gs://bkt/runs/x would be trained, and it holds metrics\.jsonl"
    ):
        locked_for_bucket(Bucket.of(ADDRESS), ALONE).__enter__()
    with locked_for_bucket(Bucket.of("gs://bkt/runs/y"), ALONE):
        pass
    with pytest.raises(ValueError, match="is where gs://bkt/runs/y is trained, not gs://other/y"):
        locked_for_bucket(Bucket.of("gs://other/y"), ALONE).__enter__()


def test_an_adapter_comes_back_bit_for_bit(gcs, tiny_hf):
    model, lora = model_port.load(tiny_hf), LoraConfig(rank=3, alpha=6.0)
    info = AdapterInfo(lora, AdapterBase(str(tiny_hf), "float32", sum_of_base(model, "float32")))
    add_adapter(model, lora, new_adapter(model.config, lora, 0))
    subject = Learner(model, OptimConfig(), LossConfig(kl_coef=0.0), temperature=1.0)
    checkpoints = opened(tiny_hf, adapter=info)
    before = bits(subject)
    checkpoints.save(subject, {"step": 0})
    checkpoints.wait()
    subject.state = replace(subject.state, trainable=jax.tree.map(lambda leaf: leaf + 1, subject.state.trainable))
    assert bits(subject) != before
    assert checkpoints.restore(subject) == {"step": 0} and bits(subject) == before
    checkpoints.close()
