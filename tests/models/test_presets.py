import jax
import pytest

from models import PRESETS, Decoder, ModelConfig, preset
from models.padding import count_parameters

# Millions of parameters, embeddings included: tied or not, as the papers name the models.
MILLIONS = {
    "llama_3m": 2.9,
    "llama_9m": 9.0,
    "llama_20m": 19.5,
    "llama_35m": 35.2,
    "llama_60m": 58.1,
    "llama_130m": 134.1,
    "llama_350m": 368.0,
    "llama_1b": 1339.1,
    "llama_7b": 6738.4,
    "llama3_1b": 1235.8,
    "llama3_3b": 3212.7,
    "llama3_8b": 8030.3,
    "llama3_70b": 70_553.7,
    "qwen2_5_0_5b": 494.0,
    "qwen3_0_6b": 596.0,
    "qwen3_4b": 4022.5,
    "qwen3_8b": 8190.7,
}


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_presets_have_the_parameters_of_their_models(name, millions):
    model = jax.eval_shape(lambda: Decoder(preset(name), jax.random.key(0)))
    assert count_parameters(model, preset(name)) / 1e6 == pytest.approx(millions, abs=0.06)


def test_every_preset_has_a_name_of_the_documented_form():
    families = ("llama_", "llama3_", "qwen2_5_", "qwen3_")
    assert all(name.startswith(families) for name in PRESETS)


def test_dimensions_of_heads_follow_from_the_others():
    sizes = {"vocab_size": 8, "hidden_size": 8, "ffn_size": 8, "num_layers": 1, "num_heads": 2}
    config = ModelConfig(**sizes)
    assert (config.num_kv_heads, config.head_size) == (2, 4)
    assert ModelConfig(**sizes, num_kv_heads=1, head_size=6).head_size == 6
