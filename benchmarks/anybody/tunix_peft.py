"""Tunix: `PeftTrainer` with a loss that stores codes, for all weights and for LoRA adapters.

One line changes, which hands the trainer another loss:

    trainer.with_loss_fn(actjax.compress_residuals(loss, actjax.Quantized(4)))

or, measured on one batch as `gen_model_input_fn` returns it:

    trainer.with_loss_fn(actjax.compress(loss, error=0.05).measure(model, **inputs))
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer, utils

import actjax
from benchmarks.anybody.measuring import report

BATCH, LENGTH, VOCABULARY = 4, 128, 512
CONFIG = llama.ModelConfig(
    num_layers=4,
    vocab_size=VOCABULARY,
    embed_dim=128,
    hidden_dim=384,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
Loss = Callable[..., jax.Array]


def inputs_of(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
    """Returns the arguments of the loss, as a user of Tunix makes them."""
    mask = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def make_model(lora: bool) -> nnx.Module:
    """Returns a small Llama, or one with adapters, as after some training."""
    model = llama.Llama3(CONFIG, rngs=nnx.Rngs(0))
    add_noise(model, nnx.Param)  # Tunix starts the weights of the MLPs at zero.
    if not lora:
        return model
    batch = make_batches(1)[0]
    provider = qwix.LoraProvider(module_path=".*q_proj|.*v_proj|.*down_proj", rank=8, alpha=16)
    inputs = inputs_of(batch)
    tokens, positions, mask = (inputs[x] for x in ("input_tokens", "positions", "attention_mask"))
    model = qwix.apply_lora_to_model(
        model, provider, tokens, positions, None, mask, rngs=nnx.Rngs(1)
    )
    add_noise(model, nnx.LoRAParam)  # Adapters start at zero, and so do their gradients.
    return model


def add_noise(model: nnx.Module, kind: type[nnx.Variable]) -> None:
    """Adds small random numbers to the variables of a kind."""
    keys = nnx.Rngs(2)
    nnx.update(
        model,
        jax.tree.map(
            lambda x: x + 0.02 * jax.random.normal(keys(), x.shape, x.dtype),
            nnx.state(model, kind),
        ),
    )


def make_batches(count: int) -> list[peft_trainer.TrainingInput]:
    """Returns batches of tokens that repeat themselves."""
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        first = generator.zipf(1.5, (BATCH, LENGTH // 4)) % (VOCABULARY - 1) + 1
        tokens = jnp.asarray(np.tile(first, 4))
        batches.append(peft_trainer.TrainingInput(tokens, jnp.ones_like(tokens)))
    return batches


def make_trainer(model: nnx.Module, loss: Loss) -> peft_trainer.PeftTrainer:
    """Returns Tunix's trainer with a loss."""
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=2)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-3), settings)
    return trainer.with_gen_model_input_fn(inputs_of).with_loss_fn(loss)  # The line that changes.


def main() -> None:
    """Prints a line for all weights, and one for adapters."""
    loss = peft_trainer._default_loss_fn
    batches = make_batches(2)
    for lora in (False, True):
        model = make_model(lora)
        graph, state = nnx.split(model)

        def gradient(loss: Loss, lora: bool = lora, graph: Any = graph) -> Callable[..., Any]:
            argument = nnx.DiffState(0, nnx.LoRAParam) if lora else 0

            def of_state(state: Any, batch: peft_trainer.TrainingInput) -> Any:
                model = nnx.merge(graph, state)
                return nnx.grad(loss, argnums=argument)(model, **inputs_of(batch))

            return of_state

        def step(loss: Loss, lora: bool = lora) -> Any:
            trainer = make_trainer(make_model(lora), loss)
            jitted: functools.partial[Any] = trainer.jit_train_and_eval_step()[0]
            return jitted.func.lower(trainer.model, trainer.optimizer, batches[0])

        trained = {}
        for name, fun in {
            "plain": loss,
            "4 bits": actjax.compress_residuals(loss, actjax.Quantized(4)),
        }.items():
            trainer = make_trainer(make_model(lora), fun)
            trainer.train(batches)
            trained[name] = float(loss(trainer.model, **inputs_of(batches[0])))
        inputs = inputs_of(batches[0])
        report(
            f"google-tunix 0.1.7, PeftTrainer, {'LoRA' if lora else 'all weights'}",
            1,
            loss,
            gradient,
            (state, batches[0]),
            (model, *inputs.values()),
            step=step,
            more={"loss after train()": trained},
        )


if __name__ == "__main__":
    main()
