"""A closer look at one part of a video: a sub-agent is shown its frames and reports what happens in it."""

from collections.abc import Mapping
from typing import Any

from rollout.toolbox.tool import Desk, Tool, Videos, Wanted
from rollout.tools import CROP_VIDEO_OFFER, window_of


class CropVideo(Tool):
    offer = CROP_VIDEO_OFFER
    late = "looking at this part took too long"
    failed = "nobody could look at this part"

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> Wanted:
        path = videos.path_of(arguments)
        return Wanted(path, window_of(arguments, videos.infos[path].duration_s))

    async def carry_out(self, wanted: Wanted, desk: Desk) -> str:
        window = wanted.window
        assert window is not None
        closeup = await desk.prompter.closeup(wanted.path, window, desk.question)
        report = await desk.ask(closeup, f"{wanted.path} {window.start_s} {window.end_s}")
        if not window.clamped:
            return report
        clamped = desk.prompter.prompts.clamped.format(start_s=window.start_s, end_s=window.end_s)
        return f"{clamped}\n{report}"
