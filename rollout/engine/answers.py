"""Validates the replies of servers.

A server may run another program or another model, or it may be broken. Its log-probs enter the loss, so a reply that no
SGLang server with this run's weights could give counts as a failure of that server.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollout.engine.http import ServerUnavailable
from rollout.engine.labels import Label, WrongLabel
from rollout.engine.protocol import LOGP_SLACK, Generation, Sampling
from rollout.engine.settings import Mixture, SGLangSettings

FINISHES: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}
MAX_TOKENS = 2**24  # larger token counts in a reply are invalid
ANSWER_BYTES, TOKEN_BYTES = 2**20, 2**10  # a reply's limit, and the limit per token: ten times the size of SGLang's

# Several scripts, digits, tags and a rare word: two tokenizers or two sets of weights rarely agree on all of it.
PROBE_TEXT = (
    "<think>\nIn 1987 the pale-green zeppelin hovered 42.5 m above Łódź, снег fell, 雨が降る.</think>"
    '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3}}</tool_call>\n\tπ≈3.14159; def f(x): return x**2'
)
# The largest accepted difference, as a fraction of the standard deviation of the text's log-probs, because both scale
# with a model's logits. Measured: 0.007 to 0.022 for correct bfloat16 servers, 0.16 for another rope_theta, 0.9 for
# other weights.
PROBE_FRAC = 0.07


@dataclass(frozen=True)
class Expected:
    """The weights that may have sampled a reply."""

    owner: str
    oldest: int  # version when the request was sent
    newest: int  # version when the reply arrived


def generation_of(
    answer: Any, sampling: Sampling, expected: Expected, settings: SGLangSettings, url: str, latency_s: float
) -> Generation:
    """Converts a server's reply into a Generation. Raises ServerUnavailable if the reply is invalid.

    Raises WrongLabel if the server sampled with weights that this engine did not give it.
    """
    try:
        meta = answer["meta_info"]
        ids = _ids(answer["output_ids"])
        _check(bool((ids < settings.vocab_size).all()), f"an id is beyond the vocabulary of {settings.vocab_size}")
        logps = meta.get("output_token_logprobs", [])  # missing if a request is aborted before its first token
        _check(len(ids) <= sampling.max_new_tokens, f"{len(ids)} tokens, at most {sampling.max_new_tokens} requested")
        _check([token for _, token, *_ in logps] == ids.tolist(), "its ids differ from the ids of its log-probs")
        _check(not np.isin(ids[:-1], sampling.stop_ids).any(), "it sampled on after a stop token")
        _check(all(type(logp) in (int, float) for logp, *_ in logps), "a log-prob is not a number")
        finish = FINISHES[meta["finish_reason"]["type"]]
        _check(len(ids) > 0 or finish == "abort", f"it has no token and finish reason {finish!r}")
        behavior_logp = np.array([logp for logp, *_ in logps], np.float32)
        _check(not (behavior_logp > LOGP_SLACK).any(), "a log-prob is above 0")
        num_prompt_tokens, mixture = _count(meta["prompt_tokens"]), settings.mixture
        return Generation(
            ids,
            np.minimum(behavior_logp, 0.0),
            _versions(meta["weight_versions"] if len(ids) else [], len(ids), expected, url),
            finish=finish,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=_count(meta["cached_tokens"]),
            server=url,
            latency_s=latency_s,
            experts=_experts(meta.get("routed_experts"), mixture, num_prompt_tokens + len(ids) - 1)
            if mixture
            else None,
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as problem:
        raise ServerUnavailable(f"{url} gave an invalid answer: {problem!r}") from None


def ids_so_far(message: Any, previous: Sequence[int], url: str) -> list[int]:
    """Returns the ids in a message of a stream; each message repeats the ids of the previous ones."""
    try:
        ids = _ids(message["output_ids"]).tolist()
        _check(ids[: len(previous)] == list(previous), "a message of its stream does not repeat the previous ids")
        return ids
    except (KeyError, TypeError, ValueError) as problem:
        raise ServerUnavailable(f"{url} gave an invalid answer: {problem!r}") from None


def answer_bytes(sampling: Sampling, settings: SGLangSettings) -> int:
    """Returns the limit of a reply's size."""
    experts = settings.mixture.token_bytes * settings.max_context_tokens if settings.mixture else 0
    return ANSWER_BYTES + TOKEN_BYTES * sampling.max_new_tokens + experts


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Ids and log-probs of a fixed text. They show if two servers have the same tokenizer, config and weights."""

    ids: np.ndarray
    logp: np.ndarray

    @classmethod
    def of(cls, answer: Any, url: str) -> "Fingerprint":
        try:
            scored = answer["meta_info"]["input_token_logprobs"]
            logp = np.array([logp for logp, *_ in scored[1:]], np.float32)  # the first token has none
            _check(len(logp) > 0 and bool(np.isfinite(logp).all()), "a log-prob is not a finite number")
            return cls(_ids([token for _, token, *_ in scored]), logp)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as problem:
            raise ServerUnavailable(f"{url} gave an invalid answer: {problem!r}") from None

    def problem(self, other: "Fingerprint") -> str:
        """Describes the difference from `other`; "" if there is none."""
        if not np.array_equal(self.ids, other.ids):
            return "its tokenizer gives other ids"
        difference, allowed = np.median(np.abs(self.logp - other.logp)), PROBE_FRAC * np.std(other.logp)
        if difference > allowed:
            return f"half of its log-probs of the same text differ by more than {difference:.3g}, limit {allowed:.3g}"
        return ""


def probe_body() -> dict[str, Any]:
    return {
        "text": PROBE_TEXT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _ids(value: Any) -> np.ndarray:
    _check(isinstance(value, list) and all(type(token) is int for token in value), "an id is not an integer")
    _check(all(0 <= token < 2**31 for token in value), "an id is negative or larger than any vocabulary")
    return np.array(value, np.int32)


def _versions(spans: Sequence[Any], num_tokens: int, expected: Expected, url: str) -> np.ndarray:
    """Returns the policy version of each token; the spans must cover all tokens without gaps.

    While another run asks for the server, the server's label has no version. The version is then inferred if no new
    weights can have been published in between.
    """
    labels = [Label.of(span["version"]) for span in spans]
    versions, end, version = np.full(num_tokens, -1, np.int32), 0, expected.oldest
    for number, (span, label) in enumerate(zip(spans, labels, strict=True)):
        oldest = version
        if label.asker and label.owner == expected.owner:
            later = [other.version for other in labels[number:] if other.version is not None]
            _check(version == (later or [expected.newest])[0], f"new weights came while the label was {label}")
        else:
            version = -1 if label.version is None else label.version
        if label.owner != expected.owner or not oldest <= version <= expected.newest:
            should = Label(expected.owner, expected.newest)
            raise WrongLabel(f"{url} sampled with the weights {label}, and {should} was published to it")
        _check(span["start"] == end and end < span["end"] <= num_tokens, "its version spans have gaps or overlap")
        end = _count(span["end"])
        versions[span["start"] : end] = version
    _check(end == num_tokens, "some tokens have no policy version")
    return versions


def _experts(encoded: Any, mixture: Mixture, num_tokens: int) -> np.ndarray | None:
    """Decodes the experts of each token; None if the server runs without --enable-return-routed-experts."""
    if encoded is None:
        return None
    experts = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
    experts = experts.reshape(-1, mixture.num_layers, mixture.token_experts)
    _check(len(experts) == num_tokens, f"it has experts for {len(experts)} tokens, expected {num_tokens}")
    _check(bool(((experts >= 0) & (experts < mixture.num_experts)).all()), "an expert index is out of range")
    return experts.astype(np.int16)


def _count(value: Any) -> int:
    _check(type(value) is int and 0 <= value <= MAX_TOKENS, f"{value!r} is not a number of tokens")
    return value


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
