"""What a tool is: how it is offered, what of a call it accepts, and how it carries that out.

An argument is a model's word. So a check is a pure function that looks videos up by name, and raises a BadCall with a
sentence for the model; only what it gave back is carried out. Deadlines, outcomes, and that nothing harms another call,
are the dispatcher's to see to (`rollout.episode`).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.prompter import Closeup, Prompter
from rollout.tools import ToolSpec, Window, video_of
from rollout.video.box import Box
from rollout.video.reader import VideoInfo


@dataclass(frozen=True)
class Videos:
    """The videos of a dialogue, and what a model may call them."""

    infos: Mapping[str, VideoInfo]  # by path
    names: Mapping[str, str]  # to paths
    subtitles: Mapping[str, str]  # paths of SRT files, by path of the video; from the data, never from a model

    def path_of(self, arguments: Mapping[str, Any]) -> str:
        return video_of(arguments, self.names)

    def duration_s(self, path: str) -> float:
        return float(self.infos[path].duration_s)


@dataclass(frozen=True)
class ToolArgs:
    """What a call asks for, as far as it was checked."""

    path: str = ""  # of the video
    window: Window | None = None  # the part of it; of one frame, both ends are its time
    box: Box | None = None  # the part of that frame
    query: str = ""


@dataclass(frozen=True, eq=False)
class ToolContext:
    """What a tool has at hand while it carries out a call."""

    question: str
    videos: Videos
    prompter: Prompter  # frames of videos, and the prompts that show them
    ask: Callable[[Closeup, str], Awaitable[str]]  # a sub-agent's report, one a call; equal words, the same server


class Tool:
    """One's own is a subclass in a file that `rollout.tools` names; docs/rollouts.md has an example."""

    spec: ToolSpec
    shows_details = False  # asks the prompter for parts of frames, which may have more pixels than a frame
    timeout_message = "the call took too long"
    failure_message = "the call could not be carried out"

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        """What the arguments ask for; a BadCall says what is wrong with them."""
        raise NotImplementedError

    def run(self, args: ToolArgs, context: ToolContext) -> str | Awaitable[str]:
        """What the model is told. `async` where it waits; a plain function runs in a thread."""
        raise NotImplementedError
