"""Command lines: help pages, and errors in one line."""

import dataclasses
import io
from typing import ClassVar, Literal

import pytest
from rich.console import Console

from train.evaluation.config import EvaluateConfig
from train.plan import PlanConfig
from train.settings import cli
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.flags import field_texts, flags_of
from train.settings.options import FULL_WEIGHTS

PROGRAMS = (PretrainConfig, FinetuneConfig, EvaluateConfig, PlanConfig)


def page(config, width: int = 80) -> str:
    choices = config.choices() if hasattr(config, "choices") else {}
    console = Console(file=io.StringIO(), width=width)
    console.print(cli.help_page(config, "program", None, choices))
    return console.file.getvalue()


def test_every_flag_of_every_program_has_a_description_and_a_heading():
    for config in PROGRAMS:
        flags = flags_of(config)
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(flag.help for flag in flags)
        found = cli.under_headings(flags, config.HEADINGS)
        assert next(iter(found)) == "Common flags"
        assert sum(map(len, found.values())) == len(flags)


def test_the_command_lines_stay_short():
    # A setting that few runs change belongs into `RARE`.
    for config, most in ((PretrainConfig, 48), (FinetuneConfig, 60), (PlanConfig, 50)):
        assert sum(not flag.is_rare for flag in flags_of(config)) <= most


