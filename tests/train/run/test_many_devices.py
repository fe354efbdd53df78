"""Every method on several devices: the loss of one, and memory and traffic that scale.

The model is wide enough that what every device holds whole, such as keys and norms, is small.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig
from train.planning.collectives import bytes_by_kind
from train.run.loop import compile_step
from train.run.recipe import make_recipe
from train.run.report import tree_bytes
from train.run.sharding import batch_sharding, make_mesh, state_shardings
from train.run.step import init_state, make_refresh_step
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import MethodOptions, used_options

MODEL = ModelConfig(
    vocab_size=96, hidden_size=64, ffn_size=160, num_layers=4, num_heads=8, num_kv_heads=4
)
ROWS, LENGTH, DEVICES, FSDP = 4, 32, 4, "fsdp=4"
OPTIONS = MethodOptions(rank=16, gap=3)
"""Ranks and refreshes that the small model can have."""
CODED = ("gact", "lean", "lean_remat", "lean_subspace", "hyc_lora")
"""Methods that store few bits, in groups that the small model can have."""
FAST = ("exact", "lean_subspace", "qlora")
"""Methods that are tested at every change: together they have every part."""

every_method = pytest.mark.parametrize(
    "method", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)


def recipe_of(method, **changes):
    settings = {
        "method": method,
        "options": dataclasses.replace(
            used_options(method, OPTIONS), codec=("Quantized(group=16)",) if method in CODED else ()
        ),
        "batch_size": ROWS,
        "seq_len": LENGTH,
        "steps": 20,
        "weight_dtype": "float32",
        "compute_dtype": "float32",
        # Adam's first updates are as large as the rate even where the gradient is rounding error.
        "optimizer": OptimizerConfig(learning_rate=3e-3, warmup_steps=1),
        **changes,
    }
    if METHODS[method].adapters:
        adapter = AdapterConfig(lora_rank=4)
        return make_recipe(FinetuneConfig(checkpoint="x", adapter=adapter, **settings), MODEL)
    return make_recipe(PretrainConfig(**settings), MODEL)


@functools.cache
def initial(method):
    """Returns a function that makes the first state; the steps donate what it makes."""

    def make():
        state = init_state(recipe_of(method))
        if state.calibration is None:
            return state
        one = {jnp.dtype("uint16"): 0x3F80}  # The bits of 1 in bfloat16.
        ones = jax.tree.map(lambda x: jnp.full_like(x, one.get(x.dtype, 1)), state.calibration)
        return dataclasses.replace(state, calibration=ones)

    return jax.jit(make)


@functools.cache
def program(method, mesh):
    """Returns the compiled step of a method."""
    recipe = recipe_of(method)
    shapes = jax.eval_shape(functools.partial(init_state, recipe))
    over = make_mesh(mesh)
    return compile_step(recipe, over, shapes, state_shardings(shapes, over)), shapes


def sizes(program) -> tuple[int, int]:
    """Returns the bytes of the arguments of a program and of its temporaries."""
    analysis = program.memory_analysis()
    return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


@every_method
def test_weights_states_and_activations_are_divided_among_the_devices(method):
    one, shapes = program(method, "")
    (whole, activations), (part, temporaries) = map(sizes, (one, program(method, FSDP)[0]))
    # Every device has scalars, keys and the batch. A tenth more, as the library promises.
    assert part <= 1.1 * whole / DEVICES
    assert tree_bytes(shapes) <= whole
    assert temporaries < activations


@every_method
def test_each_weight_is_gathered_at_most_three_times(method):
    """Forward pass, backward pass and update.

    If a stack of layers were gathered whole, it would be once for each layer, of which there are
    four.
    """
    step, shapes = program(method, FSDP)
    weights = tree_bytes((shapes.frozen, shapes.model))
    assert bytes_by_kind(step.as_text())["all-gather"] <= 3 * weights


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_xla_knows_how_to_divide_every_array(method, capfd):
    """Otherwise it says so, and gives the array whole to every device."""
    program.__wrapped__(method, "fsdp=2,tensor=2")
    assert "Involuntary" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "method", ["lean_subspace", pytest.param("lean_remat", marks=pytest.mark.slow)]
)
def test_devices_that_share_sequences_divide_weights_and_exchange_heads(method):
    one, shapes = program(method, "")
    step = program(method, f"seq={DEVICES}")[0]
    assert sizes(step)[0] <= 1.1 * sizes(one)[0] / DEVICES
    # Weights are gathered and gradients are scattered as for `fsdp`.
    moved = bytes_by_kind(step.as_text())
    assert moved["all-gather"] <= 3 * tree_bytes((shapes.frozen, shapes.model))
    # Queries, keys, values and the output of attention, of which a device has a part. They are
    # exchanged in both passes, in the second forward pass of attention, and as cotangents.
    heads = 2 * MODEL.num_heads + 2 * MODEL.num_kv_heads
    exchanged = ROWS * LENGTH * heads * MODEL.head_size * 4 // DEVICES * MODEL.num_layers
    # In blocks, as on a CPU, attention exchanges cotangents of queries once for each key block.
    assert moved["all-to-all"] <= (3 + 2) * exchanged


FAST_LOSSES = (("qlora", FSDP), ("exact", "data=2,fsdp=2"))
SLOW_LOSSES = [
    pytest.param(method, mesh, marks=pytest.mark.slow)
    for method in METHODS
    for mesh in (FSDP, "data=2,fsdp=2", "tensor=2,seq=2")
    if (method, mesh) not in FAST_LOSSES
]


@pytest.mark.parametrize(("method", "mesh"), [*FAST_LOSSES, *SLOW_LOSSES])
def test_the_loss_is_that_of_one_device(method, mesh):
    # Codes round: a last bit of an activation can change a code, and then the gradient.
    rounds = method in CODED
    expected, got = losses(method, ""), losses(method, mesh)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, atol=5e-3 if rounds else 1e-5)


@functools.cache
def losses(method, mesh, steps=4):
    """Returns the losses of the first steps, of which the fourth is a refresh."""
    recipe, over = recipe_of(method), make_mesh(mesh)
    step, shapes = program(method, mesh)
    shardings = state_shardings(shapes, over)
    state = jax.device_put(initial(method)(), shardings)
    draw, found = np.random.default_rng(0), []
    with jax.set_mesh(over):
        refresh = jax.jit(make_refresh_step(recipe), out_shardings=(shardings, None))
        for i in range(steps):
            tokens = draw.integers(0, MODEL.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
            counted = np.arange(LENGTH) < draw.integers(4, LENGTH + 1, (ROWS, 1))
            batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:],
                     "mask": counted.astype(np.float32)}  # fmt: skip
            if recipe.config.pretrained:
                batch["segments"] = np.ones((ROWS, LENGTH), np.int32)
            batch = jax.device_put(batch, batch_sharding(over))
            state, metrics = (refresh if recipe.refreshes(i) else step)(state, batch)
            # Two programs at once can wait for each other's devices on fewer cores.
            state = jax.block_until_ready(state)
            found.append(float(metrics["loss"]))
    return found
