"""The crop_video tool shows a part of a video in detail, to a sub-agent that reports on it or to the main agent."""

from collections.abc import Mapping
from typing import Any

from rollout.parts import Part, Response
from rollout.prompter import Prompter
from rollout.prompts import window_intro
from rollout.toolbox.tool import Tool, ToolArgs, ToolContext, Videos
from rollout.tools import CROP_FRAMES_SPEC, CROP_VIDEO_SPEC, Window, window_of

CLAMPED = "The video ends at {end_s:.1f} seconds, so the part from {start_s:.1f} to {end_s:.1f} was looked at."


class CropVideo(Tool):
    """Returns a sub-agent's report on the part (`rollout.crop_returns=report`)."""

    spec = CROP_VIDEO_SPEC
    timeout_message = "looking at this part took too long"
    failure_message = "nobody could look at this part"

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        path = videos.path_of(arguments)
        return ToolArgs(path, window_of(arguments, videos.infos[path].duration_s))

    async def run(self, args: ToolArgs, context: ToolContext) -> Response:
        window = args.window
        assert window is not None
        closeup = await context.prompter.closeup(args.path, window, context.question)
        report = await context.ask(closeup, f"{args.path} {window.start_s} {window.end_s}")
        return f"{_remark(window)}{report}"


class CropFrames(CropVideo):
    """Returns the part's frames to the main agent (`rollout.crop_returns=frames`)."""

    spec = CROP_FRAMES_SPEC
    shows_pictures = True
    failure_message = "this part could not be shown"

    async def run(self, args: ToolArgs, context: ToolContext) -> Response:
        assert args.window is not None
        return await crop_parts(context.prompter, args.path, args.window)


async def crop_parts(prompter: Prompter, path: str, window: Window) -> list[Part]:
    """Returns the response that shows a window's frames. Training traces use the same response."""
    frames = await prompter.crop(path, window)
    return [f"{_remark(window)}{window_intro(prompter.prompts, window, len(frames))}\n", *frames]


def _remark(window: Window) -> str:
    return f"{CLAMPED.format(start_s=window.start_s, end_s=window.end_s)}\n" if window.clamped else ""
