"""Measures conversion and export, compared with a plain copy of the same bytes on the same disk.

The model has random weights in a published shape. Each step is its own process; its files are dropped from the page
cache first, and it syncs its output. Disk speed varies, so the copy is timed before and after. Finally every exported
tensor is compared with the original by checksum. Peak memory is the process's VmHWM, sampled while it runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from model_port.config import config_to_hf, preset
from model_port.export import plan_shards
from model_port.progress import BYTES, Meter
from model_port.safetensors_io import DTYPES, INDEX_FILE, HfTensors, safetensors_writer
from model_port.terminal import aligned
from model_port.weights import num_params, rules

MODELS = ("2b", "4b", "8b", "32b")
BFLOAT16 = DTYPES["BF16"]
PUBLISHED_SHARD_BYTES = 5 * 10**9
MODELS_ON_DISK = 3  # models on disk at the same time: source, checkpoint, and a copy or the export
SPARE_BYTES = 2**30
BLOCK_VALUES = 2**25
SAMPLE_EVERY_S = 0.02
SETTLE_S = 10.0  # virtual machines return freed memory to their host with a delay
COPY = """
import os, shutil, sys
src, dst = sys.argv[1:]
os.mkdir(dst)
for name in sorted(os.listdir(src)):
    shutil.copyfile(f"{src}/{name}", f"{dst}/{name}")
    descriptor = os.open(f"{dst}/{name}", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="auto", choices=[*MODELS, "auto"], help="default: the largest that fits")
    parser.add_argument(
        "--dir", default=".", metavar="DIR", help="directory on the disk to measure (default: the working directory)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    name = _largest_fitting(args.dir) if args.model == "auto" else args.model
    _check_fits(name, args.dir)
    work = Path(tempfile.mkdtemp(prefix="bench_convert_", dir=args.dir))
    try:
        return {"model": name, **_measure(name, work)}
    finally:
        shutil.rmtree(work)


def table(result: dict[str, Any]) -> str:
    rows = [["", "seconds", "x a copy", "GB/s", "peak MiB"]]
    for step in result["steps"]:
        speed = result["num_bytes"] / 1e9 / step["seconds"]
        rows.append(
            [
                step["name"],
                f"{step['seconds']:.1f}",
                f"{step['copy_ratio']:.2f}",
                f"{speed:.3f}",
                f"{step['peak_rss_bytes'] / 2**20:.0f}",
            ]
        )
    return (
        f"{result['model']}: {result['num_params'] / 1e9:.3f} billion parameters, {result['num_bytes'] / 1e9:.2f} GB "
        f"in bfloat16; all {result['num_tensors']} exported tensors are identical\n" + aligned(rows)
    )


def _measure(name: str, work: Path) -> dict[str, Any]:
    source, copy, checkpoint, exported = (work / part for part in ("source", "copy", "checkpoint", "exported"))
    checksums = _make_source(name, source)
    copy_command = [sys.executable, "-c", COPY, str(source), str(copy)]
    steps = [_timed("copy", copy_command, reads=source)]
    shutil.rmtree(copy)
    convert_command = [sys.executable, "-m", "model_port.convert", "--src", str(source), "--dst", str(checkpoint)]
    steps.append(_timed("convert", convert_command, reads=source))
    steps.append(_timed("copy again", copy_command, reads=source))
    shutil.rmtree(copy)
    shutil.rmtree(source)
    export_command = [sys.executable, "-m", "model_port.export", "--src", str(checkpoint), "--dst", str(exported)]
    steps.append(_timed("export", export_command, reads=checkpoint))
    shutil.rmtree(checkpoint)
    _check(exported, checksums)
    copy_s = [step["seconds"] for step in steps if step["name"].startswith("copy")]
    for step in steps:
        step["copy_ratio"] = step["seconds"] * len(copy_s) / sum(copy_s)
    config = preset(name)
    return {
        "num_params": num_params(config),
        "num_bytes": num_params(config) * BFLOAT16.itemsize,
        "num_tensors": len(checksums),
        "page_cache": "the files that a step reads are dropped from it beforehand",
        "steps": steps,
    }


def _make_source(name: str, directory: Path) -> dict[str, int]:
    """Writes a Hugging Face directory of random weights and returns the checksum of every tensor."""
    config = preset(name)
    directory.mkdir()
    # Clears the top exponent bit, so that every value is finite and below 2.
    values = np.random.default_rng(0).integers(0, 2**16, 2 * BLOCK_VALUES, np.uint16) & np.uint16(0xBFFF)
    offsets = np.random.default_rng(1)
    shapes = {tensor: rule.hf_shape for rule in rules(config) for tensor in rule.hf_names}
    # By name, as in published files, which is layer by layer; a stacked parameter needs one kernel of all layers.
    shards = plan_shards(dict(sorted(shapes.items())), BFLOAT16, PUBLISHED_SHARD_BYTES)
    checksums: dict[str, int] = {}
    total_bytes = sum(shard.num_bytes for shard in shards)
    with Meter("making random weights", total_bytes, BYTES) as bar:
        for shard in shards:
            tensors = {tensor: (BFLOAT16, shape) for tensor, shape in shard.shapes.items()}
            with safetensors_writer(directory / shard.file_name, tensors) as write:
                for tensor, shape in shard.shapes.items():
                    checksums[tensor] = 0
                    for num_values in _block_sizes(int(np.prod(shape))):
                        offset = int(offsets.integers(BLOCK_VALUES))
                        block = values[offset : offset + num_values]
                        checksums[tensor] = zlib.crc32(block.data, checksums[tensor])
                        write(block)
                        bar.update(block.nbytes)
    if len(shards) > 1:
        weight_map = {tensor: shard.file_name for shard in shards for tensor in shard.shapes}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config_to_hf(config)))
    return checksums


