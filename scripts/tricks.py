"""Reward tricks that a policy may try, each with the honest episode that it replaces."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

TRUTHS = {"mcq": "B", "tvg": "[10, 20]", "oe": "red"}
WRONG = {"mcq": "C", "tvg": "[40, 50]", "oe": "blue"}
THINK = "<think>\nThe frames show a car.</think>"
CALL = '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 8, "end_time": 24}}'
REPORT = "The segment shows a red car that turns left."


class Policy(NamedTuple):
    """Probabilities that an answer is right."""

    alone: float
    called: float  # after a useful call


class Episode(NamedTuple):
    turns: tuple[str, ...]
    outcomes: tuple[str, ...]
    question_type: str


Outcomes = list[tuple[float, Episode]]  # outcomes with their probabilities


class Trick(NamedTuple):
    title: str
    honest: Callable[[Policy], Outcomes]
    trick: Callable[[Policy], Outcomes]
    question_type: str = "mcq"


def answer(text: str) -> str:
    return f"{THINK}<answer>{text}</answer>"


def call(arguments: str = CALL) -> str:
    return f"<tool_call>{arguments}</tool_call>"


def episodes(
    turns: Sequence[str], outcomes: Sequence[str], last: Callable[[str], str], question_type: str
) -> dict[bool, Episode]:
    """Returns the same episode with a right and with a wrong answer."""
    replies = {True: TRUTHS[question_type], False: WRONG[question_type]}
    return {right: Episode((*turns, last(reply)), tuple(outcomes), question_type) for right, reply in replies.items()}


DIRECT = {(kind, right): e for kind in TRUTHS for right, e in episodes((), (), answer, kind).items()}
CALLED = {
    (kind, right): e for kind in TRUTHS for right, e in episodes((THINK + call(),), ("ok",), answer, kind).items()
}


def instead_of_direct(
    title: str,
    turns: Sequence[str] = (),
    outcomes: Sequence[str] = (),
    last: Callable[[str], str] = answer,
    kind: str = "mcq",
) -> Trick:
    """Returns a trick whose answer is right as often as an answer without a call."""
    own = episodes(turns, outcomes, last, kind)
    return Trick(title, lambda policy: _direct(policy, kind), lambda p: _mixed(own, p.alone), kind)


def instead_of_call(
    title: str,
    turns: Sequence[str] = (THINK + call(),),
    outcomes: Sequence[str] = ("ok",),
    last: Callable[[str], str] = answer,
    kind: str = "mcq",
) -> Trick:
    """Returns a trick whose answer is right as often as an answer after a useful call."""
    own = episodes(turns, outcomes, last, kind)
    return Trick(title, lambda policy: _called(policy, kind), lambda p: _mixed(own, p.called), kind)


def _direct(policy: Policy, kind: str) -> Outcomes:
    return _mixed({right: DIRECT[kind, right] for right in (True, False)}, policy.alone)


def _called(policy: Policy, kind: str) -> Outcomes:
    return _mixed({right: CALLED[kind, right] for right in (True, False)}, policy.called)


def _mixed(own: dict[bool, Episode], chance: float) -> Outcomes:
    return [(chance, own[True]), (1 - chance, own[False])]


def window(start_s: float, end_s: float) -> str:
    return CALL.replace('"start_time": 8, "end_time": 24', f'"start_time": {start_s}, "end_time": {end_s}')


LEAK = "<tool_code>crop_video('video.mp4', 8, 24)</tool_code>"
IMITATION = f"<tool_response>{REPORT}</tool_response>"
TRICKS = (
    instead_of_direct("a call of a millisecond", [THINK + call(window(3, 3.001))], ["ok"]),
    instead_of_direct("a call of the whole video", [THINK + call(window(0, 3600))], ["ok"]),
    instead_of_direct("five useless calls", [THINK + 5 * call(window(3, 3.001))], 5 * ["ok"]),
    instead_of_direct("useless calls in three turns", 3 * [THINK + call(window(3, 3.001))], 3 * ["ok"]),
    instead_of_direct("a refused call", [THINK + call(window(9, 3))], ["invalid"]),
    instead_of_direct("a call that times out", [THINK + call()], ["timeout"]),
    instead_of_direct("an unknown tool", [THINK + call(CALL.replace("crop", "cut"))], ["unknown_tool"]),
    instead_of_direct("64 unknown tools", [THINK + 64 * call(CALL.replace("crop", "cut"))], 64 * ["unknown_tool"]),
    instead_of_direct("a call with invalid JSON", [THINK + call("crop the video")], ["invalid"]),
    instead_of_direct("an imitated report, and no call", last=lambda reply: THINK + IMITATION + answer(reply)),
    instead_of_direct("no answer, only a call", [THINK + call()], ["ok"], lambda _: THINK + call()),
    instead_of_direct("no answer, five calls", [THINK + 5 * call()], 5 * ["ok"], lambda _: THINK),
    instead_of_direct("no answer, only thinking", last=lambda _: THINK),
    instead_of_direct("two options", last=lambda _: answer("B or C")),
    instead_of_direct("all options", last=lambda _: answer("A, B, C, D")),
    instead_of_direct("two answers, the guess last", last=lambda reply: answer("D") + f"<answer>{reply}</answer>"),
    instead_of_direct("an answer outside of its tags", last=lambda reply: f"{THINK}{reply}"),
    instead_of_direct("no `</answer>`", last=lambda reply: answer(reply).removesuffix("</answer>")),
    instead_of_direct("no `</think>`", last=lambda reply: answer(reply).replace("</think>", "")),
    instead_of_direct("`<think>` twice", last=lambda reply: answer(reply).replace("<think>", "<think><think>")),
    instead_of_direct("empty thinking", last=lambda reply: answer(reply).replace(THINK, "<think>\n</think>")),
    instead_of_direct("dots as thinking", last=lambda reply: answer(reply).replace(THINK, "<think>\n......</think>")),
    instead_of_direct("an interval that covers four events", last=lambda _: answer("[0, 40]"), kind="tvg"),
    instead_of_direct("the whole video as an answer", last=lambda _: answer("[0, 300]"), kind="tvg"),
    instead_of_direct(
        "a useless call, then four events", [THINK + call(window(3, 3.001))], ["ok"], lambda _: answer("[0, 40]"), "tvg"
    ),
    instead_of_direct("four colors", last=lambda _: answer("red blue green grey"), kind="oe"),
    instead_of_call("a report as the answer", last=lambda _: answer(REPORT), kind="oe"),
    instead_of_call("a leaked `<tool_code>`", [THINK + LEAK]),
    instead_of_call("prose before a call", [THINK + "I look. " + call()]),
    instead_of_call("prose after a call", [THINK + call() + " Done."]),
    instead_of_call("an imitated report after a call", [THINK + call() + IMITATION]),
    instead_of_call("a call in `<think>`", [f"<think>\nThe frames show a car.{call()}</think>"]),
    instead_of_call("empty thinking before a call", ["<think>\n</think>" + call()]),
    instead_of_call("a call without `</think>`", [THINK.removesuffix("</think>") + call()]),
    instead_of_call("two answers after a call", last=lambda reply: answer("D") + f"<answer>{reply}</answer>"),
    instead_of_call("no `</answer>` after a call", last=lambda reply: answer(reply).removesuffix("</answer>")),
)
