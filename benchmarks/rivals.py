"""What is compared: plain JAX with and without `jax.checkpoint`, and every method."""

from collections.abc import Callable

import jax

from benchmarks import plain
from train.methods import METHODS, MethodOptions

Loss = Callable[..., jax.Array]
"""Loss of model, tokens [B, S], targets [B, S] and a key."""


def rivals(options: MethodOptions, compute_dtype: str) -> dict[str, Loss]:
    """Returns the losses to differentiate, by name; `plain` is what ratios are taken to."""
    forms = {
        "plain": plain.PlainConfig(),
        "plain, naive loss and attention": plain.PlainConfig(naive=True),
        "jax.checkpoint, dots": plain.PlainConfig(remat="dots"),
        "jax.checkpoint, full": plain.PlainConfig(remat="full"),
    }
    losses = {name: _plain(form, compute_dtype) for name, form in forms.items()}
    return losses | {name: _method(name, options, compute_dtype) for name in METHODS}


def _plain(form: plain.PlainConfig, compute_dtype: str) -> Loss:
    loss = plain.loss_function(form, compute_dtype)
    return lambda model, tokens, targets, key: loss(model, tokens, targets)


def _method(name: str, options: MethodOptions, compute_dtype: str) -> Loss:
    storage = METHODS[name].storage(options)
    return lambda model, tokens, targets, key: model.loss(
        tokens, targets, storage=storage, key=key, compute_dtype=compute_dtype
    )
