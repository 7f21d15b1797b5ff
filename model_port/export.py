"""Exports a checkpoint, converted or trained, to a Hugging Face directory.

    python -m model_port.export --src CKPT_OR_RUN_CHECKPOINT --dst HF_DIR [--push-to-hub REPO] [--dtype bfloat16]
    python -m model_port.export --src ADAPTER --dst DIR [--adapter]

A parameter's bytes are the concatenated bytes of its tensors, so blocks of the checkpoint stream into the output shards
and memory does not grow with the model. An adapter is merged into its base model tensor by tensor, or with --adapter
written by itself in PEFT's format.
"""

import argparse
import filecmp
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import xxhash

from model_port.adapters import (
    check_base,
    check_base_files,
    files_of_base,
    read_adapter,
    read_adapter_info,
    update_checksum,
    with_adapter,
    write_adapter,
)
from model_port.bucket import is_address
from model_port.card import CURVE_FILE, Cell, curve_of, make_card, read_cells
from model_port.checkpoint import StoredParams, cast, only_dtype
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import DTYPES, ModelConfig, parse_dtype, read_config
from model_port.convert import METADATA_BYTES, ConversionReport
from model_port.download import local_directory
from model_port.hf_files import CARD_FILE, RECIPE_FILE, base_model, read_side_files, with_dtype, write_side_files
from model_port.hub import check_hub_access
from model_port.layout import ADAPTER_CONFIG_FILE, BASE_KEY, HF_DIR, base_of, hf_files_of, is_adapter, is_checkpoint
from model_port.loading import abstract_model, abstract_params, base_directory, files_directory
from model_port.malloc import keep_freed_memory
from model_port.output_dir import GIB, check_replaceable, exit_on_sigterm, output_directory
from model_port.progress import BYTES, Meter
from model_port.push import add_push_flags, push
from model_port.safetensors_io import INDEX_FILE, SINGLE_FILE, HfTensors, safetensors_writer
from model_port.weights import Rule, check_hf_tensors, is_swapped, num_params, open_hf_tensors, rules

MAX_SHARD_GIB = 4.7  # just below the published shards' 5 GB


