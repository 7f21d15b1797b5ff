"""Some of a run's episodes as its page shows them: evenly over the steps, without ids and log-probs of tokens.

A turn becomes pieces, each with the credits it earned. They are cut here and not in the page, because JavaScript counts
UTF-16 units where the records count characters. When the overview was, and of how long a video, only the prompt's ids
say: they are read with the run's own tokenizer.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from model_port.progress import counted
from paravt_jax.rewards.answers import interval
from paravt_jax.rewards.grammar import TAG
from paravt_jax.run.log import EPISODES_DIR, load_jsonl
from rollout.prompts import Prompts
from rollout.tools import find_calls

EPISODES_A_STEP = 4  # fewer say little about a step: with many steps, rather some of them than one episode of each
PAGE_BYTES = 3_000_000  # of all episodes, unless there are so many
MIN_EPISODE_BYTES = 6_000  # that each would have less than it takes to read one
TEXT_LIMITS = (20_000, 4_000, 800)  # characters of one text, the first with which an episode fits its share
TOKENIZER_FILE = "hf_files/tokenizer.json"  # where a run keeps its own
MAX_TURNS = 40  # shown of an episode, and calls of a turn
FRAME = re.compile(r"<(\d+(?:\.\d+)?) seconds>(?=<\|vision_start\|>)")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TERMS = ("total", "accuracy", "format", "base", "anchor", "think_first", "balanced", "tool", "prediction")
OWN = ("name", "value", "weight")  # of a term that a plugin gave


class Mark(NamedTuple):
    """Characters of a text that are something: `forced`, a `tag`, a `call`, or what earned the credit `number`."""

    start: int
    end: int
    kind: str
    number: int = 0


def load_sample(run_dir: Path, max_episodes: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The episodes to show, and of how many steps they are."""
    paths = [path for path in (run_dir / EPISODES_DIR).glob("*.jsonl") if path.stem.isdecimal()]
    paths.sort(key=lambda path: int(path.stem))
    num_steps = min(len(paths), max(1, max_episodes // EPISODES_A_STEP)) if max_episodes else 0
    chosen: dict[Path, set[int]] = {}  # lines
    for place, path in enumerate(paths[number] for number in _evenly(len(paths), num_steps)):
        quota = max_episodes // num_steps + (place < max_episodes % num_steps)
        with path.open("rb") as file:
            num_lines = sum(1 for _ in file)
        # Beginning elsewhere in every step, or it would always be the same members of the same groups.
        quota = min(quota, num_lines)
        chosen[path] = {(place + num_lines * number // quota) % num_lines for number in range(quota)}
    reader = _Reader(run_dir, settings)
    share_bytes = max(MIN_EPISODE_BYTES, PAGE_BYTES // max(1, sum(map(len, chosen.values()))))
    episodes = [
        _within(share_bytes, reader, record)
        for path, lines in counted(chosen.items(), "reading episodes", "step")
        for record in _read_step(path, lines)
    ]
    return {"episodes": episodes, "num_steps_shown": num_steps, "num_steps": len(paths), "max_episodes": max_episodes}


def visible(text: str) -> str:
    """What has no glyph of its own, or would turn the text around it, as a sign that has one."""
    return UNSEEN.sub(lambda match: _sign(ord(match[0])), text)


def pieces(text: str, marks: Sequence[Mark], limit_chars: int) -> list[dict[str, Any]]:
    """The text cut wherever a mark begins or ends; of a long one the middle is left out, which a piece says."""
    length = len(text)
    kept = [(0, length)]
    if length > limit_chars:
        kept = [(0, limit_chars // 2), (length - limit_chars // 2, length)]
    marks = [mark for mark in marks if any(mark.start < end and mark.end > start for start, end in kept)]
    cuts = {end for mark in marks for end in (mark.start, mark.end)} | {end for part in kept for end in part}
    parts: list[dict[str, Any]] = []
    waiting, active = sorted(marks, reverse=True), []
    for start, end in itertools.pairwise(sorted({min(max(cut, 0), length) for cut in cuts})):
        while waiting and waiting[-1].start <= start:
            active.append(waiting.pop())
        active = [mark for mark in active if mark.end > start]
        if any(first <= start and end <= last for first, last in kept):
            parts.append(_piece(text[start:end], active))
        elif parts and "left_out" in parts[-1]:
            parts[-1]["left_out"] += end - start
        else:
            parts.append({"text": "", "left_out": end - start})
    return parts


def _piece(text: str, marks: Sequence[Mark]) -> dict[str, Any]:
    piece: dict[str, Any] = {"text": visible(text)}
    piece |= {mark.kind: mark.number for mark in marks if mark.kind != "credit"}
    credits = sorted(mark.number for mark in marks if mark.kind == "credit")
    return piece | {"credits": credits} if credits else piece


class _Reader:
    """Turns records into what the page shows."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        rollout = settings.get("config", {}).get("rollout") or {}
        self._forced = rollout.get("forced_prefix", "")
        self._intro = _pattern((rollout.get("prompts") or {}).get("overview", Prompts.overview))
        path = run_dir / TOKENIZER_FILE
        self._tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None

    def episode(self, record: Mapping[str, Any], limit_chars: int) -> dict[str, Any]:
        reward, answer = record.get("reward"), str(record.get("answer", ""))
        credits = [] if reward is None else reward.get("credits", [])
        videos = self._videos(record.get("segments") or [])
        turns = (record.get("turns") or [])[:MAX_TURNS]
        spoken = _spoken(record.get("segments") or [], turns)
        timed = record.get("question_type") == "tvg"
        prediction = None if reward is None else reward.get("prediction")
        return {
            "step": record.get("step"),
            "id": visible(str(record.get("id", ""))),
            "type": str(record.get("question_type", "")),
            "question": _shown(str(record.get("question", "")).replace("<video>", "").strip(), limit_chars),
            "answer": _shown(answer, limit_chars),
            "truth_s": interval(answer) if timed else None,
            "prediction_s": interval(prediction) if timed and prediction else None,
            "frame_budget": record.get("frame_budget"),
            "finish": record.get("finish"),
            "seconds": record.get("seconds"),
            "missing": bool(record.get("missing")),
            "problem": _shown(str(record.get("problem", "")), limit_chars),
            "reward": None if reward is None else {name: reward.get(name) for name in TERMS} | _prediction(reward),
            "own": [] if reward is None else [{name: term[name] for name in OWN} for term in reward.get("own", [])],
            "credits": [{name: credit[name] for name in ("name", "term", "value")} for credit in credits],
            "advantage": record.get("advantage"),
            "videos": videos,
            "turns": [
                self._turn(turn, number, credits, videos, limit_chars) | tokens
                for number, (turn, tokens) in enumerate(zip(turns, spoken, strict=True))
            ],
        }

    def _turn(
        self,
        turn: Mapping[str, Any],
        number: int,
        credits: Sequence[Mapping[str, Any]],
        videos: Sequence[Mapping[str, Any]],
        limit_chars: int,
    ) -> dict[str, Any]:
        text = turn["text"]
        calls = (turn.get("calls") or [])[:MAX_TURNS]
        marks = [Mark(*match.span(), "tag") for match in TAG.finditer(text)]
        if self._forced and text.startswith(self._forced):
            marks.append(Mark(0, len(self._forced), "forced"))
        marks += [Mark(start, end, "call", place) for place, call in enumerate(calls) for start, end in [call["span"]]]
        marks += [
            Mark(start, end, "credit", place)
            for place, credit in enumerate(credits)
            for of_turn, start, end in credit["places"]
            if of_turn == number
        ]
        asked = {call.span: call.arguments.get("video_path") for call in find_calls(text)} if calls else {}
        return {
            "pieces": pieces(text, marks, limit_chars),
            "finish": turn.get("finish"),
            "latency_s": turn.get("latency_s"),
            "calls": [self._call(call, asked.get(tuple(call["span"])), videos, limit_chars) for call in calls],
        }

    def _call(
        self, call: Mapping[str, Any], asked: Any, videos: Sequence[Mapping[str, Any]], limit_chars: int
    ) -> dict[str, Any]:
        names = [video["name"] for video in videos]
        place = 0 if len(names) < 2 else names.index(asked) if asked in names else None
        report = call.get("segments") or []
        return {
            "name": visible(str(call.get("name", "")))[:80],
            "outcome": call.get("outcome"),
            "response": _shown(str(call.get("response", "")), limit_chars),
            "problem": _shown(str(call.get("problem", "")), limit_chars),
            "window_s": call.get("window_s"),
            "video": place,
            "latency_s": call.get("latency_s"),
            "num_frames": sum(len(segment.get("pictures", ())) for segment in report),
            "num_tokens": sum(len(segment["ids"]) for segment in report if segment["kind"] == "sampled"),
        }

    def _videos(self, segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What the overview showed of each video: its name, its duration, and the times of its frames."""
        if self._tokenizer is None or self._intro is None or not segments or segments[0]["kind"] != "prompt":
            return []
        prompt = self._tokenizer.decode(segments[0]["ids"], skip_special_tokens=False)
        intros = list(self._intro.finditer(prompt))
        ends = [*(intro.start() for intro in intros[1:]), len(prompt)]
        return [
            {
                "name": intro["name"],
                "duration_s": float(intro["duration_s"]),
                "frames_s": [float(match[1]) for match in FRAME.finditer(prompt, intro.end(), end)],
            }
            for intro, end in zip(intros, ends if intros else [], strict=True)
        ]


def _read_step(path: Path, lines: set[int]) -> list[dict[str, Any]]:
    """The chosen records of a step; one that never began has the question of its siblings."""
    questions, rows = {}, []
    for number, record in enumerate(load_jsonl(path)):
        if "visit" in record and "question" in record:
            questions[record["visit"]] = record["question"]
        if number in lines:
            rows.append(record)
    return [{"question": questions.get(record.get("visit"), ""), **record} for record in rows]


def _within(share_bytes: int, reader: _Reader, record: Mapping[str, Any]) -> dict[str, Any]:
    """An episode in its share of the page, its texts cut as far as that takes."""
    for limit_chars in TEXT_LIMITS:
        episode = reader.episode(record, limit_chars)
        if len(json.dumps(episode)) <= share_bytes:
            return episode
    episode = reader.episode({**record, "turns": [], "segments": [], "reward": None}, TEXT_LIMITS[-1])
    return episode | {"problem": "too large for this page"}


def _spoken(segments: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each turn: how many tokens were sampled, their mean log-prob, and the policies that sampled them."""
    starts = list(itertools.accumulate((len(segment["ids"]) for segment in segments), initial=0))
    spoken = []
    for turn in turns:
        begin, end = turn.get("token_span") or (0, 0)
        sampled = [
            segment
            for start, segment in zip(starts, segments, strict=False)
            if segment["kind"] == "sampled" and begin <= start < end
        ]
        logps = [logp for segment in sampled for logp in segment["behavior_logp"] if logp is not None]
        spoken.append(
            {
                "num_sampled": sum(len(segment["ids"]) for segment in sampled),
                "mean_logp": round(sum(logps) / len(logps), 4) if logps else None,
                "versions": sorted({segment["version"] for segment in sampled}),
            }
        )
    return spoken


def _prediction(reward: Mapping[str, Any]) -> dict[str, Any]:
    said = reward.get("prediction")
    return {"prediction": None if said is None else _shown(said, TEXT_LIMITS[-1])}


def _shown(text: str, limit_chars: int) -> str:
    """In plain text, the end is what is left out."""
    if len(text) <= limit_chars:
        return visible(text)
    return f"{visible(text[:limit_chars])} … {len(text) - limit_chars} characters left out"


def _sign(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures of Unicode
    return f"⟨U+{code:04X}⟩"


def _pattern(template: str) -> re.Pattern[str] | None:
    """Finds what a format string became, with its `name` and `duration_s`; None where it does not show them."""
    groups = {"name": r"(?P<name>\S+)", "duration_s": r"(?P<duration_s>\d+(?:\.\d+)?)"}
    fields = list(Formatter().parse(template))
    if not set(groups) <= {field for _, field, _, _ in fields}:
        return None
    parts = [
        re.escape(literal) + ("" if field is None else groups.pop(field, r"\S+")) for literal, field, _, _ in fields
    ]
    return re.compile("".join(parts))


def _evenly(length: int, count: int) -> list[int]:
    """`count` of `length` places, the first and the last included; of one, the last."""
    if count < 2:
        return [length - 1] * count
    return [(length - 1) * number // (count - 1) for number in range(count)]
