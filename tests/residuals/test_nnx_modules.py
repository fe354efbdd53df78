"""State that a function writes into the nnx modules among its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from residuals.residual_helpers import normal

import actjax
from actjax import Exact, Quantized

TRANSFORMS = {
    "compress_residuals": lambda fun: actjax.compress_residuals(fun, Quantized(4)),
    "checkpoint": lambda fun: actjax.checkpoint(fun, Exact(), activations=1),
}
every_transform = pytest.mark.parametrize("wrap", TRANSFORMS.values(), ids=TRANSFORMS)
X = normal(0, 32, 16)


class Model(nnx.Module):
    """A module with statistics and random numbers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.norm(self.up(x))))


def loss(model, x):
    return (model(x) ** 2).sum()


def state_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))


@every_transform
def test_statistics_and_counts_are_those_of_flax(wrap):
    plain, model = Model(), Model()
    step, plain_step = (nnx.jit(nnx.value_and_grad(f)) for f in (wrap(loss), loss))
    for _ in range(2):
        want, _ = plain_step(plain, X)
        got, _ = step(model, X)
        # Another dropout mask would change it by much more than float32 rounding.
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert int(model.dropout.rngs.count[...]) == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state_of(model), state_of(plain)
    )


@every_transform
def test_one_module_in_two_arguments_stays_one(wrap):
    def twice(first, x, second):
        second.eval()
        return (first(x) ** 2).sum() + (second(x) ** 2).sum()

    plain, model = Model(), Model()
    want = twice(plain, X, plain)
    np.testing.assert_allclose(wrap(twice)(model, X, model), want, rtol=1e-5)
    # A setting that the function changed.
    assert model.dropout.deterministic


@every_transform
def test_a_loss_in_the_state_reaches_the_gradient(wrap):
    """As mixtures of experts do with the loss that balances their load."""

    class Sum(nnx.Variable):
        pass

    class WithSum(nnx.Module):
        def __init__(self):
            self.w, self.sum = nnx.Param(jnp.ones(16)), Sum(jnp.zeros(()))

    def run(model, x):
        model.sum[...] = (model.w[...] ** 2).sum()
        return x * model.w[...]

    def total(model, x, run):
        return run(model, x).sum() + model.sum[...]

    want = nnx.grad(lambda model, x: total(model, x, run))(WithSum(), X)
    got = nnx.grad(lambda model, x: total(model, x, wrap(run)))(WithSum(), X)
    # Sums of 32 products, exact or in the codes of a linear function.
    np.testing.assert_allclose(got["w"][...], want["w"][...], rtol=1e-5)


@every_transform
def test_new_variables_are_refused(wrap):
    def adds(model, x):
        model.extra = nnx.BatchStat(x)
        return loss(model, x)

    with pytest.raises(ValueError, match=r"adds variables to a Model.*'extra'.*would be lost"):
        nnx.grad(wrap(adds))(Model(), X)


@every_transform
def test_a_module_outside_cannot_be_written(wrap):
    model = Model()
    with pytest.raises(Exception, match="Cannot mutate"):
        jax.grad(lambda x: wrap(lambda m, x: loss(model, x))({}, x))(X)
