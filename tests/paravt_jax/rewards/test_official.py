"""The rules of the benchmarks' harnesses with their faults; some cases also have the strict parse."""

import pytest
from hypothesis import given, strategies as st

from paravt_jax.rewards.answers import option_letter
from paravt_jax.rewards.official import first_capital, first_capital_or_guess, mmvu, reply_of, window_iou

OPTIONS = ("Milk", "Tea", "Oil", "Ink")


@pytest.mark.parametrize(
    ("reply", "letter_found", "strictly"),
    [
        ("B", "B", "B"),
        ("(c) oil", None, "C"),  # no capital
        ("Because it is white, A", "B", None),
        ("Answer: D", "A", "D"),
        ("Best answer: D", "B", "D"),
        ("Either B or C", "B", None),
        ("I do not know", None, None),
    ],
)
def test_the_first_capital_letter_counts_even_inside_a_word(reply, letter_found, strictly):
    assert [letter for letter in "ABCD" if first_capital(reply, letter, OPTIONS)] == (
        [letter_found] if letter_found else []
    )
    assert option_letter(reply) == strictly


def test_without_a_letter_the_score_is_the_mean_of_a_guess():
    assert first_capital_or_guess("no", "A", OPTIONS) == 0.25
    assert first_capital_or_guess("B", "A", OPTIONS) == 0 and first_capital_or_guess("A", "A", OPTIONS) == 1
    assert first_capital_or_guess("Either B", "B", OPTIONS) == 0  # E, also where there are four options
    assert first_capital_or_guess("Here it is B", "B", OPTIONS) == 1  # H is no option


def test_the_harness_of_longvideobench_leaves_out_a_lead_in():
    assert first_capital_or_guess("Best option: (D)", "D", OPTIONS) == 1


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("It is b, or maybe c", "B", True),
        ("It is b, or maybe c", "C", True),
        ("Some warm tea", "B", True),  # the text of the option
        ("Bread", "B", False),
    ],
)
def test_mmvu_accepts_the_letter_anywhere_or_the_text_of_the_option(reply, answer, right):
    assert mmvu(reply, answer, OPTIONS) == right


def test_mmvu_accepts_a_word_of_the_option_beside_its_letter_inside_any_word():
    assert mmvu("c) a grey whale, but no shark", "B", ("Squid", "Blue whale")) == 1
    assert mmvu("c) a grey whale", "B", ("Squid", "Blue whale")) == 0
    assert mmvu("c) it is a boat", "B", ("Squid", "It is a whale")) == 0  # words of two letters do not count


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("The algorithm is Depth-First Search.", "depth-first search", True),
        ("search", "depth-first search", True),  # part of the answer
        ("5.004 metres", "5", True),
        ("6", "5.5 m", False),
        ("5.52 metres", "5.5 m", False),
        ("an enzyme called lactase, active", "active lactase enzyme", True),
        ("lactase", "gastric acid", False),
        ("a car, bright red", "the car is red", False),
        ("car, red", "a red car", True),  # words of up to two letters are optional
        ("six five four three two one", "one two three four five six", False),  # only up to five words
        ("n² steps", "n^2 Steps", True),
        ("order o(n^2) time", "a time of O(n²)", True),
        ("order O(n)", "a time of O(n²)", False),
        ("-lactase- and #active#", "active lactase", True),
        ("", "anything", False),
    ],
)
def test_open_answers_of_mmvu_match_by_parts_numbers_and_words(reply, answer, right):
    assert mmvu(reply, answer, ()) == right


@pytest.mark.parametrize(
    ("reply", "iou"),
    [
        ("The event happens in the 20 - 30 seconds", 1.0),
        ("30 to 20", 1.0),  # swapped
        ("[20.0, 25.0]", 0.5),
        ("from second 20 on", 0.0),
    ],
)
def test_a_window_is_two_numbers_in_any_order(reply, iou):
    assert window_iou(reply, "[20.0, 30.0]", ()) == pytest.approx(iou)


def test_a_reply_is_the_last_answer_or_the_text_after_the_thinking():
    assert reply_of(["<think>A</think><tool_call>x</tool_call>", "<think>B</think><answer> C </answer>"]) == "C"
    assert reply_of(["<think>B</think> Tea"]) == "Tea" and reply_of(["D"]) == "D" and reply_of([]) == ""
    assert reply_of(["<answer>A</answer> or <answer>B"]) == "B"


@given(st.text(max_size=50), st.sampled_from("ABCD"))
def test_any_reply_scores_from_0_to_1(reply, answer):
    for rule in (first_capital, first_capital_or_guess, mmvu):
        assert 0 <= rule(reply, answer, OPTIONS) <= 1
    assert 0 <= mmvu(reply, "some words", ()) <= 1 and 0 <= window_iou(reply, "[1.0, 2.5]", ()) <= 1
