"""Several hosts write one checkpoint together, and any number of hosts on any mesh reads it."""

import os
import shutil
import signal

import hosts as several
import jax
import numpy as np
import pytest
from fake_gcs import fake_gcs
from learner_state import flip, make_learner, set_state

import model_port
from model_port.bucket import Bucket
from model_port.export import export
from model_port.sharding import make_mesh
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.run import checkpoint, checkpoint_files
from paravt_jax.run.bucket_checkpoint import BucketCheckpoints
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_files import verify
from paravt_jax.run.directory import locked_for_bucket
from paravt_jax.run.hosts import ALONE

pytestmark = pytest.mark.slow


def learner_on(tiny_hf, axes) -> Learner:
    return make_learner(tiny_hf, make_mesh(**axes))


def check_state(learner, step):
    """Compares this host's part of the state with the random state of the step."""
    restored = jax.tree.leaves(learner.state)
    for ours, expected in zip(restored, jax.tree.leaves(set_state(learner, step).state), strict=True):
        # A scalar is on one device or on all devices.
        for shard, other in zip(ours.addressable_shards, expected.addressable_shards, strict=ours.ndim > 0):
            assert np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes()


def open_on(hosts, directory, tiny_hf, messages):
    return Checkpoints(directory, tiny_hf, CheckpointConfig(keep=2), messages.append, hosts=hosts)


def save(hosts, directory, tiny_hf, axes, steps, victim=None):
    learner, messages = learner_on(tiny_hf, axes), []
    checkpoints = open_on(hosts, directory, tiny_hf, messages)
    for step in steps:
        set_state(learner, step)
        if step == steps[-1] and hosts.index == victim:
            checkpoint.write_shards = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(learner, {"step": step})
    checkpoints.wait()
    checkpoints.close()
    assert not messages, messages


def restore(hosts, directory, tiny_hf, axes, step, broken=()):
    learner, messages = learner_on(tiny_hf, axes), []
    checkpoints = open_on(hosts, directory, tiny_hf, messages)
    assert checkpoints.restore(learner) == {"step": step}
    check_state(learner, step)
    assert len(messages) == len(broken), messages
    checkpoints.close()


ONE, TWO = {"fsdp": 4}, {"data": 2, "fsdp": 1, "tensor": 2}


def failing(hosts, directory, tiny_hf):
    """Saves while host 1's disk is full."""
    learner, messages = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
    checkpoints = open_on(hosts, directory, tiny_hf, messages)

    def full(*_):
        raise OSError(28, "No space left on device")

    if hosts.index == 1:
        checkpoint.write_shards = full
    set_state(learner, 1)
    checkpoints.save(learner, {"step": 1})
    checkpoints.wait()
    checkpoints.close()
    (message,) = messages
    assert "The checkpoint of step 1 could not be written (host 1: [Errno 28] No space left on device)" in message
    if hosts.leads:
        assert not list(directory.iterdir())


def check_shares(hosts, directory, tiny_hf):
    """Checks that a host writes and reads only its devices' shards."""
    learner, messages = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
    checkpoints = open_on(hosts, directory, tiny_hf, messages)
    write, read, sync = checkpoint.write_shards, checkpoint_files.read_summed, checkpoint.sync_path
    written, num_read, files, synced = [], [], [], []

    def watched_write(folder, shards):
        written.extend(part.values.nbytes for parts in shards.values() for part in parts)
        files.extend(new := write(folder, shards))
        return new

    def watched_read(path, parts, summed=True):
        if checkpoint_files.BLOCK.search(str(path)):
            num_read.append(path.stat().st_size)
        return read(path, parts, summed)

    checkpoint.write_shards, checkpoint_files.read_summed = watched_write, watched_read
    checkpoint.sync_path = synced.append
    arrays = [leaf for leaf in jax.tree.leaves(learner.state) if leaf.ndim]
    on_host = [{str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards} for leaf in arrays]
    share, total = sum(sum(sizes.values()) for sizes in on_host), sum(leaf.nbytes for leaf in arrays)
    checkpoints.save(learner, {"step": 0})
    checkpoints.wait()
    assert sum(hosts.gather("written", sum(written))) == total  # each byte by one host
    num_read.clear()  # checksums of written files read them too
    assert checkpoints.restore(learner) == {"step": 0}
    checkpoints.close()
    assert sum(written) <= share < 0.6 * total and sum(num_read) == share
    assert synced == ([] if hosts.leads else files)  # host 0 syncs the whole directory
    checkpoint.write_shards, checkpoint_files.read_summed, checkpoint.sync_path = write, read, sync


def _all(hosts, folder, tiny_hf):
    save(hosts, folder / "of two", tiny_hf, {"fsdp": 2, "tensor": 2}, (1, 2))
    restore(hosts, folder / "of one", tiny_hf, {"fsdp": 2, "tensor": 2}, 1, ("2",))  # only host 1 reads the damage
    check_shares(hosts, folder / "shares", tiny_hf)
    failing(hosts, folder / "nowhere", tiny_hf)


