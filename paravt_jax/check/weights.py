"""Stage `weights`: converts and exports the weights, and compares the checksum of every tensor."""

from collections.abc import Iterator
from pathlib import Path

import jax
import xxhash

from model_port.config import ModelConfig
from model_port.convert import ConversionReport, convert
from model_port.export import export
from model_port.malloc import keep_freed_memory
from model_port.progress import BYTES, in_units
from model_port.weights import open_hf_tensors, rules
from paravt_jax.check.report import Measured
from paravt_jax.check.target import Target

CHECKPOINT, EXPORTED = "checkpoint", "exported"


def weights(target: Target) -> Iterator[Measured]:
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")
    source = target.hf_dir
    yield Measured("convert", _speed(convert(source, target.file(CHECKPOINT), force=True)))
    yield Measured("export", _speed(export(target.file(CHECKPOINT), target.file(EXPORTED), force=True)))
    sums, exported = (checksums(path, target.config) for path in (source, target.file(EXPORTED)))
    other = [name for name in sums if exported[name] != sums[name]]
    problem = f"{len(other)} differ, for example {other[0]}" if other else ""
    yield Measured("exported = read, every tensor's checksum", f"{len(sums)} tensors", problem=problem)


def _speed(report: ConversionReport) -> str:
    return f"{in_units([report.num_bytes], BYTES)} of {report.dtype} in {report.seconds:.1f} s"


def checksums(directory: Path, config: ModelConfig) -> dict[str, str]:
    with open_hf_tensors(directory, config) as tensors:
        names = [name for rule in rules(config) for name in rule.hf_names]
        return {name: xxhash.xxh3_128_hexdigest(tensors.read(name).reshape(-1).view("u1").data) for name in names}
