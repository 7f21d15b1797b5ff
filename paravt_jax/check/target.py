"""The target of a check: a model, a recipe, and the files that stages share."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from model_port.config import ModelConfig, read_config
from model_port.processing import VisionContract
from paravt_jax.check.model import make_model
from paravt_jax.config import TINY, Config, SftConfig, load_config, load_training_config
from paravt_jax.run.policy import contract_of_run
from rollout.chat import Chat

# Settings without a recipe, small enough for any machine.
SMALL = (
    *("model.remat=none", "model.dtype=float32", "video.frame_budgets=[2,4,8]", "video.overview_frames=8"),
    *("rollout.max_turns=2", "rollout.max_parallel=2", "rollout.subagent_new_tokens=16"),
    *("rollout.max_context_tokens=2048", "rollout.subagent_max_frames=4", "pack.row_tokens=2048"),
    *("engine.max_rows=4", "optim.learning_rate=1.0e-3"),
)
ADAPTERS = ("lora.rank=8", "model.dtype=bfloat16")  # for a real model, whose full optimizer state may not fit


@dataclass(frozen=True)
class Target:
    """The arguments of a check, which its processes share, and all values derived from them."""

    folder: str
    model: str  # the name of a size, a directory, or `tiny`
    layers: int = 0  # layers of the language tower; 0: all
    recipe: str = ""
    server: str = ""
    videos: tuple[str, ...] = ()
    data: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Target":
        values = json.loads(text)
        return cls(**values | {"videos": tuple(values["videos"])})

    def file(self, name: str) -> Path:
        return Path(self.folder) / name

    @cached_property
    def hf_dir(self) -> Path:
        """The model's Hugging Face directory, made on first use."""
        path = self.file("model")
        if not path.exists():
            make_model(self.model, path, self.layers)
        return path

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.hf_dir)

    @cached_property
    def chat(self) -> Chat:
        return Chat.from_hf(self.hf_dir)

    @cached_property
    def run_config(self) -> Config | SftConfig:
        """The settings of the recipe, or small defaults without one."""
        return self.with_settings()

    def with_settings(self, *overrides: str) -> Config | SftConfig:
        if self.recipe:
            return load_training_config(self.recipe, *overrides)
        return load_config(None, *SMALL, *(() if self.model == TINY else ADAPTERS), *overrides)

    @cached_property
    def contract(self) -> VisionContract:
        """The vision contract of a run of the recipe, with its picture sizes."""
        return contract_of_run(self.hf_dir, self.run_config.video.max_pixels)
