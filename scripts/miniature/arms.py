"""The table of arms: the settings that each changes in configs/miniature/para_grpo.yaml, the full method."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from model_port.json_files import flattened
from paravt_jax.config import load_config, to_record

CONFIGS = Path(__file__).parents[2] / "configs"
NO_PREFIX = "rollout.forced_prefix="
NO_ANCHOR = ("reward.anchor_weight=0", "reward.unclosed_penalty=0")  # the answer suffix of R_base is on in all arms
NO_GATING = "video.frame_budgets=[]"
NO_TOOL = "reward.tool=none"
ARMS: Mapping[str, tuple[str, tuple[str, ...]]] = {  # name: title, settings
    "grpo": ("GRPO", (NO_PREFIX, *NO_ANCHOR, NO_GATING, NO_TOOL)),
    "prefix": ("prefix only", (*NO_ANCHOR, NO_GATING, NO_TOOL)),
    "anchor": ("anchor only", (NO_PREFIX, NO_GATING, NO_TOOL)),
    "anchoring": ("prefix + anchor", (NO_GATING, NO_TOOL)),
    "gating": ("gating only", (NO_PREFIX, *NO_ANCHOR, NO_TOOL)),
    "para_grpo": ("PARA-GRPO", ()),
    "no_tool_reward": ("− R_tool", (NO_TOOL,)),
    "no_penalty": ("− γ", ("reward.unclosed_penalty=0",)),
    "no_gating": ("− gating", (NO_GATING,)),
    "recommended": ("recommended", ()),  # settings: see `settings_of`
    "credit_span": ("credit: span", ("advantage.credit=span",)),
    "credit_sequence": ("credit: sequence", ("advantage.credit=sequence",)),
    "credit_likelihood": ("credit: likelihood", ("advantage.credit=likelihood",)),
    "weak_prior": ("weak prior", ()),
    "grpo_tool_reward": ("GRPO with R_tool", (NO_PREFIX, *NO_ANCHOR, NO_GATING)),
}
TABLE_B = ("grpo", "anchoring", "gating", "para_grpo", "no_tool_reward", "no_penalty", "weak_prior")
VARIANTS: Mapping[str, tuple[str, ...]] = {  # other losses, normalizations and schedules, each run once
    "loss_grpo": ("loss.name=grpo",),
    "loss_dapo": ("loss.name=dapo",),
    "loss_dr_grpo": ("loss.name=dr_grpo", "advantage.normalise=none"),
    "loss_gspo": ("loss.name=gspo",),
    "loss_cispo": ("loss.name=cispo",),
    "credit_span": ARMS["credit_span"][1],
    "credit_sequence": ARMS["credit_sequence"][1],
    "normalise_batch": ("advantage.normalise=batch",),
    "normalise_loo": ("advantage.normalise=loo",),
    "right_needed": ("reward.tool=needed",),
    "two_updates": ("train.updates_per_step=2",),
    "resampled": ("train.max_resamples=2",),
    "soft_length": ("train.truncated=soft",),
}
COLD_STARTS = ("sft", "sft_weak")
FORCED = "/forced"  # name suffix of an evaluation with the forced prefix
NAMES = (*ARMS, *(name for name in VARIANTS if name not in ARMS), *COLD_STARTS)
TITLES = {
    "sft": "SFT (cold start)",
    "sft_weak": "weak SFT (no tool traces)",
    **{name: title for name, (title, _) in ARMS.items()},
    **{name: f"`{' '.join(settings)}`" for name, settings in VARIANTS.items() if name not in ARMS},
}


def settings_of(arm: str) -> tuple[str, ...]:
    if arm == "recommended":
        return recommended()
    if arm in COLD_STARTS:
        return ()
    return ARMS[arm][1] if arm in ARMS else VARIANTS[arm]


@cache
def recommended() -> tuple[str, ...]:
    """Returns the reward and advantage settings in which the recommended 8B config differs from the published one."""
    published, other = (
        flattened(to_record(load_config(CONFIGS / f"paragrpo_8b{name}.yaml"))) for name in ("", "_recommended")
    )
    differ = (key for key in other if key.startswith(("reward.", "advantage.")) and other[key] != published[key])
    return tuple(f"{key}={other[key]}".replace("=True", "=true").replace("=False", "=false") for key in differ)


def forces_prefix(arm: str) -> bool:
    """Whether the arm was trained with the forced prefix."""
    return arm not in COLD_STARTS and NO_PREFIX not in settings_of(arm)
