"""EasyDeL: its training step, and a step of one's own, with a loss that stores codes.

EasyDeL's `training_step` defines its loss within, around `model.compute_loss`, so one line on the
class of the model reaches it:

    Model.compute_loss = actjax.compress_residuals(Model.compute_loss, actjax.Quantized(4))

`actjax.compress` needs a scalar, so it goes around the loss of a short step of one's own.
"""

from collections.abc import Callable
from typing import Any

import easydel
import jax
import jax.numpy as jnp
import optax
from easydel.trainers.trainer._fn import training_step
from flax import nnx

import actjax
from benchmarks.anybody.measuring import report

BATCH, LENGTH, VOCABULARY = 4, 128, 512
Model = easydel.LlamaForCausalLM
Loss = Callable[..., Any]


def make_state(remat: bool) -> easydel.EasyDeLState:
    """Returns the state of a small Llama."""
    config = easydel.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        attn_mechanism="vanilla",
        gradient_checkpointing="nothing_saveable" if remat else "",
    )
    model = Model(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    return easydel.EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)


def run_trainer(state: easydel.EasyDeLState, batch: Any, compute_loss: Loss) -> list[float]:
    """Returns the losses of EasyDeL's own training step."""
    plain = Model.compute_loss
    Model.compute_loss = compute_loss  # The line that changes.
    try:
        step = jax.jit(lambda state, batch: training_step(state, batch))
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(round(float(metrics.loss), 5))
    finally:
        Model.compute_loss = plain
    return losses


def main() -> None:
    """Prints a line without and one with EasyDeL's own rematerialization."""
    tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH // 4), 1, VOCABULARY)
    tokens = jnp.tile(tokens, (1, 4))
    batch = {"input_ids": tokens, "attention_mask": jnp.ones_like(tokens)}
    batch["labels"] = tokens
    for remat in (False, True):
        state = make_state(remat)

        def loss(graphstate: Any, batch: Any, state: Any = state) -> Any:
            module = state.merge(graphstate)
            inputs = module.prepare_inputs_for_call(**batch)
            outputs, metrics = module.compute_loss(labels=inputs.pop("labels"), **inputs)
            return outputs.loss, metrics

        def gradient(loss: Loss) -> Callable[..., Any]:
            return lambda *args: jax.grad(loss, has_aux=True)(*args)[0]

        def step(loss: Loss, state: Any = state) -> Any:
            def run(state: Any, batch: Any) -> Any:
                grads = jax.grad(loss, has_aux=True)(state.graphstate, batch)[0]
                return state.apply_gradients(grads=grads)

            return jax.jit(run).lower(state, batch)

        with state.model.mesh:
            losses = {
                name: run_trainer(state, batch, fun)
                for name, fun in {
                    "plain": Model.compute_loss,
                    "4 bits": actjax.compress_residuals(Model.compute_loss, actjax.Quantized(4)),
                }.items()
            }
            report(
                f"easydel 0.3.0{', its remat' if remat else ''}",
                1,
                loss,
                gradient,
                (state.graphstate, batch),
                (state.graphstate, batch),
                step=step,
                has_aux=True,
                more={"losses of training_step": losses},
            )


if __name__ == "__main__":
    main()
