"""Compares our logits with transformers' for the same files and a prompt with video frames.

python -m model_port.verify --hf HF_DIR [--src CKPT] [--dtype float32|bfloat16]

Errors are relative to the standard deviation of the logits, because rounding errors grow with the logits, and trained
models have large logits. In bfloat16, our error may be up to twice transformers' own bfloat16 error; both are relative
to transformers' float32. Only one model is in memory at a time.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from PIL import Image

import model_port
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import read_config
from model_port.download import source_directory
from model_port.hf_files import no_tokenizer
from model_port.layers import ComputeDtype
from model_port.loading import load_computing
from model_port.processing import expand_placeholders, token_counts
from model_port.progress import Meter
from model_port.reference import SHARED_GPU, ProcessedPrompt, Reference, missing_torch

DTYPES = ("float32", "bfloat16")
MAX_RELATIVE = 1e-4  # in float32: rounding gives 1e-6 to 1e-5 at any depth, and a different model more than 1e-2
TIMES_THEIRS = 2  # in bfloat16: the maximum ratio of our error to transformers'
VIDEO_PX = 192, 320
NUM_FRAMES = 6  # one per second
QUESTION = "What moves from left to right, and when does it pass the middle?"


@dataclass(frozen=True)
class LogitsDifference:
    """The difference of logits from transformers' float32 logits."""

    relative_error: float  # root mean square error, in standard deviations of the expected logits
    top1_agreement: float
    kl: float  # KL(expected, ours), mean over tokens

    @classmethod
    def between(cls, logits: Float[np.ndarray, "T V"], expected: Float[np.ndarray, "T V"]) -> "LogitsDifference":
        error, spread, kl = 0.0, 0.0, 0.0
        for ours, theirs in zip(logits.astype(np.float64), expected.astype(np.float64), strict=True):
            error += np.square(ours - theirs).mean()
            spread += np.square(theirs - theirs.mean()).mean()
            theirs, ours = log_softmax(theirs), log_softmax(ours)
            kl += np.sum(np.exp(theirs) * (theirs - ours))
        same = np.mean(logits.argmax(-1) == expected.argmax(-1))
        return cls(float(np.sqrt(error / spread)), float(same), float(kl / len(expected)))


