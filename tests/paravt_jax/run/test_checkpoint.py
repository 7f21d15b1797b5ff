"""Checkpoints have every bit of the state and are written atomically; full disks and lost files do not end a run."""

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from learner_state import adapted, bits, flip, make_learner, set_state

import model_port
from model_port.adapters import AdapterBase, AdapterInfo
from model_port.checkpoint import flattened
from model_port.config import LoraConfig
from model_port.export import export
from model_port.sharding import flat_params, make_mesh
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import BatchShape, Dialogue, pack
from paravt_jax.learner.variants import StepCounts
from paravt_jax.run import checkpoint, checkpoint_files
from paravt_jax.run.checkpoint import Checkpoints, main
from paravt_jax.run.checkpoint_files import record_sum, verify

PROGRESS = {"cursor": {"epoch": 1, "position": 17}, "seen": [0.1, 1e-300], "name": "a run"}


@pytest.fixture(scope="module")
def subject(tiny_hf):
    """A learner shared by all tests that only save and restore states."""
    return make_learner(tiny_hf)


def at_step(learner: Learner, step: int) -> Learner:
    return set_state(learner, step, finite=False)


@contextmanager
def open_checkpoints(directory, tiny_hf, keep=3, messages=None, adapter=None):
    checkpoints = Checkpoints(
        directory, tiny_hf, CheckpointConfig(keep=keep), [].append if messages is None else messages.append, adapter
    )
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tiny_hf, subject, tmp_path_factory):
    """A directory with checkpoints 1 and 2, and the bits of each."""
    directory, expected = tmp_path_factory.mktemp("run") / "checkpoints", {}
    with open_checkpoints(directory, tiny_hf) as checkpoints:
        for step in (1, 2):
            expected[step] = bits(at_step(subject, step))
            checkpoints.save(subject, {"step": step})
    return directory, expected


def make_batches(tiny_hf, num_rows=8):
    dialogues = []
    for number in range(num_rows):
        ids = np.random.default_rng(number).integers(5, 900, 32)
        mask = np.arange(32) >= 20
        advantage = np.full(32, number - 2.5, np.float32)
        logp = np.full(32, -6.0, np.float32)
        dialogues.append(Dialogue(ids, (), 0, 0, mask, logp, advantage, np.zeros(32, np.int32), number))
    shape = BatchShape(num_rows=num_rows, row_tokens=32, row_patches=16)
    return pack(dialogues, {}, model_port.load(tiny_hf).config, shape)


def update(learner, packed) -> dict[str, float]:
    return learner.update([StepPart(packed, StepCounts(96.0, 8.0, 96.0))], 8)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [pytest.param(None, marks=pytest.mark.nightly), {"data": 2, "fsdp": 2, "tensor": 2}])
def test_training_resumes_bit_for_bit(axes, tiny_hf, tmp_path):
    mesh = None if axes is None else make_mesh(**axes)
    packed, first = make_batches(tiny_hf), make_learner(tiny_hf, mesh)
    update(first, packed)
    with open_checkpoints(tmp_path, tiny_hf) as checkpoints:
        saved = bits(first)
        checkpoints.save(first, PROGRESS)
        metrics = [update(first, packed) for _ in range(2)]  # while it is being written
        checkpoints.wait()
        after = make_learner(tiny_hf, mesh)
        assert checkpoints.restore(after) == PROGRESS
    assert bits(after) == saved
    assert [update(after, packed) for _ in range(2)] == metrics
    assert bits(after) == bits(first)


@pytest.mark.slow
def test_adapters_resume_bit_for_bit_without_storing_their_base(tiny_hf, tmp_path):
    packed, (first, info), (after, _) = make_batches(tiny_hf), adapted(tiny_hf, seed=0), adapted(tiny_hf, seed=1)
    update(first, packed)
    with open_checkpoints(tmp_path, tiny_hf, adapter=info) as checkpoints:
        saved = bits(first)
        checkpoints.save(first, PROGRESS)
        metrics = update(first, packed)  # while it is being written
        checkpoints.wait()
        assert checkpoints.restore(after) == PROGRESS
    assert bits(after) == saved != bits(first)
    ids, source = np.arange(5, 50), tmp_path / "1"
    loaded = model_port.load(source)
    assert np.array_equal(model_port.logits(loaded, ids), model_port.logits(after.model, ids))
    assert update(after, packed) == metrics and bits(after) == bits(first)
    assert list(verify(source)) == [(source, "")] and not (source / "params").exists()
    assert sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) < 2**20 < 4 * 10**6


