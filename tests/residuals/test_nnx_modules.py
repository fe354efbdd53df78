"""State that a function writes into the nnx modules among its arguments."""

import jax
import numpy as np
import pytest
from flax import nnx
from residuals.residual_helpers import CODE, normal

import actjax
from actjax import Exact

TRANSFORMS = {
    "compress_residuals": lambda fun: actjax.compress_residuals(fun, CODE),
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


make = nnx.jit(Model)


def loss(model, x):
    return (model(x) ** 2).sum()


def state_of(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


@every_transform
def test_statistics_and_counts_are_those_of_flax(wrap):
    plain, model = make(), make()
    step, plain_step = (nnx.jit(nnx.value_and_grad(f)) for f in (wrap(loss), loss))
    for _ in range(2):
        # Another dropout mask would change it by much more than float32 rounding.
        assert_close(step(model, X)[0], plain_step(plain, X)[0])
    assert int(model.dropout.rngs.count[...]) == 2
    assert_close(state_of(model), state_of(plain))


@every_transform
def test_one_module_in_two_arguments_stays_one(wrap):
    def twice(first, x, second):
        second.eval()
        return (first(x) ** 2).sum() + (second(x) ** 2).sum()

    plain, model = make(), make()
    got, want = (nnx.jit(f)(m, X, m) for f, m in ((wrap(twice), model), (twice, plain)))
    assert_close(got, want)
    # A setting that the function changed.
    assert model.dropout.deterministic


class Sum(nnx.Variable):
    pass


class WithSum(nnx.Module):
    def __init__(self):
        self.w, self.sum = nnx.Param(np.ones(16, np.float32)), Sum(np.float32(0))


@every_transform
def test_a_loss_in_the_state_reaches_the_gradient(wrap):
    """As mixtures of experts do with the loss that balances their load."""

    def run(model, x):
        model.sum[...] = (model.w[...] ** 2).sum()
        return x * model.w[...]

    def total(model, x, run):
        return run(model, x).sum() + model.sum[...]

    @nnx.jit
    def gradients(model, x):
        return [nnx.grad(lambda m, x, f=f: total(m, x, f))(model, x) for f in (wrap(run), run)]

    got, want = gradients(WithSum(), X)
    # Sums of 32 products, exact or in the codes of a linear function.
    assert_close(got["w"][...], want["w"][...])


@every_transform
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_variables_that_are_sown_or_set_are_those_of_flax(wrap):
    def sows(model, x):
        h = model(x)
        model.sow(nnx.Intermediate, "h", h)
        model.up.sow(nnx.Intermediate, "mean", h.mean())
        model.extra = nnx.BatchStat(2 * x, mine="kept")
        return (h**2).sum()

    plain, model = make(), make()
    for fun, written in ((sows, plain), (wrap(sows), model)):
        step = nnx.jit(nnx.grad(fun))
        for _ in range(2):
            step(written, X)
        assert len(written.h.get_value()) == len(written.up.mean.get_value()) == 2
        assert type(written.extra) is nnx.BatchStat
        assert written.extra.get_metadata()["mine"] == "kept"
    assert_close(state_of(model), state_of(plain))
    assert len(jax.tree.leaves(nnx.pop(model, nnx.Intermediate))) == 4


@every_transform
def test_variables_that_go_and_writes_to_a_module_outside_are_refused(wrap):
    def removes(model, x):
        value = loss(model, x)
        del model.norm
        return value

    def adds_a_module(model, x):
        model.extra = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return loss(model, model.extra(x))

    model = make()
    with pytest.raises(ValueError, match=r"adds variables to a Model.*'extra', 'bias'.*be lost"):
        nnx.eval_shape(lambda model: nnx.grad(wrap(adds_a_module))(model, X), model)
    with pytest.raises(ValueError, match=r"adds variables to a Model, or removes.*'norm'.*be lost"):
        nnx.eval_shape(lambda model: nnx.grad(wrap(removes))(model, X), model)
    with pytest.raises(Exception, match="Cannot mutate"):
        jax.eval_shape(jax.grad(lambda x: wrap(lambda m, x: loss(model, x))({}, x)), X)
