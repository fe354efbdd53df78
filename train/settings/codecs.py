"""The values of `--codec`: codecs as text, for every site of a method or for one.

    codec     `Quantized(4)`, `Quantized(bits=4, rounding='dither')`, `Offloaded(Exact())`
    site      `q=Quantized(6)`

A text names a codec as its `repr` does. Fields that it leaves out have the values that the method
gives them. The text is parsed and never evaluated.
"""

import ast
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import actjax
from actjax import Codec, Quantized
from train.settings.messages import near_hint

EVERY_SITE = ""
"""Site of a text that names none."""
_NAMES = ("Exact", "Quantized", "RandomizedSVD", "RandomProjection", "PointApproximation",
          "Offloaded")  # fmt: skip
CODECS: dict[str, type[Codec]] = {name: getattr(actjax, name) for name in _NAMES}
"""The codecs that a text can name."""
_FOR_CHECK: dict[str, dict[str, Any]] = {
    "Quantized": {"bits": 1},
    "RandomizedSVD": {"rank": 1},
    "RandomProjection": {"rank": 1},
    "PointApproximation": {"ratio": 1.0},
}
"""Values of the fields without default, with which the other fields of a text are checked."""
_LONGEST = 200
"""Characters of a text: enough for any codec, and too few to exhaust the parser."""


@dataclasses.dataclass(frozen=True)
class CodecText:
    """A parsed text.

    Attributes:
      kind: name of the codec.
      fields: the fields that the text gives, in order. A codec in a field is a `CodecText`.
    """

    kind: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def given(self) -> dict[str, Any]:
        """The fields that the text gives."""
        return dict(self.fields)

    def build(self, default: Codec) -> Codec:
        """Returns the codec.

        Args:
          default: the codec of the method. If it is of this kind, its fields are the values of
            those that the text leaves out.

        Raises:
          TypeError, ValueError: as the codec raises for its fields; a field without a value.
        """
        inherited: dict[str, Any] = {}
        if type(default).__name__ == self.kind:
            fields = dataclasses.fields(default)
            inherited = {field.name: getattr(default, field.name) for field in fields}
        return self._with(inherited, default)

    def check(self) -> None:
        """Raises a `TypeError` or `ValueError` for fields that the codec refuses."""
        self._with(_FOR_CHECK.get(self.kind, {}), Quantized(1))

    def _with(self, inherited: Mapping[str, Any], default: Codec) -> Codec:
        fields = {
            name: value.build(default) if isinstance(value, CodecText) else value
            for name, value in self.fields
        }
        if {"ratio", "points"} & fields.keys():  # Either gives the number of points.
            inherited = {k: v for k, v in inherited.items() if k not in ("ratio", "points")}
        return CODECS[self.kind](**{**inherited, **fields})


@functools.cache
def read_codecs(texts: tuple[str, ...]) -> Mapping[str, CodecText]:
    """Returns the texts of `--codec` by site, that of all other sites as `EVERY_SITE`.

    Raises:
      ValueError: a text that is no codec, or two for the same site.
    """
    by_site: dict[str, CodecText] = {}
    for text in texts:
        site, codec = _read(text)
        if site in by_site:
            where = f"site {site}" if site else "all sites"
            raise ValueError(f"`--codec` names two codecs for {where}: drop one, got {text!r}.")
        by_site[site] = codec
    return by_site


def check_sites(texts: tuple[str, ...], method: str, sites: Sequence[str]) -> None:
    """Raises a `ValueError` for a site that the method does not encode.

    Args:
      texts: values of `--codec`.
      method: name of the method.
      sites: the sites that it encodes.
    """
    for site in read_codecs(texts):
        if site != EVERY_SITE and site not in sites:
            known = f"It encodes {', '.join(sites)}." if sites else "It has no sites to name."
            raise ValueError(
                f"`--codec {site}=...` names no site of `--method {method}`."
                f"{near_hint(site, sites)} {known}"
            )


def _read(text: str) -> tuple[str, CodecText]:
    """Returns the site and the codec of a text."""
    head, parenthesis, fields = text.partition("(")
    site, equals, kind = head.rpartition("=")
    if not parenthesis and kind.strip() in CODECS:
        raise _not_a_codec(text, " Its parentheses are missing.")
    if not parenthesis or (equals and not site.strip().isidentifier()):
        raise _not_a_codec(text, near_hint(kind.strip(), CODECS))
    if len(text) > _LONGEST:
        raise _not_a_codec(f"{text[:40]}...", f" It has {len(text)} characters.")
    try:
        node = ast.parse(f"{kind}({fields}".strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _not_a_codec(text) from error
    codec = _codec_of(node, text)
    try:
        codec.check()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`--codec` {text!r}: {error}") from error
    return site.strip(), codec


def _codec_of(node: ast.expr, text: str) -> CodecText:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _not_a_codec(text)
    kind = node.func.id
    if kind not in CODECS:
        raise _not_a_codec(text, near_hint(kind, CODECS))
    names = [field.name for field in dataclasses.fields(CODECS[kind])]
    if len(node.args) > len(names):
        known = f"the fields {', '.join(names)}" if names else "no fields"
        raise ValueError(f"`--codec` {text!r}: {kind} has {known}.")
    fields = list(zip(names, node.args, strict=False))
    for keyword in node.keywords:
        if keyword.arg not in names:
            raise ValueError(
                f"`--codec` {text!r}: {kind} has no field {keyword.arg!r}."
                f"{near_hint(keyword.arg or '', names)} It has {', '.join(names) or 'none'}."
            )
        if keyword.arg in dict(fields):
            raise ValueError(f"`--codec` {text!r} gives `{keyword.arg}` twice: drop one.")
        fields.append((keyword.arg, keyword.value))
    return CodecText(kind, tuple((name, _value_of(value, text)) for name, value in fields))


def _value_of(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _codec_of(node, text)
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = ast.literal_eval(node)
        if value is None or isinstance(value, int | float | str):
            return value
    raise _not_a_codec(text, " A field takes a number, a quoted word, True, False or a codec.")


def _not_a_codec(text: str, hint: str = "") -> ValueError:
    return ValueError(
        f"`--codec` {text!r} is no codec.{hint} Write it as the table at the start of a run does,"
        ' such as "Quantized(4)", or q="Quantized(6)" for one site. There are:'
        f" {', '.join(CODECS)}."
    )


def codec_at(texts: tuple[str, ...], site: str) -> CodecText | None:
    """Returns the text that names a site, else the text for all sites, else None."""
    by_site = read_codecs(texts)
    return by_site.get(site, by_site.get(EVERY_SITE))


def fix_bits(texts: Iterable[str]) -> bool:
    """Returns whether texts of `--codec` give bits, or quantize nothing."""
    by_site = read_codecs(tuple(texts))
    quantized = [codec for codec in by_site.values() if codec.kind == "Quantized"]
    if EVERY_SITE in by_site and not quantized:
        return True
    return any("bits" in codec.given for codec in quantized)
