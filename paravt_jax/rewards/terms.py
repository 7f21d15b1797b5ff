"""The reward of an episode: R = w_acc · R_acc + w_fmt · R_fmt + R_tool, and your own terms.

Every credit records the characters that earned it. All credits come from one parse of the turns
(`paravt_jax/rewards/grammar.py`). Text after the first fault has no part in R_fmt, and neither has an answer or a turn
that the grammar does not fully accept. A leaked `<tool_code>` breaks the format and earns only R_tool, if its call was
executed.

Lines marked `Choice:` decide points that the specification leaves open.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from paravt_jax.rewards.answers import exact_match, interval, interval_iou, normalised, option_letter, token_f1
from paravt_jax.rewards.grammar import (
    STRUCTURAL,
    ParsedTurn,
    Place,
    Tag,
    parse_episode,
    parseable,
    substantive,
)
from paravt_jax.rewards.settings import RewardConfig
from rollout.tools import CROP_VIDEO_ALONE, Outcome, Signatures, find_calls

THINK_FIRST, BALANCED = 0.3, 0.1  # the terms of R_fmt besides R_base and R_anchor
# R_base: substantive thinking, <answer> before an answer, </answer> after it; by reward.format
BASE = {"published": (0.2, 0.3, 0.2), "strict": (0.2, 0.3, 0.2), "no_suffix": (0.3, 0.2, 0.1)}
# R_anchor: a </think> that closes substantive thinking, and the whole flow from thinking to a closed answer
THINK_CLOSING, FLOW = 0.4, 0.3
WELL_FORMED_SHARE = 1 / 3  # reward of a well-formed, not executed call relative to an executed call; 0.1 / 0.3
OUTCOMES = get_args(Outcome)
WELL_FORMED_OUTCOMES = ("ok", "error", "timeout")  # only a well-formed call to a known tool has these

Term = Literal["accuracy", "base", "anchor", "think_first", "balanced", "tool"]
TERMS = get_args(Term)
TERM_NAME = re.compile(r"[a-z][a-z0-9_]*")
QUESTION_TYPES = ("mcq", "tvg", "oe")  # question types with an R_acc
LENGTH = "length"  # the name of the term that train.truncated=soft adds
TOOL_SUMMANDS = ("tool_call", "tool_right", "call_price")
MAX_REWARD = 1e15  # bound of your own terms, so that sums and squares stay finite in float32
RESERVED_NAMES = (*TERMS, *TOOL_SUMMANDS, "format", "total", "prediction", "credits", "own")


@dataclass(frozen=True)
class OwnTerm:
    """Your own reward term, which adds weight · value to R. `places` are the characters that earned it."""

    name: str
    value: float | int
    places: tuple[Place, ...] = ()
    weight: float | int = 1.0

    def __post_init__(self) -> None:
        if not TERM_NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise ValueError(
                f"invalid term name {self.name!r}: use lower-case letters, digits and _, and none of "
                f"{', '.join(RESERVED_NAMES)}"
            )
        if not abs(self.value * self.weight) < MAX_REWARD:
            raise ValueError(
                f"the term {self.name} has value {self.value} and weight {self.weight}, expected numbers with a "
                f"product below {MAX_REWARD:g}"
            )


@dataclass(frozen=True)
class Credit:
    """One reason for a reward. The credits of a built-in term sum to the term; that of an `OwnTerm` is weight · value.

    `places` is empty for an own term without places, and for a call that is not in the turns although the dispatcher
    reports its outcome. `term` is a built-in term, or the name of an `OwnTerm`.
    """

    name: str
    term: Term | str
    value: float
    places: tuple[Place, ...]


@dataclass(frozen=True)
class AnchorProperty:
    """One property of R_anchor, its value for this episode, and the characters responsible for it.

    If the property is met, `places` are the tags that met it; of the flow, all turns. If not, each place is a fault:
    the first character of a wrong tag or of text outside of the parts, or the end of a turn.
    """

    name: str
    value: float
    met: bool
    places: tuple[Place, ...]


class Summand(NamedTuple):
    """A summand of R, which is the sum of weight · value over its summands."""

    name: str
    value: float
    weight: float

    @property
    def reward(self) -> float:
        return self.weight * self.value


@dataclass(frozen=True)
class RewardTerms:
    """All reward terms of an episode. Terms that need a missing judge's score are None, so that no mean has them."""

    accuracy: float | None  # R_acc; also None for a question type of your own
    base: float  # R_base
    anchor: float  # R_anchor
    think_first: float
    balanced: float
    format: float  # R_fmt
    unanchored_format: float  # R_fmt − λ · R_anchor, unless a part of R_fmt reaches its bound
    summands: tuple[Summand, ...]  # empty if the judge's score is missing
    anchors: tuple[AnchorProperty, ...]  # all properties of R_anchor, earned or not
    own: tuple[OwnTerm, ...]
    num_calls: int
    executed: tuple[Place, ...] | None  # executed calls; None: none was executed
    parseable: bool  # the grammar accepts the whole episode
    prediction: str | None  # the scored answer
    credits: tuple[Credit, ...]
    tags: tuple[Tag, ...]

    @property
    def missing(self) -> bool:
        """Whether the judge gave no score, so that the group must exclude this episode."""
        return not self.summands

    @property
    def score(self) -> float | None:
        """R_acc; for a question type of your own, the sum of your own terms."""
        is_own = self.accuracy is None and not self.missing
        return math.fsum(term.weight * term.value for term in self.own) if is_own else self.accuracy

    @property
    def tool(self) -> float | None:
        """R_tool. It needs no clipping, because its positive weights sum to at most 1 and values are at most 1."""
        rewards = [summand.reward for summand in self.summands if summand.name in TOOL_SUMMANDS]
        return None if self.missing else math.fsum(rewards)

    @property
    def total(self) -> float | None:
        """R; None if the judge's score is missing."""
        return None if self.missing else math.fsum(summand.reward for summand in self.summands)

    @property
    def summands_without_anchor(self) -> tuple[Summand, ...]:
        return tuple(
            summand._replace(value=self.unanchored_format) if summand.name == "format" else summand
            for summand in self.summands
        )