def with_rope(info: AdapterInfo, theta: float) -> AdapterInfo:
    return replace(info, base=replace(info.base, files={"config.text.rope_theta": theta}))


OTHER_BASE = AdapterBase("other", "float32", "0" * 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: replace(info, base=OTHER_BASE), "was trained with other weights than .* has now"),
        (lambda info: replace(info, lora=LoraConfig(3, 7.0)), r"was saved with lora\.alpha=6, not 7"),
        (lambda info: with_rope(info, 7.0), r"were different: config\.text\.rope_theta is 7\.0, was 5\.0"),
    ],
)
def test_adapters_resume_only_with_the_same_base_alpha_and_rope(change, message, tiny_hf, tmp_path):
    learner, info = adapted(tiny_hf, seed=0)
    with open_checkpoints(tmp_path, tiny_hf, adapter=with_rope(info, 5.0)) as checkpoints:
        checkpoints.save(learner, PROGRESS)
    with open_checkpoints(tmp_path, tiny_hf, adapter=change(info)) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(learner)
        assert checkpoints.steps == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_on", "restored_on"),
    [
        (None, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": 4, "tensor": 2}, None),
        ({"fsdp": 8}, {"data": 4, "tensor": 2}),
    ],
)
def test_a_state_restores_onto_any_mesh(saved_on, restored_on, tiny_hf, tmp_path):
    meshes = [None if axes is None else make_mesh(**axes) for axes in (saved_on, restored_on)]
    saved, restored = (make_learner(tiny_hf, mesh) for mesh in meshes)
    expected = bits(at_step(saved, 5))
    old = jax.tree.leaves(restored.state)
    shardings = [(leaf.sharding, leaf.committed) for leaf in old]
    with open_checkpoints(tmp_path, tiny_hf) as checkpoints:
        checkpoints.save(saved, PROGRESS)
        assert checkpoints.restore(restored) == PROGRESS
    assert bits(restored) == expected and all(leaf.is_deleted() for leaf in old)
    assert [(leaf.sharding, leaf.committed) for leaf in jax.tree.leaves(restored.state)] == shardings


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(tiny_hf, subject, tmp_path, monkeypatch):
    left = []
    with open_checkpoints(tmp_path, tiny_hf, keep=2) as checkpoints:
        for step in (8, 9, 10, 11):
            with monkeypatch.context() as killed:
                if step == 11:  # while it removes the files of 9
                    killed.setattr(checkpoint, "delete", lambda *_, **__: left.extend(checkpoints.steps))
                checkpoints.save(at_step(subject, step), {})
                checkpoints.wait()
    assert left == [10, 11]
    assert {entry.name for entry in tmp_path.iterdir()} == {".9.removed", "10", "11"}
    with open_checkpoints(tmp_path, tiny_hf):  # the next start
        assert {entry.name for entry in tmp_path.iterdir()} == {"10", "11"}


def test_of_a_checkpoint_on_another_disk_only_the_link_is_removed(tiny_hf, subject, two_steps, tmp_path):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    (run / "1").symlink_to((run / "1").rename(tmp_path / "moved"))
    with open_checkpoints(run, tiny_hf, keep=2) as checkpoints:
        at_step(subject, 3)
        checkpoints.save(subject, {"step": 3})
        checkpoints.wait()
        assert checkpoints.steps == [2, 3]
    with open_checkpoints(run, tiny_hf):  # the next start
        assert sorted(path.name for path in run.iterdir()) == ["2", "3"]
    assert dict(verify(tmp_path / "moved")) == {tmp_path / "moved": ""}


