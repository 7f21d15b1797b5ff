"""Converts a Hugging Face model to a checkpoint that loads onto any mesh, in memory independent of the model's size.

    python -m model_port.convert --src HF_DIR_OR_ID --dst CKPT [--dtype bfloat16]

Without --dtype, the checkpoint has exactly the source's values. Config, tensors and side files are checked before
anything is written, and CKPT is written atomically.
"""

import argparse
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from model_port.checkpoint import FORMAT_VERSION, Index, only_dtype, write_params
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import DTYPES, parse_dtype, read_config
from model_port.download import source_directory
from model_port.hf_files import base_model, no_tokenizer, read_side_files, with_base_model, write_side_files
from model_port.layout import HF_DIR, INFO_FILE, is_adapter, is_checkpoint
from model_port.loading import abstract_model, abstract_params
from model_port.malloc import keep_freed_memory
from model_port.output_dir import check_replaceable, exit_on_sigterm, output_directory
from model_port.progress import BYTES, Meter, in_units
from model_port.terminal import say
from model_port.weights import check_hf_tensors, in_words, num_params, open_hf_tensors, read_param, rules

METADATA_BYTES = 2**20  # disk space for files besides parameters and side files


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion or an export."""

    path: str  # a path or a bucket address
    dtype: str
    num_params: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {in_words(self.num_params)} parameters in {self.dtype}, "
            f"{in_units([self.num_bytes], BYTES)} in {self.seconds:.1f} s"
        )


def convert(src: str | Path, dst: str | Path, dtype: str | None = None, *, force: bool = False) -> ConversionReport:
    """Converts a Hugging Face directory or hub id to the checkpoint `dst`.

    `dtype` defaults to the source's. `force` replaces an existing checkpoint once the new checkpoint is complete.
    """
    start_s = time.monotonic()
    if dtype is not None:
        parse_dtype(dtype)
    check_replaceable(Path(dst), force, Path(src))
    src_dir = source_directory(src)
    if is_adapter(src_dir) or is_checkpoint(src_dir):
        kind, verb = ("an adapter", "merges") if is_adapter(src_dir) else ("a checkpoint already", "exports")
        command = f"python -m model_port.export --src {shlex.quote(str(src))} --dst DIR"
        raise ValueError(f"{src} is {kind}; use it directly, or {command} {verb} it")
    config = read_config(src_dir)
    with open_hf_tensors(src_dir, config) as tensors:
        check_hf_tensors(config, tensors)
        by_path = {rule.path: rule for rule in rules(config)}
        stored = {name: tensors.infos[name].dtype for rule in by_path.values() for name in rule.hf_names}
        dtype = dtype or only_dtype(stored, src)
        storage = parse_dtype(dtype)
        hub_id = base_model(src_dir)
        files = with_base_model(read_side_files(src_dir), hub_id)
        if problem := no_tokenizer(src_dir):
            say(f"{problem}: you cannot train or sample with its checkpoint")
        shapes = {path: leaf.shape for path, leaf in abstract_params(abstract_model(config), dtype).items()}

        def read(path: str, index: Index) -> np.ndarray:
            return read_param(tensors, by_path[path], shapes[path], index)

        def position(path: str, index: Index) -> tuple[Path, int, int]:
            layer = 0 if by_path[path].count is None else index[0].start
            info = tensors.infos[by_path[path].hf_names[layer]]
            return info.path, info.start_byte, sum(along.start for along in index)

        param_bytes = num_params(config) * storage.itemsize
        needed_bytes = param_bytes + sum(map(len, files.values())) + METADATA_BYTES
        with output_directory(dst, force=force, source=src_dir, needed_bytes=needed_bytes) as partial:
            write_side_files(files, partial / HF_DIR)
            with Meter("converting", param_bytes, BYTES) as bar:
                write_params(partial, shapes, storage, read, position, bar.update)
            info = {
                "format_version": FORMAT_VERSION,
                "dtype": dtype,
                "num_params": num_params(config),
                "source": hub_id or str(src),
            }
            (partial / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n")
    return ConversionReport(str(dst), dtype, num_params(config), param_bytes, time.monotonic() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.convert"),
        description="Converts a Hugging Face model to a checkpoint that loads onto any mesh.",
    )
    parser.add_argument(
        "--src", required=True, metavar="HF_DIR_OR_ID", help="a directory, gs://BUCKET/PATH, or ORG/NAME on the hub"
    )
    parser.add_argument(
        "--dst", required=True, metavar="CKPT", help="a directory or gs://BUCKET/PATH to write it to; must not exist"
    )
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: the source's)")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint at the end")
    add_debug_flag(parser)
    args = parser.parse_args()
    exit_on_sigterm()
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")  # leaves accelerators and their memory to other processes
    print(convert(args.src, args.dst, args.dtype, force=args.force))


if __name__ == "__main__":
    run_cli(main)
