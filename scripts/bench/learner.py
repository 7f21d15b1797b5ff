"""The policy's passes and the learner's update, compared with transformers in torch on the same weights and inputs.

Passes are forward and forward+backward, in one process. Batches are one sequence, with the same tokens on both sides,
and unequal sequences, which transformers pads and we pack into one row. Both sides compute the mean cross-entropy of
the next token, and their losses must agree before the measurement. Turns alternate, so that a slow minute of the
machine affects both. `ways` has the update.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from model_port.config import ModelConfig, config_to_hf
from model_port.inputs import RowSequence, Tokens, bucket, pack_text, pack_vision
from model_port.weights import num_params
from paravt_jax.bench.models import MODELS
from scripts.bench.update import FRAME_GRID, EpisodeGroup, Example, random_example
from scripts.bench.ways import compare_ways

WORKLOADS = {
    "one sequence": [(8, 220)],
    "unequal batch": [(8, 220), (4, 120), (2, 60), (0, 90)],
}  # (frames, text tokens)
# For an update: a prompt eight times as long as a response, most of it small frames.
PROMPT, RESPONSE, NUM_EPISODES = (64, 104), (0, 96), 8
SMALL_GRID = (6, 6)
TOKEN_BUCKET = 32
DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=[*MODELS, "all"], default="all", help="size, with random weights (default all)"
    )
    parser.add_argument("--dtype", choices=[*DTYPES, "all"], default="all", help="dtype of activations (default all)")
    parser.add_argument(
        "--workload",
        choices=["passes", "update", "all"],
        default="all",
        help="forward and backward passes, or a whole update (default all)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed turns per side; the median is reported (default 5)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    _with_huge_pages()
    passes, updates = [], []
    for model in MODELS if args.model == "all" else [args.model]:
        config = MODELS[model]()
        size = f"{model} ({num_params(config) / 1e6:.0f}M)"
        with tempfile.TemporaryDirectory() as folder:
            reference = _make_reference(config, Path(folder))
            for dtype in DTYPES if args.dtype == "all" else [args.dtype]:
                case = {"model": size, "dtype": dtype}
                for workload, shapes in WORKLOADS.items() if args.workload != "update" else ():
                    examples = [random_example(config, seed, *shape, FRAME_GRID) for seed, shape in enumerate(shapes)]
                    for mode, row in _compare(reference, Path(folder), dtype, examples, args.repeats).items():
                        passes.append({**case, "workload": workload, "mode": mode, **row})
                        print(_pass_line(passes[-1]), file=sys.stderr, flush=True)
                if args.workload != "passes":
                    prompt, *responses = (
                        random_example(config, seed, *(RESPONSE if seed else PROMPT), SMALL_GRID)
                        for seed in range(NUM_EPISODES + 1)
                    )
                    group = EpisodeGroup(config, prompt.ids, prompt.frames, [response.ids for response in responses])
                    updates += [{**case, **row} for row in compare_ways(Path(folder), dtype, group, args.repeats)]
    return {"rows": passes, "updates": updates, "threads": os.cpu_count()}


def table(result: dict[str, Any]) -> str:
    """Formats the result as Markdown tables."""
    passes = ["| model | dtype | workload | pass | torch s | jax s | torch / jax | jax compile s |", "|---" * 8 + "|"]
    updates = ["| model | dtype | one update | s | s | times faster | peak MiB | peak MiB |", "|---" * 8 + "|"]
    parts = [
        [*head, *map(line, result[name])]
        for name, head, line in (("rows", passes, _pass_line), ("updates", updates, _update_line))
        if result[name]
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _pass_line(row: dict[str, Any]) -> str:
    ratio = row["torch_s"] / row["jax_s"]
    return (
        f"| {row['model']} | {row['dtype']} | {row['workload']} | {row['mode']} "
        f"| {row['torch_s']:.3f} | {row['jax_s']:.3f} | {ratio:.2f} | {row['compile_s']:.1f} |"
    )


def _update_line(row: dict[str, Any]) -> str:
    slow, fast = (row[side][row["measure"]] for side in ("slow", "fast"))
    peaks = [f"{row[side]['peak_mib']:.0f}" if row["measure"] == "update_s" else "" for side in ("slow", "fast")]
    return (
        f"| {row['model']} | {row['dtype']} | {row['compared']} | {slow:.2f} | {fast:.2f} | {slow / fast:.2f} "
        f"| {peaks[0]} | {peaks[1]} |"
    )


def _with_huge_pages() -> None:
    """Restarts with huge pages in glibc; without them JAX spends a third of a step in page faults."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _make_reference(config: ModelConfig, folder: Path) -> Any:
    try:
        import torch
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration
    except ImportError as missing:
        raise RuntimeError(
            f"the comparison needs torch and transformers ({missing}): run `bash scripts/setup.sh dev`"
        ) from None

    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config_to_hf(config, "float32")))
    model.save_pretrained(folder)
    return model


