"""The runs of the paper's table and their counterparts in the miniature are the same runs at another size."""

from pathlib import Path

import pytest

from paravt_jax.config import load_config, to_record
from paravt_jax.keys import flat

CONFIGS = Path(__file__).parents[1] / "configs"
ARMS = {
    "grpo": "grpo_8b",
    "anchoring": "ablations/no_gating",
    "gating": "ablations/no_anchoring",
    "para_grpo": "paragrpo_8b",
    "no_tool_reward": "ablations/no_tool_reward",
    "no_penalty": "ablations/no_penalty",
}
# Where a run lies, what it is shown, how large it is and on which machine; a tiny model takes larger steps.
SIZES = (
    *("run_dir", "model.", "mesh.", "data.", "engine.", "pack.", "validation.", "checkpoint.", "log."),
    *("video.max_pixels", "video.num_workers", "optim.learning_rate"),
    *("rollout.max_", "rollout.subagent_", "rollout.prompts."),
    *("train.num_steps", "train.prompts_per_step", "train.max_staleness"),
)


def settings(name: str) -> dict:
    return flat(to_record(load_config(CONFIGS / f"{name}.yaml")))


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_and_its_miniature_differ_in_size_only(arm):
    small, large = settings(f"miniature/{arm}"), settings(ARMS[arm])
    differ = {key: (small[key], large[key]) for key in large if small[key] != large[key]}
    assert {key: values for key, values in differ.items() if not key.startswith(SIZES)} == {}


@pytest.mark.parametrize("name", ARMS.values())
def test_runs_of_the_paper_have_its_size(name):
    large = settings(name)
    published = {"train.num_steps": 54, "train.prompts_per_step": 7, "train.group_size": 8, "optim.learning_rate": 2e-6}
    assert {key: large[key] for key in published} == published
