"""Gradients of adapters with rematerialization and with codes in host memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG as MODEL
from tiny import add_noise

import actjax
from models import Storage
from models.block import Positions
from models.layers import layer_function
from tests.train.steps import batch
from train.run.calibration import calibrate
from train.run.loss import Context
from train.run.recipe import Recipe, make_recipe
from train.run.step import gradient_function, init_state, model_of
from train.settings.config import AdapterConfig, FinetuneConfig
from train.settings.options import MethodOptions

OUTLIERS = tuple(f"{site}_norm=Quantized(outlier_fraction=0.1)" for site in ("attention", "mlp"))


def recipe(method: str, **options) -> Recipe:
    config = FinetuneConfig(
        checkpoint="x", method=method, options=MethodOptions(**options), batch_size=4, seq_len=16,
        compute_dtype="float32", adapter=AdapterConfig(lora_rank=2),
    )  # fmt: skip
    return make_recipe(config, MODEL)


@functools.cache
def state_of(method: str):
    """Returns a state whose adapters have an effect, without a calibration."""

    @jax.jit
    def make():
        state = init_state(recipe(method))
        adapters = add_noise(state.model, 3, 0.1)
        return dataclasses.replace(state, model=adapters, calibration=None)

    return make()


@functools.cache
def calibration():
    """Calibrates `hyc_lora` in two bits, with outlier channels in the inputs of norms."""
    one = recipe("hyc_lora", codec=OUTLIERS)
    model = jax.jit(functools.partial(model_of, one))(state_of("hyc_lora"))
    return calibrate(one.storage, model, [batch()], "float32")


def gradient(one: Recipe, sites: tuple[str, ...] = ()):
    """Returns the loss and the gradient of the adapters; `sites` are calibrated."""
    state = state_of(one.config.method)
    scales = {site: calibration()[site] for site in sites} or None
    run = jax.jit(gradient_function(one, state, refresh=False))
    return run(state.model, batch(), jax.random.key(0), Context(state.frozen, scales))


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_rematerialization_leaves_the_gradient_of_adapters_exact(method):
    got, want = gradient(recipe(method, remat=True)), gradient(recipe(method))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, want)


@pytest.mark.slow
def test_codes_of_hyc_lora_in_host_memory_give_equal_bits():
    sites = tuple(calibration())
    here, away = (gradient(recipe("hyc_lora", offload=x), sites) for x in (False, True))
    jax.tree.map(np.testing.assert_array_equal, away, here)


def test_hyc_lora_with_rematerialization_has_the_gradient_at_the_decoded_block_inputs():
    one = recipe("hyc_lora", remat=True, offload=True, codec=("Quantized(outlier_fraction=0.1)",))
    loss, got = gradient(one, ("attention_norm",))
    state, data, scales = state_of("hyc_lora"), batch(), calibration()["attention_norm"]
    run_layer = layer_function(MODEL, Storage())
    positions, unused = Positions.of(MODEL, 16), jax.random.key(0)
    settings = {"levels": "normal", "rotate": True, "balance": True}
    code = actjax.Quantized(2, outlier_fraction=0.1, **settings)

    def decoded(x, i):
        step, centre, channels = (scales[name][i] for name in ("step", "centre", "channels"))
        codec = actjax.Calibrated(code, step, channels, centre)
        return codec.decode(codec.encode(x))

    @jax.jit
    def layer_by_layer(adapters, frozen):
        def model(adapters):
            return model_of(one, dataclasses.replace(state, model=adapters, frozen=frozen))

        def layer(adapters, x, i):
            block = jax.tree.map(lambda w: w[i], model(adapters).layers)
            return run_layer(block, x, positions, unused)

        def backward(carry, x_and_i):
            dx, total = carry
            x, i = x_and_i
            _, pullback = jax.vjp(functools.partial(layer, i=i), adapters, decoded(x, i))
            dadapters, dx = pullback(dx)
            return (dx, jax.tree.map(jnp.add, total, dadapters)), None

        layers = jnp.arange(MODEL.num_layers)
        first = model(adapters).embed(data["inputs"], "float32")
        last, inputs = jax.lax.scan(lambda x, i: (layer(adapters, x, i), x), first, layers)
        value, pullback = jax.vjp(
            lambda x: model(adapters).loss_after(x, data["targets"], mask=data["mask"]), last
        )
        start = (*pullback(jnp.float32(1)), jax.tree.map(jnp.zeros_like, adapters))
        (_, total), _ = jax.lax.scan(backward, start, (inputs, layers), reverse=True)
        return value, total

    want_loss, want = layer_by_layer(state.model, state.frozen)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), got, want)


def test_a_checkpoint_of_hyc_lora_tells_what_was_calibrated():
    def form(*codec, method="hyc_lora", **options):
        return recipe(method, codec=codec, **options).calibration_form

    # The folder of a run keeps it, so it cannot be resumed where it has another meaning.
    assert form() == form("Quantized(4)") == form(level="none") == {"scaling": "group"}
    published = "Quantized(4, scaling='channel')"
    by_channel = form(published)
    assert by_channel["scaling"] == "channel"
    normal = "Quantized(4, scaling='channel', levels='normal')"
    for other in (
        ("Quantized(2, scaling='channel')",),
        (published, "q=Quantized(5, scaling='channel')"),
        (normal,),
    ):
        assert form(*other) != by_channel
    assert form(method="qlora") == {}
