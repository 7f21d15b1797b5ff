"""Several hosts write one checkpoint, each its own part, and any number of hosts on any mesh read it."""

import os
import shutil
import signal

import hosts as several
import jax
import numpy as np
import pytest
from fake_gcs import fake_gcs

import model_port
from model_port.bucket import Bucket
from model_port.export import export
from model_port.sharding import make_mesh
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.run import checkpoint, checkpoint_read
from paravt_jax.run.bucket_checkpoint import BucketCheckpoints
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_read import verify
from paravt_jax.run.directory import locked_for_bucket
from paravt_jax.run.hosts import ALONE

pytestmark = pytest.mark.slow


def learner_on(tiny_hf, axes) -> Learner:
    mesh = make_mesh(**axes)
    model = model_port.load(tiny_hf, mesh=mesh)
    return Learner(model, OptimConfig(), LossConfig(kl_coef=0.0), temperature=1.0, mesh=mesh)


def drawn(learner, step):
    """A state of random bits, none of them NaN, the same on whatever mesh."""
    leaves, tree = jax.tree.flatten(learner.state)

    def draw(number, leaf):
        if leaf.ndim == 0:
            return jax.numpy.array(step, leaf.dtype)
        bits = np.random.default_rng([step, number]).integers(0, 2**30, leaf.shape, np.uint32).view(np.float32)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: bits[index])

    return jax.tree.unflatten(tree, [draw(number, leaf) for number, leaf in enumerate(leaves)])


def check_drawn(learner, step):
    """The state is that of the step, as far as this host has it."""
    for found, expected in zip(
        *(jax.tree.leaves(state) for state in (learner.state, drawn(learner, step))), strict=True
    ):
        # A number lies on one device or on all of them.
        for one, other in zip(found.addressable_shards, expected.addressable_shards, strict=found.ndim > 0):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()


def open_on(hosts, directory, tiny_hf, said):
    return Checkpoints(directory, tiny_hf, CheckpointConfig(keep=2), said.append, hosts=hosts)


def save(hosts, directory, tiny_hf, axes, steps, victim=None):
    learner, said = learner_on(tiny_hf, axes), []
    checkpoints = open_on(hosts, directory, tiny_hf, said)
    for step in steps:
        learner.state = drawn(learner, step)
        if step == steps[-1] and hosts.index == victim:
            checkpoint.write_shards = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(learner, {"step": step})
    checkpoints.wait()
    checkpoints.close()
    assert not said, said


def restore(hosts, directory, tiny_hf, axes, step, broken=()):
    learner, said = learner_on(tiny_hf, axes), []
    checkpoints = open_on(hosts, directory, tiny_hf, said)
    assert checkpoints.restore(learner) == {"step": step}
    check_drawn(learner, step)
    assert len(said) == len(broken), said
    checkpoints.close()


ONE, TWO = {"fsdp": 4}, {"data": 2, "fsdp": 1, "tensor": 2}


def failing(hosts, directory, tiny_hf):
    """The disk of host 1 is full."""
    learner, said = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
    checkpoints = open_on(hosts, directory, tiny_hf, said)

    def full(*_):
        raise OSError(28, "No space left on device")

    if hosts.index == 1:
        checkpoint.write_shards = full
    learner.state = drawn(learner, 1)
    checkpoints.save(learner, {"step": 1})
    checkpoints.wait()
    checkpoints.close()
    (message,) = said
    assert "The checkpoint of step 1 could not be written (host 1: [Errno 28] No space left on device)" in message
    if hosts.leads:
        assert not list(directory.iterdir())


def hold_shares(hosts, directory, tiny_hf):
    """What is handed to the writer, and what is read of it again, is what the devices of the host have."""
    learner, said = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
    checkpoints = open_on(hosts, directory, tiny_hf, said)
    write, read, handed, heard = checkpoint.write_shards, checkpoint_read.read_summed, [], []

    def watched_write(folder, shards):
        handed.extend(one.values.nbytes for parts in shards.values() for one in parts)
        return write(folder, shards)

    def watched_read(path, parts, summed=True):
        if checkpoint_read.BLOCK.search(str(path)):
            heard.append(path.stat().st_size)
        return read(path, parts, summed)

    checkpoint.write_shards, checkpoint_read.read_summed = watched_write, watched_read
    arrays = [leaf for leaf in jax.tree.leaves(learner.state) if leaf.ndim]
    on_host = [{str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards} for leaf in arrays]
    share, whole = sum(sum(one.values()) for one in on_host), sum(leaf.nbytes for leaf in arrays)
    checkpoints.save(learner, {"step": 0})
    checkpoints.wait()
    assert sum(hosts.gather("handed", sum(handed))) == whole  # each byte by one host
    heard.clear()  # what was written is summed
    assert checkpoints.restore(learner) == {"step": 0}
    checkpoints.close()
    assert sum(handed) <= share < 0.6 * whole and sum(heard) == share
    checkpoint.write_shards, checkpoint_read.read_summed = write, read


