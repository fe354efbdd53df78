"""Few arrays are stored, the others are rebuilt exactly."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from actjax import Quantized
from actjax._core.tags import name_code
from actjax.residuals.graph.equations import run_equation
from actjax.residuals.graph.programs import inlined
from actjax.residuals.graph.rebuilding import Graph
from actjax.residuals.graph.storing import choose

X = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")
W = np.random.default_rng(1).standard_normal((8, 8)).astype("float32")


class Program:
    """A function whose outputs are the residuals, as a graph."""

    def __init__(self, fun: Callable[..., Any], *args: Any, rebuild: bool = True) -> None:
        traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(fun(*args)))(*args)
        closed = inlined(traced, custom=True)
        self.jaxpr, self.args = closed.jaxpr, args
        self.rebuild = rebuild
        self.residuals = list(self.jaxpr.outvars)
        self.given = {*self.jaxpr.invars, *self.jaxpr.constvars}
        self.constants = closed.consts

    def values(self, args) -> dict[core.Var, Any]:
        """Returns the value of each variable."""
        values = dict(zip(self.jaxpr.constvars, self.constants, strict=True))
        values |= zip(self.jaxpr.invars, args, strict=True)
        read = lambda x: x.val if isinstance(x, core.Literal) else values[x]  # noqa: E731
        for eqn in self.jaxpr.eqns:
            outputs = run_equation(eqn, [read(x) for x in eqn.invars])
            values |= zip(eqn.outvars, outputs, strict=True)
        return values

    def price(self, var: core.Var) -> int:
        """Returns bytes, and 0 for arguments and constants."""
        return 0 if var in self.given else var.aval.size * var.aval.dtype.itemsize

    def choose(self, price=None) -> list[core.Var]:
        return [*choose(self.graph(price), self.residuals)]

    def graph(self, price=None) -> Graph:
        return Graph(self.jaxpr, price or self.price, rebuild=self.rebuild)

    def makers(self, price=None) -> list[str]:
        """Returns the primitives that make the stored arrays, "given" for arguments."""
        names = {out: eqn.primitive.name for eqn in self.jaxpr.eqns for out in eqn.outvars}
        return [names.get(var, "given") for var in self.choose(price)]

    def rebuilt(self, change: Callable[[core.Var, Any], Any] = lambda _, x: x) -> Any:
        """Returns the residuals, and the same rebuilt from stored arrays that `change` changes."""

        @jax.jit
        def run(args):
            values, graph = self.values(args), self.graph()
            stored = {var: change(var, values[var]) for var in self.choose()}
            rebuilt = [graph.rebuild(var, stored.get)[var] for var in self.residuals]
            return [values[var] for var in self.residuals], rebuilt

        return zip(*run(self.args), strict=True)


def kept_of(fun, *args, **options) -> list[str]:
    return Program(fun, *(args or (X, W)), **options).makers()


def check_rebuilt(program: Program) -> None:
    """Checks that all residuals follow from the stored arrays to the bit."""
    for value, rebuilt in program.rebuilt():
        np.testing.assert_array_equal(rebuilt, value)


# Arrays that are stored.


def roots(fun):
    """Returns a function of a product and a sum over rows, which are roots of what it returns."""
    return lambda x, w: fun(x @ w, jnp.cumsum(x, 0))


def and_size(fun):
    def residuals(a, b):
        y = fun(a, b)
        return y, jnp.abs(y)  # Two residuals cost as much as two roots.

    return roots(residuals)


def narrowed(x, w):
    h = (x @ w).astype("bfloat16")
    return jnp.exp(h), h.astype("float32")


def views(x, w):
    h = jnp.exp(x @ w)
    return h, h.T, h.reshape(4, 32), h[None], h[::-1], h[3:], jnp.broadcast_to(h, (2, 16, 8))


TABLE = np.arange(8.0, dtype=np.float32)
KEPT = {
    # Expensive operations are not rebuilt.
    "product": (lambda x, w: jnp.abs(jnp.abs(x @ w) @ w), ["dot_general"]),
    "sort": (lambda x, w: jnp.abs(jnp.sort(jnp.abs(x @ w), 1)), ["sort"]),
    "cumulative sum": (lambda x, w: jnp.abs(jnp.cumsum(x, 0)), ["cumsum"]),
    # Residuals are stored if they are smaller than their roots.
    "row sums": (lambda x, w: jnp.sum(x @ w, 1), ["reduce_sum"]),
    "slice": (lambda x, w: (x @ w)[:3], ["slice"]),
    # Two parts with 14 of 16 rows take less than the product; with all rows they take as much.
    "most rows": (roots(lambda a, b: (jnp.abs(a[:7]), a[7:14])), ["slice", "slice"]),
    "all rows": (roots(lambda a, b: (jnp.abs(a[:8]), a[8:])), ["dot_general"]),
    # Two roots take less than three residuals that follow from them.
    "two roots": (roots(lambda a, b: (a * b, a * jnp.abs(b), b)), ["cumsum", "dot_general"]),
    "at equal price, the root": (lambda x, w: jnp.abs(x @ w), ["dot_general"]),
    "at equal price, the product": (roots(lambda a, b: a * b), ["mul"]),
    # Arguments are alive, so they are free.
    "of arguments": (lambda x, w: (jnp.abs(x), jnp.abs(x) * x), ["given"]),
    "of an argument": (lambda x, w: jnp.abs(x @ w) * jnp.abs(x), ["dot_general", "given"]),
    "of a constant": (lambda x, w: jnp.abs(x * TABLE), ["given", "given"]),
    "cast of an argument": (lambda x, w: jnp.abs(x.astype("bfloat16")) * 2, ["given"]),
    # They do not connect residuals: together the roots would take 1,024 bytes and the residuals
    # 1,028.
    "an argument between roots": (
        lambda x, w: roots(lambda a, b: (a * x, jnp.abs(a), jnp.sum(b * x)))(x, w),
        ["dot_general", "given", "reduce_sum"],
    ),
    # A sum of two large values is a root.
    "sum": (and_size(lambda a, b: a + b), ["add"]),
    "difference": (and_size(lambda a, b: a - jnp.abs(b)), ["sub"]),
    "sum within": (and_size(lambda a, b: jnp.abs(a * 2 + b)), ["add"]),
    "sum with a bias": (and_size(lambda a, b: a + jnp.arange(8.0)), ["dot_general"]),
    "sum with itself": (and_size(lambda a, b: a + jax.nn.gelu(a)), ["dot_general"]),
    "gated": (and_size(lambda a, b: a + a * b), ["add"]),
    "product of roots": (and_size(lambda a, b: a * b), ["mul"]),
    "sum with numbers": (and_size(lambda a, b: (a + 1.5) - 2), ["dot_general"]),
    # All residuals follow from one product. `test_residuals_kept.py` has activations and norms.
    "pieces": (
        roots(lambda h, _: (
            jnp.concatenate([h, -h]), jnp.pad(h, 1), h[2:], h[:, ::-1].T, *jnp.split(h, 2)
        )),
        ["dot_general"],
    ),
    "constants": (
        roots(lambda h, _: (jnp.where(jnp.arange(8) > 3, h, 0), h.at[...].get() * jnp.ones(8))),
        ["dot_general"],
    ),
    "nothing": (lambda x, w: (), []),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_fewest_bytes_are_stored(name):
    fun, want = KEPT[name]
    assert sorted(kept_of(fun)) == want


NOT_REBUILT = {
    "views": (views, ["exp"]),
    "functions": (roots(lambda a, b: (a, jnp.abs(a), -a)), ["abs", "dot_general", "neg"]),
    "integers are no views": (
        roots(lambda a, b: (a.astype("int32"), a)), ["convert_element_type", "dot_general"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_REBUILT)
def test_without_rebuilding_views_are_stored_once(name):
    fun, want = NOT_REBUILT[name]
    assert sorted(kept_of(fun, rebuild=False)) == want
    check_rebuilt(Program(fun, X, W, rebuild=False))


def test_an_argument_that_is_not_alive_costs_as_much_as_a_residual():
    program = Program(lambda x: jnp.abs(x), X)
    assert list(program.choose()) == list(program.jaxpr.invars)
    bytes_of = lambda var: var.aval.size * 4  # noqa: E731
    assert program.makers(bytes_of) == ["given"]
    assert Program(lambda x: jnp.sum(x, 0), X).makers(bytes_of) == ["reduce_sum"]


@pytest.mark.parametrize("rebuild", [True, False])
def test_a_narrower_copy_is_stored_instead_of_the_product(rebuild):
    kept = kept_of(narrowed, rebuild=rebuild)
    assert "dot_general" not in kept
    assert "convert_element_type" in kept


def test_errors_do_not_accumulate_along_a_residual_stream():
    def fun(x, w):
        h, residuals = x @ w, []
        for _ in range(3):
            h = h + jnp.abs(h @ w)
            residuals.append(jnp.abs(h))
        return residuals

    program = Program(fun, X, W)
    assert program.makers() == ["add"] * 3
    assert all(len(program.graph()._roots[var]) == 1 for var in program.residuals)


def test_the_choice_is_deterministic():
    def fun(x, w):
        a, b, c, d = x @ w, jnp.cumsum(x, 0), jnp.sort(x, 1), jnp.cumprod(x, 1)
        return a * b, b * c, c * d, d * a, a, b

    want = ["dot_general", "cumsum", "sort", "cumprod"]  # In the order of the program.
    for _ in range(3):  # Variables hash by address, so sets have another order each time.
        program = Program(fun, X, W)
        assert program.makers() == want
        program.residuals = program.residuals[::-1] * 2
        assert program.makers() == want


def test_constants_are_rebuilt():
    program = Program(lambda x: (jnp.arange(5) * 2, jnp.ones(3), jnp.zeros((2, 2)).T), X)
    program.residuals = [x for x in program.residuals if isinstance(x, core.Var)]
    assert not program.choose()
    check_rebuilt(program)


def test_a_wider_copy_is_a_view(x64):
    def fun(x, w):
        h = jnp.abs(x @ w)
        return h.astype("float64"), h

    for rebuild in (True, False):
        program = Program(fun, X, W, rebuild=rebuild)
        assert len(program.choose()) == 1
        check_rebuilt(program)


# Masks.


def test_a_mask_of_floats_is_a_mask():
    def fun(x, w):
        h = x @ w
        return h, (h > 0).astype("float32"), jnp.sign(h)

    program = Program(fun, X, W)
    h = program.residuals[0]
    _, *masks = program.rebuilt(lambda var, x: -x if var is h else x)
    for mask, rebuilt in masks:
        np.testing.assert_array_equal(rebuilt, mask)


def test_a_mask_of_arrays_that_are_alive_or_of_integers_is_rebuilt():
    def fun(x, key, labels):
        order = jnp.argsort(labels)
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return x > 0, keep, labels[:, None] == jnp.arange(16), order > 3

    program = Program(fun, X, jax.random.key(3), jnp.arange(16)[::-1])
    floats = [var for var in program.choose() if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    assert floats == [program.jaxpr.invars[0]]
    # Only the order is stored beside it: the masks would take more, a byte each.
    assert sum(map(program.price, program.choose())) <= 16 * 4
    check_rebuilt(program)


# Names.


def test_a_named_array_is_a_view_unless_it_is_a_code():
    named = lambda x, w: (lambda h: (checkpoint_name(h, "mine"), h))(x @ w)  # noqa: E731
    for rebuild in (True, False):
        assert kept_of(named, rebuild=rebuild) == ["dot_general"]

    def coded(x, w):
        codec = Quantized(4)
        code = name_code(codec.encode(x @ w), x @ w, repr(codec), "linear", "input")
        return jax.tree.leaves(code)

    kept = kept_of(coded)
    assert kept == ["name"] * len(kept)
    assert len(kept) == 3


def test_views():
    def fun(x, w):
        h = x @ w
        constant = checkpoint_name(jnp.zeros(3), "constant")
        return h, h.T.reshape(-1)[None], checkpoint_name(h, "mine"), jnp.exp(h), constant

    program = Program(fun, X, W)
    h, view, named, other, constant = program.residuals
    assert [program.graph().is_view(v, h) for v in (h, view, named, other)] == [True] * 3 + [False]
    assert not program.graph().is_view(h, view)
    assert not program.graph().is_view(constant, h)


# Rebuilding.


def test_rebuilding_runs_only_the_equations_it_needs(monkeypatch):
    def fun(x, w):
        h = jnp.exp(x @ w)
        return jnp.sin(h) + 1, jnp.cos(h @ w)

    program = Program(fun, X, W)
    run = []
    monkeypatch.setattr(
        "actjax.residuals.graph.divisors.run_equation",
        lambda eqn, inputs: run.append(eqn.primitive.name) or run_equation(eqn, inputs),
    )
    exp = next(e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "exp")
    asked = []

    def value(var):
        asked.append(var)
        return X if var is exp else None

    got = program.graph().rebuild(program.residuals[0], value)[program.residuals[0]]
    np.testing.assert_array_equal(got, jnp.sin(X) + 1)
    assert run == ["sin", "add"]
    assert len(asked) == len(set(asked)) == 3


def test_a_stored_residual_is_read_and_not_rebuilt():
    program = Program(lambda x, w: jnp.exp(x @ w), X, W)
    (var,) = program.residuals
    stored = program.graph().rebuild(var, lambda v: "stored" if v is var else None)
    assert stored == {var: "stored"}


def test_stored_intermediate_values_are_read():
    program = Program(lambda x, w: jnp.exp(jnp.sin(x @ w)), X, W)
    sin = next(e.outvars[0] for e in program.jaxpr.eqns if e.primitive.name == "sin")
    stored = {sin: np.zeros_like(X), **dict.fromkeys(program.jaxpr.invars, 1.0)}
    got = program.graph().rebuild(program.residuals[0], stored.get)[program.residuals[0]]
    np.testing.assert_array_equal(got, 1)


def random_program(seed: int) -> Callable[..., Any]:
    """Returns a function of a few cheap and expensive operations and some of their values."""
    draw = random.Random(seed)
    one = [
        jnp.exp, jnp.sin, jnp.transpose, lambda h: h[::-1], lambda h: h.astype("bfloat16") + 1,
        lambda h: h - h.max(1, keepdims=True), lambda h: h / (1 + h * h), lambda h: h > 0.1,
        lambda h: jnp.where(h > 0, h, -h), lambda h: jnp.cumsum(h, 0), lambda h: jnp.sort(h, 1),
        lambda h: (h * 3).astype("int32"), lambda h: jnp.argsort(h, 1), lambda h: h @ h.T / 8,
        lambda h: jnp.concatenate([h[4:], h[:4]]), lambda h: h.sum(1), lambda h: h[:3] * 2,
    ]  # fmt: skip
    two = [jnp.add, jnp.multiply, jnp.subtract, jnp.matmul, jnp.maximum]
    steps = [(draw.choice(one) if draw.random() < 0.65 else draw.choice(two), draw.random(),
              draw.random()) for _ in range(14)]  # fmt: skip
    shares = [draw.random() < 0.5 for _ in range(14)]

    def fun(*squares):
        squares, shared = list(squares), []
        for (step, i, j), wanted in zip(steps, shares, strict=True):
            a, b = squares[int(i * len(squares))], squares[int(j * len(squares))]
            y = step(a, b) if step in two else step(a)
            if wanted:
                shared.append(y)
            if y.shape == a.shape and jnp.issubdtype(y.dtype, jnp.floating):
                squares.append(jnp.tanh(y.astype("float32")))
        return shared

    return fun


@pytest.mark.parametrize("rebuild", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_rebuilt_from_no_more_bytes(seed, rebuild):
    draw = np.random.default_rng(seed)
    args = [draw.standard_normal((8, 8)).astype("float32") for _ in range(3)]
    program = Program(random_program(seed), *args, rebuild=rebuild)
    program.given.discard(program.jaxpr.invars[seed % 3])  # One argument is not alive.
    kept = program.choose()
    assert len(set(kept)) == len(kept)
    least = sum(map(program.price, dict.fromkeys(program.residuals)))
    assert sum(map(program.price, kept)) <= least
    check_rebuilt(program)
    # Masks and integers do not depend on errors of stored floats.
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    lossy = lambda var, x: -x if is_float(x) and program.price(var) else x  # noqa: E731
    for value, rebuilt in program.rebuilt(lossy):
        if not is_float(value):
            np.testing.assert_array_equal(rebuilt, value)
