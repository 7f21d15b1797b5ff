"""Prepares the texts and pictures of a dialogue for an endpoint.

The endpoint's tokenizer is unknown, so text from outside is escaped wherever it may spell a special token that opens or
closes a turn, a call or a picture. Tools are described in the system message, with the tags of Qwen's chat template; no
`tools` parameter is sent, because servers would then parse the calls by their own rules.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.picture import Picture

# Special tokens of Qwen, Llama, Gemma, InternVL, LLaVA and Mistral. <answer> is plain text in all of them.
CONTROL = re.compile(
    r"<(?=[|｜])|<(?=/?s>)|<(?=[be]os>)|<(?=(?:start|end)_of_\w+>)|\[(?=/?(?:INST|IMG|SYSTEM_PROMPT)\w*\])"
)
TAG = re.compile(
    r"<(?=/?(?:tool_\w+|tools|think|image|video|img|IMG_CONTEXT|IMG_START|IMG_END)>)|"
    r"\[(?=/?(?:AVAILABLE_TOOLS|TOOL_\w+|THINK)\])"
)
JPEG_URL = "data:image/jpeg;base64,"


class EndpointEncoder:
    """Replaces `rollout.chat.Chat` for endpoints: escapes texts, but returns no ids."""

    def escape(self, text: str) -> str:
        """Inserts a space into every string that may be a special token."""
        return TAG.sub(_spaced, escape_control(text))

    def escape_control(self, text: str) -> str:
        return escape_control(text)

    def ids(
        self, messages: Sequence[Mapping[str, Any]], num_pictures: int, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        """Returns no ids, because only the endpoint knows its tokenizer."""
        return np.zeros(0, np.int32)


def escape_control(text: str) -> str:
    """Escapes control tokens only. For the model's own turns, which may contain calls and thinking."""
    text = text.encode(errors="replace").decode()  # replaces lone surrogates, which cannot be sent
    return CONTROL.sub(_spaced, text)


def _spaced(match: re.Match[str]) -> str:
    return f"{match[0]} "


def with_pictures(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """Replaces picture placeholders by the pictures, in order, and merges consecutive texts into one part."""
    left = iter(pictures)
    return [
        {**message, "content": _content(message["content"], left)}
        for message in messages
        if message["content"] or message["role"] != "system"
    ]


def _content(content: str | Sequence[Mapping[str, Any]], pictures: Iterator[Picture]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "image":
            parts.append(image_part(next(pictures).jpeg_base64))
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def image_part(jpeg_base64: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"{JPEG_URL}{jpeg_base64}"}}


def video_part(path: Path) -> dict[str, Any]:
    """Returns a message part with the video's path; the server reads the file itself."""
    return {"type": "video_url", "video_url": {"url": path.absolute().as_uri()}}