def _compare(
    reference: Any, folder: Path, dtype: str, examples: list[Example], repeats: int
) -> dict[str, dict[str, float]]:
    theirs, ours, compile_s = _torch_side(reference, dtype, examples), *_jax_side(folder, dtype, examples)
    difference = abs(theirs["forward"]() - ours["forward"]())
    if not difference <= (1e-3 if dtype == "float32" else 5e-2):  # also if a loss is NaN
        raise RuntimeError(
            f"the two sides disagree on the loss by {difference:.2g}; they do not compute the same thing"
        )
    rows = {}
    for mode in ours:
        seconds: dict[str, list[float]] = {"torch_s": [], "jax_s": []}
        for turn in range(repeats + 1):
            for side, call in (("torch_s", theirs[mode]), ("jax_s", ours[mode])):
                start = time.perf_counter()
                call()
                if turn:  # the first turn warms up
                    seconds[side].append(time.perf_counter() - start)
        rows[mode] = {side: statistics.median(values) for side, values in seconds.items()} | {
            "compile_s": compile_s[mode]
        }
    return rows


def _torch_side(reference: Any, dtype: str, examples: list[Example]) -> dict[str, Callable[[], float]]:
    import torch

    model = reference.to(getattr(torch, dtype)).train()  # no dropout anywhere in this architecture
    longest = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.from_numpy(example.ids)
        mask[row, : len(example.ids)] = 1
    frames = [frame for example in examples for frame in example.frames]
    batch = dict(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        labels=ids.masked_fill(mask == 0, -100),
        pixel_values=torch.from_numpy(np.concatenate([frame.patches for frame in frames])),
        image_grid_thw=torch.tensor([[1, *frame.grid] for frame in frames]),
        use_cache=False,
    )

    def forward() -> float:
        with torch.no_grad():
            return model(**batch).loss.item()

    def forward_backward() -> float:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss.item()

    return {"forward": forward, "forward+backward": forward_backward}


def _jax_side(
    folder: Path, dtype: str, examples: list[Example]
) -> tuple[dict[str, Callable[[], float]], dict[str, float]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import model_port

    model = model_port.load(folder, dtype)
    frames, row = [], []
    for example in examples:
        first = len(frames)
        frames += example.frames
        row.append(RowSequence(Tokens(example.ids, tuple(range(first, len(frames))))))
    vision, first_rows = pack_vision(frames, model.config.vision, FRAME_GRID[0] * FRAME_GRID[1])
    num_tokens = bucket(sum(len(example.ids) for example in examples), TOKEN_BUCKET)
    text = pack_text([row], frames, first_rows, model.config, num_tokens)
    targets = np.roll(text.tokens, -1, axis=1)
    counted = (text.segment_ids != 0) & (np.roll(text.segment_ids, -1, axis=1) == text.segment_ids)
    counted[:, -1] = False
    graphdef, params = nnx.split(model)
    batch = jax.device_put((text, vision, targets, counted))

    def loss(params: nnx.State, batch: Any) -> jax.Array:
        text, vision, targets, counted = batch
        logits = nnx.merge(graphdef, params)(text, vision)
        logp = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        return -jnp.sum(jnp.where(counted, logp, 0)) / jnp.sum(counted)

    calls, compile_s = {}, {}
    for mode, function in (("forward", loss), ("forward+backward", jax.value_and_grad(loss))):
        start = time.perf_counter()
        compiled = jax.jit(function).lower(params, batch).compile()
        compile_s[mode] = time.perf_counter() - start
        calls[mode] = lambda compiled=compiled: float(
            jax.tree.leaves(jax.block_until_ready(compiled(params, batch)))[0]
        )
    return calls, compile_s
