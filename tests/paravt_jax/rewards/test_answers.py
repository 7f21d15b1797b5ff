"""Answers are parsed strictly: a clear form counts, an ordinary word never does."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from paravt_jax.rewards.answers import exact_match, interval, interval_iou, normalised, option_letter, token_f1

CASES = Path(__file__).with_name("answer_cases.txt")  # a new case is a new line


def cases(kind: str) -> list[tuple[str, str]]:
    """The expected parse and the text of each row."""
    lines = [line for line in CASES.read_text().splitlines() if not line.startswith("#")]
    rows = [line.split(" | ", 2) for line in lines]
    return [(expected, text.replace("\\n", "\n").replace("\\\\", "\\")) for of, expected, text in rows if of == kind]


@pytest.mark.parametrize(("expected", "text"), cases("mcq"))
def test_an_option_letter_is_parsed_only_if_the_text_commits_to_it(expected, text):
    assert (option_letter(text) or "-") == expected


@pytest.mark.parametrize(("expected", "text"), cases("tvg"))
def test_an_interval_is_parsed_from_every_clear_form_only(expected, text):
    seconds = interval(text)
    assert ("-" if seconds is None else "{:g} {:g}".format(*seconds)) == expected


def test_an_interval_is_finite():
    assert interval(f"0 to {'9' * 400}") is None


@pytest.mark.parametrize(("expected", "text"), cases("oe"))
def test_open_answers_match_in_every_spelling(expected, text):
    prediction, truth = text.split(" == ")
    assert exact_match(prediction, truth) == token_f1(prediction, truth) == float(expected)


def test_a_copied_option_counts_as_its_letter():
    question = "Which letter?\nA. A\nB. C\nC. I\nD. the dog, not the cat"
    for copied, letter in {"A. A": "A", "B. C": "B", "C. I": "C", " D. the dog,  not the cat\n": "D"}.items():
        assert option_letter(copied, question) == letter
    assert option_letter("B. C") is None and option_letter("B. D", question) is None
    assert option_letter("B. C", "Which letter?\nA. D\nB. C ") == "B"


@pytest.mark.parametrize("letter", "ABCDEFGHIJ")
def test_options_a_to_j_are_parsed_in_every_form(letter):
    for form in ("{}", "({})", "{}.", "option {}", "the answer is {}", "{}. red"):
        assert option_letter(form.format(letter)) == letter


@pytest.mark.parametrize(
    ("predicted", "true", "iou"),
    [
        ((0, 10), (5, 15), 1 / 3),  # 5 of 15 seconds
        ((0, 10), (0, 10), 1.0),
        ((2, 4), (0, 10), 0.2),
        ((0, 5), (5, 10), 0.0),  # they touch
        ((0, 1), (5, 10), 0.0),
        ((10, 0), (0, 10), 0.0),
        ((5, 5), (0, 10), 0.0),
        ((5, 5), (5, 5), 0.0),
    ],
)
def test_iou_by_hand(predicted, true, iou):
    assert interval_iou(predicted, true) == pytest.approx(iou)


@pytest.mark.parametrize(
    ("prediction", "truth", "f1"),
    [
        ("A red car.", "the red car", 1.0),
        ("red car", "blue car", 0.5),
        ("red red car", "red car", 0.8),  # 2 shared of 3 and 2: 4 / 5
        ("red", "blue", 0.0),
        ("the", "a", 0.0),  # both are empty once normalised
        ("", "", 0.0),
        ("", "red", 0.0),
    ],
)
def test_token_f1_by_hand(prediction, truth, f1):
    assert token_f1(prediction, truth) == pytest.approx(f1)


def test_exact_match_ignores_case_articles_and_punctuation_and_never_matches_nothing():
    assert normalised("The  Cat's, an Apple!") == "cats apple"
    assert exact_match("The red car.", "red  CAR") == 1.0
    assert exact_match("red cars", "red car") == 0.0
    assert exact_match("the", "a") == 0.0


WORDS = [*"AB,.3-[ \n", "(B)", "the answer is", "option", "not", "or", "5.", "1:05", "to"]


@settings(max_examples=50)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=20).map("".join))
def test_any_text_can_be_parsed_without_an_error(text):
    letter, seconds = option_letter(text), interval(text)
    assert letter is None or letter in "ABCDEFGHIJ"
    assert seconds is None or 0.0 <= interval_iou(seconds, (0.0, 10.0)) <= 1.0
    assert 0.0 <= token_f1(text, "red car") <= 1.0


@pytest.mark.parametrize(
    "piece",
    [
        *(" ", ".", ":", "9", "answer ", "is ", "answer is", "(", "( ", "A,", "B. ", "and "),
        *("\n ", "- ", "-", "✅", "=>"),
        *("option ", "it is ", "correct letter ", "letter\n", "since (A) ", "since (A) is ", "or C. ", "could be "),
        *("id go with ", "A | ", "1m", "1m1", "1m 10s ", "in the video of ", "in the 9", "ends at ", "t = ", "second "),
    ],
)
def test_parsing_time_is_linear_in_the_length(piece):
    text = piece * 5_000
    started_s = time.process_time()
    option_letter(text), interval(text), token_f1(text, text)
    assert time.process_time() - started_s < 0.5
