"""RUN/checkpoints/N: the whole state of a learner after N updates, written in the background, whole or not there.

    N/params/, N/hf/      what `model_port.load` and `model_port.export` take
    N/optimizer/params/   every other array of the state, named by its path, in the same format
    N/state.json          scalars of the state, the trainer's progress, shapes of arrays, sizes of files; written last

Both `params` are what `orbax.checkpoint.StandardCheckpointer().restore` reads. They are written as raw blocks, from one
copy on the host: orbax would copy that once more. A hidden directory is renamed at the end. Before any array is read,
every file must be there and as long as it was, so what was cut off or lost is found before the learner is touched.
"""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from model_port.checkpoint import cast, write_params
from model_port.config import read_hf_config
from model_port.hf_files import read_side_files, write_side_files
from model_port.layout import HF_DIR, PARAMS_DIR
from model_port.output_dir import LOCK_FILE, output_directory
from model_port.progress import Meter
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.programs import TrainState

OPTIMIZER_DIR, RECORD_FILE = "optimizer", "state.json"


class BrokenCheckpoint(Exception):
    """It cannot be read, whatever model it is of."""


class Checkpoints:
    """The checkpoints of one run; one process at a time."""

    def __init__(self, directory: Path, hf_dir: Path, config: CheckpointConfig, say: Callable[[str], None]):
        """`hf_dir` has the files beside the weights that every checkpoint carries; they are read here, once."""
        self._directory, self._config, self._say = directory.absolute(), config, say
        read_hf_config(hf_dir)  # refused now, not when the first checkpoint is exported
        self._hf_files = read_side_files(hf_dir)
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in (".*.partial", ".*.removed"):  # of a process that was killed
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[str | None]] | None = None

    @property
    def steps(self) -> list[int]:
        """Those on disk, the oldest first."""
        return sorted(int(entry.name) for entry in self._directory.glob("*") if entry.name.isdecimal())

    @property
    def latest(self) -> Path | None:
        return self._directory / str(self.steps[-1]) if self.steps else None

    def save(self, learner: Learner, progress: dict[str, Any]) -> None:
        """Returns when the state is copied to the host; then the learner may go on."""
        self.wait()  # the host holds one copy of the state at a time
        step = int(learner.state.step)
        if step in self.steps:
            return
        # On CPU this is a view, and an update does not take back what has one.
        leaves = {name: np.asarray(leaf) for name, leaf in _named(learner.state).items()}
        record: dict[str, Any] = {
            "scalars": {name: leaf.item() for name, leaf in leaves.items() if not leaf.ndim},
            "shapes": {name: leaf.shape for name, leaf in leaves.items()},
            "progress": progress,
        }
        record = json.loads(json.dumps(record))  # as it is now: the trainer goes on with its own
        arrays = {name: leaf for name, leaf in leaves.items() if leaf.ndim}
        self._writing = step, self._pool.submit(self._write, step, arrays, record)

    def wait(self) -> None:
        """Until everything is on disk, or known not to get there."""
        if self._writing is None:
            return
        step, future = self._writing
        problem = future.result()
        self._writing = None
        if problem is not None:
            latest = f"would continue from step {self.steps[-1]}" if self.steps else "would begin anew"
            self._say(
                f"The checkpoint of step {step} could not be written ({problem}). Training goes on; a restart {latest}."
            )

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def restore(self, learner: Learner) -> dict[str, Any] | None:
        """Sets the learner's state from the newest whole checkpoint and returns its progress; None if there is none.

        The old state is given up array by array, so that devices never hold two. Broken checkpoints become N.broken.
        """
        self.wait()
        old = learner.state
        for step in reversed(self.steps):
            directory = self._directory / str(step)
            try:
                record = _read_record(directory)
                _check_same(directory, record, old)
                with Meter(f"loading {directory}"):
                    learner.state = _read_state(directory, record, old)
            except BrokenCheckpoint as problem:
                self._set_aside(directory, problem)
            else:
                return record["progress"]
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(old)):
            raise RuntimeError(
                f"{self._directory}: a checkpoint broke off while it was read, and there is none before it; start again"
            )
        return None

    def _set_aside(self, directory: Path, problem: BrokenCheckpoint) -> None:
        aside = directory.with_name(f"{directory.name}.broken")
        if aside.exists():
            _remove(aside)
        directory.rename(aside)
        latest = f"step {self.steps[-1]} is tried next" if self.steps else "there is none before it"
        self._say(f"The checkpoint {directory} is broken ({problem}). It is kept as {aside.name}; {latest}.")

    def _write(self, step: int, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> str | None:
        """Why it failed. Not an exception: its traceback would hold the arrays."""
        dst, num_bytes = self._directory / str(step), sum(array.nbytes for array in arrays.values())
        try:
            with output_directory(dst, needed_bytes=num_bytes) as partial:
                for folder in (".", OPTIMIZER_DIR):
                    part = {path: arrays[name] for name in arrays for home, path in [_home(name)] if home == folder}
                    (partial / folder).mkdir(exist_ok=True)
                    _write_arrays(partial / folder, part)
                write_side_files(self._hf_files, partial / HF_DIR)
                files = {**record, "file_bytes": _file_bytes(partial)}
                (partial / RECORD_FILE).write_text(json.dumps(files))
            for old in self.steps[: -self._config.keep]:
                _remove(self._directory / str(old))
        except Exception as problem:  # whatever it is, the run is worth more than one checkpoint
            known = isinstance(problem, OSError | ValueError)
            return f"{'' if known else f'{type(problem).__name__}: '}{problem}".partition("\n")[0]
        return None


def _named(state: TrainState) -> dict[str, Any]:
    """The leaves in their order: params.text.embed.table_vd, opt_state.1.0.mu.text.embed.table_vd, step, ..."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in leaves]
    named = {
        re.sub(r"^(trainable|frozen)\.", "params.", name): leaf for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    assert len(named) == len(leaves)
    return named


def _home(name: str) -> tuple[str, str]:
    """Folder in the checkpoint and path in its params/. Parameters go by the names that model_port knows."""
    return (".", name.removeprefix("params.")) if name.startswith("params.") else (OPTIMIZER_DIR, name)


def _write_arrays(directory: Path, arrays: dict[str, np.ndarray]) -> None:
    shapes = {path: array.shape for path, array in arrays.items()}
    widest = np.result_type(*{array.dtype for array in arrays.values()})  # holds every value of the others
    write_params(directory, shapes, widest, lambda path, index: arrays[path][index], lambda *_: 0, lambda _: None)


def _file_bytes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _read_record(directory: Path) -> dict[str, Any]:
    """What state.json says, if it is true of the files."""
    try:
        record = json.loads((directory / RECORD_FILE).read_bytes())
        expected = record["file_bytes"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise BrokenCheckpoint(f"{RECORD_FILE}: {problem}") from None
    actual = _file_bytes(directory)
    wrong = [
        f"{name} has {actual.get(name, 0)} of {size} bytes"
        for name, size in expected.items()
        if actual.get(name) != size
    ]
    if wrong:
        raise BrokenCheckpoint(f"{len(wrong)} of {len(expected)} files are cut or lost, first {wrong[0]}")
    return record


def _check_same(directory: Path, record: dict[str, Any], state: TrainState) -> None:
    there = {name: tuple(shape) for name, shape in record["shapes"].items()}
    here = {name: leaf.shape for name, leaf in _named(state).items()}
    differ = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differ:
        raise ValueError(
            f"{directory} is of another model or optimizer: {len(differ)} arrays differ: {'; '.join(differ[:5])}; "
            f"use the settings it was saved with, or another run_dir"
        )


def _read_state(directory: Path, record: dict[str, Any], old: TrainState) -> TrainState:
    def read(name: str, leaf: jax.Array) -> jax.Array:
        scalar = record["scalars"].get(name)
        stored = _read_array(directory, name) if scalar is None else np.array(scalar, leaf.dtype)
        leaf.delete()
        # What was on no device in particular stays so: it must suit the mesh that the others are on.
        return jax.device_put(cast(stored, np.dtype(leaf.dtype), name), leaf.sharding if leaf.committed else None)

    leaves = [read(name, leaf) for name, leaf in _named(old).items()]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _read_array(directory: Path, name: str) -> np.ndarray:
    folder, path = _home(name)
    kvstore = {"driver": "file", "path": f"{directory / folder / PARAMS_DIR / path}/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    try:
        return ts.open(spec, open=True, read=True).result().read().result()
    except (OSError, ValueError) as problem:
        raise BrokenCheckpoint(str(problem).partition("\n")[0]) from None


def _remove(directory: Path) -> None:
    """Out of the numbering first: a process killed half-way must not leave half a checkpoint."""
    hidden = directory.with_name(f".{directory.name}.removed")
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
