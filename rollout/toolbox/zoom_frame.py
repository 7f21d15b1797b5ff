"""The zoom_frame tool enlarges a part of a frame, for a sub-agent that describes it or for the main agent.

The picture has at most as many pixels as all frames of a crop together, so a zoom costs no more than a crop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.parts import Response
from rollout.toolbox.tool import Tool, ToolArgs, ToolContext, Videos
from rollout.tools import VIDEO_PATH, ToolSpec, Window, box_of, make_schema, moment_of
from rollout.video.info import TimedPicture


def _spec(result: str, effect: str) -> ToolSpec:
    return ToolSpec(
        make_schema(
            "zoom_frame",
            f"Enlarges one part of one frame of a video and {result}, such as small objects or text.",
            video_path=VIDEO_PATH,
            time=("number", "When the frame is shown, in seconds."),
            box=("array", "The part of it, [x0, y0, x1, y1], as fractions of its width and height from the top left."),
        ),
        usage="zoom_frame on a detail of one frame",
        effect=effect,
    )


ZOOM_FRAME_SPEC = _spec("reports what it shows", "each detail is enlarged and described")
ZOOM_PICTURE_SPEC = _spec("shows it to you", "each detail is enlarged and shown to you")


@dataclass(frozen=True)
class ZoomFrame(Tool):
    """Returns a sub-agent's description. To make your own tool, instantiate or subclass it with other texts."""

    intro: str = (
        "A part of the frame at {time_s:.1f} seconds of the video, from {left:.0%} to {right:.0%} of its width and "
        "from {top:.0%} to {bottom:.0%} of its height:"
    )
    instruction: str = "Describe what this part of the frame shows, and read any text in it. Say only what is visible."
    spec = ZOOM_FRAME_SPEC
    shows_details = True

    def check(self, arguments: Mapping[str, Any], videos: Videos) -> ToolArgs:
        path = videos.path_of(arguments)
        time_s = moment_of(arguments, videos.infos[path].duration_s)
        return ToolArgs(path, Window(time_s, time_s), box_of(arguments))

    async def run(self, args: ToolArgs, context: ToolContext) -> Response:
        intro, frames = await self._look(args, context)
        closeup = context.prompter.closeup_of(frames, intro, self.instruction)
        assert args.window is not None and args.box is not None
        return await context.ask(closeup, f"{args.path} {args.window.start_s} {tuple(args.box)}")

    async def _look(self, args: ToolArgs, context: ToolContext) -> tuple[str, list[TimedPicture]]:
        """Returns a sentence that introduces the enlarged part, and its picture."""
        assert args.window is not None and args.box is not None
        time_s, box = args.window.start_s, args.box
        frames = await context.prompter.frames_at(args.path, [time_s], box)
        return self.intro.format(time_s=time_s, **box._asdict()), frames


@dataclass(frozen=True)
class ZoomPicture(ZoomFrame):
    """Returns the picture to the main agent (`rollout.crop_returns=frames`)."""

    spec = ZOOM_PICTURE_SPEC
    shows_pictures = True

    async def run(self, args: ToolArgs, context: ToolContext) -> Response:
        intro, frames = await self._look(args, context)
        return [f"{intro}\n", *frames]