def _check(directory: Path, checksums: dict[str, int]) -> None:
    with HfTensors(directory) as tensors, Meter("comparing checksums", tensors.num_bytes, BYTES) as bar:
        assert set(tensors.infos) == set(checksums)
        for name, info in tensors.infos.items():
            checksum, row_values = 0, int(np.prod(info.shape[1:]))
            rows = max(1, BLOCK_VALUES // row_values)
            for first in range(0, info.shape[0], rows):
                block = tensors.read(name, slice(first, first + rows))
                checksum = zlib.crc32(block.reshape(-1).view(np.uint8).data, checksum)
                bar.update(block.nbytes)
            if checksum != checksums[name]:
                raise RuntimeError(f"the exported {name} differs from the original")


def _block_sizes(num_values: int) -> list[int]:
    num_full, last = divmod(num_values, BLOCK_VALUES)
    return [BLOCK_VALUES] * num_full + [last] * (last > 0)


def _timed(name: str, command: list[str], reads: Path) -> dict[str, Any]:
    _drop_from_page_cache(reads)
    time.sleep(SETTLE_S)
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    most_bytes = 0
    try:
        while process.poll() is None:
            most_bytes = max(most_bytes, peak_rss_bytes(process.pid))
            time.sleep(SAMPLE_EVERY_S)
    finally:
        process.terminate()
        process.wait()
    seconds = time.monotonic() - start_s
    if process.returncode != 0:
        raise RuntimeError(f"the step {name!r} failed with exit code {process.returncode}")
    return {"name": name, "seconds": seconds, "peak_rss_bytes": most_bytes}


def peak_rss_bytes(pid: int) -> int:
    """Returns a process's VmHWM. Unlike getrusage, it excludes our memory, which a child has between fork and exec."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the process has exited
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # only clean pages are dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _needed_bytes(name: str) -> int:
    return MODELS_ON_DISK * num_params(preset(name)) * BFLOAT16.itemsize + SPARE_BYTES


def _largest_fitting(directory: str) -> str:
    free_bytes = shutil.disk_usage(directory).free
    return next((name for name in reversed(MODELS) if _needed_bytes(name) <= free_bytes), MODELS[0])


def _check_fits(name: str, directory: str) -> None:
    free_bytes, needed_bytes = shutil.disk_usage(directory).free, _needed_bytes(name)
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{directory} has {free_bytes / 2**30:.1f} GiB free, --model {name} needs {needed_bytes / 2**30:.1f} GiB; "
            f"give another disk with --dir, or a smaller model"
        )
