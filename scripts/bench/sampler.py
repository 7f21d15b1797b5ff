"""Times the sampler: milliseconds per token at several context limits, next to transformers' generate.

Both sides sample the same number of tokens for the same prompts, in one batch, with the tiny model. Our requests share
no prefix, so that nothing comes from the cache. The first batch of each side compiles and is not counted.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import model_port
from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams
from model_port.tiny import make_tiny

PROMPT_TOKENS, NEW_TOKENS = 400, 128
FIRST_ID, LAST_ID = 300, 1500  # ordinary tokens of the tiny model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8, help="requests in a batch (default 8)")
    parser.add_argument(
        "--limits",
        type=int,
        nargs="+",
        default=[1024, 8192, 32768],
        metavar="TOKENS",
        help="max_context_tokens of the samplers (default 1024 8192 32768)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed turns per way; the median is reported (default 5)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("rows", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "model")
        model = model_port.load(Path(folder) / "model")
        ways = {
            f"ours, limit {limit:,}": _ours(Sampler(model, max_rows=args.rows, max_context_tokens=limit))
            for limit in args.limits
        }
        ways["transformers"] = _transformers(Path(folder) / "model")
        batches = [_prompts(args.rows, number) for number in range(args.repeats + 1)]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for batch in batches:  # turns alternate, so that a slow minute affects all
            for way, sample in ways.items():
                start_s = time.perf_counter()
                sample(batch)
                seconds[way].append(time.perf_counter() - start_s)
    rows = [
        {"way": way, "first_s": taken[0], "token_ms": 1000 * statistics.median(taken[1:]) / NEW_TOKENS}
        for way, taken in seconds.items()
    ]
    return {"num_rows": args.rows, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    lines = ["| way | first batch s | ms per token of the batch |", "|---|---|---|"]
    lines += [f"| {row['way']} | {row['first_s']:.1f} | {row['token_ms']:.2f} |" for row in result["rows"]]
    return "\n".join(lines)


def _prompts(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, (count, PROMPT_TOKENS))


def _ours(sampler: Sampler) -> Callable[[np.ndarray], object]:
    def sample(batch: np.ndarray) -> object:
        settings = [SamplingParams(NEW_TOKENS, seed=seed) for seed in range(len(batch))]
        return sampler.generate(map(SamplerRequest, map(SamplerPrompt, batch), settings))

    return sample


def _transformers(folder: Path) -> Callable[[np.ndarray], object]:
    import torch
    from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # shown even without a terminal
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(batch: np.ndarray) -> object:
        ids = torch.from_numpy(batch)
        settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS}
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=NEW_TOKENS, **settings)

    return sample
