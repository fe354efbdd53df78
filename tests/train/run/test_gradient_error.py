"""The error of a storage choice, and the plans that are measured."""

import dataclasses
import json
import math
import shlex
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import CONFIG

from actjax import Exact
from models import Decoder, huggingface
from tests.train.runs import quiet
from train import plan
from train.plan import PlanConfig, run
from train.planning import measured, tables
from train.planning.estimate import Compiled, Plan
from train.planning.measured import MeasureConfig
from train.planning.search import Found
from train.run import gradient_error
from train.run.gradient_error import WHOLE, GradientError, by_site, measure
from train.run.loss import loss_function
from train.run.recipe import make_recipe
from train.run.report import StepMemory
from train.settings import cli
from train.settings.config import DataConfig, FinetuneConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import MethodOptions
from train.text.trained_tokenizer import train_bpe

TINY = dataclasses.replace(CONFIG, vocab_size=300)
CODE = "Quantized(3, group=16)"
TRAIN = PretrainConfig(
    method="lean",
    options=MethodOptions(codec=("Exact()", f"gate={CODE}", f"up={CODE}")),
    batch_size=2,
    seq_len=16,
    compute_dtype="float32",
)
ROUNDED = dataclasses.replace(
    TRAIN,
    method="lean_remat",
    options=MethodOptions(codec=("Quantized(2, group=16, rounding='stochastic')",)),
)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda key: Decoder(TINY, key))(jax.random.key(1))


@pytest.fixture(scope="module")
def rounded():
    """A recipe with random codes. All measurements of it share one program."""
    recipe = make_recipe(ROUNDED, TINY)
    real = gradient_error._gradient_at_places
    program = real(recipe, recipe.storage)
    with pytest.MonkeyPatch.context() as patch:
        shared = lambda one, storage: program if one is recipe else real(one, storage)  # noqa: E731
        patch.setattr(gradient_error, "_gradient_at_places", shared)
        yield recipe


def batches(count):
    draw = np.random.default_rng(0)
    for _ in range(count):
        tokens = draw.integers(0, TINY.vocab_size, (2, 17))
        mask = np.ones((2, 16), np.float32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def test_errors_are_those_of_gradients_with_these_codes(model):
    recipe = make_recipe(TRAIN, TINY)
    coded = recipe.storage
    coded_sites = by_site(coded, TINY.num_layers)
    assert list(coded_sites) == [WHOLE, "gate", "up"]
    first = {site: np.arange(TINY.num_layers) == 0 for site in coded_sites[WHOLE]}
    choices = {**coded_sites, "nowhere": {}, "first": first}
    two = list(batches(2))
    found = measure(recipe, coded, model, two, choices)
    storages = {"exact": dataclasses.replace(coded, gate=Exact(), up=Exact()),
                WHOLE: coded, "up": dataclasses.replace(coded, gate=Exact())}  # fmt: skip

    @jax.jit
    def gradients(model, batch):
        return {
            name: jax.grad(loss_function(recipe.config, storage))(model, batch, jax.random.key(0))
            for name, storage in storages.items()
        }

    def vectors(batch):
        leaves = {name: jax.tree.leaves(tree) for name, tree in gradients(model, batch).items()}
        return {
            name: np.concatenate([np.ravel(np.float64(x)) for x in arrays])
            for name, arrays in leaves.items()
        }

    of_batches = [vectors(batch) for batch in two]
    for name in (WHOLE, "up"):
        errors, cosines = [], []
        for of_batch in of_batches:
            g, got = of_batch["exact"], of_batch[name]
            errors.append(np.linalg.norm(got - g) / np.linalg.norm(g))
            cosines.append(got @ g / np.linalg.norm(g) / np.linalg.norm(got))
        # Float32 products of two programs differ in their last bits, and codes near a bound with
        # them: a code in ten thousand by one level.
        assert found[name].error == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=1e-3)
        assert found[name].bias == found[name].error
        assert found[name].cosine == pytest.approx(np.mean(cosines), abs=1e-4)
        spread = abs(errors[0] - errors[1]) / 2
        assert found[name].uncertainty == pytest.approx(spread, rel=0.05, abs=1e-4)
    # Codes can be measured in single layers.
    assert found["nowhere"].error == 0
    assert 0 < found["first"].error < found[WHOLE].error


def test_the_bias_of_random_rounding_is_below_its_error(model, rounded):
    choices = by_site(rounded.storage, TINY.num_layers)
    assert list(choices) == [WHOLE]
    several, single = (
        measure(rounded, rounded.storage, model, batches(1), choices, keys=n)[WHOLE] for n in (8, 1)
    )
    assert 0 <= several.bias < several.error / 2
    assert math.isnan(several.uncertainty)
    # One gradient of a random code tells nothing of its mean.
    assert math.isnan(single.bias)
    assert single.error > 0


