"""What an answer commits to is read strictly: a clear form earns, an ordinary word never does."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paravt_jax.rewards.answers import exact_match, interval, interval_iou, normalised, option_letter, token_f1


@pytest.mark.parametrize(
    "text",
    [
        *(
            "B",
            "b",
            "B.",
            "b)",
            "B!",
            "(B)",
            "( b )",
            "[B]",
            "**B**",
            "'B'",
            "\\boxed{B}",
            "$\\text{B}$",
            "（B）",
            "Ｂ",
        ),
        *("B. red", "b) red", "B: red", "B.red", "(B) a man", "B. vitamin C", "B. A man", "B\nbecause it is red"),
        *("option B", "Option b", "I choose B", "the correct option is B", "The answer is B because it is red."),
        *("the answer is B", "The answer is: (B) red", "Answer: B", "Final answer: **B**", "THE ANSWER IS B."),
        *("Answer: B\nB. red", "The answer is B. A man walks.", "I think the answer is (B)"),
    ],
)
def test_a_clear_form_commits_to_its_option(text):
    assert option_letter(text) == "B"


@pytest.mark.parametrize(
    "text", ["A", "a", "(a)", "A.", "A. man", "The answer is A.", "the answer is a", "option A is right", "Answer: A\n"]
)
def test_a_is_an_option_where_no_noun_follows(text):
    assert option_letter(text) == "A"


@pytest.mark.parametrize(
    "text",
    [
        *("A man", "a man", "I think", "I think so", "The answer is a man", "THE ANSWER IS A MAN", "A's", "I'm sure"),
        *("the answer is I think", "choose a man", "e.g. the man", "i.e. the man", "A.M. it was", "a.m. was it"),
        *("vitamin C", "Plan B", "the answer is D.C. area", "option B-roll", "f(b)", "B red", "AB", "Ambulance"),
    ],
)
def test_no_letter_is_taken_from_ordinary_words(text):
    assert option_letter(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("B and C", "A or B", "(A) or (B)", "A, B", "A/B", "A B", "B, not C", "B. C", "A. B. C.", "B\nC"),
        *("the answer is B or C", "the answer is B, not C", "The answer is A or (B)", "Answer: b, maybe c"),
        *("Option B and option C", "(A), rather than (C)", "pick a or b", "B. red\nC. blue", "Answer: B & C"),
    ],
)
def test_naming_two_options_commits_to_none(text):
    assert option_letter(text) is None


@pytest.mark.parametrize("text", ["", " ", ".", "()", "K", "(K)", "7", "not option B", "The answer is not B", "answer"])
def test_no_option_is_none(text):
    assert option_letter(text) is None


@pytest.mark.parametrize("letter", "ABCDEFGHIJ")
def test_every_option_up_to_j_is_read_in_every_form(letter):
    for form in ("{}", "({})", "{}.", "option {}", "the answer is {}", "{}. red"):
        assert option_letter(form.format(letter)) == letter


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *((text, (3.0, 5.0)) for text in ("[3, 5]", "(3, 5)", "3, 5", "3 - 5", "3-5", "3–5", "3 to 5", "[ 3.0 ,5 ]")),
        *(
            (text, (3.0, 5.0))
            for text in ("from 3 to 5.", "between 3s and 5s", "3 seconds to 5 seconds", "[\n3,\n5\n]")
        ),
        ("The event happens in the 3.5 - 20.25 seconds.", (3.5, 20.25)),
        ("The event happens in the 3 - 20.", (3.0, 20.0)),
        ("1:05 - 02:10", (65.0, 130.0)),
        ("from 00:01:05 to 01:00:00.5", (65.0, 3600.5)),
        ("5 - 3", (5.0, 3.0)),  # read, and worth nothing
    ],
)
def test_every_form_of_an_interval_is_read(text, seconds):
    assert interval(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", ":", "3", "soon", "3 5", "3 - 5 - 7", "3 - 5 and 8 - 9", "-5 - 10", "3 - -5", "3--5", "x3 - 5"),
        *("nan - 5", "inf, 5", "1e3 - 2e3", "1,000 - 2,000", "1.2.3 - 4", "1:75 - 2:00", "3:4:5:6 - 7", "٣ - ٥"),
        *("3 to 5 minutes", "3 - 5%", "3 - 5m", "9" * 400 + " - 5"),
    ],
)
def test_malformed_or_several_intervals_are_none(text):
    assert interval(text) is None


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


WORDS = [
    "A",
    "B",
    "(B)",
    "the answer is",
    "option",
    "not",
    "or",
    ",",
    ".",
    "3",
    "5.",
    "1:05",
    "-",
    "to",
    " ",
    "\n",
    "[",
]


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=20).map("".join))
def test_no_text_raises(text):
    letter, seconds = option_letter(text), interval(text)
    assert letter is None or letter in "ABCDEFGHIJ"
    assert seconds is None or 0.0 <= interval_iou(seconds, (0.0, 10.0)) <= 1.0
    assert 0.0 <= token_f1(text, "red car") <= 1.0


@pytest.mark.parametrize(
    "piece", [" ", ".", ":", "9", "answer ", "is ", "answer is", "(", "( ", "A,", "B. ", "and ", "\n "]
)
def test_a_long_answer_takes_no_long_time(piece):
    text = piece * 20_000
    started_s = time.process_time()
    option_letter(text), interval(text), token_f1(text, text)
    assert time.process_time() - started_s < 2.0
