"""The settings that an update's memory, FLOPs and traffic depend on, for RL and SFT."""

from dataclasses import dataclass

from model_port.config import LoraConfig
from paravt_jax.config import Config, MeshConfig, PolicyConfig, SftConfig
from paravt_jax.learner.settings import OptimConfig


@dataclass(frozen=True)
class PlannedUpdate:
    mesh: MeshConfig
    policy: PolicyConfig
    lora: LoraConfig
    optim: OptimConfig
    reads_reference: bool = False
    scores_before: bool = False  # the policy's log-probs are computed before the update


def update_of(config: Config | SftConfig) -> PlannedUpdate:
    parts = (config.mesh, config.model, config.lora, config.optim)
    if isinstance(config, SftConfig):
        return PlannedUpdate(*parts)
    penalised = config.loss.kl_coef > 0
    again = config.train.updates_per_step > 1 or (penalised and config.loss.kl_in == "reward")
    return PlannedUpdate(*parts, reads_reference=penalised, scores_before=again)
