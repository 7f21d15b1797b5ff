"""What a reward is made of, and how much each part is worth. The defaults are the published numbers."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

OpenMode = Literal["exact", "f1", "llm"]
ToolRight = Literal["any", "scaled", "threshold", "needed"]


@dataclass(frozen=True)
class FormatParts:
    """What R_base and R_anchor pay for each property."""

    think: float = 0.2  # R_base: a thinking block that says something …
    answer_opening: float = 0.3  # … <answer> before something …
    answer_closing: float = 0.2  # … and </answer> behind it
    think_closing: float = 0.4  # R_anchor: </think> closes a thinking block that says something …
    flow: float = 0.3  # … and the whole flow from thinking to an answer is closed

    def __post_init__(self) -> None:
        _finite_and_not_negative("reward.parts", self, *(part.name for part in fields(self)))


@dataclass(frozen=True)
class RewardConfig:
    oe_mode: OpenMode = "exact"  # of open answers; f1 pays for naming several, llm asks a judge
    require_answer_block: bool = True  # off: without one, what follows the thinking is the answer
    format_weight: float = 1.0  # w_fmt
    anchor_weight: float = 0.5  # λ; 0 is the arm without anchoring
    unclosed_penalty: float = 0.3  # γ; 0 is the arm without it
    parts: FormatParts = field(default_factory=FormatParts)
    tool_reward: bool = True  # off is the arm without R_tool
    tool_call_weight: float = 0.3  # R_tool of an executed call; published
    tool_right_weight: float = 0.5  # R_tool of an executed call and a right answer; published
    # any: R_acc > 0, published, and a third of tool_call_weight for a call that is only well-formed; scaled: times
    # R_acc; threshold: from tool_right_threshold on; needed: likewise, times the share of the group's episodes without
    # a call that were wrong.
    tool_right: ToolRight = "any"
    tool_right_threshold: float = 0.5  # R_acc from which an answer is right, for threshold and needed
    plugin: str = ""  # FILE.py:FUNCTION with terms of your own, docs/rewards.md; empty: none
    plugin_deadline_s: float = 60.0  # of one episode's; what comes later makes the episode missing

    def __post_init__(self) -> None:
        weights = ("format_weight", "anchor_weight", "unclosed_penalty", "tool_call_weight", "tool_right_weight")
        _finite_and_not_negative("reward", self, *weights)
        if self.oe_mode not in ("f1", "exact", "llm"):
            raise ValueError(f"reward.oe_mode={self.oe_mode!r} must be f1, exact or llm")
        if self.tool_call_weight + self.tool_right_weight > 1:
            raise ValueError(
                f"reward.tool_call_weight={self.tool_call_weight} and reward.tool_right_weight="
                f"{self.tool_right_weight} add up to more than 1, the most that R_tool may be"
            )
        if not 0 < self.tool_right_threshold <= 1:
            raise ValueError(f"reward.tool_right_threshold={self.tool_right_threshold} must be above 0 and at most 1")
        if self.tool_right != "any" and not self.tool_reward:
            raise ValueError(f"reward.tool_right={self.tool_right} does nothing with reward.tool_reward=false")
        path, colon, function = self.plugin.rpartition(":")
        if self.plugin and not (colon and path.endswith(".py") and function.isidentifier()):
            raise ValueError(f"reward.plugin={self.plugin!r} is no FILE.py:FUNCTION, such as rewards/mine.py:reward")
        if not 0 < self.plugin_deadline_s < math.inf:
            raise ValueError(f"reward.plugin_deadline_s={self.plugin_deadline_s} must be a finite number above 0")


def _finite_and_not_negative(section: str, settings: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:
            raise ValueError(f"{section}.{name}={getattr(settings, name)} must be a finite number, 0 or more")
