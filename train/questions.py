"""Questions with known answers: records become prompts, and what a model answers is judged.

`read_questions` is the way in. Numbers are read by GSM8K's rule; of options one is chosen by its
letter, or the likeliest is taken. No model is here: a program gets the answers (`train.evaluate`).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

from train.records import FieldTemplate, Record, field_of, read_records
from train.scoring import Options, choice_letter, gsm8k_answer, gsm8k_gold, read_options

Task = Literal["gsm8k", "choice"]
Encode = Callable[[str, str], list[int]]
"""From a prompt and what follows it to ids, those of the beginning of a text included."""

_PROMPTS = {
    "gsm8k": "Question: {question}\nAnswer:",
    "letter": "Question: {question}\nOptions:\n{options}\nAnswer:",
    "likelihood": "Question: {question}\nAnswer:",
}
_ANSWER_FIELDS = {"gsm8k": "answer", "choice": "correct"}


@dataclasses.dataclass(frozen=True)
class QuestionConfig:
    """Questions with known answers: how many of them the model answers.

    Raises:
      ValueError: settings that contradict one another.
    """

    task: Task | None = None
    """Questions to answer: gsm8k (a number after ####), or choice (one of several options)."""
    questions: pathlib.Path | None = None
    """They: a .jsonl file with a JSON object a line, or a .json file with an array of them."""
    question_field: str = "question"
    """Field of the question."""
    answer_field: str | None = None
    """Field of the right answer: `answer` of gsm8k, `correct` of choice, where it is a letter, a
    label, a number from 0 or the text of the option."""
    options_field: str = "options"
    """Field of the options: a list, or a dict with `text` and `label`."""
    prompt_template: str | None = None
    r"""What the model is given: a Python format string over the fields of the record, as for
    train.finetune. {question} and {answer} stand for the fields named above, {options} for all
    options, one a line and with letters, and \n for a new line. By default
    "Question: {question}\nAnswer:", with the options between the two for `--choose letter`."""
    shots: int = 0
    """Examples with their answers before each question."""
    examples: pathlib.Path | None = None
    """Where they are from. By default the first of the questions, which are then not asked."""
    limit: int | None = None
    """Questions that are asked; all by default."""
    choose: Literal["letter", "likelihood"] = "letter"
    """Of choice: the first letter of what the model writes, or the likeliest option."""
    option_template: str = " {option}"
    """Of `--choose likelihood`, what is to be likely after the prompt: {option} or its {letter}."""
    normalize: Literal["none", "tokens", "bytes"] = "none"
    """What log-likelihoods are divided by, so that long options are not worse for their length."""
    out: pathlib.Path | None = None
    """File for the answers, one JSON object a line."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`--limit` must be at least 1, got {self.limit}.")
        if self.shots < 0:
            raise ValueError(f"`--shots` must be at least 0, got {self.shots}.")
        if (self.task is None) != (self.questions is None):
            raise ValueError("`--task` and `--questions` need each other: give both.")
        if self.out is not None and self.task is None:
            raise ValueError("`--out` is for answers to the questions of a `--task`: give one.")

    @property
    def by_likelihood(self) -> bool:
        """Whether options are compared, and nothing is written."""
        return self.task == "choice" and self.choose == "likelihood"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question as it is asked.

    Attributes:
      where: its record, for messages.
      number: of the record, from 0.
      text: the question alone.
      prompt: ids of all that the model is given.
      gold: the right number, or the right letter.
      letters: of the options; none without options.
      continuations: of each option ids that are to be likely after the prompt.
      num_bytes: of each option, of the text that is to be likely.
    """

    where: str
    number: int
    text: str
    prompt: list[int]
    gold: str
    letters: str = ""
    continuations: tuple[list[int], ...] = ()
    num_bytes: tuple[int, ...] = ()

    def read_answer(self, text: str) -> str | None:
        """Returns the number or letter that an answer comes to, or None."""
        return choice_letter(text, self.letters) if self.letters else gsm8k_answer(text)


def read_questions(config: QuestionConfig, encode: Encode) -> list[Question]:
    """Returns what is asked, with the examples before it.

    Args:
      config: what to ask, and how. It has a task.
      encode: what makes ids of prompts.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record or a template is not as it should be, or there are too few.
    """
    assert config.questions is not None
    reader = _Reader(config)
    records = read_records(config.questions, "--questions")
    first = 0
    if config.examples is None:
        examples, first = records[: config.shots], config.shots
    else:
        examples = read_records(config.examples, "--examples")[: config.shots]
    asked = list(enumerate(records))[first:]
    if len(examples) < config.shots or not asked:
        raise ValueError(
            f"`--shots` is {config.shots}, but '{config.examples or config.questions}' has"
            f" {len(examples)} examples and '{config.questions}' {len(asked)} questions beside"
            " them."
        )
    before = "".join(record.apply(reader.example) for record in examples)
    return [
        record.apply(reader.question, number, before, encode)
        for number, record in asked[: config.limit]
    ]


class _Reader:
    """What makes prompts, examples and answers of records."""

    def __init__(self, config: QuestionConfig) -> None:
        assert config.task is not None
        self._config = config
        self._answer_field = config.answer_field or _ANSWER_FIELDS[config.task]
        aliases = {"question": config.question_field, "answer": self._answer_field}
        kind = "gsm8k" if config.task == "gsm8k" else config.choose
        prompt = config.prompt_template or _PROMPTS[kind]
        self._prompt = FieldTemplate("--prompt-template", prompt, aliases)
        ending = {"gsm8k": " {answer}", "letter": " {letter}", "likelihood": config.option_template}
        self._ending = FieldTemplate("--option-template", ending[kind], aliases)

    def example(self, record: Record) -> str:
        """Returns a record with its answer, as it stands before a question."""
        _, options = self._answer(record)
        texts = {} if options is None else _texts(options, options.gold)
        return (
            self._prompt.fill(record.fields, texts)
            + self._ending.fill(record.fields, texts)
            + "\n\n"
        )

    def question(self, record: Record, number: int, before: str, encode: Encode) -> Question:
        """Returns a record as it is asked after examples."""
        gold, options = self._answer(record)
        listed = {} if options is None else {"options": options.listed}
        prompt = before + self._prompt.fill(record.fields, listed)
        head = (record.where, number, str(field_of(record.fields, self._config.question_field)))
        if options is None or not self._config.by_likelihood:
            letters = "" if options is None else options.letters
            return Question(*head, encode(prompt, ""), gold, letters)
        count = len(options.letters)
        endings = [self._ending.fill(record.fields, _texts(options, i)) for i in range(count)]
        start, continuations = _continuations(
            encode(prompt, ""), [encode(prompt, ending) for ending in endings]
        )
        num_bytes = tuple(max(1, len(ending.encode())) for ending in endings)
        return Question(*head, start, gold, options.letters, continuations, num_bytes)

    def _answer(self, record: Record) -> tuple[str, Options | None]:
        """Returns the right number, or the right letter and the options."""
        answer = field_of(record.fields, self._answer_field)
        if self._config.task == "gsm8k":
            return gsm8k_gold(str(answer)), None
        options = read_options(field_of(record.fields, self._config.options_field), answer)
        return options.letters[options.gold], options


def _texts(options: Options, index: int) -> dict[str, str]:
    """Returns what templates call the options, and one of them."""
    return {"options": options.listed, **options.named(index)}


def _continuations(
    prompt: list[int], whole: Sequence[list[int]]
) -> tuple[list[int], tuple[list[int], ...]]:
    """Returns where a prompt ends and its continuations begin, in tokens.

    A token may reach over the end of the prompt: all options begin where none does.

    Args:
      prompt: ids of the prompt alone.
      whole: ids of the prompt with each option.
    """
    common = min(_common(prompt, other) for other in whole)
    common = min(common, *(len(other) - 1 for other in whole))
    if common < 1:
        raise ValueError("there is no token before the options: give a `--prompt-template`")
    return prompt[:common], tuple(other[common:] for other in whole)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many ids two sequences begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
