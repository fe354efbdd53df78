"""Evaluates a model: `python -m train.evaluate --checkpoint DIR --task gsm8k --questions FILE`."""

import dataclasses
import functools
import json
import math
import pathlib
import re
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import rich.progress
import tyro
from rich.console import Console

from models import Decoder, lora
from models.checkpoints import load_checkpoint, read_dimensions, stop_ids
from models.generation import generate, log_likelihoods
from train.config import Dtype
from train.corpus import Corpus, open_corpus, read_text
from train.data import ValidationSet, validation_batches
from train.finetune import tokenizer_of
from train.loop import BadRunError, make_console, run_program
from train.scoring import (
    Options,
    TextCost,
    choice_letter,
    exact_match,
    gsm8k_answer,
    gsm8k_gold,
    most_likely,
    read_options,
)
from train.tokenizer import Tokenizer

Task = Literal["gsm8k", "choice"]
AttachAdapter = Callable[[Decoder, pathlib.Path], Decoder]
"""From a decoder and the folder of an adapter to both together."""

_PROMPTS = {
    "gsm8k": "Question: {question}\nAnswer:",
    "letter": "Question: {question}\nOptions:\n{options}\nAnswer:",
    "likelihood": "Question: {question}\nAnswer:",
}
_ANSWER_FIELDS = {"gsm8k": "answer", "choice": "correct"}
_HELD_OUT_BATCHES = 20
_LONGEST_ROW = 1024


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a model: what a text costs it, how many questions it answers, or what it writes.

    Any of `--data`, `--task` and `--generate` may be asked for at once.

    Raises:
      ValueError: settings that contradict one another.
    """

    checkpoint: pathlib.Path
    """A folder of Hugging Face (config.json and safetensors), or a .bin file of llama2.c."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, a folder with one, or a tokenizer.bin of llama2.c. By
    default that in the folder of the checkpoint."""
    adapter: pathlib.Path | None = None
    """Folder of a LoRA adapter, as PEFT writes it."""

    data: str | None = None
    """Text of which to measure the perplexity: a path, or a data set, as for train.pretrain."""
    data_dir: pathlib.Path = pathlib.Path("~/.cache/actjax")
    """Where data sets are prepared."""
    text_field: str = "text"
    """Field of jsonl records, or column of parquet tables, that holds the text."""
    whole: bool = False
    """All of a text file as one document, rather than what training holds out of it."""
    seq_len: int | None = None
    """Tokens a row of text: 1024, or what the model has positions for. A row sees no other."""
    eval_batches: int | None = None
    """Batches of text at most. By default 20 of held-out text, and all of a `--whole` file."""

    task: Task | None = None
    """Questions to answer: gsm8k (a number after ####), or choice (one of several options)."""
    questions: pathlib.Path | None = None
    """They, as one JSON object a line, or one JSON list."""
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

    generate: str | None = None
    """A beginning, for the model to go on from."""
    max_new_tokens: int = 256
    """Tokens that are written, at most."""
    temperature: float = 0.0
    """Of what is drawn; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 for all."""
    batch_size: int = 8
    """Rows of text, or questions, at a time."""
    seed: int = 0
    """Of what is drawn."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of activations and products; sums are in float32."""

    def __post_init__(self) -> None:
        if self.data is None and self.task is None and self.generate is None:
            raise ValueError("nothing to do: give `--data`, `--task` or `--generate`.")
        for name in ("batch_size", "max_new_tokens", "limit", "seq_len", "eval_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`--{_flag(name)}` must be at least 1, got {value}.")
        for name in ("shots", "top_k", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"`--{_flag(name)}` must be at least 0, got {getattr(self, name)}."
                )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"`--temperature` must be in [0, inf), got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`--top-p` must be above 0 and at most 1, got {self.top_p}.")
        if (self.task is None) != (self.questions is None):
            raise ValueError("`--task` and `--questions` need each other: give both.")
        if self.out is not None and self.task is None:
            raise ValueError("`--out` is for answers to the questions of a `--task`: give one.")
        if self.whole and self.data is None:
            raise ValueError("`--whole` is of the text in `--data`: give one.")

    @property
    def by_likelihood(self) -> bool:
        """Whether options are compared, and nothing is written."""
        return self.task == "choice" and self.choose == "likelihood"

    @property
    def templates(self) -> tuple[str, str]:
        """What the model is given, and what follows it in an example."""
        kind = "gsm8k" if self.task == "gsm8k" else self.choose
        prompt = self.prompt_template or _PROMPTS[kind]
        answers = {"gsm8k": " {answer}", "letter": " {letter}", "likelihood": self.option_template}
        return _unescaped(prompt), _unescaped(answers[kind])


