"""Functions of the factors, compared with the dense matrix."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from low_rank_cases import (
    DTYPES,
    LEADS,
    SHAPES,
    clip_by_global_norm,
    decomposition_rounding,
    dense,
    epsilon,
    f64,
    factored,
    global_norm,
    gram_rounding,
    norm_rounding,
    norms,
    of_all_scales,
    size,
)
from messages import assert_messages

import actjax
from actjax import optim
from actjax.factored.low_rank import LowRank, is_low_rank


def assert_within(got, want, bound, message=""):
    assert np.all(np.abs(f64(got) - want) <= bound), message


def test_dense_is_the_product(x64):
    # Values of 8 bits, which no device rounds before it multiplies them.
    matrices = [factored(lead=lead, dtype="bfloat16").astype(d) for lead in LEADS for d in DTYPES]
    results = jax.jit(lambda matrices: [m.dense() for m in matrices])(matrices)
    for a, got in zip(matrices, results, strict=True):
        assert (got.shape, got.dtype) == (a.shape, a.dtype)
        rounding = a.rank * epsilon(a.dtype) * (abs(f64(a.left)) @ abs(f64(a.right)))
        once = float(jnp.finfo(a.dtype).eps) / 2 * (abs(dense(a)) + rounding)
        assert_within(got, dense(a), rounding + once)


def test_it_knows_its_shape_rank_and_bytes_and_its_repr_gives_them():
    for lead in LEADS:
        a = factored(lead=lead, dtype="bfloat16")
        assert (a.shape, a.ndim, a.rank) == ((*lead, 6, 5), 2 + len(lead), 3)
        assert (a.dtype, a.nbytes) == (jnp.bfloat16, math.prod(lead) * (6 * 3 + 3 * 5) * 2)
    assert repr(factored()) == "LowRank(shape=(6, 5), rank=3, dtype=float32)"
    named = "LowRank(shape=(6, 5), rank=3, dtype=float32, basis_name='p')"
    assert repr(factored(basis_name="p")) == named
    placeholder = jax.tree.map(jnp.shape, factored())
    assert repr(placeholder) == "LowRank(left=(6, 3), right=(3, 5), basis_name=None)"


def test_factors_of_two_dtypes_give_the_dtype_of_their_product():
    a = factored(dtype="bfloat16")
    mixed = LowRank(a.left, a.right.astype("float32"))

    @jax.jit
    def run(a, mixed):
        return mixed.dense(), mixed.truncate(2), mixed.norm(), a.norm()

    *results, of_mixed, of_a = run(a, mixed)
    assert {mixed.dtype, of_mixed.dtype, *(x.dtype for x in results)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(of_mixed, of_a)


def test_astype_rounds_both_factors_and_keeps_the_basis():
    a = factored(basis_name="p")
    got = a.astype("bfloat16")
    assert (got.left.dtype, got.right.dtype, got.basis_name) == (jnp.bfloat16, jnp.bfloat16, "p")
    np.testing.assert_array_equal(got.left, a.left.astype("bfloat16"))
    np.testing.assert_array_equal(got.right, a.right.astype("bfloat16"))


# Norms.


def test_norms_are_those_of_dense_matrices(x64):
    settings = [(SHAPES[0], (), dtype) for dtype in DTYPES]
    settings += [(SHAPES[-1], (), "float64"), (SHAPES[0], LEADS[-1], "float64")]
    cases = [factored(0, *setting) for setting in settings]
    run = jax.jit(lambda cases: [a.norm() for a in cases])
    for a, norm in zip(cases, run(cases), strict=True):
        assert norm.dtype == jnp.promote_types(a.dtype, "float32")
        assert_within(norm, norms(dense(a)), norm_rounding(a) * norms(dense(a)))


STACKS = [of_all_scales(shape, dtype) for shape in SHAPES for dtype in ("bfloat16", "float32")]
"""Each has matrices of sizes whose squares overflow."""


def test_norms_of_factors_of_any_size_are_those_of_their_product():
    run = jax.jit(lambda stacks: [(a.norm(), a.mT.norm()) for a in stacks])
    for a, got in zip(STACKS, run(STACKS), strict=True):
        for norm in got:
            assert_within(norm, norms(dense(a)), norm_rounding(a) * norms(dense(a)))


def test_a_norm_that_cancels_errs_as_its_docstring_says(x64):
    matrices = [factored(dtype=dtype) for dtype in DTYPES]
    run = jax.jit(lambda matrices: [(a - a, (a - a).norm()) for a in matrices])
    for difference, norm in run(matrices):
        # The square has an error of `size² gram_rounding`, and is at least zero.
        assert 0 <= norm <= size(difference) * math.sqrt(gram_rounding(difference))


def test_columns_of_very_different_sizes_count_all_and_too_large_a_norm_is_infinite():
    sizes, unit = np.float32([[1e10, 0], [0, 1e-10]]), np.eye(2, dtype=np.float32)
    apart = LowRank(sizes, np.linalg.inv(sizes))
    far = LowRank(np.float32([[1e20, 0], [0, 1]]), np.float32([[1, 0], [0, 1e20]]))
    flat, large = LowRank(1e20 * unit, 1e-20 * unit), LowRank(1e20 * unit, 1e20 * unit)
    run = jax.jit(lambda *xs: [a.norm() for a in xs])
    of_apart, of_far, of_flat, of_large = run(apart, far, flat, large)
    np.testing.assert_allclose((of_apart, of_flat), 2**0.5, rtol=1e-6)
    np.testing.assert_allclose(of_far, 2**0.5 * 1e20, rtol=1e-6)
    assert of_large == jnp.inf


# Arithmetic.

ARITHMETIC = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "times": (lambda a, b: a * 2.5 + 3 * b, lambda a, b: a * 2.5 + 3 * b),
    "times a scalar of NumPy": (
        lambda a, b: a * np.float64(2.5) + np.float32(3) * b,
        lambda a, b: a * 2.5 + 3 * b,
    ),
    "times an array of no axes": (
        lambda a, b: a * jnp.asarray(2.5) + jnp.asarray(3) * b,
        lambda a, b: a * 2.5 + 3 * b,
    ),
    "divided": (lambda a, b: a / 2.5 - b / jnp.asarray(3), lambda a, b: a / 2.5 - b / 3),
    "negative": (lambda a, b: -a + -b, lambda a, b: -a - b),
    "transposed": (lambda a, b: (a + b).mT, lambda a, b: (a + b).swapaxes(-2, -1)),
    "sum": (lambda a, b: sum([a, b]), lambda a, b: a + b),
}
"""By name: arithmetic of `LowRank`, and of dense matrices."""


def test_arithmetic_is_that_of_dense_matrices(x64):
    pairs = [
        (
            factored(0, (6, 3, 5), lead, "float64", basis_name="p"),
            factored(1, (6, 2, 5), lead, "float64"),
        )
        for lead in LEADS
    ]
    run = jax.jit(lambda pairs: [{k: f(*ab) for k, (f, _) in ARITHMETIC.items()} for ab in pairs])
    for (a, b), results in zip(pairs, run(pairs), strict=True):
        for name, (_, of_dense) in ARITHMETIC.items():
            got, want = results[name], of_dense(dense(a), dense(b))
            form = (got.shape, got.rank, got.dtype, got.basis_name)
            assert form == (want.shape, 5, jnp.float64, None), name
            # Two roundings per entry and a sum of `rank` terms, here and in the oracle.
            bound = 2 * (got.rank + 2) * 2**-52 * (abs(f64(got.left)) @ abs(f64(got.right)))
            assert_within(dense(got), want, bound, name)


def test_sums_in_a_shared_basis_keep_their_rank(x64):
    a = factored(0, dtype="float64", basis_name="p")
    b = LowRank(a.left, factored(1, dtype="float64").right, "p")
    for combine, sign in ((lambda: a + b, 1), (lambda: a - b, -1)):
        got, want = combine(), dense(a) + sign * dense(b)
        assert (got.rank, got.basis_name) == (a.rank, "p")
        assert got.left is a.left
        terms = abs(f64(a.left)) @ (abs(f64(a.right)) + abs(f64(b.right)))
        assert_within(dense(got), want, 2 * (a.rank + 1) * 2**-52 * terms)


def test_ranks_add_unless_both_name_one_basis_and_scalars_keep_it():
    for names in (("p", "q"), ("p", None), (None, None)):
        pair = [factored(i, basis_name=name) for i, name in enumerate(names)]
        got = jax.eval_shape(lambda a, b: a + b, *pair)
        assert (got.rank, got.basis_name) == (6, None)
    a = factored(basis_name="p")
    scaled = jax.eval_shape(lambda a: (2 * a, a / 2, -a), a)
    assert {x.basis_name for x in scaled} == {"p"}
    assert a.mT.basis_name is None


def test_a_scalar_is_applied_in_its_own_precision_and_leaves_narrow_factors_narrow():
    a, ones = factored(dtype="bfloat16"), factored(shape=(2, 1, 2))
    times, divided = jax.jit(lambda a, b: (jnp.float32(1 / 3) * a, (b / jnp.bfloat16(3)).dense()))(
        a, ones
    )
    assert (times.left.dtype, times.right.dtype) == (jnp.bfloat16, jnp.bfloat16)
    # Rounded once, by half an eps; the product in float32 before it is nearly exact.
    np.testing.assert_allclose(f64(times.right), f64(a.right) / 3, rtol=1.01 * 2**-8)
    np.testing.assert_allclose(divided, dense(ones) / 3, rtol=1e-6)


def test_transposes_swap_the_factors():
    a, single = factored(lead=(2,)), factored()
    pairs = [(a.mT.left, a.right.mT), (a.mT.right, a.left.mT), (a.mT.mT.left, a.left)]
    pairs += [(single.T.left, single.right.T), (single.T.right, single.left.T)]
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


# Truncation.


def assert_orthonormal(left, tolerance):
    grams = f64(left).swapaxes(-2, -1) @ f64(left)
    assert_within(grams, np.eye(left.shape[-1]), tolerance)


def test_truncation_has_the_least_error_and_an_orthonormal_left(x64):
    matrices = [factored(shape=(7, 4, 6), lead=lead, dtype=d) for lead in LEADS[:2] for d in DTYPES]
    ranks = 1, 2, 4
    run = jax.jit(lambda matrices: [[a.truncate(rank) for rank in ranks] for a in matrices])
    for a, results in zip(matrices, run(matrices), strict=True):
        for got, rank in zip(results, ranks, strict=True):
            assert (got.shape, got.rank, got.dtype, got.basis_name) == (
                a.shape,
                rank,
                a.dtype,
                None,
            )
            error = norms(dense(got) - dense(a)).ravel()
            best = [oracles.best_rank_k_error(m, rank) for m in dense(a).reshape(-1, 7, 6)]
            # No matrix of that rank has a smaller error. The decomposition is that of a matrix
            # within the tolerance. In bfloat16, half an eps for each factor is added at the end;
            # the norm of `left` is the root of its rank.
            tolerance = 2 * decomposition_rounding(a).ravel()
            narrow = a.dtype == jnp.bfloat16
            rounded = 2.01 * 2**-8 * math.sqrt(rank) * norms(dense(a)).ravel() if narrow else 0
            assert np.all(best - tolerance <= error)
            assert np.all(error <= best + tolerance + rounded)
            # Every entry is rounded by half an eps, and sums by an eps (Cauchy and Schwarz).
            eps = 1.01 * float(jnp.finfo(a.dtype).eps)
            assert_orthonormal(got.left, eps + 2 * (7 + 4) * epsilon(a.dtype))


def test_truncations_of_factors_of_any_size_have_the_least_error():
    def truncations(a):
        return [a.truncate(rank) for rank in sorted({1, min(*a.shape[-2:], a.rank), a.rank})]

    stacks = [a.astype("float32") for a in STACKS]
    results = jax.jit(lambda stacks: [truncations(a) for a in stacks])(stacks)
    for a, truncated in zip(stacks, results, strict=True):
        for got in truncated:
            error = norms(dense(got) - dense(a))
            # The whole rank gives the matrix back.
            best = [oracles.best_rank_k_error(m, min(got.rank, *m.shape)) for m in dense(a)]
            assert_within(error, np.asarray(best), 2 * decomposition_rounding(a))


def test_a_sum_of_dependent_terms_is_truncated_exactly():
    a = factored(shape=(7, 3, 6))
    tripled, got = jax.jit(lambda a: (a + a + a, (a + a + a).truncate(3)))(a)
    assert_orthonormal(got.left, 2 * (7 + 9) * 2**-23)
    assert_within(dense(got), 3 * dense(a), decomposition_rounding(tripled))


def test_zeros_have_norm_zero_and_a_truncation():
    matrices = [factored(lead=lead) for lead in LEADS[:2]]
    zeros = [LowRank(a.left, 0 * a.right) for a in matrices]
    zeros += [jax.tree.map(np.zeros_like, a) for a in matrices]

    @jax.jit
    def run(zeros):
        return [(a.norm(), a.truncate(2), a.truncate(2).dense()) for a in zeros]

    for norm, truncated, matrix in run(zeros):
        assert_within(norm, 0, 0)
        assert_within(matrix, 0, 0)
        assert_orthonormal(truncated.left, 2 * (6 + 3) * 2**-23)


# Under JAX.


def test_it_is_a_pytree_of_two_arrays_and_a_static_name():
    a, b, c = factored(basis_name="p"), factored(basis_name="q"), factored(1, basis_name="p")
    assert [leaf.shape for leaf in jax.tree.leaves(a)] == [(6, 3), (3, 5)]
    assert jax.tree.structure(a) == jax.tree.structure(c) != jax.tree.structure(b)
    assert is_low_rank(a)
    assert not is_low_rank(a.left)
    shapes = jax.eval_shape(lambda a: a.mT, a)
    assert (type(shapes), shapes.shape, shapes.dtype) == (LowRank, (5, 6), jnp.float32)
    assert a == a and a != LowRank(a.left, a.right, "p")  # noqa: PT018
    assert hash(a) is not None


def test_scan_slices_a_stack_and_carries_a_sum(x64):
    shared = factored(dtype="float64", basis_name="p")
    rights = factored(1, lead=(4,), dtype="float64").right
    stack = LowRank(np.broadcast_to(shared.left, (4, 6, 3)), rights, "p")
    scan = jax.jit(
        lambda start, stack: jax.lax.scan(lambda total, a: (total + a, a.norm()), start, stack)
    )
    start = LowRank(shared.left, 0 * shared.right, "p")
    total, of_each = scan(start, stack)
    assert (total.rank, total.basis_name) == (3, "p")
    np.testing.assert_allclose(dense(total), dense(stack).sum(0), rtol=0, atol=1e-13)
    np.testing.assert_allclose(of_each, norms(dense(stack)), rtol=1e-13)


def test_gradients_are_those_of_the_factors(x64):
    a = factored(dtype="float64", basis_name="p")
    got, want = jax.jit(jax.grad(LowRank.norm))(a), dense(a) / norms(dense(a))
    assert (type(got), got.basis_name) == (LowRank, "p")
    np.testing.assert_allclose(got.left, want @ f64(a.right).T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.right, f64(a.left).T @ want, rtol=0, atol=1e-12)


BIG = (1 << 12, 4, 1 << 13)


def largest(jaxpr) -> int:
    """Returns the elements of the largest array that a program computes."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    params = [list(eqn.params.values()) for eqn in jaxpr.eqns]
    bodies = jax.tree.leaves(params, is_leaf=lambda p: hasattr(p, "eqns"))
    return max([*sizes, *(largest(body) for body in bodies if hasattr(body, "eqns"))], default=0)


