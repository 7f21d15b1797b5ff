"""Converts episode records for the page, without token ids and log-probs.

A turn is cut into pieces, each with its reward credits and advantage. Python cuts them, not the page, because
JavaScript counts UTF-16 units while the records count characters.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import NoneType
from typing import Any, NamedTuple

from model_port.terminal import visible
from paravt_jax.rewards.answers import interval
from paravt_jax.rewards.grammar import TAG
from paravt_jax.view.pictures import thumbnail
from rollout.picture import Picture
from rollout.prompts import IMAGE_PLACEHOLDER, PLACEHOLDER
from rollout.tools import find_calls
from rollout.video.box import Box

PAGE_BYTES = 3_000_000  # for all episodes together
MIN_EPISODE_BYTES = 6_000  # per episode; many episodes exceed PAGE_BYTES
TEXT_LIMITS = (20_000, 4_000, 800)  # characters per text; the first limit with which an episode fits is used
MAX_TURNS = 40  # per episode; also the most calls per turn
NUMBER, TEXT, NAME = (int, float, NoneType), (str, NoneType), (str,)
# Fields that the page gets as they are in a record, with their types
TERMS = dict.fromkeys(("total", "accuracy", "format", "base", "anchor", "think_first", "balanced", "tool"), NUMBER)
OWN = {"name": NAME, "value": NUMBER, "weight": NUMBER}  # of a plugin's reward term
CREDIT = {"name": NAME, "term": NAME, "value": NUMBER}
COPIED = {
    "step": (int, NoneType),
    "cell": TEXT,
    "finish": TEXT,
    "seconds": NUMBER,
    "overview_s": NUMBER,
    "reason": TEXT,
}
COPIED_OF_TURN = {"finish": TEXT, "started_s": NUMBER, "latency_s": NUMBER}
COPIED_OF_CALL = {"started_s": NUMBER, "latency_s": NUMBER}
PLACEHOLDERS = re.compile(f"{PLACEHOLDER}|{IMAGE_PLACEHOLDER}")
PROMPT = re.compile(r"(?:\d{6}-|validation-)?(.*?)(?:/\d+)?", re.DOTALL)  # prompt part of an episode id
ADVANTAGE_DIGITS = 4

PageDict = dict[str, Any]  # JSON for the page


class Mark(NamedTuple):
    """A labeled span of a text.

    `kind` is `forced`, `tag`, `call`, `credit` or `advantage`; `number` is the index of the call, credit or advantage.
    """

    start: int
    end: int
    kind: str
    number: int = 0


def share_bytes(num_episodes: int) -> int:
    """Size limit per episode."""
    return max(MIN_EPISODE_BYTES, PAGE_BYTES // max(1, num_episodes))


def convert_within(num_bytes: int, record: Mapping[str, Any], forced: str) -> PageDict:
    """Converts an episode, with its texts cut until it fits in `num_bytes`."""
    for limit_chars in TEXT_LIMITS:
        episode = convert(record, forced, limit_chars)
        if len(json.dumps(episode, allow_nan=False)) <= num_bytes:
            return episode
    left_out = {"turns": [], "segments": [], "reward": None, "advantage": None, "videos": None}
    episode = convert({**record, **left_out}, forced, TEXT_LIMITS[-1])
    return episode | {"problem": "too large for this page"}


def row_of(episode: PageDict, run: int) -> PageDict:
    """The fields for the episode list and its filters. The page parses the rest when you open an episode."""
    calls = [call["outcome"] for turn in episode["turns"] for call in turn["calls"]]
    reward, outcome = episode["reward"] or {}, episode["finish"]
    if episode["missing"]:
        outcome = f"missing: {episode['reason'] or 'other'}"
    row = {
        "run": run,
        "prompt": PROMPT.fullmatch(episode["id"])[1],  # type: ignore[index]
        "question": (episode["question"] or episode["id"])[: TEXT_LIMITS[-1]],  # text for the search
        "result": _result(episode),
        "total": reward.get("total"),
        "calls": len(calls),
        "called": "none" if not calls else "ok" if set(calls) <= {"ok", "imitated"} else "failed",
        "outcome": outcome,
    }
    return row | {name: episode[name] for name in ("step", "cell", "split", "type", "frame_budget")}


def convert(record: Mapping[str, Any], forced: str, limit_chars: int) -> PageDict:
    """Converts one record. `forced` is the setting `rollout.forced_prefix` of its step."""
    reward, answer = record.get("reward"), str(record.get("answer", ""))
    credits = [] if reward is None else reward.get("credits", [])
    advantage = record.get("advantage") or {}
    values = sorted({round(value, ADVANTAGE_DIGITS) for *_, value in advantage.get("places", [])})
    videos = [_video(video) for video in record.get("videos") or []]
    turns = (record.get("turns") or [])[:MAX_TURNS]
    segments = _segments_by_turn(record.get("segments") or [], turns)
    timed = record.get("question_type") == "tvg"
    prediction = None if reward is None else reward.get("prediction")
    return {
        **_copied(record, COPIED),
        "scores": dict(record.get("scores") or {}),
        "split": visible(record["split"]) if record.get("split") else None,
        "id": visible(str(record.get("id", ""))),
        "type": visible(str(record.get("question_type", ""))),
        "question": _cut(PLACEHOLDERS.sub("", str(record.get("question", ""))).strip(), limit_chars),
        "answer": _cut(answer, limit_chars),
        "truth_s": interval(answer) if timed else None,
        "prediction_s": interval(prediction) if timed and prediction else None,
        "frame_budget": None if record.get("videos") == [] else record.get("frame_budget") or None,  # 0 without a video
        "missing": bool(record.get("missing")),
        "problem": _cut(str(record.get("problem", "")), limit_chars),
        "groups": {
            visible(name): [visible(str(label)) for label in of] for name, of in (record.get("groups") or {}).items()
        },
        "reward": None
        if reward is None
        else _copied(reward, TERMS) | {"prediction": None if prediction is None else _cut(prediction, TEXT_LIMITS[-1])},
        "weights": record.get("weights", {}),
        "own": [] if reward is None else [_copied(term, OWN) for term in reward.get("own", [])],
        "credits": [_copied(credit, CREDIT) for credit in credits],
        "advantage": {name: value for name, value in advantage.items() if name != "places"} or None,
        "advantages": values,
        "videos": videos,
        "turns": [
            _turn(
                turn,
                _marks(turn, number, _prefix(turn, of_turn, forced), credits, advantage, values),
                videos,
                limit_chars,
            )
            | _sampling(turn, of_turn)
            for number, (turn, of_turn) in enumerate(zip(turns, segments, strict=True))
        ],
    }


def pieces(text: str, marks: Sequence[Mark], limit_chars: int) -> list[PageDict]:
    """Cuts a text at every start and end of a mark. Long texts lose their middle; a piece has the `left_out` count."""
    length = len(text)
    ranges = [(0, length)]
    if length > limit_chars:
        ranges = [(0, limit_chars // 2), (length - limit_chars // 2, length)]
    marks = [mark for mark in marks if any(mark.start < end and mark.end > start for start, end in ranges)]
    cuts = {end for mark in marks for end in (mark.start, mark.end)} | {end for part in ranges for end in part}
    parts: list[PageDict] = []
    waiting, active = sorted(marks, reverse=True), []
    for start, end in itertools.pairwise(sorted({min(max(cut, 0), length) for cut in cuts})):
        while waiting and waiting[-1].start <= start:
            active.append(waiting.pop())
        active = [mark for mark in active if mark.end > start]
        if any(first <= start and end <= last for first, last in ranges):
            piece: PageDict = {"text": visible(text[start:end])}
            piece |= {mark.kind: mark.number for mark in active if mark.kind != "credit"}
            credits = sorted(mark.number for mark in active if mark.kind == "credit")
            parts.append(piece | {"credits": credits} if credits else piece)
        elif parts and "left_out" in parts[-1]:
            parts[-1]["left_out"] += end - start
        else:
            parts.append({"text": "", "left_out": end - start})
    return parts


def _marks(
    turn: Mapping[str, Any],
    number: int,
    prefix: str,
    credits: Sequence[Mapping[str, Any]],
    advantage: Mapping[str, Any],
    values: Sequence[float],
) -> list[Mark]:
    text, calls = turn["text"], (turn.get("calls") or [])[:MAX_TURNS]
    marks = [Mark(*match.span(), "tag") for match in TAG.finditer(text)]
    if prefix:
        marks.append(Mark(0, len(prefix), "forced"))
    marks += [Mark(start, end, "call", index) for index, call in enumerate(calls) for start, end in [call["span"]]]
    marks += [
        Mark(start, end, "credit", index)
        for index, credit in enumerate(credits)
        for of_turn, start, end in credit["places"]
        if of_turn == number
    ]
    return marks + [
        Mark(start, end, "advantage", values.index(round(value, ADVANTAGE_DIGITS)))
        for of_turn, start, end, value in advantage.get("places", [])
        if of_turn == number
    ]


def _turn(turn: Mapping[str, Any], marks: list[Mark], videos: Sequence[PageDict], limit_chars: int) -> PageDict:
    text, calls = turn["text"], (turn.get("calls") or [])[:MAX_TURNS]
    names = {call.span: call.arguments.get("video_path") for call in find_calls(text)} if calls else {}
    ends = [mark.number for mark in marks if mark.kind == "advantage" and mark.start == mark.end == len(text)]
    return {
        "pieces": pieces(text, marks, limit_chars),
        "end_advantage": ends[0] if ends else None,  # advantage of the end-of-turn token
        **_copied(turn, COPIED_OF_TURN),
        "told": _cut(str(turn.get("told", "")), limit_chars),
        "calls": [_call(call, names.get(tuple(call["span"])), videos, limit_chars) for call in calls],
    }


def _call(call: Mapping[str, Any], video_name: Any, videos: Sequence[PageDict], limit_chars: int) -> PageDict:
    report, shown = call.get("segments") or [], call.get("shown") or []
    frames = (frame for frame in shown if "path" in frame)
    by_source = itertools.groupby(frames, lambda frame: (frame["path"], frame["box"]))
    return {
        "name": visible(str(call.get("name", "")))[:80],
        **_copied(call, COPIED_OF_CALL),
        "outcome": str(call["outcome"]),
        "window_s": _times(call.get("window_s")) or None,
        "box": _box(call.get("box")),
        "response": _cut(str(call.get("response", "")), limit_chars),
        "problem": _cut(str(call.get("problem", "")), limit_chars),
        "video": _video_index(call.get("path"), video_name, videos),
        "frames_s": _times(call.get("frames_s")),
        "shown": [
            [str(path), _box(box), _times([frame["time_s"] for frame in of_source])]
            for (path, box), of_source in by_source
        ],
        "drawn": [thumbnail(Picture.of_png(picture["png"]).pixels) for picture in shown if "png" in picture],
        "num_frames": len(shown) + sum(len(segment.get("pictures", ())) for segment in report),
        "num_tokens": call.get("num_sampled", sum(len(s["ids"]) for s in report if s["kind"] == "sampled")),
    }


def _video_index(path: Any, name: Any, videos: Sequence[PageDict]) -> int | None:
    """Index of the video a call used, by its path, or by the name in the call for records without paths."""
    if len(videos) < 2:
        return 0
    return next((index for index, video in enumerate(videos) if path == video["path"] or name == video["name"]), None)


def _video(video: Mapping[str, Any]) -> PageDict:
    path = str(video["path"])
    named = {"name": visible(str(video["name"])), "file": visible(PurePath(path).name), "path": visible(path)}
    return {**named, "duration_s": float(video["duration_s"]), "frames_s": _times(video["frames_s"])}


def _times(values: Sequence[float] | None) -> list[float]:
    return [float(value) for value in values or []]


def _box(values: Sequence[float] | None) -> Box | None:
    return None if values is None else Box(*map(float, values))


def _copied(record: Mapping[str, Any], types: Mapping[str, tuple[type, ...]]) -> PageDict:
    """Copies fields. Raises TypeError for a wrong type, with which the page's scripts would stop."""
    values = {name: record.get(name) for name in types}
    for name, value in values.items():
        if type(value) not in types[name]:
            raise TypeError(f"{name} is {type(value).__name__}")
    return values


