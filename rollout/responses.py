"""Checks a tool's return value, which may be any object, and prepares it for the model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rollout.episode_config import EpisodeConfig
from rollout.parts import Part, cut, shown_in, with_times
from rollout.picture import Picture
from rollout.prompter import Frames
from rollout.threads import in_daemon_thread
from rollout.toolbox import Tool
from rollout.video.info import TimedPicture


async def checked_response(
    response: Any, tool: Tool, config: EpisodeConfig, frames: Frames, max_chars: int
) -> tuple[Part, ...]:
    """Returns the response's parts for the model: cuts texts, adds times to frames, resizes the tool's own pictures."""
    name, parts = tool.spec.name, response if isinstance(response, list | tuple) else [response]
    if wrong := [part for part in parts if not isinstance(part, Part)]:
        raise TypeError(f"{name} returned {type(wrong[0]).__name__}, expected text, or a list of texts and pictures")
    if wrong := [part.path for part in parts if isinstance(part, TimedPicture) and not isinstance(part.path, str)]:
        raise TypeError(f"{name} returned a frame whose path is {type(wrong[0]).__name__}, expected str")
    num_pictures = len(shown_in(parts))
    if num_pictures and not tool.shows_pictures:
        raise TypeError(f"{name} returned pictures; set its shows_pictures = True")
    if num_pictures > config.subagent_max_frames:
        raise ValueError(
            f"{name} returned {num_pictures} pictures, more than rollout.subagent_max_frames="
            f"{config.subagent_max_frames}"
        )
    if num_pictures:
        parts = await in_daemon_thread(lambda: [_fitted(part, frames) for part in parts])
    return with_times(list(_cut(parts, max_chars)), config.prompts)


def _fitted(part: Part, frames: Frames) -> Part:
    """Resizes a picture to a valid size and sets its key, unless it is a frame of a video, which has both."""
    if isinstance(part, str) or (isinstance(part, TimedPicture) and part.path):
        return part
    picture = part if isinstance(part, Picture) else part.picture
    fitted = Picture.of(frames.fitted(picture).pixels)
    return fitted if isinstance(part, Picture) else replace(part, picture=fitted)


def _cut(parts: Sequence[Part], max_chars: int) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, str):
            part = cut(part, max_chars) if max_chars else ""
            max_chars -= len(part)
        yield part