def _unescaped(template: str) -> str:
    # A shell hands on \n as two characters.
    escapes = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: escapes[match[1]], template)


def _flag(name: str) -> str:
    return name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question as it is asked.

    Attributes:
      number: of its record in the file, from 0.
      text: the question alone.
      prompt: ids of all that the model is given.
      gold: the right number, or the right letter.
      letters: of the options; none without options.
      continuations: of each option ids that are to be likely after the prompt.
      num_bytes: of each option, of the text that is to be likely.
    """

    number: int
    text: str
    prompt: list[int]
    gold: str
    letters: str = ""
    continuations: tuple[list[int], ...] = ()
    num_bytes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to begin.

    Attributes:
      config: its settings.
      model: what is evaluated, with its adapter.
      tokenizer: of its text.
      stop: ids that end what it writes.
      text: what is to be predicted, if anything.
      questions: what is asked.
      beginning: ids to go on from, if any.
    """

    config: EvaluateConfig
    model: Decoder
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    text: ValidationSet | None
    questions: list[Question]
    beginning: list[int] | None


def main() -> None:
    """Reads the command line and evaluates. Exits with 2 if it cannot begin."""
    config = tyro.cli(
        EvaluateConfig, prog="python -m train.evaluate", config=(tyro.conf.OmitArgPrefixes,)
    )
    run_program(lambda: run(config, make_console()))


def attach_lora(model: Decoder, folder: pathlib.Path) -> Decoder:
    """Returns a decoder with the LoRA adapter in a folder."""
    return lora.attach(model, *lora.load_adapters(folder, model.config))


def run(
    config: EvaluateConfig, console: Console, attach_adapter: AttachAdapter = attach_lora
) -> dict[str, Any]:
    """Evaluates as `config` says: the whole program behind the command line.

    Args:
      config: settings.
      console: where to print.
      attach_adapter: what `--adapter` is read by.

    Returns:
      `text` with what it costs (`nats_per_token`, `perplexity`, `bits_per_byte`, `tokens`), `gsm8k`
      or `choice` with `accuracy`, `standard_error`, `correct` and `questions`, and `generated`:
      what was asked for of these.

    Raises:
      BadRunError: something is wrong with the settings, the checkpoint or what is read.
    """
    try:
        ready = prepare(config, attach_adapter)
    except (ValueError, OSError) as error:
        raise BadRunError(str(error)) from error
    report: dict[str, Any] = {}
    if ready.text is not None:
        report["text"] = _score_text(ready, ready.text, console)
    if config.task is not None:
        report[config.task] = _score_questions(ready, console)
    if ready.beginning is not None:
        report["generated"] = text = _write(ready, [ready.beginning], [0], 1)[0]
        _say(console, config.generate or "", end="", style="dim")
        _say(console, text)
    return report


def _say(console: Console, text: str, **options: Any) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, **options)


def prepare(config: EvaluateConfig, attach_adapter: AttachAdapter = attach_lora) -> Evaluation:
    """Returns an evaluation ready to go: what can be wrong is found here, the quickest first.

    Raises:
      ValueError: settings that do not fit one another, the checkpoint, the text or the questions.
      OSError: a file that cannot be read.
    """
    if config.out is not None and config.out.exists():
        raise ValueError(f"`--out` '{config.out}' is there already: name another file.")
    checkpoint = config.checkpoint.expanduser()
    model_config, _ = read_dimensions(checkpoint)
    longest = model_config.max_seq_len
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model in '{checkpoint}'"
            f" {model_config.vocab_size}: `--tokenizer` is that of another model."
        )
    questions = [] if config.questions is None else _questions(config, tokenizer)
    for question in questions:
        _check_length(config, question, longest)
    beginning = None if config.generate is None else _start(tokenizer, config.generate)
    if beginning is not None and len(beginning) + config.max_new_tokens > longest:
        raise ValueError(
            f"`--generate` has {len(beginning)} tokens, and `--max-new-tokens`"
            f" {config.max_new_tokens} more are above the {longest} positions of the model."
        )
    text = None if config.data is None else _rows(config, config.data, tokenizer, longest)
    model = load_checkpoint(checkpoint)
    if config.adapter is not None:
        model = attach_adapter(model, config.adapter.expanduser())
    ends = {tokenizer.eos_id, *stop_ids(checkpoint)}
    # Of models that never saw an end, such as llama2.c's, the next beginning is one.
    ends |= set() if tokenizer.bos_id is None else {tokenizer.bos_id}
    stop = tuple(sorted(index for index in ends if index < model_config.vocab_size))
    return Evaluation(config, model, tokenizer, stop, text, questions, beginning)


