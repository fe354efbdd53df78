"""The optimizer inside the backward pass: a gradient of all weights never exists.

This is the per-layer update of LOMO (Lv et al., 2023) and GaLore, for layers that are stacked and
scanned. The backward pass is a loop that carries the cotangent of the residual stream, and the
stacked weights and states. Each iteration computes the vector-Jacobian product of one layer,
updates this layer, and writes it back in place. Full-rank AdamW then fits where its gradients alone
would not.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval

from actjax._core.paths import named_leaves
from actjax._host import fetched
from actjax.codecs.base import check_positive_integer
from actjax.low_rank import clip_factor, global_norm, scale_tree
from actjax.optim.apply import (
    check_state,
    refresh_by_layer,
    update_one,
    update_pieces,
    update_rest,
)
from actjax.optim.apply import init as init_layerwise
from actjax.optim.checks import check_callable, check_transform
from actjax.optim.host_states import downwards, read_before_writing
from actjax.optim.layer_vjp import LayerVjp, form_of
from actjax.optim.layers import (
    LayerwiseState,
    count_layers,
    layers_of,
    merge,
    put,
    split,
    take,
)
from actjax.optim.pieces import filled, without
from actjax.optim.subspace import SubspaceTransformation
from actjax.transforms.accumulate import sum_gradients
from actjax.transforms.taps import Bases

ClipBy = Literal["estimate", "layer_norm"]


class InBackwardState(NamedTuple):
    """State of `in_backward`.

    Attributes:
      optimizer: a `LayerwiseState`.
      grad_norm: global norm of the last gradient, float32; 0 before the first step.
      typical: typical squared norms of the parts of a gradient in the order in which the backward
        pass computes them, [layers + 2]: that of `after`, the layers from the last to the first,
        then what `before` adds. Means over about the last five steps, of logarithms, so that a rare
        large gradient leaves no trace; 0 before the first step.
      clip_error: how far clipping by estimates was from clipping by the norm in the last step,
        float32: the largest `|f / f* - 1|` over the parts of the gradient, where a part was
        multiplied by `f` and the norm of the whole gradient asks for `f*`. 0 if neither clips.
    """

    optimizer: LayerwiseState
    grad_norm: Any
    typical: Any
    clip_error: Any


@dataclasses.dataclass(frozen=True, eq=False)
class InBackward:
    """A training step whose backward pass updates the parameters, made by `in_backward`.

    Attributes:
      before: from parameters and inputs to the input of the first layer.
      layer: one layer.
      after: from parameters and the output of the last layer to the loss.
      tx: the optax transform.
      layers: from the parameters to the subtree of stacked layers.
      clip: largest norm of a gradient.
      clip_by: which norm is clipped.
      fetch: what is fetched ahead of the backward pass of a layer; None for nothing.
      accumulate: number of micro-batches.
    """

    before: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    after: Callable[[Any, Any, Any], jax.Array]
    tx: optax.GradientTransformation
    layers: Callable[[Any], Any]
    clip: float
    clip_by: ClipBy
    fetch: Callable[[Any], Any] | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        check_transform("tx", self.tx)
        check_positive_integer("in_backward", "accumulate", self.accumulate)
        for name in ("before", "layer", "after", "layers"):
            check_callable(name, getattr(self, name))
        if self.fetch is not None:
            check_callable("fetch", self.fetch)
        if not isinstance(self.clip, numbers.Real) or not self.clip > 0:
            raise ValueError(f"`clip` of in_backward must be a number above 0, got {self.clip!r}.")
        if self.clip_by not in get_args(ClipBy):
            raise ValueError(
                f"`clip_by` of in_backward must be one of {get_args(ClipBy)}: {self.clip_by!r}"
            )
        if self.clip_by == "layer_norm" and math.isinf(self.clip):
            raise ValueError("`clip_by='layer_norm'` of in_backward has no effect without `clip`.")

    def init(self, params: Any) -> InBackwardState:
        """Returns the state before the first step."""
        optimizer = init_layerwise(self.tx, params, layers=self.layers)
        count = count_layers(split(params, self.layers)[0])
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return InBackwardState(optimizer, zeros(()), zeros(count + 2), zeros(()))

    def step(
        self,
        params: Any,
        state: InBackwardState,
        inputs: Any,
        per_layer: Any = None,
        refresh: bool | jax.Array = False,
        weights: jax.Array | None = None,
    ) -> tuple[Any, InBackwardState, jax.Array, jax.Array]:
        """Takes one step.

        With `accumulate` micro-batches, every array of `inputs` and `per_layer` has one more axis,
        the first, which numbers them.

        Args:
          params: the parameters; donate them.
          state: what `init` or the last step returned; donate it.
          inputs: the last argument of `before` and `after` and the third of `layer`, such as a
            batch.
          per_layer: a pytree of arrays [layers, ...], such as keys, of which `layer` gets a slice.
          refresh: as for `actjax.optim.apply`.
          weights: of the micro-batches, [accumulate]; by default `1 / accumulate` each.

        Returns:
          The new parameters and state, the loss, and the norm of what was added to the parameters.

        Raises:
          ValueError: a state that `init` did not make for these parameters, parameters that are
            not floating point, arrays of `inputs` or `per_layer` with other axes, a layer whose
            output does not have the shape and dtype of its input, or a loss that is not a floating
            point scalar.
        """
        count = self._check(params, state, per_layer)
        weights = self._check_batches(inputs, weights)
        stacked, rest = split(params, self.layers)
        whole, due_layers = refresh_by_layer(self.tx, refresh, count)
        bases_of = self._bases_of(is_refresh=whole or due_layers is not None)
        # A norm that is not finite predicts nothing about this gradient.
        typical = jnp.where(jnp.isfinite(state.typical), state.typical, 0)
        one_layer = LayerVjp(lambda p, x, i, own: self.layer(self.layers(p), x, i, own))
        bases = bases_of(state.optimizer.layers)

        def forward(batch: Any) -> Any:
            inputs, own, weight = batch
            x, before_vjp = self._differentiated(lambda p: self.before(p, inputs), rest)
            run = functools.partial(one_layer.forward, inputs)
            x, kept = jax.lax.scan(run, x, (stacked, bases, own))
            loss, grads, dx = self._differentiate_after(rest, x, inputs, weight)
            # Several of it might hold several copies of the weights.
            return (loss, grads), (dx, kept, before_vjp if self.accumulate == 1 else None)

        found, others = self._over_batches(forward, (inputs, per_layer, weights))
        (loss, rest_grads), (dx, kept, before_vjp) = found, others
        squares = jnp.zeros(count + 2, jnp.float32).at[0].set(_squared_norm(rest_grads))
        estimates = jnp.zeros(count + 2, jnp.float32)
        optimizer, moved, pieces = state.optimizer, jnp.zeros((), jnp.float32), {}

        # What only `after` reads is updated first, so that its gradient is gone before the layers.
        grads = named_leaves(rest_grads)
        early = [name for name in self._early(rest, inputs, optimizer.pieces) if name in grads]
        rest_grads, square_of_early = without(rest_grads, early), jnp.zeros((), jnp.float32)
        for name in early:
            grad = grads[name]
            square = _squared_norm(grad)
            estimate = self._norm_to_clip(_estimated_norm(squares, typical, 1), square)
            estimates = estimates.at[0].set(estimate)
            rest, pieces[name], more = update_pieces(
                self.tx, name, self._clipped(grad, estimate), optimizer.pieces[name], rest
            )
            rest, dx = jax.lax.optimization_barrier((rest, dx))
            moved, square_of_early = moved + more, square_of_early + square

        def backward(i: jax.Array, carry: Any) -> Any:
            dx, stacked, optimizer, squares, estimates, moved, ahead = carry
            n = count - 1 - i
            block, layer_state = take(stacked, i), fetched(take(optimizer, i))
            own = _inserted(block, ahead), bases_of(layer_state)
            ahead = self._fetched(stacked, jnp.maximum(i - 1, 0))

            def of_batch(batch: Any) -> tuple[Any, Any]:
                inputs, per_layer, kept, dx = batch
                return one_layer.backward(inputs, (*own, per_layer), kept, dx)

            axis = int(self.accumulate > 1)
            slices = take((per_layer, kept), i, axis)
            grads, dx = self._over_batches(of_batch, (inputs, *slices, dx))
            # What is fetched from the host has the time of the gradient for it.
            optimizer, layer_state, grads, dx = read_before_writing(
                optimizer, layer_state, grads, dx
            )
            square = _squared_norm(grads)
            squares = squares.at[n + 1].set(square)
            estimate = self._norm_to_clip(_estimated_norm(squares, typical, n + 2), square)
            estimates = estimates.at[n + 1].set(estimate)
            grads = self._clipped(grads, estimate)
            due = whole if due_layers is None else due_layers[i]
            block, layer_state, more = update_one(self.tx, grads, layer_state, block, due)
            stacked, optimizer = put(stacked, block, i), put(optimizer, layer_state, i)
            return dx, stacked, optimizer, squares, estimates, moved + more, ahead

        ahead = self._fetched(stacked, count - 1)
        carry = dx, stacked, optimizer.layers, squares, estimates, moved, ahead
        carry = downwards(count, backward, carry, optimizer.layers, kept)
        dx, stacked, layers_state, squares, estimates, moved, _ = carry

        def before(batch: Any) -> tuple[Any, None]:
            inputs, dx = batch
            return self._differentiated(lambda p: self.before(p, inputs), rest)[1](dx)[0], None

        if before_vjp is None:
            of_before, _ = self._over_batches(before, (inputs, dx))
        else:
            (of_before,) = before_vjp(dx)
        rest_grads = _sum_of_parts(without(rest, early), rest_grads, of_before)
        square = _squared_norm(rest_grads)
        norm = jnp.sqrt(jnp.sum(squares[1:]) + square_of_early + square)
        squares = squares.at[-1].set(jnp.maximum(square + square_of_early - squares[0], 0))
        rest_grads = self._clipped(rest_grads, self._norm_to_clip(norm, square))
        for name in sorted(set(optimizer.pieces) - set(early)):
            grad = named_leaves(rest_grads)[name]
            rest, pieces[name], more = update_pieces(
                self.tx, name, grad, optimizer.pieces[name], rest
            )
            moved += more
        rest, rest_state, more = update_rest(self.tx, rest_grads, optimizer, rest, whole)
        optimizer = LayerwiseState(layers_state, rest_state, pieces)
        error = self._clip_error(estimates if early else estimates[1:], norm)
        state = InBackwardState(optimizer, norm, _followed(typical, squares), error)
        return merge(stacked, rest, params), state, loss, jnp.sqrt(moved + more)

    def _over_batches(self, run: Callable[[Any], tuple[Any, Any]], slices: Any) -> tuple[Any, Any]:
        """Returns the sum over micro-batches of the gradient, and a stack of what comes beside it.

        Args:
          run: from one micro-batch to a gradient and other arrays.
          slices: the micro-batches; if there is one, without the axis that numbers them.
        """
        return run(slices) if self.accumulate == 1 else sum_gradients(run, slices)

    def _early(self, rest: Any, inputs: Any, pieces: Mapping[str, Any]) -> list[str]:
        """Returns which matrices that are updated in pieces `before` does not read."""
        # By "layer_norm", all parameters outside the layers are clipped together.
        if not pieces or self.clip_by == "layer_norm":
            return []
        one = inputs
        if self.accumulate > 1:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
        read = _read_by(self.before, rest, one)
        return [name for name in pieces if name not in read]

    def _differentiated(self, fun: Callable[[Any], Any], rest: Any) -> tuple[Any, Any]:
        """Returns `fun(rest)` and its VJP for the parameters that it reads; `None` for others.

        The VJP of JAX gives zeros for the others, as large as they are.
        """
        read = _read_by(fun, rest)
        others = {name: x for name, x in named_leaves(rest).items() if name not in read}
        return jax.vjp(lambda own: fun(filled(own, others, rest)), without(rest, others))

    def _fetched(self, stacked: Any, i: jax.typing.ArrayLike) -> list[Any]:
        """Returns what is fetched of a layer, in the order of its arrays; None for the others."""
        if self.fetch is None:
            return [None for _ in jax.tree.leaves(stacked)]
        layer = take(stacked, i)
        try:
            return jax.tree.structure(layer).flatten_up_to(self.fetch(layer))
        except ValueError as error:
            raise ValueError(
                "`fetch` of in_backward must return the parameters of the layer that it gets, with"
                f" None for what it leaves: {error}"
            ) from error

    def _check(self, params: Any, state: Any, per_layer: Any) -> int:
        """Returns the number of layers; raises an error for arguments that do not fit them."""
        if not isinstance(state, InBackwardState):
            raise ValueError(
                "`state` must be what `init` or the last `step` of this in_backward returned: got"
                f" {type(state).__name__}."
            )
        for path, x in jax.tree.leaves_with_path(params):
            dtype = jnp.result_type(x)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    "`params` of in_backward must be floating point, but"
                    f" {jax.tree_util.keystr(path)} is {dtype}: give other arrays in `inputs` or"
                    " `per_layer`."
                )
        check_state(self.tx, state.optimizer, params, self.layers)
        count = count_layers(split(params, self.layers)[0])
        lead = (count,) if self.accumulate == 1 else (self.accumulate, count)
        for x in jax.tree.leaves(per_layer):
            if jnp.shape(x)[: len(lead)] != lead:
                axes = "layers" if self.accumulate == 1 else "micro-batches and layers"
                raise ValueError(
                    f"arrays of `per_layer` must begin with {lead}, the {axes}: got one with shape"
                    f" {jnp.shape(x)}."
                )
        return count

    def _check_batches(self, inputs: Any, weights: Any) -> jax.Array:
        """Returns the weights of the micro-batches; raises an error for inputs that do not fit."""
        count = self.accumulate
        if count == 1:
            if weights is not None:
                raise ValueError("`weights` of in_backward is for `accumulate` above 1: drop it.")
            return jnp.ones((), jnp.float32)
        for path, x in jax.tree.leaves_with_path(inputs):
            if jnp.shape(x)[:1] != (count,):
                raise ValueError(
                    f"`accumulate={count}` of in_backward: arrays of `inputs` must have a leading"
                    f" axis of {count} micro-batches, but `{jax.tree_util.keystr(path)}` has shape"
                    f" {jnp.shape(x)}. Reshape [B, ...] to [{count}, B / {count}, ...], with a"
                    f" batch that is a multiple of {count}."
                )
        if weights is None:
            return jnp.full((count,), 1 / count, jnp.float32)
        if jnp.shape(weights) != (count,):
            raise ValueError(f"`weights` must be [{count}], got {list(jnp.shape(weights))}.")
        return jnp.asarray(weights, jnp.float32)

    def _bases_of(self, *, is_refresh: bool) -> Callable[[Any], Bases]:
        """Returns a function from an optimizer state to the bases that inputs are stored in."""
        if isinstance(self.tx, SubspaceTransformation) and not is_refresh:
            return self.tx.bases
        return lambda _: Bases({})

    def _differentiate_after(
        self, rest: Any, x: Any, inputs: Any, weight: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the loss times a weight, and its gradients: of parameters, and of the input."""
        both = {"rest": rest, "x": x}
        loss, vjp = self._differentiated(lambda p: self.after(p["rest"], p["x"], inputs), both)
        form = form_of(loss)
        is_scalar = isinstance(form, jax.ShapeDtypeStruct) and form.shape == ()
        if not is_scalar or not jnp.issubdtype(form.dtype, jnp.floating):
            raise ValueError(f"`after` must return a floating point scalar, got {form}.")
        # The gradient is read here and at the end of the step. Without the barrier, XLA may keep it
        # in float32 in between.
        weight = weight.astype(loss.dtype)
        (grads,) = jax.lax.optimization_barrier(vjp(weight))
        return loss * weight, grads["rest"], _filled_with_zeros(grads["x"], x)

    def _norm_to_clip(self, estimate: jax.Array, square: jax.Array) -> jax.Array:
        """Returns the norm by which a part of the gradient is clipped.

        Args:
          estimate: estimated norm of the whole gradient.
          square: squared norm of the part.
        """
        return estimate if self.clip_by == "estimate" else jnp.sqrt(square)

    def _clipped(self, grads: Any, norm: jax.Array) -> Any:
        """Returns a part of the gradient, clipped by a norm."""
        return grads if math.isinf(self.clip) else scale_tree(grads, clip_factor(norm, self.clip))

    def _clip_error(self, estimates: jax.Array, norm: jax.Array) -> jax.Array:
        """Returns `clip_error` of the state.

        Args:
          estimates: norms by which parts were clipped; 0 for parts that were clipped by `norm`.
          norm: of the whole gradient.
        """
        if math.isinf(self.clip) or self.clip_by == "layer_norm":
            return jnp.zeros((), jnp.float32)
        factors = clip_factor(jnp.where(estimates > 0, estimates, norm), self.clip)
        return jnp.max(jnp.abs(factors / clip_factor(norm, self.clip) - 1))


