"""The settings that an update's memory, FLOPs and traffic depend on, for RL and SFT."""

from dataclasses import dataclass

from model_port.config import LoraConfig
from paravt_jax.config import MeshConfig, PolicyConfig
from paravt_jax.learner.settings import LossConfig, OptimConfig


@dataclass(frozen=True)
class PlannedUpdate:
    mesh: MeshConfig
    policy: PolicyConfig
    lora: LoraConfig
    optim: OptimConfig
    loss: LossConfig | None = None  # None: SFT
    temperature: float = 1.0
    scores_before: bool = False  # the policy's log-probs are computed before the update

    @property
    def reads_reference(self) -> bool:
        return self.loss is not None and self.loss.kl_coef > 0
