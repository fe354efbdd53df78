"""The error of the gradient of a trained checkpoint, for former and present codes.

`python -m benchmarks.gradient_error --checkpoint DIR --texts gsm8k=FILE ...`. The gradient of all
weights with codes is compared with the exact one on the same tokens: as a whole, with codes at one
site alone, and with codes in one layer alone. Bits count all that is stored, with scales and means.
"""

import dataclasses
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from actjax import Exact
from benchmarks import command, record
from benchmarks.tables import Cells, print_cells
from benchmarks.variants import check_names
from benchmarks.variants import codec as codec_options
from models.config import site_width
from train.planning.measured import MeasureConfig, Measured, open_measured
from train.run.gradient_error import WHOLE, by_site, measure
from train.run.recipe import Recipe, make_recipe
from train.settings.config import DataConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.settings.resolve import dimensions

_PLAIN = "levels='uniform', rotate=False, balance=False"
"""Fields of the codes before balanced channels."""


def _same_bits(text: str) -> MethodOptions:
    """Returns options with the same code for queries, keys and values as for the others."""
    return codec_options(text, *(f"{site}={text}" for site in ("q", "k", "v")))


CODES: dict[str, tuple[str, MethodOptions]] = {
    **{f"{n} bits before": ("lean", _same_bits(f"Quantized({n}, {_PLAIN})")) for n in (4, 3, 2)},
    **{f"{n} bits": ("lean", codec_options(f"Quantized({n})")) for n in (4, 3, 2)},
    "4 bits, balanced": ("lean", _same_bits("Quantized(4, levels='uniform', rotate=False)")),
    "4 bits, same bits": ("lean", _same_bits("Quantized(4)")),
    "8 bits": ("lean", codec_options("Quantized(8)")),
    "compressed_remat before": ("lean_remat", codec_options(f"Quantized(4, {_PLAIN})")),
    "compressed_remat": ("lean_remat", codec_options("Quantized(4)")),
    "gact": ("gact", codec_options("Quantized(4)")),
    "pamm 1/64": ("pamm", codec_options("PointApproximation(0.015625)")),
    "pamm 1/512": ("pamm", codec_options("PointApproximation(0.001953125)")),
    "pamm, one point": ("pamm", codec_options("PointApproximation(points=1)")),
    "low_rank 128": ("low_rank", MethodOptions(rank=128)),
    "low_rank 32": ("low_rank", MethodOptions(rank=32)),
}
"""By name: the method and its options."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    checkpoint: pathlib.Path
    """Folder of the weights."""
    texts: dict[str, pathlib.Path]
    """By name: files of text."""
    templates: dict[str, str] = dataclasses.field(default_factory=dict)
    """By name: template of the JSON records of a text."""
    only: tuple[str, ...] = tuple(CODES)
    """Codes to measure."""
    in_detail: tuple[str, ...] = ("4 bits before", "4 bits")
    """Codes whose sites and layers are measured alone."""
    batch_size: int = 2
    """Sequences of a batch."""
    seq_len: int = 256
    """Tokens of a sequence."""
    batches: int = 1
    """Batches of each text."""
    add: bool = False
    """Keep the rows in `--results`, and measure only those that are missing."""
    results: pathlib.Path = record.RESULTS / "gradient_error.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(CODES))


def measure_all(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each text and code."""
    rows = record.rows_to_keep(config.results, config.add)
    known = {(row["text"], row["code"]) for row in rows}
    for text, path in config.texts.items():
        train = PretrainConfig(
            model=str(config.checkpoint),
            compute_dtype="float32",
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            data=DataConfig(data=str(path)),
        )
        how = MeasureConfig(
            measure=True, batches=config.batches, template=config.templates.get(text, "")
        )
        measured = open_measured(how, train, config.checkpoint)
        for code in config.only:
            if (text, code) not in known:
                rows.append(
                    {"text": text, "code": code, **_measured(config, train, code, measured)}
                )
                print(f"{text}, {code}: {rows[-1]['errors'][WHOLE]['error']:.4f}", flush=True)
                record.write(config, rows)
    return rows


def _recipe(train: PretrainConfig, code: str) -> Recipe:
    method, options = CODES[code]
    settings = dataclasses.replace(train, method=method, options=options)
    model = dimensions(dataclasses.replace(settings, model_vocab_size=0))
    return make_recipe(settings, model)


def _measured(config: Config, train: PretrainConfig, code: str, measured: Measured) -> dict:
    recipe = _recipe(train, code)
    count = recipe.config.model_config.num_layers
    places = by_site(recipe.storage, count)
    if code in config.in_detail:
        for layer in (0, count // 2, count - 1):
            here = np.arange(count) == layer
            places[f"layer {layer}"] = {site: here & used for site, used in places[WHOLE].items()}
    else:
        places = {WHOLE: places[WHOLE]}
    errors = measure(recipe, recipe.storage, measured.model, measured.batches, places)
    stored, numbers = _stored(config, recipe)
    return {
        "bits": 8 * stored / numbers,
        "bytes_of_a_layer": stored,
        "errors": {name: dataclasses.asdict(error) for name, error in errors.items()},
    }


def _stored(config: Config, recipe: Recipe) -> tuple[int, int]:
    """Returns the bytes of the lossy sites of a layer, and how many numbers they hold."""
    stored = numbers = 0
    for site, codec in recipe.storage.codecs.items():
        if not isinstance(codec, Exact):
            place = {"codec": "attention_norm"}.get(site, site)
            width = site_width(recipe.config.model_config, place)
            shape = (config.batch_size, config.seq_len, width)
            stored += codec.stored_bytes(shape, jnp.float32)
            numbers += math.prod(shape)
    return stored, numbers


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns errors and cosines of gradients by code, for all texts."""
    by_code: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_code.setdefault(row["code"], {})[row["text"]] = row
    cells = []
    for code, by_text in by_code.items():
        first = next(iter(by_text.values()))
        errors = {text: row["errors"][WHOLE] for text, row in by_text.items()}
        cells.append(
            {"code": code, "bits": f"{first['bits']:.2f}"}
            | {text: f"{x['error']:.3f} ({x['cosine']:.3f})" for text, x in errors.items()}
            | {"KiB a layer": f"{first['bytes_of_a_layer'] / 2**10:.0f}"}
        )
    return cells


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table, and one of sites and layers for each text."""
    title = f"error (cosine) of the gradient, {config.batch_size} x {config.seq_len} tokens"
    print_cells(title, table(rows))
    for text in dict.fromkeys(row["text"] for row in rows):
        detailed = {row["code"]: row["errors"] for row in rows
                    if row["text"] == text and len(row["errors"]) > 1}  # fmt: skip
        places = list(next(iter(detailed.values()), ()))
        print_cells(
            f"{text}: error with codes in one place alone",
            [
                {"place": place}
                | {code: f"{x[place]['error']:.3f}" for code, x in detailed.items()}
                for place in places
            ],
        )


if __name__ == "__main__":
    command.run(Config, __doc__, measure_all, show)
