"""Functions with a custom backward pass, with an error in forward mode that names actjax."""

from typing import Any

import jax


class ReverseMode(jax.custom_vjp):
    """As `jax.custom_vjp`, with an error in forward mode that names actjax.

    A function that `jax.jit` compiles in forward mode fails outside of this call, with the error of
    JAX.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function.

        Raises:
          TypeError: it is differentiated in forward mode.
        """
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                "actjax stores codes for a backward pass, so its functions have no forward-mode"
                " derivative: use jax.grad, jax.vjp or jax.jacrev instead of jax.jvp,"
                " jax.jacfwd, jax.hessian or jax.linearize."
            ) from error
