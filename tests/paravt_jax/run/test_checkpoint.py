"""A checkpoint is every bit of the state, whole or not there, and neither a full disk nor a lost file ends a run."""

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
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, new_adapter, sum_of_base
from model_port.checkpoint import flattened
from model_port.config import LoraConfig
from model_port.export import export
from model_port.sharding import flat_params, make_mesh
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner, StepPart
from paravt_jax.learner.packing import Dialogue, PackShape, pack
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.learner.variants import StepCounts
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_layout import record_sum
from paravt_jax.run.checkpoint_read import verify

OPTIM = OptimConfig(learning_rate=1e-3)
PROGRESS = {"cursor": {"epoch": 1, "position": 17}, "seen": [0.1, 1e-300], "name": "a run"}


def learner(tiny_hf, mesh=None, **optim) -> Learner:
    model = model_port.load(tiny_hf, mesh=mesh)
    return Learner(model, replace(OPTIM, **optim), LossConfig(kl_coef=0.0), temperature=0.7, mesh=mesh)


@pytest.fixture(scope="module")
def subject(tiny_hf):
    """One learner for all tests that only move states."""
    return learner(tiny_hf)


def at_step(learner, step, seed=0, finite=False) -> Learner:
    """The learner with random bits for a state, NaNs of every kind among them."""
    random, largest = np.random.default_rng([seed, step]), 2**30 if finite else 2**32

    def draw(leaf):
        if leaf.ndim == 0:
            return jax.numpy.array(step, leaf.dtype)
        return jax.device_put(random.integers(0, largest, leaf.shape, np.uint32).view(np.float32), leaf.sharding)

    learner.state = replace(jax.tree.map(draw, learner.state), num_bad=jax.numpy.array(2))
    return learner


def bits(learner) -> dict[str, tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(learner.state)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()) for path, leaf in leaves}


@contextmanager
def opened(directory, tiny_hf, keep=3, said=None, adapter=None):
    checkpoints = Checkpoints(
        directory, tiny_hf, CheckpointConfig(keep=keep), [].append if said is None else said.append, adapter
    )
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tiny_hf, subject, tmp_path_factory):
    """A directory with checkpoints 1 and 2, and the bits of each."""
    directory, expected = tmp_path_factory.mktemp("run") / "checkpoints", {}
    with opened(directory, tiny_hf) as checkpoints:
        for step in (1, 2):
            expected[step] = bits(at_step(subject, step))
            checkpoints.save(subject, {"step": step})
    return directory, expected


def batches(tiny_hf, num_rows=8):
    found = []
    for number in range(num_rows):
        ids = np.random.default_rng(number).integers(5, 900, 32)
        mask = np.arange(32) >= 20
        advantage = np.full(32, number - 2.5, np.float32)
        logp = np.full(32, -6.0, np.float32)
        found.append(Dialogue(ids, (), 0, 0, mask, logp, advantage, np.zeros(32, np.int32), number))
    return pack(found, {}, model_port.load(tiny_hf).config, PackShape(num_rows=num_rows, row_tokens=32, row_patches=16))


