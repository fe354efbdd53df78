"""Which part of a path in an optax state belongs to the state, and which to a parameter."""

from collections.abc import Iterable


def split_path(name: str, weights: Iterable[str]) -> tuple[list[str], str | None]:
    """Splits the path of an array in a state, such as "0.mu.layers.q", at that of its parameter.

    Args:
      name: the path.
      weights: paths of the parameters.

    Returns:
      The fields of the state, here ["0", "mu"], and the parameter; None if it belongs to none.
    """
    ends = [weight for weight in weights if name == weight or name.endswith(f".{weight}")]
    weight = max(ends, key=len, default=None)
    fields = name if weight is None else name.removesuffix(weight)
    return [field for field in fields.split(".") if field], weight
