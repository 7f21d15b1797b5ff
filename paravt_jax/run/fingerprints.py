"""Computes checksums of a run's code, data rows, their files and the model, which hosts compare."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from model_port.json_files import flattened
from model_port.output_dir import LIST_FILE
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.policy import Policy

PACKAGES = ("paravt_jax", "model_port", "rollout")
OWN_CODE = re.compile(r"(.+\.py):\w+")  # a setting that names a user's function
SUMMED_BYTES, EVERY_BYTES = 2**12, 2**20  # bytes to hash of each block of bytes; whole weights take too long
PIECE_BYTES = 2**16
SHOWN_DIGITS = 12


class NamingFiles(Protocol):
    @property
    def files(self) -> tuple[str, ...]: ...


def check_sources(hosts: Hosts, train: Sequence[NamingFiles], held_out: Sequence[NamingFiles], policy: Policy) -> None:
    """Raises unless all hosts have the same data rows and the same model."""

    def sums() -> dict[str, str]:
        rows = {"data.train": sum_of_rows(train), "data.validation": sum_of_rows(held_out)}
        adapter = {} if policy.adapter is None else model_sums(policy.adapter, "the adapter")
        return rows | model_sums(policy.source, "model.path") | adapter

    hosts.check_same(sums, "give all hosts the same data and the same model")


def code_sums(settings: Mapping[str, Any]) -> dict[str, str]:
    """Checksums of all source files and of user code in settings. A commit would miss uncommitted changes."""
    root = Path(__file__).parents[2]
    files = {str(path.relative_to(root)): path for name in PACKAGES for path in (root / name).rglob("*.py")}
    return {name: _sum(path.read_bytes()) for name, path in sorted(files.items())} | own_sums(settings)


def own_sums(settings: Mapping[str, Any]) -> dict[str, str]:
    """Checksums of the user code in settings."""
    return {name: _sum(path.read_bytes()) for name, path in sorted(own_files(flattened(settings)))}


def own_files(settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    for value in settings.values():
        for item in value if isinstance(value, list) else [value]:
            match = OWN_CODE.fullmatch(item) if isinstance(item, str) else None
            if match and (path := Path(match[1]).expanduser()).is_file():  # loading a missing file raises later
                yield match[1], path


def sum_of_rows(rows: Sequence[NamingFiles]) -> str:
    """The checksum of rows. It includes only names and sizes of files, because directories differ between hosts."""
    checksum = xxhash.xxh3_128()
    sizes = {file: Path(file).stat().st_size for file in {file for row in rows for file in row.files}}
    for row in rows:
        text = repr(row)
        for file in row.files:
            text = text.replace(file, Path(file).name) + f" {sizes[file]}"
        checksum.update(text.encode())
    return f"{len(rows)} rows with checksum {checksum.hexdigest()[:SHOWN_DIGITS]}"


def model_sums(directory: Path, setting: str) -> dict[str, str]:
    """Checksums of a model's files, except hidden folders, which downloads leave behind."""
    sums = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and path.name != LIST_FILE and not any(part.startswith(".") for part in name.parts):
            sums[f"{name} of {setting}"] = _sampled_sum(path)
    return sums


def weights_sum(directory: Path) -> str:
    """A quick checksum of a Hugging Face model's weights, or of all files of a converted checkpoint."""
    files = sorted(directory.glob("*.safetensors")) or sorted(filter(Path.is_file, directory.rglob("*")))
    return _sum(repr([(str(file.relative_to(directory)), *fingerprint_of(file)) for file in files]).encode())


def fingerprint_of(file: Path) -> tuple[int, str]:
    """The size of a file and a hash of its start, middle and end, because hashing 16 GB of weights takes too long."""
    num_bytes, pieces = file.stat().st_size, hashlib.blake2b(digest_size=12)
    with file.open("rb") as content:
        for start in (0, num_bytes // 2, max(0, num_bytes - PIECE_BYTES)):
            content.seek(start)
            pieces.update(content.read(PIECE_BYTES))
    return num_bytes, pieces.hexdigest()


def _sampled_sum(path: Path) -> str:
    num_bytes = path.stat().st_size
    checksum = xxhash.xxh3_128(str(num_bytes).encode())
    with path.open("rb") as file:
        for offset in (*range(0, num_bytes, EVERY_BYTES), max(0, num_bytes - SUMMED_BYTES)):
            file.seek(offset)
            checksum.update(file.read(SUMMED_BYTES))
    return checksum.hexdigest()[:SHOWN_DIGITS]


def _sum(content: bytes) -> str:
    return xxhash.xxh3_128(content).hexdigest()[:SHOWN_DIGITS]
