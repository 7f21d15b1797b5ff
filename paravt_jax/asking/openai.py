"""Parses requests and formats responses of OpenAI's chat completions API.

The question is the last user message; earlier messages are its history. Every user message may have videos and
images. Each of OpenAI's parameters is supported, rejected or ignored; unknown parameters are rejected.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paravt_jax.asking.answerer import Answer
from paravt_jax.config import MAX_FRAMES
from rollout.engine.protocol import MIN_TEMPERATURE
from rollout.prompts import PastTurn

Kind = Literal["video", "image"]
MAX_QUESTION_CHARS = 100_000  # total of all messages
MAX_MESSAGES = 256
MAX_MEDIA = 64
MAX_TOKENS = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant")
MAX_SHOWN_CHARS = 100  # characters of a client's value in an error
SUPPORTED = (
    *("messages", "model", "stream", "stream_options", "temperature", "top_p", "seed", "n"),
    *("max_tokens", "max_completion_tokens"),
    "media_io_kwargs",  # a parameter of vLLM, which lmms-eval sends with videos
)
# Parameters that would change the answer but are not supported, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
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
# Client metadata, performance hints, and settings of unsupported calls.
IGNORED = (
    *("metadata", "user", "safety_identifier", "service_tier", "prediction", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
MEDIA_FIELDS = ("url", "detail")  # fields of a video or image; the second is ignored
RETRY_S = 10  # before any question has been timed
FINISHES = {"done": "stop", "length": "length", "context": "length"}


class RequestError(Exception):
    """An error response in OpenAI's format. The message goes to the client; `param` is the invalid parameter."""

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

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    def __init__(self, message: str, param: str = "messages"):
        super().__init__(400, message, param=param)


@dataclass(frozen=True)
class Medium:
    kind: Kind
    url: str


@dataclass(frozen=True)
class Question:
    text: str
    media: tuple[Medium, ...]  # media of all turns, in order
    history: tuple[PastTurn, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    seed: int | None = None
    max_tokens: int | None = None  # for all agents together, as in usage; None: only the settings limit it
    num_frames: int | None = None  # overview frames; None: the server's default


def parse_question(body: Any, model: str) -> Question:
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object")
    if not isinstance(requested := body.get("model"), str):
        raise BadRequest(f"model must be {model!r}, the name of this server's model", "model")
    if requested != model:
        sentence = f"this server has the model {model}, not {cut(requested)}"
        raise RequestError(404, sentence, param="model", code="model_not_found")
    parameters = {name: value for name, value in body.items() if value is not None}
    for name, value in parameters.items():
        if name in UNSUPPORTED and not any(value == neutral for neutral in UNSUPPORTED[name]):
            raise BadRequest(f"{name} is not supported; leave it out", name)
        if name not in UNSUPPORTED and name not in SUPPORTED and name not in IGNORED:
            raise BadRequest(
                f"{cut(name)} is not a parameter of chat completions; leave it out", name[:MAX_SHOWN_CHARS]
            )
    if parameters.get("n", 1) != 1:
        raise BadRequest("n must be 1; send another request for another answer", "n")
    stream = _boolean(parameters, "stream")
    options = parameters.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise BadRequest("stream_options must be an object and needs stream=true", "stream_options")
    messages = _parse_messages(parameters.get("messages"))
    *history, last = _turns(messages)
    if not last.text:
        raise BadRequest("the question is empty; send a part of type text in the last message")
    limits = [
        _integer(parameters, name, 1, MAX_TOKENS)
        for name in ("max_tokens", "max_completion_tokens")
        if name in parameters
    ]
    top_p = _number(parameters, "top_p", 1.0, 0.0, 1.0)
    if not top_p:
        raise BadRequest("top_p must be above 0", "top_p")
    temperature = _number(parameters, "temperature", 0.0, 0.0, 2.0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise BadRequest(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}", "temperature")
    return Question(
        last.text,
        tuple(medium for message in messages for medium in message.media),
        tuple(history),
        stream,
        _boolean(options, "include_usage"),
        temperature,
        top_p,
        _integer(parameters, "seed", -(2**63), 2**63 - 1) if "seed" in parameters else None,
        min(limits, default=None),
        _num_frames(parameters),
    )


def cut(value: Any) -> str:
    """Shortens a client's value for an error message."""
    if not isinstance(value, str):
        return str(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__
    return repr(value if len(value) <= MAX_SHOWN_CHARS else f"{value[:MAX_SHOWN_CHARS]}…")


@dataclass(frozen=True)
class ParsedMessage:
    role: str
    text: str
    media: list[Medium]


def _parse_messages(messages: Any) -> list[ParsedMessage]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(messages)} messages, more than {MAX_MESSAGES}")
    parsed = list(map(_parse_message, messages))
    if parsed[-1].role != "user":
        raise BadRequest("the last message must have the role user")
    if sum(len(message.text) for message in parsed) > MAX_QUESTION_CHARS:
        raise BadRequest(f"the texts in messages are longer than {MAX_QUESTION_CHARS} characters")
    if sum(len(message.media) for message in parsed) > MAX_MEDIA:
        raise BadRequest(f"expected at most {MAX_MEDIA} parts of type video_url or image_url")
    return parsed


def _parse_message(message: Mapping[str, Any]) -> ParsedMessage:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"the role of a message must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {cut(role)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise BadRequest("messages with calls are not supported")
    parts = list(_parts(message.get("content")))
    texts = [part for part in parts if isinstance(part, str)]
    media = [part for part in parts if isinstance(part, Medium)]
    if media and role != "user":
        raise BadRequest("only messages with the role user may have videos and images")
    for string in (*texts, *(medium.url for medium in media)):
        try:
            string.encode()
        except UnicodeEncodeError:  # JSON can contain lone surrogates, which no encoding can represent
            raise BadRequest("a text in messages is not valid Unicode") from None
    return ParsedMessage(role, _joined(texts), media)


def _turns(messages: Iterable[ParsedMessage]) -> list[PastTurn]:
    """The turns of user and assistant. A system message is prepended to the next user message."""
    turns: list[PastTurn] = []
    system_texts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(PastTurn("assistant", message.text))
        elif message.role == "user":
            kinds = [medium.kind for medium in message.media]
            text = _joined([*system_texts, message.text])
            turns.append(PastTurn("user", text, kinds.count("video"), kinds.count("image")))
            system_texts = []
        else:
            system_texts.append(message.text)
    return turns


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, map(str.strip, texts)))


