"""The parts of a step that updates the parameters in its backward pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from actjax._core.paths import named_leaves
from actjax._host import fetched
from actjax.factored.taps import Bases
from actjax.optim.layers import LayerwiseState, put, take
from actjax.optim.projected.subspace import SubspaceTransformation
from actjax.optim.states.host_states import downwards, read_before_writing
from actjax.optim.stepping import in_place
from actjax.optim.stepping.apply import update_one, update_pieces, update_rest
from actjax.optim.stepping.clipping import Clipping, PartNorms, followed, squared_norm
from actjax.optim.stepping.passes import Layered, Passes, Residuals, sum_of_parts
from actjax.optim.stepping.pieces import without
from actjax.optim.stepping.square_norm import no_square


class Settings(NamedTuple):
    """Settings that all steps share.

    Attributes:
      model: the functions of the model.
      tx: the transform.
      clip: largest norm of a gradient.
      fetch: as for `actjax.optim.in_backward`.
    """

    model: Layered
    tx: optax.GradientTransformation
    clip: float
    fetch: Callable[[Any], Any] | None


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


class _Outside(NamedTuple):
    """Parameters outside the layers, of which some large matrices may have been updated.

    Attributes:
      params: the parameters.
      grads: gradients that have not been applied; None for the others.
      states: new states of matrices that are updated in pieces, by path.
      square: squared norm of the gradients that have been applied.
      moved: `square_norm` of what was added to all parameters, layers included.
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
      moved: `square_norm` of what was added to the parameters.
      ahead: arrays of the next layer that were fetched ahead; None for its others.
    """

    dx: Any
    stacked: Any
    states: Any
    norms: PartNorms
    moved: jax.Array
    ahead: list[Any]


class Step:
    """The parts of one step, in the order in which they run."""

    def __init__(
        self, settings: Settings, state: InBackwardState, batch: Any, refresh: bool
    ) -> None:
        """Takes what all parts read.

        Args:
          settings: those that all steps share.
          state: the state before the step.
          batch: `inputs`, `per_layer` and `weights`, as for `actjax.optim.InBackward.step`.
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
        outside = _Outside(rest, without(grads, early), {}, zero, no_square())
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
        if self._settings.model.accumulate == 1 and in_place.applies(carry, residuals):
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
