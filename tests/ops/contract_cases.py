"""The operators that `test_contract.py` tests, each with its oracle in NumPy float64.

A new operator that stores codes is one entry here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracles
from ops.attention_cases import rotated_oracle
from ops.helpers import KEY, normal, tables
from ops.operator_cases import DRAWN, MIXED, NEAREST, OPERATORS, Operator

from actjax import (
    Codec,
    Quantized,
    attention,
    conv,
    gelu,
    layer_norm,
    rms_norm,
    swiglu,
    token_log_probs,
)

EPS = 0.1
JOINED = Quantized(4, group=5)
"""Joins positions of an image whose channels are few."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator whose backward pass reads decoded inputs.

    Attributes:
      call: from the inputs, the other arguments and options to the output.
      oracle: from the inputs and the other arguments to the output.
      vjp: from both and the cotangent of the output to their cotangents, each a tuple.
      inputs: shapes of the arrays that are stored as codes.
      others: shapes of the other arguments, or a function that makes them.
      codecs: a codec for each input.
      names: what `explain` calls the codes of an operator with the name "mine".
      operator: what `explain` calls the operator.
      folds_key: whether the key of an input is folded from that of the operator.
      tables: bytes of constants that the backward pass holds.
    """

    call: Callable[..., Any]
    oracle: Callable[..., Any]
    vjp: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...]
    others: Any
    codecs: tuple[Codec, ...]
    names: tuple[str, ...]
    operator: str
    folds_key: bool = True
    tables: int = 0

    def arguments(self, dtype: Any = None) -> tuple[Any, Any]:
        """Returns inputs and other arguments."""
        inputs = tuple(normal(i, *shape, dtype=dtype) for i, shape in enumerate(self.inputs))
        if callable(self.others):
            return inputs, self.others(dtype)
        return inputs, tuple(normal(9 + i, *s, dtype=dtype) for i, s in enumerate(self.others))

    def keys(self) -> Any:
        """Returns the key of each input."""
        count = len(self.inputs)
        return [jax.random.fold_in(KEY, i) if self.folds_key else KEY for i in range(count)]

    def decoded(self, codecs: Any, inputs: Any) -> tuple[Any, ...]:
        """Returns what the backward pass reads."""
        hats = []
        for codec, x, key in zip(codecs, inputs, self.keys(), strict=True):
            code = codec.encode(x.reshape(self.coded_shape(codec, x.shape)), key)
            hats.append(codec.decode(code).reshape(x.shape))
        return tuple(hats)

    def coded_shape(self, codec: Codec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an input as it is encoded."""
        if self.operator == "conv":
            return codec.grouped_shape(shape)
        return (*shape[:2], -1) if self.operator.startswith("attention") else shape

    def stored_bytes(self, codecs: Any, dtype: Any) -> list[int]:
        """Returns the bytes of each code."""
        pairs = zip(codecs, self.inputs, strict=True)
        coded = [
            (c, np.zeros(shape).reshape(self.coded_shape(c, shape)).shape) for c, shape in pairs
        ]
        return [codec.stored_bytes(shape, dtype) for codec, shape in coded]


def of_weights(name: str, operator: Operator) -> Case:
    """Returns the case of an operator that ends in products with weights."""
    outputs = 3, 1, 4
    # The case of attention alone has the blockwise form.
    fixed = {"implementation": "dense"} if name == "attention" else {}
    codecs = (DRAWN,) if name == "linear" else MIXED[name]
    labels = {"swiglu": ("mine gate", "mine up"), "attention": ("mine q", "mine k", "mine v")}

    def others(dtype: Any) -> Any:
        ws = tuple(normal(20 + n, 8, n, dtype=dtype) for n in outputs)
        return operator.scale(), ws, (normal(30, 3, dtype=dtype), None, normal(31, 4, dtype=dtype))

    def oracle(inputs: Any, others: Any) -> Any:
        scale, ws, biases = others
        y = operator.oracle(inputs, scale)
        return tuple(y @ w + (0 if b is None else b) for w, b in zip(ws, biases, strict=True))

    def vjp(inputs: Any, others: Any, dzs: Any) -> Any:
        scale, ws, biases = others
        dy = sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True))
        dxs, dscale = operator.vjp(inputs, scale, dy)
        y = operator.oracle(inputs, scale)
        dws = tuple(np.einsum("bsd,bsn->dn", y, dz) for dz in dzs)
        dbs = tuple(
            None if b is None else dz.sum((0, 1)) for b, dz in zip(biases, dzs, strict=True)
        )
        return dxs, (dscale, dws, dbs)

    return Case(
        lambda xs, others, **options: operator.call(
            xs, others[0], others[1], bias=others[2], **fixed, **options
        ),
        oracle,
        vjp,
        operator.shapes,
        others,
        codecs,
        labels.get(name, ("mine",)),
        name if name == "linear" else f"{name}_linear",
        folds_key=name != "linear",
        tables=2 * 5 * 1 * 4 if name == "attention" else 0,
    )


