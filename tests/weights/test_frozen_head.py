"""Tests of a frozen output projection: `cross_entropy` computes and holds no gradient of it."""

import jax
import numpy as np
import oracles
from jaxprs import products
from ops.helpers import (
    assert_close,
    assert_equal,
    compiled_temporaries,
    normal,
    shaped,
)

from actjax import FrozenWeight, NF4Weight, cross_entropy


def problem(dtype=None):
    labels = np.random.default_rng(3).integers(0, 11, (2, 6))
    mask = np.random.default_rng(4).integers(0, 2, (2, 6))
    return normal(0, 2, 6, 8, dtype=dtype), normal(1, 8, 11, dtype=dtype), labels, mask


def test_a_frozen_head_gives_the_loss_and_dhidden(x64):
    hidden, head, labels, mask = problem()
    table = normal(5, 11, 8)
    # Each: options, and which head: an array, an embedding, or 4 bits.
    cases = [
        ({"mask": mask, "z_loss": 0.1}, 0),
        ({"mask": mask, "chunk": 5}, 0),
        ({"z_loss": 0.1, "chunk": 5}, 0),
        *(({}, i) for i in range(3)),
    ]

    @jax.jit
    def run(hidden, head, table):
        q = NF4Weight.quantize(table.T)
        heads, results = (FrozenWeight(head), FrozenWeight(table).T, FrozenWeight(q)), []
        for options, i in cases:

            def fun(hidden, options=options, i=i):
                return 3 * cross_entropy(hidden, heads[i], labels, **options)

            results.append((fun(hidden), jax.value_and_grad(fun)(hidden)))
        return results, q.astype("float64")

    results, coded = run(hidden, head, table)
    heads = head, np.transpose(table), coded
    for (options, i), (alone, (loss, dhidden)) in zip(cases, results, strict=True):
        counted = options["mask"].reshape(12) if "mask" in options else None
        arguments = np.reshape(hidden, (12, 8)), heads[i], labels.reshape(12), counted
        z_loss = options.get("z_loss", 0.0)
        # Sums of 12 tokens, with exponentials: some 1e-16 each.
        want = 3 * oracles.cross_entropy(*arguments, z_loss)
        assert_close((alone, loss), (want, want), 1e-12, 1e-13)
        want = 3 * oracles.cross_entropy_vjp(*arguments, z_loss)[0]
        assert_close(dhidden, want.reshape(hidden.shape), 1e-12, 1e-13)


def test_a_frozen_head_gives_the_bits_of_a_plain_one():
    @jax.jit
    def run(hidden, head, labels, mask):
        results = []
        for wrap in (FrozenWeight, lambda w: w):

            def fun(hidden, wrap=wrap):
                return cross_entropy(hidden, wrap(head), labels, mask=mask, z_loss=1e-2)

            results.append(jax.value_and_grad(fun)(hidden))
        return results

    for dtype in ("float32", "bfloat16"):
        assert_equal(*run(*problem(dtype)))


def test_no_product_is_computed_for_the_gradient_of_a_frozen_head():
    hidden, head, labels, _ = problem()

    def made(wrap, chunk):
        def fun(hidden, head):
            return cross_entropy(hidden, wrap(head), labels, chunk=chunk)

        return products(jax.grad(fun, (0, 1)), hidden, head)

    # In a loop over whole chunks, and in a shorter last one.
    for chunk, count in ((12, 1), (5, 2)):
        assert len(made(FrozenWeight, chunk)) == 2 * count
        assert len(made(lambda w: w, chunk)) == 3 * count
        assert (8, 11) not in made(FrozenWeight, chunk)


def test_no_gradient_of_a_frozen_head_is_held():
    # A head of 4 MiB: for a plain one its gradient is held, and the running sum of it.
    labels = np.zeros(256, np.int32)

    def size(wrap):
        fun = lambda h, w: cross_entropy(h, wrap(w), labels, chunk=16)  # noqa: E731
        return compiled_temporaries(jax.grad(fun, (0, 1)), shaped(256, 128), shaped(128, 8192))

    # Where both gradients are asked for, the zeros for the frozen head are no temporary. Buffers
    # are aligned.
    assert size(lambda w: w) - size(FrozenWeight) > 2**22 - 1024
