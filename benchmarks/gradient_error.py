"""The error of the gradient of a trained checkpoint, for codes of the landed project and of now.

`python -m benchmarks.gradient_error --checkpoint DIR --texts gsm8k=FILE ...`. The gradient of all
weights with codes is compared with the exact one on the same tokens: as a whole, with codes at one
site alone, and with codes in one layer alone. Bits count everything that is stored, scales and
means included. Times are those of encoding and decoding what one layer stores, the codes in turn.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax import Codec, Exact
from benchmarks import command, record
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from models.config import site_width
from train.planning.measured import MeasureConfig, Measured, open_measured
from train.run.gradient_error import WHOLE, by_site, measure
from train.run.recipe import Recipe, make_recipe
from train.settings.config import DataConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.settings.resolve import dimensions

_PLAIN: dict[str, Any] = {"levels": "uniform", "balance": False, "same_bits": True}
"""Options of the codes before balanced channels."""
CODES: dict[str, tuple[str, MethodOptions]] = {
    **{f"{bits} bits before": ("lean", MethodOptions(bits=bits, **_PLAIN)) for bits in (4, 3, 2)},
    **{f"{bits} bits": ("lean", MethodOptions(bits=bits)) for bits in (4, 3, 2)},
    "4 bits, balanced": ("lean", MethodOptions(bits=4, levels="uniform", same_bits=True)),
    "4 bits, same bits": ("lean", MethodOptions(bits=4, same_bits=True)),
    "8 bits": ("lean", MethodOptions(bits=8)),
    "compressed_remat before": (
        "compressed_remat",
        MethodOptions(bits=4, **{**_PLAIN, "same_bits": False}),
    ),
    "compressed_remat": ("compressed_remat", MethodOptions(bits=4)),
    "gact": ("gact", MethodOptions(bits=4)),
    "pamm 1/64": ("pamm", MethodOptions(ratio=1 / 64)),
    "pamm 1/512": ("pamm", MethodOptions(ratio=1 / 512)),
    "pamm, one point": ("pamm", MethodOptions(points=1)),
    "low_rank 128": ("low_rank", MethodOptions(rank=128)),
    "low_rank 32": ("low_rank", MethodOptions(rank=32)),
}
"""By name: the method and its options."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

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
    seed: int = 0
    """Seed of the order of the text."""
    rounds: int = 20
    """Timed rounds. 0: no timing."""
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
            seed=config.seed,
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
    times = _times(config, {row["code"] for row in rows}) if config.rounds else {}
    return [{**row, **times.get(row["code"], {})} for row in rows]


def _recipe(train: PretrainConfig, code: str) -> Recipe:
    method, options = CODES[code]
    settings = dataclasses.replace(train, method=method, options=options)
    model = dimensions(dataclasses.replace(settings, model_vocab_size=0))
    return make_recipe(settings, model)


def _measured(config: Config, train: PretrainConfig, code: str, measured: Measured) -> dict:
    recipe = _recipe(train, code)
    count = recipe.model_config.num_layers
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
        "errors": {name: dataclasses.asdict(one) for name, one in errors.items()},
    }


def _arrays(config: Config, recipe: Recipe) -> dict[str, tuple[Codec, tuple[int, ...]]]:
    """Returns the codec and the shape of what each lossy site of a layer stores."""
    lead = (config.batch_size, config.seq_len)
    names = {"codec": "attention_norm"}
    return {
        site: (codec, (*lead, site_width(recipe.model_config, names.get(site, site))))
        for site, codec in recipe.storage.codecs.items()
        if not isinstance(codec, Exact)
    }


def _stored(config: Config, recipe: Recipe) -> tuple[int, int]:
    """Returns the bytes of the lossy sites of a layer, and how many numbers they hold."""
    arrays = _arrays(config, recipe).values()
    stored = sum(codec.stored_bytes(shape, jnp.float32) for codec, shape in arrays)
    return stored, sum(int(np.prod(shape)) for _, shape in arrays)


def _times(config: Config, codes: set[str]) -> dict[str, dict[str, float]]:
    """Returns the median seconds of encoding and of decoding the sites of a layer."""
    runs, seconds = {}, {}
    for code in sorted(codes):
        recipe = _recipe(PretrainConfig(model=str(config.checkpoint)), code)
        arrays = _arrays(config, recipe)
        key = jax.random.key(0)
        xs = {s: jax.random.normal(key, shape, jnp.bfloat16) for s, (_, shape) in arrays.items()}
        codecs = {site: codec for site, (codec, _) in arrays.items()}
        encode, decode = _coders(codecs, key)
        runs[code] = ((encode, xs), (decode, encode(xs)))
        seconds[code] = ([], [])
    for number in range(1 + config.rounds):
        for code, pair in runs.items():
            for (run, argument), times in zip(pair, seconds[code], strict=True):
                begin = time.perf_counter()
                jax.block_until_ready(run(argument))
                times.extend([time.perf_counter() - begin] if number else [])
    return {
        code: {
            "encode_seconds": statistics.median(encoding),
            "decode_seconds": statistics.median(decoding),
        }
        for code, (encoding, decoding) in seconds.items()
    }


def _coders(codecs: dict[str, Codec], key: jax.Array) -> tuple[Any, Any]:
    """Returns functions that encode and decode arrays, by site."""
    encode = jax.jit(lambda xs: {site: codecs[site].encode(x, key) for site, x in xs.items()})
    return encode, jax.jit(lambda xs: {site: codecs[site].decode(x) for site, x in xs.items()})


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints a table of whole gradients for all texts, and one of sites and layers for each."""
    by = {(row["text"], row["code"]): row for row in rows}
    codes = list(dict.fromkeys(row["code"] for row in rows))
    texts = list(dict.fromkeys(row["text"] for row in rows))
    cells = []
    for code in codes:
        found = [by.get((text, code)) for text in texts]
        one = next(row for row in found if row)
        wholes = [row and row["errors"][WHOLE] for row in found]
        cells.append(
            (
                code,
                f"{one['bits']:.2f}",
                *(f"{w['error']:.3f} ({w['cosine']:.3f})" if w else "" for w in wholes),
                f"{one['bytes_of_a_layer'] / 2**10:.0f}",
                *(
                    f"{one[name] * 1e3:.1f}" if name in one else ""
                    for name in ("encode_seconds", "decode_seconds")
                ),
            )
        )
    title = f"error (cosine) of the gradient, {config.batch_size} x {config.seq_len} tokens"
    headers = ("code", "bits", *texts, "KiB a layer", "encode, ms", "decode, ms")
    print_table(title, headers, cells)
    for text in texts:
        detailed = [c for c in codes if len(by.get((text, c), {"errors": ()})["errors"]) > 1]
        if detailed:
            names = list(by[text, detailed[0]]["errors"])
            print_table(
                f"{text}: error with codes in one place alone",
                ("place", *detailed),
                [
                    (n, *(f"{by[text, c]['errors'][n]['error']:.3f}" for c in detailed))
                    for n in names
                ],
            )


if __name__ == "__main__":
    command.run(Config, __doc__, measure_all, show)
