"""Runs of models whose feed-forward weights are stored wider than they are published."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import models.config
from actjax._core.paths import named_leaves
from actjax.optim.states.stored import decoded
from models import Decoder, ModelConfig
from models.padding import count_parameters
from tests.train import steps
from train.run.begin import stored_form
from train.run.calibration import calibrate
from train.run.checkpoint import Checkpoints
from train.run.export import read_trained
from train.run.optimizer import make_optimizer
from train.run.recipe import make_recipe
from train.run.report import print_model
from train.run.saved_settings import as_json
from train.run.step import make_refresh_step, make_train_step, model_of
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig
from train.settings.options import MethodOptions

WIDTH, STORED = 100, 104
MODEL = ModelConfig(61, 64, WIDTH, num_layers=2, num_heads=4)
"""Large enough for moments in few bits."""


def published(patch: pytest.MonkeyPatch) -> None:
    """Stores widths as they are published, as earlier versions did."""
    patch.setattr(models.config, "NARROW_MULTIPLE", 1)


def train(config, count: int, model: ModelConfig = MODEL):
    """Returns the recipe of a run, its state after some steps, and their losses."""
    recipe = make_recipe(config, model)
    state, losses = steps.first_state(recipe), []
    if recipe.method.calibrates:
        whole = jax.jit(functools.partial(model_of, recipe))(state)
        batches = [steps.batch()]
        measured = calibrate(recipe.storage, whole, batches, "float32")
        state = dataclasses.replace(state, calibration=measured)
    step, refresh = (jax.jit(make(recipe)) for make in (make_train_step, make_refresh_step))
    for i in range(count):
        state, metrics = (refresh if recipe.refreshes(i) else step)(state, steps.batch())
        losses.append(float(metrics["loss"]))
    return recipe, state, losses


def largest_in_padding(tree) -> dict[str, float]:
    """Returns the largest number beyond `WIDTH` on each axis of the stored width, by path."""
    found = {}
    for name, x in named_leaves(jax.jit(decoded)(tree)).items():
        if jax.dtypes.issubdtype(x.dtype, np.floating):
            for axis in range(x.ndim):
                if x.shape[axis] == STORED:
                    tail = np.take(np.float64(x), range(WIDTH, STORED), axis)
                    found[name] = max(found.get(name, 0.0), float(np.abs(tail).max()))
    return found


def with_optimizer(**settings):
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, **settings)
    return dataclasses.replace(steps.CONFIG, optimizer=optimizer)


HYC_LORA = FinetuneConfig(
    checkpoint="x", method="hyc_lora", options=MethodOptions(level="intra"), batch_size=4,
    seq_len=16, compute_dtype="float32", adapter=AdapterConfig(lora_rank=2),
    optimizer=steps.CONFIG.optimizer,
)  # fmt: skip
REBUILT = dataclasses.replace(HYC_LORA, options=MethodOptions(level="intra+inter"))


def with_codec(method: str, *codec: str):
    """Returns a run whose codec may decode zeros as other numbers; balanced codes do not."""
    options = dataclasses.replace(steps.with_method(method).options, codec=codec)
    return dataclasses.replace(steps.CONFIG, method=method, options=options)


PLAIN = "Quantized(4, rotate=False, balance=False)"
METHODS = {
    **{
        name: steps.with_method(name)
        for name in ("lean", "gact", "subspace", "random_projection", "lean_subspace", "pamm",
                     "low_rank", "galore", "remat", "lean_remat")
    },
    "lean, plain": with_codec("lean", PLAIN),
    "gact, plain": with_codec("gact", PLAIN),
    "mlp_out plain": with_codec("low_rank", f"mlp_out={PLAIN}"),
    "mlp_out projected": with_codec("low_rank", "mlp_out=RandomProjection(4)"),
    "mlp_out as a few tokens": with_codec("low_rank", "mlp_out=PointApproximation(points=3)"),
    "hyc_lora": HYC_LORA,
    "hyc_lora, rebuilt": REBUILT,
    "lora, dropout": dataclasses.replace(
        HYC_LORA, method="lora", options=MethodOptions(),
        adapter=AdapterConfig(lora_rank=2, lora_dropout=0.25),
    ),
}  # fmt: skip
OPTIMIZERS = {
    "adamw": with_optimizer(),
    "adamw, 8bit": with_optimizer(moment_dtype="8bit"),
    "adamw, 4bit": with_optimizer(moment_dtype="4bit"),
    "adamw, 8bit-factored": with_optimizer(moment_dtype="8bit-factored"),
    "adamw, 4bit-factored": with_optimizer(moment_dtype="4bit-factored"),
    **{name: with_optimizer(optimizer=name) for name in ("lion", "muon", "adafactor", "fira")},
}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lean, plain", 5),
        *(
            pytest.param(name, 100, marks=pytest.mark.slow)
            for name in (*METHODS, *OPTIMIZERS)
        ),
    ],
)  # fmt: skip
def test_the_padding_stays_zero(name, count):
    _, state, losses = train((METHODS | OPTIMIZERS)[name], count)
    assert losses[-1] < losses[0]
    weights = largest_in_padding(state.model)
    assert weights
    assert not any(weights.values()), weights
    moments = {
        path: x
        for path, x in largest_in_padding(state.optimizer).items()
        if ".bases." not in f".{path}"  # Rows of random bases.
    }
    # Factored second moments add 1e-30 to each square, so that none is divided by zero.
    floor = 1.01e-30 if name.endswith(("adafactor", "factored")) else 0
    assert max(moments.values()) <= floor, moments


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_updates_of_the_padding_are_zero_whatever_its_gradient(name):
    tx = make_optimizer(OptimizerConfig(optimizer=name, moment_dtype="float32"), 10, model=MODEL)

    @jax.jit
    def updates():
        model = Decoder(MODEL, jax.random.key(0))
        gradient = jax.tree.map(jnp.ones_like, model)
        return tx.update(gradient, tx.init(model), model)[0]

    padding = largest_in_padding(updates())
    assert len(padding) == 3
    assert not any(padding.values())


def test_the_losses_are_those_of_the_published_width(monkeypatch):
    """Sums of another length are added in another order: one unit in the last place."""
    _, state, padded = train(steps.CONFIG, 20)
    with monkeypatch.context() as patch:
        published(patch)
        _, plain_state, plain = train(steps.CONFIG, 20)
    np.testing.assert_allclose(padded, plain, rtol=1e-6)
    counts = (count_parameters(x.model, MODEL) for x in (state, plain_state))
    assert next(counts) == next(counts) == sum(x.size for x in jax.tree.leaves(plain_state.model))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lean", "gact", "pamm", "low_rank"])
def test_with_codes_the_losses_are_near_those_of_the_published_width(method, monkeypatch):
    _, _, exact = train(steps.CONFIG, 20)
    _, _, padded = train(steps.with_method(method), 20)
    with monkeypatch.context() as patch:
        published(patch)
        _, _, plain = train(steps.with_method(method), 20)
    assert padded[0] == pytest.approx(plain[0], rel=1e-5)  # No step has read a code.
    error = np.abs(np.subtract(plain, exact)).max()
    assert np.abs(np.subtract(padded, exact)).max() <= 1.5 * error + 1e-3


def test_a_run_that_stored_no_padding_is_refused(tmp_path, monkeypatch):
    def identity(model):
        return as_json({"model": model, **stored_form(model)})

    small = jax.device_put({"w": np.arange(6, dtype=np.float32)})
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        published(patch)
        assert stored_form(MODEL) == {}
        checkpoints.save(1, small, {"next": 1}, identity(MODEL))
    with pytest.raises(ValueError, match=rf"None there, {STORED} now.*stored feed-forward weights"):
        checkpoints.restore(1, small, identity(MODEL))
    checkpoints.close()


def test_the_model_of_a_run_that_stored_no_padding_is_read(tmp_path, monkeypatch):
    def drawn():
        return jax.jit(lambda: Decoder(MODEL, jax.random.key(0)))()

    with monkeypatch.context() as patch:
        published(patch)
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        identity = as_json({"model": MODEL, "optimizer": {}})
        checkpoints.save(1, {"model": drawn()}, {}, identity)
        checkpoints.close()
    _, trained = read_trained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, trained.arrays, drawn())


def test_the_opening_speaks_of_the_published_width():
    recipe = make_recipe(steps.CONFIG, MODEL)
    console = Console(file=io.StringIO(), width=140)
    print_model(console, recipe, jax.eval_shape(functools.partial(steps.first_state, recipe)))
    text = console.file.getvalue()
    assert f"feed-forward width: {WIDTH}, stored as {STORED} with zeros" in text
