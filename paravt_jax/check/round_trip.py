"""Stage `round-trip`: exports the step's weights, samples from them greedily, and passes the parity gate."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import jax

import model_port
from model_port.export import export
from model_port.inputs import split_frames
from model_port.layout import newest_checkpoint
from model_port.reference import ProcessedPrompt, Reference, missing_torch
from model_port.sampler import Sampler, SamplerPrompt, SamplerRequest, SamplingParams
from paravt_jax.check.prompts import overview_of, processed
from paravt_jax.check.report import NO_TORCH, Measured
from paravt_jax.check.step import RUN
from paravt_jax.check.target import Target
from paravt_jax.config import computed_on
from paravt_jax.run.compiles import set_up_compilation
from paravt_jax.sampling.score import LearnerScorer
from rollout.check import DEADLINE_S, check
from rollout.engine.http import HttpClient
from rollout.engine.labels import Label, Labels
from rollout.engine.protocol import Sampling
from rollout.engine.settings import SGLangSettings
from rollout.engine.sglang import generate_body
from rollout.prompter import Overview

NUM_IDS, NUM_FRAMES = 16, 4


def round_trip(target: Target) -> Iterator[Measured]:
    set_up_compilation()
    path = target.file("trained")
    dtype = computed_on(target.run_config, jax.default_backend()).model.dtype
    source = newest_checkpoint(target.file(RUN))  # of the stage `step`, if it ran
    if source is not None:
        yield Measured("export of the step's weights", str(export(source, path, dtype, force=True).dtype))
    model_dir = target.hf_dir if source is None else path
    overview = overview_of(target, NUM_FRAMES)
    prompt = processed(target, overview)
    ours = our_ids(model_dir, prompt)
    if missing_torch():
        yield Measured("greedy ids = transformers'", skipped=NO_TORCH)
    else:
        with Reference(model_dir) as reference:
            theirs = reference.greedy_ids(prompt, NUM_IDS)
        yield ids_line("transformers'", ours, theirs)
    if not target.server:
        yield Measured("parity gate", skipped="no --server URL")
    elif reason := other_weights(asyncio.run(server_label(target.server)), source):
        yield Measured("parity gate", skipped=reason)
    else:
        yield ids_line("SGLang's", ours, asyncio.run(server_ids(target.server, overview)))
        scorer = LearnerScorer(model_port.load(model_dir, dtype), target.contract)
        (parity,) = asyncio.run(check([target.server], scorer, target.chat))
        compared = sum(difference.num_tokens for difference in parity.differences.values())
        yield Measured("parity gate", f"{compared} tokens", problem="; ".join(parity.problems))


def our_ids(model_dir: Path, prompt: ProcessedPrompt) -> list[int]:
    frames = tuple(split_frames(prompt.pixels, prompt.grids))
    length = len(prompt.ids) + NUM_IDS
    sampler = Sampler(model_port.load(model_dir), max_rows=1, max_context_tokens=length)
    request = SamplerRequest(SamplerPrompt(prompt.ids, frames), SamplingParams(NUM_IDS, temperature=0.0))
    with jax.default_matmul_precision("highest"):
        return sampler.generate([request])[0].ids


async def server_label(url: str) -> Label:
    async with HttpClient() as client:
        return await Labels(client, SGLangSettings(control_deadline_s=DEADLINE_S)).fetch(url)


def other_weights(label: Label, source: Path | None) -> str:
    """The reason why a server has other weights than the model or the checkpoint `source`; empty if equal."""
    if source is None and label.run:
        return f"the server has weights of the run {label.run}, not the model's: start it again"
    if source is not None and (not label.run or label.version != int(source.name)):
        return "the server did not get the step's weights: compare the model's with --stage round-trip alone"
    return ""


async def server_ids(url: str, overview: Overview) -> list[int]:
    body = generate_body(overview.ids, overview.pictures, Sampling(NUM_IDS, temperature=0.0))
    async with HttpClient() as client:
        return (await client.post(f"{url}/generate", body, DEADLINE_S))["output_ids"]


def ids_line(side: str, ours: list[int], theirs: list[int]) -> Measured:
    same = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    problem = "" if ours == theirs else f"id {same + 1} differs"
    return Measured(f"{NUM_IDS} greedy ids = {side}", f"{same} of {len(ours)}", problem=problem)
