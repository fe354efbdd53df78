"""Rules of evaluation: right answers, and their share."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FINAL_NUMBER = re.compile(r"####[ \t]*(-?\$?-?[0-9.,]*[0-9][0-9.,]*)")
_LABEL = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def accuracy(correct: int, total: int) -> dict[str, float]:
    """Returns the share of right answers, and its standard error as a mean over questions.

    The share is NaN without answers, and the error for fewer than two.
    """
    share = correct / total if total else math.nan
    error = math.sqrt(share * (1 - share) / (total - 1)) if total > 1 else math.nan
    return {"accuracy": share, "standard_error": error, "correct": correct, "questions": total}


def gsm8k_answer(text: str) -> str | None:
    """Returns the number after the first `####`, or None if there is none.

    Commas, `$` and trailing periods are removed. Numbers are compared as text: by GSM8K's rule
    (Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021) 18.0 is not 18.
    """
    match = _FINAL_NUMBER.search(text)
    if match is None:
        return None
    return match[1].replace(",", "").replace("$", "").rstrip(".")


def gsm8k_gold(answer: str) -> str:
    """Returns the number at the end of a solution, or the number that is the whole solution.

    Raises:
      ValueError: there is no number.
    """
    number = gsm8k_answer(answer if "####" in answer else f"#### {answer.strip()}")
    if number is None:
        raise ValueError(f"the answer {answer[-60:]!r} has no number after ####.")
    return number


def choice_letter(text: str, letters: str = "ABCDE") -> str | None:
    """Returns the letter that an answer chooses, or None.

    This is the first letter after `answer is` or `answer:`, in any case. Without one it is the
    first capital that stands alone: not next to a letter, digit or apostrophe, nor before a hyphen
    and a letter. An `A` before a lower-case word other than `is` is an article and not a choice.

    Args:
      text: the answer.
      letters: the letters to choose from.
    """
    alone = rf"(?<![\w'’-])([{letters}])(?![\w'’]|-\w)"
    choice = re.compile(rf"(?!A\s+(?!is\b)[a-z]){alone}")
    said = re.compile(
        rf"(?i:answer(?:\s+is)?\s*:?\s*(?:option\s+|choice\s+)?)[(\[*]*{choice.pattern}"
    )
    match = said.search(text) or choice.search(text)
    return None if match is None else match[1]


def most_likely(log_likelihoods: Sequence[float], lengths: Sequence[int]) -> int:
    """Returns the number of the likeliest option; the first of equal ones.

    Args:
      log_likelihoods: of the options, in nats.
      lengths: divisors of the log-likelihoods, so that long options are not at a disadvantage.

    Raises:
      ValueError: no options, another number of lengths than of options, or a length below 1.
    """
    if not log_likelihoods:
        raise ValueError("`log_likelihoods` is empty: give at least one option.")
    if len(lengths) != len(log_likelihoods) or min(lengths) < 1:
        raise ValueError(
            f"`lengths` must be {len(log_likelihoods)} numbers of at least 1, one per option, got"
            f" {list(lengths)}."
        )
    scores = [x / length for x, length in zip(log_likelihoods, lengths, strict=True)]
    return max(range(len(scores)), key=scores.__getitem__)


# ----- questions with options


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """The options of a question.

    Attributes:
      texts: without labels.
      gold: number of the right option.
    """

    texts: tuple[str, ...]
    gold: int

    @property
    def letters(self) -> str:
        """The letters of the options."""
        return LETTERS[: len(self.texts)]

    @property
    def listed(self) -> str:
        """The options with their letters, one per line."""
        pairs = zip(self.letters, self.texts, strict=True)
        return "\n".join(f"{letter}) {text}" for letter, text in pairs)

    def named(self, index: int) -> dict[str, str]:
        """Returns the texts for templates: all options, and one of them."""
        one = {"option": self.texts[index], "letter": self.letters[index]}
        return {"options": self.listed, **one}


def read_options(options: Any, correct: Any) -> AnswerOptions:
    """Returns the options of a question.

    Args:
      options: a list of texts, whose labels, such as `A)`, are removed if all are in order; or, as
        in ARC, a dict with lists `text` and `label`.
      correct: the right option's label, letter, number from 0, or text; the first that fits.

    Raises:
      ValueError: no options, or `correct` is none of them.
    """
    labels: list[str] = []
    if isinstance(options, Mapping):
        labels = [str(label) for label in options.get("label", ())]
        options = options.get("text")
    if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"expected a list of 2 to {len(LETTERS)} options, got {options!r}.")
    texts = [str(option).strip() for option in options]
    matches = [_LABEL.match(str(option)) for option in options]
    if all(m is not None and m[1] == x for m, x in zip(matches, LETTERS, strict=False)):
        texts = [_LABEL.sub("", str(option), count=1).strip() for option in options]
    names = [labels, list(LETTERS[: len(texts)]), list(map(str, range(len(texts)))), texts]
    for known in names:
        if str(correct).strip() in known:
            return AnswerOptions(tuple(texts), known.index(str(correct).strip()))
    raise ValueError(f"the right option is {correct!r}, but the options are: {', '.join(texts)}.")