def test_a_step_is_saved_once_with_its_progress_at_that_time(tiny_hf, subject, tmp_path):
    with open_checkpoints(tmp_path, tiny_hf, messages=(messages := [])) as checkpoints:
        assert checkpoints.restore(subject) is None
        progress = {"losses": [1.0]}
        checkpoints.save(at_step(subject, 4), progress)
        progress["losses"].append(2.0)
        checkpoints.save(subject, {"losses": []})
        assert checkpoints.restore(subject) == {"losses": [1.0]} and not messages
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(at_step(subject, 5), {"cursor": np.int64(3)})


@pytest.mark.slow
def test_checkpoints_load_with_model_port_export_and_orbax(tiny_hf, subject, tmp_path):
    directory, expected = tmp_path / "checkpoints" / "2", bits(set_state(subject, 2))
    with open_checkpoints(directory.parent, tiny_hf) as checkpoints:
        checkpoints.save(subject, {})
    weights = {path: np.asarray(leaf).tobytes() for path, leaf in flat_params(nnx.state(subject.model)).items()}
    moments = {bits for name, (shape, _, bits) in expected.items() if "opt_state" in name and shape}
    export(directory, tmp_path / "hf")
    for source in (directory, tmp_path / "hf"):
        params = flat_params(nnx.state(model_port.load(source)))
        assert {path: np.asarray(leaf).tobytes() for path, leaf in params.items()} == weights
    with ocp.StandardCheckpointer() as orbax:
        params, optimizer = [flattened(orbax.restore(directory / part / "params")) for part in (".", "optimizer")]
    assert {path: leaf.tobytes() for path, leaf in params.items()} == weights
    assert {leaf.tobytes() for leaf in optimizer.values()} == moments
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tiny_hf / "tokenizer.json").read_bytes()


