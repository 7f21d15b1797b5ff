"""Settings of an episode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout.engine.protocol import MIN_TEMPERATURE
from rollout.prompter import Frames, PromptEncoder, Prompter
from rollout.prompts import MAX_TEXT_CHARS, Prompts
from rollout.setting import setting
from rollout.toolbox import CropReturns, Tool, tools_of
from rollout.tools import CROP_VIDEO, MAX_CALLS

Dispatch = Literal["parallel", "sequential", "none"]
MAX_TOKENS = 2**20  # four times the context of the published models
UPPER_BOUNDS = {  # memory grows with these settings, which may come from a model's files
    "max_turns": 1024,
    "max_parallel": MAX_CALLS,
    "max_new_tokens": MAX_TOKENS,
    "max_context_tokens": MAX_TOKENS,
    "subagent_new_tokens": MAX_TOKENS,
    "subagent_max_frames": 4096,
}


@dataclass(frozen=True)
class EpisodeConfig:
    """Settings of turns, tool calls, sampling, frames, prompts and deadlines."""

    dispatch: Dispatch = setting(
        "parallel", "sequential: one call per turn, with as many calls in total; none: no tools"
    )
    max_turns: int = setting(3, "turns with calls; one more turn follows for the answer")
    max_parallel: int = setting(5, "calls per turn")
    tools: list[str] = setting(
        [CROP_VIDEO], "available tools: crop_video, zoom_frame, search_subtitles, or path/to/file.py:NAME for your own"
    )
    crop_returns: CropReturns = setting(
        "report",
        "result of crop_video and zoom_frame. report: a sub-agent's report; frames: the frames, in the main agent's "
        "dialogue",
    )
    forced_prefix: str = setting(
        "<think>\n", "prefix of every turn of the main agent, forced instead of sampled; an endpoint does not get it"
    )
    max_new_tokens: int = setting(2048, "sampled tokens per turn")
    max_context_tokens: int = setting(32_768, "tokens per dialogue, including frames")
    subagent_new_tokens: int = setting(512, "sampled tokens per report of a sub-agent")
    subagent_max_frames: int = setting(16, "frames that a call shows to a sub-agent or the main agent")
    overview_fps: float = setting(
        0.0,
        "frames per second of an overview, at least 4 frames and at most its frame budget; 1 matches the release. 0: "
        "the whole budget for any length",
    )
    temperature: float = setting(0.7, "sampling temperature; 0: greedy")
    turn_deadline_s: float = setting(
        600.0, "timeout of a turn in the engine; a call gets half of it, a decoder job at least a tenth"
    )
    prompts: Prompts = field(default_factory=Prompts)
    prompts_file: str = setting("", "YAML file with keys of rollout.prompts; set either the file or the keys")

    def __post_init__(self) -> None:
        for name, bound in UPPER_BOUNDS.items():
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at least 1")
            if getattr(self, name) > bound:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at most {bound}")
        for name in ("overview_fps", "temperature"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be a finite number, 0 or more")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"rollout.temperature={self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"
            )
        if not 0 < self.turn_deadline_s < math.inf:
            raise ValueError(f"rollout.turn_deadline_s={self.turn_deadline_s} must be a finite number above 0")
        if len(self.forced_prefix) > MAX_TEXT_CHARS:
            raise ValueError(
                f"rollout.forced_prefix has {len(self.forced_prefix)} characters, more than {MAX_TEXT_CHARS}"
            )
        if self.prompts.system_has_tools and self.dispatch == "none":
            raise ValueError(
                "rollout.dispatch=none offers no tool, but with rollout.prompts.system_has_tools=true the system text "
                "does; use a text without tools, or set system_has_tools=false"
            )

    def check_tools(self, loaded: Sequence[Tool] = ()) -> None:
        """Raises ValueError if a tool cannot be used. Without `loaded` ones, executes the files of user tools."""
        unnamed = [tool.spec.name for tool in loaded or self.toolbox if tool.spec.name not in self.prompts.system]
        if self.prompts.system_has_tools and unnamed:
            raise ValueError(
                f"rollout.prompts.system must name every tool, because rollout.prompts.system_has_tools=true; "
                f"rollout.tools also has {', '.join(unnamed)}"
            )

    def check_samples(self) -> None:
        """Checks settings that only matter for sampling, because a cold start uses the others without sampling."""
        if self.max_context_tokens < self.max_new_tokens:
            raise ValueError(
                f"rollout.max_context_tokens={self.max_context_tokens} leaves no room for a turn of "
                f"rollout.max_new_tokens={self.max_new_tokens}"
            )

    @property
    def call_deadline_s(self) -> float:
        """The deadline of a tool call, including its frames and its report."""
        return self.turn_deadline_s / 2

    @property
    def min_video_deadline_s(self) -> float:
        """The deadline of a decoder job, which is extended for many pixels or a large file."""
        return self.turn_deadline_s / 10

    @property
    def toolbox(self) -> tuple[Tool, ...]:
        return tools_of(tuple(self.tools), self.crop_returns)

    @property
    def detail_factor(self) -> int:
        """The largest ratio of a picture's pixels to a frame's; an enlarged detail may use all pixels of a crop."""
        return self.subagent_max_frames if any(tool.shows_details for tool in self.toolbox) else 1

    @property
    def shown_pictures(self) -> int:
        """The maximum number of pictures in responses to the main agent."""
        shows = any(tool.shows_pictures for tool in self.toolbox)
        return self.max_calls * self.subagent_max_frames * shows

    @property
    def has_subagents(self) -> bool:
        """Whether a tool may run a sub-agent; user tools may."""
        return self.crop_returns == "report" or any(":" in name for name in self.tools)

    @property
    def calls_per_turn(self) -> int:
        return {"parallel": self.max_parallel, "sequential": 1, "none": 0}[self.dispatch]

    @property
    def tool_turns(self) -> int:
        """The number of turns with calls. Parallel and sequential dispatch allow the same total number of calls."""
        return {"parallel": self.max_turns, "sequential": self.max_turns * self.max_parallel, "none": 0}[self.dispatch]

    @property
    def max_calls(self) -> int:
        """The maximum number of calls in an episode."""
        return self.tool_turns * self.calls_per_turn

    def prompter(self, frames: Frames, chat: PromptEncoder, loaded: Sequence[Tool] = ()) -> Prompter:
        return Prompter(
            frames,
            chat,
            self.prompts,
            calls_per_turn=self.calls_per_turn,
            subagent_max_frames=self.subagent_max_frames,
            deadline_s=self.min_video_deadline_s,
            overview_fps=self.overview_fps,
            tools=[tool.spec for tool in loaded or self.toolbox],
        )