# ----- what a text costs


def _rows(config: EvaluateConfig, data: str, tokenizer: Tokenizer, longest: int) -> ValidationSet:
    seq_len = config.seq_len or min(_LONGEST_ROW, longest)
    if seq_len > longest:
        raise ValueError(f"`--seq-len` {seq_len} is above the {longest} positions of the model.")
    if config.whole:
        corpus, batches = _whole(data), sys.maxsize
    else:
        folder = config.data_dir.expanduser()
        corpus = open_corpus(data, folder, text_field=config.text_field)
        batches = _HELD_OUT_BATCHES
    return validation_batches(
        corpus,
        tokenizer,
        batch_size=config.batch_size,
        seq_len=seq_len,
        max_batches=config.eval_batches or batches,
    )


def _whole(data: str) -> Corpus:
    """Returns a text file as one document that is held out."""
    path = pathlib.Path(data).expanduser()
    if not path.is_file() or set(path.suffixes) & {".json", ".jsonl", ".parquet"}:
        raise ValueError(f"`--whole` is for a file of plain text, and `--data` is '{data}'.")
    return Corpus(path.name, [], [read_text(path)], fingerprint="")


@functools.partial(jax.jit, static_argnums=2)
def _nats(model: Decoder, batch: dict[str, jax.Array], compute_dtype: str) -> jax.Array:
    """Returns the sum of the cross-entropy over the targets that count."""
    mask = batch["mask"]
    loss = model.loss(batch["inputs"], batch["targets"], mask=mask, compute_dtype=compute_dtype)
    return loss * mask.sum()


def _score_text(ready: Evaluation, text: ValidationSet, console: Console) -> dict[str, float]:
    dtype = ready.config.compute_dtype
    total = sum(
        float(_nats(ready.model, batch, dtype)) for batch in _track(text.batches, "text", console)
    )
    cost = TextCost(total, text.num_tokens, text.num_bytes)
    report = {
        "nats_per_token": cost.nats_per_token,
        "perplexity": cost.perplexity,
        "bits_per_byte": cost.bits_per_byte,
        "tokens": cost.tokens,
    }
    console.print(
        f"text: {cost.nats_per_token:.4f} nats a token, perplexity {cost.perplexity:,.3f},"
        f" {cost.bits_per_byte:.4f} bits a byte ({cost.tokens:,} tokens,"
        f" {cost.num_bytes:,} bytes)",
        highlight=False,
    )
    return report


# ----- questions


def _questions(config: EvaluateConfig, tokenizer: Tokenizer) -> list[Question]:
    """Returns what is asked, after the examples."""
    assert config.questions is not None
    records = list(enumerate(_records("--questions", config.questions)))
    if config.examples is None:
        examples, records = records[: config.shots], records[config.shots :]
        source = config.questions
    else:
        source = config.examples
        examples = list(enumerate(_records("--examples", source)))[: config.shots]
    if len(examples) < config.shots or not records:
        raise ValueError(
            f"`--shots` is {config.shots}, but '{source}' has {len(examples)} examples and"
            f" '{config.questions}' {len(records)} questions beside them."
        )
    before = "".join(_numbered(source, i, _example, config, r) for i, r in examples)
    return [
        _numbered(config.questions, i, _question, config, r, i, before, tokenizer)
        for i, r in records[: config.limit]
    ]


