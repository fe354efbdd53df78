"""Tests of `actjax.compress`: limits are kept as measured from outside, and nothing is lost.

A measurement compiles up to seven gradients, so tests share one or measure a loss of few arrays.
"""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import assert_messages
from residuals.residual_helpers import normal, relative_error

import actjax
from actjax.choosing.alternatives import fewer_codes
from actjax.choosing.choice import KEEP, Choice, Tried, preferred
from actjax.choosing.compress import parse_bytes
from actjax.choosing.measure import BoundLoss, worst_error
from actjax.codecs.levels import AnyLevels
from actjax.residuals.graph.products import product_flops

LAYERS, TOKENS, WIDTH = 6, 512, 32
PARAMS = {
    "up": normal(1, LAYERS, WIDTH, 4 * WIDTH) / np.float32(WIDTH**0.5),
    "down": normal(2, LAYERS, 4 * WIDTH, WIDTH) / np.float32(2 * WIDTH),
}
X = normal(0, TOKENS, WIDTH)


def loss(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(jnp.sin(jax.lax.scan(layer, x, params)[0]))


MATRICES = {"up": PARAMS["up"][0], "down": PARAMS["down"][0]}


def mlp(params, x):
    """A loss of few arrays, for what does not depend on the model."""
    return jnp.mean(jnp.sin(jnp.tanh(x @ params["up"]) @ params["down"]))


def compiled(fun):
    """Returns value and gradient, and the bytes of the temporaries."""
    program = jax.jit(jax.value_and_grad(fun)).lower(PARAMS, X).compile()
    return *program(PARAMS, X), program.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def small():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return actjax.compress(loss, error=0.05, verbose=False).measure(PARAMS, X)


def test_the_error_is_within_the_bound_and_the_memory_below_both_rivals(small):
    (value, got, memory), (exact, gradient, plain) = compiled(small), compiled(loss)
    assert value == exact
    assert relative_error(got, gradient) <= 0.05
    # The measured error is also that of each array over its own norm.
    assert relative_error(got, gradient) <= small.choice.chosen.error * 1.02
    shares = {name: relative_error(got[name], gradient[name]) for name in PARAMS}
    assert sum(e**2 for e in shares.values()) / 2 <= (small.choice.chosen.error * 1.02) ** 2
    by_name = {t.name: t for t in small.choice.tried}
    assert set(by_name) == {"exact", "codes", "remat", "remat and codes"}
    assert small.choice.chosen.memory <= 1.05 * min(t.memory for t in small.choice.tried)
    assert memory < plain / 2
    assert by_name["remat"].recomputed > 0.4
    assert by_name["codes"].recomputed == 0


def test_the_tables_say_what_is_stored(small):
    text = str(small)
    for word in ("exact", "remat and codes", "gradient error", "bits", "carry", "float32[512,128]"):
        assert word in text, word
    assert str(actjax.compress(loss, error=0.1)).endswith("not measured yet")


def test_with_a_budget_no_more_is_computed_again_than_it_needs():
    def unrolled(params, x):
        for i in range(3):
            x = x + jnp.sin(jnp.tanh(x @ params["up"][i]) @ params["down"][i])
        return jnp.mean(jnp.sin(x))

    def products(fun, *args):
        return product_flops(jax.make_jaxpr(fun)(*args).jaxpr)

    # On this device memory falls with the products that are computed again: from 100 to 75 bytes.
    least = products(jax.grad(unrolled), PARAMS, X)
    judge = lambda fun, *args: round(100 * least / products(fun, *args))  # noqa: E731
    small = actjax.compress(unrolled, budget=88, error=1e-9, memory=judge, verbose=False)
    small.measure(PARAMS, X)
    tried = {t.name: t for t in small.choice.tried}
    assert small.choice.name == "remat in part"
    assert tried["exact"].memory == 100
    assert 80 < tried["remat in part"].memory <= 88
    assert 0 < small.choice.share < 1
    assert 0.2 < tried["remat in part"].recomputed < 0.8
    assert Choice.from_dict(small.choice.to_dict()).remat_settings.share == small.choice.share
    run = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (small, unrolled)])
    assert relative_error(*run(PARAMS, X)) < 1e-6


def test_it_warns_where_many_gradients_are_zero():
    start = PARAMS | {"down": np.zeros_like(PARAMS["down"])}
    early = actjax.compress(loss, error=0.05, remat=False, verbose=False)
    with pytest.warns(UserWarning, match=r"gradient of 50% of the parameters is zero on this"):
        early.measure(start, X)


