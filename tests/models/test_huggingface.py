"""Tests of models/huggingface: the numbers of `transformers`, and the bytes of saved files."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from models import Decoder, ModelConfig, RopeScaling, huggingface, preset
from models.checkpoints import stop_ids
from models.rope import rope_tables

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
FAMILIES = {
    "llama2": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 5}),
    "qwen2_5": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
}
REFERENCE = "needs transformers and torch: pip install -e '.[reference]'"


@functools.cache
def reference(family):
    """Returns a random model of `transformers`, or skips."""
    transformers = pytest.importorskip("transformers", reason=REFERENCE)
    torch = pytest.importorskip("torch", reason=REFERENCE)
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**SIZES, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Initial biases are zero, norms one and scores nearly equal.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    model = reference(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    model.save_pretrained(folder)
    return model, folder


TOKENS = np.random.default_rng(0).integers(0, 61, (2, 23))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


@jax.jit
def logits_of(model):
    return model(INPUTS, compute_dtype="float32")


@jax.jit
def logits_and_gradient_of(model):
    def loss(model):
        return model.loss(INPUTS, TARGETS, compute_dtype="float32")

    return logits_of(model), *jax.value_and_grad(loss)(model)


# The gradients of these families have all the parts of the others'.
WITH_GRADIENTS = ("llama3", "mistral_window", "qwen2_5", "qwen3")


@pytest.mark.parametrize(
    "checkpoint", [f for f in FAMILIES if f not in WITH_GRADIENTS], indirect=True
)
def test_logits_equal_those_of_transformers(checkpoint):
    import torch

    theirs, folder = checkpoint
    with torch.no_grad():
        want = theirs(torch.asarray(INPUTS)).logits.numpy()
    assert np.abs(logits_of(huggingface.load(folder)) - want).max() <= 1e-4


@pytest.mark.parametrize("checkpoint", WITH_GRADIENTS, indirect=True)
def test_logits_and_gradients_equal_those_of_transformers(checkpoint):
    import torch

    theirs, folder = checkpoint
    ours = huggingface.load(folder)
    logits, value, gradient = logits_and_gradient_of(ours)
    theirs.zero_grad()
    output = theirs(torch.asarray(INPUTS)).logits
    assert np.abs(logits - output.detach().numpy()).max() <= 1e-4
    cross_entropy = torch.nn.functional.cross_entropy(
        output.flatten(0, 1), torch.asarray(TARGETS).flatten()
    )
    cross_entropy.backward()
    assert abs(value - cross_entropy.item()) <= 1e-5 * cross_entropy.item()
    wanted = dict(theirs.named_parameters())
    for row in huggingface.table(ours.config):
        got = np.asarray(huggingface.parameter_of(gradient, row.parameter).get_value())
        for layer, array in enumerate(got if row.stacked else got[None]):
            want = wanted.pop(row.tensor.format(layer)).grad.numpy()
            array = array.T if row.transposed else array
            assert np.abs(array - want).max() <= 1e-3 * np.abs(want).max(), row
    assert not wanted


def test_transformers_loads_what_is_saved(checkpoint, tmp_path):
    import torch
    import transformers

    theirs, folder = checkpoint
    huggingface.save(huggingface.load(folder), tmp_path / "saved", like=folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    wanted, got = theirs.state_dict(), again.state_dict()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_transformers_loads_a_model_saved_without_its_origin(checkpoint, tmp_path):
    """`config.json` is then written from the dimensions."""
    import torch
    import transformers

    theirs, folder = checkpoint
    huggingface.save(huggingface.load(folder), tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.model_type in (theirs.config.model_type, "llama")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        difference = (again(tokens).logits - theirs(tokens).logits).abs().max()
    assert difference == 0


# Without transformers.


def tensors(folder) -> dict[str, np.ndarray]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


@pytest.fixture
def folder(tmp_path):
    """A folder with a small model in bfloat16."""
    huggingface.save(tiny.decoder(dtype="bfloat16"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("shard", [1, 5000, 10**9])
def test_saved_bytes_are_read_back(folder, tmp_path, shard):
    model = huggingface.load(folder)
    assert model.layers.attention.q.get_value().dtype == jnp.bfloat16
    huggingface.save(model, tmp_path / "again", max_shard_bytes=shard)
    before, after = tensors(folder), tensors(tmp_path / "again")
    assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in before.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in after.items()
    }
    files = list((tmp_path / "again").glob("*.safetensors"))
    assert (len(files) == 1) == (shard == 10**9)
    for file in files:
        sizes = [x.nbytes for x in safetensors.numpy.load_file(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= shard
    # Other users can read the folder.
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o755
    if len(files) > 1:
        index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in before.values())
    once_more = huggingface.load(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, once_more, model)


def test_saving_again_gives_the_same_files(folder, tmp_path):
    huggingface.save(huggingface.load(folder), tmp_path / "again", like=folder)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_other_files_are_copied(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "license": "kept"}))
    huggingface.save(huggingface.load(folder), tmp_path / "again", like=folder)
    names = {p.name for p in (tmp_path / "again").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((tmp_path / "again/config.json").read_text())["license"] == "kept"


def test_weights_are_cast_converted_and_put(folder):
    model = huggingface.load(folder, dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    seen = []

    def convert(path, array):
        seen.append((path, array.shape))
        return {"half": array[..., ::2]} if path == "layers.mlp.up" else array

    def put(path, value):
        return jax.tree.map(np.negative, value)

    changed = huggingface.load(folder, convert=convert, put=put)
    up = model.layers.mlp.up.get_value()
    half = changed.layers.mlp.up.get_value()["half"]
    np.testing.assert_array_equal(np.float32(half), -np.asarray(up)[..., ::2])
    assert seen.count(("layers.mlp.up", up.shape[1:])) == tiny.CONFIG.num_layers


def test_no_second_copy_is_in_memory(tmp_path):
    """NumPy's memory holds one parameter at a time, and one layer of it."""
    import tracemalloc

    config = ModelConfig(64, 64, 512, num_layers=16, num_heads=2)
    model = jax.jit(functools.partial(Decoder, config))(jax.random.key(0))
    huggingface.save(model, tmp_path / "model", max_shard_bytes=400_000)
    whole = sum(x.nbytes for x in jax.tree.leaves(model))
    largest = model.layers.mlp.up.get_value().nbytes
    tracemalloc.start()
    try:
        # Nothing is kept: arrays of NumPy may share memory with those of JAX.
        huggingface.load(tmp_path / "model", put=lambda _, value: jax.tree.map(np.shape, value))
        _, loading = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        huggingface.save(model, tmp_path / "again", max_shard_bytes=400_000)
        _, saving = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loading < largest * (1 + 2 / 16) + 500_000 < whole / 2
    assert saving < 2 * 400_000 + 500_000 < whole / 2


