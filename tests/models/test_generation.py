"""Tests of models/generation.py and models/cache.py: cached decoding equals the forward pass."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tiny

import actjax
from actjax._core.paths import map_named
from models import Decoder, ModelConfig, RopeScaling, generation, huggingface, sampling
from models.cache import extend, prefill
from models.generation import generate
from models.likelihoods import log_likelihoods
from models.padding import pad, published_shape
from models.prompts import rounded_length
from models.rope import rope_tables

NEW = 12
# The positions of the longest prompt and its continuation.
CONFIG = dataclasses.replace(tiny.CONFIG, max_seq_len=9 + NEW)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    # Features of Qwen 2.5, Qwen 3 and Llama 3.
    "qwen": {
        "attention_bias": True,
        "qk_norm": True,
        "head_size": 8,
        "num_kv_heads": 1,
        "tie_embeddings": True,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32),
    },
}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [9]]


def decoder(config: ModelConfig) -> Decoder:
    """Random weights, larger than initial weights, so that attention is far from uniform."""
    rng = np.random.default_rng(0)

    def drawn(path: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        shape = published_shape(path, x.shape, config)
        array = float("norm" in path) + 0.2 * rng.standard_normal(shape, np.float32)
        return jax.device_put(pad(path, array, config))

    shapes = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    return map_named(drawn, shapes)


@functools.cache
def model_of(family: str = "llama") -> Decoder:
    return decoder(dataclasses.replace(CONFIG, **FAMILIES[family]))


@functools.cache
def forward():
    """The ordinary forward pass of one sequence, [S] to [S, V]."""
    return jax.jit(lambda model, ids: model(ids[None], compute_dtype="float32")[0])


def all_logits(model: Decoder, ids: Sequence[int]) -> np.ndarray:
    """The logits after each token. The padding of the row has no effect on them."""
    row = np.array([*ids, *[0] * (CONFIG.max_seq_len - len(ids))])
    return np.asarray(forward()(model, row))[: len(ids)]


def slowly(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy ids, with a whole forward pass for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(all_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def greedy(model: Decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "compute_dtype": "float32"} | options
    return generate(model, prompts, **options)


def test_logits_from_the_cache_equal_those_of_the_forward_pass():
    config = dataclasses.replace(CONFIG, **FAMILIES["mistral"], **FAMILIES["qwen"])
    model = decoder(config)
    tokens = np.asarray(tiny.batch(length=20)[0])
    lengths, rows = np.array([3, 9], np.int32), np.arange(2)
    whole = np.stack([all_logits(model, row.tolist()) for row in tokens])
    tables = jax.jit(functools.partial(rope_tables, config, 20))()
    # The padding of a prompt must have no effect: it is another token.
    padded = np.int32(np.where(np.arange(9) < lengths[:, None], tokens[:, :9], 60))
    logits, cache = jax.jit(prefill, static_argnums=(3, 4))(model, padded, lengths, 20, "float32")
    step_on = jax.jit(extend)
    for step in range(9):
        # Logits of about one. Sums of up to 44 terms in another order, a hundred roundings of 6e-8.
        np.testing.assert_allclose(logits, whole[rows, lengths + step - 1], atol=1e-5, rtol=1e-5)
        at = lengths + step
        before = cache
        logits, cache = step_on(model, tokens[rows, at], at, cache, tables)

    half = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), before)
    rounded, half = step_on(model, tokens[rows, at], at, half, tables)
    assert half.k.dtype == half.v.dtype == jnp.bfloat16
    assert rounded.dtype == jnp.float32
    # Three layers make some thirty roundings of 2e-3, which is 1e-2 together; the largest of a
    # hundred errors is five times that.
    np.testing.assert_allclose(rounded, logits, atol=5e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_writes_the_same_as_a_forward_pass_for_each_token(family):
    model = model_of(family)
    assert greedy(model) == [slowly(model, prompt, NEW) for prompt in PROMPTS]


def test_each_text_ends_before_its_stop():
    model, texts = model_of(), greedy(model_of())
    stop = {texts[1][3], texts[2][1]}
    ends = [next((i for i, x in enumerate(row) if x in stop), NEW) for row in texts]
    assert sorted(ends) == [1, 3, 9]
    want = [row[:end] for row, end in zip(texts, ends, strict=True)]
    assert greedy(model, stop=stop) == want
    assert greedy(model, stop={row[0] for row in texts}) == [[], [], []]


def test_nothing_is_computed_after_all_have_stopped(monkeypatch):
    model, texts, steps = model_of(), greedy(model_of()), []

    def counted(*args):
        jax.debug.callback(lambda: steps.append(1))
        return extend(*args)

    monkeypatch.setattr(generation, "extend", counted)
    # No other test has a program for two prompts, so this one is traced.
    got = greedy(model, [PROMPTS[0], PROMPTS[2]], stop={texts[0][3], texts[2][5]})
    jax.effects_barrier()
    # The prefill writes the first token. The step that finds the last stop is the last.
    assert len(steps) == max(map(len, got)) < NEW - 1


def test_lengths_share_programs():
    model = model_of()
    greedy(model)
    before = generation._generate._cache_size()
    for length, count in ((7, 12), (9, 10), (13, 8)):
        greedy(model, [[1] * length] * 3, max_new_tokens=count, stop=(count,))
    assert generation._generate._cache_size() == before
    sizes = sorted({rounded_length(n) for n in range(1, 10_000)})
    assert len(sizes) <= 20
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(sizes))
    assert all(rounded_length(n) >= n for n in range(1, 10_000))


# ----- sampling


def draw(**options) -> list[list[int]]:
    options = {"temperature": 1.0, "key": jax.random.key(0)} | options
    return greedy(model_of(), **options)


def test_the_same_key_draws_the_same_and_another_does_not():
    """With a key for each prompt the texts are independent."""
    folded = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(3))
    together = draw()
    assert together == draw(key=folded)
    assert draw(prompts=PROMPTS[1:2], key=folded[1:2]) == together[1:2]
    assert together not in (draw(key=jax.random.key(1)), greedy(model_of()))


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}])
def test_drawing_from_one_token_is_greedy(options):
    assert draw(**options) == greedy(model_of())


def assert_drawn(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Raises unless tokens were drawn with the given probabilities (chi-square test)."""
    want, counts = len(tokens) * probabilities, np.bincount(tokens, minlength=len(probabilities))
    assert not counts[want == 0].any()
    # Rare tokens are counted together: the statistic needs at least about five of each.
    often = want >= 5
    assert often.sum() >= 3
    want, counts = (np.array([*x[often], x[~often].sum()]) for x in (want, counts))
    present = want > 0
    # One fair draw in ten thousand has a larger statistic; this seed does not.
    assert scipy.stats.chisquare(counts[present], want[present]).pvalue > 1e-4