def test_a_gradient_that_is_not_finite_measures_nothing():
    fun = actjax.compress(mlp, error=0.05, remat=False, verbose=False)
    for bad in (np.nan, np.inf):
        x = X.copy()
        x[0, 0] = bad
        with pytest.raises(ValueError, match=r"exact gradient of the measured batch is not finite"):
            fun.measure(MATRICES, x)
        assert fun.choice is None


def test_a_choice_of_other_code_is_refused(small):
    moved = actjax.compress(mlp, error=0.05)
    moved.choice = small.choice
    with pytest.raises(ValueError, match=r"arrays that bits were chosen for are not in this"):
        jax.eval_shape(jax.grad(moved), MATRICES, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.grad(small), PARAMS, X)


def test_a_choice_comes_back_from_a_checkpoint(small):
    other = actjax.compress(loss, error=0.05)
    other.choice = Choice.from_dict(json.loads(json.dumps(small.choice.to_dict())))
    assert other.choice == small.choice
    programs = [str(jax.make_jaxpr(jax.grad(f))(PARAMS, X)) for f in (small, other)]
    assert programs[0] == programs[1]
    with pytest.raises(ValueError, match="a Choice has the entries"):
        Choice.from_dict({"bits": {}})


def test_a_budget_that_nothing_meets_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"`budget` of 1\.00 KiB.*exact: .*codes: .*Raise"):
        actjax.compress(mlp, "1KiB", 0.5, remat=False, verbose=False).measure(MATRICES, X)


def test_the_first_call_with_arrays_measures_and_one_within_jit_is_refused():
    small = actjax.compress(mlp, budget="1 GiB", verbose=False)
    with pytest.raises(ValueError, match=r"is within jit .*call `\.measure"):
        jax.eval_shape(jax.grad(small), MATRICES, X)
    assert small.choice is None
    got = jax.grad(small)(MATRICES, X)
    # Plain JAX meets the budget, so nothing changes.
    assert small.choice.name == "exact"
    assert [t.name for t in small.choice.tried] == ["exact"]
    assert relative_error(got, jax.jit(jax.grad(mlp))(MATRICES, X)) < 1e-5


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.norm(self.linear(x))))


def test_the_state_of_a_module_moves_as_in_flax_and_measuring_leaves_it_alone():
    def mean(model, x):
        y = model(x)
        return jnp.mean(y**2), y.shape

    make = nnx.jit(lambda: Net(nnx.Rngs(0)))
    models = [make() for _ in range(2)]
    small = actjax.compress(mean, error=0.05, has_aux=True, remat=False, verbose=False)
    small.measure(models[0], X)
    assert int(models[0].drop.rngs.count[...]) == 0
    assert not models[0].norm.mean[...].any()
    results = [
        nnx.jit(nnx.value_and_grad(f, has_aux=True))(m, X)
        for f, m in zip((small, mean), models, strict=True)
    ]
    np.testing.assert_allclose(results[0][0][0], results[1][0][0], rtol=1e-6)
    assert relative_error(results[0][1], results[1][1]) <= 0.06
    assert int(models[0].drop.rngs.count[...]) == 1
    assert models[0].norm.mean[...].any()
    np.testing.assert_allclose(models[0].norm.mean[...], models[1].norm.mean[...], rtol=1e-6)


def test_messages():
    of = functools.partial
    calls = [
        (of(actjax.compress, loss), "needs `budget`, such as '4GiB', or `error`"),
        (of(actjax.compress, loss, "4 elephants"), "must be like '4GiB', '500MB'"),
        (of(actjax.compress, loss, -1), "positive number of bytes, got -1"),
        (of(actjax.compress, loss, error=2),
         "`error` of compress must be a number between 0 and 1, got 2"),
        (of(actjax.compress, loss, error="5%"), "must be a number between 0 and 1, got '5%'"),
        (of(actjax.compress, loss, error=0.1, codec=actjax.Quantized(4, rounding="dither")),
         "must not draw random numbers"),
    ]  # fmt: skip

    def measure(fun, *args, **options):
        return lambda: actjax.compress(fun, 0.5, 0.1, **options).measure(*args)

    assert_messages(ValueError, [
        *calls,
        (measure(lambda params, x: x @ params["up"][0], PARAMS, X),
         "must return a floating point scalar, got float32[512"),
        (measure(loss, PARAMS, X, has_aux=True), "scalar and auxiliary data"),
        (measure(loss, PARAMS, X, argnums=2), "`argnums` is (2,), but there are 2 arguments"),
        (measure(lambda n: jnp.sum(n) * 1.0, np.arange(3)),
         "no floating point array to differentiate"),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (of(actjax.compress, loss, error=0.1, argnums="p"), "`argnums` of compress must be"),
        (of(actjax.compress, 3, error=0.1), "`fun` of compress must be a function, got 3"),
        (of(actjax.compress, loss, error=0.1, memory=3), "`memory` of compress must be a function"),
        (of(actjax.compress, loss, error=0.1, has_aux="x"), "`has_aux` of compress must be True"),
        (of(actjax.compress, loss, error=0.1, codec=actjax.Exact()), "must be an actjax.Quantized"),
    ])  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    array: jax.Array


