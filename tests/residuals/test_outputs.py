"""Outputs of a transformed function that are no arrays."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from residuals.residual_helpers import CODE, normal, relative_error

import actjax
from actjax import Exact, Quantized, compress_residuals

W, X = normal(0, 16, 16), normal(1, 8, 16)
MODEL = eqx.nn.MLP(16, 16, 16, 1, jnp.tanh, key=jax.random.key(0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Result:
    """A pytree of an array and of what is none."""

    y: jax.Array
    what: object


GIVEN = {"text": "a", "number": 3, "share": 0.5, "yes": True, "function": jnp.sin, "none": None}


def loss(w, x):
    y = jnp.tanh(x @ w)
    return jnp.mean(y**2), {**GIVEN, "result": Result(y, "text"), "model": MODEL}


TRANSFORMS = {
    "compress_residuals": lambda f: jax.value_and_grad(
        actjax.compress_residuals(f, CODE), has_aux=True
    ),
    "checkpoint": lambda f: jax.value_and_grad(
        actjax.checkpoint(f, Exact(), activations=1), has_aux=True
    ),
    "value_and_grad": lambda f: actjax.value_and_grad(f, has_aux=True),
    "plain JAX": lambda f: jax.value_and_grad(f, has_aux=True),
}


@pytest.mark.parametrize("differentiate", TRANSFORMS.values(), ids=TRANSFORMS)
def test_they_stay_what_they_are(differentiate):
    def gradient(w):
        (value, aux), grad = differentiate(loss)(w, X)
        seen.update(aux)
        return value, grad

    seen = {}
    jax.eval_shape(gradient, W)
    result, model = seen.pop("result"), seen.pop("model")
    assert seen == GIVEN
    assert all(type(seen[name]) is type(value) for name, value in GIVEN.items())
    assert (result.y.shape, result.what) == ((8, 16), "text")
    assert jax.tree.structure(model) == jax.tree.structure(MODEL)
    assert model.activation is MODEL.activation


def test_compress_says_what_a_loss_without_has_aux_returns():
    message = r"got \('float32\[\]', \{.*'text': 'str'.*pass has_aux=True"
    with pytest.raises(ValueError, match=message):
        actjax.compress(loss, error=0.05, verbose=False).measure(W, X)


def test_a_function_with_text_among_its_outputs_is_explained():
    assert actjax.explain(loss, W, X).stored_bytes >= X.nbytes


def test_an_argument_with_a_dtype_that_is_no_array_is_static():
    @dataclasses.dataclass(frozen=True)
    class Config:
        dtype: object = jnp.float32
        scale: float = 2.0

    def loss(w, config, kind, x):
        return jnp.sum(jax.nn.gelu(x.astype(kind) @ w) ** 2) * config.scale

    w, x = normal(0, 16, 16), normal(1, 32, 16)
    coded = compress_residuals(loss, Quantized(4))
    got, want = (jax.grad(lambda w, f=f: f(w, Config(), jnp.float32, x))(w) for f in (coded, loss))
    assert 0 < relative_error(got, want) < 0.2
