"""The parts of `bench gpu_check` that sample: the embedded engine's sampler, and transformers' `generate`."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from model_port.config import ModelConfig, config_to_hf
from model_port.tiny import with_tokenizer_ids
from scripts.bench.gpu_sizes import Check, Row, failure, no_torch, torch_versions

STEP_TOKENS = 16  # tokens sampled before the host reads the results, as in a run


def sampler(check: Check) -> Iterator[Row]:
    """Times the embedded sampler with the 8B in bfloat16: prefill, and milliseconds per token of a batch."""
    import jax

    from model_port.config import LoraConfig
    from model_port.layers import Compute
    from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams
    from paravt_jax.learner.batch_shape import random_model
    from paravt_jax.plan.devices import device_of
    from paravt_jax.plan.workload import BF16_BYTES, adapter_params, cached_bytes, decoded_bytes
    from paravt_jax.sampling.local_copy import LocalCopy

    spec = device_of(jax.devices()[0].device_kind)
    num_prompt, num_new = check.sizes.sampled

    def steps_of(sampler: Sampler, num_rows: int, seed: int) -> list[float]:
        """Returns the seconds of each step that samples a batch; the first step also prefills."""
        prompts = random_prompts(check.full_model, num_rows, num_prompt, seed)
        for number, prompt in enumerate(prompts):
            sampler.submit(SamplerRequest(SamplerPrompt(prompt), SamplingParams(num_new, seed=number)))
        seconds = []
        while sampler.busy:
            start = time.perf_counter()
            sampler.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    def measured(num_rows: int, rank: int) -> Row:
        model = random_model(check.full_model, Compute("bfloat16"), LoraConfig(rank), dtype="bfloat16")
        model = LocalCopy(model, None, beside_update=True).of(model)  # as engines on several devices sample
        sampler = Sampler(
            model,
            max_rows=num_rows,
            max_context_tokens=check.sizes.context_tokens,
            cache_tokens=check.sizes.cache_tokens,
            tokens_per_step=STEP_TOKENS,
        )
        first, steps = (steps_of(sampler, num_rows, seed) for seed in range(2))
        step_s = statistics.median(steps[1:])
        context = num_rows * (num_prompt + num_new / 2)
        moved = decoded_bytes(check.full_model) + BF16_BYTES * adapter_params(rank, check.full_model)
        moved += context * cached_bytes(check.full_model)
        peak = None if spec is None or spec.memory_tb_per_s is None else 1e12 * spec.memory_tb_per_s
        return {
            "prompt_tokens": num_prompt,
            "first_batch_s": sum(first),
            "prefill_tokens_per_s": num_rows * num_prompt / (steps[0] - step_s),
            "token_ms": 1e3 * step_s / STEP_TOKENS,
            "tokens_per_s": num_rows * STEP_TOKENS / step_s,
            "of_memory_bandwidth": None if peak is None else moved / (step_s / STEP_TOKENS) / peak,
            "attention": str(sampler.kernel_check or "plain"),
        }

    for num_rows, rank in check.sizes.sampler_cases:
        row = {"rows": num_rows, "lora_rank": rank}
        gc.collect()  # frees the previous model and cache
        try:
            yield row | measured(num_rows, rank)
        except Exception as problem:
            yield row | failure(problem)


def random_prompts(model: ModelConfig, num_rows: int, num_tokens: int, seed: int) -> np.ndarray:
    """Returns prompts without frames and without a common prefix, so that nothing comes from the cache."""
    plain = min(model.image_token_id, model.vision_start_token_id)
    return np.random.default_rng(seed).integers(0, plain, (num_rows, num_tokens))


def generate_in_torch(check: Check) -> Iterator[Row]:
    """Times transformers' `generate` with the same prompts in one batch, weights in bfloat16."""
    if reason := no_torch(check):
        yield reason
        return
    import torch
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

    on = check.torch_device
    (check.folder / "config.json").write_text(json.dumps(config_to_hf(with_tokenizer_ids(check.full_model))))
    config = AutoConfig.from_pretrained(check.folder)
    with torch.device(on):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    num_prompt, num_new = check.sizes.sampled
    for num_rows in dict.fromkeys(rows for rows, _ in check.sizes.sampler_cases):
        ids = torch.from_numpy(random_prompts(check.full_model, num_rows, num_prompt, 1)).to(on)
        call = partial(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0)

        def sample(count: int, call: Callable[..., Any] = call) -> float:
            start = time.perf_counter()
            call(max_new_tokens=count, min_new_tokens=count).cpu()
            return time.perf_counter() - start

        try:
            sample(2)
            prefill_s, seconds = sample(1), sample(1 + num_new // 2)
        except Exception as problem:
            yield {"rows": num_rows} | failure(problem)
            continue
        token_s = (seconds - prefill_s) / (num_new // 2)
        yield {
            "rows": num_rows,
            "prefill_tokens_per_s": num_rows * num_prompt / prefill_s,
            "token_ms": 1e3 * token_s,
            "tokens_per_s": num_rows / token_s,
            "versions": torch_versions(),
        }
