"""Times saving and restoring a learner's checkpoint, with and without checksums, compared with a plain read.

"Cold" reads from the disk: the files are dropped from the page cache before each turn, which needs root and rarely
works in containers. All turns alternate.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model_port.config import ModelConfig, TextConfig
from model_port.layout import CHECKPOINTS_DIR, HF_DIR, RECORD_FILE
from model_port.output_dir import check_local
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.tiny import make_tiny
from paravt_jax.bench.mesh_case import config_of, make_learner
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.plan.run import PlannedRl
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_files import OWN_SUM, record_bytes

WIDTH, HEADS, HEAD_DIM, FFN_WIDTH, VOCABULARY = 1024, 8, 128, 3072, 32_768
LAYER_PARAMS = 12_600_000  # approximate
BYTES_PER_PARAM = 12  # float32 master weight and Adam's two moments
READ_BYTES = 2**22
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gib", type=float, default=2.0, help="approximate size of the checkpoint (default 2; 0.9 or more)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns per way; the median is reported (default 5)")
    parser.add_argument("--dir", type=Path, help="directory to write to (default: the system's temporary directory)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.repeats < 1 or args.gib <= 0:
        raise ValueError(f"--repeats {args.repeats} must be at least 1 and --gib {args.gib} greater than 0")
    check_local(args.dir or "")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        directory, hf = Path(folder) / CHECKPOINTS_DIR, Path(folder) / HF_DIR
        make_tiny(hf)
        model = sized_model(args.gib * 2**30 / BYTES_PER_PARAM)
        update = PlannedRl.of(config_of((1, 1, 1), rows=1, row_tokens=256), model).update
        learner = make_learner(update, model, None)
        checkpoints = Checkpoints(directory, hf, CheckpointConfig(), lambda text: print(text, file=sys.stderr))
        start_s = time.perf_counter()
        checkpoints.save(learner, {})
        copied_s = time.perf_counter() - start_s
        checkpoints.wait()
        saved_s = time.perf_counter() - start_s
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        rows = [
            _row(learner, checkpoints, args.repeats, cold)
            for cold in ((False, True) if os.access(DROP_CACHES, os.W_OK) else (False,))
        ]
        checkpoints.close()
    return {"gb": num_bytes / 1e9, "copied_s": copied_s, "saved_s": saved_s, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    head = "| page cache | plain read s | restore s | restore with checksums s | with / without |"
    copied_s, saved_s = result["copied_s"], result["saved_s"]
    lines = [f"{result['gb']:.2f} GB: the run continues after {copied_s:.2f} s; on disk after {saved_s:.2f} s", ""]
    lines += [head, "|---" * 5 + "|"]
    for row in result["rows"]:
        seconds = f"{row['read_s']:.2f} | {row['restored_s']:.2f} | {row['compared_s']:.2f}"
        lines.append(f"| {row['cache']} | {seconds} | {row['compared_s'] / row['restored_s']:.2f} |")
    return "\n".join(lines)


def _row(learner: Learner, checkpoints: Checkpoints, repeats: int, cold: bool) -> dict[str, Any]:
    directory = checkpoints.latest
    assert isinstance(directory, Path)
    record_file = directory / RECORD_FILE
    content = record_file.read_bytes()
    record = json.loads(content)
    del record[OWN_SUM]
    without = record_bytes(record, {name: [size, None] for name, (size, _) in record["files"].items()})
    seconds: dict[str, list[float]] = {"read_s": [], "restored_s": [], "compared_s": []}
    for _ in range(repeats):
        for way, took in seconds.items():
            record_file.write_bytes(without if way == "restored_s" else content)
            if cold:
                os.sync()
                DROP_CACHES.write_text("1")
            start_s = time.perf_counter()
            if way == "read_s":
                _read(directory)
            else:
                checkpoints.restore(learner)
                jax.block_until_ready(learner.state.trainable)
            took.append(time.perf_counter() - start_s)
    record_file.write_bytes(content)
    return {"cache": "cold" if cold else "warm", **{way: statistics.median(took) for way, took in seconds.items()}}


def _read(directory: Path) -> None:
    buffer = np.empty(READ_BYTES, np.uint8)
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer.data):
                    pass


def sized_model(num_params: float) -> ModelConfig:
    """Returns a model config with about `num_params` parameters and at least one layer."""
    fixed = 2 * VOCABULARY * WIDTH
    num_layers = max(1, round((num_params - fixed) / LAYER_PARAMS))
    text = TextConfig(
        num_layers,
        WIDTH,
        FFN_WIDTH,
        HEADS,
        HEADS // 2,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        mrope_sections=(24, 20, 20),
    )
    vision = Qwen3VisionConfig(4, 64, 128, 2, WIDTH, (0,), num_positions=256)
    return ModelConfig(
        text, vision, tie_embeddings=False, image_token_id=32_700, video_token_id=32_701, vision_start_token_id=32_702
    )
