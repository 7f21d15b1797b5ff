"""The parts of `bench gpu_check`; each runs in its own process.

    python -m scripts.bench.gpu_parts PART FOLDER [--tiny]

A part prints each row as a JSON object as soon as it is measured, so that a timeout keeps the finished rows. It needs
only jax and flax, and torch with transformers for the comparison.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from model_port.config import ModelConfig, preset
from model_port.tiny import make_tiny, with_tokenizer_ids
from model_port.weights import num_params
from scripts.bench.gpu_sampling import generate_in_torch, sampler
from scripts.bench.gpu_sizes import Check, Row, failure, no_torch, timed, torch_versions
from scripts.bench.update import FRAME_GRID, EpisodeGroup, Update, our_update, random_example, torch_update

GIB = 2**30
STATE_BYTES = 20  # per float32 parameter: weight, two moments, gradients of the step and of a batch
STATE_FRAC = 0.8  # fraction of the device's memory for this state; activations get the rest
DEPTHS = (36, 24, 18, 12, 9, 6, 3)  # numbers of layers to try; the 8B has 36
FP32_BOUND, BF16_BOUND = 1e-5, 2.0
FRAME_PATCHES = 196  # patches per frame in the recipe
MODEL_DIR = "model"
ORACLE = "xla"
SQUARE_FORMS = (ORACLE, "blocked")  # these store the scores of all pairs, which may not fit for long rows
SLOW_TO_COMPILE = ("blocked",)  # compiles slowly on a GPU; runs last, so that a timeout keeps the other rows


def device(check: Check) -> Iterator[Row]:
    """Reports the accelerator and versions."""
    import jax

    first = jax.devices()[0]
    memory = (first.memory_stats() or {}).get("bytes_limit")
    yield {
        "device": first.device_kind,
        "platform": first.platform,
        "usable_gib": None if memory is None else round(memory / GIB, 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def attention(check: Check) -> Iterator[Row]:
    """Compares every form with the oracle: float32 at full precision, bfloat16 relative to the oracle's error."""
    import jax

    num_tokens = check.sizes.parity_tokens
    layout = packed_layout(num_tokens)

    def results(form: Any, head_dim: int, dtype: str) -> tuple[Any, ...]:
        inputs = [x.astype(dtype) for x in attention_inputs(num_tokens, (8, 2), head_dim)]
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            return with_gradients(form)(*inputs, layout)

    with ThreadPoolExecutor() as pool:  # compiles all programs at once
        done = {
            (form, head_dim, dtype): pool.submit(results, form, head_dim, dtype)
            for form in {ORACLE, *forms()}
            if not no_kernel(form)
            for head_dim in check.sizes.head_dims
            for dtype in ("float32", "bfloat16")
        }
        for form, head_dim in product(forms(), check.sizes.head_dims):
            row: Row = {"form": form, "head_dim": head_dim, "tokens": num_tokens}
            if missing := no_kernel(form):
                yield row | missing
                continue
            try:
                long, short, exact, oracle = (
                    done[each, head_dim, dtype].result() for each in (form, ORACLE) for dtype in ("float32", "bfloat16")
                )
            except Exception as problem:
                yield row | failure(problem)
                continue
            halves = np.divide(errors(short, exact), errors(oracle, exact))
            row |= {
                "fp32_error": float(np.max(errors(long, exact))),  # NaN if one is
                "bf16_error_of_oracles": float(halves.max()),
            }
            within = row["fp32_error"] <= FP32_BOUND and row["bf16_error_of_oracles"] <= BF16_BOUND
            yield row if within else row | {"problem": f"above {FP32_BOUND}, or {BF16_BOUND} x the oracle's error"}


def attention_time(check: Check) -> Iterator[Row]:
    """Times a layer's attention, forward and backward, in bfloat16 on a long packed row with branches."""
    import jax
    import jax.numpy as jnp

    sizes = check.sizes
    layout = packed_layout(sizes.attention_tokens)
    inputs = attention_inputs(sizes.attention_tokens, sizes.attention_heads, sizes.head_dims[0])
    short = [x.astype(jnp.bfloat16) for x in inputs]
    for form in forms():
        if missing := no_kernel(form):
            yield {"form": form} | missing
            continue
        try:
            call = partial(with_gradients(form), *short, layout)
            seconds = timed(lambda call=call: jax.block_until_ready(call()))
        except Exception as problem:
            yield {"form": form} | failure(problem, may_lack_room=form in SQUARE_FORMS)
            continue
        yield {"form": form, "tokens": sizes.attention_tokens, "forward_backward_ms": 1e3 * seconds}