def test_help_lists_methods_and_models_and_wraps_to_the_terminal(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(PretrainConfig, "program", args=["--steps=1", "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: program [flags]")
    for width in (80, 120):
        lines = [line.rstrip() for line in page(PretrainConfig, width).splitlines()]
        assert max(map(len, lines)) <= width
        words = [line.split() for line in lines]
        for name in (*FULL_WEIGHTS, "llama_9m", "qwen3_4b"):
            assert any(row[:1] == [name] for row in words), name
        # Line breaks of the source are not printed: no line of a help text has one word, unless
        # the text ends there.
        assert sum(len(row) == 1 for row in words) < len(lines) / 10
    text = "\n".join(lines)
    assert text.index("Common flags") < text.index("Method options") < text.index("--save-every")
    common, rare = text.split("In a --config file alone")
    assert "--config PATH" in common
    assert "beta2 FLOAT" in rare
    assert "keep INT" in rare
    assert not {"--beta2", "--keep"} & set(text.split())
    # Methods and flags of fine-tuning alone are not shown.
    assert "--lora-rank" not in text
    assert "--level " not in text


def test_help_of_the_other_programs():
    text = " ".join(page(FinetuneConfig).split())
    assert "hyc_lora" in text
    assert "For lora, qlora, hyc_lora." in text
    assert "--checkpoint PATH" in " ".join(page(EvaluateConfig).split())
    text = " ".join(page(PlanConfig).split())
    assert "rtx_4090" in text
    assert "every method" in text
    assert "(default: bfloat16)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr=1", "unknown flag `--lr`. Did you mean --learning-rate?"),
        ("--modle=x", "unknown flag `--modle`. Did you mean --model? See `program --help`."),
        ("--no-resum", "unknown flag `--no-resum`. Did you mean --no-resume?"),
        ("--distributed=maybe", "`--distributed` is a switch and takes no value, got 'maybe'"),
        ("--no-resume=1", "`--no-resume` is a switch and takes no value, got '1'"),
        ("--compute-dtype=float", "one of float32, bfloat16, float16, got 'float'. Did you mean"),
        ("--compute-dtype int8", "`--compute-dtype` must be one of float32, bfloat16, float16"),
        ("--out=", "`--out` is empty: give it a value, or leave it out."),
        ("--moment-dtype=4bits", "got '4bits'. Did you mean 4bit?"),
        ("--in-backward=1", "`--in-backward` is a switch and takes no value, got '1'"),
        ("--steps=x", "Error parsing --steps: invalid literal for int()"),
        ("--steps=0", "error: `--steps` must be at least 1, got 0."),
        ("--codec", "`--codec` is empty: give it a value, or leave it out."),
        ("--codec=Quantised(4)", "error: `--codec` 'Quantised(4)' is no codec. Did you mean Quant"),
        ("--bits=3", '`--bits` is now `--codec "Quantized(3)"`.'),
        ("--same-bits", '`--same-bits` is now `--codec "Quantized(4)" q="Quantized(4)"'),
        ("--factored-second-moment", "is now part of `--moment-dtype`, such as 4bit-factored."),
        ("--no-balance", '`--no-balance` is now `--codec "Quantized(balance=False)"`.'),
        ("--sketch=rows", "`--sketch` was removed: sketches are Gaussian. Drop it."),
        ("--moments rotate", "`--moments` was removed: a refresh keeps the moments"),
        ("--moments=keep", "`--moments` was removed: a refresh keeps the moments"),
        ("--no-stagger", "`--no-stagger` was removed: the subspaces of all layers are refreshed"),
        ("--optimizer apollo", "`--optimizer apollo` was removed: it was never measured. Choose"),
        ("--optimizer=frugal_signs", "`--optimizer frugal_signs` was removed: it was never"),
        ("--weight-rounding compensated", "`--weight-rounding compensated` was removed: it came"),
        ("--beta2=0.99", "`--beta2` is a setting of `--config` files: write `beta2: 0.99` into a"),
        ("--z_loss", "write `z_loss: ...` into a YAML file and pass `--config FILE`."),
        ("--projection-scale 2", "is now `scale: 2` in a `--config` file."),
        ("--config", "`--config` is empty: give it a YAML file, or leave it out."),
        ("--config --steps 5", "`--config` is empty"),
        ("--config=a.yaml --config b.yaml", "`--config` is given 2 times: write one file."),
        ("--config none.yaml", "`--config` none.yaml cannot be read: No such file or directory."),
        ("--confg x", "unknown flag `--confg`. Did you mean --config?"),
    ],
)
def test_unknown_and_former_flags_and_values_get_a_hint_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.parse(PretrainConfig, "program", args=arguments.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_flags_are_read_without_prefixes_and_values_of_several_flags_are_joined():
    arguments = ["--rank", "8", "--method=low_rank", "--learning_rate=0.5", "--vocab-size", "300"]
    config = cli.parse(PretrainConfig, "program", args=[*arguments, "--resume"])
    assert (config.options.rank, config.optimizer.learning_rate) == (8, 0.5)
    assert (config.data.vocab_size, config.resume) == (300, True)
    # A switch that is not given leaves the choice to the method.
    for arguments, value in (([], None), (["--in-backward"], True), (["--no_in_backward"], False)):
        read = cli.from_arguments(PretrainConfig, [*arguments, "--steps", "5"])
        assert (read.in_backward, read.steps) == (value, 5)
    texts = ("Quantized(3)", "q=Quantized(6)", "k=Exact()")
    for arguments in (
        ["--codec", *texts, "--steps=5"],
        ["--codec", texts[0], "--steps", "5", "--codec", *texts[1:]],
        [*(f"--codec={text}" for text in texts), "--steps", "5"],
    ):
        read = cli.from_arguments(PretrainConfig, arguments)
        assert (read.options.codec, read.steps) == (texts, 5)


@dataclasses.dataclass(frozen=True)
class _Bare:
    """A program.

    Raises:
      ValueError: never.
    """

    x: Literal["a", "b"] = "a"
    """The first line
    and the second."""
    y: int | None = None

    HEADINGS: ClassVar[cli.Headings] = {"Common flags": ("x",)}


def test_texts_are_joined_and_a_flag_without_heading_is_an_error():
    assert field_texts(_Bare) == {"x": "The first line and the second."}
    with pytest.raises(ValueError, match="no heading names y"):
        cli.under_headings(flags_of(_Bare), _Bare.HEADINGS)
