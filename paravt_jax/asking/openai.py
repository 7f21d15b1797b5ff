"""OpenAI's chat completions as far as they mean something here: what is asked, and how an answer is put.

A question is the text of one user message, with what a system message says before it, and the videos and pictures of
that message. What would change the meaning of an answer and cannot be had is refused; the rest of what clients send is
theirs.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paravt_jax.asking.answerer import Reply

Kind = Literal["video", "image"]
MAX_QUESTION_CHARS = 100_000
MAX_MEDIA = 64
UNKNOWN_HERE = ("tools", "functions", "response_format", "logprobs", "stop", "audio", "modalities")
FINISHES = {"done": "stop", "length": "length", "context": "length", "abort": "stop"}


class BadRequest(ValueError):
    """The message is for the client; `param` is what of its request is wrong."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Medium:
    kind: Kind
    url: str


@dataclass(frozen=True)
class Asked:
    text: str
    media: tuple[Medium, ...]
    stream: bool = False
    usage_in_stream: bool = False
    temperature: float | int = 0.0
    seed: int = 0


def question_of(body: Any, model: str) -> Asked:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("model") != model:
        raise BadRequest(f"the model here is {model}, not {body.get('model')!r}", "model")
    for name in UNKNOWN_HERE:
        if body.get(name):
            raise BadRequest(f"{name} cannot be had here; leave it out", name)
    if body.get("n") not in (None, 1):
        raise BadRequest("one answer is given at a time; ask again for another", "n")
    options = body.get("stream_options") or {}
    text, media = _asked(body.get("messages"))
    return Asked(
        text,
        media,
        body.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        _number(body, "temperature", 0.0, 2.0),
        int(_number(body, "seed", -(2**63), 2**63 - 1)),
    )


def _asked(messages: Any) -> tuple[str, tuple[Medium, ...]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise BadRequest("messages must be a list of messages", "messages")
    roles = [one.get("role") for one in messages]
    if roles.count("user") != 1 or roles[-1] != "user" or set(roles) - {"system", "developer", "user"}:
        raise BadRequest(
            "a question is one user message, after a system message if any: nothing is kept of a conversation",
            "messages",
        )
    texts: list[str] = []
    media: list[Medium] = []
    for message in messages:
        for part in _parts(message.get("content")):
            texts.append(part) if isinstance(part, str) else media.append(part)
    text = "\n\n".join(filter(None, map(str.strip, texts)))
    if not text:
        raise BadRequest("there is no question: give a part of type text", "messages")
    if len(text) > MAX_QUESTION_CHARS:
        raise BadRequest(f"the question is longer than {MAX_QUESTION_CHARS} characters", "messages")
    if not media or len(media) > MAX_MEDIA:
        raise BadRequest(f"give between 1 and {MAX_MEDIA} parts of type video_url or image_url", "messages")
    return text, tuple(media)


def _parts(content: Any) -> Iterator[str | Medium]:
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise BadRequest("content must be a text or a list of parts", "messages")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind in ("video_url", "image_url"):
            given = part.get(kind)
            url = given.get("url") if isinstance(given, dict) else given
            if not isinstance(url, str) or not url:
                raise BadRequest(f"a part of type {kind} needs {{url: …}}", "messages")
            yield Medium("video" if kind == "video_url" else "image", url)
        else:
            raise BadRequest(f"a part of type {kind!r} is none of text, video_url, image_url", "messages")


def _number(body: Mapping[str, Any], name: str, least: float | int, most: float | int) -> float | int:
    value = body.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} must be a number from {least:g} to {most:g}", name)
    return value


def usage(answer: Reply) -> dict[str, Any]:
    """Of the main agent and all its sub-agents."""
    episode = answer.episode
    return {
        "prompt_tokens": episode.num_prompt_tokens,
        "completion_tokens": episode.num_sampled,
        "total_tokens": episode.num_prompt_tokens + episode.num_sampled,
        "prompt_tokens_details": {"cached_tokens": episode.num_cached_tokens},
    }


def completion(answer: Reply, name: str, model: str) -> dict[str, Any]:
    """`paravt` is ours: what the answer rests on, and how long each part took."""
    message = {"role": "assistant", "content": answer.text, "reasoning_content": _reasoning(answer)}
    record = answer.to_record()
    return {
        **_envelope(name, model, "chat.completion"),
        "choices": [{"index": 0, "message": message, "finish_reason": FINISHES[answer.finish], "logprobs": None}],
        "usage": usage(answer),
        "paravt": {key: record[key] for key in ("evidence", "outcomes", "seconds")},
    }


def chunk(name: str, model: str, delta: Mapping[str, str], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return {**_envelope(name, model, "chat.completion.chunk"), "choices": [choice]}


def last_chunks(answer: Reply, name: str, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
    yield chunk(name, model, {"content": answer.text})
    yield chunk(name, model, {}, FINISHES[answer.finish])
    if with_usage:
        yield {**_envelope(name, model, "chat.completion.chunk"), "choices": [], "usage": usage(answer)}


def error(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _reasoning(answer: Reply) -> str:
    return "\n".join(turn.text for turn in answer.episode.turns)


def _envelope(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
