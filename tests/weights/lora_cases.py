"""A problem with three weights for the tests of adapters, and its oracle."""

import jax
import numpy as np
from ops.helpers import normal
from ops.operator_cases import BATCH, LENGTH, OPERATORS, WIDTH

from actjax import LoRA


def problem():
    """Returns weights, adapters of the first and the last, biases and cotangents."""
    ws = tuple(normal(20 + n, WIDTH, n) for n in (5, 3, 4))
    adapters = tuple(
        (normal(30 + n, WIDTH, r), normal(40 + n, r, n)) for n, r in ((5, 2), (4, 3))
    )  # fmt: skip
    biases = normal(50, 5), None, normal(51, 4)
    return ws, adapters, biases, tuple(normal(60 + n, BATCH, LENGTH, n) for n in (5, 3, 4))


def with_adapters(first, plain, last, adapters, keys=(None, None), dropout=0.0):
    """Returns weights as operators take them: the middle one has no adapter."""
    return (
        LoRA(first, *adapters[0], keys[0], 0.5, dropout),
        plain,
        LoRA(last, *adapters[1], keys[1], -2.0, dropout),
    )


def with_masks(ws, adapters, masks=(1.0, 1.0)):
    """Returns the weights of `with_adapters` as `run_oracle` takes them."""
    first, plain, last = ws
    return (first, *adapters[0], 0.5, masks[0]), (plain,), (last, *adapters[1], -2.0, masks[1])


def run_oracle(name, exact, hats, weights, biases, dzs):
    """Returns outputs at the exact inputs, and cotangents at the decoded ones.

    Hu et al., "LoRA" (2022), equation 3: `y = x W + s (m x) A B`, with `m` the mask of the dropout.

    Args:
      name: of the operator.
      exact: the activations.
      hats: the decoded activations.
      weights: `(w,)`, or `(w, a, b, scale, mask)`.
      biases: one for each weight, or None.
      dzs: one for each weight.
    """
    operator = OPERATORS[name]
    exact, hats, weights, biases, dzs = jax.tree.map(
        lambda x: np.asarray(x, np.float64), (exact, hats, weights, biases, dzs)
    )
    scale = operator.scale()
    y, y_hat = operator.oracle(exact, scale), operator.oracle(hats, scale)
    zs, grads, dy = [], [], 0
    for (w, *adapter), bias, dz in zip(weights, biases, dzs, strict=True):
        z = y @ w + (0 if bias is None else bias)
        dy = dy + dz @ w.T
        if adapter:
            a, b, factor, mask = adapter
            low, dlow = factor * (mask * y) @ a, factor * dz @ b.T
            z = z + low @ b
            dy = dy + mask * (dlow @ a.T)
            da = np.einsum("bsd,bsr->dr", mask * y_hat, dlow)
            grads.append((da, np.einsum("bsr,bsn->rn", low, dz)))
        else:
            grads.append(np.einsum("bsd,bsn->dn", y_hat, dz))
        zs.append(z)
    dbs = [None if b is None else dz.sum((0, 1)) for b, dz in zip(biases, dzs, strict=True)]
    return tuple(zs), operator.vjp(hats, scale, dy)[0], tuple(grads), tuple(dbs)
