"""Reads the model's text from an endpoint's chat completion, or raises an error that says why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout.endpoint.errors import ContentFiltered, EmptyChoice, Hide, Rejected, Unreachable, quoted

STOPS = ("stop", "eos", "end_turn", "stop_sequence", "")
MAX_COUNT = 2**31  # larger token counts in a reply are ignored
FILTERS = ("content_filter", "safety", "recitation", "prohibited", "blocklist", "spii", "image_safety", "refusal")


@dataclass(frozen=True)
class Reply:
    text: str  # includes the thinking, even if the endpoint returns it in a separate field
    finish: Literal["stop", "length"]
    num_prompt_tokens: int  # as reported by the endpoint; 0 if the count is missing or impossible
    num_sampled_tokens: int
    server: str
    latency_s: float


def read_completion(completion: Any, url: str, hide: Hide) -> Reply:
    """Converts a chat completion into a Reply. Raises an EndpointError if it is none; a cut-off one may be empty."""
    choices = get(completion, "choices")
    if not isinstance(choices, list):
        raise Unreachable(f"{url} sent no chat completion: {quoted(str(completion), hide)!r}")
    if not choices:
        raise EmptyChoice(f"{url} sent a completion with no choices")
    message, finish = get(choices[0], "message"), str(get(choices[0], "finish_reason") or "").lower()
    refusal = get(message, "refusal")
    if refusal or finish.startswith(FILTERS):
        raise ContentFiltered(f"{url} withheld the reply: {quoted(str(refusal or finish), hide)}")
    if finish in ("tool_calls", "function_call"):
        raise Rejected(f"{url} parsed the tool calls in the reply itself; start it without a tool-call parser")
    if finish in ("abort", "error"):  # "error" from a gateway whose server failed
        raise Unreachable(f"{url} ended a reply with finish_reason {finish}")
    is_cut_off = finish in ("length", "max_tokens")
    if not is_cut_off and finish not in STOPS:
        raise EmptyChoice(f"{url} ended a reply with finish_reason {quoted(finish, hide)!r}")
    text = joined(reasoning_of(message), text_of(get(message, "content")))
    if not text and not is_cut_off:
        raise EmptyChoice(f"{url} sent an empty reply")
    usage = get(completion, "usage")
    num_prompt, num_sampled = (_count(get(usage, name)) for name in ("prompt_tokens", "completion_tokens"))
    return Reply(text, "length" if is_cut_off else "stop", num_prompt, num_sampled, url, 0.0)


def joined(reasoning: str, content: str) -> str:
    """Returns the model's whole text, with the thinking that the endpoint has separated put back in front."""
    if not reasoning:
        return content
    if "</think>" in reasoning:  # from `paravt serve`: all turns with their tags; `content` is the answer without tags
        last_turn = reasoning[max(0, reasoning.rfind("<think>")) :]
        return last_turn if content in last_turn else f"{last_turn}\n{content}"
    return f"<think>\n{reasoning.strip()}\n</think>\n{content}" if content else f"<think>\n{reasoning}"


def reasoning_of(message: Any) -> str:
    return text_of(get(message, "reasoning_content") or get(message, "reasoning"))


def text_of(content: Any) -> str:
    """Returns a message's text, also from the list of parts that some endpoints send.

    Lone surrogates are replaced, because they cannot be sent back or displayed.
    """
    if isinstance(content, list):
        content = "".join(str(get(part, "text") or "") for part in content)
    return content.encode(errors="replace").decode() if isinstance(content, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
