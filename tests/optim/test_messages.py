"""Errors of optimizers: a row is a call and a part of its message. Nothing is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from messages import assert_messages
from optim.rounded import GRADIENTS, parameters

from actjax import LowRank, optim
from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.optim.checks import check_transform
from actjax.optim.layers import count_layers, layers_of, split_gradient

ADAM, ADAMW = optax.scale_by_adam(), optax.adamw(1e-2)
NAN = float("nan")
W = np.ones((12, 8), "float32")
STACKED = {"layers": {"w": np.ones((3, 4, 4), "float32")}, "head": np.ones((4, 4), "float32")}
ROUNDED = optim.stochastic_rounding(ADAMW)
SUBSPACE = optim.subspace(ADAM, 2, groups={"head": "head"})
NO_TRANSFORM = "must be an optax transform"


def partial(fun, *args, **options):
    return functools.partial(fun, *args, **options)


def shapes(tx, params=STACKED):
    """Returns the shapes of the state of `actjax.optim.init`."""
    return jax.eval_shape(partial(optim.init, tx), params)


def init(tx, params=STACKED, **options):
    return partial(optim.init, tx, params, **options)


def apply(tx, grads=STACKED, state=None, refresh=False, params=STACKED):
    state = shapes(tx) if state is None else state

    def call():
        return jax.eval_shape(partial(optim.apply, tx, refresh=refresh), grads, state, params)

    return call


# Wrappers of moments and adaptive steps.


def test_arguments_of_states_in_few_bits():
    sizes = [(name, x) for name in ("block", "min_size") for x in (0, -3, 2.5, True, "8")]
    assert_messages(ValueError, [
        *((partial(optim.eight_bit, ADAM, **{name: x}),
           f"`{name}` of eight_bit must be an integer >= 1, got {x!r}.") for name, x in sizes),
        (lambda: optim.four_bit(ADAM, group=3), "`group` of four_bit must be even"),
        (lambda: optim.scale_by_adam_4bit(b1=1.0),
         "`b1` of scale_by_adam_4bit must be in [0, 1), got 1.0"),
        (lambda: optim.scale_by_adam_4bit(eps=-1e-8),
         "`eps` of scale_by_adam_4bit must be >= 0, got -1e-08"),
        (lambda: optim.scale_by_adam_4bit(group=3), "`group` of four_bit must be even"),
        (lambda: optim.scale_by_adam_4bit(min_size=0), "`min_size` of four_bit must be"),
        (lambda: optim.scale_by_factored_adam(b2=1.0), "`b2` of scale_by_factored_adam must be"),
        (lambda: optim.scale_by_factored_adam(eps_squared=0), "above 0, got 0"),
        (lambda: optim.scale_by_factored_adam_4bit(b2=1.0),
         "`b2` of scale_by_factored_adam_4bit must be in [0, 1), got 1.0"),
        (lambda: optim.scale_by_factored_adam_4bit(group=3), "`group` of four_bit must be even"),
        (lambda: optim.scale_by_factored_adam(factored={"w": True, "b": True}).init(
            {"w": W, "b": np.zeros(4)}),
         "names `b` of shape (4,): "),
        (lambda: optim.clip_by_global_norm(-1), "`max_norm` of clip_by_global_norm must be"),
        *((partial(zeros, (5,), "float32"), "has a scale for each row and each column: ")
          for zeros in (signed_zeros, rank_one_zeros)),
        (lambda: optim.to_host(shapes(ADAMW), smallest=1), "shapes need shardings"),
    ])  # fmt: skip
    transforms = {
        "factored": optim.scale_by_factored_adam(),
        "8bit": optim.scale_by_adam_8bit(),
        "4bit": optim.scale_by_adam_4bit(),
        "subspace": optim.subspace(ADAM, 2),
    }
    assert_messages(TypeError, [
        *((partial(optim.eight_bit, bad), f"`inner` {NO_TRANSFORM}")
          for bad in (None, optax.adam, 1e-3)),
        *((lambda tx=tx: tx.init({"w": W, "b": 1.0}),
           "takes arrays, but the parameter `b` is 1.0: convert it") for tx in transforms.values()),
        *((lambda tx=tx: tx.init({"w": W, "n": np.zeros((4, 4), "int32")}),
           "numbers, but the parameter `n` is of int32: leave it out")
          for tx in transforms.values()),
        (lambda: optim.to_host({}), "`state` of to_host must be what "),
    ])  # fmt: skip


# Layers and states.


def test_arguments_of_layers():
    good = {"layers": {"w": np.ones((3, 2, 2)), "b": np.ones((3, 2))}, "norm": np.ones(2)}
    trees = [{"w": 1}, {"w": 2}]

    def gradient(w):
        return partial(
            split_gradient, good | {"layers": good["layers"] | {"w": w}}, good, layers_of
        )

    thin = LowRank(np.ones((3, 2, 1)), np.ones((3, 1, 5)))
    assert_messages(ValueError, [
        (partial(split_gradient, {"w": np.ones(2)}, good, layers_of),
         "`grads` must have the structure of `params`"),
        # JAX would broadcast them, or use the last layer's gradient for missing layers.
        *((gradient(np.ones(shape)), "(3, 2, 2), got ") for shape in [(2, 2, 2), (3, 1, 2), ()]),
        (gradient(thin), "got (3, 2, 5)"),
        (lambda: layers_of({"blocks": 1}), "dict has no `layers`: pass `layers`"),
        *((partial(layers_of, {"layers": layers}),
           "`layers` of dict holds 2 trees, one per layer: st")
          for layers in (trees, tuple(trees), dict(enumerate(trees)),
                         {str(i): tree for i, tree in enumerate(trees)})),
        (partial(count_layers, {"a": np.ones((2, 3)), "b": np.ones((3, 3))}),
         "lengths are 2, 3."),
        (partial(count_layers, {"a": np.ones(())}), "lengths are a scalar's."),
        (partial(count_layers, {"a": np.ones((0, 3))}), "lengths are 0."),
        (partial(count_layers, {}), "holds no arrays: without stacked layers differentiate"),
        (init(ADAMW, layers=lambda p: {}), "`layers` holds no arrays"),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (partial(check_transform, "tx", optax.adam), "Call it: it returns a transform."),
        *((init(bad), f"`tx` {NO_TRANSFORM}") for bad in (optax.adam, None, 0.1)),
        (init(ADAMW, layers="layers"), "`layers` must be a function, got 'layers'"),
    ])  # fmt: skip


def test_arguments_of_apply():
    other = {"layers": {"w": np.ones((2, 4, 4), "float32")}, "head": STACKED["head"]}
    random = optim.subspace(ADAM, 2, source="random")
    shared = optim.subspace(ADAM, 2, groups={"layers.w": "g", "head": "g"})
    # JAX clamps an index out of range: missing layers would share the moments of the last.
    states = [
        (jax.eval_shape(ADAMW.init, STACKED), "got tuple"),
        ((), "got tuple"),
        (shapes(optax.sgd(1.0, 0.9)), "is missing, expected (3,)"),
        (shapes(ADAMW, other), "is (2,), expected (3,)"),
    ]
    assert_messages(ValueError, [
        (apply(ADAMW, refresh=True), "`refresh` is for actjax.optim.subspace"),
        (apply(ADAMW, {"layers": STACKED["layers"]}), "`grads` must have the structure of"),
        (apply(SUBSPACE, refresh=np.ones(3, bool)), "`refresh` must be a bool that"),
        (lambda: jax.eval_shape(
            lambda state, refresh: optim.apply(SUBSPACE, STACKED, state, STACKED, refresh=refresh),
            shapes(SUBSPACE), True),
         'static_argnames="refresh"'),
        *((init(wrap(optim.subspace(ADAM, 2))), "`tx` has a subspace inside another tr")
          for wrap in (optim.eight_bit, lambda tx: optax.chain(tx, optax.scale(-1.0)))),
        (init(shared), "input groups ['g'] in `groups` of subspace have weig"),
        *((apply(ADAMW, state=state), message) for state, message in states),
        *((apply(ADAMW, state=state), "`state` must be what `actjax.optim.init")
          for state, _ in states),
        *((partial(optim.redraw, random, state, STACKED), "`state` must be what `actjax.optim.init")
          for state, _ in states),
    ])  # fmt: skip


def in_backward(layer=lambda x: x, loss=lambda x: x, state=None, tx=ADAMW, **options):
    """Returns a call of one step of a small model; each part may change its output."""
    changes = {name: options.pop(name) for name in ("accumulate", "clip") if name in options}
    update = optim.in_backward(
        lambda p, x: p["head"][x],
        lambda w, x, inputs, key: layer(jnp.tanh(x @ w["w"])),
        lambda p, x, inputs: loss(jnp.sum(x)),
        tx, **changes,
    )  # fmt: skip
    arguments = {"params": STACKED, "inputs": np.arange(4), "per_layer": np.zeros(3)} | options

    def step():
        first = update.init(STACKED) if state is None else state
        return update.step(**arguments | {"state": first})

    return step


def test_arguments_of_in_backward():
    makes = partial(optim.in_backward, *[lambda *args: args[1]] * 3)
    update = makes(ADAMW)
    inner = jax.eval_shape(update.init, STACKED).optimizer
    other = jax.eval_shape(makes(optax.sgd(1.0, 0.9)).init, STACKED)
    another_form = "the output of `layer` is the input of the next layer"
    no_scalar = "`after` must return a floating point scalar"
    assert_messages(ValueError, [
        (lambda: makes(ADAMW, clip=0), "`clip` of in_backward must be a number above 0, got 0"),
        (in_backward(accumulate=3, per_layer=np.zeros((3, 3))),
         "`accumulate=3` of in_backward: arrays of `inputs` must "),
        (in_backward(refresh=True), "`refresh` is for actjax.optim.subspace"),
        (in_backward(per_layer=np.zeros((2, 3))),
         "`per_layer` must begin with (3,), the layers: got one with shape (2, 3)"),
        (in_backward(state=inner), "got LayerwiseState"),
        (in_backward(state=other), "`state` must be what `actjax.optim.init"),
        (in_backward(params=STACKED | {"count": np.zeros(3, "int32")}),
         "but ['count'] is int32: give other arrays in"),
        (in_backward(lambda x: x.astype("bfloat16")), another_form),
        (in_backward(lambda x: (x, x)), another_form),
        (in_backward(jnp.sum), another_form),
        (in_backward(loss=lambda x: x * jnp.ones(3)), no_scalar),
        (in_backward(loss=lambda x: x.astype(int)), no_scalar),
        (in_backward(loss=lambda x: (x, 0.0)), no_scalar),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (lambda: makes(optax.adamw), "`tx` must be an optax transform, "),
        (lambda: optim.in_backward(None, len, len, ADAMW), "`before` must be a function, got None"),
    ])  # fmt: skip
    makes(ADAMW, clip=np.float32(1))
    jax.eval_shape(in_backward())


# Rounding.


def test_arguments_of_stochastic_rounding():
    wide, params = {"layers": np.ones((2, 4, 4), "float32")}, parameters()
    outermost = "rounds weights, which only the"
    assert_messages(ValueError, [
        *((partial(make, tree), message)
          for make in (ROUNDED.init, partial(optim.init, ROUNDED))
          for tree, message in (
              (wide, "stochastic_rounding has no effect, because no weight is bfloat16"),
              (wide | {"head": np.ones(3, "float16")}, "some weights are float16"))),
        (lambda: optim.eight_bit(ROUNDED), f"` of eight_bit {outermost}"),
        (lambda: optim.subspace(ROUNDED, 2), f"` of subspace {outermost}"),
        (lambda: optim.subspace(ADAM, 2, outer=ROUNDED), f"` of subspace {outermost}"),
        (lambda: optim.stochastic_rounding(ROUNDED), "rounds weights already: drop one of both"),
        (lambda: optim.init(optax.chain(optax.clip(1.0), ROUNDED), params),
         "`tx` has stochastic_rounding inside another transform"),
        (lambda: ROUNDED.update(GRADIENTS[0], ROUNDED.init(params)),
         "stochastic_rounding reads the weights that it rounds: call"),
        (lambda: ROUNDED.update(GRADIENTS[0], optim.init(ROUNDED, params), params),
         "what `tx.init` returned, got LayerwiseState"),
        (lambda: ROUNDED.init({"layers": optax.MaskedNode()}),
         "stochastic_rounding got no weights. Inside `optax.masked`"),
        *((partial(optim.stochastic_rounding, ADAMW, seed=seed),
           f"`seed` of stochastic_rounding must be an integer >= 0, got {seed!r}.")
          for seed in (-1, 0.5, True)),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (partial(optim.stochastic_rounding, bad), f"`inner` {NO_TRANSFORM}")
        for bad in (None, optax.adam, 1e-3)
    ])  # fmt: skip
    # Weights outside the layers may be in float32.
    mixed = {"layers": jnp.ones((2, 4), jnp.bfloat16), "norm": np.ones(3)}
    for make in (ROUNDED.init, partial(optim.init, ROUNDED)):
        jax.eval_shape(make, mixed)


# Subspaces.


def subspace(inner=ADAM, rank=4, **options):
    return partial(optim.subspace, inner, rank, **options)


def test_arguments_of_subspace():
    fira = optim.ScaledRemainder()
    params = {"w": W, "v": np.zeros((11, 8)), "b": np.zeros(8)}

    def fitted(rank, groups):
        return lambda: optim.subspace(ADAM, rank, groups=groups).init(params)

    an_integer, a_number = "must be an integer >= 1, got", "must be a finite number above 0, got"
    assert_messages(ValueError, [
        (subspace(rank=0), f"`rank` of subspace {an_integer} 0"),
        (subspace(rank=2.5), f"`rank` of subspace {an_integer} 2.5"),
        (subspace(gap=0), f"`gap` of subspace {an_integer} 0"),
        (subspace(source="svd"), "`source` of subspace must be one of "),
        (subspace(side="left"), "`side` of subspace must be one of "),
        (subspace(bits=5), "`bits` of Bases must be one of (4, 8, 16), got 5"),
        *((subspace(scale=scale), f"`scale` of subspace {a_number} {scale!r}")
          for scale in (0, "a", NAN)),
        (subspace(seed=1.5), "`seed` of subspace must be an integer >= 0, got 1.5"),
        (fitted(13, None), "the projected dimension of `"),
        (fitted(4, {"b": "b"}), "`groups` names `b` of shape (8,), which is no matrix"),
        (fitted(4, {"u": "u"}),
         "`groups` of subspace names ['u'], but the parameters are: b, v, w"),
        (fitted(4, {"w": "g", "v": "g"}), "gives `v` and `w` the same basis, but "),
        (subspace(side="both", remainder=fira), "no meaning with side='both'"),
        (subspace(source="random", remainder=fira),
         "`remainder` of subspace needs orthonormal bases"),
        *((partial(optim.ScaledRemainder, limit),
           "`limit` of ScaledRemainder must be a number above 1")
          for limit in (1.0, "a", NAN)),
        # The sign of a learning rate would be lost.
        *((subspace(inner, remainder=fira), " has a learning rate: it turns")
          for inner in (optax.adam(1e-2), optim.eight_bit(optax.sgd(0.1)), ADAMW)),
        (lambda: optax.inject_hyperparams(optim.subspace, static_args="rank")(
            inner=ADAM, rank=2).init({"w": W}),
         "got an array."),
    ])  # fmt: skip
    assert_messages(TypeError, [
        *((subspace(**{name: bad}), f"`{name}` {NO_TRANSFORM}")
          for name, bad in (("inner", optax.adam), ("inner", None), ("outer", 0.1))),
        *((subspace(groups=groups), "`groups` of subspace must map paths of weights")
          for groups in (["w"], {"w": 3})),
        (subspace(remainder="fira"), "got 'fira'"),
    ])  # fmt: skip
    # A transform that cannot run on one matrix is not tried.
    subspace(optax.partition({"a": optax.adam(1e-2)}, {"x": "a"}), remainder=fira)()
    subspace(optax.adam(1e-2))()


def test_gradients_that_give_no_basis():
    params = {"w": W, "b": np.zeros(8, "float32")}
    tx, random = optim.subspace(ADAM, 4), optim.subspace(ADAM, 4, source="random")
    thin = params | {"w": LowRank(np.ones((12, 3)), np.ones((3, 8)))}
    in_basis = thin | {"w": LowRank(np.ones((12, 4)), np.ones((4, 8)), "w")}

    def refresh(tx, grads):
        return lambda: tx.refresh(grads, tx.init(params), params)

    assert_messages(ValueError, [
        (refresh(tx, None), "`grads` of refresh is None"),
        (refresh(tx, thin), "a basis of rank 4 for `w` cannot be taken "),
        (refresh(tx, in_basis), "gradient of `w` was taken in the basis that is to be"),
        (refresh(random, thin), "random bases are drawn before the gradient"),
    ])  # fmt: skip
    update = optim.in_backward(*[lambda *args: args[1]] * 3, SUBSPACE)
    state = jax.eval_shape(update.init, STACKED)
    assert_messages(TypeError, [
        (partial(SUBSPACE.bases, state), "InBackwardState pass `state.optimizer`: got InBackward"),
    ])  # fmt: skip
