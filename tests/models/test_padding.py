"""Feed-forward weights that are stored wider than they are published."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny

import models.config
from actjax._core.paths import map_named, named_leaves
from models import Decoder, ModelConfig, huggingface, preset
from models.config import site_width
from models.lora import LoRAConfig, init_adapters, merge
from models.padding import count_parameters, pad, without_padding
from models.peft import load_adapters, save_adapters

CONFIG, LORA = tiny.CONFIG, LoRAConfig(rank=3)
WIDTH, STORED = CONFIG.ffn_size, CONFIG.stored_ffn_size
REFERENCE = "needs transformers and torch: pip install -e '.[reference]'"


def published(patch: pytest.MonkeyPatch) -> None:
    """Stores widths as they are published."""
    patch.setattr(models.config, "NARROW_MULTIPLE", 1)


@pytest.mark.parametrize(
    ("name", "published", "stored"),
    [
        *(("llama_1b", 5461, 5504), ("llama_60m", 1376, 1408), ("llama_100m", 1708, 1792)),
        *(("llama_9m", 352, 352), ("llama_20m", 688, 688), ("llama3_8b", 14_336, 14_336)),
    ],
)
def test_stored_widths(name, published, stored):
    config = preset(name)
    assert (config.ffn_size, config.stored_ffn_size) == (published, stored)
    assert [site_width(config, site) for site in ("gate", "up", "mlp_out")] == [stored] * 3
    assert site_width(config, "mlp_in") == config.hidden_size


def test_weights_and_adapters_are_drawn_as_without_padding(monkeypatch):
    def drawn():
        key = jax.random.key(0)
        return jax.jit(lambda: (Decoder(CONFIG, key), init_adapters(CONFIG, LORA, key)))()

    padded = drawn()
    with monkeypatch.context() as patch:
        published(patch)
        plain = drawn()
    for got, want in zip(padded, plain, strict=True):
        repadded = map_named(lambda path, x: pad(path, np.asarray(x), CONFIG), want)
        jax.tree.map(np.testing.assert_array_equal, got, repadded)
        cut = map_named(lambda path, x: without_padding(path, x, CONFIG), got)
        jax.tree.map(np.testing.assert_array_equal, cut, want)
        assert count_parameters(got, CONFIG) == sum(x.size for x in jax.tree.leaves(want))
    shapes = {name: x.shape for name, x in named_leaves(padded[0]).items() if ".mlp." in name}
    d, layers = CONFIG.hidden_size, CONFIG.num_layers
    assert shapes == {
        "layers.mlp.gate": (layers, d, STORED),
        "layers.mlp.up": (layers, d, STORED),
        "layers.mlp.down": (layers, STORED, d),
    }


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_exports_are_those_of_the_published_width(tmp_path, monkeypatch):
    model = tiny.decoder()
    adapters = jax.jit(
        lambda: tiny.add_noise(init_adapters(CONFIG, LORA, jax.random.key(1)), 1, 1)
    )()

    def export(folder, model, adapters):
        # Several files: their sizes are those of the published width.
        huggingface.save(model, folder / "model", max_shard_bytes=20_000)
        save_adapters(adapters, LORA, folder / "adapter", CONFIG)
        return files(folder / "model"), files(folder / "adapter")

    padded = export(tmp_path / "padded", model, adapters)
    model_read = huggingface.load(tmp_path / "padded/model")
    jax.tree.map(np.testing.assert_array_equal, model_read, model)
    adapters_read, _ = load_adapters(tmp_path / "padded/adapter", CONFIG)
    jax.tree.map(np.testing.assert_array_equal, adapters_read, adapters)
    with monkeypatch.context() as patch:
        published(patch)
        plain = huggingface.load(tmp_path / "padded/model")
        plain_adapters, _ = load_adapters(tmp_path / "padded/adapter", CONFIG)
        assert plain.layers.mlp.up.get_value().shape[-1] == WIDTH
        assert plain_adapters["layers"]["down"]["a"].shape[-2] == WIDTH
        assert export(tmp_path / "plain", plain, plain_adapters) == padded
    assert len(padded[0]) > 3
    arrays = safetensors.numpy.load_file(tmp_path / "padded/adapter/adapter_model.safetensors")
    assert arrays["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"].shape == (3, WIDTH)


def test_transformers_loads_the_published_width(tmp_path):
    transformers = pytest.importorskip("transformers", reason=REFERENCE)
    torch = pytest.importorskip("torch", reason=REFERENCE)
    model, tokens = tiny.decoder(), tiny.batch()[0]
    huggingface.save(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.intermediate_size == WIDTH
    with torch.no_grad():
        want = theirs(torch.asarray(np.asarray(tokens))).logits.numpy()
    got = jax.jit(lambda model: model(tokens, compute_dtype="float32"))(model)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_numbers_in_the_padding_are_not_exported(tmp_path):
    model = tiny.decoder()
    down = np.array(model.layers.mlp.down.get_value())
    down[1, WIDTH] = 1e-30
    model.layers.mlp.down.set_value(down)
    beyond = f"has numbers other than zero beyond its published width {WIDTH}"
    with pytest.raises(ValueError, match=f"`layers.mlp.down` {beyond}"):
        huggingface.save(model, tmp_path / "model")
    shapes = jax.eval_shape(lambda: init_adapters(CONFIG, LORA, jax.random.key(0)))
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    with pytest.raises(ValueError, match=f"`layers.down.a` {beyond}"):
        save_adapters(ones, LORA, tmp_path / "adapter", CONFIG)
    assert not list(tmp_path.iterdir())


def test_merged_magnitudes_leave_zeros_in_the_padding():
    model, lora = tiny.decoder(), dataclasses.replace(LORA, targets=("up",))
    adapters = init_adapters(CONFIG, lora, jax.random.key(0))
    shape = (CONFIG.num_layers, STORED)
    magnitude = tiny.zero_padding({"layers": {"up": {"magnitude": np.ones(shape, np.float32)}}})
    adapters["layers"]["up"] |= magnitude["layers"]["up"]
    merged = np.asarray(merge(model, adapters, lora).layers.mlp.up.get_value())
    assert not np.any(merged[..., WIDTH:])
    norms = np.linalg.norm(merged[..., :WIDTH], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_a_width_of_a_prime_number():
    assert ModelConfig(8, 8, 1031, 1, 2).stored_ffn_size == 1152
    assert ModelConfig(8, 8, 31, 1, 2).stored_ffn_size == 32
