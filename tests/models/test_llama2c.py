"""Tests of models/llama2c.py: files are read back, and damaged files are named."""

import struct

import jax
import numpy as np
import pytest
import tiny

import actjax
from models import Decoder, ModelConfig, llama2c
from models.rope import rope_tables


def config(**changes) -> ModelConfig:
    sizes = {"vocab_size": 11, "hidden_size": 16, "ffn_size": 20, "num_layers": 2, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "max_seq_len": 9, "norm_eps": 1e-5, "tie_embeddings": True}
    return ModelConfig(**sizes | changes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_read_back(tied, tmp_path):
    model = tiny.decoder(config(tie_embeddings=tied))
    llama2c.save(model, tmp_path / "model.bin")
    again = llama2c.load(tmp_path / "model.bin")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again, model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(value, tmp_path):
    path = tmp_path / "model.bin"
    llama2c.save(tiny.decoder(config()), path)
    data = path.read_bytes()
    path.write_bytes(data[:28] + struct.pack("<f", value) + data[32:])
    with pytest.raises(ValueError, match="`embedding` has infinities or NaN"):
        llama2c.load(path)


def interleaved(x, positions):
    """RoPE of llama2.c, which rotates feature 2i with 2i + 1. x: [S, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


@pytest.mark.parametrize("version", [0, 1])
def test_the_file_is_read_as_it_is_laid_out(version, tmp_path):
    """Attention scores computed from the file equal those of the model."""
    sizes = config()
    d, f, kv = 16, 20, 8
    rng = np.random.default_rng(0)
    shapes = {"embedding": (11, d), "attention_norm": (2, d), "q": (2, d, d), "k": (2, kv, d),
              "v": (2, kv, d), "o": (2, d, d), "mlp_norm": (2, d), "gate": (2, f, d),
              "down": (2, d, f), "up": (2, f, d), "norm": (d,)}  # fmt: skip
    arrays = {name: rng.standard_normal(s).astype("<f4") for name, s in shapes.items()}
    dims = (d, f, 2, 4, 2, 11, 9)
    if version == 0:
        header = struct.pack("<7i", *dims)
        order = list(shapes)
        tail = np.zeros(2 * 9 * 2, "<f4").tobytes()
    else:
        header = struct.pack("<Ii7iB", 0x616B3432, 1, *dims, 1).ljust(256, b"\0")
        order = ["attention_norm", "mlp_norm", "norm", "embedding", "q", "k", "v", "o", "gate",
                 "down", "up"]  # fmt: skip
        tail = b""
    path = tmp_path / "model.bin"
    path.write_bytes(header + b"".join(arrays[name].tobytes() for name in order) + tail)
    model = llama2c.load(path)
    assert model.config == sizes
    layers = model.layers
    pairs = [(layers.attention_norm, "attention_norm"), (layers.mlp_norm, "mlp_norm"),
             (model.norm, "norm"), (model.embedding, "embedding")]  # fmt: skip
    for parameter, name in pairs:
        np.testing.assert_array_equal(parameter[...], arrays[name])
    for owner, names in ((layers.attention, "vo"), (layers.mlp, ("gate", "up", "down"))):
        for name in names:
            got = getattr(owner, name)[...]
            np.testing.assert_array_equal(got, arrays[name].swapaxes(1, 2))

    x, positions = rng.standard_normal((9, d)), np.arange(9)
    rotate = jax.jit(lambda y: actjax.rope(y, *rope_tables(sizes, 9)))
    for layer in range(2):
        rotated = [interleaved((x @ arrays[n][layer].T).reshape(9, -1, 4), positions) for n in "qk"]
        ours = [
            np.asarray(rotate((x @ weight[layer]).reshape(1, 9, -1, 4)))[0]
            for weight in (layers.attention.q.get_value(), layers.attention.k.get_value())
        ]
        wanted = np.einsum("shd,td->sht", rotated[0], rotated[1][:, 0])
        got = np.einsum("shd,td->sht", ours[0], ours[1][:, 0])
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_damaged_files_and_unsupported_models_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    llama2c.save(tiny.decoder(config()), path)
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "is truncated, or not a checkpoint"),
        (whole[:5], "has 5 bytes: not a checkpoint"),
        (whole + b"more", "is truncated, or not a checkpoint"),
        (struct.pack("<7i", 0, 1, 1, 1, 1, 1, 1) + whole[28:], "not a checkpoint of llama2.c"),
        (struct.pack("<Ii", 0x616B3432, 2) + whole, "has version 2"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            llama2c.load(path)
    with pytest.raises(FileExistsError):
        llama2c.save(tiny.decoder(config()), path)
    for changes in ({"norm_eps": 1e-6}, {"attention_bias": True}, {"rope_theta": 500.0}):
        unfit = config(**changes)
        model = jax.eval_shape(lambda c=unfit: Decoder(c, jax.random.key(0)))
        with pytest.raises(ValueError, match="describes only a Llama 2"):
            llama2c.save(model, tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()
