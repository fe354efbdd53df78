"""Settings from a YAML file. No test compiles anything."""

import math
import pathlib

import pytest

from train.evaluation.config import EvaluateConfig
from train.plan import PlanConfig
from train.settings import cli
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.flags import flags_of


@pytest.fixture
def parse(tmp_path):
    """Returns a function from the text of a file and arguments to settings."""

    def read(text: str, *args: str, config: type = PretrainConfig):
        (tmp_path / "run.yaml").write_text(text)
        return cli.parse(config, "program", args=["--config", str(tmp_path / "run.yaml"), *args])

    return read


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("batch_size: 16", "batch_size", 16),
        ("batch-size: 16", "batch_size", 16),
        ("steps: 1_000", "steps", 1000),
        ("learning_rate: 1e-3", "optimizer.learning_rate", 1e-3),  # Text for YAML 1.1.
        ("learning_rate: 1", "optimizer.learning_rate", 1.0),
        ("clip: .inf", "optimizer.clip", math.inf),
        ("clip: inf", "optimizer.clip", math.inf),
        ("beta2: 0.99", "optimizer.beta2", 0.99),
        ("scale: 0.5", "options.scale", 0.5),
        ("resume: on", "resume", True),
        ("resume: no", "resume", False),
        ("distributed: false", "distributed", False),
        ("in_backward: yes", "in_backward", True),
        ("in_backward: off", "in_backward", False),
        ("in_backward: null", "in_backward", None),
        ("steps: ~", "steps", 1000),
        ("moment_dtype: 8bit", "optimizer.moment_dtype", "8bit"),
        ("data: 2024-01-01", "data.data", "2024-01-01"),  # A date for YAML.
        ("text_field: 'yes'", "data.text_field", "yes"),
        ("text_field: a: b", None, "is not YAML: mapping values are not allowed here"),
        ('text_field: "--x"', "data.text_field", "--x"),
        ("out: runs/x", "out", pathlib.Path("runs/x")),
        ("out: ~/x", "out", pathlib.Path("~/x").expanduser()),
        ("codec: Quantized(3)", "options.codec", ("Quantized(3)",)),
        ("codec:\n- Quantized(3, levels='normal')\n- q=Exact()", "options.codec",
         ("Quantized(3, levels='normal')", "q=Exact()")),
        ("# nothing", "steps", 1000),
        ("steps: 1.5", None, "`steps`: it must be a whole number, got 1.5."),
        ("steps: 1:30", None, "`steps`: it must be a whole number, got 1:30."),
        ("steps: ten", None, "`steps`: it must be a whole number, got ten."),
        ("steps: |\n a\n b", None, "`steps`: it must be a whole number, got a b"),
        ("steps: [1]", None, "`steps`: it must be a whole number, got a list."),
        ("learning_rate: yes", None, "`learning_rate`: it must be a number, got yes."),
        ("resume: 1", None, "`resume`: it must be true or false, got 1."),
        ("out: off", None, "`out`: it must be text, got off: put it into quotes."),
        ("out: ''", None, "`out`: `--out` is empty: give it a value, or leave it out."),
        ("data: {a: 1}", None, "`data`: it must be text, got a mapping."),
        ("data: !!python/object:os.system x", None, "`data`: it must be text, got x: put"),
        ("codec: []", None, "`codec`: `--codec` is empty: give it a value, or leave it out."),
        ("codec: ['--steps']", None, "`codec`: a value of a list cannot begin with --"),
        ("codec: [true]", None, "`codec`: it must be text, got true: put it into quotes."),
        ("moment_dtype: 8bits", None, "`moment_dtype`: `--moment-dtype` must be one of auto"),
        ("weight_rounding: compensated", None, "`--weight-rounding compensated` was removed"),
        ("stepz: 5", None, "`stepz`: unknown setting. Did you mean steps? See `program --help`."),
        ("bits: 3", None, '`bits`: `--bits` is now `--codec "Quantized(3)"`.'),
        ("sketch: rows", None, "`sketch`: `--sketch` was removed: sketches are Gaussian."),
        ("steps: 5\nsteps: 6", None, "`steps`: it is given twice: keep one."),
        ("batch-size: 5\nbatch_size: 6", None, "`batch_size`: it is given twice: keep one."),
        ("config: other.yaml", None, "`config`: unknown setting."),
        ("- steps", None, "run.yaml must have a line `key: value` for each setting."),
        ("steps", None, "run.yaml must have a line `key: value` for each setting."),
        ("[a]: 5", None, "run.yaml, line 1: a key must be the name of a setting."),
        ("steps: [", None, "is not YAML: while parsing a flow node"),
        ("steps: 5\n---\nsteps: 6", None, "is not YAML: expected a single document"),
        ("[" * 5000, None, "is not YAML"),
        ("steps: 0", None, "error: `--steps` must be at least 1, got 0."),
        ("beta1: 2", None, "error: `beta1` must be in [0, 1), got 2.0."),
    ],
)  # fmt: skip
def test_values_are_those_of_flags_and_errors_are_one_line(text, path, value, parse, capsys):
    if path is not None:
        config = parse(text)
        for name in path.split("."):
            config = getattr(config, name)
        assert config == value
        assert type(config) is type(value)
        return
    with pytest.raises(SystemExit) as stopped:
        parse(text)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert value in line


