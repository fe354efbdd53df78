"""Evaluates a model: `python -m train.evaluate --checkpoint DIR --task gsm8k --questions FILE`."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from models import Decoder, lora, peft
from models.checkpoints import find_checkpoint, load_checkpoint, read_dimensions, stop_ids
from models.generation import generate
from models.likelihoods import log_likelihoods
from train.evaluation.config import EvaluateConfig
from train.evaluation.questions import Question, read_questions
from train.evaluation.scoring import accuracy, most_likely
from train.run.export import MODEL, adapter_of_run, method_of_run
from train.run.program import make_console, reporting_errors, run_program
from train.run.progress import saying, tracked
from train.settings import cli
from train.settings.messages import naming_flag
from train.settings.methods import METHODS
from train.text.chat import open_chat_template, template_arguments
from train.text.corpus import open_corpus, open_whole
from train.text.data import ValidationSet, validation_batches
from train.text.encoder import Encoder
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import fit_vocabulary, tokenizer_of

_HELD_OUT_BATCHES = 20
_LONGEST_ROW = 1024


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to begin.

    Attributes:
      config: its settings.
      model: the model, with its adapter.
      tokenizer: its tokenizer.
      stop: ids that end a text.
      text: the text whose perplexity is measured, or None.
      questions: the questions.
      beginning: ids that the model continues, or None.
      remarks: lines for the user about how texts are read.
    """

    config: EvaluateConfig
    model: Decoder
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    text: ValidationSet | None
    questions: list[Question]
    beginning: list[int] | None
    remarks: Sequence[str] = ()


def main() -> None:
    """Reads the command line and evaluates. Exits with 2 if it cannot begin."""
    config = cli.parse(EvaluateConfig, "python -m train.evaluate")
    run_program(lambda: run(config, make_console()))


def run(config: EvaluateConfig, console: Console) -> dict[str, Any]:
    """Evaluates with the given settings: the program behind the command line.

    Args:
      config: settings.
      console: where to print.

    Returns:
      The requested results: `text` (`nats_per_token`, `perplexity`, `bits_per_byte`, `tokens`),
      `gsm8k` or `choice` (`accuracy`, `standard_error`, `correct`, `questions`), and `generated`.

    Raises:
      BadRunError: something is wrong with the settings, the checkpoint or an input file.
    """
    with saying(console, "reading the checkpoint and what to evaluate it on", first=False):
        ready = reporting_errors(lambda: prepare(config))
    for line in filter(None, ready.remarks):
        _say(console, line)
    report: dict[str, Any] = {}
    if ready.text is not None:
        report["text"] = _score_text(ready, ready.text, console)
    if config.asked.task is not None:
        report[config.asked.task] = _score_questions(ready, console)
    if ready.beginning is not None:
        with saying(console, "writing", first=False):
            report["generated"] = text = _write(ready, [ready.beginning], [0], 1)[0]
        end = "\n" if config.writing.chat else ""  # An answer does not continue the line.
        _say(console, config.writing.generate or "", end=end, style="dim")
        _say(console, text)
    return report


