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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from actjax._core.paths import named_leaves
from actjax._host import fetched
from actjax.codecs.base import check_positive_integer
from actjax.factored.taps import Bases
from actjax.optim.checks import check_callable, check_transform
from actjax.optim.layers import (
    LayerwiseState,
    count_layers,
    layers_of,
    merge,
    put,
    split,
    take,
)
from actjax.optim.projected.subspace import SubspaceTransformation
from actjax.optim.states.host_states import downwards, read_before_writing
from actjax.optim.stepping import in_place
from actjax.optim.stepping.apply import (
    check_refresh,
    check_state,
    update_one,
    update_pieces,
    update_rest,
)
from actjax.optim.stepping.apply import init as init_layerwise
from actjax.optim.stepping.clipping import Clipping, PartNorms, check_clip, followed, squared_norm
from actjax.optim.stepping.passes import Layered, Passes, Residuals, sum_of_parts
from actjax.optim.stepping.pieces import without


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

    Its fields are the arguments of `in_backward`.
    """

    before: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    after: Callable[[Any, Any, Any], jax.Array]
    tx: optax.GradientTransformation
    layers: Callable[[Any], Any]
    clip: float
    fetch: Callable[[Any], Any] | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        check_transform("tx", self.tx)
        check_positive_integer("in_backward", "accumulate", self.accumulate)
        for name in ("before", "layer", "after", "layers"):
            check_callable(name, getattr(self, name))
        if self.fetch is not None:
            check_callable("fetch", self.fetch)
        check_clip("in_backward", self.clip)

    @property
    def model(self) -> Layered:
        """The functions of the model."""
        return Layered(self.before, self.layer, self.after, self.layers, self.accumulate)

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
        refresh: bool = False,
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
          The new parameters and state, the loss, and the norm of what was added to the parameters,
          estimated as by `actjax.optim.apply`.

        Raises:
          ValueError: a state that `init` did not make for these parameters, parameters that are
            not floating point, arrays of `inputs` or `per_layer` with other axes, a layer whose
            output does not have the shape and dtype of its input, or a loss that is not a floating
            point scalar.
        """
        self._check(params, state, per_layer)
        check_refresh(self.tx, refresh)
        batch = inputs, per_layer, self._check_batches(inputs, weights)
        step = _Step(self, state, batch, bool(refresh))
        stacked, rest = split(params, self.layers)
        loss, grads, residuals = step.forward(stacked, rest)
        outside, norms, dx = step.update_early(rest, grads, residuals.dx)
        carry = step.update_layers(stacked, residuals.layers, dx, norms, outside.moved)
        of_before = step.gradient_of_before(rest, residuals.before, carry.dx)
        outside, state = step.update_late(outside, of_before, carry)
        moved = jnp.sqrt(outside.moved)
        return merge(carry.stacked, outside.params, params), state, loss, moved

    def _check(self, params: Any, state: Any, per_layer: Any) -> None:
        """Raises a `ValueError` for arguments that do not fit the parameters."""
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

    def _check_batches(self, inputs: Any, weights: Any) -> jax.Array:
        """Returns the weights of the micro-batches, or raises a `ValueError`."""
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