def log_softmax(row: Float[np.ndarray, " V"]) -> Float[np.ndarray, " V"]:
    """Computes a log-softmax, four times as fast as np.logaddexp.reduce for a large vocabulary."""
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def video_prompt(
    hf_dir: str | Path, num_frames: int = NUM_FRAMES, size_px: tuple[int, int] = VIDEO_PX
) -> ProcessedPrompt:
    """Returns a prompt in the checkpoint's chat format with video frames, their times, and a crop of a frame.

    The crop has another size than the frames, so that positions matter.
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = read_config(hf_dir)
    if problem := no_tokenizer(hf_dir):  # without this check, AutoTokenizer makes an empty tokenizer
        raise ValueError(f"{problem}, which the comparison needs for its prompt")
    tokenizer: Any = AutoTokenizer.from_pretrained(hf_dir)
    height, width = size_px
    frames = [(float(number), _frame(number, num_frames, size_px)) for number in range(num_frames)]
    frames.append((frames[-1][0], frames[-1][1][height // 6 : -height // 6, width // 2 :]))
    content: list[dict[str, str]] = []
    for time_s, _ in frames:
        content += [{"type": "text", "text": f"<{time_s:.1f} seconds>"}, {"type": "image"}]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.fromarray(pixels) for _, pixels in frames]
    processed = Qwen2VLImageProcessorPil.from_pretrained(hf_dir)(images=images, return_tensors="np")
    grids = np.asarray(processed["image_grid_thw"])
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = expand_placeholders(ids, token_counts(grids, config.vision.merge), config.image_token_id)
    return ProcessedPrompt(ids, np.asarray(processed["pixel_values"], np.float32), grids)


def _frame(number: int, num_frames: int, size_px: tuple[int, int]) -> np.ndarray:
    """Draws a frame of a bright square that moves across colored bands."""
    height, width = size_px
    pixels = np.linspace(0, 255, 3 * height).astype(np.uint8).reshape(height, 1, 3).repeat(width, axis=1)
    start = number * (width - 64) // num_frames
    pixels[64:128, start : start + 64] = (255, 240, 16 * number)
    return pixels


def our_logits(src: str | Path, prompt: ProcessedPrompt, dtype: ComputeDtype) -> Float[np.ndarray, "T V"]:
    with jax.default_matmul_precision("highest"):  # otherwise accelerators round float32 inputs
        return model_port.logits(load_computing(src, dtype), prompt.ids, **prompt.media)


def their_logits(hf_dir: str | Path, prompt: ProcessedPrompt, dtype: ComputeDtype) -> Float[np.ndarray, "T V"]:
    with Reference(hf_dir, dtype) as model:
        return model.logits(prompt)


def verify(hf_dir: str | Path, src: str | Path, dtype: ComputeDtype) -> tuple[dict[str, Any], bool]:
    """Compares the logits. Returns the report, in JSON types, and whether the logits agree."""
    prompt = video_prompt(hf_dir)
    sides: list[tuple[str, Callable, str | Path, ComputeDtype]] = [
        ("ours", our_logits, src, dtype),
        ("transformers", their_logits, hf_dir, "float32"),
    ]
    if dtype != "float32":
        sides.append(("transformers", their_logits, hf_dir, dtype))
    logits = []
    for number, (name, compute_logits, path, side_dtype) in enumerate(sides, 1):
        with Meter(f"{name} in {side_dtype}, {path} ({number} of {len(sides)})"):
            logits.append(compute_logits(path, prompt, side_dtype))
            gc.collect()  # frees this model before the next model is loaded
    ours, expected, *theirs = logits
    difference = LogitsDifference.between(ours, expected)
    bound = MAX_RELATIVE
    report: dict[str, Any] = {"dtype": dtype, "tokens": len(prompt.ids), "pictures": len(prompt.grids)}
    report |= asdict(difference)
    for rounded in theirs:
        rounding = LogitsDifference.between(rounded, expected)
        bound = TIMES_THEIRS * rounding.relative_error
        report["transformers"] = asdict(rounding)
    return report | {"bound": bound}, difference.relative_error <= bound


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.verify"),
        description="Compares a checkpoint's logits with transformers' for a prompt with video frames.",
        epilog="In float32, the error must be rounding. In bfloat16, it may be twice transformers' own bfloat16 error, "
        "both against its float32. Only one model is in memory at a time; bfloat16 weights stay in bfloat16, and "
        "each layer is cast while it runs. A checkpoint or an adapter needs 4 bytes per parameter in float32.",
    )
    parser.add_argument("--hf", required=True, metavar="HF_DIR", help="the model that transformers loads")
    parser.add_argument(
        "--src", metavar="CKPT", help="the model that we load, for example RUN/checkpoints/N (default: HF_DIR)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the computation (default float32)")
    add_debug_flag(parser)
    args = parser.parse_args()
    hf_dir, src = (source_directory(path) for path in (args.hf, args.src or args.hf))
    if missing := missing_torch():
        raise RuntimeError(
            f"the comparison needs torch and transformers ({missing}): `pip install torch` in an environment without "
            "jax[cuda12], or `bash scripts/setup.sh dev` in a clone"
        )
    os.environ.update(SHARED_GPU)
    report, same = verify(hf_dir, src, args.dtype)
    print(json.dumps(report))
    verdict = f"relative error {report['relative_error']:.2g}, at most {report['bound']:.2g} is rounding"
    if not same:
        hint = "" if args.dtype != "float32" else "; compare files rounded to bfloat16 with --dtype bfloat16"
        raise RuntimeError(f"DIFFERENT in {args.dtype}: {verdict}{hint}")
    print(f"THE SAME in {args.dtype}: {verdict}", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