def _result(episode: PageDict) -> str:
    """The result of an episode; empty without R_acc, for example for SFT traces and your own question types."""
    if episode["missing"]:
        return "missing"
    if episode["reward"] is None:
        return ""
    accuracy = episode["reward"]["accuracy"]
    return "" if accuracy is None else "right" if accuracy >= 1 else "partly" if accuracy > 0 else "wrong"


def _segments_by_turn(
    segments: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]
) -> list[list[Mapping[str, Any]]]:
    starts = list(itertools.accumulate((len(segment["ids"]) for segment in segments), initial=0))
    spans = [turn.get("token_span") or (0, 0) for turn in turns]
    return [
        [segment for start, segment in zip(starts, segments, strict=False) if begin <= start < end]
        for begin, end in spans
    ]


def _prefix(turn: Mapping[str, Any], segments: Sequence[Mapping[str, Any]], forced: str) -> str:
    """The forced prefix of a turn; empty if its tokens were imitated, or sampled by an endpoint."""
    is_forced = any(segment["kind"] == "forced" for segment in segments)
    return forced if is_forced and turn["text"].startswith(forced) else ""


def _sampling(turn: Mapping[str, Any], segments: Sequence[Mapping[str, Any]]) -> PageDict:
    """The number of a turn's sampled tokens, with their mean log-prob and policy versions."""
    sampled = [segment for segment in segments if segment["kind"] == "sampled"]
    logps = [logp for segment in sampled for logp in segment["behavior_logp"] if logp is not None]
    return {
        "num_sampled": turn.get("num_sampled", sum(len(segment["ids"]) for segment in sampled)),
        "mean_logp": round(sum(logps) / len(logps), 4) if logps else None,
        "versions": sorted({segment["version"] for segment in sampled}),
    }


def _cut(text: str, limit_chars: int) -> str:
    if len(text) <= limit_chars:
        return visible(text)
    return f"{visible(text[:limit_chars])} … {len(text) - limit_chars} characters left out"
