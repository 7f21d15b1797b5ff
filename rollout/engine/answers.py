"""What a server answered, believed only as far as it can be true.

A server may be another program than we think, another model, or broken. What it says of a sampled token ends in the
loss, so an answer that no SGLang with the weights of this run could have given is a failure of that server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollout.engine.http import ServerUnavailable
from rollout.engine.labels import Label, WrongLabel
from rollout.engine.protocol import Generation, Sampling

FINISHES: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}
LOGP_SLACK = 1e-3  # above 0, from rounding
MAX_TOKENS = 2**24  # of a prompt, as a server counts it
ANSWER_BYTES, TOKEN_BYTES = 2**20, 2**10  # of an answer, and of each token in it: ten times what SGLang writes

# Several scripts, digits, tags and a rare word: two tokenizers or two sets of weights rarely agree on all of it.
PROBE_TEXT = (
    "<think>\nIn 1987 the pale-green zeppelin hovered 42.5 m above Łódź, снег fell, 雨が降る.</think>"
    '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3}}</tool_call>\n\tπ≈3.14159; def f(x): return x**2'
)
# Of the spread of log-probs over the text, which grows with a model's logits as its rounding errors do. Two programs
# that are right in bfloat16 were measured at 0.007 to 0.022, another rope_theta at 0.16 and more, other weights at 0.9.
PROBE_FRAC = 0.07


@dataclass(frozen=True)
class Expected:
    """Whose weights sampled a reply: their label's owner, the version when it was sent, and the newest when it came."""

    owner: str
    oldest: int
    newest: int


def generation_of(
    answer: Any, sampling: Sampling, expected: Expected, vocab_size: int, url: str, latency_s: float
) -> Generation:
    """Raises WrongLabel where other weights sampled it than those that the server was given."""
    try:
        meta = answer["meta_info"]
        ids = _ids(answer["output_ids"])
        _demand(bool((ids < vocab_size).all()), f"an id is beyond the vocabulary of {vocab_size}")
        logps = meta.get("output_token_logprobs", [])  # a request aborted before its first token has none
        _demand(len(ids) <= sampling.max_new_tokens, f"{len(ids)} tokens, {sampling.max_new_tokens} were asked for")
        _demand([token for _, token, *_ in logps] == ids.tolist(), "its ids and the ids of its log-probs differ")
        _demand(not np.isin(ids[:-1], sampling.stop_ids).any(), "it went on after a token that ends the turn")
        _demand(all(type(logp) in (int, float) for logp, *_ in logps), "a log-prob is no number")
        finish = FINISHES[meta["finish_reason"]["type"]]
        _demand(len(ids) > 0 or finish == "abort", f"it has no token, and ended by {finish!r}")
        behavior_logp = np.array([logp for logp, *_ in logps], np.float32)
        _demand(bool(np.isfinite(behavior_logp).all()), "a log-prob is not finite")
        _demand(bool((behavior_logp <= LOGP_SLACK).all()), "a log-prob is above 0")
        return Generation(
            ids,
            np.minimum(behavior_logp, 0.0),
            _versions(meta["weight_versions"] if len(ids) else [], len(ids), expected, url),
            finish=finish,
            num_prompt_tokens=_count(meta["prompt_tokens"]),
            num_cached_tokens=_count(meta["cached_tokens"]),
            server=url,
            latency_s=latency_s,
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as problem:
        raise ServerUnavailable(f"{url} gave an answer that cannot be: {problem!r}") from None


def ids_so_far(message: Any, before: Sequence[int], url: str) -> list[int]:
    """Of one message of a stream, which says again what those before it said."""
    try:
        ids = _ids(message["output_ids"]).tolist()
        _demand(ids[: len(before)] == list(before), "a message of its stream does not begin as the one before")
        return ids
    except (KeyError, TypeError, ValueError) as problem:
        raise ServerUnavailable(f"{url} gave an answer that cannot be: {problem!r}") from None


def answer_bytes(sampling: Sampling) -> int:
    return ANSWER_BYTES + TOKEN_BYTES * sampling.max_new_tokens


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """What tells tokenizers, configs and weights apart: the ids of a text, and the log-prob of each."""

    ids: np.ndarray
    logp: np.ndarray

    @classmethod
    def of(cls, answer: Any, url: str) -> "Fingerprint":
        try:
            scored = answer["meta_info"]["input_token_logprobs"]
            logp = np.array([logp for logp, *_ in scored[1:]], np.float32)  # the first has none
            _demand(len(logp) > 0 and bool(np.isfinite(logp).all()), "a log-prob is not a finite number")
            return cls(_ids([token for _, token, *_ in scored]), logp)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as problem:
            raise ServerUnavailable(f"{url} gave an answer that cannot be: {problem!r}") from None

    def problem(self, other: "Fingerprint") -> str:
        """How this one differs from what it should be; empty where it does not."""
        if not np.array_equal(self.ids, other.ids):
            return "its tokenizer gives other ids"
        difference, allowed = np.median(np.abs(self.logp - other.logp)), PROBE_FRAC * np.std(other.logp)
        if difference > allowed:
            return (
                f"half of its log-probs of the same text differ by more than {difference:.3g}, allowed is {allowed:.3g}"
            )
        return ""


def probe_body() -> dict[str, Any]:
    return {
        "text": PROBE_TEXT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _ids(told: Any) -> np.ndarray:
    _demand(isinstance(told, list) and all(type(token) is int for token in told), "an id is no whole number")
    _demand(all(0 <= token < 2**31 for token in told), "an id is negative or larger than any vocabulary")
    return np.array(told, np.int32)


def _versions(spans: Sequence[Any], num_tokens: int, expected: Expected, url: str) -> np.ndarray:
    """The policy version of each token; the spans must lie side by side, from the first token to the last.

    While another run asks for a server, its tokens have no version: it is known where no publish can have come between.
    """
    labels = [Label.of(span["version"]) for span in spans]
    versions, end, version = np.full(num_tokens, -1, np.int32), 0, expected.oldest
    for number, (span, label) in enumerate(zip(spans, labels, strict=True)):
        oldest = version
        if label.asker and label.owner == expected.owner:
            later = [one.version for one in labels[number:] if one.version is not None]
            _demand(version == (later or [expected.newest])[0], f"new weights came while the label was {label}")
        else:
            version = -1 if label.version is None else label.version
        if label.owner != expected.owner or not oldest <= version <= expected.newest:
            should = Label(expected.owner, expected.newest)
            raise WrongLabel(f"{url} sampled with the weights {label}, and {should} was published to it")
        _demand(span["start"] == end and end < span["end"] <= num_tokens, "its versions do not lie side by side")
        end = _count(span["end"])
        versions[span["start"] : end] = version
    _demand(end == num_tokens, "some tokens have no policy version")
    return versions


def _count(told: Any) -> int:
    _demand(type(told) is int and 0 <= told <= MAX_TOKENS, f"{told!r} is no number of tokens")
    return told


def _demand(true: bool, otherwise: str) -> None:
    if not true:
        raise ValueError(otherwise)