THIN = {
    "norm": lambda a, b: a.norm(),
    "gradient of the norm": lambda a, b: jax.grad(LowRank.norm)(a),
    "arithmetic": lambda a, b: 2 * a - b / 3,
    "transpose": lambda a, b: a.mT,
    "truncate": lambda a, b: a.truncate(2),
    "global norm": lambda a, b: global_norm([a, b]),
    "clip": lambda a, b: clip_by_global_norm([a, b], 1.0),
}


@pytest.mark.parametrize("fun", THIN.values(), ids=THIN)
def test_nothing_is_made_dense(fun):
    d, k, n = BIG
    left, right = jax.ShapeDtypeStruct((d, k), "float32"), jax.ShapeDtypeStruct((k, n), "float32")
    shapes = LowRank(left, right), LowRank(left, right, "p")
    # At most two factors of the longer side, since ranks add.
    assert largest(jax.make_jaxpr(fun)(*shapes)) <= 2 * k * max(d, n)
    assert largest(jax.make_jaxpr(lambda a, b: a.dense())(*shapes)) == d * n


# Errors.

A, MATRIX = factored(), np.ones((6, 5), np.float32)
OTHERS = factored(shape=(5, 3, 6)), factored(lead=(1,))
FACTORS = (
    ((4, 2), (3, 5)),
    ((2, 4, 2), (2, 5)),
    ((2, 4, 3), (1, 3, 5)),
    ((2, 1, 4, 3), (1, 2, 3, 5)),
)
MATRICES = jnp.ones((6, 5)), MATRIX, np.ones((1, 1)), np.ones(5), factored(1)
NO_ARRAY = f"{A} is not an array: call `dense()` to get one, [d, n]"
SCALAR = f"{A} can be multiplied by a scalar only: use `dense()` for more."
VALUE_ERRORS = [
    *((lambda left=left, right=right: LowRank(np.ones(left), np.ones(right)),
       "LowRank takes `left` [..., d, k] and `right` [..., k, n] with equal leading axes: got "
       f"left{left} and right{right}.") for left, right in (
          ((4, 2), (3, 5)), ((2, 4, 2), (2, 5)), ((2, 4, 3), (1, 3, 5)),
          ((2, 1, 4, 3), (1, 2, 3, 5)))),
    (lambda: LowRank(np.ones((4, 2)), np.ones((5, 2))),
     "got left(4, 2) and right(5, 2). Pass `right` transposed."),
    *((lambda rank=rank: A.truncate(rank), f"`rank` must be within 1 and 3 for {A}, got {rank}.")
      for rank in (-1, 0, 4)),
    (lambda: factored(lead=(2,)).T, f"`T` of {factored(lead=(2,))} would reverse its leading axes:"
                                    " use `mT`."),
    *((lambda other=other, sign=sign: A + sign * other, f"to {A}: shapes differ.")
      for other in OTHERS for sign in (1, -1)),
    (lambda: LowRank(np.ones((6, 1)), np.ones((1, 5)), "p") + factored(basis_name="p"),
     "one basis has one rank"),
]  # fmt: skip
TYPE_ERRORS = [
    *((lambda call=call: call(A), NO_ARRAY)
      for call in (jnp.asarray, np.asarray, lambda a: np.array(a, np.float32),
                   lambda a: jnp.array([a]))),
    *((lambda call=call: call(A), "LowRank")
      for module in (np, jnp)
      for call in (module.sum, module.square, lambda a, add=module.add: add(a, MATRIX))),
    *((lambda call=call, matrix=matrix: call(A, matrix), SCALAR)
      for call in (lambda a, b: a * b, lambda a, b: b * a, jax.jit(lambda a, b: b * a))
      for matrix in MATRICES),
    (lambda: A / np.ones(2), f"{A} can be divided by a scalar only"),
    *((lambda call=call, matrix=matrix: call(A, matrix), "")
      for call in (lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a - b, lambda a, b: b - a)
      for matrix in (MATRIX, 1.0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rows"), [(ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)], ids=["value", "type"]
)
def test_messages(kind, rows):
    assert_messages(kind, rows)


def test_functions_of_optax_that_read_the_factors_are_errors():
    grads = {"w": LowRank(np.ones((6, 2), "float32"), np.ones((2, 4), "float32")), "b": np.ones(3)}
    for call in (
        lambda: optax.global_norm(grads),
        lambda: jax.jit(optax.global_norm)(grads),
        lambda: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState()),
        lambda: optax.chain(optax.clip(1.0), optax.scale(2.0)).update(grads, (None, None)),
        lambda: optax.tree.scale(2.0, grads),
    ):
        with pytest.raises(TypeError, match="takes a LowRank gradient apart"):
            call()
    # Functions of JAX, and trees that optax hands on, are allowed.
    chain = optax.chain(optim.clip_by_global_norm(1.0), optax.identity())

    @jax.jit
    def both(grads):
        clipped, _ = chain.update(grads, chain.init(grads["b"]))
        return actjax.global_norm(clipped), jax.tree.map(lambda x: 2 * x, grads)

    norm, doubled = both(grads)
    np.testing.assert_allclose(norm, 1, rtol=1e-6)
    np.testing.assert_allclose(dense(doubled["w"]), 4 * dense(grads["w"]))