def reward_terms(
    turns: Sequence[str],
    outcomes: Sequence[str],
    answer: str,
    question_type: str,
    config: RewardConfig | None = None,
    judged: float | None = None,
    question: str = "",
    own: Sequence[OwnTerm] = (),
    tools: Signatures = CROP_VIDEO_ALONE,
) -> RewardTerms:
    """Every reward term of an episode; `with_needed_calls` adds the part that depends on the group.

    `turns` are the assistant's turns with the forced prefix and without end tokens; `outcomes` are the dispatcher's
    outcomes, one per call in order. `judged` is the judge's score of `find_prediction(turns)`, only for open questions
    with oe_mode llm. `question` is needed to recognize copied options. `tools` are the available tools. Malformed model
    text never raises; an unreadable ground truth does. With reward.plugin, `question_type` may be your own.
    """
    config = config or RewardConfig()
    parsed = parse_episode(turns)
    _check(outcomes, question_type, config, judged)
    has_accuracy = question_type in QUESTION_TYPES or not config.plugin
    prediction_place = _place_of_prediction(parsed)
    prediction = None if prediction_place is None else _prediction_at(prediction_place, turns)
    accuracy = _accuracy(prediction, answer, question_type, config, judged, question) if has_accuracy else None
    anchors = tuple(_anchor_properties(parsed, config))
    calls = _calls(parsed, outcomes, tools)
    tool = _tool_parts(calls, len(outcomes), accuracy or 0.0, config)
    credits = (
        *_format_credits(parsed, config),
        *_think_first_credits(parsed, calls, config),
        *_anchor_credits(parsed, anchors),
        *((Credit("accuracy", "accuracy", accuracy, (prediction_place,)),) if accuracy and prediction_place else ()),
        *_tool_credits(calls, tool),
    )
    base, anchor, think_first, balanced = (
        math.fsum(credit.value for credit in credits if credit.term == term)
        for term in ("base", "anchor", "think_first", "balanced")
    )
    unanchored = math.fsum((base, think_first, balanced))
    format_reward = min(1.0, unanchored + config.anchor_weight * anchor)
    summands = (
        Summand("accuracy", accuracy or 0.0, config.accuracy_weight),
        Summand("format", format_reward, config.format_weight),
        *tool,
    )
    terms = RewardTerms(
        accuracy=accuracy,
        base=base,
        anchor=anchor,
        think_first=think_first,
        balanced=balanced,
        format=format_reward,
        unanchored_format=min(_bound_without_anchor(config), unanchored),
        summands=() if accuracy is None and has_accuracy else summands,
        anchors=anchors,
        own=(),
        num_calls=len(outcomes),
        executed=calls.executed,
        parseable=parseable(parsed),
        prediction=prediction,
        credits=credits,
        tags=tuple(tag for turn in parsed for tag in turn.tags if tag.name in STRUCTURAL),
    )
    return with_own_terms(terms, own)