def _parts(content: Any) -> Iterator[str | Medium]:
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise BadRequest("content must be a string or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise BadRequest("the text of a part must be a string")
            yield part["text"]
        elif kind in ("video_url", "image_url"):
            medium = part.get(kind)
            url = medium.get("url") if isinstance(medium, dict) else medium
            if not isinstance(url, str) or not url:
                raise BadRequest(f"a part of type {kind} needs {{url: …}}")
            names = {*part, *(medium if isinstance(medium, dict) else ())} - {"type", kind, *MEDIA_FIELDS}
            if unknown := sorted(names):
                raise BadRequest(f"{cut(unknown[0])} of a part of type {kind} is not supported; leave it out")
            yield Medium("video" if kind == "video_url" else "image", url)
        else:
            raise BadRequest(f"the type of a part must be text, video_url or image_url, not {cut(kind)}")


def _number(
    parameters: Mapping[str, Any], name: str, default: float, low: float | int, high: float | int
) -> float | int:
    value = parameters.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} must be a number from {low:g} to {high:g}", name)
    return value


def _integer(parameters: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = parameters[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer from {low} to {high}", name)
    return value


def _num_frames(parameters: Mapping[str, Any]) -> int | None:
    match parameters.get("media_io_kwargs"):
        case None:
            return None
        case {"video": {"num_frames": int(), **other_options}, **other_kinds} if not other_options and not other_kinds:
            return _integer(parameters["media_io_kwargs"]["video"], "num_frames", 1, MAX_FRAMES)
    raise BadRequest("media_io_kwargs must be {video: {num_frames: N}}", "media_io_kwargs")


def _boolean(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{name} must be true or false", name)
    return bool(value)


def usage(answer: Answer) -> dict[str, Any]:
    """Token usage of the agent and all its sub-agents."""
    episode = answer.episode
    return {
        "prompt_tokens": episode.num_prompt_tokens,
        "completion_tokens": episode.num_sampled,
        "total_tokens": episode.num_prompt_tokens + episode.num_sampled,
        "prompt_tokens_details": {"cached_tokens": episode.num_cached_tokens},
    }


def completion(answer: Answer, name: str, model: str) -> dict[str, Any]:
    """Formats a response. Our extension `paravt` has the answer's evidence and timings."""
    reasoning = "\n".join(turn.text for turn in answer.episode.turns)
    message = {"role": "assistant", "content": answer.text, "reasoning_content": reasoning}
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


def last_chunks(answer: Answer, name: str, model: str, with_usage: bool) -> Iterator[dict[str, Any]]:
    yield chunk(name, model, {"content": answer.text})
    yield chunk(name, model, {}, FINISHES[answer.finish])
    if with_usage:
        yield {**_envelope(name, model, "chat.completion.chunk"), "choices": [], "usage": usage(answer)}


def _envelope(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