def test_bytes_that_are_no_text_are_refused(parse, tmp_path, capsys):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit):
        cli.parse(PretrainConfig, "program", args=[f"--config={tmp_path / 'bytes.yaml'}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "bytes.yaml is not YAML" in line


def test_flags_of_the_command_line_win(parse):
    text = "steps: 5\nresume: true\nin_backward: true\ncodec: [Quantized(3), q=Exact()]"
    args = ("--steps=7", "--no-resume", "--no_in_backward", "--codec", "Quantized(2)")
    config = parse(text, *args)
    assert (config.steps, config.resume, config.in_backward) == (7, False, False)
    assert config.options.codec == ("Quantized(2)",)
    # A plan takes the file of a run.
    config = parse("lora_alpha: 8\nepochs: 2\nlora_rank: 4\nmethod: qlora", config=PlanConfig)
    assert (config.train.adapter.lora_rank, config.train.method) == (4, "qlora")
    with pytest.raises(SystemExit):
        parse("loss: dpo", config=PlanConfig)
    # Steps and epochs are two ways to give one length.
    config = parse("epochs: 2", "--steps", "7")
    assert (config.steps, config.epochs) == (7, None)
    # Values of a list in the file do not go on with those of the command line.
    config = parse("codec: [Quantized(3)]", "--method", "lean", "--data", "x")
    assert (config.options.codec, config.data.data) == (("Quantized(3)",), "x")


def test_every_program_reads_its_settings(parse):
    text = "checkpoint: here\ntargets: [q, up]\ncount_prompts: true\nheld_out: 0.5\n"
    config = parse(text + 'prompt_template: "{a}\\n"', config=FinetuneConfig)
    assert (config.adapter.targets, config.data.count_prompts) == (("q", "up"), True)
    assert (config.data.prompt_template, config.data.held_out) == ("{a}\n", 0.5)
    text = "checkpoint: here\ndata: there\neval_batches: 3\nseq_len: 4"
    config = parse(text, config=EvaluateConfig)
    assert (config.checkpoint, config.text.eval_batches) == (pathlib.Path("here"), 3)
    train = parse("budget: 24GiB\nz_loss: 1e-4\nmethod: lean", config=PlanConfig).train
    assert (train.budget, train.method, train.z_loss) == ("24GiB", "lean", 1e-4)


def test_a_file_of_every_default_changes_nothing(parse):
    def written(value) -> str:
        if value in (None, "", ()):
            return "null"
        if isinstance(value, tuple):
            return f"[{', '.join(value)}]"
        return str(value).lower() if isinstance(value, bool) else f"'{value}'"

    for config in (PretrainConfig, FinetuneConfig, PlanConfig):
        flags = [f for f in flags_of(config) if f.key not in ("checkpoint", "data_dir")]
        text = "".join(f"{flag.key}: {written(flag.default)}\n" for flag in flags)
        needed = ("--checkpoint", "here") if config is FinetuneConfig else ()
        assert parse(text, *needed, config=config) == cli.parse(config, "program", args=needed)