@pytest.fixture(scope="module")
def shared(tiny_hf, tmp_path_factory):
    """Directories that two hosts with two devices each used in turn, because starting hosts takes longest.

    They wrote checkpoints 1 and 2, read one host's checkpoints of which the second is damaged, and failed to write on
    a full disk.
    """
    folder = tmp_path_factory.mktemp("shared")
    save(ALONE, folder / "of one", tiny_hf, ONE, (1, 2))
    flip(max((folder / "of one" / "2" / "params" / "text.layers.mlp.up_kernel_fd").glob("[0-9]*")))
    several.run_work(folder / "output", _all, 2, folder, tiny_hf, devices=2)
    return folder


def test_a_host_writes_and_reads_its_own_share(shared):
    assert list(verify(shared / "shares")) == [(shared / "shares" / "0", "")]


@pytest.fixture
def of_two(shared):
    return shared / "of two"


def test_one_host_reads_checkpoints_of_two_on_another_mesh(of_two, tiny_hf, tmp_path):
    assert list(verify(of_two)) == [(of_two / "1", ""), (of_two / "2", "")] and not list(of_two.rglob(".sums*"))
    restore(ALONE, of_two, tiny_hf, ONE, 2)
    export(of_two / "2", tmp_path / "hf")
    expected = set_state(learner_on(tiny_hf, ONE), 2)
    for model in (model_port.load(of_two / "2"), model_port.load(tmp_path / "hf")):
        kernel, right = (np.asarray(each.text.layers.mlp.up.kernel_fd[...]) for each in (model, expected.model))
        assert kernel.tobytes() == right.tobytes()


def test_damage_that_one_host_finds_sets_a_checkpoint_aside_on_all_hosts(shared):
    assert sorted(entry.name for entry in (shared / "of one").iterdir()) == ["1", "2.broken"]


def test_a_full_disk_of_one_host_leaves_no_checkpoint(shared):
    assert not list((shared / "nowhere").iterdir())


def test_a_host_killed_while_writing_leaves_the_earlier_checkpoint(of_two, tiny_hf, tmp_path):
    run = shutil.copytree(of_two, tmp_path / "checkpoints")
    started = several.start_work(tmp_path / "output", save, 2, run, tiny_hf, {"fsdp": 2}, (3,), 1, devices=1)
    first, second = started.wait(120)
    assert second.code == -signal.SIGKILL and first.code not in (0, None)
    assert any(entry.name.startswith(".3.") for entry in run.iterdir())
    restore(ALONE, run, tiny_hf, ONE, 2)
    assert sorted(entry.name for entry in run.iterdir()) == ["1", "2"]


ADDRESS = "gs://bkt/runs/x"


def open_bucket_on(hosts, tiny_hf, messages):
    config, before_commit = CheckpointConfig(keep=2), lambda: None
    args = Bucket.of(ADDRESS) / "checkpoints", tiny_hf, config, messages.append, None, hosts
    return BucketCheckpoints(*args, before_commit=before_commit)


def through_a_bucket(hosts, url, folder, tiny_hf):
    """Saves to and restores from a bucket, with a separate disk for each host."""
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = url
    disk = folder / f"disk{hosts.index}"
    disk.mkdir()
    os.chdir(disk)
    with locked_for_bucket(Bucket.of(ADDRESS), hosts) as (_, lease):
        assert (lease is not None) == hosts.leads
        learner, messages = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
        checkpoints = open_bucket_on(hosts, tiny_hf, messages)
        for step in (1, 2):
            set_state(learner, step)
            checkpoints.save(learner, {"step": step})
        checkpoints.wait()
        checkpoints.close()
        other = learner_on(tiny_hf, TWO)
        checkpoints = open_bucket_on(hosts, tiny_hf, messages)
        assert checkpoints.restore(other) == {"step": 2} and not messages
        check_state(other, 2)
        checkpoints.close()


def test_two_hosts_without_a_shared_disk_checkpoint_to_a_bucket(tmp_path, tiny_hf, monkeypatch):
    with fake_gcs(monkeypatch, tmp_path / "cache") as gcs:
        several.run_work(tmp_path / "output", through_a_bucket, 2, gcs.url, tmp_path, tiny_hf, devices=2)
        assert {path.name for path in (tmp_path / "disk1" / "runs").iterdir()} == {"x.host1"}
        learner, messages = learner_on(tiny_hf, ONE), []
        checkpoints = open_bucket_on(ALONE, tiny_hf, messages)
        assert checkpoints.restore(learner) == {"step": 2} and not messages
        check_state(learner, 2)
        checkpoints.close()