def _say(console: Console, text: str, **options: Any) -> None:
    """Prints a text without markup."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, **options)


def prepare(config: EvaluateConfig) -> Evaluation:
    """Returns an evaluation that is ready to begin. Everything that can be wrong is found here.

    Raises:
      ValueError: settings that do not fit each other, the checkpoint, the text or the questions.
      OSError: a file that cannot be read.
    """
    if config.asked.out is not None:
        _check_out(config.asked.out)
    with naming_flag("--checkpoint"):
        trained = adapter_of_run(config.checkpoint.expanduser())
        if trained is not None and config.adapter is None:
            base, adapter, four_bit = trained
            four_bit = four_bit or config.four_bit
            found = {"checkpoint": base, "adapter": adapter, "four_bit": four_bit}
            config = dataclasses.replace(config, **found)
        elif config.four_bit and config.adapter is None:
            _check_not_merged(config.checkpoint.expanduser())
        checkpoint = find_checkpoint(config.checkpoint, config.download)
        config = dataclasses.replace(config, checkpoint=checkpoint)
        model_config, _ = read_dimensions(checkpoint)
    longest = model_config.max_seq_len
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    flag = "--checkpoint" if config.tokenizer is None else "--tokenizer"
    size = model_config.vocab_size
    remark = fit_vocabulary(tokenizer, flag, f"the model in '{checkpoint}'", size)
    asked, writing, data = config.asked, config.writing, config.text.data
    asker = _Asker(config, tokenizer)
    questions = [] if asked.task is None else read_questions(asked, asker)
    for question in questions:
        # Nothing is predicted from the last token of an option.
        options = [len(prompt) + len(ids) - 1 for prompt, ids in question.options]
        needed = max(options, default=len(question.prompt) + writing.max_new_tokens)
        if needed > longest:
            kind = "an option" if options else f"`--max-new-tokens` {writing.max_new_tokens}"
            raise ValueError(
                f"{question.where} has {len(question.prompt)} tokens; with {kind} that exceeds the"
                f" {longest} positions of the model: lower `--shots` or `--max-new-tokens`."
            )
    beginning = None
    if writing.generate is not None:
        with naming_flag("--generate"):
            beginning = asker.prompt(asker.mark(writing.generate))
    if beginning is not None and len(beginning) + writing.max_new_tokens > longest:
        raise ValueError(
            f"`--generate` has {len(beginning)} tokens; with `--max-new-tokens`"
            f" {writing.max_new_tokens} that exceeds the {longest} positions of the model: lower"
            " one of them."
        )
    text = None if data is None else _rows(config, data, tokenizer, longest)
    with naming_flag("--checkpoint"):
        model = load_checkpoint(checkpoint, convert=lora.quantize if config.four_bit else None)
        ends = {tokenizer.eos_id, *stop_ids(checkpoint)}
    if config.adapter is not None:
        with naming_flag("--adapter"):
            adapters = peft.load_adapters(config.adapter.expanduser(), model.config, checkpoint)
            model = lora.attach(model, *adapters)
    # Models that never saw an end of text, such as stories260K, write the next beginning.
    ends |= set(tokenizer.prefix)
    stop = tuple(sorted(index for index in ends if index < model_config.vocab_size))
    remarks = [tokenizer.describe(), remark, asker.remark()]
    return Evaluation(config, model, tokenizer, stop, text, questions, beginning, remarks)


def _check_not_merged(folder: pathlib.Path) -> None:
    """Raises a `ValueError` if the model of a run has the 4-bit weights of its method already."""
    method = method_of_run(folder.parent if folder.name == MODEL else folder)
    if method is not None and METHODS[method].four_bit:
        raise ValueError(
            f"'{folder}' has a model that is merged with 4-bit weights, and `--four-bit` would"
            " round it again: drop `--four-bit`."
        )


def _check_out(out: pathlib.Path) -> None:
    """Raises a `ValueError` unless a new file can be written there, before the work begins."""
    try:
        # A link without a target too: what is written would go there.
        if os.path.lexists(out):
            raise ValueError(f"`--out` '{out}' exists already: name another file.")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch(exist_ok=False)
        out.unlink()
    except OSError as error:
        raise ValueError(f"`--out` '{out}' cannot be written: {error.strerror}.") from error


# ----- perplexity of a text


def _rows(config: EvaluateConfig, data: str, tokenizer: Tokenizer, longest: int) -> ValidationSet:
    text = config.text
    seq_len = text.seq_len or min(_LONGEST_ROW, longest)
    if seq_len > longest:
        raise ValueError(f"`--seq-len` {seq_len} is above the {longest} positions of the model.")
    if text.whole:
        corpus, batches = open_whole(data, text_field=text.text_field), sys.maxsize
    else:
        corpus = open_corpus(data, text.data_dir.expanduser(), text_field=text.text_field)
        batches = _HELD_OUT_BATCHES
    return validation_batches(
        corpus,
        tokenizer,
        batch_size=config.batch_size,
        seq_len=seq_len,
        eval_batches=text.eval_batches or batches,
        special_tokens=config.special_tokens,
    )


@functools.partial(jax.jit, static_argnums=2)
def _nats(model: Decoder, batch: dict[str, jax.Array], compute_dtype: str) -> jax.Array:
    """Returns the sum of the cross-entropy over the unmasked targets."""
    mask = batch["mask"]
    loss = model.loss(batch["inputs"], batch["targets"], mask=mask, compute_dtype=compute_dtype)
    return loss * mask.sum()


def _score_text(ready: Evaluation, text: ValidationSet, console: Console) -> dict[str, float]:
    batches, dtype = (
        tracked(text.batches, "batches of the text", console),
        ready.config.compute_dtype,
    )
    cost = text.cost(sum(float(_nats(ready.model, batch, dtype)) for batch in batches))
    part = "all" if ready.config.text.whole else "a held-out part"
    console.print(
        f"text ({part} of it): {cost['nats_per_token']:.4f} nats per token,"
        f" perplexity {cost['perplexity']:,.3f}, {cost['bits_per_byte']:.4f} bits per byte"
        f" ({text.num_tokens:,} tokens, {text.num_bytes:,} bytes)",
        highlight=False,
    )
    return {**cost, "tokens": text.num_tokens}


# ----- questions


class _Asker:
    """Turns prompts into ids, as texts or as the messages of a user."""

    def __init__(self, config: EvaluateConfig, tokenizer: Tokenizer) -> None:
        self._encoder, self._template = Encoder(tokenizer, config.special_tokens), None
        self.mark = self._encoder.marker.mark
        """Marks the names of special tokens that are content."""
        if config.writing.chat:
            folder = config.tokenizer or config.checkpoint.expanduser()
            arguments = template_arguments(config.writing.template_argument)
            path = config.writing.chat_template
            self._template = open_chat_template(path, folder, tokenizer, arguments)

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt."""
        return self._encoder.prompt(self._asked(text), is_chat=self._template is not None)

    def continued(self, prompt: str, ending: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a prompt and of the ending after it."""
        is_chat = self._template is not None
        return self._encoder.continued(self._asked(prompt), ending, is_chat=is_chat)

    def _asked(self, text: str) -> str:
        if self._template is None:
            return text
        message = {"role": "user", "content": text}
        return self._template.render([message], add_generation_prompt=True)

    def remark(self) -> str:
        """Returns a line about names of special tokens in what was asked."""
        return self._encoder.marker.describe("prompts")


def _score_questions(ready: Evaluation, console: Console) -> dict[str, float]:
    config, questions = ready.config, ready.questions
    answer = _likeliest if config.asked.by_likelihood else _written
    lines: list[dict[str, Any]] = []
    batches = [
        questions[i : i + config.batch_size] for i in range(0, len(questions), config.batch_size)
    ]
    for batch in tracked(batches, f"batches of {config.asked.task}", console):
        new = list(answer(ready, batch))
        lines += new
        if config.asked.out is not None:
            with config.asked.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in new)
    found = accuracy(sum(line["correct"] for line in lines), len(lines))
    error = "" if len(lines) < 2 else f" ± {found['standard_error']:.4f}"
    console.print(
        f"{config.asked.task}: accuracy {found['accuracy']:.4f}{error}"
        f" ({found['correct']:,} of {found['questions']:,})",
        highlight=False,
    )
    return found


def _line(question: Question, prediction: str | None, **details: Any) -> dict[str, Any]:
    """Returns the line of an answer for `--out`."""
    correct = prediction == question.gold
    head = {"number": question.number, "question": question.text, **details}
    return {**head, "prediction": prediction, "gold": question.gold, "correct": correct}


def _written(ready: Evaluation, questions: list[Question]) -> Iterator[dict[str, Any]]:
    """Yields answers that the model writes."""
    prompts, numbers = [q.prompt for q in questions], [q.number for q in questions]
    texts = _write(ready, prompts, numbers, ready.config.batch_size)
    for question, text in zip(questions, texts, strict=True):
        yield _line(question, question.read_answer(text), answer=text)


def _likeliest(ready: Evaluation, questions: list[Question]) -> Iterator[dict[str, Any]]:
    """Yields the option of each question that is likeliest under the model."""
    config, normalize = ready.config, ready.config.asked.normalize
    most = max(len(question.letters) for question in ready.questions)
    prompts = [prompt for q in questions for prompt, _ in q.options]
    continuations = [ids for q in questions for _, ids in q.options]
    scores = iter(
        log_likelihoods(
            ready.model,
            _filled_up(prompts, config.batch_size * most),
            _filled_up(continuations, config.batch_size * most),
            compute_dtype=config.compute_dtype,
        ).tolist()
    )
    for question in questions:
        likelihoods = [next(scores) for _ in question.options]
        tokens = [len(ids) for _, ids in question.options]
        lengths = {"none": [1] * len(tokens), "tokens": tokens, "bytes": question.num_bytes}
        letter = question.letters[most_likely(likelihoods, lengths[normalize])]
        yield _line(question, letter, log_likelihoods=likelihoods)


# ----- writing


def _write(ready: Evaluation, prompts: list[list[int]], numbers: list[int], rows: int) -> list[str]:
    """Returns the text that follows each prompt.

    Args:
      ready: the evaluation.
      prompts: ids.
      numbers: of the prompts. Samples depend on them, and not on the other prompts of a batch.
      rows: batch size of the compiled program.
    """
    config = ready.config.writing
    seed = jax.random.key(config.seed)
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
        compute_dtype=ready.config.compute_dtype,
    )
    return [
        text_after(ready.tokenizer, prompt, ids) for prompt, ids in zip(prompts, new, strict=False)
    ]


def text_after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Returns the text that ids add to the text of a prompt, with any space between the two."""
    # A model may have more ids than its tokenizer.
    known = [index for index in ids if index < tokenizer.vocab_size]
    return tokenizer.decode([*prompt, *known])[len(tokenizer.decode(prompt)) :]


def _filled_up(items: list[Any], size: int) -> list[Any]:
    """Returns items padded with copies of the last, so that all batches share a program."""
    return items + items[-1:] * (size - len(items))


if __name__ == "__main__":
    main()