def _records(flag: str, path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{flag}`: '{path}' is not UTF-8 ({error}).") from error
    whole = text.lstrip().startswith("[")
    # Not `splitlines`: JSON strings may hold line separators such as U+2028.
    records = []
    for number, piece in enumerate([text] if whole else text.split("\n"), 1):
        if not piece.strip():
            continue
        try:
            one = json.loads(piece)
        except json.JSONDecodeError as error:
            line = error.lineno if whole else number
            raise ValueError(f"`{flag}`: '{path}' line {line} is no JSON ({error.msg}).") from error
        records += one if isinstance(one, list) else [one]
    for i, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"`{flag}`: record {i} of '{path}' is no JSON object: {record!r:.60}")
    return records


def _numbered(path: pathlib.Path, number: int, make: Callable[..., Any], *args: Any) -> Any:
    """Returns what is made of a record; an error says of which."""
    try:
        return make(*args)
    except ValueError as error:
        raise ValueError(f"record {number} of '{path}': {error}") from error


def _example(config: EvaluateConfig, record: dict[str, Any]) -> str:
    """Returns a record with its answer, as it stands before a question."""
    values, _, options = _read(config, record)
    if options is not None:
        values |= options.named(options.gold)
    prompt, answer = config.templates
    return _filled(prompt, values) + _filled(answer, values) + "\n\n"


def _question(
    config: EvaluateConfig,
    record: dict[str, Any],
    number: int,
    before: str,
    tokenizer: Tokenizer,
) -> Question:
    values, gold, options = _read(config, record)
    prompt, ending = config.templates
    prompt = before + _filled(prompt, values)
    ids, text = _start(tokenizer, prompt), str(values["question"])
    letters = "" if options is None else options.letters
    if options is None or not config.by_likelihood:
        return Question(number, text, ids, gold, letters)
    endings = [_filled(ending, values | options.named(i)) for i in range(len(letters))]
    whole = [_start(tokenizer, prompt + ending) for ending in endings]
    # A token may reach over the end of the prompt: all options begin where none does.
    common = min(_common(ids, other) for other in whole)
    common = min(common, *(len(other) - 1 for other in whole))
    if common < 1:
        raise ValueError("there is no token before the options: give a `--prompt-template`.")
    return Question(
        number,
        text,
        ids[:common],
        gold,
        letters,
        tuple(other[common:] for other in whole),
        tuple(max(1, len(ending.encode())) for ending in endings),
    )


def _read(
    config: EvaluateConfig, record: dict[str, Any]
) -> tuple[dict[str, Any], str, Options | None]:
    """Returns what templates may name, the right answer, and the options if there are."""
    assert config.task is not None
    answer_field = config.answer_field or _ANSWER_FIELDS[config.task]
    needed = [config.question_field, answer_field]
    needed += [config.options_field] if config.task == "choice" else []
    for field in needed:
        if field not in record:
            raise ValueError(f"there is no field '{field}', only {', '.join(record)}.")
    answer = record[answer_field]
    values = {**record, "question": record[config.question_field], "answer": answer}
    if config.task == "gsm8k":
        return values, gsm8k_gold(str(answer)), None
    raw = record[config.options_field]
    options = read_options(raw, answer)
    return (
        {**values, "options": _Listed(raw, options.listed)},
        options.letters[options.gold],
        options,
    )


@dataclasses.dataclass(frozen=True)
class _Listed:
    """What {options} stands for: all of them, where {options[0]} is a field as any other."""

    raw: Any
    text: str

    def __getitem__(self, index: Any) -> Any:
        return self.raw[index]

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Returns a template with the fields of a record put in."""
    try:
        return string.Formatter().vformat(template, (), values)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the template {template!r} does not fit ({error}): there is {', '.join(values)}. Write"
            " {{ and }} for braces that are meant."
        ) from error


def _start(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text that begins a document."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*begin, *tokenizer.encode(text)]
    if not ids:
        raise ValueError("the prompt is empty, and no token begins a document: give some text.")
    return ids


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many ids two sequences begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _check_length(config: EvaluateConfig, question: Question, longest: int) -> None:
    # Nothing is predicted from the last token of an option.
    more = max((len(c) - 1 for c in question.continuations), default=config.max_new_tokens)
    if len(question.prompt) + more > longest:
        kind = "an option" if question.continuations else f"`--max-new-tokens` {more}"
        raise ValueError(
            f"record {question.number} of '{config.questions}' has {len(question.prompt)} tokens,"
            f" and with {kind} more than the {longest} positions of the model: lower `--shots`, or"
            " what is written."
        )


def _score_questions(ready: Evaluation, console: Console) -> dict[str, float]:
    config, questions = ready.config, ready.questions
    answer = _likeliest if config.by_likelihood else _written
    lines: list[dict[str, Any]] = []
    batches = [
        questions[i : i + config.batch_size] for i in range(0, len(questions), config.batch_size)
    ]
    for batch in _track(batches, str(config.task), console):
        new = list(answer(ready, batch))
        lines += new
        if config.out is not None:
            config.out.parent.mkdir(parents=True, exist_ok=True)
            with config.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
    accuracy = exact_match([x["prediction"] for x in lines], [x["gold"] for x in lines])
    console.print(
        f"{config.task}: accuracy {accuracy.value:.4f} ± {accuracy.standard_error:.4f}"
        f" ({accuracy.correct:,} of {accuracy.total:,})",
        highlight=False,
    )
    return {
        "accuracy": accuracy.value,
        "standard_error": accuracy.standard_error,
        "correct": accuracy.correct,
        "questions": accuracy.total,
    }


def _line(question: Question, prediction: str | None, **more: Any) -> dict[str, Any]:
    """Returns what is written of an answer."""
    correct = prediction == question.gold
    head = {"number": question.number, "question": question.text, **more}
    return {**head, "prediction": prediction, "gold": question.gold, "correct": correct}


def _written(ready: Evaluation, questions: list[Question]) -> Iterator[dict[str, Any]]:
    """Yields answers that are read in what the model writes."""
    prompts, numbers = [q.prompt for q in questions], [q.number for q in questions]
    texts = _write(ready, prompts, numbers, ready.config.batch_size)
    for question, text in zip(questions, texts, strict=True):
        letters = question.letters
        found = choice_letter(text, letters) if letters else gsm8k_answer(text)
        yield _line(question, found, answer=text)


def _likeliest(ready: Evaluation, questions: list[Question]) -> Iterator[dict[str, Any]]:
    """Yields the options that the model finds the likeliest."""
    config = ready.config
    most = max(len(question.letters) for question in ready.questions)
    prompts = [q.prompt for q in questions for _ in q.continuations]
    continuations = [c for q in questions for c in q.continuations]
    scores = iter(
        log_likelihoods(
            ready.model,
            _filled_up(prompts, config.batch_size * most),
            _filled_up(continuations, config.batch_size * most),
            compute_dtype=config.compute_dtype,
        ).tolist()
    )
    for question in questions:
        own = [next(scores) for _ in question.continuations]
        tokens = [len(c) for c in question.continuations]
        lengths = {"none": None, "tokens": tokens, "bytes": question.num_bytes}[config.normalize]
        yield _line(question, question.letters[most_likely(own, lengths)], log_likelihoods=own)


# ----- what a model writes


def _write(ready: Evaluation, prompts: list[list[int]], numbers: list[int], rows: int) -> list[str]:
    """Returns what follows each prompt.

    Args:
      ready: the evaluation.
      prompts: ids.
      numbers: of the prompts. What is drawn depends on them, and not on the others of a batch.
      rows: prompts that a program is compiled for.
    """
    config, seed = ready.config, jax.random.key(ready.config.seed)
    keys = jax.vmap(lambda i: jax.random.fold_in(seed, i))(jnp.array(_filled_up(numbers, rows)))
    new = generate(
        ready.model,
        _filled_up(prompts, rows),
        max_new_tokens=config.max_new_tokens,
        stop=ready.stop,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        key=keys,
        compute_dtype=config.compute_dtype,
    )
    return [
        text_after(ready.tokenizer, prompt, ids) for prompt, ids in zip(prompts, new, strict=False)
    ]


def text_after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Returns the text that ids add to that of a prompt: a space between the two is kept."""
    # A model may have more ids than its tokenizer.
    known = [index for index in ids if index < tokenizer.vocab_size]
    return tokenizer.decode([*prompt, *known])[len(tokenizer.decode(prompt)) :]


def _filled_up(items: list[Any], size: int) -> list[Any]:
    """Returns items and copies of the last: no program is compiled for a shorter last batch."""
    return items + items[-1:] * (size - len(items))


def _track(items: Sequence[Any], name: str, console: Console) -> Any:
    """Returns an iterator over items that draws a progress bar where somebody watches."""
    return rich.progress.track(
        items, name, console=console, transient=True, disable=not console.is_terminal
    )


if __name__ == "__main__":
    main()