def forms() -> list[Any]:
    from model_port.attention import Form

    plain = [form for form in get_args(Form) if not form.startswith("auto")]
    return sorted(plain, key=SLOW_TO_COMPILE.__contains__)


def no_kernel(form: Any) -> Row:
    """Returns a note if the form has no kernel on this device, for example on a CPU."""
    from model_port.attention.choice import KERNEL_PLATFORMS
    from model_port.sharding import platform

    missing = form == "kernel" and platform() not in KERNEL_PLATFORMS
    return {"note": f"no kernel for {platform()}"} if missing else {}


def packed_layout(num_tokens: int) -> Any:
    """Returns a row's layout: a trunk in half of the row with two branches, another segment, and padding."""
    import jax.numpy as jnp

    from model_port.attention import Layout

    eighth = num_tokens // 8
    segments = [1] * (6 * eighth) + [2] * eighth + [0] * (num_tokens - 7 * eighth)
    branches = [0] * (4 * eighth) + [1] * eighth + [2] * eighth + [0] * (num_tokens - 6 * eighth)
    return Layout(jnp.array([segments]), jnp.array([branches]), jnp.arange(num_tokens)[None])


def attention_inputs(num_tokens: int, heads: tuple[int, int], head_dim: int) -> list[Any]:
    """Returns random queries, keys and values, and a weight per output."""
    import jax.numpy as jnp

    random = np.random.default_rng(3)
    num_heads, num_kv_heads = heads
    shapes = [(1, num_tokens, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def with_gradients(form: Any) -> Callable[..., tuple[Any, ...]]:
    """Wraps a form to return its output without padding tokens, and the gradients of the weighted sum."""
    import jax
    import jax.numpy as jnp

    from model_port.attention import attention_of

    def objective(q: Any, k: Any, v: Any, weight: Any, layout: Any) -> tuple[Any, Any]:
        valid = (layout.segment_ids != 0)[..., None, None]
        out = jnp.where(valid, attention_of(form)(q, k, v, layout, True), 0)
        return jnp.sum(out.astype(jnp.float32) * weight.astype(jnp.float32)), out

    gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True))

    def call(q: Any, k: Any, v: Any, weight: Any, layout: Any) -> tuple[Any, ...]:
        (_, out), grads = gradients(q, k, v, weight, layout)
        return out, *grads

    return call


def errors(values: tuple[Any, ...], exact: tuple[Any, ...]) -> list[float]:
    """Returns the largest errors of output and gradients, each relative to its largest value."""
    pairs = [[np.asarray(value, np.float32) for value in pair] for pair in zip(values, exact, strict=True)]
    return [float(np.abs(value - reference).max() / np.abs(reference).max()) for value, reference in pairs]


def update(check: Check) -> Iterator[Row]:
    """Times the learner's update at the 8B's width: float32 weights, moments and gradients, bfloat16 activations."""
    import jax

    from model_port.attention import allow_kernel
    from model_port.layers import Compute
    from paravt_jax.learner.batch_shape import make_batch, random_model
    from paravt_jax.learner.learner import Learner, StepPart
    from paravt_jax.learner.packing import BatchShape
    from paravt_jax.learner.settings import LossConfig, OptimConfig
    from paravt_jax.learner.variants import StepCounts
    from paravt_jax.plan.devices import peak_flops
    from paravt_jax.run.process import peak_gib

    limit = float((jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf))
    full_model = check.full_model
    model = at_depth(full_model, limit)
    policy = random_model(model, Compute("bfloat16", allow_kernel("auto"), remat="full"))  # as runs compute
    learner = Learner(policy, OptimConfig(), LossConfig(kl_coef=0.0), temperature=0.7)
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind)
    unrated = {"note": f"no MFU: the peak FLOP/s of {kind} are unknown"} if peak is None else {}
    for num_tokens in check.sizes.update_tokens:
        num_scored = num_tokens // 8
        shape = BatchShape(1, num_tokens, FRAME_PATCHES, 1, num_scored, check.sizes.frames)
        part = StepPart([make_batch(shape, model)], StepCounts(1.0, 1.0, 1.0))
        try:
            update_s = timed(lambda part=part: learner.update([part], 1))
        except Exception as problem:
            longer = num_tokens > min(check.sizes.update_tokens)
            yield {"layers": model.text.num_layers, "tokens": num_tokens} | failure(problem, may_lack_room=longer)
            continue
        flops, full_flops = (model_flops(config, num_tokens, num_scored) for config in (model, full_model))
        yield {
            "layers": model.text.num_layers,
            "tokens": num_tokens,
            "update_s": update_s,
            "tokens_per_s": num_tokens / update_s,
            "tflops": flops / update_s / 1e12,
            "mfu": None if peak is None else flops / update_s / peak,
            f"tokens_per_s_of_{full_model.text.num_layers}_layers": num_tokens / update_s * flops / full_flops,
            "peak_gib_so_far": peak_gib(jax.devices()[:1]) or 0.0,
            **unrated,
        }


