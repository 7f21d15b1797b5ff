"""The interface of a tool: its spec, its check of a call's arguments, and its execution.

Arguments are untrusted. A check is a pure function that looks up videos by name and raises a BadCall with a sentence
for the model; a tool runs only with the checked arguments. `rollout.episode` handles deadlines and outcomes, and
isolates calls from each other.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.parts import Response
from rollout.prompter import Closeup, Prompter
from rollout.tools import ToolSpec, Window, video_of
from rollout.video.box import Box
from rollout.video.info import VideoInfo


@dataclass(frozen=True)
class Videos:
    """The videos of a dialogue, with the names the model may use."""

    infos: Mapping[str, VideoInfo]  # by path
    names: Mapping[str, str]  # to paths
    subtitles: Mapping[str, str]  # SRT files by path of the video; from the dataset, never from a model

    def path_of(self, arguments: Mapping[str, Any]) -> str:
        return video_of(arguments, self.names)


@dataclass(frozen=True)
class ToolArgs:
    """The checked arguments of a call."""

    path: str = ""  # of the video
    window: Window | None = None  # part of the video; for a single frame, start and end are equal
    box: Box | None = None  # part of that frame
    query: str = ""


@dataclass(frozen=True, eq=False)
class ToolContext:
    """Everything a tool may use to run a call."""

    question: str
    videos: Videos
    prompter: Prompter  # decodes frames and renders prompts
    ask: Callable[[Closeup, str], Awaitable[str]]  # a sub-agent's report, once per call; the text is its affinity


class Tool:
    """Base class. Your own tool is a subclass in a file that `rollout.tools` names; see docs/extend.md."""

    spec: ToolSpec
    shows_details = False  # True: shows parts of frames, which may have more pixels than a frame
    shows_pictures = False  # True: responses may have pictures, so that memory and context are planned for them
    timeout_message = "the call took too long"
    failure_message = "the call could not be carried out"

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        """Checks the arguments; raises a BadCall that explains a problem to the model."""
        raise NotImplementedError

    def run(self, args: ToolArgs, context: ToolContext) -> Response | Awaitable[Response]:
        """The response for the model: text, or a list of texts, frames (`TimedPicture`) and pictures (`Picture`).

        Make it `async` if it waits; a plain function runs in a thread.
        """
        raise NotImplementedError