def update(learner, packed) -> dict[str, float]:
    return learner.update([StepPart(packed, StepCounts(96.0, 8.0, 96.0))], 8)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [None, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_training_goes_on_bit_for_bit(axes, tiny_hf, tmp_path):
    mesh = None if axes is None else make_mesh(**axes)
    packed, before = batches(tiny_hf), learner(tiny_hf, mesh)
    update(before, packed)
    with opened(tmp_path, tiny_hf) as checkpoints:
        saved = bits(before)
        checkpoints.save(before, PROGRESS)
        metrics = [update(before, packed) for _ in range(2)]  # while it is being written
        checkpoints.wait()
        after = learner(tiny_hf, mesh)
        assert checkpoints.restore(after) == PROGRESS
    assert bits(after) == saved
    assert [update(after, packed) for _ in range(2)] == metrics
    assert bits(after) == bits(before)


def adapted(tiny_hf, seed) -> tuple[Learner, AdapterInfo]:
    model, lora = model_port.load(tiny_hf), LoraConfig(rank=3, alpha=6.0)
    info = AdapterInfo(lora, AdapterBase(str(tiny_hf), "float32", sum_of_base(model, "float32")))
    add_adapter(model, lora, new_adapter(model.config, lora, seed))
    return Learner(model, OPTIM, LossConfig(kl_coef=0.0), temperature=0.7), info


@pytest.mark.slow
def test_adapters_go_on_bit_for_bit_beside_a_base_that_is_not_stored(tiny_hf, tmp_path):
    packed, (before, info), (after, _) = batches(tiny_hf), adapted(tiny_hf, seed=0), adapted(tiny_hf, seed=1)
    update(before, packed)
    with opened(tmp_path, tiny_hf, adapter=info) as checkpoints:
        saved = bits(before)
        checkpoints.save(before, PROGRESS)
        metrics = update(before, packed)  # while it is being written
        checkpoints.wait()
        assert checkpoints.restore(after) == PROGRESS
    assert bits(after) == saved != bits(before)
    ids, source = np.arange(5, 50), tmp_path / "1"
    loaded = model_port.load(source)
    assert np.array_equal(model_port.logits(loaded, ids), model_port.logits(after.model, ids))
    assert update(after, packed) == metrics and bits(after) == bits(before)
    assert list(verify(source)) == [(source, "")] and not (source / "params").exists()
    assert sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) < 2**20 < 4 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(base=AdapterBase("other", "float32", "0" * 32)), "was trained with other weights than .* has now"),
        (dict(lora=LoraConfig(3, 7.0)), r"is of lora\.alpha=6, not 7"),
    ],
)
def test_adapters_do_not_go_on_as_something_else(changed, said, tiny_hf, tmp_path):
    ours, info = adapted(tiny_hf, seed=0)
    with opened(tmp_path, tiny_hf, adapter=info) as checkpoints:
        checkpoints.save(ours, PROGRESS)
    with opened(tmp_path, tiny_hf, adapter=replace(info, **changed)) as checkpoints:
        with pytest.raises(ValueError, match=said):
            checkpoints.restore(ours)
        assert checkpoints.steps == [0]


@pytest.mark.slow
def test_adapters_do_not_go_on_with_another_rope(tiny_hf, tmp_path):
    ours, info = adapted(tiny_hf, seed=0)
    was, now = (replace(info, base=replace(info.base, files={"config.text.rope_theta": x})) for x in (5.0, 7.0))
    with opened(tmp_path, tiny_hf, adapter=was) as checkpoints:
        checkpoints.save(ours, PROGRESS)
    with opened(tmp_path, tiny_hf, adapter=now) as checkpoints:
        with pytest.raises(ValueError, match=r"were different: config\.text\.rope_theta is 7\.0, was 5\.0"):
            checkpoints.restore(ours)
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
    one, other = (learner(tiny_hf, None if axes is None else make_mesh(**axes)) for axes in (saved_on, restored_on))
    expected = bits(at_step(one, 5))
    places = [(leaf.sharding, leaf.committed) for leaf in jax.tree.leaves(other.state)]
    with opened(tmp_path, tiny_hf) as checkpoints:
        checkpoints.save(one, PROGRESS)
        assert checkpoints.restore(other) == PROGRESS
    assert bits(other) == expected
    assert [(leaf.sharding, leaf.committed) for leaf in jax.tree.leaves(other.state)] == places


@pytest.mark.slow
def test_only_the_newest_are_kept(tiny_hf, subject, tmp_path):
    with opened(tmp_path, tiny_hf, keep=2) as checkpoints:
        for step in (8, 9, 10, 11):
            checkpoints.save(at_step(subject, step), {})
        checkpoints.wait()
        assert checkpoints.steps == [10, 11]
    assert {entry.name for entry in tmp_path.iterdir()} == {"10", "11"}


