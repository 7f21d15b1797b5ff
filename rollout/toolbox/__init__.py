"""The tools that a model may call: those that are here, and those of the user's own."""

import json
import re
from collections.abc import Iterable
from functools import cache

from rollout.own_code import object_at
from rollout.toolbox.crop_video import CropVideo
from rollout.toolbox.search_subtitles import SearchSubtitles
from rollout.toolbox.tool import Desk, Tool, Videos, Wanted
from rollout.toolbox.zoom_frame import ZoomFrame
from rollout.tools import Offer, Signatures

__all__ = ["Desk", "Tool", "Videos", "Wanted", "signatures", "tools_of"]

SHIPPED: dict[str, Tool] = {tool.offer.name: tool for tool in (CropVideo(), ZoomFrame(), SearchSubtitles())}
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def signatures(tools: Iterable[Tool]) -> Signatures:
    return {tool.offer.name: tool.offer.parameters for tool in tools}


@cache
def tools_of(names: tuple[str, ...]) -> tuple[Tool, ...]:
    """The tools that `rollout.tools` lists, each by its name or by path/to/file.py:NAME."""
    if not names:
        raise ValueError("rollout.tools=[] leaves nothing to call; set rollout.dispatch=none to offer no tool")
    tools = tuple(_own(name) if ":" in name else _shipped(name) for name in names)
    called = [tool.offer.name for tool in tools]
    for name in called:
        if called.count(name) > 1:
            raise ValueError(f"rollout.tools={list(names)} has {called.count(name)} tools of the name {name}")
    return tools


def _shipped(name: str) -> Tool:
    if name not in SHIPPED:
        raise ValueError(
            f"rollout.tools: there is no tool {name}; there are {', '.join(SHIPPED)}, and those of your own, as "
            f"path/to/file.py:NAME"
        )
    return SHIPPED[name]


def _own(place: str) -> Tool:
    found = object_at("rollout.tools", place)
    told = f"rollout.tools: {place}"
    try:
        tool = found() if isinstance(found, type) else found
        good = isinstance(tool, Tool) and isinstance(tool.offer, Offer) and bool(NAME.fullmatch(tool.offer.name))
        if good:
            json.dumps([tool.offer.schema, tool.offer.parameters])
    except (Exception, SystemExit) as problem:
        raise ValueError(f"{told} cannot be made: {type(problem).__name__}: {problem}") from problem
    if not good:
        raise ValueError(f"{told} is no Tool with an offer whose name is a word; docs/rollouts.md has an example")
    return tool
