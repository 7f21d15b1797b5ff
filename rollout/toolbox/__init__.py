"""The tools that a model may call: built-in tools and the user's own tools."""

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

from rollout.toolbox.crop_video import CropFrames, CropVideo
from rollout.toolbox.search_subtitles import SearchSubtitles
from rollout.toolbox.tool import Tool, ToolArgs, ToolContext, Videos
from rollout.toolbox.zoom_frame import ZoomFrame, ZoomPicture
from rollout.tools import Signatures, ToolSpec
from rollout.user_code import forget_files, load_object

__all__ = ["CropReturns", "ToolContext", "Tool", "Videos", "ToolArgs", "signatures", "tools_of", "forget_user_code"]

CropReturns = Literal["report", "frames"]
BUILT_IN: dict[CropReturns, dict[str, Tool]] = {
    "report": {tool.spec.name: tool for tool in (CropVideo(), ZoomFrame(), SearchSubtitles())},
    "frames": {tool.spec.name: tool for tool in (CropFrames(), ZoomPicture(), SearchSubtitles())},
}
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def signatures(tools: Iterable[Tool]) -> Signatures:
    return {tool.spec.name: tool.spec.parameters for tool in tools}


@cache
def tools_of(names: tuple[str, ...], returns: CropReturns = "report") -> tuple[Tool, ...]:
    """Loads the tools in `rollout.tools`, given by name or as path/to/file.py:NAME."""
    if not names:
        raise ValueError(
            "rollout.tools=[] leaves nothing to call; leave it out, and set rollout.dispatch=none to disable tools"
        )
    tools = tuple(_user_tool(name) if ":" in name else _built_in(name, returns) for name in names)
    called = [tool.spec.name for tool in tools]
    for name in called:
        if called.count(name) > 1:
            raise ValueError(f"rollout.tools={list(names)} has {called.count(name)} tools named {name}")
    return tools


def forget_user_code() -> None:
    """Lets new settings and runs load the user's edited files. Agents keep their tools."""
    forget_files()
    tools_of.cache_clear()


def _built_in(name: str, returns: CropReturns) -> Tool:
    tools = BUILT_IN[returns]
    if name not in tools:
        raise ValueError(
            f"rollout.tools: there is no tool {name}; use one of {', '.join(tools)}, or your own tool, as "
            f"path/to/file.py:NAME"
        )
    return tools[name]


def _user_tool(location: str) -> Tool:
    loaded = load_object("rollout.tools", location)
    label = f"rollout.tools: {location}"
    try:
        tool = loaded() if isinstance(loaded, type) else loaded
        valid = isinstance(tool, Tool) and isinstance(tool.spec, ToolSpec) and bool(NAME.fullmatch(tool.spec.name))
        if valid:
            json.dumps([tool.spec.schema, tool.spec.parameters])
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{label} cannot be created: {type(problem).__name__}: {problem}") from problem
    if not valid:
        raise ValueError(f"{label} is not a Tool with a spec whose name is a word; docs/extend.md has an example")
    return tool
