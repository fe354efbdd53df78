"""The contract of operators that store codes, for each operator of `contract_cases.py`.

The value is exact with any codec; the gradient is that at the decoded inputs; the backward pass
holds the codes and the other arguments; and transformations of JAX change none of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import Coarse
from jaxprs import nbytes
from ops.contract_cases import CASES, JOINED
from ops.helpers import (
    KEY,
    assert_close,
    assert_equal,
    assert_gradients_are_differences,
    compiled_temporaries,
    normal,
    pullback,
    shaped,
)
from ops.operator_cases import NEAREST

import actjax
from actjax import Exact, PointApproximation, Quantized, RandomizedSVD, RandomProjection, explain

every_case = pytest.mark.parametrize("name", CASES)
wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))


def cotangent(outputs):
    """Returns a cotangent of outputs that is not constant."""
    return jax.tree.map(lambda y: np.cos(3 * np.arange(y.size)).reshape(y.shape), outputs)


def transformed(call, inputs, others, dy):
    """Returns cotangents under a scan over the first axis of vmap of a checkpoint.

    The scan runs over examples. Within an iteration vmap runs over one of them, and over the other
    in the reverse order.
    """
    both = lambda x: jnp.stack([x, x[::-1]], 1)[:, :, None]  # noqa: E731
    inner = jax.vmap(jax.checkpoint(call), (0, None))

    def run(inputs, others):
        return jax.lax.scan(lambda _, xs: (None, inner(xs, others)), None, inputs)[1]

    stacked, of_others = jax.vjp(run, jax.tree.map(both, inputs), others)[1](jax.tree.map(both, dy))
    return [jax.tree.map(lambda x: x[:, i, 0], stacked) for i in range(2)], of_others


@every_case
def test_value_is_exact_and_gradients_are_those_at_the_decoded_inputs(name, x64):
    case = CASES[name]
    inputs, others = case.arguments()
    dy = cotangent(wide(case.oracle(*wide((inputs, others)))))
    exact = (Exact(),) * len(inputs)
    nearest = (JOINED if name == "conv" else NEAREST,) * len(inputs)

    @jax.jit
    def run(inputs, others):
        results = []
        for codecs in (exact, case.codecs):
            codecs = codecs[0] if len(inputs) == 1 else codecs
            y, pull = jax.vjp(functools.partial(case.call, codec=codecs, key=KEY), inputs, others)
            results.append((y, pull(dy)))
        value = case.call(inputs, others, codec=codecs, key=KEY)
        call = functools.partial(case.call, codec=nearest[0])
        hats = [case.decoded(codecs, inputs) for codecs in (case.codecs, nearest)]
        return results, value, transformed(call, inputs, others, dy), hats

    results, value, (each, of_others), (hats, hats_of_nearest) = run(inputs, others)
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype("float64")}
    for y in (results[1][0], value):
        assert_equal(y, results[0][0])
    for codec, x, hat in zip(case.codecs, inputs, hats, strict=True):
        assert np.array_equal(x, hat) == (codec == Exact())
    inputs, others, hats, hats_of_nearest = wide((inputs, others, hats, hats_of_nearest))
    # Sums of up to 60 terms of size 1 to 10, in another order: some 1e-16 each.
    assert_close(value, case.oracle(inputs, others), 1e-11, 1e-12)
    for (_, got), seen in zip(results, (inputs, hats), strict=True):
        assert_close(got, case.vjp(seen, others, dy), 1e-11, 1e-12)
    # Groups lie within tokens: examples are coded alike, alone or in a batch.
    want, want_of_others = case.vjp(hats_of_nearest, others, dy)
    for i, got in enumerate(each):
        assert_close(jax.tree.map(lambda x, i=i: x[:: 1 - 2 * i], got), want, 1e-11, 1e-12)
    assert_close(jax.tree.map(lambda x: x / 2, of_others), want_of_others, 1e-11, 1e-12)


TOKENWISE = [name for name in CASES if not name.startswith(("attention", "conv"))]
LEADS = {
    "one token": (lambda x: x[0, 0], lambda x: x[None, None], lambda x: x[:1, :1]),
    "three axes": (lambda x: x[None], lambda x: x[0], lambda x: x),
}
"""Changes of the leading axes, their inverses, and the same tokens with two leading axes."""


def test_any_number_of_leading_axes(x64):
    arguments = {name: CASES[name].arguments() for name in TOKENWISE}

    @jax.jit
    def run(arguments):
        results = {}
        for name, (inputs, others) in arguments.items():
            call = functools.partial(CASES[name].call, codec=NEAREST)
            for lead, (change, _, _) in LEADS.items():
                y, pull = jax.vjp(call, jax.tree.map(change, inputs), others)
                results[f"{name}, {lead}"] = y, pull(jax.tree.map(jnp.cos, y))
            results[name] = CASES[name].decoded((NEAREST,) * len(inputs), inputs)
        return results

    results = run(arguments)
    for name, (inputs, others) in arguments.items():
        case = CASES[name]
        for lead, (_, back, part) in LEADS.items():
            y, (dxs, dothers) = results[f"{name}, {lead}"]
            y, dxs = wide(jax.tree.map(back, (y, dxs)))
            exact, hats = wide(jax.tree.map(part, (inputs, results[name])))
            want = case.vjp(hats, wide(others), jax.tree.map(np.cos, y))
            assert_close(y, case.oracle(exact, wide(others)), 1e-11, 1e-12)
            assert_close((dxs, dothers), want, 1e-11, 1e-12)


@every_case
def test_gradients_are_differences_of_values(name):
    # The values and gradients of the oracle are those of the operator.
    case, step, rng = CASES[name], 1e-5, np.random.default_rng(0)
    inputs, others = wide(case.arguments())
    dy = cotangent(wide(case.oracle(inputs, others)))
    gradients = jax.tree.leaves(case.vjp(inputs, others, dy))
    leaves, treedef = jax.tree.flatten((inputs, others))
    for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        direction = rng.standard_normal(leaf.shape)
        sides = []
        for sign in (1, -1):
            moved = [*leaves[:i], leaf + sign * step * direction, *leaves[i + 1 :]]
            outputs = case.oracle(*treedef.unflatten(moved))
            pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(dy), strict=True)
            sides.append(sum(np.vdot(y, g) for y, g in pairs))
        slope = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(np.vdot(gradient, direction), slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["gelu", "gelu, erf", "layer_norm", "conv", "token_log_probs"])
def test_second_derivatives_without_a_codec_are_differences_of_gradients(name, x64):
    (x,), others = CASES[name].arguments()

    def slope(x, *others):
        loss = lambda x: jnp.sum(CASES[name].call((x,), others) ** 3)  # noqa: E731
        return jax.grad(loss)(x)

    assert_gradients_are_differences(slope, x, *others)


@every_case
def test_second_derivatives_of_codes_are_refused(name):
    case = CASES[name]
    inputs, others = case.arguments()

    def slope(inputs, others):
        loss = lambda inputs: sum(  # noqa: E731
            jnp.sum(y**3) for y in jax.tree.leaves(case.call(inputs, others, codec=NEAREST))
        )
        return jax.grad(loss)(inputs)

    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.eval_shape(jax.jacobian(slope), inputs, others)


STORES_MORE = ("attention", "token_log_probs")
"""Operators that store what they computed too, beside exact inputs: see `test_attention_memory.py`
and `test_token_log_probs.py`."""


@every_case
def test_the_backward_pass_holds_codes_and_the_other_arguments(name):
    case = CASES[name]
    low_rank = RandomizedSVD(3), PointApproximation(points=2)
    choices = [(case.codecs, "bfloat16"), (case.codecs, "float32")]
    choices += [((codec,) * len(case.inputs), "float32") for codec in (Exact(), *low_rank)]
    for codecs, dtype in choices:
        if codecs[0] == Exact() and name in STORES_MORE:
            continue
        inputs, others = case.arguments(dtype)

        def fun(inputs, others, codecs=codecs):
            coded = codecs[0] if len(codecs) == 1 else codecs
            return case.call(jax.tree.map(jnp.negative, inputs), others, codec=coded, key=KEY)

        held = nbytes(pullback(fun, inputs, others))
        stored = sum(case.stored_bytes(codecs, dtype))
        assert held == stored + nbytes(others) + case.tables, (codecs, dtype)


@every_case
def test_without_a_codec_the_backward_pass_holds_the_arguments_themselves(name):
    if name in STORES_MORE or name == "attention_linear":
        return  # The latter stores its inputs with merged heads.
    case = CASES[name]
    inputs, others = case.arguments()
    program = jax.make_jaxpr(lambda *args: jax.vjp(case.call, *args)[1])(inputs, others).jaxpr
    held = set(program.outvars) - set(program.constvars)
    assert held <= set(program.invars)
    assert set(program.invars[: len(inputs)]) <= held


@every_case
def test_explain_names_the_codes(name):
    case = CASES[name]
    codecs = case.codecs[0] if len(case.codecs) == 1 else case.codecs

    def fun(inputs, others):
        negated = jax.tree.map(jnp.negative, inputs)
        outputs = case.call(negated, others, codec=codecs, key=KEY, name="mine")
        return sum(map(jnp.sum, jax.tree.leaves(outputs)))

    rows = [r for r in explain(fun, *case.arguments()).residuals if r.codec]
    named = {r.name: (r.operator, r.codec, r.stored_bytes) for r in rows}
    sizes = case.stored_bytes(case.codecs, "float32")
    want = zip(case.names, case.codecs, sizes, strict=True)
    assert named == {label: (case.operator, repr(codec), n) for label, codec, n in want}


def test_keys_of_inputs_may_be_separate_or_folded():
    arrays = [CASES[name].arguments() for name in ("swiglu", "attention")]

    def run(case, arguments, key):
        call = functools.partial(case.call, codec=case.codecs, key=key)
        y, pull = jax.vjp(call, *arguments)
        return pull(y)

    @jax.jit
    def all_keys(key, old):
        results = []
        for name, arguments in zip(("swiglu", "attention"), arrays, strict=True):
            case = CASES[name]
            each = tuple(jax.random.fold_in(key, i) for i in range(len(case.inputs)))
            results.append([run(case, arguments, k) for k in (key, each)])
        # A key of the old style draws the same numbers.
        return results, run(CASES["swiglu"], arrays[0], old)

    results, old = all_keys(KEY, jax.random.key_data(KEY))
    for folded, separate in results:
        assert_equal(separate, folded)
    assert_equal(old, results[0][0])
    other = all_keys(jax.random.key(8), jax.random.key_data(KEY))[0]
    assert not np.array_equal(results[0][0][0][0], other[0][0][0][0])


ROUNDED_ONCE = ("rms_norm", "layer_norm", "swiglu", "gelu", "gelu, erf")


def test_bfloat16_is_rounded_once_at_the_end():
    @jax.jit
    def run(arguments, dy):
        results = []
        for name, (inputs, others) in zip(ROUNDED_ONCE, arguments, strict=True):
            case = CASES[name]
            for codec in (Exact(), NEAREST):
                y, pull = jax.vjp(functools.partial(case.call, codec=codec), inputs, others)
                results.append((y, pull(dy)))
            results.append(case.decoded((NEAREST,) * len(inputs), inputs))
        return results

    arguments = [CASES[name].arguments("bfloat16") for name in ROUNDED_ONCE]
    dy = normal(3, 2, 5, 8, dtype="bfloat16")
    results = run(arguments, dy)
    for i, (name, narrow) in enumerate(zip(ROUNDED_ONCE, arguments, strict=True)):
        case, (inputs, others) = CASES[name], wide(narrow)
        exact, coded, hats = results[3 * i : 3 * i + 3]
        assert_equal(exact[0], coded[0])
        for (y, grads), seen in ((exact, inputs), (coded, wide(hats))):
            want = case.oracle(inputs, others), case.vjp(seen, others, wide(dy))
            for a, b in zip(jax.tree.leaves((y, grads)), jax.tree.leaves(want), strict=True):
                assert a.dtype == jnp.bfloat16
                # One rounding to bfloat16; float32 inside errs by some 10 x 6e-8 of terms of 1.
                np.testing.assert_allclose(np.float64(a), b, rtol=1.01 * 2.0**-8, atol=1e-5)


def layer_of_all_operators(x, p, sizes):
    """Runs every operator on x [512, 64], and puts the bytes of their codes into `sizes`."""
    q4, q2 = Quantized(4, group=32), Coarse()

    def call(name, fun, inputs, *others, codec=Coarse(), **options):
        codecs = codec if isinstance(codec, tuple) else (codec,) * len(inputs)
        pairs = zip(codecs, inputs, strict=True)
        sizes[name] = sum(c.stored_bytes((512, y.size // 512), y.dtype) for c, y in pairs)
        return fun(*inputs, *others, codec=codec, key=KEY, **options)

    def heads(y):
        q = y.reshape(1, 512, 4, 16)
        return q, 0.5 * q[:, :, :2], -q[:, :, 2:]

    scale, w = p["scale"], p["w"]
    y = call("rms_norm", actjax.rms_norm, (x,), scale, codec=q4)
    y = call("layer_norm", actjax.layer_norm, (y,), scale, scale)
    y = call("gelu", actjax.gelu, (y,))
    y = call("swiglu", actjax.swiglu, (0.5 * y, -y), codec=(q4, q2))
    y = call("conv", actjax.conv, (y.reshape(4, 128, 64),), p["window"]).reshape(512, 64)
    # Autodiff would keep most in this form: 1 MiB of scores per head.
    dense = {"implementation": "dense", "merge_heads": True}
    y = call("attention", actjax.attention, heads(y), **dense).reshape(512, 64)
    y = call("linear", actjax.linear, (y,), w, codec=RandomProjection(4))
    y = call("norm_linear", actjax.norm_linear, (y,), scale, w)
    y = call("swiglu_linear", actjax.swiglu_linear, (0.5 * y, -y), w)
    y = call("gelu_linear", actjax.gelu_linear, (y,), w)
    labels = np.arange(512) % 64
    log_probs = call("token_log_probs", actjax.token_log_probs, (y,), w, labels)
    y += log_probs[:, None]
    return call("attention_linear", actjax.attention_linear, heads(y), w).reshape(512, 64)


def test_a_layer_of_a_scan_takes_the_bytes_of_its_codes_and_no_more():
    sizes = {}

    def temporaries(layers):
        def loss(params, x):
            body = lambda x, p: (layer_of_all_operators(x, p, sizes), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

        shapes = {"scale": (64,), "w": (64, 64), "window": (3, 64, 64)}
        params = {name: shaped(layers, *shape) for name, shape in shapes.items()}
        return compiled_temporaries(jax.grad(loss, (0, 1)), params, shaped(512, 64))

    # Buffers are aligned. The narrowest float array kept in one of the eight more layers would be
    # 64 KiB. It must not cost less either: then the backward pass would not read a code.
    grown = temporaries(12) - temporaries(4)
    assert abs(grown - 8 * sum(sizes.values())) < 8 * 1024