def with_own_terms(terms: RewardTerms, own: Sequence[OwnTerm]) -> RewardTerms:
    summands = [Summand(term.name, term.value, term.weight) for term in own]
    credits = [Credit(term.name, term.name, term.weight * term.value, term.places) for term in own]
    return replace(
        terms,
        own=(*terms.own, *own),
        summands=() if terms.missing else (*terms.summands, *summands),
        credits=(*terms.credits, *(credit for credit in credits if credit.value)),
    )


def with_needed_calls(group: Sequence[RewardTerms | None], config: RewardConfig) -> list[RewardTerms | None]:
    """Adds the reward of reward.tool=needed, for answers after an executed call, to a group's terms.

    The reward is proportional to R_acc minus the mean R_acc of the group's answers without an executed call; it is 0
    without such answers. So a call that does not help earns nothing on average, and a call that misleads has a cost.
    The mean excludes episodes without an answer, because forgetting `</answer>` does not make a call needed. A missing
    episode is None or has no score.
    """
    alone = [
        terms.accuracy
        for terms in group
        if terms is not None and terms.executed is None and terms.prediction and terms.accuracy is not None
    ]
    if config.tool != "needed" or not alone:
        return list(group)
    expected = math.fsum(alone) / len(alone)
    return [terms and _with_call_gain(terms, expected, config) for terms in group]


def _with_call_gain(terms: RewardTerms, expected: float, config: RewardConfig) -> RewardTerms:
    if terms.executed is None or not terms.prediction or terms.accuracy is None:
        return terms
    gain = terms.accuracy - expected
    summands = tuple(s._replace(value=gain) if s.name == "tool_right" else s for s in terms.summands)
    reward = gain * config.tool_pay.right
    credits = (Credit("tool_right", "tool", reward, terms.executed),) if reward else ()
    return replace(terms, summands=summands, credits=(*terms.credits, *credits))


def find_prediction(turns: Sequence[str]) -> str | None:
    """The episode's answer for a judge; None if it has no answer, which scores 0 without a judge."""
    prediction_place = _place_of_prediction(parse_episode(turns))
    return None if prediction_place is None else _prediction_at(prediction_place, turns)


def check_ground_truth(answer: str, question_type: str) -> None:
    """Raises ValueError for a ground truth that no answer can match."""
    if question_type not in QUESTION_TYPES:
        raise ValueError(f"question_type {question_type!r} is unknown, expected mcq, tvg or oe")
    if question_type == "mcq" and option_letter(answer) is None:
        raise ValueError(f"the ground truth {answer!r} of an mcq question names no option, expected a letter A to J")
    if question_type == "tvg":
        true = interval(answer)
        if true is None or true[0] >= true[1]:
            raise ValueError(f"the ground truth {answer!r} of a tvg question is not an interval, expected [start, end]")
    if question_type == "oe" and not normalised(answer):
        raise ValueError(f"the ground truth {answer!r} of an oe question has no word that an answer could match")


def _check(outcomes: Sequence[str], question_type: str, config: RewardConfig, judged: float | None) -> None:
    for outcome in outcomes:
        if outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {outcome!r}, expected one of {', '.join(OUTCOMES)}")
    if judged is not None and (question_type != "oe" or config.oe_mode != "llm"):
        raise ValueError(
            f"a judged score was given for a question of type {question_type!r} with reward.oe_mode={config.oe_mode}; "
            "only open questions (oe) with oe_mode llm are judged"
        )
    if judged is not None and not 0 <= judged <= 1:
        raise ValueError(f"judged={judged} must be between 0 and 1")


def _place_of_prediction(turns: Sequence[ParsedTurn]) -> Place | None:
    """The body of the episode's last `<answer>…</answer>` without tags in it.

    Choice: the answer counts even if the grammar rejects the turn, which affects the format and not the accuracy.
    """
    for turn in reversed(turns):
        for opening, closing in reversed(list(zip(turn.tags, turn.tags[1:], strict=False))):
            if opening.name == closing.name == "answer" and not opening.closing and closing.closing:
                return turn.place_at(opening.place.end, closing.place.start)
    return None


def _prediction_at(answer_body: Place, turns: Sequence[str]) -> str:
    return turns[answer_body.turn][slice(*answer_body.span)].strip()


