"""Memory of fine-tuning adapters, from compiled programs that are not run.

`python -m benchmarks.finetune_memory --device h100` compiles for a GPU, which this machine need not
have. `buffered` is the memory that one more layer adds to the temporaries of the gradient, which
are the activations stored for the backward pass: the difference between two depths, divided by the
number of layers between them. `peak` is the largest memory of a whole step. The baselines are QLoRA
in ordinary JAX with autodiff, with and without `jax.checkpoint`.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import optax

from benchmarks import command, memory, record
from benchmarks.plain_jax import PlainJax
from benchmarks.tables import Cells, print_cells
from benchmarks.training_steps import TrainingStep, method_step, plain_step
from benchmarks.variants import Variant, check_names, codec
from models import ModelConfig, preset
from models.lora import attach
from train.planning.devices import HERE, find_device
from train.run.loss import batch_shapes
from train.run.recipe import make_recipe
from train.settings.config import AdapterConfig, FinetuneConfig
from train.settings.options import MethodOptions


def _hyc(fields: Any, **options: Any) -> Variant:
    return Variant("hyc_lora", options=codec(f"Quantized({fields})", **options))


_BASELINES = {"qlora, autodiff": PlainJax(), "qlora, jax.checkpoint": PlainJax("full")}
_BITS = (4, 2)
ROWS: dict[str, Variant] = {
    **dict.fromkeys(_BASELINES, Variant("qlora")),
    "lora": Variant("lora"),
    "qlora": Variant("qlora"),
    "lora, remat": Variant("lora", options=MethodOptions(remat=True)),
    "qlora, remat": Variant("qlora", options=MethodOptions(remat=True)),
    **{f"hyc_lora, {n} bits, {level}": _hyc(n, level=level)
       for n in _BITS for level in ("none", "intra")},
    **{f"hyc_lora, {n} bits": _hyc(n) for n in _BITS},
    **{f"hyc_lora, {n} bits, published codes": _hyc(f"{n}, scaling='channel'")
       for n in _BITS},
    **{f"hyc_lora, {n} bits, remat": _hyc(n, remat=True) for n in _BITS},
}  # fmt: skip
"""Methods by name. The baselines take the weights of their method."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    model: str = "llama_7b"
    """Dimensions; llama_7b is Llama 2 7B."""
    batch_size: int = 4
    """Sequences in a step."""
    seq_len: int = 1024
    """Tokens in a sequence."""
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    dtype: Any = "bfloat16"
    """Dtype of activations, and of weights that are not in 4 bits."""
    only: tuple[str, ...] = tuple(ROWS)
    """Rows to measure."""
    device: str = HERE
    """Device to compile for: here, or a GPU by name: h100, h200, a100_80, a100_40, rtx_4090, ..."""
    results: pathlib.Path = record.RESULTS / "finetune_memory.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(ROWS))
        find_device(self.device)


def training_step(name: str, config: Config, dims: ModelConfig) -> tuple[TrainingStep, Any]:
    """Returns the step of a row, and the shapes of a batch."""
    settings = FinetuneConfig(
        checkpoint="none",
        adapter=config.adapter,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        weight_dtype=config.dtype,
        compute_dtype=config.dtype,
    )
    method = method_step(ROWS[name], settings, dims)
    recipe = make_recipe(ROWS[name].configure(settings), dims)
    lora = recipe.config.lora
    assert lora is not None
    batch = {k: v for k, v in batch_shapes(recipe.config).items() if k != "segments"}
    if name in _BASELINES:
        tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
        gradient, step = plain_step(
            _BASELINES[name],
            config.dtype,
            tx,
            lambda state, adapters: attach(state.frozen, adapters, lora),
        )

        def init() -> Any:
            state = method.init()
            return dataclasses.replace(state, optimizer=tx.init(state.model))

        return dataclasses.replace(method, init=init, gradient=gradient, step=step), batch
    return method, batch


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each method."""
    rows = []
    for name in config.only:
        rows.append(_measure(name, config))
        print(rows[-1], flush=True)
    return rows


_DEPTHS = (4, 8)


def _measure(name: str, config: Config) -> dict[str, Any]:
    dims = preset(config.model)
    flops, temporaries = [], []
    for depth in _DEPTHS:
        shallow = dataclasses.replace(dims, num_layers=depth)
        built, batch = training_step(name, config, shallow)
        state = jax.eval_shape(built.init)
        assert built.gradient is not None
        flops.append(memory.operations(built.gradient, state, batch))
        sizes = memory.compiled(built.gradient, state, batch, device=config.device)
        temporaries.append(sizes["temporaries"])
    layers = _DEPTHS[1] - _DEPTHS[0]
    row = {
        "name": name,
        "block_matmul_flops": (flops[1] - flops[0]) // layers,
        "buffered": (temporaries[1] - temporaries[0]) // layers,
    }
    built, batch = training_step(name, config, dims)
    state = jax.eval_shape(built.init)
    peak = memory.compiled(built.step, state, batch, device=config.device, donate=True)
    return row | peak


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the table of the rows, with ratios to the first row."""
    first = rows[0]
    return [
        {
            "method": row["name"],
            "buffered a layer, MiB": f"{row['buffered'] / 2**20:,.1f}",
            "first / it": f"{first['buffered'] / row['buffered']:.2f}",
            "block TFLOP": f"{row['block_matmul_flops'] / 1e12:.3f}",
            "it / first": f"{row['block_matmul_flops'] / first['block_matmul_flops']:.3f}",
            "peak, GiB": f"{row['peak'] / 2**30:.2f}",
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    where = "this CPU" if config.device == HERE else config.device
    print_cells(
        f"{config.model}, {config.batch_size} x {config.seq_len}, rank {config.adapter.lora_rank},"
        f" {config.dtype}, compiled for {where}",
        table(rows),
    )


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