def at_depth(model: ModelConfig, memory_bytes: float) -> ModelConfig:
    """Returns the deepest model that leaves room for activations."""
    depths = [depth for depth in DEPTHS if depth < model.text.num_layers]
    for depth in (model.text.num_layers, *depths):
        shallow = replace(model, text=replace(model.text, num_layers=depth))
        if STATE_BYTES * num_params(shallow) <= STATE_FRAC * memory_bytes:
            return shallow
    raise RuntimeError(f"{memory_bytes / GIB:.0f} GiB are too little to train even {DEPTHS[-1]} layers of the 8B")


def model_flops(model: ModelConfig, num_tokens: int, num_scored: int) -> float:
    """Counts 6·N FLOPs per token (the head: per scored token) plus causal attention, without recomputation and frames.

    Full attention takes 12·heads·head_dim FLOPs per pair and layer, forward and backward; causal attention takes half.
    """
    from paravt_jax.plan.workload import layer_params

    text = model.text
    head, pairs = text.vocab_size * text.width, num_tokens**2 / 2
    products = 6.0 * (layer_params(model) * num_tokens + head * num_scored)
    return products + 12.0 * text.num_layers * text.num_heads * text.head_dim * pairs


def weights(check: Check) -> Iterator[Row]:
    """Writes the model of the next parts as Hugging Face files."""
    start = time.perf_counter()
    make_tiny(check.folder / MODEL_DIR, config=check.group_model, dtype="bfloat16")
    yield {
        "params": num_params(check.group_model),
        "layers": check.group_model.text.num_layers,
        "seconds": time.perf_counter() - start,
    }


def update_here(way: str, check: Check) -> Iterator[Row]:
    """Times one update of a group; its prompt is computed once (`branches`) or per episode (`rows`)."""
    yield _one_way(way, check, our_update)


def update_in_torch(check: Check) -> Iterator[Row]:
    """Times the same update in torch: float32 weights under autocast, a padded row per episode."""
    if reason := no_torch(check):
        yield {"way": "torch"} | reason
        return
    row = _one_way("torch", check, partial(torch_update, device=check.torch_device))
    yield row | {"versions": torch_versions()}


def _one_way(way: str, check: Check, make: Callable[..., Update]) -> Row:
    sizes, config = check.sizes, with_tokenizer_ids(check.group_model)
    prompt = random_example(config, 0, *sizes.prompt, FRAME_GRID)
    seeds = range(1, sizes.num_episodes + 1)
    responses = [random_example(config, seed, 0, sizes.response_tokens, FRAME_GRID).ids for seed in seeds]
    group = EpisodeGroup(config, prompt.ids, prompt.frames, responses)
    work = make(way, check.folder / MODEL_DIR, "bfloat16", group).run
    metrics = work()  # compiles; its metrics are compared between the ways
    return {
        "way": way,
        "episodes": sizes.num_episodes,
        "prompt_tokens": len(prompt.ids),
        "response_tokens": sizes.response_tokens,
        "loss": metrics["loss/total"],
        "grad_norm": metrics["optim/grad_norm"],
        "update_s": timed(work, warm=True),
    }


def publish(check: Check) -> Iterator[Row]:
    """Times writing weights from the device to files in memory, as a publish does; no servers load them."""
    from model_port.layers import Compute
    from paravt_jax.learner.batch_shape import random_model
    from paravt_jax.sampling.weights import ModelWeights

    sent = ModelWeights(random_model(check.group_model, Compute("bfloat16")), np.dtype("bfloat16"))
    seconds = timed(lambda: sent.write(check.folder))
    gib = sent.num_bytes / GIB
    gib_of_8b = num_params(preset("8b")) * sent.dtype.itemsize / GIB
    yield {"gib": gib, "write_s": seconds, "gib_per_s": gib / seconds, "write_s_of_8b": seconds / gib * gib_of_8b}


PARTS: dict[str, Callable[[Check], Iterator[Row]]] = {
    "device": device,
    "attention": attention,
    "attention_time": attention_time,
    "sampler": sampler,
    "generate": generate_in_torch,
    "update": update,
    "weights": weights,
    "branches": partial(update_here, "branches"),
    "rows": partial(update_here, "rows"),
    "torch": update_in_torch,
    "publish": publish,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for row in PARTS[args.part](Check(args.tiny, args.folder)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
