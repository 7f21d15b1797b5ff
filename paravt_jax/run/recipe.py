"""Reads and writes paravt.json next to a model's weights: the prompts, pixels and turns of its training.

Runs write the file, and checkpoints and exports include it, so that a model is used as it was trained. Models can come
from anywhere, so the file is untrusted: tool code is left out, and prompt files and ${…} are rejected.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from model_port.hf_files import RECIPE_FILE
from model_port.json_files import Section, flattened, read_object
from model_port.terminal import say
from paravt_jax.config import Config, EvalConfig, SftConfig, VideoConfig
from paravt_jax.config.changed_keys import change_of
from paravt_jax.config.keys import change_text
from paravt_jax.config.load import one_line_errors
from rollout.episode_config import EpisodeConfig

# Settings of an episode that are not stored, because the user chooses them.
NOT_STORED = ("temperature", "turn_deadline_s", "prompts_file")
NOT_COMPARED = ("num_frames", "rollout.dispatch")  # runs vary these on purpose


@dataclass(frozen=True)
class Recipe:
    """Settings for using a model. The defaults are those in a run's config."""

    num_frames: int = VideoConfig.overview_frames  # overview frames
    max_pixels: int = VideoConfig.max_pixels
    rollout: EpisodeConfig = field(default_factory=lambda: EpisodeConfig(temperature=0.0))
    mode: str = "agentic"  # the mode of training runs; an evaluation in another mode logs the difference

    def __post_init__(self) -> None:
        VideoConfig(overview_frames=self.num_frames, max_pixels=self.max_pixels)
        self.rollout.check_samples()

    def to_bytes(self) -> bytes:
        return (json.dumps(self.to_record(), indent=2, ensure_ascii=False) + "\n").encode()

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        return record | {"rollout": {key: value for key, value in record["rollout"].items() if key not in NOT_STORED}}


def recipe_of(config: Config | SftConfig | EvalConfig) -> Recipe:
    video, rollout = config.video, config.rollout
    if isinstance(config, SftConfig):  # SFT samples nothing, so its turns may be longer than its context
        turn_tokens = min(rollout.max_new_tokens, rollout.max_context_tokens)
        rollout = replace(rollout, max_new_tokens=turn_tokens)
    mode = config.eval.mode if isinstance(config, EvalConfig) else "agentic"
    return Recipe(video.overview_frames, video.max_pixels, rollout, mode)


def read_recipe(directory: Path) -> Recipe | None:
    record, path = _record(directory), directory / RECIPE_FILE
    if record is None:
        return None
    rollout = Section(str(path), record).section("rollout", default={})
    tools = rollout.values.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(name, str) for name in tools):
        raise rollout.wrong("tools", "a list of names")
    recipe_keys = set(flattened(Recipe().to_record()))
    for key, value in flattened(record).items():
        if key not in recipe_keys:
            raise ValueError(f"{path}: {change_of(key) or f'{key} is not a setting of a recipe'}")
        if "${" in str(value):
            raise ValueError(f"{path}: {key} contains ${{…}}, which this file must not")
    if own := [name for name in tools if ":" in name]:
        say(f"{path}: {', '.join(own)} is left out of rollout.tools, because a model's files must not load code")
        named = [name for name in tools if name not in own]
        record["rollout"] |= {"tools": named} if named else {"tools": Recipe().rollout.tools, "dispatch": "none"}

    def checked() -> Any:
        recipe: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(record)))
        recipe.rollout.check_tools()
        return recipe

    try:
        return one_line_errors("", checked)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None


def differences(directory: Path, recipe: Recipe) -> str:
    """Describes the settings that differ from the recipe in the model's files; empty if none differ."""
    trained, current = flattened(_record(directory) or {}), flattened(recipe.to_record())
    changes = [
        change_text(key, trained[key], value)
        for key, value in current.items()
        if key in trained and key not in NOT_COMPARED and trained[key] != value
    ]
    if not changes:
        return ""
    return f"{directory / RECIPE_FILE}: this run has other settings than the model's: {'; '.join(changes)}"


def _record(directory: Path) -> dict[str, Any] | None:
    path = directory / RECIPE_FILE
    return read_object(path) if path.exists() else None
