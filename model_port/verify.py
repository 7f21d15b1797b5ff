"""Does transformers compute the same from these files? Logits of one prompt with pictures, on both sides.

python -m model_port.verify --hf HF_DIR [--src CKPT]
"""

import argparse
import json
from pathlib import Path

import numpy as np

import model_port
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.inputs import Frame
from model_port.progress import Meter

MAX_DIFFERENCE = 1e-4  # of float32 logits; the project's bound for whole models
FRAME_GRIDS = ((2, 2), (4, 6))  # unequal, so that positions and the table of positions count
NUM_TEXT_TOKENS = 24


def largest_difference(hf_dir: str | Path, src: str | Path | None = None) -> tuple[float, float]:
    """Between the logits of transformers, from `hf_dir`, and ours, from `src` or the same; and the largest logit."""
    try:
        import torch
        from transformers import Qwen3VLForConditionalGeneration
    except ImportError as missing:
        raise RuntimeError(
            f"the comparison needs torch and transformers ({missing}): run `bash scripts/setup.sh dev`, "
            "or pip install torch where no jax[cuda12] is"
        ) from None

    ours = model_port.load(src or hf_dir)
    config, random = ours.config, np.random.default_rng(0)
    first_special = min(config.vision_start_token_id, config.image_token_id)
    ids = random.integers(0, first_special, NUM_TEXT_TOKENS).tolist()
    frames = []
    for down, across in FRAME_GRIDS:
        patches = random.standard_normal((down * across, config.vision.patch_values)).astype(np.float32)
        frames.append(Frame(patches, (down, across)))
        shown = [config.image_token_id] * (down * across // config.vision.merge_unit)
        ids += [config.vision_start_token_id, *shown, config.vision_end_token_id, *ids[:4]]
    pixels = np.concatenate([frame.patches for frame in frames])
    grids = np.array([[1, *frame.grid] for frame in frames])
    got = model_port.logits(ours, np.array(ids), pixels, grids)

    theirs = Qwen3VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        expected = theirs(
            input_ids=tokens,
            pixel_values=torch.from_numpy(pixels),
            image_grid_thw=torch.from_numpy(grids),
            mm_token_type_ids=(tokens == config.image_token_id).int(),
        ).logits[0]
    return float(np.abs(got - expected.numpy()).max()), float(expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("model_port.verify"),
        description="Loads a Hugging Face directory with transformers and compares its logits with ours.",
    )
    parser.add_argument("--hf", required=True, metavar="HF_DIR", help="what transformers loads")
    parser.add_argument("--src", metavar="CKPT", help="what we load, such as RUN/checkpoints/N (default: the same)")
    parser.add_argument("--max-difference", type=float, default=MAX_DIFFERENCE, help=f"(default {MAX_DIFFERENCE})")
    add_debug_flag(parser)
    args = parser.parse_args()
    for path in filter(None, (args.hf, args.src)):
        if not Path(path).is_dir():
            raise ValueError(f"{path} is not a directory")
    with Meter(f"comparing {args.hf}"):
        difference, largest = largest_difference(args.hf, args.src)
    print(json.dumps({"largest_difference": difference, "largest_logit": largest}))
    if not difference <= args.max_difference:
        raise RuntimeError(f"the two sides differ by {difference:.3g}, more than {args.max_difference:.3g}")


if __name__ == "__main__":
    run_cli(main)
