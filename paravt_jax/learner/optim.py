"""The optimizer: gradient-norm clipping, then AdamW. `OptimNumbers` are traced."""

import math
from typing import NamedTuple

import optax

from paravt_jax.learner.settings import OptimConfig
from paravt_jax.learner.variants import Number

BETAS = 0.9, 0.999  # published
EPSILON = 1e-8
WARMUP_FRAC = 0.05  # fraction of steps with warm-up; published for the cold start


class OptimNumbers(NamedTuple):
    learning_rate: Number
    weight_decay: Number
    max_grad_norm: Number


def numbers_at(config: OptimConfig, step: int, num_steps: int) -> OptimNumbers:
    """The hyperparameters of update `step`, counted from 0, in a run of `num_steps`."""
    return OptimNumbers(learning_rate(config, step, num_steps), config.weight_decay, config.max_grad_norm)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Constant, or a linear warm-up from 0 and a cosine decay to 0."""
    if config.schedule == "constant":
        return config.learning_rate
    num_warmup = round(WARMUP_FRAC * num_steps)
    if step < num_warmup:
        return config.learning_rate * step / num_warmup
    done_frac = min((step - num_warmup) / max(num_steps - num_warmup, 1), 1.0)
    return config.learning_rate * (1 + math.cos(math.pi * done_frac)) / 2


def optimizer(numbers: OptimNumbers) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(numbers.max_grad_norm),
        optax.adamw(numbers.learning_rate, *BETAS, EPSILON, weight_decay=numbers.weight_decay),
    )
