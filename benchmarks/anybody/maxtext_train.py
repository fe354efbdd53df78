"""MaxText: its pretraining loop with a loss that stores codes.

MaxText's steps call `loss_fn` of the module `train`, so a program replaces it before `train.main`:

    train.loss_fn = actjax.compress_residuals(train.loss_fn, actjax.Quantized(4))

`remat_policy=minimal` leaves arrays to store; with the default, `full`, layers are computed again.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils

import actjax
from benchmarks.anybody.measuring import report

BATCH, LENGTH, VOCABULARY = 4, 128, 512
Loss = Callable[..., Any]


def arguments_of(folder: str, policy: str) -> list[str]:
    """Returns the command line of a small Llama on synthetic tokens."""
    base = os.path.join(os.path.dirname(train.__file__), "..", "..", "configs", "base.yml")
    settings = {
        "run_name": "small",
        "base_output_directory": folder,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "steps": 3,
        "per_device_batch_size": BATCH,
        "max_target_length": LENGTH,
        "vocab_size": VOCABULARY,
        "base_emb_dim": 128,
        "base_mlp_dim": 384,
        "base_num_decoder_layers": 4,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
        "attention": "dot_product",
        "enable_goodput_recording": False,
        "skip_jax_distributed_system": True,
        "remat_policy": policy,
    }
    return ["train", base, *(f"{name}={value}" for name, value in settings.items())]


def run_trainer(arguments: list[str], loss: Loss) -> dict[str, float]:
    """Returns the last loss of MaxText's own training loop."""
    plain, write = train.loss_fn, train.train_step
    losses = []

    def step(*args: Any, **kwargs: Any) -> Any:
        state, metrics = write(*args, **kwargs)
        jax.debug.callback(lambda x: losses.append(float(x)), metrics["scalar"]["learning/loss"])
        return state, metrics

    train.loss_fn, train.train_step = loss, step  # The first is the line that changes.
    try:
        config, recorder = train.initialize(arguments)
        train.run(config, recorder)
    finally:
        train.loss_fn, train.train_step = plain, write
    return {f"step {i}": round(x, 5) for i, x in enumerate(losses)}


def main() -> None:
    """Prints a line for each of two policies of rematerialization."""
    loss_fn = train.loss_fn
    coded = actjax.compress_residuals(loss_fn, actjax.Quantized(4))
    for policy in ("minimal", "full"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = arguments_of(folder, policy)
            losses = {
                name: run_trainer(arguments, fun)
                for name, fun in {"plain": loss_fn, "4 bits": coded}.items()
            }
            config = train.initialize(arguments)[0]
        mesh = maxtext_utils.get_mesh_from_config(config)
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
        tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH // 4), 1, VOCABULARY)
        tokens = jnp.tile(tokens, (1, 4))
        places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        ones = jnp.ones_like(tokens)
        data = {
            **{"inputs": tokens, "inputs_position": places, "inputs_segmentation": ones},
            "targets": jnp.roll(tokens, -1, 1),
            **{"targets_position": places, "targets_segmentation": ones},
        }
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(model: Any, data: Any, config: Any = config) -> Any:
            return loss_fn(model, config, dict(data), None, None)

        def gradient(loss: Loss, graph: Any = graph) -> Callable[..., Any]:
            def of_params(params: Any, rest: Any, data: Any) -> Any:
                def run(params: Any) -> Any:
                    return loss(nnx.merge(graph, params, rest, copy=True), data)

                return jax.grad(run, has_aux=True)(params)[0]

            return of_params

        with mesh:
            report(
                f"maxtext 0.2.5, remat_policy={policy}",
                1,
                loss,
                gradient,
                (params, rest, data),
                (model, data),
                has_aux=True,
                more={"losses of train.run()": losses},
            )


if __name__ == "__main__":
    main()
