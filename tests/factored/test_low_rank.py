"""Functions of the factors, compared with the dense matrix."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_cases import (
    DTYPES,
    LEADS,
    SCALES,
    SHAPES,
    clip_by_global_norm,
    decomposition_rounding,
    dense,
    dtypes,
    epsilon,
    f64,
    factored,
    global_norm,
    gram_rounding,
    leads,
    norm,
    norm_rounding,
    norms,
    scales,
    size,
    stacks,
    to_dense,
    truncate,
    vdot,
)

import actjax
from actjax import optim
from actjax.factored.low_rank import LowRank, is_low_rank


@dtypes
def test_dense_is_the_product(dtype, x64):
    # Values of 8 bits, which no device rounds before it multiplies them.
    matrices = [factored(lead=lead, dtype="bfloat16").astype(dtype) for lead in LEADS]
    results = jax.jit(lambda matrices: [m.dense() for m in matrices])(matrices)
    for a, got in zip(matrices, results, strict=True):
        assert (got.shape, got.dtype) == (a.shape, dtype)
        rounding = a.rank * epsilon(dtype) * (abs(f64(a.left)) @ abs(f64(a.right)))
        once = float(jnp.finfo(dtype).eps) / 2 * (abs(dense(a)) + rounding)
        assert np.all(abs(f64(got) - dense(a)) <= rounding + once)


@leads
def test_it_knows_its_shape_rank_and_bytes(lead):
    a = factored(lead=lead, dtype="bfloat16")
    assert (a.shape, a.ndim, a.rank) == ((*lead, 6, 5), 2 + len(lead), 3)
    assert (a.dtype, a.nbytes) == (jnp.bfloat16, math.prod(lead) * (6 * 3 + 3 * 5) * 2)


def test_its_repr_gives_shape_rank_dtype_and_basis():
    assert repr(factored()) == "LowRank(shape=(6, 5), rank=3, dtype=float32)"
    assert (
        repr(factored(basis_name="p"))
        == "LowRank(shape=(6, 5), rank=3, dtype=float32, basis_name='p')"
    )


def test_factors_of_two_dtypes_give_the_dtype_of_their_product():
    a = factored(dtype="bfloat16")
    mixed = LowRank(a.left, a.right.astype("float32"))
    assert mixed.dtype == to_dense(mixed).dtype == truncate(mixed, 2).dtype == jnp.float32
    assert norm(mixed).dtype == vdot(mixed, a).dtype == jnp.float32
    np.testing.assert_array_equal(norm(mixed), norm(a))


def test_astype_rounds_both_factors_and_keeps_the_basis():
    a = factored(basis_name="p")
    got = a.astype("bfloat16")
    assert (got.left.dtype, got.right.dtype, got.basis_name) == (jnp.bfloat16, jnp.bfloat16, "p")
    np.testing.assert_array_equal(got.left, a.left.astype("bfloat16"))
    np.testing.assert_array_equal(got.right, a.right.astype("bfloat16"))


@jax.jit
def products(a, b, array):
    """Returns the norm of `a`, and its inner products with `b` and with an array."""
    return a.norm(), a.vdot(b), a.vdot(array)


@dtypes
@stacks
def test_norms_and_inner_products_are_those_of_dense_matrices(shape, lead, dtype, x64):
    d, k, n = shape
    a = factored(0, shape, lead, dtype)
    b = factored(1, (d, k + 1, n), lead, dtype)
    array = np.random.default_rng(2).normal(size=a.shape).astype(jnp.dtype(dtype))
    of_a, *inner = products(a, b, array)
    assert {x.dtype for x in (of_a, *inner)} == {jnp.promote_types(dtype, "float32")}
    np.testing.assert_allclose(of_a, norms(dense(a)), rtol=norm_rounding(a))
    others = (dense(b), size(b), d + n + k * (k + 1)), (f64(array), norms(array), d + k * n)
    for got, (other, of_other, terms) in zip(inner, others, strict=True):
        assert got.shape == ()
        # By Cauchy and Schwarz this bounds the terms, and each errs by half an eps.
        bound = (terms + math.prod(lead)) * epsilon(dtype) * np.sum(size(a) * of_other)
        assert abs(float(got) - np.sum(dense(a) * other)) <= bound


@scales
def test_the_norm_does_not_overflow(scale):
    a = factored(scale=scale)
    np.testing.assert_allclose(norm(a), norms(dense(a)), rtol=norm_rounding(a))


def test_each_matrix_of_a_stack_has_its_own_size():
    stack = [factored(i, scale=scale) for i, scale in enumerate(SCALES.values())]
    a = jax.tree.map(lambda *x: np.stack(x), *stack)
    np.testing.assert_allclose(norm(a), norms(dense(a)), rtol=norm_rounding(a))


def test_a_norm_beyond_the_largest_number_is_infinite():
    assert norm(factored(scale=(1e20, 1e20))) == jnp.inf


@dtypes
def test_a_norm_that_cancels_errs_as_its_docstring_says(dtype, x64):
    a = factored(dtype=dtype)
    difference, got = jax.jit(lambda a: (a - a, (a - a).norm()))(a)
    # The square has an error of `size² gram_rounding`, and is at least zero.
    assert 0 <= got <= size(difference) * math.sqrt(gram_rounding(difference))


def test_vdot_with_itself_is_the_square_of_the_norm(x64):
    a = factored(dtype="float64")
    np.testing.assert_allclose(vdot(a, a), norm(a) ** 2, rtol=4 * norm_rounding(a))


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
}
"""By name: arithmetic of `LowRank`, and of dense matrices."""


@leads
def test_arithmetic_is_that_of_dense_matrices(lead, x64):
    a = factored(0, (6, 3, 5), lead, "float64", basis_name="p")
    b = factored(1, (6, 2, 5), lead, "float64")
    results = jax.jit(lambda a, b: {name: of(a, b) for name, (of, _) in ARITHMETIC.items()})(a, b)
    for name, (_, of_dense) in ARITHMETIC.items():
        got, want = results[name], of_dense(dense(a), dense(b))
        form = (got.shape, got.rank, got.dtype, got.basis_name)
        assert form == (want.shape, 5, jnp.float64, None), name
        # Two roundings per entry and a sum of `rank` terms, here and in the oracle.
        bound = 2 * (got.rank + 2) * 2**-52 * (abs(f64(got.left)) @ abs(f64(got.right)))
        assert np.all(abs(dense(got) - want) <= bound), name


@pytest.mark.parametrize("combine", ["+", "-"])
def test_sums_in_a_shared_basis_keep_their_rank(combine, x64):
    a = factored(0, dtype="float64", basis_name="p")
    b = LowRank(a.left, factored(1, dtype="float64").right, "p")
    of, of_dense = ARITHMETIC[combine]
    got, want = of(a, b), of_dense(dense(a), dense(b))
    assert (got.rank, got.basis_name) == (a.rank, "p")
    assert got.left is a.left
    bound = 2 * (a.rank + 1) * 2**-52 * (abs(f64(a.left)) @ (abs(f64(a.right)) + abs(f64(b.right))))
    assert np.all(abs(dense(got) - want) <= bound)


@pytest.mark.parametrize("names", [("p", "q"), ("p", None), (None, None)], ids=str)
def test_ranks_add_unless_both_name_one_basis(names):
    got = factored(0, basis_name=names[0]) + factored(1, basis_name=names[1])
    assert (got.rank, got.basis_name) == (6, None)


def test_scalars_keep_the_basis_and_a_transpose_does_not():
    a = factored(basis_name="p")
    assert {(2 * a).basis_name, (a / 2).basis_name, (-a).basis_name} == {"p"}
    assert a.mT.basis_name is None


def test_a_wide_scalar_leaves_narrow_factors_narrow():
    a = factored(dtype="bfloat16")
    got = jnp.float32(1 / 3) * a
    assert (got.left.dtype, got.right.dtype) == (jnp.bfloat16, jnp.bfloat16)
    # Rounded once, by half an eps; the product in float32 before it is nearly exact.
    np.testing.assert_allclose(f64(got.right), f64(a.right) / 3, rtol=1.01 * 2**-8)


def test_transposes_swap_the_factors():
    a = factored(lead=(2,))
    for got, want in [(a.mT.left, a.right.mT), (a.mT.right, a.left.mT), (a.mT.mT.left, a.left)]:
        np.testing.assert_array_equal(got, want)
    one = factored()
    np.testing.assert_array_equal(one.T.left, one.mT.left)
    np.testing.assert_array_equal(one.T.right, one.mT.right)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_truncation_has_the_least_error(rank, lead, x64):
    a = factored(shape=(7, 4, 6), lead=lead, dtype="float64")
    got = truncate(a, rank)
    assert (got.shape, got.rank, got.dtype, got.basis_name) == (a.shape, rank, jnp.float64, None)
    error = norms(dense(got) - dense(a)).ravel()
    best = [oracles.best_rank_k_error(matrix, rank) for matrix in dense(a).reshape(-1, 7, 6)]
    # No matrix of that rank has a smaller error. The decomposition is that of a matrix within the
    # tolerance.
    tolerance = 2 * decomposition_rounding(a)
    np.testing.assert_allclose(error, best, rtol=0, atol=tolerance)


def orthonormal_to(tolerance, left):
    grams = f64(left).swapaxes(-2, -1) @ f64(left)
    np.testing.assert_allclose(
        grams, np.broadcast_to(np.eye(left.shape[-1]), grams.shape), **tolerance
    )


@dtypes
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_the_left_of_a_truncation_is_orthonormal(lead, dtype, x64):
    left = truncate(factored(shape=(7, 4, 6), lead=lead, dtype=dtype), 3).left
    # In bfloat16 every entry is rounded by half an eps, and sums by an eps (Cauchy and Schwarz).
    rounded = 1.01 * float(jnp.finfo(dtype).eps)
    orthonormal_to({"rtol": 0, "atol": rounded + 2 * (7 + 4) * epsilon(dtype)}, left)


def test_a_truncation_in_bfloat16_is_rounded_once_at_the_end():
    a = factored(shape=(7, 4, 6), dtype="bfloat16")
    got = truncate(a, 2)
    error, best = norms(dense(got) - dense(a)), oracles.best_rank_k_error(dense(a), 2)
    # Half an eps for each factor; the norm of `left` is the root of its rank.
    rounded = 2.01 * 2**-8 * math.sqrt(2) * norms(dense(a))
    assert best * (1 - 1e-6) <= error <= best + rounded


@pytest.mark.parametrize("scale", [(1, 1), (1e20, 1e-20), (1e20, 1e17)], ids=str)
def test_the_whole_rank_gives_the_matrix_back(scale):
    for shape in SHAPES:
        a = factored(shape=shape, scale=scale)
        got = truncate(a, a.rank)
        np.testing.assert_allclose(dense(got), dense(a), rtol=0, atol=decomposition_rounding(a))


def test_a_sum_of_dependent_terms_is_truncated_exactly():
    a = factored(shape=(7, 3, 6))
    sum_of_three = lambda a: a + a + a  # noqa: E731
    tripled, got = jax.jit(lambda a: (sum_of_three(a), sum_of_three(a).truncate(3)))(a)
    orthonormal_to({"rtol": 0, "atol": 2 * (7 + 9) * 2**-23}, got.left)
    tolerance = decomposition_rounding(tripled)
    np.testing.assert_allclose(dense(got), 3 * dense(a), rtol=0, atol=tolerance)


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_zeros_have_norm_zero_and_a_truncation(lead):
    @jax.jit
    def facts(a):
        truncated = a.truncate(2)
        return a.norm(), a.vdot(a), truncated, truncated.dense()

    a = factored(lead=lead)
    for zero in (LowRank(a.left, 0 * a.right), jax.tree.map(np.zeros_like, a)):
        of_zero, square, truncated, matrix = facts(zero)
        np.testing.assert_array_equal(of_zero, np.zeros(lead))
        np.testing.assert_array_equal(matrix, np.zeros(a.shape))
        orthonormal_to({"rtol": 0, "atol": 2 * (6 + 3) * 2**-23}, truncated.left)
        assert square == 0


def test_it_is_a_pytree_of_two_arrays_and_a_static_name():
    a, b, c = factored(basis_name="p"), factored(basis_name="q"), factored(1, basis_name="p")
    assert [leaf.shape for leaf in jax.tree.leaves(a)] == [(6, 3), (3, 5)]
    assert jax.tree.structure(a) == jax.tree.structure(c) != jax.tree.structure(b)
    assert is_low_rank(a)
    assert not is_low_rank(a.left)
    shapes = jax.eval_shape(lambda a: a.mT, a)
    assert (type(shapes), shapes.shape, shapes.dtype) == (LowRank, (5, 6), jnp.float32)


def test_jit_takes_and_returns_it(x64):
    a, b = (factored(i, dtype="float64", basis_name="p") for i in range(2))
    got = jax.jit(lambda a, b, s: s * (a + b))(a, b, 0.5)
    assert (got.rank, got.basis_name) == (3, "p")
    np.testing.assert_array_equal(got.right, (a.right + b.right) / 2)


def test_vmap_maps_over_a_stack(x64):
    a, b = (factored(i, lead=(4,), dtype="float64") for i in range(2))
    combine = lambda a, b: (a.norm(), a.vdot(b), a - 2 * b)  # noqa: E731
    mapped, want = jax.jit(lambda a, b: (jax.vmap(combine)(a, b), combine(a, b)))(a, b)
    np.testing.assert_allclose(mapped[0], want[0], rtol=1e-14)
    np.testing.assert_allclose(np.sum(mapped[1]), want[1], rtol=1e-13)
    assert mapped[2].shape == (4, 6, 5)
    jax.tree.map(np.testing.assert_array_equal, mapped[2], want[2])


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
    a, b = factored(dtype="float64", basis_name="p"), factored(1, dtype="float64")
    unit = dense(a) / norms(dense(a))
    for fun, want in [(LowRank.norm, unit), (lambda a: vdot(a, b), dense(b))]:
        got = jax.jit(jax.grad(fun))(a)
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
    "vdot": lambda a, b: a.vdot(b),
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
    program = jax.make_jaxpr(fun)(*shapes)
    # At most two factors of the longer side, since ranks add.
    assert largest(program) <= 2 * k * max(d, n)
    assert largest(jax.make_jaxpr(lambda a, b: to_dense(a))(*shapes)) == d * n


def test_vdot_with_an_array_forms_no_second_one():
    d, k, n = BIG
    a = jax.eval_shape(lambda: factored(shape=BIG))
    assert (
        largest(jax.make_jaxpr(LowRank.vdot)(a, jax.ShapeDtypeStruct((d, n), "float32"))) == k * n
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 2), (3, 5)), ((2, 4, 2), (2, 5)), ((2, 4, 3), (1, 3, 5)), ((2, 1, 4, 3), (1, 2, 3, 5))],
    ids=str,
)
def test_factors_that_do_not_fit_are_refused(left, right):
    expected = re.escape(
        "LowRank takes `left` [..., d, k] and `right` [..., k, n] with equal leading axes:"
        f" got left{left} and right{right}."
    )
    with pytest.raises(ValueError, match=f"^{expected}$"):
        LowRank(jnp.ones(left), jnp.ones(right))
    with pytest.raises(ValueError, match=f"^{expected}"):
        jax.eval_shape(LowRank, jnp.ones(left), jnp.ones(right))


def test_a_transposed_right_factor_is_recognised():
    expected = r"got left\(4, 2\) and right\(5, 2\)\. Pass `right` transposed\.$"
    with pytest.raises(ValueError, match=expected):
        LowRank(jnp.ones((4, 2)), jnp.ones((5, 2)))


@pytest.mark.parametrize("rank", [-1, 0, 4])
def test_a_rank_out_of_range_is_refused(rank):
    expected = rf"`rank` must be within 1 and 3 for LowRank\(shape=\(6, 5\), .*\), got {rank}\."
    with pytest.raises(ValueError, match=expected):
        truncate(factored(), rank)


def test_the_transpose_of_a_stack_is_refused():
    with pytest.raises(ValueError, match=r"`T` of LowRank\(shape=\(2, 6, 5\), .*: use `mT`\."):
        factored(lead=(2,)).T  # noqa: B018


@pytest.mark.parametrize("other", [factored(shape=(5, 3, 6)), factored(lead=(1,))], ids=repr)
def test_other_shapes_are_refused(other):
    shape = re.escape(str(other.shape))
    with pytest.raises(ValueError, match=rf"`other` must have shape \(6, 5\), got {shape}\."):
        vdot(factored(), other)
    with pytest.raises(ValueError, match=rf"`other` must have shape \(6, 5\), got {shape}\."):
        factored().vdot(to_dense(other))
    added = rf"cannot add LowRank\(shape={shape}.* to LowRank\(shape=\(6, 5\).*: shapes differ\."
    with pytest.raises(ValueError, match=added):
        _ = factored() + other
    with pytest.raises(ValueError, match=added):
        _ = factored() - other


COERCIONS = {
    "jnp.asarray": jnp.asarray,
    "np.asarray": np.asarray,
    "np.array": lambda a: np.array(a, np.float32),
    "in a list": lambda a: jnp.array([a]),
}


@pytest.mark.parametrize("coerce", COERCIONS.values(), ids=COERCIONS)
def test_it_is_never_converted_to_an_array_implicitly(coerce):
    expected = r"LowRank\(.*\) is not an array: call `dense\(\)` to get one, \[d, n\]"
    with pytest.raises(TypeError, match=expected):
        coerce(factored())


@pytest.mark.parametrize("module", [np, jnp])
def test_functions_of_arrays_refuse_it(module):
    for call in (module.sum, module.square, lambda a: module.add(a, module.ones((6, 5)))):
        with pytest.raises(TypeError, match="LowRank"):
            call(factored())


MATRICES = {
    "jnp": jnp.ones((6, 5)),
    "np": np.ones((6, 5)),
    "one entry": jnp.ones((1, 1)),
    "a vector": np.ones(5),
    "LowRank": factored(1),
}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_a_product_with_more_than_a_scalar_is_refused(matrix):
    expected = r"LowRank\(.*\) can be multiplied by a scalar only: use `dense\(\)` for more\."
    for product in (lambda a, b: a * b, lambda a, b: b * a, jax.jit(lambda a, b: b * a)):
        with pytest.raises(TypeError, match=expected):
            product(factored(), matrix)


@pytest.mark.parametrize("matrix", [jnp.ones((6, 5)), np.ones((6, 5)), 1.0], ids=["jnp", "np", "1"])
def test_sums_with_dense_arrays_are_refused(matrix):
    a = factored()
    for combine in (lambda: a + matrix, lambda: matrix + a, lambda: a - matrix, lambda: matrix - a):
        with pytest.raises(TypeError):
            combine()


# Few shapes and many values, since each new shape is compiled.
drawn = given(
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from(list(SCALES.values())),
    dtype=st.sampled_from(DTYPES[:2]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=25, deadline=None)
@drawn
def test_any_factors_have_the_norm_of_their_product(shape, scale, dtype, seed):
    a = factored(seed, shape, (), dtype, scale)
    np.testing.assert_allclose(norm(a), norms(dense(a)), rtol=norm_rounding(a))
    np.testing.assert_allclose(norm(a.mT), norm(a), rtol=2 * norm_rounding(a))


@settings(max_examples=15, deadline=None)
@drawn
def test_any_truncation_has_the_least_error(shape, scale, dtype, seed):
    a = factored(seed, shape, (), dtype, scale)
    rank = 1 + seed % min(shape)
    wide = a.astype("float32")
    error = norms(dense(truncate(wide, rank)) - dense(a))
    best = oracles.best_rank_k_error(dense(a), rank)
    assert abs(error - best) <= 2 * decomposition_rounding(wide)


def test_columns_of_very_different_sizes_count_all():
    sizes, ones = np.float32([[1e10, 0], [0, 1e-10]]), np.eye(2, dtype=np.float32)
    apart = LowRank(sizes, np.linalg.inv(sizes))
    np.testing.assert_allclose(norm(apart), 2**0.5, rtol=1e-6)
    np.testing.assert_allclose(vdot(apart, apart), 2, rtol=1e-6)
    far = LowRank(np.float32([[1e20, 0], [0, 1]]), np.float32([[1, 0], [0, 1e20]]))
    np.testing.assert_allclose(norm(far), 2**0.5 * 1e20, rtol=1e-6)
    flat = LowRank(1e20 * ones, 1e-20 * ones)
    np.testing.assert_allclose(vdot(flat, flat), 2, rtol=1e-6)


def test_a_scalar_divides_in_its_own_precision():
    a = LowRank(np.ones((2, 1), "float32"), np.ones((1, 2), "float32"))
    third = jax.jit(lambda a, scalar: (a / scalar).dense())(a, jnp.bfloat16(3))
    np.testing.assert_allclose(third, 1 / 3, rtol=1e-6)
    with pytest.raises(TypeError, match="can be divided by a scalar only"):
        a / jnp.ones(2)


def test_one_basis_has_one_rank():
    one = LowRank(jnp.ones((4, 1)), jnp.ones((1, 5)), "p")
    with pytest.raises(ValueError, match="one basis has one rank"):
        LowRank(jnp.ones((4, 3)), jnp.ones((3, 5)), "p") + one


def test_trees_of_its_structure_can_be_printed_compared_and_hashed():
    a = LowRank(jnp.ones((2, 1)), jnp.ones((1, 2)))
    assert str(jax.tree.map(jnp.shape, a)) == "LowRank(left=(2, 1), right=(1, 2), basis_name=None)"
    assert a == a and a != LowRank(a.left, a.right)  # noqa: PT018
    assert hash(a) is not None


def test_a_sum_may_start_from_zero():
    a = LowRank(np.ones((4, 1)), np.ones((1, 3)))
    np.testing.assert_array_equal(jax.jit(lambda a: sum([a, a]).dense())(a), 2 * np.ones((4, 3)))
    with pytest.raises(TypeError):
        1 + a


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
    # What optax hands on as it is, and functions of JAX, are not.
    chain = optax.chain(optim.clip_by_global_norm(1.0), optax.identity())

    @jax.jit
    def both(grads):
        clipped, _ = chain.update(grads, chain.init(grads["b"]))
        return actjax.global_norm(clipped), jax.tree.map(lambda x: 2 * x, grads)

    size, doubled = both(grads)
    np.testing.assert_allclose(size, 1, rtol=1e-6)
    np.testing.assert_allclose(dense(doubled["w"]), 4 * dense(grads["w"]))
