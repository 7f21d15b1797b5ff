"""Renders tools and their responses as text, for models whose chat template does not render them."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.prompts import text_part

TOOLS = """\
# Tools

The functions that you may call, one JSON object a line, between <tools></tools>:
<tools>
{schemas}
</tools>

To call one, write its name and arguments as a JSON object between <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describes the tools at the end of the system message, and adds a system message if there is none."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    system, *others = (dict(message) for message in messages)
    text = "\n\n".join(filter(None, [system["content"], TOOLS.format(schemas=schemas)]))
    return [system | {"content": text}, *others]


def with_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges consecutive tool messages into one user message, as Qwen's chat templates do."""
    rendered: list[dict[str, Any]] = []
    for is_tool, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if not is_tool:
            rendered += run
            continue
        parts: list[dict[str, Any]] = []
        for message in run:
            content = message["content"]
            parts.append(text_part("\n<tool_response>\n" if parts else "<tool_response>\n"))
            parts += [text_part(content)] if isinstance(content, str) else content
            parts.append(text_part("\n</tool_response>"))
        rendered.append({"role": "user", "content": parts})
    return rendered
