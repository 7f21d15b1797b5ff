"""Parses requests and formats responses of OpenAI's chat completions API.

A question is one user message with its videos and pictures, after the text of the system message if there is one. Each
of OpenAI's parameters is supported, rejected or ignored; unknown parameters are rejected.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paravt_jax.asking.answerer import Reply

Kind = Literal["video", "image"]
MAX_QUESTION_CHARS = 100_000
MAX_MEDIA = 64
MAX_TOKENS = 2**31 - 1
ROLES = ("system", "developer", "user")
MAX_SHOWN_CHARS = 100  # characters of a client's value in an error
ACTED_ON = (
    *("messages", "model", "stream", "stream_options", "temperature", "top_p", "seed", "n"),
    *("max_tokens", "max_completion_tokens"),
)
# Parameters that would change the answer but are not supported, with the values that have no effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# Ignored: the client's bookkeeping, hints about speed, and settings of unsupported calls.
WITHOUT_EFFECT = (
    *("metadata", "user", "safety_identifier", "service_tier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
RETRY_S = 10  # before any question has been timed
FINISHES = {"done": "stop", "length": "length", "context": "length", "abort": "stop"}


class BadRequest(ValueError):
    """An invalid request. The message goes to the client; `param` is the invalid parameter."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Refused(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        retry_s: int | None = None,
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.retry_s, self.param, self.code = retry_s, param, code


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
    top_p: float | int = 1.0
    seed: int = 0
    max_tokens: int | None = None  # for all agents together, as usage counts them; None: no limit beyond the settings


def question_of(body: Any, model: str) -> Asked:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("model") != model:
        raise BadRequest(f"the model here is {model}, not {cut(body.get('model'))}", "model")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in REFUSED and not any(value == neutral for neutral in REFUSED[name]):
            raise BadRequest(f"{name} cannot be had here; leave it out", name)
        if name not in REFUSED and name not in ACTED_ON and name not in WITHOUT_EFFECT:
            raise BadRequest(f"{cut(name)} is no parameter of chat completions; leave it out", name[:MAX_SHOWN_CHARS])
    if given.get("n", 1) != 1:
        raise BadRequest("one answer is given at a time; ask again for another", "n")
    stream = _switch(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise BadRequest("stream_options must be an object, beside stream=true", "stream_options")
    text, media = _asked(given.get("messages"))
    most = [_whole(given, name, 1, MAX_TOKENS) for name in ("max_tokens", "max_completion_tokens") if name in given]
    top_p = _number(given, "top_p", 1.0, 0.0, 1.0)
    if not top_p:
        raise BadRequest("top_p must be above 0", "top_p")
    return Asked(
        text,
        media,
        stream,
        _switch(options, "include_usage"),
        _number(given, "temperature", 0.0, 0.0, 2.0),
        top_p,
        _whole(given, "seed", -(2**63), 2**63 - 1) if "seed" in given else 0,
        min(most, default=None),
    )


def cut(value: Any) -> str:
    """A client's value, shortened for an error message."""
    if not isinstance(value, str):
        return str(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__
    return repr(value if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]}…")


def _asked(messages: Any) -> tuple[str, tuple[Medium, ...]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise BadRequest("messages must be a list of messages", "messages")
    roles = [one.get("role") for one in messages]
    if roles.count("user") != 1 or roles[-1] != "user" or any(role not in ROLES for role in roles):
        raise BadRequest(
            "a question is one user message, after a system message if any: nothing is kept of a conversation",
            "messages",
        )
    texts: list[str] = []
    media: list[Medium] = []
    for message in messages:
        for part in _parts(message.get("content")):
            texts.append(part) if isinstance(part, str) else media.append(part)
    for said in (*texts, *(medium.url for medium in media)):
        try:
            said.encode()
        except UnicodeEncodeError:  # JSON can contain lone surrogates, which no encoding can represent
            raise BadRequest("messages hold a text that is no Unicode", "messages") from None
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
            raise BadRequest(f"a part of type {cut(kind)} is none of text, video_url, image_url", "messages")


def _number(given: Mapping[str, Any], name: str, usual: float, least: float | int, most: float | int) -> float | int:
    value = given.get(name, usual)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} must be a number from {least:g} to {most:g}", name)
    return value


def _whole(given: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name} must be a whole number from {least} to {most}", name)
    return value


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{name} must be true or false", name)
    return bool(value)


def usage(answer: Reply) -> dict[str, Any]:
    """Includes all sub-agents."""
    episode = answer.episode
    return {
        "prompt_tokens": episode.num_prompt_tokens,
        "completion_tokens": episode.num_sampled,
        "total_tokens": episode.num_prompt_tokens + episode.num_sampled,
        "prompt_tokens_details": {"cached_tokens": episode.num_cached_tokens},
    }


def completion(answer: Reply, name: str, model: str) -> dict[str, Any]:
    """`paravt` is our extension: the answer's evidence and the time of each part."""
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


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _reasoning(answer: Reply) -> str:
    return "\n".join(turn.text for turn in answer.episode.turns)


def _envelope(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