def in_backward(
    before: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any, Any, Any], Any],
    after: Callable[[Any, Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    *,
    layers: Callable[[Any], Any] = layers_of,
    clip: float = math.inf,
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

    The norm of the whole gradient is known only after the last layer has been updated. Layers are
    clipped by an estimate of it, and at least by the norm of the parts that are known
    (`actjax.optim.stepping.clipping`). Parameters outside the layers are clipped by the norm
    itself, except for large matrices that only `after` reads, which are updated before the layers.

    Args:
      before: from parameters and inputs to the input of the first layer.
      layer: from the parameters of one layer, without the leading axis, to the input of the next.
      after: from parameters and the output of the last layer to a scalar loss.
      tx: an optax transform that treats each array separately: AdamW, `eight_bit`, `subspace`, with
        weight decay and schedules; see `actjax.optim.apply`.
      layers: from the parameters to the subtree of stacked layers, by default `layers`.
      clip: largest norm of a gradient.
      fetch: from the parameters of a layer, divided over devices, to the same parameters with those
        gathered that its backward pass reads first, and None for the others. They are gathered
        while the layer after it is differentiated, and take memory meanwhile. The order of leaves
        is that of the parameters. None fetches nothing ahead.
      accumulate: number of micro-batches. Above 1, `step` takes arrays with a leading axis of them.

    Raises:
      TypeError: `tx` is not a transform, or one of the functions is not a function.
      ValueError: `clip` is not positive, or `accumulate` is below 1.
    """
    return InBackward(before, layer, after, tx, layers, clip, fetch, accumulate)


class _Outside(NamedTuple):
    """Parameters outside the layers, of which some large matrices may have been updated.

    Attributes:
      params: the parameters.
      grads: gradients that have not been applied; None for the others.
      states: new states of matrices that are updated in pieces, by path.
      square: squared norm of the gradients that have been applied.
      moved: squared norm of what was added to all parameters, layers included.
    """

    params: Any
    grads: Any
    states: dict[str, Any]
    square: jax.Array
    moved: jax.Array


class _Carry(NamedTuple):
    """Carry of the backward loop, which goes from the last layer to the first.

    Attributes:
      dx: cotangent of the output of the next layer.
      stacked: the stacked weights.
      states: their optimizer states.
      norms: norms of the parts of the gradient.
      moved: squared norm of what was added to the parameters.
      ahead: arrays of the next layer that were fetched ahead; None for its others.
    """

    dx: Any
    stacked: Any
    states: Any
    norms: PartNorms
    moved: jax.Array
    ahead: list[Any]


class _Step:
    """The parts of one step, in the order in which they run."""

    def __init__(
        self, settings: InBackward, state: InBackwardState, batch: Any, refresh: bool
    ) -> None:
        """Takes what all parts read.

        Args:
          settings: functions of the model, and the transform.
          state: the state before the step.
          batch: `inputs`, `per_layer` and `weights`, as for `InBackward.step`.
          refresh: whether to take new bases.
        """
        self._settings, self._tx, self._optimizer = settings, settings.tx, state.optimizer
        self._passes, self._per_layer = Passes(settings.model, *batch), batch[1]
        self._refresh, self._clipping = refresh, Clipping(settings.clip)
        self._count = state.typical.size - 2
        # A norm that is not finite predicts nothing about this gradient.
        self._typical = jnp.where(jnp.isfinite(state.typical), state.typical, 0)

    def forward(self, stacked: Any, rest: Any) -> tuple[jax.Array, Any, Residuals]:
        """Returns the loss, the gradient of `after`, and the residuals."""
        return self._passes.forward(stacked, rest, self._bases_of(self._optimizer.layers))

    def gradient_of_before(self, rest: Any, vjp: Any, dx: Any) -> Any:
        """Returns the gradient of `before`, as `Passes.gradient_of_before`."""
        return self._passes.gradient_of_before(rest, vjp, dx)

    def update_early(self, rest: Any, grads: Any, dx: Any) -> tuple[_Outside, PartNorms, Any]:
        """Updates matrices that only `after` reads: their gradients are gone before the layers.

        Args:
          rest: the parameters outside the layers.
          grads: the gradient of `after`.
          dx: cotangent of the output of the last layer.

        Returns:
          The parameters outside the layers, the norms that are known, and `dx`, which exists only
          after these updates.
        """
        zeros = jnp.zeros(self._count + 2, jnp.float32)
        norms, zero = PartNorms(zeros, zeros), jnp.zeros((), jnp.float32)
        known = norms.add(0, grads, self._typical)
        gradients = named_leaves(grads)
        cut = [name for name in self._optimizer.pieces if name in gradients]
        read_again = self._passes.read_by_before(rest) if cut else set()
        early = [name for name in cut if name not in read_again]
        # Without such matrices, everything outside the layers is clipped by the norm itself.
        norms = known if early else norms._replace(squares=known.squares)
        outside = _Outside(rest, without(grads, early), {}, zero, zero)
        for name in early:
            square = squared_norm(gradients[name])
            clipped = self._clipping.clip(gradients[name], norms.estimates[0])
            outside = self._update_pieces(outside, name, clipped)
            params, dx = jax.lax.optimization_barrier((outside.params, dx))
            outside = outside._replace(params=params, square=outside.square + square)
        return outside, norms, dx

    def update_layers(
        self, stacked: Any, residuals: Any, dx: Any, norms: PartNorms, moved: jax.Array
    ) -> _Carry:
        """Differentiates and updates all layers, from the last to the first, in place."""
        states, ahead = self._optimizer.layers, self._fetched(stacked, self._count - 1)
        carry = _Carry(dx, stacked, states, norms, moved, ahead)
        body = functools.partial(self._update_layer, residuals)
        return downwards(self._count, body, carry, states, residuals)

    def _update_layer(self, residuals: Any, i: jax.Array, carry: _Carry) -> _Carry:
        """Differentiates and updates layer `i`: the body of the backward loop."""
        if self._settings.accumulate == 1 and in_place.applies(carry, residuals):
            return self._update_in_place(residuals, i, carry)
        block, state = take(carry.stacked, i), fetched(take(carry.states, i))
        leaves, treedef = jax.tree.flatten(block)
        pairs = zip(leaves, carry.ahead, strict=True)
        gathered = treedef.unflatten([x if ahead is None else ahead for x, ahead in pairs])
        arguments = gathered, self._bases_of(state)
        ahead = self._fetched(carry.stacked, jnp.maximum(i - 1, 0))
        grads, dx = self._passes.gradient_of_layer(i, arguments, residuals, carry.dx)
        # The copy from the host overlaps with the computation of the gradient.
        states, state, grads, dx = read_before_writing(carry.states, state, grads, dx)
        part = self._count - i
        norms = carry.norms.add(part, grads, self._typical)
        grads = self._clipping.clip(grads, norms.estimates[part])
        block, state, moved = update_one(self._tx, grads, state, block, self._refresh)
        stacked, states = put(carry.stacked, block, i), put(states, state, i)
        return _Carry(dx, stacked, states, norms, carry.moved + moved, ahead)

    def _update_in_place(self, residuals: Any, i: jax.Array, carry: _Carry) -> _Carry:
        """As `_update_layer`, on one GPU."""

        def update(layers: Any, read: Any, dx: Any, norms: PartNorms) -> tuple[Any, Any]:
            (block, state), (per_layer, kept) = layers, read
            bases = self._bases_of(state)
            grads, dx = self._passes.differentiate_layer(block, bases, per_layer, kept, dx)
            part = self._count - i
            norms = norms.add(part, grads, self._typical)
            grads = self._clipping.clip(grads, norms.estimates[part])
            block, state, moved = update_one(self._tx, grads, state, block, self._refresh)
            return (block, state), (dx, norms, moved)

        stacks, read = (carry.stacked, carry.states), (self._per_layer, residuals)
        (stacked, states), others = in_place.update(update, i, stacks, read, carry.dx, carry.norms)
        dx, norms, moved = others
        return carry._replace(
            dx=dx, stacked=stacked, states=states, norms=norms, moved=carry.moved + moved
        )

    def update_late(
        self, outside: _Outside, of_before: Any, carry: _Carry
    ) -> tuple[_Outside, InBackwardState]:
        """Updates the parameters outside the layers that have not been updated.

        Args:
          outside: the parameters outside the layers.
          of_before: the gradient of `before`.
          carry: result of the backward loop.

        Returns:
          The parameters outside the layers, and the state after the step.
        """
        early, squares = set(outside.states), carry.norms.squares
        grads = sum_of_parts(without(outside.params, early), outside.grads, of_before)
        square = squared_norm(grads)
        norm = jnp.sqrt(jnp.sum(squares[1:]) + outside.square + square)
        squares = squares.at[-1].set(jnp.maximum(square + outside.square - squares[0], 0))
        grads = self._clipping.clip(grads, norm)
        outside = outside._replace(moved=carry.moved)
        for name in sorted(set(self._optimizer.pieces) - early):
            outside = self._update_pieces(outside, name, named_leaves(grads)[name])
        params, state, moved = update_rest(
            self._tx, grads, self._optimizer, outside.params, self._refresh
        )
        outside = outside._replace(params=params, moved=outside.moved + moved)
        optimizer = LayerwiseState(carry.states, state, outside.states)
        error = self._clipping.error(carry.norms.estimates, norm)
        return outside, InBackwardState(optimizer, norm, followed(self._typical, squares), error)

    def _update_pieces(self, outside: _Outside, name: str, grad: Any) -> _Outside:
        """Updates one large matrix outside the layers."""
        old = self._optimizer.pieces[name]
        params, state, moved = update_pieces(self._tx, name, grad, old, outside.params)
        states = {**outside.states, name: state}
        return outside._replace(params=params, states=states, moved=outside.moved + moved)

    def _bases_of(self, state: Any) -> Bases:
        """Returns the bases that inputs are stored in under a state of all layers or of one."""
        if isinstance(self._tx, SubspaceTransformation) and not self._refresh:
            return self._tx.bases(state)
        return Bases({})

    def _fetched(self, stacked: Any, i: jax.typing.ArrayLike) -> list[Any]:
        """Returns what is fetched of a layer, in the order of its arrays; None for the others."""
        fetch = self._settings.fetch
        if fetch is None:
            return [None for _ in jax.tree.leaves(stacked)]
        layer = take(stacked, i)
        try:
            return jax.tree.structure(layer).flatten_up_to(fetch(layer))
        except ValueError as error:
            raise ValueError(
                "`fetch` of in_backward must return the parameters of the layer that it gets, with"
                f" None for what it leaves: {error}"
            ) from error
