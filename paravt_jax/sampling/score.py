"""Computes the learner's log-probs of dialogues for the parity gate, and runs the gate's command.

python -m rollout.check --model CKPT --url URL [--url URL …]
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import model_port
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.download import source_directory
from model_port.inputs import RowSequence, TextBatch, Tokens, VisionBatch, bucket, pack_text, pack_vision
from model_port.layers import Compute
from model_port.loading import files_directory
from model_port.model import VLModel
from model_port.processing import VisionContract, expand_placeholders, settled_size
from model_port.sharding import on_mesh, replicate
from model_port.terminal import say
from paravt_jax.run.output_file import OutputFile
from paravt_jax.sampling.frames import frame_of
from rollout.chat import Chat
from rollout.check import check
from rollout.engine.discovery import check_url
from rollout.parity import NOISE_FACTOR, Scored, ScoreRequest, table

TOKEN_BUCKET = 1024  # coarse, because compiling another program costs more than padding
PATCH_BUCKET = 256
FRAME_BUCKET = 8
BFLOAT16 = jnp.finfo(jnp.bfloat16)


class LearnerScorer:
    """Scores dialogues, one per row, in float32 and in bfloat16; the difference is the bfloat16 noise.

    Both use the weights that servers get. If float32 masters are published in bfloat16, this takes a copy of half their
    size, which is less than an update needs. Weights stored in bfloat16 are used directly.
    """

    def __init__(self, model: VLModel, contract: VisionContract, mesh: Mesh | None = None):
        self._config, self._contract, self._mesh = model.config, contract, mesh
        self._params = _as_published(model)
        # Kernels for long rows may round more; these rows are short enough for full score matrices.
        self._exact = _program(model, Compute("float32", attention="blocked"))
        self._rounded = _program(model, replace(model.compute, dtype="bfloat16"))

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [settled_size(*size_px, self._contract) for size_px in sizes_px]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        return [self._score_request(request) for request in requests]

    def _score_request(self, request: ScoreRequest) -> Scored:
        frames = [frame_of(picture, self._contract) for picture in request.pictures]
        counts = [len(frame.patches) // self._config.vision.merge_unit for frame in frames]
        ids = expand_placeholders(request.ids.astype(np.int64), counts, self._config.image_token_id)
        vision, first_rows = None, []
        if frames:
            row_patches = bucket(max(len(frame.patches) for frame in frames), PATCH_BUCKET)
            vision, first_rows = pack_vision(
                frames, self._config.vision, row_patches, bucket(len(frames), FRAME_BUCKET)
            )
        row = RowSequence(Tokens(ids, tuple(range(len(frames)))))
        text = pack_text([[row]], frames, first_rows, self._config, bucket(len(ids), TOKEN_BUCKET))
        inputs = (self._params, text, vision, np.float32(request.temperature))
        with on_mesh(self._mesh):
            with jax.default_matmul_precision("highest"):  # accelerators' default precision is lower
                exact = self._exact(*inputs)
            logps = (np.asarray(logp)[: len(ids)] for logp in (exact, self._rounded(*inputs)))
        return Scored(ids.astype(np.int32), *logps)


def _as_published(model: VLModel) -> nnx.State:
    """Rounds the parameters as for publishing; with adapters they are already rounded.

    An adapter's contribution is not rounded: servers get the rounded sum, and this rounding counts as their noise.
    """
    params, dtype = nnx.state(model), model.compute.dtype
    return params if model.lora.rank else jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _program(model: VLModel, compute: Compute) -> Callable[..., Float[Array, " T"]]:
    copy = nnx.merge(*nnx.split(model))
    copy.compute = compute
    return jax.jit(partial(_score, nnx.split(copy)[0]))


def _score(
    graphdef: nnx.GraphDef[VLModel],
    params: nnx.State,
    text: TextBatch,
    vision: VisionBatch | None,
    temperature: Float[Array, ""],
) -> Float[Array, " T"]:
    """Log-probs of a row: index t has the log-prob of token t, and the first token has 0."""
    model = nnx.merge(graphdef, params)
    logits = model(text, vision)[0].astype(jnp.float32)
    if model.compute.dtype == "bfloat16":  # servers in bfloat16 round their logits, unlike the learner
        logits = jax.lax.reduce_precision(logits, BFLOAT16.nexp, BFLOAT16.nmant)
    logits = logits / temperature
    following: Int[Array, " T"] = jnp.asarray(text.tokens)[0, 1:]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=-1), following[:, None], axis=1)[:, 0]
    return replicate(jnp.concatenate([jnp.zeros(1), chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("rollout.check"),
        description="Compares the log-probs of SGLang servers with the learner's, and fails if they differ too much.",
    )
    parser.add_argument("--model", required=True, help="the learner's model: a Hugging Face directory or checkpoint")
    parser.add_argument("--url", required=True, action="append", help="a server's URL; repeat it for more servers")
    parser.add_argument("--tokenizer", help="directory with tokenizer and chat template (default: the model)")
    parser.add_argument(
        "--dtype", choices=[*NOISE_FACTOR], default="float32", help="the servers' compute type (default float32)"
    )
    parser.add_argument("--episodes", type=int, default=12, help="episodes per server, at least (default 12)")
    parser.add_argument("--json", metavar="OUT", help="also write the results to this file")
    parser.add_argument("--force", action="store_true", help="replace OUT even if this command did not write it")
    add_debug_flag(parser)
    args = parser.parse_args()
    read = [args.model, args.tokenizer or ""]
    result = args.json and OutputFile(args.json, "gate --json", inputs=read, force=args.force)
    urls = [url.rstrip("/") for url in args.url]
    for url in urls:
        check_url("--url", url)
    if args.episodes < 1:
        raise ValueError(f"--episodes {args.episodes} must be at least 1")
    source = source_directory(args.model, "--model DIR")
    files = files_directory(source)
    chat = Chat.from_hf(args.tokenizer or files)
    scorer = LearnerScorer(model_port.load(source, args.dtype), VisionContract.from_hf(files))
    parities = asyncio.run(check(urls, scorer, chat, num_episodes=args.episodes, on_progress=say))
    print(table(parities))
    if result:
        result.write_json([parity.to_record() for parity in parities])
    problems = [f"{parity.url}: {problem}" for parity in parities for problem in parity.problems]
    if problems:
        raise RuntimeError("the servers and the learner disagree: " + "; ".join(problems))


if __name__ == "__main__":
    run_cli(main)
