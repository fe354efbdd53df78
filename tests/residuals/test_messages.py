"""Errors of `compress_residuals`, `value_and_grad`, bases and `accumulate`: calls and messages."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse, CoarseRandom
from factored.gradient_helpers import XS, normal, project, run_stack, stack, tanh_layer, total
from messages import assert_messages
from residuals.residual_helpers import KEY, LAYERS, ONE, loss_of, scanned, two_products
from residuals.residual_helpers import tanh_layer as one_layer

import actjax
from actjax import Bases, Exact, RandomizedSVD, accumulate, compress_residuals, with_bases

W = normal(0, 8, 5)
TWO = {"a.b": W, "a": {"b": W}}
QKV = {name: normal(i, 8, n) for i, (name, n) in enumerate({"q": 8, "k": 4, "o": 8}.items())}


def reads_both(params):
    return total(XS[0] @ params["a.b"], XS[0] @ params["a"]["b"])


def qk_loss(params):
    q, k = project(XS[0], (params["q"], params["k"]))
    return total(q, k, project(jnp.tanh(q), params["o"]))


def with_w(params):
    return total(params["w"])


def layers(params):
    return total(run_stack(params, XS[0], tanh_layer))


def each(bases, message):
    """Returns rows of both functions that take bases."""
    arrays = {name: np.ones(shape, np.float32) for name, shape in bases.items()}
    gradient = actjax.value_and_grad(qk_loss, bases=arrays)
    return [(lambda: gradient(QKV), message), (lambda: with_bases(qk_loss, arrays)(QKV), message)]


def accumulated(batches, weights=None, aux=False):
    fun = (lambda w, b: (total(w), b)) if aux else lambda w, b: total(w)
    grad = actjax.value_and_grad(fun, has_aux=aux)
    return lambda: accumulate(grad, jnp.ones(2), batches, weights=weights)


def test_messages():
    inputs = "but the inputs of linear operators are: k, o."
    of_k, of_o = (f"the basis of `{x}` must have shape (8, " for x in "ko")
    bases = {"w": np.ones((8, 2), np.float32)}
    same_path = "two parameters have the same path `a.b`: rename one"
    assert_messages(ValueError, [
        (lambda: actjax.value_and_grad(reads_both)(TWO), same_path),
        (lambda: actjax.input_groups(reads_both, TWO), same_path),
        *each({"v": (8, 3)}, f"`bases` has ['v'], {inputs}"),
        *each({"z": (8, 3), "k": (8, 3), "y": (8, 3)}, f"`bases` has ['y', 'z'], {inputs}"),
        *each({"k": (7, 3)}, of_k + "3), for the weight `k` of (8, 4), got (7, 3)."),
        *each({"o": (3, 8)}, of_o + "8), for the weight `o` of (8, 8), got (3, 8)."),
        *each({"o": (2, 8, 3)}, of_o + "3), for the weight `o` of (8, 8), got (2, 8, 3)."),
        (lambda: actjax.value_and_grad(with_w, bases=bases)({"w": W}),
         "`bases` has ['w'], but the inputs of linear operators are: none. If a subspace"),
        (lambda: actjax.value_and_grad(layers, bases=bases)(stack()),
         "the basis of `w` must have shape (3, 8, 2), for the weight `w` of (3, 8, 8), got"),
        *((lambda bits=bits: Bases({}, bits=bits),
           f"`bits` of Bases must be one of (4, 8, 16), got {bits}.") for bits in (5, 32, None)),
        (accumulated({}), "lengths are []"),
        (accumulated(jnp.ones(())), "lengths are [0]"),
        (accumulated(jnp.ones((0, 2))), "lengths are [0]"),
        (accumulated((jnp.ones(2), jnp.ones(3))), "lengths are [2, 3]"),
        (accumulated(jnp.ones(3), jnp.ones(4)), "`weights` must be [3], "),
        (accumulated(jnp.ones(3), aux=True), "`loss_and_grad` must return a scalar and its"),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (lambda: actjax.value_and_grad(lambda p: p["w"])({"w": W}), "scalar-output functions"),
        (lambda: actjax.value_and_grad(lambda p: with_w(p).astype(int))({"w": W}), "real-"),
        (lambda: actjax.value_and_grad(with_w)({"w": W, "step": jnp.int32(0)}), "int32"),
        (lambda: actjax.value_and_grad(total)(w=W), "`argnums` is 0, but "),
        (lambda: actjax.value_and_grad(total, (0, 5))(W), "`argnums` is (0, 5), but "),
        (lambda: actjax.value_and_grad(total, "w")(W), "`argnums` must be an integer, "),
        *((lambda it=it: actjax.value_and_grad(total, bases=it),
           "`bases` must map names of inputs to arrays") for it in ([1], {"w": None}, {"w": 1.0})),
    ])  # fmt: skip


def gradient(rule, args=ONE, fun=two_products, **options):
    """Returns a call of the gradient of a function whose residuals are compressed."""
    return lambda: jax.grad(loss_of(compress_residuals(fun, rule, **options)))(*args)


def test_messages_of_compress_residuals():
    rule = "`rule` of compress_residuals must be an actjax.Codec"
    draws = "CoarseRandom() draws random numbers"
    assert_messages(TypeError, [
        (lambda: compress_residuals(3, Coarse()), "`fun` of compress_residuals must be a function"),
        *((lambda it=it: compress_residuals(two_products, it), rule) for it in (None, "leave", 4)),
        *((gradient(lambda _, it=it: it), "`rule` returned ")
          for it in (4, True, "exact", Exact, np.ones(3))),
        (gradient(lambda _: 4), "Codec, or None"),
        (lambda: compress_residuals(two_products, CoarseRandom(), key=3),
         "`key` of compress_residuals must be a jax.random key"),
        *((lambda it=it: compress_residuals(two_products, Coarse(), activations=it),
           "`activations` of compress_residuals")
          for it in (-1, True, "x", [0, 1.5], None)),
    ])  # fmt: skip
    assert_messages(ValueError, [
        (gradient(Coarse(), activations=2), "position 2, but the function was called with 2"),
        (gradient(CoarseRandom()), draws),
        (gradient(CoarseRandom(), LAYERS, scanned(one_layer)), draws),
        (gradient(CoarseRandom(), key={"other": KEY}),
         "`key` of compress_residuals has no entry for "),
        (gradient(CoarseRandom(), LAYERS, scanned(one_layer), key={"other": KEY}),
         "has no entry for "),
        (gradient(RandomizedSVD(7), key=KEY), "`rank` 7 of RandomizedSVD"),
    ])  # fmt: skip
