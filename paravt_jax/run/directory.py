"""Locks a run's directory for one process, and records its settings."""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_port.bucket import PARTIAL, Bucket, download, is_address, upload
from model_port.json_files import Section, flattened
from model_port.layout import RECORD_FILE, absolute_path
from model_port.output_dir import check_local
from paravt_jax.config import Config, EvalConfig, SftConfig
from paravt_jax.config.keys import section_of, types_of
from paravt_jax.run.episode_parts import SUFFIX
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.lease import Lease, hold_lease, token_of
from paravt_jax.run.log import (
    EPISODES_DIR,
    METRICS_FILE,
    PLOTS_DIR,
    SUPERSEDED_DIR,
    TENSORBOARD_DIR,
    VALIDATION_FILE,
    WANDB_ID_FILE,
    load_jsonl,
    rows_by_step,
    whole_file,
    write_json,
    write_rows,
)
from paravt_jax.run.process import say
from paravt_jax.run.stderr_log import LOG_FILE

VERSIONED = ("paravt_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy", "av")
TOKEN_FILE = ".hosts"  # checks that all hosts see the same directory
RUN_ID_FILE = ".run_id"
MAX_NAME_CHARS = 40  # limit for the directory name in a run's id
OWN_CODE = "own_code"  # key of RUN/config.json: checksums of the user's files
WEIGHTS = "weights"  # key of RUN/config.json: checksum of the weights in model.path
LOCK_FILE, SETTINGS_FILE, SETTINGS_LOG_FILE = ".lock", "config.json", "settings.jsonl"
KINDS = {"eval": "an evaluation", "sft": "an SFT run", "train": "an RL run"}  # by the config section that only it has
SECTIONS = {
    name
    for schema in (Config, SftConfig, EvalConfig)
    for name, kind in types_of(schema).items()
    if section_of(kind) is not None
}
MAX_COUNT = 2**63 - 1
BESIDE_BUCKET = "runs"  # folder in the working directory for local files of runs with checkpoints in a bucket
LOGGED = {
    *(METRICS_FILE, VALIDATION_FILE, EPISODES_DIR, SUPERSEDED_DIR, TENSORBOARD_DIR, WANDB_ID_FILE),
    *(SETTINGS_FILE, SETTINGS_LOG_FILE, PLOTS_DIR, RUN_ID_FILE, LOG_FILE),
}