def test_a_scalar_within_a_node_is_one():
    bound = BoundLoss(lambda w: Named(jnp.sum(w**2)), (jnp.ones(3),), (0,), False)
    np.testing.assert_allclose(bound.gradient(None)(bound.leaves)[0], 2 * np.ones(3))


def test_no_bits_are_chosen_for_masks():
    fun = lambda w, x: jnp.sum(jnp.where(x @ w > 0, jnp.sin(x @ w), 0.0))  # noqa: E731
    found = BoundLoss(fun, (jnp.ones((64, 64)), jnp.ones((64, 64))), (0,), False).candidates(None)
    assert {what.dtype for what in found} == {"float32"}


def test_second_derivatives_and_forward_mode_are_refused(small):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda p: small(p, X), (PARAMS,), (PARAMS,))
    second = jax.grad(lambda p: jnp.sum(jax.grad(small)(p, X)["up"] ** 2))
    with pytest.raises(Exception, match=r"[Ss]econd derivative"):
        jax.eval_shape(second, PARAMS)


def test_bytes():
    assert [parse_bytes(b) for b in ("4GiB", "500 MB", "1.5kib", 7, "8")] == [
        2**32, 500_000_000, 1536, 7, 8,
    ]  # fmt: skip


def test_an_array_whose_small_gradient_is_wrong_counts_as_much_as_a_large_one():
    exact = [np.full(100, size, np.float32) for size in (1, 0.1, 1e-6)]
    assert float(worst_error(exact, exact)) == 0
    wrong = [exact[0], exact[1] * 1.3, exact[2]]
    # A third of the parameters, 30% each; the whole gradient is wrong by 3%.
    assert float(worst_error(wrong, exact)) == pytest.approx(0.3 / 3**0.5, rel=1e-5)
    # A gradient of rounding errors does not count, and the norm of the whole does.
    assert float(worst_error([*exact[:2], -exact[2]], exact)) < 1e-3
    assert float(worst_error([exact[0] * 1.4, *exact[1:]], exact)) > 0.39
    zeros = [np.zeros(3, np.float32)]
    assert float(worst_error(zeros, zeros)) == 0
    assert float(worst_error([np.ones(3, np.float32)], zeros)) == 1


def test_fewer_codes_are_one_step_more_for_each_array():
    assert fewer_codes({"a": 6, "b": 8, "c": KEEP}) == {"a": 8, "b": KEEP, "c": KEEP}


def test_any_number_of_levels_is_rounded_as_by_the_codec_with_these_bits():
    @functools.partial(jax.jit, static_argnums=0)
    def both(codec, x, top):
        any_levels = AnyLevels(top, codec)
        code = any_levels.encode(x)
        return code, any_levels.decode(code), codec.decode(codec.encode(x))

    x = normal(4, 2, 5, 37)
    for rotate, bits in ((False, 2), (True, 3), (False, 8)):
        codec = actjax.Quantized(bits, group=16, rotate=rotate)
        code, decoded, want = both(codec, x, np.float32(2.0**bits - 1))
        np.testing.assert_array_equal(decoded, want)
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(code))
        assert stored == AnyLevels(15.0, codec).stored_bytes(x.shape, x.dtype)


def test_which_way_is_preferred():
    exact, codes = Tried("exact", 100, 0.0, 0.0), Tried("codes", 20, 0.05, 0.0)
    remat = Tried("remat", 20, 0.0, 0.9)
    every = [exact, codes, remat]
    assert preferred(every, None, 0.05) is codes
    assert preferred(every, None, 0.01) is remat
    assert preferred(every, 100, 0.05) is exact
    assert preferred(every, 50, 0.05) is codes
    assert preferred(every, 10, 0.05) is None
    noisy = dataclasses.replace(codes, error=float("nan"))
    missed = dataclasses.replace(codes, error=0.0501)
    assert preferred([noisy], None, 0.05) is preferred([missed], None, 0.05) is None
