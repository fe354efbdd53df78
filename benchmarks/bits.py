"""Bits chosen for each site of a trained model, compared with uniform bits.

`python -m benchmarks.bits --model llama_3m --steps 300` trains a model exactly and measures the
sensitivity of its gradient to each site, by GACT's Algorithm 1. It chooses bits for average
budgets, and compares the error of the gradient over keys with that of uniform bits.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import actjax
from benchmarks import command, record
from benchmarks.tables import print_table
from models import Decoder, Storage, StorageChoice
from train.adapt import gradient_by_codecs, measure_sensitivity, site_width
from train.config import PretrainConfig
from train.corpus import open_corpus
from train.data import train_batches
from train.methods import METHODS
from train.options import MethodOptions
from train.resolve import dimensions
from train.step import Batch, Recipe, init_state, make_recipe, make_train_step
from train.tokenizer import default_tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(
            method="exact",
            model="llama_3m",
            steps=300,
            compute_dtype="float32",
            batch_size=4,
            seq_len=256,
        )
    )
    """The run that trains the model, without compression."""
    sites_of: str = "gact"
    """Method whose sites are measured."""
    budgets: tuple[float, ...] = (4, 3, 2)
    """Average bits of the choices."""
    uniform_bits: tuple[int, ...] = (8, 4, 3, 2)
    """Uniform bits to compare with."""
    keys: int = 8
    """Number of gradients, rounded stochastically, for each error."""
    results: pathlib.Path = record.RESULTS / "bits.json"


def trained(config: PretrainConfig) -> tuple[Decoder, Batch]:
    """Returns a trained model, and the batch after its last step."""
    recipe = make_recipe(config, dimensions(config))
    data_dir = config.data.data_dir.expanduser()
    corpus = open_corpus(config.data.data, data_dir)
    tokenizer = default_tokenizer(corpus, dimensions(config).vocab_size, data_dir)
    batches = train_batches(
        corpus, tokenizer, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed
    )
    step, state = jax.jit(make_train_step(recipe), donate_argnums=0), init_state(recipe)
    for _ in range(config.steps):
        state, metrics = step(state, next(batches))
    print(f"loss {float(metrics['loss']):.3f} after {config.steps} steps")
    batch = {name: jnp.asarray(x) for name, x in next(batches).items()}
    batches.close()
    return state.model, batch


def measure(config: Config) -> tuple[list[dict], dict[str, Any]]:
    """Returns one row for each choice of bits, and the sensitivities by all estimates."""
    model, batch = trained(config.train)
    method = METHODS[config.sites_of]
    options = MethodOptions(average_bits=4, rounding="stochastic")
    train = dataclasses.replace(config.train, method=config.sites_of, options=options)
    recipe = make_recipe(train, dimensions(train))
    key = jax.random.key(0)
    found = {
        "algorithm 1": measure_sensitivity(recipe, model, batch, key, samples=8),
        "algorithm 1, one sample": measure_sensitivity(recipe, model, batch, key),
    }
    sites = list(method.adaptive)
    reference = [found["algorithm 1"][site] for site in sites]
    correlation = {
        name: _rank_correlation(reference, [by[site] for site in sites])
        for name, by in found.items()
    }
    widths = {site: site_width(recipe.model_config, site) for site in sites}
    choices = {f"uniform {n}": dict.fromkeys(sites, n) for n in config.uniform_bits}
    for average in config.budgets:
        chosen = actjax.allocate_bits(found["algorithm 1"], widths, average, (2, 3, 4, 8))
        choices[f"adaptive {average:g}"] = chosen
    exact = _gradient(recipe, Storage(), {}, model, batch)
    rows = []
    for name, bits in choices.items():
        uniform = method.storage(recipe.config.options)
        codecs = {s: dataclasses.replace(getattr(uniform, s), bits=n) for s, n in bits.items()}
        gradients = [
            _gradient(recipe, uniform, codecs, model, batch, seed) for seed in range(config.keys)
        ]
        rows.append({"choice": name, "bits": bits, **_errors(gradients, exact)})
        print(f"{name}: error {rows[-1]['error']:.4f}")
    return rows, {"sensitivity": found, "rank_correlation": correlation}


def _rank_correlation(one: list[float], other: list[float]) -> float:
    """Returns Spearman's rank correlation of numbers without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _gradient(
    recipe: Recipe,
    storage: StorageChoice,
    codecs: Mapping[str, Any],
    model: Decoder,
    batch: Batch,
    seed: int = 0,
) -> jax.Array:
    """Returns the gradient as one vector."""
    sites = codecs or {"q": storage.codecs["q"]}
    keys = {site: jax.random.fold_in(jax.random.key(seed), i) for i, site in enumerate(sites)}
    gradient = jax.jit(gradient_by_codecs(recipe, storage))(dict(sites), keys, model, batch)
    return jnp.concatenate([jnp.ravel(g) for g in jax.tree.leaves(gradient)])


def _errors(gradients: list[jax.Array], exact: jax.Array) -> dict[str, float]:
    """Returns root mean square error, deviation and bias of gradients, relative to `exact`."""
    size, count = jnp.linalg.norm(exact), len(gradients)
    mean = sum(gradients) / count
    variance = statistics.mean(float(jnp.sum((g - mean) ** 2)) for g in gradients)
    variance *= count / (count - 1)
    # The mean over a few keys has a variance, which is not bias.
    bias = max(float(jnp.sum((mean - exact) ** 2)) - variance / count, 0.0)
    return {
        "error": float((variance + bias) ** 0.5 / size),
        "deviation": float(variance**0.5 / size),
        "bias": float(bias**0.5 / size),
    }


def show(config: Config, rows: list[dict], known: dict[str, Any]) -> None:
    """Prints sensitivities with their rank correlations, and the error of each choice."""
    sites = list(rows[0]["bits"])
    correlation = known["rank_correlation"]
    print_table(
        f"sensitivity of the gradient of {config.train.model} to its sites ({config.sites_of})",
        ("estimate", *sites, "rank correlation"),
        [
            (name, *(f"{by[site]:.3g}" for site in sites), f"{correlation[name]:.3f}")
            for name, by in known["sensitivity"].items()
        ],
    )
    print_table(
        "bits of each site, and the gradient's error in %",
        ("choice", *sites, "error", "deviation", "bias"),
        [
            (
                row["choice"],
                *(str(row["bits"][site]) for site in sites),
                *(f"{100 * row[name]:.2f}" for name in ("error", "deviation", "bias")),
            )
            for row in rows
        ],
    )


def main() -> None:
    config = command.settings(Config, __doc__)
    rows, known = measure(config)
    show(config, rows, known)
    record.write(config, rows, **known)


if __name__ == "__main__":
    main()
