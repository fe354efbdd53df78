"""Questions with known answers: records become prompts, and answers are read and judged.

`read_questions` makes the questions. Numbers are read by GSM8K's rule; an option is chosen by its
letter, or by its likelihood. `train.evaluate` gets the answers from a model.
"""

import dataclasses
import pathlib
from typing import Any, Literal, Protocol

from train.evaluation.scoring import (
    AnswerOptions,
    choice_letter,
    gsm8k_answer,
    gsm8k_gold,
    read_options,
)
from train.settings.options import check_at_least
from train.text.records import FieldTemplate, Record, field_of, read_records
from train.text.special_tokens import unmarked


class Asker(Protocol):
    """Turns prompts into ids, including those that begin a text."""

    def mark(self, content: Any) -> Any:
        """Marks the names of special tokens in content."""
        ...

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt."""
        ...

    def continued(self, prompt: str, ending: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a prompt and of the ending after it."""
        ...


_PROMPTS = {
    "gsm8k": "Question: {question}\nAnswer:",
    "letter": "Question: {question}\nOptions:\n{options}\nAnswer:",
    "likelihood": "Question: {question}\nAnswer:",
}
_ANSWER_FIELDS = {"gsm8k": "answer", "choice": "correct"}


@dataclasses.dataclass(frozen=True)
class QuestionConfig:
    """Questions with known answers, and how they are asked.

    Raises:
      ValueError: settings that contradict each other.
    """

    task: Literal["gsm8k", "choice"] | None = None
    """Questions to answer: gsm8k (a number after ####), or choice (one of several options)."""
    questions: pathlib.Path | None = None
    """File of questions: a .jsonl file with one JSON object per line, or a .json file with an array
    of objects."""
    question_field: str = "question"
    """Field of the question."""
    answer_field: str | None = None
    """Field of the right answer. For choice: a letter, a label, a number from 0 or the text of the
    option. Default: `answer` for gsm8k, `correct` for choice."""
    options_field: str = "options"
    """Field of the options: a list, or a dict with `text` and `label`."""
    prompt_template: str | None = None
    r"""The prompt: a Python format string over the fields of the record, as for train.finetune.
    {question} and {answer} are the fields named above, {options} all options, one per line and with
    letters, and \n is a new line. Default: "Question: {question}\nAnswer:", with the options
    between the two for `--choose letter`."""
    shots: int = 0
    """Number of examples with answers before each question."""
    examples: pathlib.Path | None = None
    """File of the examples for `--shots`. Default: the first questions, which are not asked."""
    limit: int | None = None
    """Largest number of questions to ask. Default: all."""
    choose: Literal["letter", "likelihood"] = "letter"
    """How choice reads an answer: the first letter that the model writes, or the likeliest
    option."""
    option_template: str = " {option}"
    """For `--choose likelihood`: the text after the prompt whose likelihood is measured, made of
    {option} or its {letter}."""
    normalize: Literal["none", "tokens", "bytes"] = "none"
    """For `--choose likelihood`: divisor of the log-likelihoods, so that long options are not at a
    disadvantage."""
    out: pathlib.Path | None = None
    """File for the answers, one JSON object per line."""

    def __post_init__(self) -> None:
        check_at_least(1, limit=self.limit)
        check_at_least(0, shots=self.shots)
        if (self.task is None) != (self.questions is None):
            raise ValueError("`--task` and `--questions` need each other: give both.")
        if self.out is not None and self.task is None:
            raise ValueError("`--out` has no effect without `--task`: give both.")

    @property
    def by_likelihood(self) -> bool:
        """Whether options are compared by likelihood instead of a written answer."""
        return self.task == "choice" and self.choose == "likelihood"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, ready to be asked.

    Attributes:
      where: place of its record, for messages.
      number: number of the record, from 0.
      text: the question alone.
      prompt: ids of the whole prompt; empty with options.
      gold: the right number, or the right letter.
      letters: letters of the options; empty without options.
      options: for each option, the ids of the prompt, and of the option after it, whose likelihood
        is measured. A token that holds letters of both belongs to the option.
      num_bytes: UTF-8 bytes of the text of each option.
    """

    where: str
    number: int
    text: str
    prompt: list[int]
    gold: str
    letters: str = ""
    options: tuple[tuple[list[int], list[int]], ...] = ()
    num_bytes: tuple[int, ...] = ()

    def read_answer(self, text: str) -> str | None:
        """Returns the number or letter of an answer, or None."""
        return choice_letter(text, self.letters) if self.letters else gsm8k_answer(text)


def read_questions(config: QuestionConfig, asker: Asker) -> list[Question]:
    """Returns the questions, with the examples in their prompts.

    Args:
      config: what to ask, and how, with a task.
      asker: from prompts to ids.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: a record or a template is malformed, or there are too few records.
    """
    assert config.questions is not None
    reader = _Reader(config, asker)
    records = read_records(config.questions, "--questions")
    asked = list(enumerate(records))
    if config.examples is None:
        examples, asked = records[: config.shots], asked[config.shots :]
    else:
        examples = read_records(config.examples, "--examples")[: config.shots]
    if len(examples) < config.shots or not asked:
        raise ValueError(
            f"`--shots` is {config.shots}, but '{config.examples or config.questions}' has"
            f" {len(examples)} examples and '{config.questions}' {len(asked)} further questions:"
            " lower it, or give more records."
        )
    before = "".join(record.apply(reader.example) for record in examples)
    return [
        record.apply(reader.question, number, before) for number, record in asked[: config.limit]
    ]


class _Reader:
    """Makes prompts, examples and answers of records."""

    def __init__(self, config: QuestionConfig, asker: Asker) -> None:
        assert config.task is not None
        self._config, self._asker = config, asker
        self._answer_field = config.answer_field or _ANSWER_FIELDS[config.task]
        aliases = {"question": config.question_field, "answer": self._answer_field}
        kind = "gsm8k" if config.task == "gsm8k" else config.choose
        prompt = config.prompt_template or _PROMPTS[kind]
        self._prompt = FieldTemplate("--prompt-template", prompt, aliases, asker.mark)
        ending = {"gsm8k": " {answer}", "letter": " {letter}", "likelihood": config.option_template}
        self._ending = FieldTemplate("--option-template", ending[kind], aliases, asker.mark)

    def example(self, record: Record) -> str:
        """Returns a record with its answer, as an example before a question."""
        _, options = self._answer(record)
        texts = {} if options is None else options.named(options.gold)
        parts = (part.fill(record.fields, texts) for part in (self._prompt, self._ending))
        return f"{''.join(parts)}\n\n"

    def question(self, record: Record, number: int, before: str) -> Question:
        """Returns the question of a record, after examples."""
        gold, options = self._answer(record)
        listed = {} if options is None else {"options": options.listed}
        prompt = before + self._prompt.fill(record.fields, listed)
        head = (record.where, number, str(field_of(record.fields, self._config.question_field)))
        if options is None or not self._config.by_likelihood:
            letters = "" if options is None else options.letters
            return Question(*head, self._asker.prompt(prompt), gold, letters)
        count = len(options.letters)
        endings = [self._ending.fill(record.fields, options.named(i)) for i in range(count)]
        encoded = tuple(self._asker.continued(prompt, ending) for ending in endings)
        num_bytes = tuple(max(1, len(unmarked(ending).encode())) for ending in endings)
        return Question(*head, [], gold, options.letters, encoded, num_bytes)

    def _answer(self, record: Record) -> tuple[str, AnswerOptions | None]:
        """Returns the right number, or the right letter and the options."""
        answer = field_of(record.fields, self._answer_field)
        if self._config.task == "gsm8k":
            return gsm8k_gold(str(answer)), None
        options = read_options(field_of(record.fields, self._config.options_field), answer)
        return options.letters[options.gold], options
