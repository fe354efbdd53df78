"""Levanter (Marin): a `Trainer` of a Llama of named arrays, whose loss stores codes.

One line changes, the loss that the trainer takes:

    trainer = Trainer(config, optimizer, actjax.compress_residuals(loss, actjax.Quantized(4)))

The layers are a haliax `Stacked`, a `lax.scan`. `gradient_checkpointing=False` shows what codes do
alone; with Levanter's default the layers are computed again anyway.
"""

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
import optax
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, LmHeadModel
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import actjax
from benchmarks.anybody.measuring import report

BATCH, VOCABULARY = 4, 512
LLAMA = LlamaConfig(
    max_seq_len=128,
    hidden_dim=128,
    intermediate_dim=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    gradient_checkpointing=False,
)
Loss = Callable[..., jax.Array]


def loss_function(model: LmHeadModel, example: LmExample, *, key: Any = None) -> jax.Array:
    """Returns the loss of a batch, as `levanter.main.train_lm` has it."""
    return model.compute_next_token_loss(example, key=key).scalar()


def make_trainer(loss: Loss) -> Trainer:
    """Returns Levanter's trainer with a loss."""
    settings = TrainerConfig(
        id="small",
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        train_batch_size=BATCH,
        num_train_steps=2,
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    return Trainer(settings, optax.adamw(1e-3), loss)  # The line that changes.


def make_example(key: jax.Array) -> LmExample:
    """Returns a batch of tokens that repeat themselves."""
    tokens = jax.random.randint(key, (BATCH, LLAMA.max_seq_len // 4), 1, VOCABULARY)
    axes = hax.Axis("batch", BATCH), LLAMA.max_Pos
    named = hax.named(jax.numpy.tile(tokens, (1, 4)), axes)
    return hax.vmap(LmExample.causal, axes[0])(named)


def main() -> None:
    """Prints a line without and one with Levanter's own rematerialization."""
    example = make_example(jax.random.key(0))
    for remat in (False, True):
        llama = dataclasses.replace(LLAMA, gradient_checkpointing=remat)
        vocabulary = hax.Axis("vocab", VOCABULARY)

        def make_model(llama: LlamaConfig = llama, vocabulary: hax.Axis = vocabulary) -> Any:
            return llama.model_type.init(vocabulary, llama, key=jax.random.key(1))

        def gradient(loss: Loss) -> Callable[..., Any]:
            def of_model(model: Any, example: LmExample) -> Any:
                run = make_trainer(loss).loss_fn
                return eqx.filter_grad(run, has_aux=True)(model, example)[0]

            return of_model

        losses = {}
        for name, fun in {
            "plain": loss_function,
            "4 bits": actjax.compress_residuals(loss_function, actjax.Quantized(4)),
        }.items():
            with make_trainer(fun) as trainer:
                state = trainer.initial_state(jax.random.key(1), model_init=make_model)
                for _ in range(3):
                    info = trainer.train_step(state, example)
                    state = info.state
                losses[name] = float(info.loss)
        # `compress` names arrays by scopes and lines: measure where the trainer calls the loss.
        with make_trainer(loss_function) as trainer, hax.axis_mapping(trainer.compute_axis_mapping):
            model = make_model()
            report(
                f"marin-levanter {version('marin-levanter')}{', its remat' if remat else ''}",
                1,
                loss_function,
                gradient,
                (model, example),
                (model, example),
                more={"loss after 3 steps": losses},
            )


if __name__ == "__main__":
    main()