def _accuracy(
    prediction: str | None,
    answer: str,
    question_type: str,
    config: RewardConfig,
    judged: float | None,
    question: str,
) -> float | None:
    """R_acc in [0, 1], or None if the judge's score is missing."""
    check_ground_truth(answer, question_type)
    if not prediction:
        return 0.0  # not left to a judge, who might disagree
    if question_type == "mcq":
        return float(option_letter(prediction, question) == option_letter(answer, question))
    if question_type == "tvg":
        predicted, true = interval(prediction), interval(answer)
        return 0.0 if predicted is None or true is None else interval_iou(predicted, true)
    if config.oe_mode == "llm":
        return judged
    return (token_f1 if config.oe_mode == "f1" else exact_match)(prediction, answer)


def _bound_without_anchor(config: RewardConfig) -> float:
    """The bound of R_fmt without the anchor: 1 minus the anchor's maximum.

    With a bound of 1, a well-formed call, rewarded for thinking first, would earn 0.2 more than a well-formed answer,
    although R_fmt is 1 for both; and subtracting the anchor after clipping would penalize the better structure.
    """
    return max(0.0, 1.0 - config.anchor_weight * (THINK_CLOSING + FLOW))


def _format_credits(turns: Sequence[ParsedTurn], config: RewardConfig) -> Iterator[Credit]:
    """The credits of R_fmt except the anchor's.

    Choice: thinking is a property of every turn, the answer a property of the last turn, as in the grammar.
    """
    if not turns:
        return
    base, (of_think, of_opening, of_closing) = 0.0, BASE[config.format]
    thinks = [(turn, turn.think) for turn in turns if turn.think is not None]
    if len(thinks) == len(turns) and all(substantive(think) for _, think in thinks):
        base += of_think
        yield Credit("think", "base", of_think, tuple(turn.place_of(think) for turn, think in thinks))
    answer = turns[-1].answer
    if answer is not None:
        base += of_opening
        yield Credit("answer_opening", "base", of_opening, (answer.opening.place,))
        if answer.closing is not None:
            base += of_closing
            yield Credit("answer_closing", "base", of_closing, (answer.closing.place,))
    if base > 0 and all(turn.balanced for turn in turns):
        yield Credit("balanced", "balanced", BALANCED, tuple(tag.place for turn in turns for tag in turn.tags))


def _think_first_credits(turns: Sequence[ParsedTurn], calls: "_Calls", config: RewardConfig) -> Iterator[Credit]:
    """Credits for thinking before the first call: a bonus, or a requirement of every episode with a call.

    Choice: the credit needs a call after the thinking, and every turn with a call must be a valid tool turn.

    DIFFERS on request: the bonus lifts R_fmt so far above its bound that a fault in an episode with a call costs
    nothing. Without the bonus, episodes with and without a call reach the bound in the same way.
    """
    tags = ("tool_call", "tool_code") if config.format == "strict" else ("tool_call",)  # a leak is a fault there
    calling = [turn for turn in turns if any(tag.name in tags for tag in turn.tags)]
    is_met = bool(calling) and all(turn.kind == "tool_call" for turn in calling)
    is_met = is_met and all(turn.think is not None for turn in turns)
    if is_met and config.format != "strict":
        places = tuple(turn.place_of(turn.think) for turn in calling if turn.think is not None)
        yield Credit("think_first", "think_first", THINK_FIRST, places)
    elif not is_met and config.format == "strict" and calls.every is not None:
        yield Credit("call_without_thinking", "think_first", -THINK_FIRST, calls.every)


def _anchor_properties(turns: Sequence[ParsedTurn], config: RewardConfig) -> Iterator[AnchorProperty]:
    """The properties of R_anchor. Choice: a flow ends in a non-empty answer; enough thinking is a separate property.

    Choice: γ applies once per episode, so R_anchor is at least −γ.
    """
    closings = tuple(tag.place for turn in turns for tag in turn.tags if tag.name == "think" and tag.closing)
    unclosed = tuple(turn.missing_closing_place(tag) for turn in turns for tag in turn.unclosed)
    not_closed = tuple(span for turn in turns for span in _thinking_fault(turn))
    astray = tuple(span for turn in turns for span in _flow_fault(turn, turn is turns[-1]))
    all_places = tuple(span for turn in turns for span in (turn.full, turn.end))
    for name, value, lost, places in (
        ("think_closing", THINK_CLOSING, not_closed, closings),
        ("flow", FLOW, astray, all_places),
    ):
        met = bool(turns) and not lost
        yield AnchorProperty(name, value if met else 0.0, met, places if met else lost)
    penalty = -config.unclosed_penalty if unclosed else 0.0
    yield AnchorProperty("think_unclosed", penalty, not unclosed, unclosed or closings)


