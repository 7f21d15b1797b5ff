"""The reward of an episode, R = R_acc + w_fmt · R_fmt + R_tool, every credit with the characters that earned it.

A turn is parsed once, by one grammar over the tags:

    turn      := <think> text </think> ( tool_call+ | <answer> text </answer> )
    tool_call := <tool_call> text </tool_call>

with white space between the parts. A text has no tags in it, those of `<tool_response>` and `<tool_code>` included: the
first is the environment's to write; the second, though the dispatcher carries such calls out, is a leak of the base
model's prior and not in the trained grammar, so it breaks the format and earns only what was truly executed.

The parse is the longest part of the turn, from its first character, that the grammar contains. What follows the first
fault (a tag out of place, doubled or nested, or text outside the parts) earns nothing, and neither does an answer or a
turn that does not end where the grammar ends. Every turn but the last must be a tool turn, the last an answer turn.

What the text of the specification leaves open is decided at the lines marked `Choice:`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

from paravt_jax.rewards.answers import exact_match, interval, interval_iou, normalised, option_letter, token_f1
from rollout.tools import CROP_VIDEO_ALONE, Outcome, Signatures, find_calls

TAG = re.compile(r"<(/?)(think|tool_call|answer|tool_response|tool_code)>")
STRUCTURAL = ("think", "tool_call", "answer")
FOLLOWS = {"": ("think",), "think": ("tool_call", "answer"), "tool_call": ("tool_call",), "answer": ()}
THINK_CLOSING, FLOW = 0.4, 0.3  # what R_anchor is made of
MIN_THINK_CHARS = 10  # white space at both ends not counted: the forced prefix brings some
OUTCOMES = get_args(Outcome)
CARRIED_OUT = ("ok", "error", "timeout")  # outcomes that only a well-formed call of a known tool can have

Term = Literal["accuracy", "base", "anchor", "think_first", "balanced", "tool"]


@dataclass(frozen=True)
class RewardConfig:
    oe_mode: Literal["f1", "exact", "llm"] = "f1"
    require_answer_block: bool = True  # off: without one, what follows the thinking is the answer
    answer_suffix: bool = True  # the prompt asks for <answer>, which is then worth more
    format_weight: float = 1.0  # w_fmt
    anchor_weight: float = 0.5  # λ; 0 is the arm without anchoring
    unclosed_penalty: float = 0.3  # γ; 0 is the arm without it
    tool_reward: bool = True  # off is the arm without R_tool

    def __post_init__(self) -> None:
        for name in ("format_weight", "anchor_weight", "unclosed_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"reward.{name}={getattr(self, name)} must be a finite number, 0 or more")
        if self.oe_mode not in ("f1", "exact", "llm"):
            raise ValueError(f"reward.oe_mode={self.oe_mode!r} must be f1, exact or llm")


class Place(NamedTuple):
    """Characters of one turn, from `start` up to and without `end`."""

    turn: int
    start: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        return self.start, self.end


@dataclass(frozen=True)
class Tag:
    """An opening or closing of one of the three pairs, wherever it stands."""

    turn: int
    name: str
    closing: bool
    span: tuple[int, int]


@dataclass(frozen=True)
class Credit:
    """One reason for a reward, in the units of its term: the credits of a term add up to it.

    A property that every turn must have has a place in every turn. `places` is empty only where the dispatcher reports
    an outcome for which the turns hold no call.
    """

    name: str
    term: Term
    value: float
    places: tuple[Place, ...]


@dataclass(frozen=True)
class RewardTerms:
    """`accuracy`, `tool` and the totals are None while a judged score is missing, so that nothing can average them."""

    accuracy: float | None  # R_acc
    base: float  # R_base
    anchor: float  # R_anchor
    think_first: float
    balanced: float
    format: float  # R_fmt
    tool: float | None  # R_tool
    total: float | None  # R
    total_without_anchor: float | None  # R − λ · w_fmt · R_anchor wherever neither part of R_fmt reaches its bound
    parseable: bool  # the whole episode is in the grammar
    prediction: str | None  # the answer that was scored
    credits: tuple[Credit, ...]
    tags: tuple[Tag, ...]

    @property
    def missing(self) -> bool:
        """The episode must be left out of its group: its answer awaits a judge that gave no score."""
        return self.total is None


@dataclass(frozen=True)
class _Mark:
    """A tag as it stands in the text."""

    name: str
    closing: bool
    start: int
    end: int


@dataclass(frozen=True)
class _Block:
    """A part of the grammar. Without `closing`, the turn was cut off in it."""

    opening: _Mark
    closing: _Mark | None
    body: str


@dataclass(frozen=True)
class _Turn:
    """One turn as the grammar reads it: its tags, the parse from its first character, whether that is all of it."""

    number: int
    text: str
    marks: tuple[_Mark, ...]
    blocks: tuple[_Block, ...]  # the parse
    ends: bool  # no fault: all of the turn is in the parse

    @property
    def think(self) -> _Block | None:
        return self.blocks[0] if self.blocks and self.blocks[0].closing is not None else None

    @property
    def calls(self) -> tuple[_Block, ...]:
        return tuple(block for block in self.blocks if block.opening.name == "tool_call" and block.closing is not None)

    @property
    def answer(self) -> _Block | None:
        """The answer, if it says something and is where the turn ends; it may be cut off."""
        last = self.blocks[-1] if self.ends and self.blocks else None
        return last if last is not None and last.opening.name == "answer" and last.body.strip() else None

    @property
    def kind(self) -> str:
        """What this is in the grammar: "tool_call" or "answer", or "" where it is not, or not yet, a turn."""
        last = self.blocks[-1] if self.ends and self.blocks else None
        return last.opening.name if last is not None and last.closing and last.opening.name != "think" else ""

    @property
    def unclosed(self) -> tuple[_Mark, ...]:
        """Choice: a `<think>` is never closed if the next tag of its kind is not its closing; a doubled one so too."""
        thinks = [mark for mark in self.marks if mark.name == "think"]
        return tuple(
            mark
            for mark, following in zip_longest(thinks, thinks[1:])
            if not mark.closing and (following is None or not following.closing)
        )

    @property
    def balanced(self) -> bool:
        """Choice: all tags come in pairs and no pair is inside another."""
        openings, closings = self.marks[::2], self.marks[1::2]
        return len(openings) == len(closings) and all(
            not opening.closing and closing.closing and opening.name == closing.name
            for opening, closing in zip(openings, closings, strict=True)
        )

    def place(self, start: int, end: int) -> Place:
        return Place(self.number, start, end)

    def place_of(self, block: _Block) -> Place:
        return self.place(block.opening.start, len(self.text) if block.closing is None else block.closing.end)

    def place_of_mark(self, mark: _Mark) -> Place:
        return self.place(mark.start, mark.end)


def reward_terms(
    turns: Sequence[str],
    outcomes: Sequence[str],
    answer: str,
    question_type: str,
    config: RewardConfig | None = None,
    judged: float | None = None,
    question: str = "",
    tools: Signatures = CROP_VIDEO_ALONE,
) -> RewardTerms:
    """Every term of the reward of one episode.

    `turns` are the assistant's turns in full, the forced prefix included and the token that ended each left out;
    `outcomes` are the dispatcher's, one per call in order. `judged` is the judge's score of `find_prediction(turns)`,
    for open questions with oe_mode llm only. With the `question` an option that is copied from it is known as such.
    `tools` are those that could be called. No text of the model raises; a ground truth that cannot be read does.
    """
    config = config or RewardConfig()
    parsed = _parse_episode(turns)
    for outcome in outcomes:
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome {outcome!r} is none of the dispatcher's, expected one of {', '.join(OUTCOMES)}")
    if judged is not None and (question_type != "oe" or config.oe_mode != "llm"):
        raise ValueError(
            f"a judged score was given for a question of type {question_type!r} with reward.oe_mode={config.oe_mode}; "
            "only open questions (oe) with oe_mode llm are judged"
        )
    if judged is not None and not 0 <= judged <= 1:
        raise ValueError(f"judged={judged} must be between 0 and 1")
    place = _place_of_prediction(parsed, config)
    prediction = None if place is None else _prediction_at(place, turns)
    accuracy = _accuracy(prediction, answer, question_type, config, judged, question)

    credits = list(_format_credits(parsed, config))
    if accuracy and place is not None:
        credits.append(Credit("accuracy", "accuracy", accuracy, (place,)))
    if config.tool_reward:
        credits += _tool_credits(parsed, outcomes, bool(accuracy), tools)
    base, anchor, think_first, balanced, tool = (
        math.fsum(credit.value for credit in credits if credit.term == term)
        for term in ("base", "anchor", "think_first", "balanced", "tool")
    )
    unanchored = math.fsum((base, think_first, balanced))
    format_reward = min(1.0, unanchored + config.anchor_weight * anchor)
    total = total_without_anchor = None
    if accuracy is not None:
        # tool is at most 0.3 + 0.5, so that its own bound of 1 needs no line
        total = math.fsum((accuracy, config.format_weight * format_reward, tool))
        # The anchor's share of the bound stays the anchor's. Else a well-formed call, paid for thinking first, would be
        # worth 0.2 more than a well-formed answer, while R_fmt is 1 for both; and an anchor subtracted after the bound
        # would punish the better structure.
        bound = max(0.0, 1.0 - config.anchor_weight * (THINK_CLOSING + FLOW))
        total_without_anchor = math.fsum((accuracy, config.format_weight * min(bound, unanchored), tool))
    return RewardTerms(
        accuracy,
        base,
        anchor,
        think_first,
        balanced,
        format_reward,
        None if accuracy is None else tool,
        total,
        total_without_anchor,
        _parseable(parsed),
        prediction,
        tuple(credits),
        tuple(
            Tag(turn.number, mark.name, mark.closing, (mark.start, mark.end))
            for turn in parsed
            for mark in turn.marks
            if mark.name in STRUCTURAL
        ),
    )


def find_prediction(turns: Sequence[str], config: RewardConfig | None = None) -> str | None:
    """The answer that an episode gives, for a judge to score; None where there is none, which is worth 0 unjudged."""
    place = _place_of_prediction(_parse_episode(turns), config or RewardConfig())
    return None if place is None else _prediction_at(place, turns)


def check_ground_truth(answer: str, question_type: str) -> None:
    """Raises ValueError for a row of the data that no answer could be scored against."""
    if question_type not in ("mcq", "tvg", "oe"):
        raise ValueError(f"question_type {question_type!r} is unknown, expected mcq, tvg or oe")
    if question_type == "mcq" and option_letter(answer) is None:
        raise ValueError(f"the ground truth {answer!r} of an mcq question names no option, expected a letter A to J")
    if question_type == "tvg":
        true = interval(answer)
        if true is None or true[0] >= true[1]:
            raise ValueError(f"the ground truth {answer!r} of a tvg question is no interval, expected [start, end]")
    if question_type == "oe" and not normalised(answer):
        raise ValueError(f"the ground truth {answer!r} of an oe question has no word that an answer could have")


def _parse_episode(turns: Sequence[str]) -> list[_Turn]:
    if isinstance(turns, str):
        raise ValueError("turns is one string, expected a list with the text of every turn")
    return [_parse(number, text) for number, text in enumerate(turns)]


def _parse(number: int, text: str) -> _Turn:
    marks = tuple(_Mark(match[2], match[1] == "/", *match.span()) for match in TAG.finditer(text))
    blocks: list[_Block] = []
    reached = 0  # characters, two marks to a block
    for opening, closing in zip_longest(marks[::2], marks[1::2]):
        allowed = FOLLOWS[blocks[-1].opening.name if blocks else ""]
        if opening.closing or opening.name not in allowed or text[reached : opening.start].strip():
            break
        if closing is not None and not (closing.closing and closing.name == opening.name):
            break
        body_end, reached = (len(text), len(text)) if closing is None else (closing.start, closing.end)
        blocks.append(_Block(opening, closing, text[opening.end : body_end]))
    ends = 2 * len(blocks) >= len(marks) and not text[reached:].strip()
    return _Turn(number, text, marks, tuple(blocks), ends)


def _parseable(turns: Sequence[_Turn]) -> bool:
    return [turn.kind for turn in turns] == ["tool_call"] * (len(turns) - 1) + ["answer"]


def _place_of_prediction(turns: Sequence[_Turn], config: RewardConfig) -> Place | None:
    """The body of the last `<answer>…</answer>` of the episode, with no tag in it.

    Choice: it counts even where the turn is not in the grammar, which costs the format and not the accuracy.
    """
    for turn in reversed(turns):
        for opening, closing in reversed(list(zip(turn.marks, turn.marks[1:], strict=False))):
            if opening.name == closing.name == "answer" and not opening.closing and closing.closing:
                return turn.place(opening.end, closing.start)
    if config.require_answer_block or not turns or turns[-1].unclosed:
        return None
    last = turns[-1]
    thinks = [mark.end for mark in last.marks if mark.name == "think"]
    return last.place(max(thinks, default=0), len(last.text))


def _prediction_at(place: Place, turns: Sequence[str]) -> str:
    return TAG.sub(" ", turns[place.turn][slice(*place.span)]).strip()


def _accuracy(
    prediction: str | None,
    answer: str,
    question_type: str,
    config: RewardConfig,
    judged: float | None,
    question: str,
) -> float | None:
    """R_acc in [0, 1], or None where a judge is to say and has not."""
    check_ground_truth(answer, question_type)
    if prediction is None:
        return 0.0
    if question_type == "mcq":
        return float(option_letter(prediction, question) == option_letter(answer, question))
    if question_type == "tvg":
        predicted, true = interval(prediction), interval(answer)
        return 0.0 if predicted is None or true is None else interval_iou(predicted, true)
    if config.oe_mode == "llm":
        return judged if prediction else 0.0  # an empty answer matches nothing, whatever a judge says
    return (token_f1 if config.oe_mode == "f1" else exact_match)(prediction, answer)


def _format_credits(turns: Sequence[_Turn], config: RewardConfig) -> Iterator[Credit]:
    """Choice: thinking is a property of every turn, the answer one of the last, as in the grammar of an episode."""
    if not turns:
        return
    think_value, opening_value, closing_value = (0.2, 0.3, 0.2) if config.answer_suffix else (0.3, 0.2, 0.1)
    base = 0.0
    thinks = [(turn, turn.think) for turn in turns if turn.think is not None]
    if len(thinks) == len(turns) and all(len(think.body.strip()) >= MIN_THINK_CHARS for _, think in thinks):
        base += think_value
        yield Credit("think", "base", think_value, tuple(turn.place_of(think) for turn, think in thinks))
        closings = tuple(turn.place_of_mark(think.closing) for turn, think in thinks if think.closing is not None)
        yield Credit("think_closing", "anchor", THINK_CLOSING, closings)
    last, answer = turns[-1], turns[-1].answer
    if answer is not None:
        base += opening_value
        yield Credit("answer_opening", "base", opening_value, (last.place_of_mark(answer.opening),))
        if answer.closing is not None:
            base += closing_value
            yield Credit("answer_closing", "base", closing_value, (last.place_of_mark(answer.closing),))
            # Choice: a flow ends in an answer that says something; how much was thought is credited above.
            if _parseable(turns):
                yield Credit("flow", "anchor", FLOW, tuple(turn.place(0, len(turn.text)) for turn in turns))
    unclosed = tuple(turn.place_of_mark(mark) for turn in turns for mark in turn.unclosed)
    if unclosed and config.unclosed_penalty:
        # Choice: once an episode, so that R_fmt is at least −λγ
        yield Credit("think_unclosed", "anchor", -config.unclosed_penalty, unclosed)
    # Choice: without a call there is nothing to precede; a turn with a call must be a tool turn from end to end.
    calling = [turn for turn in turns if any(mark.name == "tool_call" for mark in turn.marks)]
    if len(thinks) == len(turns) and calling and all(turn.kind == "tool_call" for turn in calling):
        before_calls = tuple(turn.place_of(think) for turn, think in thinks if turn in calling)
        yield Credit("think_first", "think_first", 0.3, before_calls)
    if base > 0 and all(turn.balanced for turn in turns):
        marks = tuple(turn.place_of_mark(mark) for turn in turns for mark in turn.marks)
        yield Credit("balanced", "balanced", 0.1, marks)


def _tool_credits(turns: Sequence[_Turn], outcomes: Sequence[str], right: bool, tools: Signatures) -> Iterator[Credit]:
    """0.3 for an executed call, else 0.1 for a well-formed one; to either, and only to these, 0.5 for a right answer.

    That a call was executed is the dispatcher's word alone. So is that it was well-formed, unless it is in the grammar
    and can be read: `invalid` is the outcome of a bad window as well as of bad JSON.
    """
    calls = [(turn, call) for turn in turns for call in find_calls(turn.text, tools)]
    executed = [number for number, outcome in enumerate(outcomes) if outcome == "ok"]
    carried_out = [number for number, outcome in enumerate(outcomes) if outcome in CARRIED_OUT]
    blocks = {turn.place_of(block) for turn in turns for block in turn.calls}
    well_formed = [
        number for number, (turn, call) in enumerate(calls) if call.well_formed and turn.place(*call.span) in blocks
    ]
    earning = executed or sorted({*carried_out, *well_formed})
    if not earning:
        return
    # Several statements of one <tool_code> share a place.
    spans = dict.fromkeys(turn.place(*call.span) for number, (turn, call) in enumerate(calls) if number in earning)
    places = tuple(spans)
    yield Credit("tool_executed" if executed else "tool_call", "tool", 0.3 if executed else 0.1, places)
    if right:
        yield Credit("tool_right", "tool", 0.5, places)
