"""Messages of the errors of `models`: dimensions, storage, checkpoints, adapters and generation."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny
from messages import assert_messages

from actjax import PointApproximation, Quantized
from models import CompressedResiduals, Decoder, ModelConfig, Remat, Storage, huggingface, preset
from models.checkpoints import stop_ids
from models.folders import atomic_folder
from models.generation import generate
from models.likelihoods import log_likelihoods
from models.lora import LoRAConfig, init_adapters
from models.peft import load_adapters, save_adapters

LORA = LoRAConfig(rank=3, alpha=5.0)


def calls(function, rows, *arguments):
    """Pairs of a call with the keywords of a row, and the message of the row."""
    return [(functools.partial(function, *arguments, **row), text) for row, text in rows]


def test_settings():
    good = {"vocab_size": 8, "hidden_size": 8, "ffn_size": 8, "num_layers": 1, "num_heads": 2}
    dimensions = [
        ({"num_layers": 0}, "`num_layers` must be an integer >= 1, got 0"),
        ({"num_heads": 0}, "must be an integer >= 1"),
        ({"ffn_size": 2.5}, "`ffn_size` must be an integer"),
        ({"num_heads": 4, "num_kv_heads": 3}, "`num_heads` 4 must be a multiple of"),
        ({"num_heads": 3}, "`hidden_size` 8 is not a multiple of `num_heads` 3: pass `head_size`"),
        ({"head_size": 3}, "`head_size` must be even for RoPE, got 3"),
    ]
    adapters = [
        ({"rank": 0}, "`rank` of the adapters must be at least 1, got 0"),
        ({"alpha": 0.0}, "`alpha` of the adapters must be in (0, inf), got 0"),
        ({"alpha": math.inf}, "`alpha` of the adapters must be in (0, inf), got inf"),
        ({"dropout": 1.0}, "`dropout` of the adapters must be in [0, 1)"),
        ({"targets": ()}, "is empty: name at least one"),
        ({"targets": ("q", "q")}, "has duplicates"),
        ({"targets": ("gat",)}, "adapter target 'gat' in `targets`. Did you mean 'gate'"),
        ({"targets": ("embed",)}, "Targets are: q, k, v, o, gate, up, down"),
    ]
    half = {"policy": "dots", "codec": Quantized(4)}
    assert_messages(
        ValueError,
        calls(ModelConfig, [(good | row, text) for row, text in dimensions])
        + calls(LoRAConfig, adapters)
        + calls(Remat, [({"policy": "half"}, ", got 'half'"), (half, "needs policy='full', got")])
        + [
            (lambda: preset("llama_60"), "unknown `--model` 'llama_60'. Did you mean llama_60m"),
            (lambda: preset("xyz"), "'xyz'. There are: llama_3m"),
        ],
    )


def test_storage():
    none = "must be an actjax.Codec, got None"
    former = [
        ({"remat": True}, "no keyword `remat`: use Remat(policy=...)"),
        ({"block": True}, "no keyword `block`: use Remat(codec=...)"),
        ({"residuals": True}, "no keyword `residuals`: use CompressedResiduals"),
        ({"compensate": True}, "no keyword `compensate`: use Storage(split_adapters=...)"),
    ]
    assert_messages(
        TypeError,
        [
            (lambda: Storage(gate=None), f"`Storage.gate` {none}"),
            (lambda: Remat(codec=None), f"`Remat.codec` {none}"),
            (
                lambda: CompressedResiduals(attention_out=None),
                f"`CompressedResiduals.attention_out` {none}",
            ),
            *calls(Storage, former),
        ],
    )
    tokens, random = np.zeros((1, 4), np.int32), Storage(mlp_in=PointApproximation(points=3))
    call = functools.partial(tiny.decoder().loss, tokens, tokens, storage=random)
    assert_messages(ValueError, [(call, "`Storage.mlp_in` is PointApproximation(points=3)")])


FIELDS = huggingface.fields_of(tiny.CONFIG, "bfloat16")
SLIDING = {"model_type": "mistral", "sliding_window": 4}


def test_dimensions_of_checkpoints():
    rows = [
        ({"model_type": "gpt2"}, "unsupported `model_type` 'gpt2': supported are llama"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu': only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, "Use the checkpoint that is not quantized"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high"),
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"hidden_size": "24"}, "`hidden_size` must be an integer in [0, "),
        ({"num_attention_heads": None}, "`num_attention_heads` must be an integer"),
        ({"head_dim": [4]}, "got [4]"),
        ({"vocab_size": 10**30}, "`vocab_size` must be an integer in"),
        ({"model_type": ["llama"]}, "unsupported `model_type` ['llama']"),
        ({"rope_scaling": 7}, "the parameters of RoPE must be a JSON object, got 7"),
        ({"rope_theta": -1.0}, "`rope_theta` must be above 0"),
        ({"rope_theta": "x"}, "`rope_theta` must be a number, got 'x'"),
        ({"initializer_range": 10**60}, "`initializer_range` must be a number"),
        ({"initializer_range": float("nan")}, "`initializer_range` must be a number, got nan"),
        ({**SLIDING, "sliding_window": "a"}, "`sliding_window` must be an integer"),
        ({**SLIDING, "layer_types": 1}, "`layer_types` must be a list, got 1"),
        ({**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}, "1 of 3 layers have"),
        ({"rms_norm_eps": -1}, "`norm_eps` must be in [0, 1), got -1"),
    ]

    def read(changes):
        huggingface.config_of({k: v for k, v in (FIELDS | changes).items() if v is not ...})

    assert_messages(
        ValueError, [(functools.partial(read, changes), text) for changes, text in rows]
    )


@pytest.fixture
def folder(tmp_path):
    """A folder with a small model in bfloat16."""
    huggingface.save(tiny.decoder(dtype="bfloat16"), tmp_path / "model")
    return tmp_path / "model"


def written(path, content, read):
    """Returns a call that writes a file and reads its folder."""

    def call():
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read(path.parent)

    return call


def test_checkpoints_that_do_not_fit(folder, tmp_path):
    load, config, file = huggingface.load, folder / "config.json", folder / "model.safetensors"
    whole, tensors = file.read_bytes(), safetensors.numpy.load_file(file)
    rows = [
        ({"rope_theta": "x"}, "config.json: `rope_theta` must be a number, got 'x'"),
        ({"num_hidden_layers": 1}, "no parameter for the tensor 'model.layers.1."),
        ({"num_hidden_layers": 4}, "no tensor for `layers.attention_norm`: 'model.layers.3."),
        ({"intermediate_size": 8}, "gate_proj.weight' has the shape ["),
        ({"tie_word_embeddings": False, "model_type": "qwen3"}, "no tensor for"),
        ({"tie_word_embeddings": True}, "ties lm_head.weight to the embeddings, but "),
    ]
    texts = [
        (b"[]", "config.json: expected a JSON object, got list"),
        (b'{"a', "config.json: it is not JSON (Unterminated"),
        (b"\xff", "config.json: it is not JSON ('utf-8' codec"),
        (b"[" * 100_000, "config.json: its JSON is nested too deeply"),
    ]
    assert_messages(
        ValueError,
        [(written(config, FIELDS | changes, load), text) for changes, text in rows]
        + [(written(config, content, load), text) for content, text in texts]
        + [
            (
                written(folder / "generation_config.json", {"eos_token_id": ["</s>"]}, stop_ids),
                "generation_config.json: `eos_token_id` must be an id",
            )
        ],
    )
    config.write_text(json.dumps(FIELDS))

    def holding(value, dtype):
        changed = {name: np.asarray(x, np.dtype(dtype)) for name, x in tensors.items()}
        changed["model.norm.weight"].flat[-1] = value
        safetensors.numpy.save_file(changed, file)
        huggingface.load(folder)

    bfloat16 = tensors["model.norm.weight"].dtype
    assert_messages(
        ValueError,
        [
            (functools.partial(holding, value, dtype), "'model.norm.weight' has infinities or NaN")
            for value in (np.nan, -np.inf)
            for dtype in ("float32", bfloat16, "float16")
        ]
        + [
            (written(file, whole[:length], load), "model.safetensors cannot be read")
            for length in (len(whole) - 1, len(whole) // 2, 20, 4, 0)
        ],
    )
    file.unlink()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert_messages(
        FileNotFoundError,
        [
            (lambda: load(folder), "holds neither model.safetensors nor"),
            (lambda: load(tmp_path / "nowhere"), "no such folder"),
            (lambda: load(tmp_path), "no config.json in it"),
            (lambda: load(tmp_path / "run"), "a run of `train.pretrain` is not exported"),
        ],
    )
    pickle = written(folder / "pytorch_model.bin", whole, load)
    assert_messages(ValueError, [(pickle, "pytorch_model.bin, a pickle, and reading a pickle can")])


def test_an_index_that_does_not_fit(tmp_path):
    folder = tmp_path / "several"
    huggingface.save(tiny.decoder(), folder, max_shard_bytes=5000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    first, second = sorted(set(index.values()))[:2]
    moved = next(name for name, file in index.items() if file == second)
    rows = [
        (index | {moved: first}, f"has no '{moved}'"),
        (index | {moved: f"../several/{second}"}, f"names '../several/{second}', which is not in"),
        (None, "`weight_map` must be an object with a file by"),
        ([first], "`weight_map` must be an object with a file by"),
        (index | {moved: [first]}, "`weight_map` must be an object with a file by"),
    ]
    load = huggingface.load
    assert_messages(
        ValueError, [(written(path, {"weight_map": files}, load), text) for files, text in rows]
    )
    (folder / second).unlink()
    missing = written(path, {"weight_map": index}, load)
    assert_messages(FileNotFoundError, [(missing, "does not exist, but ")])


def test_folders_that_are_not_empty(folder, tmp_path):
    model = tiny.decoder()

    def fill():
        with atomic_folder(folder):
            pass

    assert_messages(
        FileExistsError,
        [
            (fill, "is not empty: name another folder"),
            (lambda: huggingface.save(model, folder), "exists and is not empty"),
        ],
    )
    model.layers.mlp.up.set_value({"no": "array"})
    call = functools.partial(huggingface.save, model, tmp_path / "other")
    assert_messages(TypeError, [(call, "`layers.mlp.up` must be an array")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_adapters_that_do_not_fit(tmp_path):
    shapes = jax.eval_shape(lambda: init_adapters(tiny.CONFIG, LORA, jax.random.key(0)))
    folder = tmp_path / "adapter"
    save_adapters(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes), LORA, folder)
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    fields, whole = json.loads(config.read_text()), file.read_bytes()
    tensors = safetensors.numpy.load_file(file)
    load = functools.partial(load_adapters, config=tiny.CONFIG)
    rows = [
        ({"peft_type": "LOHA"}, "`peft_type` is 'LOHA': only 'LORA' is supported"),
        ({"use_dora": True}, "`use_dora` is True"),
        ({"bias": "all"}, "`bias` is 'all'"),
        ({"r": "3"}, "`r` must be a number, got '3'"),
        ({"r": 2.5}, "`r` must be an integer, got 2.5"),
        ({"lora_alpha": [16]}, "`lora_alpha` must be a number, got [16]"),
        ({"lora_alpha": 10**400}, "`lora_alpha` must be a number"),
        ({"lora_dropout": None}, "`lora_dropout` must be a number, got None"),
        ({"target_modules": ["q_proj", 1]}, "`target_modules` must be a list of names"),
        ({"r": 4}, "shape [3, 24], but the model and the rank require [4, 24]"),
        ({"target_modules": "all-linear"}, "`target_modules` must be a list of names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "unknown adapter target 'lm_head'"),
        ({"target_modules": ["q_proj"]}, "no adapter for the tensor"),
    ]
    assert_messages(
        ValueError, [(written(config, fields | changes, load), text) for changes, text in rows]
    )
    config.write_text(json.dumps(fields))
    first = min(tensors)
    damaged = [tensors | {first: np.full_like(tensors[first], value)} for value in (np.nan, np.inf)]
    removed = {name: x for name, x in tensors.items() if name != first}
    finite = "must hold finite floating point numbers"
    assert_messages(
        ValueError,
        [(written(file, whole[:-1], load), "truncated or damaged")]
        + [(written(file, safetensors.numpy.save(x), load), finite) for x in damaged]
        + [(written(file, safetensors.numpy.save(removed), load), "' is missing")],
    )
    file.unlink()
    missing = functools.partial(load, folder)
    assert_messages(FileNotFoundError, [(missing, "no adapter_model.safetensors in it")])


def test_generation():
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=21)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    two_keys = {"temperature": 1.0, "key": jax.random.split(jax.random.key(0), 2)}
    rows = [
        ([[1], []], {}, "`prompts[1]` is empty: give at least one token"),
        ([[1, 61]], {}, "`prompts[0]` has the id 61, but the vocabulary"),
        ([[-1, 2]], {}, "`prompts[0]` has the id -1"),
        ([[1]], {"stop": [99]}, "`stop` has the id 99"),
        ([[1]], {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ([[1] * 30], {}, "`prompts[0]` has 30 tokens, and with"),
        ([[1]], {"temperature": -1}, "`temperature` must be at least 0"),
        ([[1]], {"temperature": float("nan")}, "`temperature` must be at least 0 and finite"),
        ([[1]], {"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ([[1]], {"top_p": 1.5}, "`top_p` must be above 0 and at most 1, got 1.5"),
        ([[1]], {"top_k": -1}, "`top_k` must be at least 0"),
        ([[1]], {"temperature": 1.0}, "draws random numbers, but got key=None: pass `key`"),
        ([[1]], two_keys, "one for each of the 1 `prompts`, got keys of shape (2,)"),
    ]
    continuations = [
        ([[1]], [[1], [2]], "`continuations` has 2 entries and `prompts` 1"),
        ([[1]], [[]], "`continuations[0]` is empty"),
        ([[1, 1]], [[2] * 21], "`prompts[0]` has 2 tokens"),
    ]
    assert_messages(
        ValueError,
        [
            (functools.partial(generate, model, prompts, **{"max_new_tokens": 12, **options}), text)
            for prompts, options, text in rows
        ]
        + [
            (functools.partial(log_likelihoods, model, prompts, texts), message)
            for prompts, texts, message in continuations
        ],
    )