softmax = functools.partial(scipy.special.softmax, axis=-1)


def test_first_tokens_are_drawn_with_their_probabilities():
    prompt, temperature = [4, 2], 0.8
    drawn = draw(prompts=[prompt] * 400, max_new_tokens=1, temperature=temperature)
    probabilities = softmax(np.float64(all_logits(model_of(), prompt)[-1]) / temperature)
    assert_drawn(np.ravel(drawn), probabilities)


@functools.cache
def thousand_keys():
    return jax.jit(lambda: jax.random.split(jax.random.key(0), 1000))()


@functools.cache
def draw_limited():
    return jax.jit(functools.partial(sampling.draw, limited=True))


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.6), (7, 1.0), (20, 0.8), (0, 1.0), (3, 0.99), (61, 0.4)]
)
def test_tokens_are_drawn_from_the_likeliest(top_k, top_p):
    logits, temperature = all_logits(model_of(), [4, 2])[-1], 0.8
    probabilities = softmax(np.float64(logits) / temperature)
    order = np.argsort(-probabilities)[: top_k or None]
    likeliest, mass = np.zeros_like(probabilities), 0.0
    for token in order:
        # Tokens are kept until those before have the mass, relative to what `top_k` leaves.
        if mass < top_p * probabilities[order].sum():
            likeliest[token] = probabilities[token]
        mass += probabilities[token]
    settings = np.float32(temperature), np.float32(top_p), np.int32(top_k)
    keys = thousand_keys()
    drawn = draw_limited()(np.tile(logits, (1000, 1)), keys, settings)
    assert_drawn(np.asarray(drawn), likeliest / likeliest.sum())