def _thinking_fault(turn: ParsedTurn) -> Iterator[Place]:
    """The place at fault if a turn does not close a substantive thinking block."""
    if turn.think is None:
        yield turn.fault_place
    elif not substantive(turn.think):
        yield turn.first_of(turn.tags[1])


def _flow_fault(turn: ParsedTurn, is_last: bool) -> Iterator[Place]:
    """The place at fault if a turn breaks the flow of thinking, calls and a final answer."""
    if not turn.kind:
        yield turn.fault_place
    elif (turn.kind == "answer") != is_last:
        yield turn.first_of(turn.blocks[1].opening)
    elif is_last and turn.answer is None:
        yield turn.first_of(turn.tags[-1])


def _anchor_credits(turns: Sequence[ParsedTurn], anchors: Sequence[AnchorProperty]) -> Iterator[Credit]:
    """Credits for the properties with a nonzero value. An unclosed `<think>` tag gets the credit of its fault."""
    unclosed = tuple(tag.place for turn in turns for tag in turn.unclosed)
    for anchor in anchors:
        if anchor.value:
            spelled = tuple(p for p in anchor.places if p.start < p.end)
            yield Credit(anchor.name, "anchor", anchor.value, spelled if anchor.met else unclosed)


class _Calls(NamedTuple):
    """The places of executed, well-formed and all calls; None if there are no such calls."""

    executed: tuple[Place, ...] | None
    well_formed: tuple[Place, ...] | None
    every: tuple[Place, ...] | None


def _calls(turns: Sequence[ParsedTurn], outcomes: Sequence[str], tools: Signatures) -> _Calls:
    """Sorts calls by outcome. Only the dispatcher decides whether a call was executed.

    A call is well-formed if its outcome implies it, or if the grammar accepts it and its arguments parse. The outcome
    alone does not decide, because both a bad window and bad JSON have the outcome `invalid`.
    """
    calls = [(turn, call) for turn in turns for call in find_calls(turn.text, tools)]
    executed = {number for number, outcome in enumerate(outcomes) if outcome == "ok"}
    blocks = {turn.place_of(block) for turn in turns for block in turn.blocks}
    well_formed = {number for number, outcome in enumerate(outcomes) if outcome in WELL_FORMED_OUTCOMES} | {
        number for number, (turn, call) in enumerate(calls) if call.well_formed and turn.place_at(*call.span) in blocks
    }

    def places(numbers: set[int]) -> tuple[Place, ...] | None:
        # Calls in the same <tool_code> share a place.
        spans = dict.fromkeys(
            turn.place_at(*call.span) for number, (turn, call) in enumerate(calls) if number in numbers
        )
        return tuple(spans) if numbers else None

    return _Calls(places(executed), places(well_formed), places(set(range(len(outcomes)))))


def _tool_parts(calls: _Calls, num_calls: int, accuracy: float, config: RewardConfig) -> tuple[Summand, ...]:
    """The rewards for a call and for a call before a right answer, and the price of calls.

    DIFFERS from the release with reward.tool=needed: only executed calls earn a reward, and the reward of an answer
    after a call depends on the group.
    """
    if config.tool == "none":
        return ()
    called, right = float(calls.executed is not None), 0.0
    if config.tool == "published":
        called = WELL_FORMED_SHARE if not called and calls.well_formed is not None else called
        right = float(called > 0 and accuracy > 0)
    return (
        Summand("tool_call", called, config.tool_pay.call),
        Summand("tool_right", right, config.tool_pay.right),
        Summand("call_price", -float(num_calls), config.tool_pay.price),
    )


def _tool_credits(calls: _Calls, tool: Sequence[Summand]) -> Iterator[Credit]:
    earning = (calls.well_formed if calls.executed is None else calls.executed) or ()
    names = {"tool_call": "tool_call" if calls.executed is None else "tool_executed"}
    for summand in tool:
        if summand.reward:
            places = (calls.every or ()) if summand.name == "call_price" else earning
            yield Credit(names.get(summand.name, summand.name), "tool", summand.reward, places)