def user_cache(name: str) -> Path:
    """The user's cache directory for values that can be recomputed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paravt_jax" / name


@contextmanager
def locked(run_dir: str | Path) -> Iterator[Path]:
    """Creates and locks a directory, because two trainers in it would corrupt each other's files."""
    check_local(run_dir)
    directory = absolute_path(run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR)
    except OSError as problem:
        raise ValueError(
            f"run_dir={run_dir} cannot be written ({problem.filename}: {problem.strerror}); choose another run_dir"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise RuntimeError(f"another process uses {directory}; wait for it, or choose another run_dir") from None
    try:
        yield directory
    finally:
        os.close(file)


def check_not_in_a_run(run_dir: str) -> None:
    """Raises if a new run would be inside another run's directory, where only replays and evaluations may be."""
    directory = Path(run_dir).resolve()
    if is_address(run_dir) or (directory / SETTINGS_LOG_FILE).exists():
        return
    for outer in directory.parents:
        if all((outer / name).exists() for name in (LOCK_FILE, SETTINGS_LOG_FILE)):
            raise ValueError(f"run_dir={run_dir} is in the directory of another run, {outer}; choose another run_dir")


def check_kind(settings: Mapping[str, Any], directory: Path) -> None:
    """Raises if this run would replace the config.json of a model, or of another kind of run with results."""
    record = load_settings(directory)
    if not record and (directory / SETTINGS_FILE).exists():
        raise _foreign_settings(directory)
    configs = record.get("config", {}), settings
    old, new = (next((kind for section, kind in KINDS.items() if section in config), "") for config in configs)
    has_results = (directory / METRICS_FILE).exists() or any(directory.glob("samples_*.jsonl"))
    if has_results and old and old != new:
        raise ValueError(f"run_dir={directory} has the results of {old}; choose another run_dir for {new}")


def _foreign_settings(run_dir: Path | Bucket) -> ValueError:
    return ValueError(
        f"run_dir={run_dir} has a {SETTINGS_FILE} that is not a run's, perhaps a model's; choose another run_dir"
    )


@contextmanager
def locked_by_host_0(run_dir: str | Path, hosts: Hosts) -> Iterator[Path]:
    """Locks a directory for several hosts: host 0 locks it, and the others check that they see its lock."""
    directory, token = absolute_path(run_dir), secrets.token_hex(8)
    with locked(run_dir) if hosts.leads else nullcontext():
        if hosts.leads:
            (directory / TOKEN_FILE).write_text(token)
        first, *_ = hosts.gather("run_dir", token)
        file = directory / TOKEN_FILE
        if not file.is_file() or file.read_text() != first:
            raise ValueError(
                f"run_dir={run_dir} is not the same directory on this host as on host 0: give a directory that all "
                f"hosts share"
            )
        yield directory


def run_id(directory: Path, hosts: Hosts) -> str:
    """The id by which servers identify a run, equal on all hosts and after restarts.

    It contains the directory's name and a hash of its path and a random token inside it, so runs of the same name and
    copies of a directory have different ids.
    """
    file = directory / RUN_ID_FILE
    if hosts.leads and not file.exists():
        with whole_file(file) as content:
            content.write(secrets.token_hex(8).encode())
    token = file.read_text() if hosts.leads else ""
    code = hashlib.blake2s(f"{token} {directory.absolute()}".encode(), digest_size=4).hexdigest()
    name = re.sub(r"[^\w.-]", "_", directory.absolute().name, flags=re.ASCII)[:MAX_NAME_CHARS]
    return hosts.gather("run id", f"{name}-{code}")[0]


@contextmanager
def locked_for_bucket(bucket: Bucket, hosts: Hosts) -> Iterator[tuple[Path, Lease | None]]:
    """Locks a local directory per host for a run with checkpoints in a bucket; host 0 also holds the bucket's lease.

    Downloads the run's logs unless the local ones continue the bucket's; hosts other than 0 need only the metrics and
    settings.
    """
    content, _ = (bucket / SETTINGS_FILE).read()
    if content is not None and not _parsed_settings(content, bucket / SETTINGS_FILE):
        raise _foreign_settings(bucket)  # before the lease is written
    name = bucket.name if hosts.leads else f"{bucket.name}.host{hosts.index}"
    with locked(Path(BESIDE_BUCKET) / name) as directory, ExitStack() as stack:
        lease = None
        token_of(directory, bucket)
        if hosts.leads:
            say(f"checkpoints and copies of the logs are in {bucket}, local files in {directory}")
            lease = stack.enter_context(hold_lease(bucket, directory, say))
        hosts.gather("bucket", None)
        objects = bucket.listed()
        saved = [name.split("/")[1] for name in objects if name.endswith(f"/{RECORD_FILE}")]
        newest = max(map(int, filter(str.isdecimal, saved)), default=None)
        if not hosts.leads or (newest is not None and not _has_metrics(directory, bucket, objects, newest)):
            needed = [*filter(is_log, objects)] if hosts.leads else {METRICS_FILE, SETTINGS_FILE} & objects.keys()
            download(bucket, {name: objects[name] for name in needed}, directory)
        yield directory, lease


def _has_metrics(directory: Path, bucket: Bucket, objects: Mapping[str, tuple[int, int]], version: int) -> bool:
    """Whether the local metrics and the bucket's are equal at a checkpoint's step; later ones were not committed.

    They are not on a fresh disk, or if another machine has trained since.
    """
    with TemporaryDirectory() as copy:
        download(bucket, {name: objects[name] for name in {METRICS_FILE} & objects.keys()}, Path(copy))
        ours, theirs = (rows_by_step(path / METRICS_FILE) for path in (directory, Path(copy)))
    last = max((step for step, row in theirs.items() if row.get("policy_version", 0) <= version), default=0)
    return last in ours and ours[last] == theirs[last]


def is_log(name: str) -> bool:
    """Whether a path in the run's directory is a finished log, not an unfinished file or a host's episodes."""
    return name.partition("/")[0] in LOGGED and not name.endswith((PARTIAL, SUFFIX))


class LogCopies:
    """Copies logs to the bucket if they changed since the last copy.

    When a run resumes, episodes of the same size in the bucket count as copied, because a checkpoint waits for all
    copies, and copying all steps again could take longer than a preemptible machine runs.
    """

    def __init__(self, directory: Path, bucket: Bucket):
        self._directory, self._bucket = directory, bucket
        sizes = bucket.sizes()
        self._copied = {
            name: status
            for name, status in self._current_files().items()
            if name.startswith((EPISODES_DIR, SUPERSEDED_DIR)) and sizes.get(name) == status[0]
        }

    def copy(self) -> None:
        now = self._current_files()
        changed = {name: status for name, status in now.items() if self._copied.get(name) != status}
        upload({name: self._directory / name for name in changed}, self._bucket)
        self._copied |= changed

    def _current_files(self) -> dict[str, tuple[int, int]]:
        """Size and modification time of each log."""
        paths = {str(path.relative_to(self._directory)): path for path in self._directory.rglob("*") if path.is_file()}
        return {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in paths.items() if is_log(name)}


def write_settings(settings: Mapping[str, Any], directory: Path, step: int = 0, **facts: Any) -> None:
    """Writes RUN/config.json: every setting in use, the commit, package versions, and facts such as `OWN_CODE`.

    Each change adds a line to RUN/settings.jsonl, with the number of steps done before it.
    """
    record = {"config": settings, **versions(), **facts}
    path = directory / SETTINGS_FILE
    if load_settings(directory) == json.loads(json.dumps(record)):
        return
    write_rows(directory / SETTINGS_LOG_FILE, [*load_settings_log(directory), {"after_step": step, **record}])
    write_json(path, record)


@cache
def versions() -> dict[str, Any]:
    """The commit and package versions, cached because they may change on disk while the process runs."""
    return {"git_commit": _commit(Path(__file__)), "packages": {name: version(name) for name in VERSIONED}}


def load_settings(directory: Path) -> dict[str, Any]:
    """Reads RUN/config.json; empty if it does not exist or another program wrote it."""
    path = directory / SETTINGS_FILE
    return _parsed_settings(path.read_bytes(), path) if path.exists() else {}


def _parsed_settings(content: bytes, path: Path | Bucket) -> dict[str, Any]:
    try:
        record = json.loads(content, parse_constant=str)  # older files have Infinity, which is not JSON
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is not valid JSON ({problem}); restore the file, or remove it") from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        return {}
    _check_settings(record, str(path))
    return record


def load_settings_log(directory: Path) -> list[dict[str, Any]]:
    """Reads RUN/settings.jsonl; empty if it does not exist."""
    log = directory / SETTINGS_LOG_FILE
    records = list(load_jsonl(log)) if log.exists() else []
    for number, record in enumerate(records, 1):
        source = f"{log} line {number}"
        if not isinstance(record, dict):
            raise ValueError(f"{source} must hold a JSON object, got {type(record).__name__}")
        Section(source, record).count("after_step", MAX_COUNT, least=0)
        _check_settings(record, source)
    return records


def _check_settings(record: Mapping[str, Any], source: str) -> None:
    """Checks the types of values that commands read from a run's settings, which users may have edited."""
    settings = Section(source, record)
    settings.text("git_commit", "")
    settings.section("packages", {})
    config = settings.section("config")
    sections = {name: config.section(name, {}) for name in SECTIONS}
    sections["rollout"].text("forced_prefix", "")
    sections["eval"].count("num_samples", MAX_COUNT, 1)
    for name in ("accuracy_weight", "format_weight", "anchor_weight"):
        sections["reward"].number(name, -math.inf, math.inf, 1)
    if sections["mismatch"].values.get("max_kl") != "Infinity":
        sections["mismatch"].number("max_kl", 0, math.inf, math.inf)


def settings_of(directory: Path) -> dict[str, Any]:
    return load_settings(directory).get("config", {})


def changed_settings(
    settings: Mapping[str, Any], directory: Path, own_code: Mapping[str, str]
) -> dict[str, tuple[Any, Any]]:
    """Changed settings: key -> (value in RUN/config.json, current value); also changed checksums of `own_code`."""
    record = load_settings(directory)
    previous, current = flattened(record.get("config", {})), flattened(json.loads(json.dumps(settings)))
    if not previous:
        return {}
    keys = [key for key in {**current, **previous} if previous.get(key) != current.get(key)]
    sums = record.get(OWN_CODE, {})
    files = [name for name in sums.keys() & own_code.keys() if sums[name] != own_code[name]]
    return {key: (previous.get(key), current.get(key)) for key in keys} | {
        f"checksum of {name}": (sums[name], own_code[name]) for name in sorted(files)
    }


def _commit(file: Path) -> str | None:
    """The commit of the repository that tracks the file; None without git, or if the file is untracked."""
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("describe", "--always", "--dirty", "--abbrev=40") or None if git("ls-files", file.name) else None
