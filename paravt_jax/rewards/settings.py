"""Settings of the reward. The defaults are the published numbers."""

import math
from dataclasses import dataclass
from typing import Literal

from rollout.setting import setting

OpenMode = Literal["exact", "f1", "llm"]
ToolRight = Literal["any", "needed"]


@dataclass(frozen=True)
class RewardConfig:
    """Weights and rules of the terms of R."""

    oe_mode: OpenMode = setting(
        "exact", "how open answers are scored; llm asks the model of judge.url. f1 rewards naming several answers"
    )
    format_weight: float = setting(1.0, "weight of the format reward, w_fmt")
    anchor_weight: float = setting(0.5, "weight of the anchor reward, lambda; 0: no anchoring")
    unclosed_penalty: float = setting(0.3, "penalty for a <think> that is never closed, gamma; 0: none")
    tool_reward: bool = setting(True, "reward tool calls, R_tool")
    tool_call_weight: float = setting(0.3, "R_tool of an executed call; published")
    tool_right_weight: float = setting(0.5, "R_tool of an executed call and a right answer; published")
    tool_right: ToolRight = setting(
        "any",
        "how tool_right_weight is paid. any: if R_acc is above 0, published; needed: times R_acc minus the mean R_acc "
        "of the group's answers without an executed call, which is negative for a call that made an answer worse",
    )
    call_price: float = setting(0.0, "R_tool is lower by this for every call, executed or not; published: 0")
    think_first_bonus: bool = setting(
        True,
        "R_fmt pays 0.3 for thinking before a call, published; false: an episode that calls without it loses 0.3, so "
        "that every fault of an episode with a call costs something",
    )
    answer_suffix: bool = setting(
        True,
        "R_base pays mostly for the answer's tags, a part of anchoring: 0.2 for thinking and 0.5 for an answer; false: "
        "0.3 and 0.3",
    )
    plugin: str = setting("", "FILE.py:FUNCTION that returns your own reward terms (docs/rewards.md); empty: none")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"reward.{name}={value} must be a finite number, 0 or more")
        if self.oe_mode not in ("f1", "exact", "llm"):
            raise ValueError(f"reward.oe_mode={self.oe_mode!r} must be f1, exact or llm")
        if self.tool_call_weight + self.tool_right_weight > 1:
            raise ValueError(
                f"reward.tool_call_weight={self.tool_call_weight} and reward.tool_right_weight="
                f"{self.tool_right_weight} add up to more than 1, the maximum of R_tool"
            )
        for name, default in (("tool_right", "any"), ("call_price", 0.0)):
            if getattr(self, name) != default and not self.tool_reward:
                raise ValueError(f"reward.{name}={getattr(self, name)} has no effect with reward.tool_reward=false")
        path, colon, function = self.plugin.rpartition(":")
        if self.plugin and not (colon and path.endswith(".py") and function.isidentifier()):
            raise ValueError(
                f"reward.plugin={self.plugin!r} must be FILE.py:FUNCTION, for example rewards/mine.py:reward"
            )