def in_backward(
    before: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any, Any], Any],
    after: Callable[[Any, Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    layers: Callable[[Any], Any] = layers_of,
    clip: float = math.inf,
    clip_by: ClipBy = "estimate",
    fetch: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
) -> InBackward:
    """Returns a training step that updates each layer within the backward pass.

    The model is given as three functions:

        before(params, inputs) -> x                     # embedding
        layer(layer_params, x, inputs, slice) -> x      # one layer, and its slice of per_layer
        after(params, x, inputs) -> loss                # last norm, output projection, loss

    `before` and `after` get the parameters with `None` in the place of the layers. A parameter that
    both read, such as a tied embedding, gets the sum of both gradients. `x` is any pytree of
    floating point arrays. Compile the step with `jax.jit`, with parameters and state donated, and
    with `refresh` static for a `subspace`:

        update = actjax.optim.in_backward(before, layer, after, tx)
        state = update.init(params)
        step = jax.jit(update.step, donate_argnums=(0, 1), static_argnames="refresh")
        params, state, loss, update_norm = step(params, state, inputs, per_layer)

    The residuals are those of `jax.vjp(layer)`, so codecs and `jax.checkpoint(layer)` work as
    usual. The weights of a layer are not stored with them but sliced again. Weights that meet a
    factored codec get factored gradients, and under `subspace` gradients in its bases.

    The norm of the whole gradient is known only after the last layer has been updated. Since the
    norms of layers grow and shrink together, it can be estimated: parts that are not known yet have
    their typical norms, times the growth of the known layers over theirs (geometric mean). In the
    first step they are taken to be as large as the known layers are on average.

    Args:
      before: from parameters and inputs to the input of the first layer.
      layer: from the parameters of one layer, without the leading axis, to the input of the next.
      after: from parameters and the output of the last layer to a scalar loss.
      tx: an optax transform that treats each array separately: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      clip_by: which norm is clipped. "estimate": the estimate above, and at least the norm of the
        known parts; it is exact for parameters outside the layers, except for those that are
        updated before. "layer_norm": the norm of each layer, and of the rest, separately.
      fetch: from the parameters of a layer, divided over devices, to the same parameters with those
        gathered that its backward pass reads first, and None for the others. They are gathered
        while the layer after it is differentiated, and take memory meanwhile. The order of leaves
        is that of the parameters. None fetches nothing ahead.
      accumulate: number of micro-batches. Above 1, `step` takes arrays with a leading axis of them.

    Raises:
      TypeError: `tx` is not a transform, or one of the functions is not a function.
      ValueError: `clip` is not positive, `clip_by` is unknown or has no effect, or `accumulate` is
        below 1.
    """
    return InBackward(before, layer, after, tx, layers, clip, clip_by, fetch, accumulate)


def _inserted(block: Any, ahead: list[Any]) -> Any:
    """Returns the parameters of a layer, with those that were fetched in their places."""
    leaves, treedef = jax.tree.flatten(block)
    pairs = zip(leaves, ahead, strict=True)
    return jax.tree.unflatten(treedef, [x if found is None else found for x, found in pairs])


def _read_by(fun: Callable[..., Any], params: Any, *args: Any) -> set[str]:
    """Returns the paths of the parameters that `fun(params, *args)` reads."""
    jaxpr = jax.make_jaxpr(fun)(params, *args).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return {name for name, is_read in zip(named_leaves(params), used, strict=False) if is_read}


def _filled_with_zeros(grads: Any, like: Any) -> Any:
    """Returns gradients with zeros in the place of `None`."""
    known = named_leaves(grads)
    zeros = {name: jnp.zeros_like(x) for name, x in named_leaves(like).items() if name not in known}
    return filled(grads, zeros, like)


def _sum_of_parts(rest: Any, *parts: Any) -> Any:
    """Returns the sum of gradients that have `None` for parameters without one.

    Args:
      rest: the parameters.
      *parts: the gradients.
    """
    found: dict[str, Any] = {}
    for part in parts:
        for name, g in named_leaves(part).items():
            found[name] = found[name] + g if name in found else g
    wanted = {name: found[name] for name in named_leaves(rest) if name in found}
    zeros = {name: jnp.zeros_like(x) for name, x in named_leaves(rest).items()}
    return filled(rest, {**zeros, **wanted}, rest)


def _squared_norm(grads: Any) -> jax.Array:
    return global_norm(grads).astype(jnp.float32) ** 2


_DECAY = 0.8
"""Of typical norms. 0.5 to 0.9 estimate about equally well."""
_MOST_GROWTH = 1e12
"""Of a squared norm, so that layers whose gradients were nearly zero do not give inf."""


def _estimated_norm(
    squares: jax.Array, typical: jax.Array, count: jax.typing.ArrayLike
) -> jax.Array:
    """Returns the estimated norm of a gradient of which some parts are known.

    Args:
      squares: squared norms of the parts in the order of the backward pass, [layers + 2]: that of
        `after`, then the layers; zeros for those that are not known yet.
      typical: typical values of `squares`; zeros in the first step.
      count: number of known parts, at least 1.
    """
    part, layers = jnp.arange(typical.size), count - 1
    later = jnp.sum(jnp.where(part < count, 0, typical))
    # The growth of `after` says less about layers than that of layers.
    both = (squares > 0) & (typical > 0) & ((part > 0) | (layers == 0))
    logs = jnp.where(both, jnp.log(squares / jnp.where(both, typical, 1)), 0)
    growth = jnp.exp(jnp.sum(logs) / jnp.maximum(jnp.sum(both), 1))
    unknown = later * jnp.minimum(growth, _MOST_GROWTH)
    as_large = jnp.sum(squares[1:]) * (typical.size - count) / jnp.maximum(layers, 1)
    return jnp.sqrt(jnp.sum(squares) + jnp.where(jnp.any(typical > 0), unknown, as_large))


def _followed(typical: jax.Array, squares: jax.Array) -> jax.Array:
    """Returns typical squared norms after a gradient; one of zero, inf or nan says nothing."""
    mean = jnp.exp(_DECAY * jnp.log(typical) + (1 - _DECAY) * jnp.log(squares))
    known = (squares > 0) & jnp.isfinite(squares)
    return jnp.where(known, jnp.where(typical > 0, mean, squares), typical)
