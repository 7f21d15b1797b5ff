"""The errors of an endpoint, each with a short reason, and the classification of HTTP error responses.

No such error says anything about the model's answer, so the sample is missing, not wrong; a certificate counts missing
samples by reason. Endpoints describe the same problem in different words: the patterns match the messages of vLLM,
SGLang, OpenAI, Gemini's compatible endpoint and OpenRouter.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from rollout.engine.protocol import DeadlineExceeded, EngineError, RequestRejected

SAMPLE_REASONS = ("context", "content_filter", "empty")  # other samples may succeed
MAX_SHOWN_CHARS = 300  # an error quotes at most this much of an endpoint's response
HIDDEN = "***"
Hide = Callable[[str], str]  # removes the key from a text


class EndpointError(EngineError):
    """The base class of endpoint errors. Raise one of its subclasses, which define `reason`."""

    reason: ClassVar[str]


class ContextOverflow(EndpointError, RequestRejected):
    reason = "context"


class ContentFiltered(EndpointError):
    reason = "content_filter"


class EmptyChoice(EndpointError):
    reason = "empty"


class NoPictures(EndpointError):
    reason = "pictures"


class WrongKey(EndpointError):
    reason = "key"


class ModelNotServed(EndpointError):
    reason = "model"


class Unreachable(EndpointError):
    reason = "unreachable"


class Rejected(EndpointError, RequestRejected):
    reason = "rejected"


class TooLate(EndpointError, DeadlineExceeded):
    reason = "deadline"


class RateLimited(EndpointError):
    reason = "rate_limit"

    def __init__(self, message: str, retry_after_s: float | None = None, is_final: bool = False):
        super().__init__(message)
        self.retry_after_s, self.is_final = retry_after_s, is_final


REASONS = frozenset(error.reason for error in EndpointError.__subclasses__())

CONTEXT = re.compile(
    r"context.?length|maximum number of tokens|too many tokens|longer than the (maximum )?model|too long|"
    r"token count exceeds|exceeds the maximum allowed length|reduce the length|"
    r"max_(completion_)?tokens must be at least 1",
    re.IGNORECASE,
)
PICTURES = re.compile(
    r"not a multimodal model|at most \d+ image|image input is not supported|image_url is only supported|"
    r"(do(es)? not|n't) (support|accept|have) (image|vision|multimodal|multi-modal)|"
    r"no endpoints found that support image|(unknown|unsupported|invalid) (part|content) type",
    re.IGNORECASE,
)
FILTER = re.compile(r"content_filter|content.?(management.?)?policy|prohibited_content|input was flagged", re.I)
KEY = re.compile(r"api.?key.{0,20}(not valid|invalid|expired)|invalid.api.key|api_key_invalid", re.IGNORECASE)
MODEL = re.compile(r"model|no endpoints found for", re.IGNORECASE)
QUOTA = re.compile(r"insufficient_quota", re.IGNORECASE)
RETRY_DELAY = re.compile(r'"retryDelay"\s*:\s*"([\d.]+)s"')  # Gemini's, in the body
OTHER_LIMIT_NAME = re.compile(r"max_completion_tokens")
MAX_RETRY_AFTER_S = 86_400.0


def status_error(status: int, text: str, url: str, model: str, headers: Mapping[str, str], hide: Hide) -> EndpointError:
    """Returns the error for an HTTP error response: RateLimited, or an error that a retry cannot fix."""
    answered = f"{url} answered HTTP {status}: {quoted(text, hide)}"
    if status == 429:
        return RateLimited(answered, retry_after_s(headers, text), is_final=bool(QUOTA.search(text)))
    if status == 401 or (status == 403 and not FILTER.search(text)) or (status == 400 and KEY.search(text)):
        # The response text is left out, because it may repeat a part of the key.
        return WrongKey(f"{url} rejects the API key (HTTP {status}); check the variable that engine.api_key_env names")
    for pattern, error in ((PICTURES, NoPictures), (CONTEXT, ContextOverflow), (FILTER, ContentFiltered)):
        if pattern.search(text):
            return error(answered)
    if status == 404 and MODEL.search(text):
        return ModelNotServed(f"{url} does not serve the model {model}: {quoted(text, hide)}")
    if status == 404:
        return Rejected(f"{answered}; the address of an OpenAI-compatible endpoint usually ends in /v1")
    return Rejected(answered)


def quoted(text: str, hide: Hide) -> str:
    """Returns the message in an error response, shortened and without the API key."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    body = body[0] if isinstance(body, list) and body else body  # Gemini sends a list with one element
    error: Any = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return hide(" ".join((message if isinstance(message, str) and message else text).split()))[:MAX_SHOWN_CHARS]


def retry_after_s(headers: Mapping[str, str], text: str = "") -> float | None:
    """Returns the wait that a response asks for, or None if it names no wait."""
    delay = RETRY_DELAY.search(text)
    values = [(headers.get("retry-after-ms", ""), 1e-3), (headers.get("retry-after", ""), 1.0)]
    for value, unit_s in [*values, (delay[1] if delay else "", 1.0)]:
        if (seconds := _seconds(value, unit_s)) is not None:
            return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
    return None


def _seconds(value: str, unit_s: float) -> float | None:
    with suppress(ValueError):
        seconds = float(value) * unit_s
        return None if math.isnan(seconds) else seconds
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
