"""The learner's own log-probs of dialogues that an engine served, for the parity gate.

    python -m paravt_jax.sampling.score --model CKPT [--dtype float32]

As a command it answers JSON lines, which is how `python -m rollout.check` asks it: that package never imports jax. A
trainer uses `LearnerScorer` on the model it trains.
"""

import argparse
import base64
import io
import json
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from PIL import Image

import model_port
from model_port.cli import add_debug_flag, run_cli
from model_port.inputs import RowSequence, TextBatch, Tokens, VisionBatch, bucket, pack_text, pack_vision
from model_port.layout import hf_files_of
from model_port.model import Qwen3VL
from model_port.processing import VisionContract, expand_placeholders, settled_size
from model_port.sharding import everywhere, on_mesh
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.wire import Wire
from paravt_jax.sampling.frames import frame_of
from rollout.check import Scored, ScoreRequest
from rollout.picture import Picture

TOKEN_BUCKET = 256  # few compilations, and short dialogues stay cheap
PATCH_BUCKET = 64
FRAME_BUCKET = 8
SCORE_WIRE = Wire((ScoreRequest, Picture))


class LearnerScorer:
    """Scores dialogues one by one, each alone in its row."""

    def __init__(self, model: Qwen3VL, contract: VisionContract, mesh: Mesh | None = None):
        self._config, self._contract, self._mesh = model.config, contract, mesh
        graphdef, self._params = nnx.split(model)
        self._score = jax.jit(partial(_score, graphdef))

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [settled_size(*size_px, self._contract) for size_px in sizes_px]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        return [self._score_one(request) for request in requests]

    def _score_one(self, request: ScoreRequest) -> Scored:
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
        with on_mesh(self._mesh):
            logp = np.asarray(self._score(self._params, text, vision, np.float32(request.temperature)))
        return Scored(ids.astype(np.int32), logp[: len(ids)])


class SharedScorer(LearnerScorer):
    """The same on the devices of several hosts: who asks tells the others, who compute with it."""

    def __init__(self, model: Qwen3VL, contract: VisionContract, mesh: Mesh | None, hosts: Hosts, asker: int):
        super().__init__(model, contract, mesh)
        self._hosts, self._asker = hosts, asker
        self._turn = threading.Lock()  # all hosts compute in one order

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        with self._turn:
            self._hosts.gather("score", list(requests), SCORE_WIRE)
            return super().score(requests)

    def follow(self) -> None:
        """Computes until the asker is done."""
        while asked := self._hosts.gather("score", None, SCORE_WIRE)[self._asker]:
            super().score(asked)

    def done(self) -> None:
        """Nothing more is asked."""
        self._hosts.gather("score", None, SCORE_WIRE)


def _score(
    graphdef: nnx.GraphDef[Qwen3VL],
    params: nnx.State,
    text: TextBatch,
    vision: VisionBatch | None,
    temperature: Float[Array, ""],
) -> Float[Array, " T"]:
    """Index t is the log-prob of token t; of the first token, which follows nothing, it is 0."""
    logits = nnx.merge(graphdef, params)(text, vision)[0].astype(jnp.float32) / temperature
    following: Int[Array, " T"] = jnp.asarray(text.tokens)[0, 1:]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=-1), following[:, None], axis=1)[:, 0]
    return everywhere(jnp.concatenate([jnp.zeros(1), chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paravt_jax.sampling.score", description="Answers JSON lines with the learner's log-probs."
    )
    parser.add_argument("--model", required=True, help="a Hugging Face directory or a converted checkpoint")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    add_debug_flag(parser)
    args = parser.parse_args()
    model = model_port.load(args.model, args.dtype)
    contract = VisionContract.from_hf(hf_files_of(Path(args.model)))
    scorer = LearnerScorer(model, contract)
    for line in sys.stdin:
        print(json.dumps(_answer(scorer, json.loads(line))), flush=True)


def _answer(scorer: LearnerScorer, asked: dict[str, Any]) -> dict[str, Any]:
    if "settle" in asked:
        return {"sizes_px": scorer.settled([tuple(size_px) for size_px in asked["settle"]])}
    pictures = tuple(_decoded(png) for png in asked["pictures"])
    request = ScoreRequest(np.array(asked["ids"], np.int32), pictures, asked["temperature"])
    (scored,) = scorer.score([request])
    return {"ids": scored.ids.tolist(), "logp": scored.logp.tolist()}


def _decoded(png_base64: str) -> Picture:
    return Picture.of(np.asarray(Image.open(io.BytesIO(base64.b64decode(png_base64))).convert("RGB")))


if __name__ == "__main__":
    run_cli(main)
