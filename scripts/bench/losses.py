"""Compares losses and gradients of every kind, correction and term in float64 with independent references.

The references are plain numpy and, if DIR of `--libraries` has them, verl and TRL. The differences are the largest over
all settings of a kind, of the loss and of the gradient to the policy's log-probs.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paravt_jax.learner.losses import LossCoefs, LossSpec, policy_loss
from paravt_jax.learner.settings import CORRECTIONS, PARAMS, LossConfig
from paravt_jax.learner.variants import VARIANTS, SampledTokens, StepCounts
from scripts.bench.loss_references import Case, LossAndGradient, in_numpy, in_trl, in_verl

REFERENCES: dict[str, Callable[[Case], LossAndGradient | None]] = {"numpy": in_numpy, "verl": in_verl, "trl": in_trl}
SEQUENCES, WIDTH, MAX_TOKENS = 8, 12, 128.0
SEQUENCE_SCALE = 0.002  # scale of a log-ratio in GSPO, so that a clip of 3e-4 cuts some sequences
KL_COEF, LIKELIHOOD = 0.04, 0.5
TERMS = ("policy", "k2", "k3", "likelihood")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--libraries", metavar="DIR", help="directory with verl and trl (pip install --target DIR)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.libraries:
        sys.path.append(args.libraries)  # appended, so that this environment's packages win over copies in DIR
    names = list(REFERENCES) if args.libraries else ["numpy"]
    with jax.enable_x64(True):
        rows = [row for kind in VARIANTS for row in _rows(kind, names)]
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    lines = ["| loss | reference | settings | largest difference of a loss | of a gradient |", "|---" * 5 + "|"]
    for row in result["rows"]:
        differences = f"{row['loss_difference']:.1e} | {row['gradient_difference']:.1e}"
        lines.append(f"| `{row['loss']}` | {row['reference']} | {row['settings']} | {differences} |")
    return "\n".join(lines)


def _rows(kind: str, names: list[str]) -> list[dict[str, Any]]:
    differences: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases(kind):
        ours = learners(case)
        for name in names:
            if (theirs := REFERENCES[name](case)) is not None:
                gradient = float(np.abs(ours.gradient - theirs.gradient).max())
                differences[name].append((abs(ours.loss - theirs.loss), gradient))
    return [_row(kind, name, np.array(differences[name])) for name in names]


def _row(kind: str, name: str, differences: np.ndarray) -> dict[str, Any]:
    loss, gradient = differences.max(axis=0).tolist()
    counted = {"loss": kind, "reference": name, "settings": len(differences)}
    return counted | {"loss_difference": loss, "gradient_difference": gradient}


def cases(kind: str) -> Iterator[Case]:
    """Yields a loss kind with every correction, term, dual clip and form of advantage."""
    clips = (0.0, 3.0) if "dual_clip" in PARAMS[kind] else (None,)
    for number, (clip, correction, term, per_token) in enumerate(
        itertools.product(clips, CORRECTIONS, TERMS, (False, True))
    ):
        params = {"max_ratio": 1.5} if kind == "cispo" else {} if clip is None else {"dual_clip": clip}
        estimator = "k2" if term == "k2" else "k3"
        loss = LossConfig(kind, params, correction, {}, 0.0 if term == "policy" else KL_COEF, estimator)
        yield random_case(loss, number, per_token=per_token, likelihood=LIKELIHOOD * (term == "likelihood"))


def random_case(loss: LossConfig, seed: int, *, per_token: bool, likelihood: float) -> Case:
    random, shape = np.random.default_rng(seed), (SEQUENCES, WIDTH)
    mask = np.arange(WIDTH) < random.integers(3, WIDTH + 1, (SEQUENCES, 1))
    policy = -2 * random.random(shape)
    prox = policy - random.normal(scale=SEQUENCE_SCALE if loss.name == "gspo" else 0.8, size=shape)
    advantage = random.standard_normal((SEQUENCES, WIDTH if per_token else 1))
    return Case(
        loss=loss,
        policy=policy,
        prox=prox,
        behavior=prox - random.normal(scale=0.9, size=shape),
        ref=policy + random.normal(scale=0.5, size=shape),
        advantage=np.broadcast_to(advantage, shape).copy(),
        mask=mask,
        likelihood=likelihood * (random.random(shape) < 0.3) * mask,
        max_tokens=MAX_TOKENS,
    )


def learners(case: Case) -> LossAndGradient:
    """Computes the loss and gradient with the learner's code."""
    lengths = np.broadcast_to(case.mask.sum(1, keepdims=True), case.mask.shape)
    numbers = np.broadcast_to(np.arange(len(case.mask))[:, None], case.mask.shape)

    def loss(policy: jax.Array) -> jax.Array:
        tokens = SampledTokens(
            policy_logp=policy,
            prox_logp=jnp.asarray(case.prox),
            behavior_logp=jnp.asarray(case.behavior),
            advantage=jnp.asarray(case.advantage),
            loss_mask=jnp.asarray(case.mask),
            counts=StepCounts(float(case.mask.sum()), float(len(case.mask)), case.max_tokens),
            ref_logp=jnp.asarray(case.ref),
            sequence_ids=jnp.asarray(numbers),
            num_sequences=len(case.mask),
            episode_tokens=jnp.asarray(lengths),
            likelihood=jnp.asarray(case.likelihood),
        )
        return policy_loss(LossSpec.of(case.loss, VARIANTS[case.loss.name]), LossCoefs.of(case.loss), tokens).loss

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(case.policy))
    return LossAndGradient(float(value), np.asarray(gradient))