def edited(folder, **changes):
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "unsupported `model_type` 'gpt2': supported are llama"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu': only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, "Use the checkpoint that is not quantized"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high"),
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"hidden_size": "24"}, r"`hidden_size` must be an integer in \[0, \d+\), got '24'"),
        ({"num_attention_heads": None}, "`num_attention_heads` must be an integer"),
        ({"head_dim": [4]}, r"`head_dim` must be an integer in .* got \[4\]"),
        ({"vocab_size": 10**30}, "`vocab_size` must be an integer in"),
        ({"model_type": ["llama"]}, r"unsupported `model_type` \['llama'\]"),
        ({"rope_scaling": 7}, "the parameters of RoPE must be a JSON object, got 7"),
        ({"rope_theta": -1.0}, "`rope_theta` must be above 0"),
        ({"initializer_range": 10**60}, "`initializer_range` must be a number"),
        ({"initializer_range": float("nan")}, "`initializer_range` must be a number, got nan"),
        ({"model_type": "mistral", "sliding_window": "a"}, "`sliding_window` must be an integer"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": 1},
         "`layer_types` must be a list, got 1"),
        ({"rope_theta": "x"}, r"config.json: `rope_theta` must be a number, got 'x'"),
        ({"rms_norm_eps": -1}, r"`norm_eps` must be in \[0, 1\), got -1"),
        ({"num_hidden_layers": 1}, r"no parameter for the tensor 'model.layers.1.\S+ \(and 17"),
        ({"num_hidden_layers": 4}, r"no tensor for `layers.attention_norm`: 'model.layers.3."),
        ({"intermediate_size": 8}, r"gate_proj.weight' has the shape \[\d+, \d+\], but"),
        ({"tie_word_embeddings": False, "model_type": "qwen3"}, "no tensor for"),
        ({"model_type": "mistral", "sliding_window": 4,
          "layer_types": ["full_attention", "sliding_attention"]}, "1 of 3 layers have"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(folder, changes, message):
    edited(folder, **changes)
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder)


