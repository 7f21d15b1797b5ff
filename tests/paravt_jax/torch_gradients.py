"""An update's gradients with transformers' parameter names, and their error."""

import numpy as np
import optax
from on_use import torch

from model_port.sharding import flat_params
from model_port.weights import rules
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.optim import BETAS


def first_moments(learner: Learner) -> dict[str, np.ndarray]:
    """Returns the first update's gradient with transformers' parameter names."""
    moments = flat_params(optax.tree.get(learner.state.opt_state, "mu"))
    gradients = {}
    for rule in rules(learner.model.config):
        if rule.path in moments:
            layers = (np.asarray(moments[rule.path]) / (1 - BETAS[0])).reshape(-1, *rule.hf_shape)
            gradients.update(zip(rule.hf_names, layers, strict=True))
    return gradients


def gradients_of(model: "torch.nn.Module") -> dict[str, np.ndarray]:
    named = model.named_parameters()
    return {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def joined(gradients: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])