def test_a_step_is_saved_once_with_the_progress_of_that_moment(tiny_hf, subject, tmp_path):
    with opened(tmp_path, tiny_hf) as checkpoints:
        assert checkpoints.restore(subject) is None
        progress = {"losses": [1.0]}
        checkpoints.save(at_step(subject, 4), progress)
        progress["losses"].append(2.0)
        checkpoints.save(subject, {"losses": []})
        assert checkpoints.restore(subject) == {"losses": [1.0]}
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(at_step(subject, 5), {"cursor": np.int64(3)})


@pytest.mark.slow
def test_a_checkpoint_is_a_model_for_every_reader(tiny_hf, subject, tmp_path):
    directory, expected = tmp_path / "checkpoints" / "2", bits(at_step(subject, 2, finite=True))
    with opened(directory.parent, tiny_hf) as checkpoints:
        checkpoints.save(subject, {})
    weights = {path: np.asarray(leaf).tobytes() for path, leaf in flat_params(nnx.state(subject.model)).items()}
    moments = {bits for name, (shape, _, bits) in expected.items() if "opt_state" in name and shape}
    export(directory, tmp_path / "hf")
    for source in (directory, tmp_path / "hf"):
        found = flat_params(nnx.state(model_port.load(source)))
        assert {path: np.asarray(leaf).tobytes() for path, leaf in found.items()} == weights
    with ocp.StandardCheckpointer() as orbax:
        found = [flattened(orbax.restore(directory / part / "params")) for part in (".", "optimizer")]
    assert {path: leaf.tobytes() for path, leaf in found[0].items()} == weights
    assert {leaf.tobytes() for leaf in found[1].values()} == moments
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tiny_hf / "tokenizer.json").read_bytes()