def _all(hosts, folder, tiny_hf):
    save(hosts, folder / "of two", tiny_hf, {"fsdp": 2, "tensor": 2}, (1, 2))
    restore(hosts, folder / "of one", tiny_hf, TWO, 1, ("2",))
    hold_shares(hosts, folder / "shares", tiny_hf)
    failing(hosts, folder / "nowhere", tiny_hf)


@pytest.fixture(scope="module")
def shared(tiny_hf, tmp_path_factory):
    """What two hosts with two devices each did one after another: to start them takes longer.

    They wrote checkpoints 1 and 2, read of those that one host wrote, the second of which is damaged, and could not
    write for want of a disk.
    """
    folder = tmp_path_factory.mktemp("shared")
    save(ALONE, folder / "of one", tiny_hf, ONE, (1, 2))
    file = max((folder / "of one" / "2" / "params" / "text.layers.mlp.up_kernel_fd").glob("[0-9]*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    several.run_work(folder / "said", _all, 2, folder, tiny_hf, devices=2)
    return folder


def test_a_host_hands_its_share_to_the_writer_and_reads_its_share(shared):
    assert list(verify(shared / "shares")) == [(shared / "shares" / "0", "")]


@pytest.fixture
def of_two(shared):
    return shared / "of two"


def test_what_two_hosts_wrote_is_whole_and_one_host_reads_it_on_another_mesh(of_two, tiny_hf, tmp_path):
    assert list(verify(of_two)) == [(of_two / "1", ""), (of_two / "2", "")]
    restore(ALONE, of_two, tiny_hf, ONE, 2)
    export(of_two / "2", tmp_path / "hf")
    expected = learner_on(tiny_hf, ONE)
    expected.state = drawn(expected, 2)
    for model in (model_port.load(of_two / "2"), model_port.load(tmp_path / "hf")):
        bits, wanted = (np.asarray(one.text.layers.mlp.up.kernel_fd[...]) for one in (model, expected.model))
        assert bits.tobytes() == wanted.tobytes()


def test_what_one_host_wrote_two_read_and_damage_that_one_of_them_sees_sets_it_aside_for_both(shared):
    assert sorted(entry.name for entry in (shared / "of one").iterdir()) == ["1", "2.broken"]


def test_what_one_host_cannot_write_is_said_by_all_and_training_goes_on(shared):
    assert not list((shared / "nowhere").iterdir())


def test_a_host_lost_while_writing_leaves_the_checkpoint_before_it(of_two, tiny_hf, tmp_path):
    run = shutil.copytree(of_two, tmp_path / "checkpoints")
    started = several.start_work(tmp_path / "said", save, 2, run, tiny_hf, {"fsdp": 2}, (3,), 1, devices=1)
    first, second = started.ended(120)
    assert second.code == -signal.SIGKILL and first.code not in (0, None)
    assert any(entry.name.startswith(".3.") for entry in run.iterdir())
    restore(ALONE, run, tiny_hf, ONE, 2)
    assert sorted(entry.name for entry in run.iterdir()) == ["1", "2"]


ADDRESS = "gs://bkt/runs/x"


def open_bucket_on(hosts, tiny_hf, said):
    place = Bucket.of(ADDRESS) / "checkpoints"
    return BucketCheckpoints(
        place, tiny_hf, CheckpointConfig(keep=2), said.append, None, hosts, before_commit=lambda: None
    )


def through_a_bucket(hosts, url, folder, tiny_hf):
    """Each host has a disk of its own."""
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = url
    disk = folder / f"disk{hosts.index}"
    disk.mkdir()
    os.chdir(disk)
    with locked_for_bucket(Bucket.of(ADDRESS), hosts) as (_, lease):
        assert (lease is not None) == hosts.leads
        learner, said = learner_on(tiny_hf, {"fsdp": 2, "tensor": 2}), []
        checkpoints = open_bucket_on(hosts, tiny_hf, said)
        for step in (1, 2):
            learner.state = drawn(learner, step)
            checkpoints.save(learner, {"step": step})
        checkpoints.wait()
        checkpoints.close()
        other = learner_on(tiny_hf, TWO)
        checkpoints = open_bucket_on(hosts, tiny_hf, said)
        assert checkpoints.restore(other) == {"step": 2} and not said
        check_drawn(other, 2)
        checkpoints.close()


def test_two_hosts_without_a_shared_disk_write_their_shards_to_a_bucket(tmp_path, tiny_hf, monkeypatch):
    with fake_gcs(monkeypatch, tmp_path / "cache") as gcs:
        several.run_work(tmp_path / "said", through_a_bucket, 2, gcs.url, tmp_path, tiny_hf, devices=2)
        assert {path.name for path in (tmp_path / "disk1" / "runs").iterdir()} == {"x.host1"}
        learner, said = learner_on(tiny_hf, ONE), []
        checkpoints = open_bucket_on(ALONE, tiny_hf, said)
        assert checkpoints.restore(learner) == {"step": 2} and not said
        check_drawn(learner, 2)
        checkpoints.close()
