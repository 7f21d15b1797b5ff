"""Settings of the reward. The defaults are the published numbers."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollout.setting import setting

OpenMode = Literal["exact", "f1", "llm"]
ToolReward = Literal["published", "needed", "none"]
FormatReward = Literal["published", "strict", "no_suffix"]


class ToolPay(NamedTuple):
    """The amounts of R_tool."""

    call: float  # for an executed call
    right: float  # for an executed call with a right answer; with tool=needed, per unit of R_acc that the call gained
    price: float  # of every call, executed or not


TOOL_PAY: dict[ToolReward, ToolPay] = {
    "published": ToolPay(0.3, 0.5, 0.0),
    "needed": ToolPay(0.0, 1.0, 0.03),  # with 0.5 instead of 1.0, the policy relearned rare, needed calls more slowly
    "none": ToolPay(0.0, 0.0, 0.0),
}


@dataclass(frozen=True)
class RewardConfig:
    """Weights and rules of the reward's terms."""

    oe_mode: OpenMode = setting(
        "exact", "how open answers are scored; llm asks the model of judge.url. f1 rewards naming several answers"
    )
    accuracy_weight: float = setting(
        1.0, "weight of R_acc; with 0, reward.format_weight=0 and reward.tool=none, only reward.plugin scores"
    )
    format_weight: float = setting(1.0, "weight of the format reward, w_fmt")
    anchor_weight: float = setting(0.5, "weight of the anchor reward, lambda; 0: no anchoring")
    unclosed_penalty: float = setting(
        0.3, "penalty for a <think> that is never closed, gamma, inside the anchor reward; 0: none"
    )
    tool: ToolReward = setting(
        "published",
        "R_tool. published: 0.3 if a call was executed, 0.1 if calls are well-formed but none was executed, and 0.5 "
        "more for either if R_acc is above 0; needed: for an answer after an executed call, R_acc minus the mean R_acc "
        "of the group's answers without one, which is negative for a call that made an answer worse, and 0.03 less for "
        "every call; none: no R_tool",
    )
    format: FormatReward = setting(
        "published",
        "R_fmt. published: 0.3 for thinking before a call, and in R_base 0.2 for thinking and 0.5 for an answer; "
        "strict: no bonus, but 0.3 less for a call without thinking, so that every fault in an episode with a call "
        "costs something; no_suffix: published, with 0.3 and 0.3 in R_base",
    )
    plugin: str = setting("", "FILE.py:FUNCTION that returns your own reward (docs/extend.md); empty: none")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"reward.{name}={value} must be a finite number, 0 or more")
        if not (self.accuracy_weight or self.format_weight or self.plugin) and self.tool == "none":
            raise ValueError(
                "reward.accuracy_weight=0, reward.format_weight=0 and reward.tool=none leave no reward; set "
                "reward.plugin, or one of them"
            )
        path, colon, function = self.plugin.rpartition(":")
        if self.plugin and not (colon and path.endswith(".py") and function.isidentifier()):
            raise ValueError(
                f"reward.plugin={self.plugin!r} must be FILE.py:FUNCTION, for example rewards/mine.py:reward"
            )

    @property
    def tool_pay(self) -> ToolPay:
        return TOOL_PAY[self.tool]