FILES = (
    "state.json",
    "params/text.layers.mlp.up_kernel_fd/0.0.0",
    "params/_METADATA",
    "optimizer/params/opt_state.1.0.nu.text.embed.table_vd/.zarray",
    "hf/tokenizer.json",
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "deleted"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(name, how, tiny_hf, subject, two_steps, tmp_path):
    run, said = tmp_path / "checkpoints", []
    shutil.copytree(two_steps[0], run)
    if how == "deleted":
        (run / "2" / name).unlink()
    else:
        os.truncate(run / "2" / name, (run / "2" / name).stat().st_size // 2)
    with opened(run, tiny_hf, said=said) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
        assert bits(subject) == two_steps[1][1]
        assert checkpoints.steps == [1]
        (message,) = said
        assert f"{run / '2'} is broken" in message and "kept as 2.broken; step 1 is tried next" in message
        assert name in message
        checkpoints.save(at_step(subject, 2), {"again": True})
        assert checkpoints.restore(subject) == {"again": True}
    assert {entry.name for entry in run.iterdir()} == {"1", "2", "2.broken"}


def flip(path: Path) -> None:
    """One bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_is_damage_that_falls_back_too(name, tiny_hf, tmp_path, two_steps, subject):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    flip(run / "2" / name)
    with opened(run, tiny_hf, said=(said := [])) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
    assert bits(subject) == two_steps[1][1]
    assert f"{name} has other bytes than were written" in said[0]


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_read_at_the_moment_proves_nothing(name, tiny_hf, tmp_path, two_steps, subject):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    (run / "2" / name).unlink()
    (run / "2" / name).symlink_to(name.rpartition("/")[2])  # to itself: opening it is an error of the system
    with opened(run, tiny_hf) as checkpoints:
        with pytest.raises(OSError, match="symbolic links") as stopped:
            checkpoints.restore(subject)
        assert str(stopped.value.filename) == str(run / "2" / name)
        assert checkpoints.steps == [1, 2]


@pytest.mark.parametrize("record", ["{}", "[]", "{", "[" * 100_000, '{"scalars": {}, "shapes": {}, "files": {}}'])
def test_with_nothing_whole_an_error_says_what_to_do_and_the_state_stays(record, tiny_hf, tmp_path, two_steps, subject):
    shutil.copytree(two_steps[0] / "2", tmp_path / "2")
    (tmp_path / "2" / "state.json").write_text(record)
    before = bits(at_step(subject, 7))
    for _ in range(2):  # also when it was found out before
        with opened(tmp_path, tiny_hf) as checkpoints, pytest.raises(RuntimeError, match=r"no intact .*\(2\.broken\)"):
            checkpoints.restore(subject)
    assert bits(subject) == before


def test_a_checkpoint_from_before_there_were_checksums_is_read(tiny_hf, tmp_path, two_steps, subject):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    record = json.loads((run / "2" / "state.json").read_text())
    record["file_bytes"] = {name: size for name, (size, _) in record.pop("files").items()}
    del record["sum"]
    (run / "2" / "state.json").write_text(json.dumps(record))
    with opened(run, tiny_hf) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 2}
    assert bits(subject) == two_steps[1][2]


RECORDS = {
    "no sum": (lambda r: r.pop("sum"), "state.json has no sum"),
    "no sum and another step": (lambda r: (r.pop("sum"), r["scalars"].update(step=7)), "state.json has no sum"),
    "another step": (lambda r: (r["scalars"].update(step=7), sign(r)), "state.json is of step 7, not of step 2"),
    "a step that is none": (lambda r: (r["scalars"].update(step="2"), sign(r)), r"state.json: scalars\.step='2' must"),
    "a list of scalars": (lambda r: (r.update(scalars=[]), sign(r)), r"state.json: scalars=\[\] must be an object"),
    "a shape of words": (
        lambda r: (r["shapes"].update(step=["x"]), sign(r)),
        r"state.json: shapes\.step=\['x'\] must be a list of whole numbers",
    ),
    "no progress": (lambda r: (r.update(progress=3), sign(r)), "state.json: progress=3 must be an object"),
    "a file elsewhere": (
        lambda r: (r["files"].update({"../x": [0, None]}), sign(r)),
        r"state.json: files\.\.\./x=\[0, None\] must be",
    ),
    "a size of words": (
        lambda r: (r["files"].update(x=["1", "2"]), sign(r)),
        r"state.json: files\.x=\['1', '2'\] must be",
    ),
}


def sign(record) -> None:
    record.pop("sum")
    record["sum"] = record_sum(record)


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_says_something_else_is_broken(kind, tiny_hf, tmp_path, two_steps, subject):
    change, said = RECORDS[kind]
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    record = json.loads((run / "2" / "state.json").read_text())
    change(record)
    (run / "2" / "state.json").write_text(json.dumps(record))
    assert re.search(said, dict(verify(run))[run / "2"])
    with opened(run, tiny_hf, said=(told := [])) as checkpoints:
        assert checkpoints.restore(subject) == {"step": 1}
    assert re.search(said, told[0])


@pytest.mark.slow
def test_every_checkpoint_can_be_verified(two_steps, tmp_path):
    run = shutil.copytree(two_steps[0], tmp_path / "checkpoints")
    assert dict(verify(run)) == {run / "1": "", run / "2": ""}
    flip(run / "1" / FILES[1])
    command = [sys.executable, "-m", "paravt_jax.run.checkpoint", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "error: 1 of 2 checkpoints are broken"
    assert f"{run / '1'}: broken, {FILES[1]} has other bytes" in done.stdout and "2: as it was written" in done.stdout
    assert dict(verify(run / "2")) == {run / "2": ""}


@contextmanager
def full_disk():
    """No file may grow beyond a few blocks."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
def test_a_full_disk_is_said_and_training_goes_on(tiny_hf, subject, tmp_path):
    with opened(tmp_path, tiny_hf, said=(said := [])) as checkpoints:
        for step, latest in ((1, "would start over"), (3, "would resume from step 2")):
            with full_disk():
                checkpoints.save(at_step(subject, step), {})
                checkpoints.wait()
            assert said[-1].startswith(f"The checkpoint of step {step} could not be written (")
            assert "File too large" in said[-1] and said[-1].endswith(f"Training continues; a restart {latest}.")
            checkpoints.save(at_step(subject, 2), {"step": 2})
            checkpoints.wait()
        assert len(said) == 2
        assert checkpoints.restore(subject) == {"step": 2}
        checkpoints.save(at_step(subject, 3), {"step": 3})  # and there is room again
        assert checkpoints.restore(subject) == {"step": 3}
    assert {entry.name for entry in tmp_path.iterdir()} == {"2", "3"}


def test_a_failure_is_noticed_by_the_next_save(tiny_hf, subject, tmp_path):
    with opened(tmp_path / "checkpoints", tiny_hf, said=(said := [])) as checkpoints:
        (tmp_path / "checkpoints" / ".1.partial").write_text("in the way")
        checkpoints.save(at_step(subject, 1), {})
        checkpoints.save(at_step(subject, 2), {})
        assert len(said) == 1 and "step 1 could not be written" in said[0] and "File exists" in said[0]
    with opened(tmp_path / "checkpoints", tiny_hf) as checkpoints:
        assert checkpoints.steps == [2]
    assert {entry.name for entry in (tmp_path / "checkpoints").iterdir()} == {"2"}


def test_another_model_or_optimizer_is_an_error_that_says_what_differs(tiny_hf, two_steps, tmp_path):
    config = tiny_config()
    make_tiny(tmp_path / "hf", config=replace(config, text=replace(config.text, ffn_width=192)))
    with opened(two_steps[0], tiny_hf) as checkpoints:
        with pytest.raises(ValueError, match=r"down_kernel_df is \(4, 128, 256\) there and \(4, 128, 192\) here"):
            checkpoints.restore(learner(tmp_path / "hf"))
        with pytest.raises(ValueError, match=r"opt_state\.1\.0\.mu\.vision\S+ is missing there and \(4, 32\) here"):
            checkpoints.restore(learner(tiny_hf, train_vision=True))
        assert checkpoints.steps == [1, 2]


SAVE_ON_AND_ON = """
import sys
from dataclasses import replace
from pathlib import Path
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


@pytest.mark.slow
def test_killed_at_any_moment_a_run_has_only_whole_checkpoints(tiny_hf, subject, tmp_path):
    command = [sys.executable, "-c", SAVE_ON_AND_ON, str(tiny_hf), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line == "3\n":  # two are on disk, and it goes on
                    break
            for moment in range(10):
                newest = max(steps(tmp_path / "run"))
                while moment % 2 and max(steps(tmp_path / "run")) == newest:
                    assert process.poll() is None
                time.sleep(0.0005 * moment if moment % 2 else 0.037)  # half of them just after a rename
                process.send_signal(signal.SIGSTOP)  # what the disk has now is what a SIGKILL would leave
                os.waitpid(process.pid, os.WUNTRACED)
                shutil.copytree(tmp_path / "run", tmp_path / str(moment))
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
    moments = [tmp_path / "run", *(tmp_path / str(moment) for moment in range(10))]
    assert any(entry.name.startswith(".") for run in moments for entry in run.iterdir())  # in the midst of writing
    for run in moments:
        with opened(run, tiny_hf, said=(said := [])) as checkpoints:
            assert all(entry.name.isdecimal() for entry in run.iterdir())
            step = checkpoints.steps[-1]
            assert checkpoints.restore(subject) == {"step": step} and not said
            assert all((np.asarray(leaf) == step).all() for leaf in jax.tree.leaves(subject.state))
            for older in checkpoints.steps[:-1]:
                assert dict(verify(run / str(older))) == {run / str(older): ""}