def export(
    src: str | Path,
    dst: str | Path,
    dtype: str | None = None,
    *,
    max_shard_gib: float = MAX_SHARD_GIB,
    force: bool = False,
    name: str | None = None,
    evaluation: str | Path | None = None,
) -> ConversionReport:
    """Writes the Hugging Face directory `dst`. `dtype` defaults to the checkpoint's.

    `force` replaces a `dst` that an earlier export wrote. Weights are split into files of `max_shard_gib`. The model
    card shows `name` and the results in `evaluation`, the run_dir of an evaluation of this model.
    """
    start_s = time.monotonic()
    if dtype is not None:
        parse_dtype(dtype)
    if not max_shard_gib > 0:
        raise ValueError(f"max_shard_gib={max_shard_gib} must be greater than 0")
    check_replaceable(Path(dst), force, Path(src))
    address, src = str(src), local_directory(src)
    if is_adapter(src):
        check_replaceable(Path(dst), force, Path(base_of(src)))
    source = _adapter_source(src) if is_adapter(src) else _checkpoint_source(src)
    config, hf_dir = source.config, files_directory(src)
    dtype = dtype or only_dtype(source.dtypes, src)
    storage = parse_dtype(dtype)
    files = with_dtype(read_side_files(hf_dir), dtype)
    title, base = name or Path(dst).name, base_model(hf_dir)
    cells = read_cells(Path(evaluation), [address, str(dst), title]) if evaluation is not None else []
    family = config.family
    card = make_card(src, title, base, dtype, has_recipe=RECIPE_FILE in files, cells=cells, model_type=family)
    files[CARD_FILE] = card.encode()
    if (curve := curve_of(src)) is not None:
        files[CURVE_FILE] = curve.read_bytes()
    shapes = {tensor: rule.hf_shape for rule in rules(config) for tensor in rule.hf_names}
    shards = plan_shards(shapes, storage, max_shard_gib * GIB)
    param_bytes = sum(shard.num_bytes for shard in shards)
    needed_bytes = param_bytes + sum(map(len, files.values())) + METADATA_BYTES
    with output_directory(dst, force=force, source=src, needed_bytes=needed_bytes) as partial:
        with Meter("exporting", param_bytes, BYTES) as bar:
            _write_shards(partial, shards, storage, _cast_blocks(source, storage, bar))
        _check_evaluated(cells, Path(dst), partial)
        if len(shards) > 1:
            weight_map = {tensor: shard.file_name for shard in shards for tensor in shard.shapes}
            index = {"metadata": {"total_size": param_bytes}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        write_side_files(files, partial)
    return ConversionReport(str(dst), dtype, num_params(config), param_bytes, time.monotonic() - start_s)


def _check_evaluated(cells: Sequence[Cell], dst: Path, partial: Path) -> None:
    """Raises if `cells` are of an earlier export to `dst` that had other weights than `partial`."""
    if not dst.exists() or all(Path(cell["model"]["path"]).resolve() != dst.resolve() for cell in cells):
        return
    for shard in partial.glob("*.safetensors"):
        if not (dst / shard.name).is_file() or not filecmp.cmp(shard, dst / shard.name, shallow=False):
            raise ValueError(
                f"the evaluation is of the model in {dst}, which has other weights than this export; export without "
                f"an evaluation, evaluate that, and export again"
            )


def export_adapter(
    src: str | Path, dst: str | Path, dtype: str | None = None, *, force: bool = False
) -> ConversionReport:
    """Writes an adapter, for example from a run's checkpoint, in PEFT's format; `dtype` defaults to float32.

    A checkpoint's tokenizer, processor and recipe come along in `hf`, because the base model has no recipe of the run.
    """
    start_s, dtype = time.monotonic(), dtype or "float32"
    storage = parse_dtype(dtype)
    check_replaceable(Path(dst), force, Path(src))
    src = local_directory(src)
    if not src.is_dir():
        raise ValueError(f"{src} is not a directory")
    if not is_adapter(src):
        raise ValueError(f"{src} is not an adapter: it has no {ADAPTER_CONFIG_FILE}; omit --adapter to export a model")
    check_replaceable(Path(dst), force, Path(base_of(src)))
    info, config = read_adapter_info(src), read_config(files_directory(src))
    params = read_adapter(src, config, info.lora.rank)
    params = {path: cast(array, storage, path) for path, array in params.items()}
    num_bytes = sum(array.nbytes for array in params.values())
    files = read_side_files(src / HF_DIR) if (src / HF_DIR).is_dir() else {}
    needed_bytes = num_bytes + sum(map(len, files.values())) + METADATA_BYTES
    with output_directory(dst, force=force, source=src, needed_bytes=needed_bytes) as partial:
        write_adapter(partial, config, info, params)
        if files:
            write_side_files(files, partial / HF_DIR)
    return ConversionReport(str(dst), dtype, num_bytes // storage.itemsize, num_bytes, time.monotonic() - start_s)


@dataclass(frozen=True, eq=False)
class _Source:
    """A model to export. Its blocks have the bytes of all tensors in order, each with a tensor's name for errors."""

    config: ModelConfig
    dtypes: Mapping[str, np.dtype]
    blocks: Iterator[tuple[str, np.ndarray]]


def _checkpoint_source(src: Path) -> _Source:
    stored = _checked(StoredParams(src))

    def blocks(rule: Rule) -> Iterator[np.ndarray]:
        if not is_swapped(rule):
            return stored.blocks(rule.path)
        return (_in_file(rule, stored.read(rule.path, (layer,))) for layer in range(len(rule.hf_names)))

    all_blocks = ((rule.hf, block) for rule in rules(stored.config) for block in blocks(rule))
    return _Source(stored.config, stored.dtypes, all_blocks)


def _in_file(rule: Rule, tensor: np.ndarray) -> np.ndarray:
    tensor = tensor.reshape(rule.hf_shape)
    return tensor.swapaxes(1, 2) if is_swapped(rule) else tensor


def _adapter_source(src: Path) -> _Source:
    """Merges an adapter into its base model. Raises if the base model has changed since training."""
    info, directory = read_adapter_info(src), base_directory(src)
    check_base_files(src, info.base, info.base.files and files_of_base(hf_files_of(directory)))
    base = _whole_tensors(directory)
    trained = None if info.base.dtype is None else parse_dtype(info.base.dtype)
    digest = xxhash.xxh3_128()

    def as_trained() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in base.blocks:
            tensor = cast(tensor, trained or tensor.dtype, name)
            update_checksum(digest, tensor)
            yield name, tensor
        check_base(src, info.base, digest.hexdigest())

    params = read_adapter(src, base.config, info.lora.rank)
    rule_of = {name: rule for rule in rules(base.config) for name in rule.hf_names}
    tensors = with_adapter(as_trained(), base.config, info.lora, params)
    blocks = ((name, _in_file(rule_of[name], np.asarray(tensor))) for name, tensor in tensors)
    return _Source(base.config, {BASE_KEY: trained} if trained else base.dtypes, blocks)


def _whole_tensors(base: Path) -> _Source:
    """Reads a checkpoint or a Hugging Face directory in blocks of one tensor each."""
    if is_checkpoint(base):
        stored = _checked(StoredParams(base))
        return _Source(stored.config, stored.dtypes, _from_checkpoint(stored))
    config = read_config(base)
    tensors = open_hf_tensors(base, config)
    check_hf_tensors(config, tensors)
    return _Source(config, {name: info.dtype for name, info in tensors.infos.items()}, _from_files(tensors, config))


def _from_checkpoint(stored: StoredParams) -> Iterator[tuple[str, np.ndarray]]:
    for rule in rules(stored.config):
        for layer, name in enumerate(rule.hf_names):
            yield name, stored.read(rule.path, () if rule.count is None else (layer,)).reshape(rule.hf_shape)


def _from_files(tensors: HfTensors, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    with tensors:
        for rule in rules(config):
            yield from ((name, tensors.read(name)) for name in rule.hf_names)


def _checked(stored: StoredParams) -> StoredParams:
    expected = abstract_params(abstract_model(stored.config), "float32")
    stored.check(stored.config, {path: leaf.shape for path, leaf in expected.items()})
    return stored


@dataclass
class Shard:
    """An output file and its tensors in order."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    file_name: str = SINGLE_FILE


def plan_shards(shapes: dict[str, tuple[int, ...]], dtype: np.dtype, max_bytes: float) -> list[Shard]:
    """Distributes the tensors in order over files of at most `max_bytes`. A larger tensor gets its own file."""
    shards = [Shard()]
    for name, shape in shapes.items():
        tensor_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1].shapes and shards[-1].num_bytes + tensor_bytes > max_bytes:
            shards.append(Shard())
        shards[-1].shapes[name] = shape
        shards[-1].num_bytes += tensor_bytes
    if len(shards) > 1:
        for number, shard in enumerate(shards, start=1):
            shard.file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _cast_blocks(source: _Source, dtype: np.dtype, bar: Meter) -> Iterator[np.ndarray]:
    for tensor, block in source.blocks:
        yield cast(block, dtype, tensor)
        bar.update(block.size * dtype.itemsize)


def _write_shards(directory: Path, shards: list[Shard], dtype: np.dtype, blocks: Iterator[np.ndarray]) -> None:
    """Writes the stream of all tensors' bytes into the files, one file after the other."""
    unwritten = np.empty(0, np.uint8)
    for shard in shards:
        tensors = {name: (dtype, shape) for name, shape in shard.shapes.items()}
        with safetensors_writer(directory / shard.file_name, tensors) as write:
            remaining_bytes = shard.num_bytes
            while remaining_bytes:
                if not len(unwritten):
                    unwritten = next(blocks).reshape(-1).view(np.uint8)
                part, unwritten = unwritten[:remaining_bytes], unwritten[remaining_bytes:]
                write(part)
                remaining_bytes -= len(part)
    surplus = next(blocks, None)  # at its end, the source of an adapter checks the base model
    assert not len(unwritten) and surplus is None, "the source has more tensors than the shards"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.export"),
        description="Writes a checkpoint as a Hugging Face directory that transformers, vLLM and SGLang load.",
    )
    parser.add_argument(
        "--src",
        required=True,
        metavar="CKPT",
        help="a converted checkpoint, RUN/checkpoints/N or an adapter; or its gs:// address",
    )
    parser.add_argument(
        "--dst",
        required=True,
        metavar="HF_DIR",
        help="where to write it, a directory or gs://BUCKET/PATH; must not exist",
    )
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, in the format of PEFT, without a card"
    )
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: as in the checkpoint)")
    parser.add_argument("--push-to-hub", metavar="REPO", help="then upload it to REPO, as OWNER/NAME")
    add_push_flags(parser, "with --push-to-hub: ")
    parser.add_argument("--evaluation", metavar="RUN", help="run_dir of an evaluation of it, for its card")
    parser.add_argument(
        "--max-shard-gib",
        type=float,
        default=MAX_SHARD_GIB,
        metavar="GIB",
        help=f"largest file of weights (default {MAX_SHARD_GIB})",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing model at the end")
    add_debug_flag(parser)
    args = parser.parse_args()
    if args.adapter and args.push_to_hub:
        parser.error("--push-to-hub takes complete models; upload an adapter with hf upload REPO HF_DIR")
    if args.push_to_hub and is_address(args.dst):
        parser.error("--push-to-hub needs a local directory as --dst")
    if args.adapter and args.evaluation:
        parser.error("--evaluation has no effect with --adapter, which writes no card")
    exit_on_sigterm()
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")  # leaves accelerators and their memory to other processes
    if args.push_to_hub is not None:
        check_hub_access(args.push_to_hub, public=args.public)
    if args.adapter:
        print(export_adapter(args.src, args.dst, args.dtype, force=args.force))
        return
    report = export(
        args.src,
        args.dst,
        args.dtype,
        max_shard_gib=args.max_shard_gib,
        force=args.force,
        name=args.push_to_hub,
        evaluation=args.evaluation,
    )
    print(report)
    if args.push_to_hub is not None:
        print(push(Path(args.dst), args.push_to_hub, args))


if __name__ == "__main__":
    run_cli(main)