def test_damaged_files_are_named(folder, tmp_path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 20, 4, 0):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read .* truncated"):
            huggingface.load(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        huggingface.load(folder)
    (folder / "pytorch_model.bin").write_bytes(whole)
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle, and reading a pickle can"):
        huggingface.load(folder)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        huggingface.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config.json in it"):
        huggingface.load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused(folder, value, dtype):
    given = {name: np.asarray(x, jnp.dtype(dtype)) for name, x in tensors(folder).items()}
    given["model.norm.weight"].flat[-1] = value
    safetensors.numpy.save_file(given, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.norm.weight' has infinities or NaN"):
        huggingface.load(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", r"config.json: expected a JSON object, got list"),
        (b'{"a', r"config.json: it is not JSON \(Unterminated"),
        (b"\xff", r"config.json: it is not JSON \('utf-8' codec"),
        (b"[" * 100_000, r"config.json: its JSON is nested too deeply"),
    ],
    ids=range(4),
)
def test_a_config_that_is_not_an_object_is_refused(folder, data, message):
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder)


def test_ends_of_texts_that_are_no_ids_are_refused(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match=r"generation_config.json: `eos_token_id` must be an id"):
        stop_ids(folder)


def test_an_index_that_does_not_fit_is_refused(folder, tmp_path):
    huggingface.save(huggingface.load(folder), tmp_path / "several", max_shard_bytes=5000)
    path = tmp_path / "several/model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    moved = next(name for name, file in index["weight_map"].items() if file == second)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], moved: first}}))
    with pytest.raises(ValueError, match=f"has no '{moved}'"):
        huggingface.load(tmp_path / "several")
    outside = {**index["weight_map"], moved: f"../several/{second}"}
    path.write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(ValueError, match=r"names '../several/\S+', which is not in this folder"):
        huggingface.load(tmp_path / "several")
    for files in (None, [first], {**index["weight_map"], moved: [first]}):
        path.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(ValueError, match=r"`weight_map` must be an object with a file by"):
            huggingface.load(tmp_path / "several")
    path.write_text(json.dumps(index))
    (tmp_path / "several" / second).unlink()
    with pytest.raises(FileNotFoundError, match=r"does not exist, but \S+ names it"):
        huggingface.load(tmp_path / "several")


def test_tied_embeddings_that_differ_are_refused(folder):
    given = tensors(folder)
    edited(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"ties lm_head.weight to the embeddings, but .* differ"):
        huggingface.load(folder)
    given["lm_head.weight"] = given["model.embed_tokens.weight"]
    safetensors.numpy.save_file(given, folder / "model.safetensors")
    assert huggingface.load(folder).output is None


def test_frequencies_in_old_files_are_ignored(folder):
    given = tensors(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    want = huggingface.load(folder)
    safetensors.numpy.save_file({**given, name: np.ones(4)}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(folder), want)


def test_existing_folders_are_not_overwritten(folder):
    model = huggingface.load(folder)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        huggingface.save(model, folder)
    assert not list(folder.parent.glob(".*"))
    model.layers.mlp.up.set_value({"no": "array"})
    with pytest.raises(TypeError, match=r"`layers.mlp.up` must be an array"):
        huggingface.save(model, folder.parent / "other")
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["llama3_1b", "qwen2_5_0_5b", "qwen3_0_6b", "llama_60m"])
def test_dimensions_are_read_back(name):
    config = preset(name)
    fields = huggingface.fields_of(config, "bfloat16")
    assert huggingface.config_of(json.loads(json.dumps(fields))) == config


def test_the_head_size_of_qwen3_is_128_by_default():
    # And not hidden_size / num_attention_heads, which is 64 here.
    config = preset("qwen3_0_6b")
    fields = huggingface.fields_of(config, "bfloat16")
    del fields["head_dim"]
    assert huggingface.config_of(fields).head_size == config.head_size == 128


def test_rope_of_old_and_new_files_is_read():
    config = preset("llama3_1b")
    fields = huggingface.fields_of(config, "bfloat16")
    rope = {**fields.pop("rope_scaling"), "rope_theta": fields.pop("rope_theta")}
    assert huggingface.config_of({**fields, "rope_parameters": rope}) == config


def test_scaled_frequencies_follow_the_formula():
    scaling = RopeScaling(8.0, 1.0, 4.0, 16)
    config = ModelConfig(8, 16, 16, 1, 1, rope_theta=500.0, rope_scaling=scaling)
    cos, _ = jax.jit(functools.partial(rope_tables, config, 3))()
    # Wavelengths 2 pi 500^(2i/16): shorter than 16 / 4, longer than 16 / 1, and in between.
    wave = 2 * math.pi * 500 ** (np.arange(8) / 8)
    smooth = (16 / wave - 1) / 3
    factor = np.where(wave < 4, 1, np.where(wave > 16, 1 / 8, (1 - smooth) / 8 + smooth))
    np.testing.assert_allclose(
        np.asarray(cos)[2], np.cos(2 * 2 * math.pi / wave * factor), rtol=1e-5, atol=1e-6
    )
