"""The recipe of a run: resolved settings, with the storage and the optimizer that follow."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import actjax
from actjax.optim.stepping.pieces import count_pieces
from models import Decoder, ModelConfig, Storage, StorageChoice
from train.run.calibration import calibrated_sites
from train.run.loss import loss_function, micro_batch_shapes
from train.run.optimizer import make_optimizer, moment_block, moment_group
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.methods import Method, Subspace, coordinate_bits
from train.settings.options import ANY_FULL_RANK
from train.settings.resolve import ResolvedConfig, resolve


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The resolved settings of a run, with the storage and the optimizer that follow from them.

    Attributes:
      config: the settings.
      storage: what each site stores.
      optimizer: the transform, for `actjax.optim.apply`.
      bits: of the sites whose bits were chosen by `train.run.adapt`.
    """

    config: ResolvedConfig
    storage: StorageChoice
    optimizer: optax.GradientTransformation
    bits: Mapping[str, int]

    @property
    def method(self) -> Method:
        """The method."""
        return self.config.info

    @property
    def subspace(self) -> actjax.optim.SubspaceTransformation | None:
        """The transform if some steps are refresh steps, else None."""
        tx = self.optimizer
        return tx if isinstance(tx, actjax.optim.SubspaceTransformation) else None

    @property
    def optimizer_form(self) -> dict[str, Any]:
        """Settings that shape the optimizer state: a checkpoint must agree with them."""
        config, optimizer, model = self.config, self.config.optimizer, self.config.model_config
        is_full = self.method.subspace is None
        form: dict[str, Any] = {
            "moment_dtype": optimizer.stored_dtype,
            "weight_rounding": config.weight_rounding,
            "in_backward": config.in_backward,
            # A run may change from one full-rank method to another.
            "method": ANY_FULL_RANK if is_full else config.method,
            "rank": None if is_full else config.options.rank,
        }
        if config.in_backward:
            form["norm_estimate"] = "parts"
        if config.compute_dtype == "float16":
            form["loss_scale"] = True
        # The form of AdamW with both moments has no further parts.
        if optimizer.optimizer != "adamw":
            form["name"] = optimizer.optimizer
        if optimizer.projects:
            form["projection_rank"] = config.options.rank
        if optimizer.factored_second_moment:
            form["factored_second_moment"] = True
            form |= {} if optimizer.betas[0] else {"first_moment": "none"}
        # Numbers of pieces of the embedding and the head, if these are updated in pieces.
        embedding = (model.vocab_size, model.hidden_size)
        pieces = [count_pieces(embedding), count_pieces(embedding[::-1])]
        if self.config.lora is None and pieces != [1, 1]:
            form["pieces"] = pieces
        if blocks := self._short_blocks():
            form["moment_blocks"] = blocks
        if self.config.lora is not None:
            form["adapters"] = dataclasses.asdict(self.config.lora)
        return form

    def _short_blocks(self) -> list[int]:
        """Returns the sizes of shared scales of moments that are not the usual ones."""
        rules = {"8bit": (moment_block, 256), "4bit": (moment_group, 128)}
        if self.config.optimizer.stored_dtype not in rules:
            return []
        rule, usual = rules[self.config.optimizer.stored_dtype]
        model = self.config.model_config
        d, keys = model.hidden_size, model.num_kv_heads * model.head_size
        sides = (model.stored_ffn_size, model.num_heads * model.head_size, keys, model.vocab_size)
        shapes = [shape for n in sides for shape in ((d, n), (n, d))]
        return sorted({rule(shape) for shape in shapes} - {usual})

    @property
    def calibration_form(self) -> dict[str, Any]:
        """Settings that give calibrated statistics their meaning: a checkpoint must agree too."""
        if not self.method.calibrates:
            return {}
        # Means and spreads describe the activations, whatever these are stored in. Scales of
        # channels belong to a code.
        codecs = calibrated_sites(self.storage).items()
        by_channel = {site: str(code) for site, code in codecs if code.scaling == "channel"}
        return {"scaling": "channel", **by_channel} if by_channel else {"scaling": "group"}

    def refreshes(self, step: int, skipped: int = 0) -> bool:
        """Returns whether a step refreshes the subspaces of the layers.

        Args:
          step: steps done before it.
          skipped: latest of them, if they were skipped (`train.run.loss_scale`). A refresh that was
            due in one of them was skipped too, unless it reads no gradient.
        """
        if self.subspace is None:
            return False
        late = 0 if self.subspace.source == "random" else skipped
        return any(done % self.subspace.gap == 0 for done in range(step - late, step + 1))


def make_recipe(
    config: PretrainConfig | FinetuneConfig,
    model_config: ModelConfig,
    bits: Mapping[str, int] | None = None,
) -> Recipe:
    """Resolves settings and returns their recipe.

    Args:
      config: settings as the user gave them.
      model_config: dimensions.
      bits: as for `build_recipe`.

    Raises:
      ValueError: an unknown method, or options out of range.
    """
    return build_recipe(resolve(config, model_config), bits)


def build_recipe(config: ResolvedConfig, bits: Mapping[str, int] | None = None) -> Recipe:
    """Returns the recipe of resolved settings.

    Args:
      config: the settings.
      bits: of sites whose bits were chosen (`train.run.adapt`); None for those of the method.

    Raises:
      ValueError: options out of range.
    """
    longest = max(config.seq_len, config.model_config.max_seq_len)
    model_config = dataclasses.replace(config.model_config, max_seq_len=longest)
    config = dataclasses.replace(config, model_config=model_config)
    storage = config.info.storage_of(config.options, bits or {})
    subspace = _subspace(config, storage)
    optimizer = make_optimizer(
        config.optimizer, config.steps, subspace, config.weight_rounding, config.seed, model_config
    )
    return Recipe(config, storage, optimizer, bits or {})


def _subspace(
    config: ResolvedConfig, storage: StorageChoice
) -> Callable[..., actjax.optim.SubspaceTransformation] | None:
    """Returns `actjax.optim.subspace` without its transforms; None without a subspace."""
    options, subspace, remainder = config.options, config.info.subspace, None
    if config.optimizer.projects:
        subspace, remainder = Subspace(side="smaller"), actjax.optim.ScaledRemainder()
    if subspace is None:
        return None
    make = functools.partial(Decoder, config.model_config, dtype=config.weight_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = micro_batch_shapes(config)
    model = jax.eval_shape(make, key)
    # Where inputs are rebuilt from codes, so are their coordinates, and none are stored.
    is_rebuilt = isinstance(storage, Storage) and storage.attention_in is None
    return functools.partial(
        actjax.optim.subspace,
        rank=options.rank,
        gap=options.gap,
        scale=options.scale,
        source=subspace.source,
        side=subspace.side,
        groups=actjax.input_groups(loss_function(config, storage), model, batch, key),
        bits=16 if is_rebuilt else coordinate_bits(options),
        remainder=remainder,
        seed=config.seed,
    )