def of_gelu(approximate: bool) -> Case:
    return Case(
        lambda xs, _, **options: gelu(*xs, approximate=approximate, **options),
        lambda xs, _: oracles.gelu(*xs, approximate),
        lambda xs, _, dy: ((oracles.gelu_vjp(*xs, approximate, dy),), ()),
        ((2, 5, 8),),
        (),
        (NEAREST if approximate else DRAWN,),
        ("mine",),
        "gelu",
    )


def layer_norm_vjp(xs: Any, parameters: Any, dy: Any) -> Any:
    dx, dscale, dbias = oracles.layer_norm_vjp(*xs, parameters[0], EPS, dy)
    return (dx,), (dscale, dbias)


def rms_norm_vjp(xs: Any, parameters: Any, dy: Any) -> Any:
    dx, dscale = oracles.rms_norm_vjp(*xs, *parameters, EPS, dy)
    return (dx,), (dscale,)


def attention_vjp(xs: Any, _: Any, dy: Any) -> Any:
    return rotated_oracle(*xs, dy)[1:], ()


SAME = (1, 1), ((1, 1), (0, 1)), (1, 1), 2
"""Strides, padding, dilation and groups of the convolution."""


def conv_vjp(xs: Any, ws: Any, dz: Any) -> Any:
    dx, dw = oracles.conv_vjp(*xs, *ws, dz, *SAME)
    return (dx,), (dw,)


LABELS = np.int32([3, 0, 6, 3, 5])
"""Labels of the tokens of each example, so that examples in any order have the same."""


def labels_of(hidden: Any) -> np.ndarray:
    """Returns the labels of hidden states [..., d]."""
    return np.resize(LABELS, hidden.shape[:-1])


def log_probs_vjp(xs: Any, heads: Any, dy: Any) -> Any:
    dhidden, dhead = oracles.token_log_probs_vjp(*xs, *heads, labels_of(*xs), dy)
    return (dhidden,), (dhead,)


CASES = {
    "rms_norm": Case(
        lambda xs, p, **options: rms_norm(*xs, *p, eps=EPS, **options),
        lambda xs, p: oracles.rms_norm(*xs, *p, EPS),
        rms_norm_vjp,
        ((2, 5, 8),), ((8,),), (DRAWN,), ("mine",), "rms_norm",
    ),
    "layer_norm": Case(
        lambda xs, p, **options: layer_norm(*xs, *p, eps=EPS, **options),
        lambda xs, p: oracles.layer_norm(*xs, *p, EPS),
        layer_norm_vjp,
        ((2, 5, 8),), ((8,), (8,)), (DRAWN,), ("mine",), "layer_norm",
    ),
    "swiglu": Case(
        lambda xs, _, **options: swiglu(*xs, **options),
        lambda xs, _: oracles.swiglu(*xs),
        lambda xs, _, dy: (oracles.swiglu_vjp(*xs, dy), ()),
        ((2, 5, 8),) * 2, (), (NEAREST, DRAWN), ("mine gate", "mine up"), "swiglu",
    ),
    "gelu": of_gelu(True),
    "gelu, erf": of_gelu(False),
    "conv": Case(
        lambda xs, ws, **options: conv(*xs, *ws, feature_group_count=2, **options),
        lambda xs, ws: oracles.conv(*xs, *ws, *SAME),
        conv_vjp,
        ((2, 5, 4, 6),), ((3, 2, 3, 4),), (JOINED,), ("mine",), "conv",
    ),
    "attention": Case(
        lambda xs, _, **options: attention(*xs, rope=tables(5, 4), **options),
        lambda xs, _: rotated_oracle(*xs, xs[0])[0],
        attention_vjp,
        ((2, 5, 4, 4), (2, 5, 2, 4), (2, 5, 2, 4)), (), (DRAWN, NEAREST, NEAREST),
        ("mine q", "mine k", "mine v"), "attention", tables=2 * 5 * 2 * 4,
    ),
    "token_log_probs": Case(
        lambda xs, heads, **options: token_log_probs(
            *xs, *heads, labels_of(*xs), chunk=3, **options
        ),
        lambda xs, heads: oracles.token_log_probs(*xs, *heads, labels_of(*xs)),
        log_probs_vjp,
        ((2, 5, 8),), ((8, 7),), (DRAWN,), ("mine hidden",), "token_log_probs",
        folds_key=False, tables=LABELS.nbytes * 2,
    ),
    **{
        name if name == "linear" else f"{name}_linear": of_weights(name, operator)
        for name, operator in OPERATORS.items()
    },
}  # fmt: skip
