"""Names of tensors without the prefixes that wrappers of a model leave."""

from collections.abc import Iterable

HEAD = "lm_head.weight"
_ANCHOR = "layers.0.input_layernorm.weight"
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Attributes of PyTorch's wrappers: data parallel, compiled, sharded and recomputed modules."""


def names_in_file(names: Iterable[str]) -> dict[str, str]:
    """Returns the name in the file of each tensor, by its name in the table of tensors.

    Names of PyTorch's wrappers are left out wherever they are. The first norm of layer 0 shows what
    is before "layers" in a file: "model.", nothing in a model saved without its head, or any other
    prefix. All tensors but the head must have it.

    Args:
      names: all names of a checkpoint.

    Raises:
      ValueError: a tensor without the prefix, or two names of one parameter; the message names
        them.
    """
    short: dict[str, str] = {}
    for name in names:
        _add(short, ".".join(x for x in name.split(".") if x not in _WRAPPERS), name)
    prefixes = [x.removesuffix(_ANCHOR) for x in short if f".{x}".endswith(f".{_ANCHOR}")]
    if len(prefixes) != 1 or prefixes == ["model."]:
        return short
    (prefix,) = prefixes
    parts = prefix.split(".")
    heads = {".".join([*parts[:i], HEAD]) for i in range(len(parts))}
    canonical: dict[str, str] = {}
    for x, name in short.items():
        if x in heads:
            _add(canonical, HEAD, name)
        elif x.startswith(prefix):
            _add(canonical, f"model.{x.removeprefix(prefix)}", name)
        else:
            raise ValueError(
                f"the names of the layers begin with {prefix!r}, but the name of the tensor"
                f" {name!r} does not."
            )
    return canonical


def _add(names: dict[str, str], canonical: str, name: str) -> None:
    if canonical in names:
        raise ValueError(
            f"the tensors {names[canonical]!r} and {name!r} are both {canonical!r}: remove one."
        )
    names[canonical] = name
