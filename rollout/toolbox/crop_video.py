"""A close look at one part of a video: a sub-agent sees its frames and reports on them."""

from collections.abc import Mapping
from typing import Any

from rollout.toolbox.tool import Tool, ToolArgs, ToolContext, Videos
from rollout.tools import CROP_VIDEO_SPEC, window_of

CLAMPED = "The video ends at {end_s:.1f} seconds, so the part from {start_s:.1f} to {end_s:.1f} was looked at."


class CropVideo(Tool):
    spec = CROP_VIDEO_SPEC
    timeout_message = "looking at this part took too long"
    failure_message = "nobody could look at this part"

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        path = videos.path_of(arguments)
        return ToolArgs(path, window_of(arguments, videos.infos[path].duration_s))

    async def run(self, args: ToolArgs, context: ToolContext) -> str:
        window = args.window
        assert window is not None
        closeup = await context.prompter.closeup(args.path, window, context.question)
        report = await context.ask(closeup, f"{args.path} {window.start_s} {window.end_s}")
        if not window.clamped:
            return report
        clamped = CLAMPED.format(start_s=window.start_s, end_s=window.end_s)
        return f"{clamped}\n{report}"