def test_bad_measurements_are_refused(model, rounded):
    choices = by_site(rounded.storage, TINY.num_layers)
    huge = jax.tree.map(lambda x: np.asarray(x) * np.float32(1e30), model)
    for weights, data, keys, message in (
        (huge, batches(1), 1, r"exact gradient on batch 0 .* activations .* overflow"),
        (model, [], 1, "`batches` must have at least one"),
        (model, batches(1), 0, "`keys` must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(rounded, rounded.storage, weights, data, choices, keys=keys)


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """A folder with a checkpoint, its tokenizer, records and a text that is too short."""
    folder = tmp_path_factory.mktemp("checkpoint")
    huggingface.save(model, folder)
    records = [{"q": f"what is {n} times {n}", "a": str(n * n)} for n in range(60)]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "short.txt").write_text("a\n\nb")
    train_bpe([" ".join(one.values()) for one in records], 300).save(folder)
    return folder


def planned(folder, data="records.jsonl", template="{q}\\n{a}", tokenizer=None, **changes):
    data = DataConfig(data=str(folder / data), tokenizer=tokenizer)
    train = dataclasses.replace(ROUNDED, data=data)
    budget = changes.pop("budget", "")
    if budget:
        train = dataclasses.replace(train, options=MethodOptions())
    how = MeasureConfig(template=template, batches=1, keys=2, **changes)
    console = quiet()
    train = dataclasses.replace(train, checkpoint=str(folder), budget=budget)
    config = PlanConfig(train, measuring=how)
    return run(config, console), console.file.getvalue()


def test_plans_of_a_checkpoint_are_measured(checkpoint):
    done, text = planned(checkpoint, measure=True)
    assert done
    for word in ("peak", "error", "cosine", "bias", "1 batches of 2 x 16 tokens"):
        assert word in text


def test_a_budget_and_an_error_choose_a_plan_or_say_why_not(checkpoint, capsys, monkeypatch):
    def errors(self, config):
        error = 0.01 if config.options.codec[0].startswith("Quantized(8") else 0.5
        return {WHOLE: GradientError(error, 1.0, error, math.nan)}

    def found(train, *_, accept, **__):
        for bits in (2, 8):
            options = MethodOptions(codec=(f"Quantized({bits}, group=16)",))
            one = Compiled(dataclasses.replace(train, options=options), 1, 0, 0, 0, {})
            if accept(one):
                return Found(one, [one], None)
        return Found(None, [], None)

    monkeypatch.setattr(plan, "search", found)
    monkeypatch.setattr(measured.Measured, "errors", errors)
    memory = StepMemory(1, 1, 1, 1, 1)
    monkeypatch.setattr(tables, "make_plan", lambda config: Plan(config, memory, 1))
    done, text = planned(checkpoint, budget="1GiB", error=1e-9)
    assert not done
    assert "the error of none is at most 1e-09: raise `--error` or `--budget`" in text
    tokenizer = checkpoint / "tokenizer.json"
    done, text = planned(checkpoint, tokenizer=tokenizer, budget="1GiB", error=0.1)
    assert done
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    assert command[:5] == ["python", "-m", "train.finetune", "--checkpoint", str(checkpoint)]
    assert "--model" not in command
    assert command[command.index("--codec") + 1] == "Quantized(8, group=16)"
    assert command[command.index("--tokenizer") + 1] == str(tokenizer)
    assert command[-4:] == ["--prompt-template", "", "--completion-template", "{q}\\n{a}"]
    read = cli.parse(FinetuneConfig, "train.finetune", args=command[3:])
    assert (read.data.prompt_template, read.data.completion_template) == ("", "{q}\\n{a}")


def test_average_bits_are_chosen_before_they_are_measured(model, checkpoint, monkeypatch):
    bits = dict.fromkeys(METHODS["lean"].adaptive, 8)
    chooser = SimpleNamespace(choose=lambda model, batch, step: bits)
    monkeypatch.setattr(measured, "site_chooser", lambda recipe: chooser)
    monkeypatch.setattr(measured, "measure", lambda recipe, *_, **__: recipe.bits)
    options = MethodOptions(average_bits=2, codec=("Quantized(group=16)",))
    train = dataclasses.replace(TRAIN, model=str(checkpoint), options=options)
    known = measured.Measured(model, tuple(batches(1)), MeasureConfig(measure=True))
    assert known.errors(train) == bits


def test_text_of_a_token_and_settings_that_do_not_fit_are_refused(checkpoint):
    with pytest.raises(ValueError, match=r"`--seq-len` is 16, so a row takes 17 tokens"):
        planned(checkpoint, data="short.txt", template="", measure=True)
    with pytest.raises(ValueError, match=r"there is no field 'x'"):
        planned(checkpoint, template="{x}", measure=True)
    with pytest.raises(ValueError, match="`--model` has no effect with `--checkpoint`"):
        dataclasses.replace(TRAIN, model="llama_60m", checkpoint="x")
    trained = dataclasses.replace(TRAIN, model=PretrainConfig.model, checkpoint="x")
    for changes, message in (
        ({"measuring": MeasureConfig(measure=True)}, "`--measure` needs trained weights"),
        ({"train": trained, "measuring": MeasureConfig(error=0.1)},
         "`--error 0.1` is for the search of `--budget`"),
        ({"train": trained, "measuring": MeasureConfig(keys=2)},
         "`--keys` has no effect without `--measure`"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            PlanConfig(**{"train": TRAIN, **changes})
    for changes in ({"batches": 0}, {"keys": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            MeasureConfig(**changes)
    with pytest.raises(ValueError, match="`--error` must be in"):
        MeasureConfig(error=-1.0)
