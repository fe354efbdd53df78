"""Rules that choose the codec of each layer of a model."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from actjax.codecs import Codec, Exact

Rules = Codec | Mapping[str, Codec | None] | Callable[[str, Any], Codec | None]
"""One codec for the inputs of all linear layers; or, by regular expressions of paths such as
".*/(q|k|v)_proj", the first that matches; or a function from the path of a layer, such as
"layers/0/attention/query", and the layer. None leaves a layer as it is."""


def check_rules(rules: Any, where: str) -> None:
    """Raises unless `rules` are `Rules`."""
    if isinstance(rules, Codec) or (callable(rules) and not isinstance(rules, type)):
        return
    if isinstance(rules, Mapping) and all(
        isinstance(k, str) and (v is None or isinstance(v, Codec)) for k, v in rules.items()
    ):
        for pattern in rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"`rules` of {where} has {pattern!r}, which is no regular expression: {error}."
                ) from error
        return
    raise TypeError(
        f"`rules` of {where} must be an actjax.Codec, a mapping from regular expressions to codecs,"
        f" or a function of a path and a layer, got {rules!r}."
    )


def codec_of(rules: Rules, path: str, layer: Any, is_linear: bool) -> Codec | None:
    """Returns the codec of a layer; None to leave it as it is.

    Args:
      rules: the rules.
      path: path of the layer.
      layer: the layer.
      is_linear: whether it is linear in its input. Only then does the error of a codec stay in the
        gradient of its weight, so a single codec is for linear layers: others get `Exact()`.

    Raises:
      TypeError: a rule returned something else.
    """
    if isinstance(rules, Codec):
        return rules if is_linear else Exact()
    if isinstance(rules, Mapping):
        return next((codec for text, codec in rules.items() if re.search(text, path)), None)
    codec = rules(path, layer)
    if codec is not None and not isinstance(codec, Codec):
        raise TypeError(
            f"`rules` returned {codec!r} for {path!r}: return an actjax.Codec, or None to leave the"
            " layer as it is."
        )
    return codec


class Seen:
    """The layers that a replacement changes or leaves alone.

    Attributes:
      changed: number of layers that store codes.
    """

    def __init__(self) -> None:
        self.changed = 0
        self._left: dict[str, list[str]] = {}

    def left(self, layer: Any, path: str) -> None:
        """Notes a layer with parameters that stays as it is."""
        self._left.setdefault(type(layer).__name__, []).append(path or "the model itself")

    def finish(self, kinds: str, verbose: bool) -> None:
        """Prints what is left alone.

        Args:
          kinds: the kinds of layers that can be replaced.
          verbose: whether to print.

        Raises:
          ValueError: no layer was changed.
        """
        left = ", ".join(
            f"{len(paths)} {kind} ({paths[0]}{', ...' if len(paths) > 1 else ''})"
            for kind, paths in self._left.items()
        )
        if not self.changed:
            raise ValueError(
                f"`rules` of replace fit no layer of the model that is {kinds} itself. Layers with"
                f" parameters: {left or 'none'}."
            )
        if verbose:
            print(f"replace: {self.changed} layers store codes; left alone: {left or 'none'}")
