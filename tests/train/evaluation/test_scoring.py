"""Rules of evaluation, case by case."""

import math

import pytest

from train.evaluation.scoring import AnswerOptions as Options
from train.evaluation.scoring import (
    accuracy,
    choice_letter,
    gsm8k_answer,
    gsm8k_gold,
    most_likely,
    read_options,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("48/2 = 24, so 48+24 = <<48+24=72>>72.\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### $1,234.", "1234"),
        ("#### -5", "-5"),
        ("#### -$5.50", "-5.50"),
        ("#### $-5", "-5"),
        ("#### 18.0", "18.0"),
        ("#### .5", ".5"),
        ("####3", "3"),
        ("#### 12 apples, not 13", "12"),
        ("#### 50%", "50"),
        ("#### 5-3", "5"),
        # The model continues with another question.
        ("#### 7\n\nQuestion: more?\nAnswer: #### 9", "7"),
        ("#### twelve\n#### 12", "12"),
        ("The answer is 72.", None),
        ("#### seventy-two", None),
        ("#### ...", None),
        ("####\n5", None),
        ("### 5", None),
        ("", None),
    ],
)
def test_the_number_after_the_hashes_is_the_answer(text, number):
    assert gsm8k_answer(text) == number


def test_a_gold_answer_is_a_solution_or_a_number_alone():
    assert gsm8k_gold("Twice 1,000 is 2,000.\n#### 2,000") == "2000"
    assert gsm8k_gold(" 18 ") == "18"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (C) 12", "C"),
        ("D) 12", "D"),
        ("**E**", "E"),
        ("B.", "B"),
        ("A", "A"),
        ("A is right", "A"),
        ("A train goes 5 km, so it is C", "C"),
        ("A or B", "B"),
        ("It is B, not C.", "B"),
        ("Take B first. The answer is D.", "D"),
        ("B, C and D are wrong.\nANSWER:E", "E"),
        ("Answer: (A) 5", "A"),
        ("the answer is: option B", "B"),
        ("The correct answer is a train, C", "C"),
        ("Because of DNA", None),
        ("Dan's E-mail to D'Artagnan about B2", None),
        ("F", None),
        ("b", None),
        ("", None),
    ],
)
def test_the_first_letter_that_stands_alone_is_the_choice(text, letter):
    assert choice_letter(text) == letter


def test_only_the_letters_of_the_options_are_choices():
    assert choice_letter("E or C", "ABC") == "C"
    assert choice_letter("F", "ABCDEF") == "F"


@pytest.mark.parametrize(
    ("values", "lengths", "index"),
    [
        ([-3.0, -2.0, -5.0], [1, 1, 1], 1),
        ([-3.0, -2.0, -5.0], [2, 1, 5], 2),
        ([-2.0, -2.0], [1, 1], 0),
        ([-1.0], [7], 0),
    ],
)
def test_the_likeliest_option_is_chosen(values, lengths, index):
    assert most_likely(values, lengths) == index


LENGTHS = "`lengths` must be 2 numbers of at least 1"
OPTIONS = "expected a list of 2 to 26 options"


def test_malformed_answers_and_options_are_refused():
    for function, arguments, message in (
        *((gsm8k_gold, (answer,), "has no number after ####")
          for answer in ("eighteen", "", "There are 5.\n#### five")),
        (most_likely, ([], []), "`log_likelihoods` is empty"),
        *((most_likely, ([-1.0, -2.0], lengths), LENGTHS) for lengths in ([1], [1, 0])),
        (read_options, (["x", "y"], "D"), "the right option is 'D', but the options are: x, y"),
        *((read_options, (options, "A"), OPTIONS)
          for options in ("x, y", ["x"], [], {"label": ["1"]}, None, ["x"] * 27)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def test_the_standard_error_is_that_of_a_mean():
    found = accuracy(2, 4)
    assert (found["accuracy"], found["correct"], found["questions"]) == (0.5, 2, 4)
    # The deviation of 1, 0, 1, 0 from their mean: sqrt(4 / 4 / 3), over the square root of four.
    assert found["standard_error"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert math.isnan(accuracy(0, 0)["accuracy"])
    assert math.isnan(accuracy(1, 1)["standard_error"])


@pytest.mark.parametrize(
    ("given", "correct", "options"),
    [
        (["A)10", "B) 20", "C)  x + y"], "B", Options(("10", "20", "x + y"), 1)),
        (["(A) 10", "(B) 20"], "A", Options(("10", "20"), 0)),
        (["A. yes", "B: no"], "B", Options(("yes", "no"), 1)),
        # No labels: the second has the wrong letter.
        (["A) 10", "C) 20"], "A", Options(("A) 10", "C) 20"), 0)),
        (["A cat", "B flat"], "B", Options(("A cat", "B flat"), 1)),
        (["red", "blue", "green"], 2, Options(("red", "blue", "green"), 2)),
        (["red", "blue"], "1", Options(("red", "blue"), 1)),
        (["red", "blue"], "blue", Options(("red", "blue"), 1)),
        ([3, 4], 4, Options(("3", "4"), 1)),
        ({"text": ["x", "y"], "label": ["1", "2"]}, "2", Options(("x", "y"), 1)),
        ({"text": ["x", "y"], "label": ["A", "B"]}, "A", Options(("x", "y"), 0)),
    ],
)
def test_options_are_read_in_every_form(given, correct, options):
    assert read_options(given, correct) == options


def test_options_are_listed_with_their_letters():
    options = read_options(["A)10", "B)20"], "A")
    assert options.listed == "A) 10\nB) 20"
    assert options.named(1) == {"options": options.listed, "option": "20", "letter": "B"}
