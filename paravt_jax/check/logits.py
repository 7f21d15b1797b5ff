"""Stage `logits`: compares our logits with transformers', with one model in memory at a time."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

import model_port
from model_port.attention import Form
from model_port.attention.choice import KERNEL_PLATFORMS
from model_port.layers import ComputeDtype
from model_port.loading import load_computing
from model_port.output_dir import GIB
from model_port.reference import ProcessedPrompt, Reference, missing_torch
from model_port.sharding import platform
from model_port.verify import MAX_RELATIVE, TIMES_THEIRS, LogitsDifference
from model_port.weights import num_params, stored_dtype
from paravt_jax.check.prompts import prompts_of
from paravt_jax.check.report import NO_TORCH, Facts, Measured
from paravt_jax.check.target import Target
from paravt_jax.run.compiles import set_up_compilation

MAX_ROWS = 256  # compared tokens; the logits of a token take half a megabyte


def logits(target: Target) -> Iterator[Measured | Facts]:
    set_up_compilation()
    yield {"planned_gib": jnp.dtype(stored_dtype(target.hf_dir)).itemsize * num_params(target.config) / GIB}
    if missing_torch():
        yield Measured("ours = transformers'", skipped=NO_TORCH)
        return
    prompts = prompts_of(target)
    exact = reference_rows(target, prompts, "float32")
    for prompt, form, rows in our_rows(target, prompts, "float32"):
        difference = LogitsDifference.between(rows, exact[prompt])
        same = round(difference.top1_agreement * len(rows))
        case = f"{prompt}, {form}, float32: relative error (top-1 {same} of {len(rows)}, KL {difference.kl:.1e})"
        yield Measured(case, difference.relative_error, MAX_RELATIVE)
    del prompts["text"]
    rounded = reference_rows(target, prompts, "bfloat16")
    for prompt, _, rows in our_rows(target, prompts, "bfloat16"):
        errors = [LogitsDifference.between(side, exact[prompt]).relative_error for side in (rows, rounded[prompt])]
        case = f"{prompt}, bfloat16 error over transformers' own of {errors[1]:.1e}"
        yield Measured(case, errors[0] / errors[1], float(TIMES_THEIRS))


def forms() -> list[Form]:
    """The forms of attention that this backend has."""
    return [
        form
        for form in get_args(Form)
        if not form.startswith("auto") and (form != "kernel" or platform() in KERNEL_PLATFORMS)
    ]


def compared(prompt: ProcessedPrompt) -> np.ndarray:
    """The tokens to compare: evenly spaced, with the last one."""
    step = -(-len(prompt.ids) // MAX_ROWS)
    return np.arange(len(prompt.ids))[::-step][::-1].copy()


def our_rows(
    target: Target, prompts: Mapping[str, ProcessedPrompt], dtype: ComputeDtype
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields logits by prompt and form of attention; every form only for the video prompt in float32."""
    model = load_computing(target.hf_dir, dtype)
    for name, prompt in prompts.items():
        in_forms = forms() if dtype == "float32" and "video" in name else ["auto"]
        for form in in_forms:
            model.compute = replace(model.compute, attention=form)
            with jax.default_matmul_precision("highest"):  # by default, accelerators round float32 inputs
                rows = model_port.logits(model, prompt.ids, **prompt.media, tokens=compared(prompt))
            yield name, form, rows
    del model
    gc.collect()  # frees the model before the next one is loaded


def reference_rows(target: Target, prompts: Mapping[str, ProcessedPrompt], dtype: str) -> dict[str, np.ndarray]:
    with Reference(target.hf_dir, dtype) as model:
        return {name: model.logits(prompt, compared(prompt)) for name, prompt in prompts.items()}
