"""Tests of `bases`: inputs stored in a subspace, whose gradients are exact in that subspace."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    KEY,
    RP,
    SVD,
    WEIGHTS,
    XS,
    assert_same,
    by_path,
    mlp,
    mlp_params,
    normal,
    project,
    run_jitted,
    run_stack,
    stack,
    tanh_layer,
    total,
)
from tiny import batch, decoder

import actjax
from actjax import (
    Bases,
    Codec,
    Exact,
    LowRank,
    Residual,
    explain,
    input_groups,
    norm_linear,
    with_bases,
)
from actjax._math.precision import accumulation_dtype
from actjax.factored.low_rank import is_low_rank
from models import Storage


def exact_gradient(fun, *args):
    """Returns the gradient of `fun` with the codec `Exact`."""
    return jax.jit(jax.grad(functools.partial(fun, codec=Exact())))(*args)


def assert_in_basis(g: LowRank, name: str, basis: jax.Array, exact: jax.Array) -> None:
    """Checks that the left factor is the basis and the right one the projected exact gradient."""
    assert g.basis_name == name
    np.testing.assert_array_equal(g.left, basis)
    np.testing.assert_allclose(g.right, basis.mT @ exact, rtol=1e-10, atol=1e-10)


def qkv_loss(params, x, codec: Codec = Exact()):
    ys = project(x, (params["q"], params["k"], params["v"]), codec, name="attention_in")
    return total(*ys, project(jnp.tanh(ys[0]), params["o"], codec, name="attention_out"))


def norm_and_project(x, ws, codec: Codec):
    return norm_linear(x, jnp.ones(8), ws, codec=codec)


def qkv_params():
    return {
        name: normal(i, 8, n)
        for i, (name, n) in enumerate({"q": 8, "k": 4, "v": 4, "o": 8}.items())
    }


def test_with_a_basis_the_gradient_is_exact_with_any_codec(x64):
    params, x = qkv_params(), normal(5, 2, 6, 8)
    bases = {"k": normal(6, 8, 3), "o": normal(7, 8, 2)}
    losses = [functools.partial(qkv_loss, codec=codec) for codec in (Exact(), SVD)]
    runs = [actjax.value_and_grad(loss, bases=bases) for loss in losses]
    *results, (want_value, want) = run_jitted([*runs, jax.value_and_grad(qkv_loss)], params, x)
    for value, gradient in results:
        np.testing.assert_allclose(value, want_value, rtol=1e-13)
        for name, group in {"q": "k", "k": "k", "v": "k", "o": "o"}.items():
            assert_in_basis(gradient[name], group, bases[group], want[name])


def test_inputs_without_a_basis_keep_their_codec(x64):
    params, x, basis = qkv_params(), normal(5, 12, 8), normal(6, 8, 3)
    fun = functools.partial(qkv_loss, codec=SVD)
    runs = [actjax.value_and_grad(f, bases={"k": basis}) for f in (qkv_loss, fun)]
    functions = *runs, jax.grad(qkv_loss), jax.grad(fun)
    (_, plain), (_, gradient), exact, want = run_jitted(functions, params, x)
    for name in "qkv":
        assert_in_basis(gradient[name], "k", basis, exact[name])
    assert is_low_rank(gradient["o"])
    assert_same({"o": gradient["o"]}, {"o": want["o"]})
    assert_same({"o": plain["o"]}, {"o": exact["o"]})


def test_everything_else_is_exact_in_a_basis(x64):
    params, x, basis = mlp_params(), normal(5, 12, 8), normal(6, 8, 3)
    fun = functools.partial(mlp, codec=Exact())
    run = actjax.value_and_grad(fun, (0, 1), bases={"0.in.w": basis})
    got, (want, want_dx) = run_jitted([run, jax.grad(fun, (0, 1))], params, x)
    gradient, dx = got[1]
    assert_in_basis(gradient["in"].pop("w"), "0.in.w", basis, want["in"].pop("w"))
    assert_same((gradient, dx), (want, want_dx))


@pytest.mark.parametrize("operator", [project, norm_and_project])
def test_an_untapped_weight_of_the_call_gets_the_dense_projected_gradient(operator, x64):
    x, params, other = normal(0, 12, 8), {"w": normal(1, 8, 5)}, normal(2, 8, 4)
    basis = normal(3, 8, 3)

    def fun(params, other, codec: Codec = Exact()):
        return total(*operator(x, (params["w"], other), codec))

    functions = jax.grad(with_bases(fun, {"w": basis}), 1), jax.grad(fun, 1)
    got, want = run_jitted(functions, params, other)
    np.testing.assert_allclose(got, basis @ basis.T @ want, rtol=1e-10, atol=1e-10)


def test_stacked_bases_under_scan(x64):
    params, x, bases = stack(), normal(0, 12, 8), {"w": normal(3, 3, 8, 2)}

    def fun(params, codec=SVD):
        return total(run_stack(params, x, functools.partial(tanh_layer, codec=codec)))

    gradient = jax.jit(actjax.value_and_grad(fun, bases=bases))(params)[1]
    want = exact_gradient(fun, params)
    assert_in_basis(gradient["w"], "w", bases["w"], want["w"])
    np.testing.assert_allclose(gradient["b"], want["b"], rtol=1e-10, atol=1e-10)


REPEATED = {
    "a loop": lambda xs, w, codec: jax.lax.map(lambda x: project(x, w, codec), xs),
    "vmap": lambda xs, w, codec: jax.vmap(lambda x: project(x, w, codec))(xs),
    "twice in a call": lambda xs, w, codec: sum(project(xs, (w, w), codec)),
}


def test_with_a_basis_one_weight_may_have_many_inputs(x64):
    xs, params = normal(0, 4, 6, 8), {name: normal(1, 8, 5) for name in REPEATED}
    bases = {name: normal(2, 8, 3) for name in REPEATED}
    fun = lambda p: total(*(call(xs, p[name], Exact()) for name, call in REPEATED.items()))  # noqa: E731
    functions = actjax.value_and_grad(fun, bases=bases), jax.grad(fun)
    (_, gradient), want = run_jitted(functions, params)
    for name in REPEATED:
        assert_in_basis(gradient[name], name, bases[name], want[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8_bit_coordinates_err_by_at_most_half_a_level(dtype, x64):
    x, w, basis = normal(0, 12, 8, dtype=dtype), normal(1, 8, 12), normal(2, 8, 3, dtype=dtype)

    def trace(params):
        # The cotangent is the identity, so the right factor is the decoded input, transposed.
        return jnp.trace(project(x, params["w"], Exact()))

    run = jax.jit(actjax.value_and_grad(trace, bases=Bases({"w": basis}, bits=8)))
    decoded = np.asarray(run({"w": w})[1]["w"].right).T
    x, basis = np.asarray(x, np.float64), np.asarray(basis, np.float64)
    largest = np.abs(x @ basis).max(1, keepdims=True)
    # Half a level; the scale and the decoded value are rounded once each; sums of eight terms.
    rounding = jnp.finfo(dtype).eps * largest
    rounding = rounding + 8 * jnp.finfo(accumulation_dtype(dtype)).eps * np.abs(x) @ np.abs(basis)
    error = np.abs(decoded - x @ basis)
    assert np.all(error <= largest / 254 + rounding)
    assert error.max() > 0


def test_a_basis_takes_the_dtype_of_the_weight():
    x, w, basis = normal(0, 12, 8), normal(1, 8, 5, dtype=jnp.bfloat16), normal(2, 8, 3)
    fun = lambda params: total(project(x, params["w"], Exact()))  # noqa: E731
    gradient = jax.eval_shape(actjax.value_and_grad(fun, bases={"w": basis}), {"w": w})[1]["w"]
    assert gradient.left.dtype == gradient.right.dtype == "bfloat16"


def test_empty_bases_change_nothing():
    params, x = qkv_params(), normal(5, 12, 8)
    fun = functools.partial(qkv_loss, codec=RP)
    variants = [actjax.value_and_grad(fun, bases=bases) for bases in (None, {}, Bases({}))]
    programs = {
        str(jax.make_jaxpr(run)(params, x)) for run in (actjax.value_and_grad(fun), *variants)
    }
    assert len(programs) == 1


def test_with_bases_returns_the_value_and_no_gradient_of_tapped_weights(x64):
    params, x = qkv_params(), normal(5, 12, 8)
    stored = with_bases(qkv_loss, {"k": normal(6, 8, 3)})
    functions = jax.value_and_grad(stored), jax.value_and_grad(qkv_loss)
    (value, gradient), (want_value, want) = run_jitted(functions, params, x)
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    for name in "qkv":
        np.testing.assert_array_equal(gradient[name], 0)
    np.testing.assert_allclose(gradient["o"], want["o"], rtol=1e-10, atol=1e-12)
    assert stored.__name__ == "qkv_loss"


# Input groups.


def test_an_input_group_has_the_name_of_its_first_weight():
    assert input_groups(qkv_loss, qkv_params(), normal(5, 12, 8)) == {
        "q": "k",
        "k": "k",
        "v": "k",
        "o": "o",
    }


def test_input_groups_of_a_decoder():
    tokens, targets = batch()
    shapes = jax.eval_shape(decoder)
    for storage in (Storage(), Storage(attention_in=SVD, mlp_out=RP)):
        loss = functools.partial(
            lambda model, tokens, storage: model.loss(tokens, targets, storage=storage, key=KEY),
            storage=storage,
        )
        first = {"attention_in": "layers.attention.k", "mlp_in": "layers.mlp.gate"}
        want = {path: first.get(site, path) for path, site in WEIGHTS.items()}
        assert input_groups(loss, shapes, tokens) == want


def test_weights_that_other_operations_read_are_in_no_input_group():
    def fun(params):
        ys = project(normal(0, 12, 8), (params["a"], params["b"]))
        return total(*ys, params["a"]) + total(params["c"])

    params = {name: normal(i, 8, 5) for i, name in enumerate("abc")}
    assert input_groups(fun, params) == {"b": "b"}


# Errors.


def test_a_weight_with_a_basis_must_be_read_by_one_operator_only():
    fun = lambda p: total(project(XS[0], p["w"]), project(XS[1], p["w"]))  # noqa: E731
    with pytest.raises(ValueError, match="the weight `w` is read by 2 linear operators"):
        actjax.value_and_grad(fun, bases={"w": normal(0, 8, 3)})({"w": normal(1, 8, 5)})
    fun = lambda p: total(project(XS[0], p["w"]), p["w"])  # noqa: E731
    with pytest.raises(ValueError, match=r"the weight `w` has .* `sin` does too"):
        actjax.value_and_grad(fun, bases={"w": normal(0, 8, 3)})({"w": normal(1, 8, 5)})


# Memory.


def basis_row(name, codec, shape, runs=(), bits=16, rank=3) -> Residual:
    tokens, count = math.prod(shape[:-1]), math.prod(runs)
    stored = tokens * rank * 4 if bits == 16 else tokens * (rank + 4)
    shape = (*runs, *shape)
    return Residual(
        "linear", name, shape, "float32", 4 * math.prod(shape), count * stored, codec, ""
    )


@pytest.mark.parametrize(
    ("bits", "codec"), [(16, "Basis(rank=3)"), (8, "Basis(rank=3, bits=8)")], ids=str
)
def test_explain_shows_bases_and_their_bytes_beside_codecs(bits, codec):
    params, x = qkv_params(), normal(5, 2, 6, 8)
    bases = Bases({"o": normal(7, 8, 3)}, bits=bits)
    explanation = explain(with_bases(functools.partial(qkv_loss, codec=SVD), bases), params, x)
    rows = {r.name: r for r in explanation.residuals if r.operator == "linear"}
    assert rows.keys() == {"attention_in", "attention_out"}
    assert rows["attention_out"] == basis_row("attention_out", codec, (2, 6, 8), bits=bits)
    assert rows["attention_in"].codec == repr(SVD)
    assert rows["attention_in"].stored_bytes == SVD.stored_bytes((2, 6, 8), "float32")
    assert codec in str(explanation)


def test_explain_stacks_the_layers_of_a_scan():
    fun = lambda params, x: total(run_stack(params, x, tanh_layer))  # noqa: E731
    explanation = explain(with_bases(fun, {"w": normal(3, 3, 8, 3)}), stack(), normal(0, 12, 8))
    (row,) = (r for r in explanation.residuals if r.operator == "linear")
    assert row == basis_row("input", "Basis(rank=3)", (12, 8), runs=(3,))
    # The backward pass does not read the basis.
    assert all(r.shape != (3, 8, 3) for r in explanation.residuals)


def test_explain_shows_the_bases_of_a_decoder():
    model, (tokens, targets) = jax.eval_shape(decoder), batch()

    def loss(model):
        return model.loss(tokens, targets, compute_dtype="float32")

    groups = dict.fromkeys(input_groups(loss, model).values())
    weights = by_path(model)
    bases = {path: jnp.ones((*weights[path].shape[:-1], 3)) for path in groups}
    rows = {r.name: r for r in explain(with_bases(loss, bases), model).residuals}
    for site, width in (
        ("attention_in", 24),
        ("mlp_in", 24),
        ("attention_out", 24),
        ("mlp_out", 48),
    ):
        want = basis_row(site, "Basis(rank=3)", (2, 11, width), runs=(3,))
        assert rows[site] == want
