"""What counts as a right answer, and what a text costs: rules without a model."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from train.metrics import perplexity

_FINAL_NUMBER = re.compile(r"####[ \t]*(-?\$?-?[0-9.,]*[0-9][0-9.,]*)")
_LABEL = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How many answers are right.

    Attributes:
      correct: answers that are.
      total: all answers.
    """

    correct: int
    total: int

    @property
    def value(self) -> float:
        """Share of right answers; NaN of none."""
        return self.correct / self.total if self.total else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the share as a mean over questions; NaN of fewer than two."""
        if self.total < 2:
            return math.nan
        return math.sqrt(self.value * (1 - self.value) / (self.total - 1))


@dataclasses.dataclass(frozen=True)
class TextCost:
    """What it costs to predict a text. Costs of several texts add up.

    Attributes:
      nats: sum over tokens of the cross-entropy.
      tokens: how many were predicted.
      num_bytes: UTF-8 bytes of their text.
    """

    nats: float = 0.0
    tokens: int = 0
    num_bytes: int = 0

    def __add__(self, other: "TextCost") -> "TextCost":
        return TextCost(
            self.nats + other.nats, self.tokens + other.tokens, self.num_bytes + other.num_bytes
        )

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy; NaN of no tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Its exponential."""
        return perplexity(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """What does not depend on the tokenizer; NaN of no bytes."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else math.nan


def exact_match(predictions: Sequence[Any], golds: Sequence[Any]) -> Accuracy:
    """Returns how many predictions are what they should be. None is never right.

    Raises:
      ValueError: there are more of one than of the other.
    """
    if len(predictions) != len(golds):
        raise ValueError(
            f"`predictions` are {len(predictions)} for {len(golds)} `golds`: give one each."
        )
    pairs = zip(predictions, golds, strict=True)
    return Accuracy(sum(p is not None and p == gold for p, gold in pairs), len(golds))


def gsm8k_answer(text: str) -> str | None:
    """Returns the number after the first `####`, or None if there is none.

    Without commas, `$` and trailing periods, and compared as text: GSM8K's own rule (Cobbe et al.,
    "Training Verifiers to Solve Math Word Problems", 2021), by which 18.0 is not 18.
    """
    found = _FINAL_NUMBER.search(text)
    if found is None:
        return None
    return found[1].replace(",", "").replace("$", "").rstrip(".")


def gsm8k_gold(answer: str) -> str:
    """Returns the number that a solution ends in, or that is all of it.

    Raises:
      ValueError: there is none.
    """
    number = gsm8k_answer(answer if "####" in answer else f"#### {answer.strip()}")
    if number is None:
        raise ValueError(f"the answer {answer[-60:]!r} has no number after ####.")
    return number


def choice_letter(text: str, letters: str = "ABCDE") -> str | None:
    """Returns the letter that an answer chooses, or None.

    The first that follows `answer is` or `answer:`, in capitals or not, if one does; else the first
    that stands alone: a capital beside which there is no letter, digit, apostrophe, nor a hyphen
    and then a letter. An `A` that a word in small letters follows, other than `is`, is an article
    and no choice.

    Args:
      text: the answer.
      letters: which there are.
    """
    alone = rf"(?<![\w'’-])([{letters}])(?![\w'’]|-\w)"
    choice = re.compile(rf"(?!A\s+(?!is\b)[a-z]){alone}")
    said = re.compile(
        rf"(?i:answer(?:\s+is)?\s*:?\s*(?:option\s+|choice\s+)?)[(\[*]*{choice.pattern}"
    )
    found = said.search(text) or choice.search(text)
    return None if found is None else found[1]


def most_likely(log_likelihoods: Sequence[float], lengths: Sequence[int] | None = None) -> int:
    """Returns the number of the likeliest option, the first of equals.

    Args:
      log_likelihoods: of the options, in nats.
      lengths: what each is divided by, so that long options are not worse for their length; None
        for no such thing.

    Raises:
      ValueError: no options, as many lengths as there are not options, or a length below 1.
    """
    if not log_likelihoods:
        raise ValueError("`log_likelihoods` is empty: there must be at least one option.")
    lengths = [1] * len(log_likelihoods) if lengths is None else lengths
    if len(lengths) != len(log_likelihoods) or min(lengths) < 1:
        raise ValueError(
            f"`lengths` must be {len(log_likelihoods)} numbers of at least 1, one for each option,"
            f" got {list(lengths)}."
        )
    scores = [x / length for x, length in zip(log_likelihoods, lengths, strict=True)]
    return max(range(len(scores)), key=scores.__getitem__)


# ----- questions with options


@dataclasses.dataclass(frozen=True)
class Options:
    """What one can choose from.

    Attributes:
      texts: without labels.
      gold: number of the right one.
    """

    texts: tuple[str, ...]
    gold: int

    @property
    def letters(self) -> str:
        """A letter for each."""
        return LETTERS[: len(self.texts)]

    @property
    def listed(self) -> str:
        """One a line, each behind its letter."""
        pairs = zip(self.letters, self.texts, strict=True)
        return "\n".join(f"{letter}) {text}" for letter, text in pairs)

    def named(self, index: int) -> dict[str, str]:
        """Returns one of them by the names that templates know."""
        return {"option": self.texts[index], "letter": self.letters[index]}


def read_options(given: Any, correct: Any) -> Options:
    """Returns the options of a question.

    Args:
      given: a list of texts, whose labels, such as `A)`, are taken off if all have the right one;
        or, as in ARC, a dict of lists, `text` and `label`.
      correct: the label of the right one, its letter, its number from 0, or its text: the first of
        these that fits.

    Raises:
      ValueError: no options, or none that `correct` says.
    """
    labels: list[str] = []
    if isinstance(given, Mapping):
        labels = [str(label) for label in given.get("label", ())]
        given = given.get("text")
    if not isinstance(given, list) or not 2 <= len(given) <= len(LETTERS):
        raise ValueError(f"2 to {len(LETTERS)} options in a list are needed, got {given!r}.")
    texts = _without_labels([str(option) for option in given])
    names = [labels, list(LETTERS[: len(texts)]), list(map(str, range(len(texts)))), texts]
    for known in names:
        if str(correct).strip() in known:
            return Options(tuple(texts), known.index(str(correct).strip()))
    raise ValueError(f"the right option is {correct!r}, but there are: {', '.join(texts)}.")


def _without_labels(options: list[str]) -> list[str]:
    found = [_LABEL.match(option) for option in options]
    if any(m is None or m[1] != letter for m, letter in zip(found, LETTERS, strict=False)):
        return [option.strip() for option in options]
    return [_LABEL.sub("", option, count=1).strip() for option in options]