FILES = (
    "state.json",
    "params/text.layers.mlp.up_kernel_fd/0.0.0",
    "params/_METADATA",
    "optimizer/params/opt_state.1.0.nu.text.embed.table_vd/.zarray",
    "hf/tokenizer.json",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), [*((name, "truncated") for name in FILES), *((name, "deleted") for name in FILES[:2])]
)
def test_a_damaged_checkpoint_is_set_aside_for_an_earlier_one(name, how, tiny_hf, subject, two_steps, tmp_path):
    run, messages = tmp_path / "checkpoints", []
    shutil.copytree(two_steps[0], run)
    (run / "2.broken" / "params").mkdir(parents=True)  # from earlier damage
    if how == "deleted":
        (run / "2" / name).unlink()
    else:
        os.truncate(run / "2" / name, (run / "2" / name).stat().st_size // 2)
    with open_checkpoints(run, tiny_hf, messages=messages) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
        assert bits(subject) == two_steps[1][1]
        assert checkpoints.steps == [1]
        (message,) = messages
        assert f"{run / '2'} is broken" in message and "kept as 2.broken; trying step 1 next" in message
        assert name in message
        checkpoints.save(at_step(subject, 2), {"again": True})
        assert checkpoints.restore(subject) == {"again": True}
    assert {entry.name for entry in run.iterdir()} == {"1", "2", "2.broken"}


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_is_detected(name, tiny_hf, tmp_path, two_steps, subject):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    flip(run / "2" / name)
    with open_checkpoints(run, tiny_hf, messages=(messages := [])) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
    assert bits(subject) == two_steps[1][1]
    assert f"{name} does not match its checksum" in messages[0]


@pytest.mark.parametrize("name", FILES)
def test_a_read_error_does_not_prove_damage(name, tiny_hf, tmp_path, two_steps, subject):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    (run / "2" / name).unlink()
    (run / "2" / name).symlink_to(name.rpartition("/")[2])  # a link to itself, so that opening it fails
    with open_checkpoints(run, tiny_hf) as checkpoints:
        with pytest.raises(OSError, match="symbolic links") as stopped:
            checkpoints.restore(subject)
        assert str(stopped.value.filename) == str(run / "2" / name)
        assert checkpoints.steps == [1, 2]


@pytest.mark.parametrize("record", ["{}", "[]", "{", "[" * 100_000, '{"scalars": {}, "shapes": {}, "files": {}}'])
def test_without_an_intact_checkpoint_an_error_lists_broken_ones_and_keeps_the_state(
    record, tiny_hf, tmp_path, two_steps, subject
):
    shutil.copytree(two_steps[0] / "2", tmp_path / "2")
    (tmp_path / "2" / "state.json").write_text(record)
    expected = bits(at_step(subject, 7))
    for _ in range(2):  # also if it is already set aside
        no_intact = pytest.raises(RuntimeError, match=r"no intact .*\(2\.broken\)")
        with open_checkpoints(tmp_path, tiny_hf) as checkpoints, no_intact:
            checkpoints.restore(subject)
    assert bits(subject) == expected


RECORDS = {
    "no sum": (lambda r: r.pop("sum"), "state.json lacks sum"),
    "another step": (lambda r: r["scalars"].update(step=7), "state.json is from step 7, not from step 2"),
    "a step of words": (lambda r: r["scalars"].update(step="2"), r"state.json: scalars\.step='2' must"),
    "a list of scalars": (lambda r: r.update(scalars=[]), r"state.json: scalars=\[\] must be an object"),
    "a shape of words": (
        lambda r: r["shapes"].update(step=["x"]),
        r"state.json: shapes\.step=\['x'\] must be a list of whole numbers",
    ),
    "no progress": (lambda r: r.update(progress=3), "state.json: progress=3 must be an object"),
    "a file outside": (lambda r: r["files"].update({"../x": [0, None]}), r"state.json: files\.\.\./x=\[0, None\] must"),
    "a size of words": (lambda r: r["files"].update(x=["1", "2"]), r"state.json: files\.x=\['1', '2'\] must be"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_changed_record_is_broken(kind, tiny_hf, tmp_path, two_steps, subject):
    change, problem = RECORDS[kind]
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    record = json.loads((run / "2" / "state.json").read_text())
    change(record)
    if record.pop("sum", None) is not None:  # it is right for the changed record
        record["sum"] = record_sum(record)
    (run / "2" / "state.json").write_text(json.dumps(record))
    assert re.search(problem, dict(verify(run))[run / "2"])
    with open_checkpoints(run, tiny_hf, messages=(messages := [])) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
    assert re.search(problem, messages[0])


class ShortReads(io.FileIO):
    """A file whose reads return less than was asked for, as on some network file systems."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:10_000])


def test_verify_reports_broken_checkpoints(two_steps, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    monkeypatch.setattr(checkpoint_files, "_open", ShortReads)
    assert dict(verify(run)) == {run / "1": "", run / "2": ""}
    flip(run / "1" / FILES[1])
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(tmp_path)])
    with pytest.raises(RuntimeError, match="1 of 2 checkpoints are broken"):
        main()
    output = capsys.readouterr().out
    assert f"{run / '1'}: broken, {FILES[1]} does not match" in output and "2: intact" in output
    assert dict(verify(run / "2")) == {run / "2": ""}
    (run / "1" / FILES[4]).unlink()
    assert f"truncated or missing, first {FILES[4]}" in dict(verify(run))[run / "1"]
    record = run / "2" / "state.json"
    record.write_text(record.read_text().replace('"progress": {"step": 2}', '"progress": {"step": 1}'))
    assert dict(verify(run / "2")) == {run / "2": "state.json does not match its checksum"}
    record.unlink()
    (run / "3").touch()
    assert [dict(verify(run))[run / step] for step in "23"] == ["state.json is missing"] * 2
    monkeypatch.setattr(sys, "argv", ["checkpoint", "verify", str(run / "2" / "params")])
    with pytest.raises(ValueError, match=r"params is neither a run with checkpoints nor one of them$"):
        main()


@contextmanager
def full_disk():
    """Limits files to a few blocks."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
def test_a_full_disk_is_reported_and_training_continues(tiny_hf, subject, tmp_path):
    with open_checkpoints(tmp_path, tiny_hf, messages=(messages := [])) as checkpoints:
        for step, latest in ((1, "would start over"), (3, "would resume from step 2")):
            with full_disk():
                checkpoints.save(at_step(subject, step), {})
                checkpoints.wait()
            assert messages[-1].startswith(f"The checkpoint of step {step} could not be written (")
            assert "File too large" in messages[-1]
            assert messages[-1].endswith(f"Training continues; a restart {latest}.")
            checkpoints.save(at_step(subject, 2), {"step": 2})
            checkpoints.wait()
        assert len(messages) == 2
        assert checkpoints.restore(subject) == {"step": 2}
        checkpoints.save(at_step(subject, 3), {"step": 3})  # the disk has room again
        assert checkpoints.restore(subject) == {"step": 3}
    assert {entry.name for entry in tmp_path.iterdir()} == {"2", "3"}


def test_the_next_save_or_the_end_reports_a_failure(tiny_hf, subject, tmp_path, monkeypatch):
    with open_checkpoints(tmp_path / "checkpoints", tiny_hf, messages=(messages := [])) as checkpoints:
        (tmp_path / "checkpoints" / ".1.partial").write_text("in the way")
        checkpoints.save(at_step(subject, 1), {})
        checkpoints.save(at_step(subject, 2), {})
        assert len(messages) == 1 and "step 1 could not be written" in messages[0] and "File exists" in messages[0]
        checkpoints.wait()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        checkpoints.save(at_step(subject, 3), {})
    assert re.search(r"step 3 could not be written \(.* has 1\.0 kB free, but \d+\.\d MB are needed", messages[1])
    with open_checkpoints(tmp_path / "checkpoints", tiny_hf) as checkpoints:
        assert checkpoints.steps == [2]
    assert {entry.name for entry in (tmp_path / "checkpoints").iterdir()} == {"2"}


@pytest.mark.slow
def test_another_model_or_optimizer_is_rejected_with_the_differences(tiny_hf, two_steps, tmp_path):
    config = tiny_config()
    make_tiny(tmp_path / "hf", config=replace(config, text=replace(config.text, ffn_width=192)))
    with open_checkpoints(two_steps[0], tiny_hf) as checkpoints:
        message = r"down_kernel_df is \(4, 128, 256\) in the checkpoint and \(4, 128, 192\) here"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(make_learner(tmp_path / "hf"))
        message = r"opt_state\.1\.0\.mu\.vision\S+ is missing in the checkpoint and \(4, 32\) here"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(make_learner(tiny_hf, train_vision=True))
        assert checkpoints.steps == [1, 2]


SAVE_FOREVER = """
import sys
from dataclasses import replace
from pathlib import Path
import jax
import model_port
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.settings import LossConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.settings import OptimConfig

tiny_hf, directory = map(Path, sys.argv[1:])
learner = Learner(model_port.load(tiny_hf), OptimConfig(), LossConfig(kl_coef=0.0), temperature=1.0)
checkpoints = Checkpoints(directory, tiny_hf, CheckpointConfig(keep=2), print)
step = 0
while True:
    step += 1
    learner.state = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, step), learner.state)
    checkpoints.save(learner, {"step": step})
    print(step, flush=True)
"""


def steps(run) -> list[int]:
    return [int(entry.name) for entry in run.iterdir() if entry.name.isdecimal()]


@pytest.mark.nightly
def test_a_kill_at_any_moment_leaves_only_complete_checkpoints(tiny_hf, subject, tmp_path):
    command = [sys.executable, "-c", SAVE_FOREVER, str(tiny_hf), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line == "3\n":  # two are on disk
                    break
            for moment in range(10):
                newest = max(steps(tmp_path / "run"))
                while moment % 2 and max(steps(tmp_path / "run")) == newest:
                    assert process.poll() is None
                time.sleep(0.0005 * moment if moment % 2 else 0.037)  # half of the kills come right after a rename
                process.send_signal(signal.SIGSTOP)  # the disk is now as after a SIGKILL
                os.waitpid(process.pid, os.WUNTRACED)
                shutil.copytree(tmp_path / "run", tmp_path / str(moment))
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
    moments = [tmp_path / "run", *(tmp_path / str(moment) for moment in range(10))]
    assert any(entry.name.startswith(".") for run in moments for entry in run.iterdir())  # while writing
    for run in moments:
        with open_checkpoints(run, tiny_hf, messages=(messages := [])) as checkpoints:
            assert all(entry.name.isdecimal() for entry in run.iterdir())
            step = checkpoints.steps[-1]
            assert checkpoints.restore(subject) == {"step": step} and not messages
            assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(subject.state))
            for older in checkpoints.steps[:-1]:
                assert dict(verify(run / str(older))) == {run / str(older): ""}