def test_top_k_keeps_exactly_k_of_equal_logits():
    logits = np.zeros((1000, 61), np.float32)
    logits[:, 3] = -1
    drawn = draw_limited()(logits, thousand_keys(), (np.float32(1), np.float32(1), np.int32(4)))
    assert set(drawn.tolist()) == {0, 1, 2, 4}


# ----- likelihoods


def test_likelihoods_are_sums_of_log_softmax():
    model = model_of()
    continuations = [[2, 7, 1, 8], [2], [8, 1, 8, 2, 8, 4, 5, 9]]
    want = []
    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        logits = all_logits(model, [*prompt, *continuation])[len(prompt) - 1 : -1]
        logs = np.log(softmax(np.float64(logits)))
        want.append(sum(logs[range(len(continuation)), continuation]))
    got = log_likelihoods(model, PROMPTS, continuations, compute_dtype="float32")
    # Sums of up to eight numbers of about four, each with a few roundings of 6e-8.
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_continuation_may_fill_all_positions():
    model, longest = model_of(), CONFIG.max_seq_len
    assert np.isfinite(log_likelihoods(model, [[1]], [[2] * longest])).all()


# ----- wrapped weights, and dtypes


def with_adapters() -> tuple[Decoder, Decoder]:
    """A decoder of weights of all kinds, and an equivalent one of plain arrays."""
    mixed, plain = decoder(CONFIG), decoder(CONFIG)
    rng = np.random.default_rng(1)
    for owner, name in (("attention", "q"), ("attention", "v"), ("mlp", "gate")):
        adapted, merged = (getattr(getattr(m.layers, owner), name) for m in (mixed, plain))
        weight = np.asarray(merged.get_value())
        count, d, n = weight.shape
        a, b = (rng.normal(0, 0.2, s).astype(np.float32) for s in ((count, d, 3), (count, 3, n)))
        dropout = jax.random.split(jax.random.key(0), count)
        adapted.set_value(actjax.LoRA(weight, a, b, dropout, 2.0, 0.5))
        merged.set_value(jax.device_put(weight + 2 * a @ b))
    quantized = jax.jit(jax.vmap(actjax.NF4Weight.quantize))(mixed.layers.mlp.up.get_value())
    mixed.layers.mlp.up.set_value(quantized)
    decoded = jax.jit(jax.vmap(lambda w: w.astype("float32")))(quantized)
    plain.layers.mlp.up.set_value(decoded)
    for weight in (mixed.layers.attention.o, mixed.embedding, mixed.output):
        weight.set_value(actjax.FrozenWeight(weight.get_value()))
    return mixed, plain


def test_adapters_and_quantized_weights_write_the_same_as_plain_arrays():
    mixed, plain = with_adapters()
    assert greedy(mixed) == greedy(plain)
    assert greedy(plain) != greedy(model_of())
    got, want = (
        log_likelihoods(model, PROMPTS, [[1] * 8] * 3, compute_dtype="float32")
        for model in (mixed, plain)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    # Generation does not change the dropout of the model that it is given.
    assert mixed.layers.attention.q.get_value().dropout == 0.5


def test_the_cache_has_the_compute_dtype():
    prefilled = functools.partial(prefill, slots=9, compute_dtype="bfloat16")
    tokens, lengths = np.zeros((2, 8), np.int32), np.array([8, 3], np.int32)
    logits, cache = jax.eval_shape(prefilled, model_of(), tokens, lengths)
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
    assert cache.k.shape == (3, 2, 9, 2, 4)
    assert (logits.shape, logits.dtype) == ((2, 61), jnp.float32)


# ----- another implementation


def test_texts_equal_those_of_transformers(tmp_path):
    reason = "needs transformers and torch: pip install -e '.[reference]'"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    model = model_of()
    huggingface.save(model, tmp_path / "llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").float().eval()
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert greedy(model) == out[:, longest:].tolist()


def test_no_prompts_give_no_texts():
    assert greedy(model_of(), []) == []
    assert log_likelihoods(model_of(), [], []).shape == (0,)
