"""The interface of a tool: its spec, its check of a call's arguments, and its execution.

Arguments are untrusted. A check is a pure function that looks up videos by name, and raises a BadCall with a sentence
for the model if an argument is invalid. A tool only runs with checked arguments. `rollout.episode` handles deadlines
and outcomes, and isolates calls from each other.
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
    """The videos of a dialogue, with the names that the model may use for them."""

    infos: Mapping[str, VideoInfo]  # by path
    names: Mapping[str, str]  # name -> path
    subtitles: Mapping[str, str]  # video path -> SRT file; from the dataset, never from a model

    def path_of(self, arguments: Mapping[str, Any]) -> str:
        return video_of(arguments, self.names)


@dataclass(frozen=True)
class ToolArgs:
    """The checked arguments of a call."""

    path: str = ""  # of the video
    window: Window | None = None  # part of the video; for a single frame, start and end are equal
    box: Box | None = None  # part of that frame
    query: str = ""

    def __post_init__(self) -> None:
        """Raises here, where it fails only a call, because a run's log cannot have other types."""
        kinds = {"path": str, "window": Window | None, "box": Box | None, "query": str}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"ToolArgs.{name} is {type(value).__name__}, expected {kind}")


@dataclass(frozen=True, eq=False)
class ToolContext:
    """Everything a tool may use to run a call."""

    question: str
    videos: Videos
    prompter: Prompter  # decodes frames and renders prompts
    ask: Callable[[Closeup, str], Awaitable[str]]  # runs a sub-agent, once per call; the text is its affinity


class Tool:
    """The base class of tools. To add a tool, subclass it in a file that `rollout.tools` names; see docs/extend.md."""

    spec: ToolSpec
    shows_details = False  # True if it shows parts of frames, which may have more pixels than a frame
    shows_pictures = False  # True if responses may have pictures; memory and context are then planned for them
    timeout_message = "the call took too long"  # for the model, if `run` misses the deadline
    failure_message = "the call could not be carried out"  # for the model, if `run` raises any other error

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        """Checks the arguments. Raises a BadCall that explains the problem to the model."""
        raise NotImplementedError

    def run(self, args: ToolArgs, context: ToolContext) -> Response | Awaitable[Response]:
        """Returns the response for the model: text, or a list of texts, frames (`TimedPicture`) and `Picture`s.

        Make `run` an async function if it waits; a plain function runs in a thread.
        """
        raise NotImplementedError
