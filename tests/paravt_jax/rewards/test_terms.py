"""Credits computed by hand, the cost of each fault, and that no change of tags beats the grammar."""

import math
import re
import time

import pytest
from hypothesis import given, settings, strategies as st

from paravt_jax.rewards.grammar import TAG, Place
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import (
    OUTCOMES,
    OwnTerm,
    check_ground_truth,
    find_prediction,
    reward_terms,
    with_needed_calls,
)

CALL = '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 2, "end_time": 5}}'
THINK = "<think>\nlet me look</think>"  # 11 characters
TOOL_TURN = f"{THINK}\n<tool_call>{CALL}</tool_call>"
ANSWER_TURN = f"{THINK}<answer>B</answer>"
SLACK = 1e-9


def terms(*turns, outcomes=(), answer="B", question_type="mcq", judged=None, **config):
    return reward_terms(list(turns), list(outcomes), answer, question_type, RewardConfig(**config), judged)


def without_anchor(reward):
    """Returns the total without the anchor."""
    return math.fsum(summand.reward for summand in reward.summands_without_anchor)


def parts(reward):
    return reward.base, reward.anchor, reward.think_first, reward.balanced, reward.format


@pytest.mark.parametrize(
    ("text", "by_hand"),
    [
        # base, anchor, think first, balanced, and their sum with λ = 0.5 and a bound of 1
        (ANSWER_TURN, (0.7, 0.7, 0.0, 0.1, 1.0)),  # 0.7 + 0.35 + 0.1 = 1.15
        (f" {THINK}\n\n<answer>B</answer>\n", (0.7, 0.7, 0.0, 0.1, 1.0)),
        (TOOL_TURN, (0.2, 0.4, 0.3, 0.1, 0.8)),  # no answer
        (THINK, (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{THINK}<answer>B", (0.5, 0.4, 0.0, 0.0, 0.7)),  # cut off
        (f"{THINK}<answer>", (0.2, 0.4, 0.0, 0.0, 0.4)),
        (f"{THINK}<answer> </answer>", (0.2, 0.4, 0.0, 0.1, 0.5)),  # empty
        ("<think>\n short   </think><answer>B</answer>", (0.5, 0.3, 0.0, 0.1, 0.75)),  # 5 characters of thinking
        ("<think>\nit is late</think>", (0.2, 0.4, 0.0, 0.1, 0.5)),  # 10 characters
        ("<think>\nit is big</think>", (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("<think>\n..........</think>", (0.0, 0.0, 0.0, 0.0, 0.0)),  # neither dots nor digits alone are thinking
        ("<think>\n... no ... no</think>", (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("<think>\n12 34 56 78 90</think>", (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("<think>\nein Mädchen, 我看</think>", (0.2, 0.4, 0.0, 0.1, 0.5)),
        ("<think>\nlet me look", (0.0, -0.3, 0.0, 0.0, -0.15)),
        ("", (0.0, 0.0, 0.0, 0.0, 0.0)),
        ("let me look. B", (0.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_format_by_hand(text, by_hand):
    assert parts(terms(text)) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("text", "by_hand"),
    [
        ("<think>\nlet me look<answer>B</answer>", (0.0, -0.3, 0.0, 0.0, -0.15)),  # dropped </think>
        ("<think>\n<think>let me look</think><answer>B</answer>", (0.0, -0.3, 0.0, 0.0, -0.15)),  # doubled <think>
        (f"<answer>B</answer>{THINK}", (0.0, 0.0, 0.0, 0.0, 0.0)),  # wrong order: no thinking comes first
        (f"so: {ANSWER_TURN}", (0.0, 0.0, 0.0, 0.0, 0.0)),  # leading text
        (f"<think>\nlet me look <answer>B</answer></think>{ANSWER_TURN}", (0.0, 0.0, 0.0, 0.0, 0.0)),  # nested
        # Only the closed thinking earns.
        (f"{ANSWER_TURN} indeed", (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{THINK}so: <answer>B</answer>", (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{THINK}B", (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{ANSWER_TURN}<answer>B</answer>", (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{THINK}<answer><answer>B</answer>", (0.2, 0.4, 0.0, 0.0, 0.4)),
        (f"{THINK}</think><answer>B</answer>", (0.2, 0.4, 0.0, 0.0, 0.4)),
        (f"{ANSWER_TURN}<think>", (0.2, 0.1, 0.0, 0.0, 0.25)),  # 0.4 − 0.3: opened again
        (f"{TOOL_TURN}<answer>B</answer>", (0.2, 0.4, 0.0, 0.1, 0.5)),  # either calls or an answer
        (f"{TOOL_TURN} now", (0.2, 0.4, 0.0, 0.1, 0.5)),
        (f"{THINK}<tool_code>crop_video('a', 1, 2)</tool_code>", (0.2, 0.4, 0.0, 0.1, 0.5)),  # not the trained form
    ],
)
def test_faults_by_hand(text, by_hand):
    reward = terms(text)
    assert parts(reward) == pytest.approx(by_hand)
    assert not reward.parseable


def test_every_turn_must_have_a_property_of_several_turns():
    full = terms(TOOL_TURN, TOOL_TURN, ANSWER_TURN)
    assert parts(full) == pytest.approx((0.7, 0.7, 0.3, 0.1, 1.0))
    assert full.parseable
    short = terms("<think>\nhm</think><tool_call>{}</tool_call>", ANSWER_TURN)
    assert parts(short) == pytest.approx((0.5, 0.3, 0.3, 0.1, 1.0))  # 0.5 + 0.15 + 0.3 + 0.1 = 1.05
    assert short.parseable
    unclosed = terms(f"<think>\nlook<tool_call>{CALL}</tool_call>", "<think>\nlook", ANSWER_TURN)
    assert parts(unclosed) == pytest.approx((0.5, -0.3, 0.0, 0.0, 0.35))  # γ once
    assert not any(parts(terms(TOOL_TURN, "<answer>B</answer>")))  # the last turn has no thinking


@pytest.mark.parametrize("turns", [[], [ANSWER_TURN] * 2, [TOOL_TURN], [ANSWER_TURN, TOOL_TURN], [TOOL_TURN, THINK]])
def test_an_episode_is_tool_turns_and_then_an_answer(turns):
    reward = terms(*turns)
    assert not reward.parseable
    assert "flow" not in {credit.name for credit in reward.credits}


def test_without_the_answer_suffix_thinking_and_answer_weigh_the_same():
    """R_base gives 0.3 for thinking and 0.2 + 0.1 for the answer's tags; with the suffix 0.2 and 0.3 + 0.2."""
    for rules, think, answered, opened in (("published", 0.2, 0.7, 0.3), ("no_suffix", 0.3, 0.6, 0.2)):
        assert terms("<think>\nI look closely.</think>", format=rules).base == pytest.approx(think)
        assert terms(ANSWER_TURN, format=rules).base == pytest.approx(answered)
        assert terms("<think>\nhm</think><answer>B", format=rules).base == pytest.approx(opened)


@pytest.mark.parametrize(
    ("outcomes", "right", "tool"),
    [
        (["ok"], True, 0.8),
        (["ok"], False, 0.3),
        (["timeout"], False, 0.1),
        (["error"], True, 0.6),
        (["invalid"], True, 0.6),  # a bad window: the call itself can be read
        (["invalid", "ok", "error"], True, 0.8),
    ],
)
def test_tool_reward_by_hand(outcomes, right, tool):
    reward = terms(TOOL_TURN, ANSWER_TURN, outcomes=outcomes, answer="B" if right else "C")
    assert reward.tool == pytest.approx(tool)
    assert reward.total == pytest.approx(right + 1.0 + tool)


def test_an_invalid_or_unknown_call_earns_nothing_even_with_a_right_answer():
    bad, unknown = TOOL_TURN.replace(CALL, "{"), TOOL_TURN.replace("crop_video", "cut_video")
    assert terms(ANSWER_TURN).tool == 0.0
    assert terms(bad, ANSWER_TURN, outcomes=["invalid"]).tool == 0.0
    assert terms(unknown, ANSWER_TURN, outcomes=["unknown_tool"]).tool == 0.0
    assert terms(TOOL_TURN, ANSWER_TURN, outcomes=["ok"], tool="none").tool == 0.0


NEEDED = RewardConfig(tool="needed")


def answered(reply, true, question_type="tvg", turns=(), outcomes=()):
    reply = ANSWER_TURN.replace(">B<", f">{reply}<")
    return reward_terms([*turns, reply], list(outcomes), true, question_type, NEEDED)


def test_a_tiny_overlap_earns_all_of_r_tool_with_the_published_formula_and_its_gain_as_needed():
    sliver = "[9.997, 10]"  # an IoU of 0.0003
    for reply, gain in ((sliver, 0.0003 - 0.5), ("[0, 10]", 0.5)):  # no threshold, because the other answers have 0.5
        turns = TOOL_TURN, ANSWER_TURN.replace(">B<", f">{reply}<")
        assert terms(*turns, outcomes=["ok"], answer="[0, 10]", question_type="tvg").tool == pytest.approx(0.8)
        looked = answered(reply, "[0, 10]", turns=[TOOL_TURN], outcomes=["ok"])
        (looked, _) = with_needed_calls([looked, answered("[0, 5]", "[0, 10]")], NEEDED)
        assert looked.tool == pytest.approx(gain - 0.03)


ALONE_RIGHT, ALONE_WRONG = [terms(ANSWER_TURN, tool="needed", answer=letter) for letter in "BC"]
ALONE_UNANSWERED = terms(ANSWER_TURN.replace("</answer>", ""), tool="needed")
CALLED_RIGHT, CALLED_WRONG, REFUSED_RIGHT = [
    terms(TOOL_TURN, ANSWER_TURN, outcomes=[outcome], tool="needed", answer=letter)
    for outcome, letter in (("ok", "B"), ("ok", "C"), ("invalid", "B"))
]
CALLED_UNANSWERED = terms(TOOL_TURN, THINK, outcomes=["ok"], tool="needed")


@pytest.mark.parametrize(
    ("rest_of_group", "expected"),
    [
        ([ALONE_WRONG, ALONE_WRONG], 0.0),
        ([ALONE_WRONG, ALONE_RIGHT, ALONE_WRONG, None, ALONE_RIGHT], 0.5),
        ([ALONE_RIGHT, ALONE_RIGHT, ALONE_WRONG, REFUSED_RIGHT], 0.75),  # a rejected call does not look at the video
        ([ALONE_RIGHT, ALONE_UNANSWERED], 1.0),  # a missing answer is not a wrong answer
    ],
)
def test_a_needed_call_earns_the_accuracy_beyond_the_answers_without_one(rest_of_group, expected):
    for looked, accuracy in ((CALLED_RIGHT, 1.0), (CALLED_WRONG, 0.0)):
        paid = accuracy - expected - 0.03
        first, *rest = with_needed_calls([looked, *rest_of_group], NEEDED)
        assert first.tool == pytest.approx(paid)
        assert first.total == pytest.approx(accuracy + 1 + paid)
        assert without_anchor(first) == pytest.approx(accuracy + 0.65 + paid)
        assert math.fsum(c.value for c in first.credits if c.term == "tool") == pytest.approx(paid)
        assert rest == rest_of_group


@pytest.mark.parametrize(
    "group",
    [
        [CALLED_WRONG, CALLED_RIGHT, None],  # all called: nothing to compare with
        [CALLED_RIGHT, ALONE_UNANSWERED],
        [CALLED_UNANSWERED, REFUSED_RIGHT, ALONE_WRONG],  # a call without an answer, or without a result
        [None],
    ],
)
def test_a_group_without_a_comparison_earns_nothing_as_needed(group):
    assert with_needed_calls(group, NEEDED) == group
    # A call has its price whether executed or not.
    assert REFUSED_RIGHT.tool == CALLED_RIGHT.tool == pytest.approx(-0.03)


DUTY = {"format": "strict"}
LEAK = f"{THINK}<tool_code>crop_video('video.mp4', 2, 5)</tool_code>"


@pytest.mark.parametrize(
    ("turns", "published", "as_duty"),
    [
        ([TOOL_TURN, ANSWER_TURN], 1.0, 1.0),  # 1.45 and 1.15, above the bound
        ([LEAK, ANSWER_TURN], 1.0, 0.7),  # 0.7 + 0.2 + 0.1, and 0.3 less
        ([TOOL_TURN, LEAK, ANSWER_TURN], 1.0, 0.7),
        ([TOOL_TURN, f"{ANSWER_TURN}{LEAK.removeprefix(THINK)}", ANSWER_TURN], 1.0, 0.7),
        ([f"{TOOL_TURN} so", ANSWER_TURN], 1.0, 0.7),  # prose after a call
        ([f"{TOOL_TURN}<tool_response>red</tool_response>", ANSWER_TURN], 1.0, 0.7),
        ([TOOL_TURN.replace("let me look", "hm"), ANSWER_TURN], 1.0, 0.75),  # 0.5 + 0.15 + 0.3 + 0.1; 0.3 less
        ([TOOL_TURN, f"{ANSWER_TURN}<answer>C</answer>"], 0.8, 0.5),  # 0.2 + 0.2 + 0.3 + 0.1
        ([TOOL_TURN, ANSWER_TURN.replace("</answer>", "")], 1.0, 0.7),  # 0.5 + 0.2 + 0.3
        ([TOOL_TURN, THINK], 0.8, 0.5),  # no answer
        ([ANSWER_TURN], 1.0, 1.0),  # without a call nothing differs
        ([THINK], 0.5, 0.5),
    ],
)
def test_every_fault_of_an_episode_with_a_call_costs_if_thinking_first_is_a_duty(turns, published, as_duty):
    outcomes = ["ok"] * (len(turns) - 1)
    both = [terms(*turns, outcomes=outcomes, **config) for config in ({}, DUTY)]
    assert [each.format for each in both] == pytest.approx([published, as_duty])
    assert without_anchor(both[1]) <= without_anchor(terms(TOOL_TURN, ANSWER_TURN, outcomes=["ok"], **DUTY)) + SLACK


def test_a_call_without_thinking_is_charged_to_the_call():
    reward = terms(LEAK, ANSWER_TURN, outcomes=["ok"], **DUTY)
    (charged,) = (credit for credit in reward.credits if credit.term == "think_first")
    assert (charged.name, charged.value, reward.think_first) == ("call_without_thinking", -0.3, -0.3)
    assert [LEAK[place.start : place.end] for place in charged.places] == [LEAK.removeprefix(THINK)]


def test_a_call_of_any_tool_of_the_run_is_well_formed():
    turns = [TOOL_TURN.replace("crop_video", "zoom_frame"), ANSWER_TURN]
    toolsets = ({"zoom_frame": ()}, {"x": ()})
    earned = [reward_terms(turns, ["invalid"], "C", "mcq", tools=tools).tool for tools in toolsets]
    assert earned == pytest.approx([0.1, 0.0])


def test_a_tool_code_call_earns_only_if_executed():
    executed = terms(LEAK, ANSWER_TURN, outcomes=["ok"])
    assert executed.tool == pytest.approx(0.8)
    assert {tag.name for tag in executed.tags} == {"think", "answer"}  # `</tool_code>` gets no credit of the anchor
    assert terms(LEAK, ANSWER_TURN, outcomes=["invalid"]).tool == 0.0


@pytest.mark.parametrize(
    "imitation", ["<tool_response>a red car</tool_response>", "ok", "outcome: ok", "</tool_response>"]
)
def test_text_that_imitates_a_tool_response_earns_nothing(imitation):
    plain = terms(TOOL_TURN, ANSWER_TURN, outcomes=["timeout"])
    for turns in (
        (f"{TOOL_TURN}{imitation}", ANSWER_TURN),
        (TOOL_TURN.replace("let me look", f"let me look {imitation}"), ANSWER_TURN),
        (TOOL_TURN, f"{imitation}{ANSWER_TURN}"),
    ):
        reward = terms(*turns, outcomes=["timeout"])
        assert reward.tool == plain.tool
        assert reward.total <= plain.total
    thought_of_imitation = terms("<think><tool_response>a red car</tool_response></think><answer>B</answer>")
    assert thought_of_imitation.format == 0.0


@pytest.mark.parametrize(
    ("question_type", "answer", "reply", "accuracy"),
    [
        ("mcq", "B", "(B) red", 1.0),
        ("mcq", "B. red", "b", 1.0),
        ("mcq", "B", "B or C", 0.0),
        ("mcq", "B", "C", 0.0),
        ("tvg", "[0, 10]", "The event happens in the 5 - 15 seconds.", 1 / 3),
        ("tvg", "0:00 - 0:10", "10 to 0", 0.0),
        ("tvg", "0, 10", "soon", 0.0),
        ("oe", "the red car", "a red truck", 0.5),
    ],
)
def test_accuracy_by_question_type(question_type, answer, reply, accuracy):
    reward = terms(ANSWER_TURN.replace(">B<", f">{reply}<"), answer=answer, question_type=question_type, oe_mode="f1")
    assert reward.accuracy == pytest.approx(accuracy)
    assert reward.total == pytest.approx(accuracy + 1.0)
    assert reward.prediction == reply


def test_a_copied_option_of_the_question_counts_as_its_letter():
    turn, question = ANSWER_TURN.replace(">B<", ">B. C<"), "Which letter?\nA. B\nB. C"
    assert reward_terms([turn], [], "B", "mcq", question=question).accuracy == 1
    assert reward_terms([turn], [], "B", "mcq").accuracy == 0


def test_without_a_judge_an_open_answer_has_all_words_and_no_others():
    turn = ANSWER_TURN.replace(">B<", ">the red truck<")
    assert terms(turn, answer="Red truck.", question_type="oe").accuracy == 1.0
    assert terms(turn, answer="red car", question_type="oe").accuracy == 0.0


def test_the_answer_is_the_last_answer_block():
    assert find_prediction([f"{THINK}<answer>A</answer><answer>B</answer>"]) == "B"
    assert find_prediction([f"{THINK}<answer>A<answer>B</answer>"]) == "B"
    assert find_prediction([ANSWER_TURN, THINK]) == "B"
    unanswered = ("B", "<answer>B", "</answer>B<answer>", "<answer><think>B</answer>")
    for text in ("", *(THINK + rest for rest in unanswered)):
        assert find_prediction([text]) is None
        assert terms(text).accuracy == 0.0


def test_an_answer_without_a_verdict_has_a_missing_score_not_zero():
    open_question = dict(question_type="oe", answer="red", oe_mode="llm")
    own = (OwnTerm("brief", 0.5),)
    missing = reward_terms([ANSWER_TURN], [], "red", "oe", RewardConfig(oe_mode="llm"), own=own)
    assert missing.missing and missing.own == own
    assert missing.accuracy is missing.tool is missing.total is missing.score is None
    assert missing.format == 1.0
    assert terms(ANSWER_TURN, judged=0.5, **open_question).total == pytest.approx(1.5)
    assert terms(ANSWER_TURN, judged=0.0, **open_question).total == pytest.approx(1.0)
    for without_answer in (THINK, ANSWER_TURN.replace(">B<", "><")):  # nothing to judge
        assert terms(without_answer, **open_question).accuracy == 0.0


def test_a_judged_score_needs_an_open_question_and_a_valid_value():
    with pytest.raises(ValueError, match="only open questions"):
        terms(ANSWER_TURN, judged=1.0)
    for judged in (math.nan, -0.5, 1.5):
        with pytest.raises(ValueError, match=f"judged={judged} must be between 0 and 1"):
            terms(ANSWER_TURN, answer="red", question_type="oe", oe_mode="llm", judged=judged)


@pytest.mark.parametrize(
    ("answer", "question_type", "complaint"),
    [
        ("B", "quiz", "question_type 'quiz' is unknown, expected mcq, tvg or oe"),
        ("red", "mcq", "'red' of an mcq question names no option"),
        ("A or B", "mcq", "names no option"),
        ("soon", "tvg", "'soon' of a tvg question is not an interval"),
        ("[10, 2]", "tvg", "not an interval"),
        ("[2, 2]", "tvg", "not an interval"),
        *((text, "oe", f"the ground truth {text!r} of an oe question has no word") for text in ("A", "The", "!!")),
    ],
)
def test_an_invalid_ground_truth_is_an_error(answer, question_type, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        terms("", answer=answer, question_type=question_type)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        check_ground_truth(answer, question_type)


def test_with_a_plugin_a_question_type_of_your_own_has_no_accuracy():
    config, terms = RewardConfig(plugin="a.py:f"), [OwnTerm("quiz", 0.5, (), 2.0)]
    own = reward_terms([ANSWER_TURN], [], "", "quiz", config, own=terms)
    assert own.accuracy is None and not own.missing
    assert (own.total, own.score) == (1.0 + 1.0, 1.0)  # R_fmt and the own term


def test_the_weight_of_accuracy_leaves_its_value():
    reward = terms(ANSWER_TURN, accuracy_weight=0.25)
    assert (reward.accuracy, reward.score, reward.total) == (1.0, 1.0, 0.25 + 1.0)


def test_invalid_outcomes_and_turns_are_errors():
    with pytest.raises(ValueError, match="unknown outcome 'done'"):
        terms(TOOL_TURN, outcomes=["done"])
    with pytest.raises(ValueError, match="turns is one string"):
        reward_terms(ANSWER_TURN, [], "B", "mcq")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"anchor_weight": -1.0}, r"^reward.anchor_weight=-1.0 must be a finite number"),
        ({"accuracy_weight": 0, "format_weight": 0, "tool": "none"}, r"leave no reward; set reward\.plugin, or one"),
        ({"plugin": "mine.py"}, r"^reward.plugin='mine.py' must be FILE.py:FUNCTION"),
        ({"plugin": "mine:reward"}, r"^reward.plugin='mine:reward' must be FILE.py:FUNCTION"),
    ],
)
def test_an_impossible_setting_is_an_error_with_its_key(setting, complaint):
    with pytest.raises(ValueError, match=complaint):
        RewardConfig(**setting)


def test_weights_and_arms():
    assert terms(ANSWER_TURN, format_weight=0.0).total == pytest.approx(1.0)
    assert terms("<think>\nlook", unclosed_penalty=0.0).total == 0.0
    assert terms("<think>\nlook", anchor_weight=1.0, format_weight=2.0).total == pytest.approx(-0.6)
    assert without_anchor(terms(ANSWER_TURN, anchor_weight=2.0)) == 1.0  # the anchor's part of the bound is all of it
    plain = terms(f"{THINK}<answer>B", anchor_weight=0.0)
    anchored = terms(f"{THINK}<answer>B")
    assert plain.total == without_anchor(anchored) == pytest.approx(0.5)
    assert anchored.total - 0.5 * anchored.anchor == pytest.approx(without_anchor(anchored))


def test_the_bound_of_format_does_not_penalize_the_anchor():
    """R − λ·R_anchor, taken after the bound of 1, would favour the shorter thinking: 0.85 against 0.65."""
    better, worse = terms(TOOL_TURN, ANSWER_TURN), terms(TOOL_TURN, ANSWER_TURN.replace("let me look", "hm"))
    assert better.total - 0.5 * better.anchor < worse.total - 0.5 * worse.anchor
    assert without_anchor(better) == without_anchor(worse) and better.anchor > worse.anchor


def test_a_well_formed_call_is_worth_a_well_formed_answer_with_and_without_the_anchor():
    answered, called = terms(ANSWER_TURN), terms(TOOL_TURN, ANSWER_TURN, tool="none")
    assert called.think_first > answered.think_first == 0
    assert answered.format == called.format == 1
    assert without_anchor(answered) == without_anchor(called) == pytest.approx(1 + 0.65)
    alone = terms(ANSWER_TURN, anchor_weight=0.0), terms(TOOL_TURN, ANSWER_TURN, anchor_weight=0.0, tool="none")
    assert [without_anchor(reward) for reward in alone] == [reward.total for reward in alone]


def test_credits_sum_to_their_terms_and_locate_their_characters():
    turns = [f"{TOOL_TURN}\n<tool_call>{CALL}</tool_call>", ANSWER_TURN]
    reward = reward_terms(turns, ["timeout", "ok"], "B", "mcq")
    for term in ("accuracy", "base", "anchor", "think_first", "balanced", "tool"):
        assert math.fsum(c.value for c in reward.credits if c.term == term) == pytest.approx(getattr(reward, term))
    earned = {c.name: (c.value, [turns[p.turn][slice(*p.span)] for p in c.places]) for c in reward.credits}
    assert earned == {
        "think": (0.2, [THINK, THINK]),
        "think_closing": (0.4, ["</think>", "</think>"]),
        "answer_opening": (0.3, ["<answer>"]),
        "answer_closing": (0.2, ["</answer>"]),
        "flow": (0.3, turns),
        "think_first": (0.3, [THINK]),
        "balanced": (0.1, [match[0] for turn in turns for match in TAG.finditer(turn)]),
        "accuracy": (1.0, ["B"]),
        "tool_executed": (0.3, [f"<tool_call>{CALL}</tool_call>"]),  # of the second call
        "tool_right": (0.5, [f"<tool_call>{CALL}</tool_call>"]),
    }
    (executed,) = (credit for credit in reward.credits if credit.name == "tool_executed")
    assert executed.places[0].start == turns[0].rindex("<tool_call>")
    (unclosed,) = (credit for credit in terms("<think>\nlook").credits if credit.name == "think_unclosed")
    assert (unclosed.value, unclosed.places) == (-0.3, (Place(0, 0, len("<think>")),))
    priced = reward_terms(turns, ["invalid", "ok"], "B", "mcq", NEEDED).credits
    assert [len(credit.places) for credit in priced if credit.name == "call_price"] == [2]  # of both calls


@pytest.mark.parametrize(
    ("turns", "closing", "flow", "unclosed"),
    [
        # text at the fault of each missing property; None: the property holds; "": the end of the turn
        ([ANSWER_TURN], None, None, None),
        ([TOOL_TURN, ANSWER_TURN], None, None, None),
        (["<think>\nlet me look<answer>B</answer>"], "<answer>", "<answer>", "<answer>"),
        (["<think>\nlet me look"], "", "", ""),
        (["<think>\n<think>let me look</think><answer>B</answer>"], *3 * ["<think>let"]),
        (["<think>hm</think><answer>B</answer>"], "</think>", None, None),  # too short
        ([THINK], None, "", None),  # neither a call nor an answer
        ([f"{THINK}so: <answer>B</answer>"], None, "so:", None),
        ([f"{THINK}<answer> </answer>"], None, "</answer>", None),  # empty
        ([f"{THINK}<answer>B"], None, "", None),
        ([TOOL_TURN], None, "<tool_call>", None),  # the last turn must answer
        ([f"so: {ANSWER_TURN}"], "so: ", "so: ", None),
        ([""], "", "", None),
    ],
)
def test_a_missing_property_has_the_position_of_its_fault(turns, closing, flow, unclosed):
    for anchor, expected in zip(terms(*turns).anchors, (closing, flow, unclosed), strict=True):
        assert anchor.met == (expected is None)
        if expected is not None:
            ((turn, start, end),) = anchor.places
            assert turns[turn][start:].startswith(expected) and end == start + bool(expected)
            assert expected or start == len(turns[turn])


@pytest.mark.parametrize("piece", ["<think>", "<think></think>", "<answer>", "<tool_call>", "</think>"])
def test_scoring_time_is_linear_in_the_number_of_tags(piece):
    started_s = time.process_time()
    reward_terms([piece * 8_000], [], "B", "mcq")
    assert time.process_time() - started_s < 1


def test_user_terms_are_added_to_r_with_their_weight():
    own = (OwnTerm("brief", 0.5, weight=0.2), OwnTerm("polite", -1, (Place(0, 1, 4),)))
    reward = reward_terms([ANSWER_TURN], [], "B", "mcq", own=own)
    assert reward.total == pytest.approx(2.0 + 0.1 - 1) and without_anchor(reward) == pytest.approx(1.65 + 0.1 - 1)
    added = [("brief", "brief", 0.1), ("polite", "polite", -1)]
    assert [(credit.name, credit.term, credit.value) for credit in reward.credits[-2:]] == added


@pytest.mark.parametrize("name", ["accuracy", "total", "tool_right", "", "Brief", "a b", "1st", "x-y"])
def test_a_reserved_or_invalid_user_term_name_is_an_error(name):
    with pytest.raises(ValueError, match=r"^invalid term name"):
        OwnTerm(name, 1.0)
    for value, weight in ((math.nan, 1.0), (10.0, 1e15)):
        with pytest.raises(ValueError, match=rf"^the term brief has value {value}"):
            OwnTerm("brief", value, weight=weight)


NAMES = ("think", "tool_call", "answer", "tool_response", "tool_code")
TAGS = [f"<{slash}{name}>" for name in NAMES for slash in ("", "/")]
words = st.sampled_from(["", " ", "let me look", "\n", "hm", "ok", "12 - 15", CALL, "{", "<think", "answer>", "red"])
texts = st.lists(words, max_size=3).map(" ".join)
pieces = st.sampled_from([*TAGS, *TAGS[:6], "B", CALL])
adversarial = st.lists(st.one_of(pieces, words, st.text(max_size=5)), max_size=16)
any_turn = adversarial.map("".join)
outcome_lists = st.lists(st.sampled_from(OUTCOMES), max_size=4)
ground_truths = st.sampled_from([("B", "mcq"), ("[12, 18]", "tvg"), ("let me look at the red car", "oe")])
thinking = texts.map(lambda text: f"<think>\n{text}</think>")
calls = st.lists(texts.map(lambda text: f"<tool_call>{text}</tool_call>"), min_size=1, max_size=3).map("\n".join)
tool_turns = st.builds("{}{}".format, thinking, calls)
answers = st.sampled_from(["B", "C", ""])  # no other part of these turns names an option
answer_turns = st.builds("{}<answer>{}</answer>".format, thinking, answers)
episodes = st.builds(lambda earlier, last: [*earlier, last], st.lists(tool_turns, max_size=2), answer_turns)
configs = st.builds(
    RewardConfig,
    tool=st.sampled_from(["published", "needed"]),
    format=st.sampled_from(["published", "strict", "no_suffix"]),
    unclosed_penalty=st.sampled_from([0.0, 0.3]),
    anchor_weight=st.sampled_from([0.0, 0.5, 1.0]),
)


def with_tags(text, tags):
    """Replaces the tags of a text; "" deletes a tag, and a repeated tag doubles it."""
    pieces = TAG.split(text)[:: TAG.groups + 1]
    return "".join(piece + tag for piece, tag in zip(pieces, [*tags, ""], strict=True))


def tags_of(text):
    return [match[0] for match in TAG.finditer(text)]


@st.composite
def edited(draw, turns, edits=("delete", "double", "reorder", "insert")):
    """Draws an episode, and a copy with tags of one turn deleted, doubled, reordered or inserted."""
    turns = draw(turns)
    turn = draw(st.integers(0, len(turns) - 1))
    text, tags = turns[turn], tags_of(turns[turn])
    edit = draw(st.sampled_from(edits))
    if edit == "insert":
        inside = {at for match in TAG.finditer(text) for at in range(match.start() + 1, match.end())}
        # A split tag would become text, which makes the thinking longer.
        at = draw(st.sampled_from([at for at in range(len(text) + 1) if at not in inside]))
        changed = text[:at] + draw(st.sampled_from(TAGS)) + text[at:]
    elif edit == "reorder":
        changed = with_tags(text, draw(st.permutations(tags)))
    else:
        chosen = draw(st.lists(st.booleans(), min_size=len(tags), max_size=len(tags)))
        times = 0 if edit == "delete" else 2
        changed = with_tags(text, [tag * times if pick else tag for tag, pick in zip(tags, chosen, strict=True)])
    return turns, [*turns[:turn], changed, *turns[turn + 1 :]]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(any_turn, max_size=3), outcome_lists, ground_truths, configs)
def test_no_text_raises_and_every_total_is_within_its_bounds(turns, outcomes, truth, config):
    reward = reward_terms(turns, outcomes, *truth, config)
    duty = 0.3 if config.format == "strict" else 0.0
    price = config.tool_pay.price * len(outcomes)
    low, high = -config.anchor_weight * config.unclosed_penalty - duty - price, 2.8
    assert low - SLACK <= reward.total <= high + SLACK
    assert low + price - SLACK <= reward.format <= 1.0
    assert without_anchor(reward) >= -duty - price - SLACK
    for credit in reward.credits:
        assert all(0 <= start <= end <= len(turns[turn]) for turn, start, end in credit.places)
    for anchor in reward.anchors:
        assert all(0 <= start <= end <= len(turns[turn]) for turn, start, end in anchor.places)
        assert anchor.met or not turns or anchor.places
    assert [turns[tag.place.turn][slice(*tag.place.span)] for tag in reward.tags] == [
        tag for turn in turns for tag in tags_of(turn) if "tool_res" not in tag and "tool_code" not in tag
    ]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(edited(episodes), outcome_lists, configs)
def test_changing_the_tags_of_a_valid_episode_never_raises_its_total(pair, outcomes, config):
    original, changed = (reward_terms(turns, outcomes, "B", "mcq", config) for turns in pair)
    assert original.parseable
    assert changed.total <= original.total + SLACK
    assert without_anchor(changed) <= without_anchor(original) + SLACK


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(edited(st.lists(any_turn, min_size=1, max_size=3), ["double"]), outcome_lists, configs)
def test_doubling_tags_of_any_text_never_raises_its_total(pair, outcomes, config):
    original, changed = (reward_terms(turns, outcomes, "B", "mcq", config) for turns in pair)
    assert changed.total <= original.total + SLACK


FULL_TURN = f"{TOOL_TURN}\n<tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize("turns", [[ANSWER_TURN], [TOOL_TURN, ANSWER_TURN], [FULL_TURN, TOOL_TURN, ANSWER_TURN]])
def test_deleting_doubling_or_swapping_a_tag_of_a_right_episode_lowers_its_total(turns):
    outcomes = ["ok"] * sum(turn.count("<tool_call>") for turn in turns)
    full = terms(*turns, outcomes=outcomes).total
    for number, text in enumerate(turns):
        tags = tags_of(text)
        changes = [[*tags[:i], tags[i] * times, *tags[i + 1 :]] for i in range(len(tags)) for times in (0, 2)]
        for i in range(len(tags)):
            for j in range(i):
                changes.append([tags[{i: j, j: i}.get(k, k)] for k in range(len(tags))])
        for changed in (with_tags(text, change) for change in changes if change != tags):
            assert terms(*turns[:number], changed, *turns[number + 1 :], outcomes=outcomes).total < full - 0.05, changed


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(any_turn, max_size=3), outcome_lists)
def test_the_tool_reward_of_executed_calls_does_not_depend_on_the_text(turns, outcomes):
    reward = reward_terms(turns, [*outcomes, "ok"], "C", "mcq")
    assert reward.tool == pytest.approx(0.3 + 0.5 * reward.accuracy)
    assert reward.total <= reward.accuracy + 1.0 + reward.tool + SLACK
