"""Tests of models/generation.py: cached decoding is the forward pass, and sampling is fair."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny

import actjax
from models import Decoder, ModelConfig, RopeScaling, generation, huggingface
from models.decoder import rope_tables
from models.generation import extend, generate, log_likelihoods, prefill

pytestmark = pytest.mark.usefixtures("quick_compile")

NEW = 12
# As many positions as the longest prompt and what follows it take.
CONFIG = dataclasses.replace(tiny.CONFIG, max_seq_len=9 + NEW)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    # What Qwen 2.5 and 3 have, and Llama 3.
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
    """Random weights of NumPy: JAX would compile a program for each of their shapes.

    Larger than initial ones, so that attention is not nearly uniform.
    """
    rng = np.random.default_rng(0)

    def drawn(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        middle = float("norm" in jax.tree_util.keystr(path))
        return jnp.asarray(middle + 0.2 * rng.standard_normal(x.shape, np.float32))

    shapes = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(drawn, shapes)


@functools.cache
def model_of(family: str = "llama") -> Decoder:
    return decoder(dataclasses.replace(CONFIG, **FAMILIES[family]))


@functools.cache
def forward():
    """The ordinary forward pass of one sequence, [S] to [S, V]."""
    return jax.jit(lambda model, ids: model(ids[None], compute_dtype="float32")[0])


def all_logits(model: Decoder, ids: Sequence[int]) -> np.ndarray:
    """Those after each of some tokens. What fills the row up is not seen."""
    row = jnp.array([*ids, *[0] * (CONFIG.max_seq_len - len(ids))])
    return np.asarray(forward()(model, row))[: len(ids)]


def slowly(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy ids by a whole forward pass for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(all_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def greedy(model: Decoder, prompts=PROMPTS, **options) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "compute_dtype": "float32"} | options
    return generate(model, prompts, **options)


def test_logits_from_the_cache_are_those_of_the_forward_pass():
    config = dataclasses.replace(CONFIG, **FAMILIES["mistral"], **FAMILIES["qwen"])
    model = decoder(config)
    tokens = np.asarray(tiny.batch(length=20)[0])
    lengths, rows = np.array([3, 9]), np.arange(2)
    whole = np.stack([all_logits(model, row.tolist()) for row in tokens])
    tables = rope_tables(config, 20)
    # What a prompt is filled up with is another text, and must not be seen.
    padded = jnp.array(np.where(np.arange(9) < lengths[:, None], tokens[:, :9], 60))
    logits, cache = jax.jit(prefill, static_argnums=(3, 4))(
        model, padded, jnp.array(lengths), 20, "float32"
    )
    step_on = jax.jit(extend)
    for step in range(9):
        # Logits of about one. Sums of up to 44 terms in another order, a hundred roundings of 6e-8.
        np.testing.assert_allclose(logits, whole[rows, lengths + step - 1], atol=1e-5, rtol=1e-5)
        at = lengths + step
        before = cache
        logits, cache = step_on(model, jnp.array(tokens[rows, at]), jnp.array(at), cache, tables)

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), before)
    rounded, half = step_on(model, jnp.array(tokens[rows, at]), jnp.array(at), half, tables)
    assert half.k.dtype == half.v.dtype == jnp.bfloat16
    assert rounded.dtype == jnp.float32
    # In three layers some thirty roundings of 2e-3, so 1e-2, and the largest of a hundred is five
    # times that.
    np.testing.assert_allclose(rounded, logits, atol=5e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_writes_what_a_forward_pass_a_token_does(family):
    model = model_of(family)
    assert greedy(model) == [slowly(model, prompt, NEW) for prompt in PROMPTS]


def test_a_batch_writes_what_each_prompt_alone_does():
    model = model_of()
    assert greedy(model) == [greedy(model, [prompt])[0] for prompt in PROMPTS]


def test_each_text_ends_before_its_own_stop():
    model, whole = model_of(), greedy(model_of())
    stop = {whole[1][3], whole[2][1]}
    ends = [next((i for i, x in enumerate(row) if x in stop), NEW) for row in whole]
    assert sorted(ends) == [1, 3, 9]
    want = [row[:end] for row, end in zip(whole, ends, strict=True)]
    assert greedy(model, stop=stop) == want
    assert greedy(model, stop={row[0] for row in whole}) == [[], [], []]


def test_nothing_is_computed_after_all_have_stopped(monkeypatch):
    model, whole, steps = model_of(), greedy(model_of()), []

    def counted(*args):
        jax.debug.callback(lambda: steps.append(1))
        return extend(*args)

    monkeypatch.setattr(generation, "extend", counted)
    # Two prompts, of which no other test has a program.
    got = greedy(model, [PROMPTS[0], PROMPTS[2]], stop={whole[0][3], whole[2][5]})
    jax.effects_barrier()
    # The first token is the prompts', and the step that finds the last stop is the last.
    assert len(steps) == max(map(len, got)) < NEW - 1


def test_lengths_share_programs():
    model = model_of()
    greedy(model)
    before = generation._generate._cache_size()
    for length, count in ((7, 12), (9, 10), (13, 8)):
        greedy(model, [[1] * length] * 3, max_new_tokens=count, stop=(count,))
    assert generation._generate._cache_size() == before
    sizes = sorted({generation._rounded(n) for n in range(1, 10_000)})
    assert len(sizes) <= 20
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(sizes))
    assert all(generation._rounded(n) >= n for n in range(1, 10_000))


# ----- sampling


def draw(**options) -> list[list[int]]:
    options = {"temperature": 1.0, "key": jax.random.key(0)} | options
    return greedy(model_of(), **options)


def test_the_same_key_draws_the_same_and_another_does_not():
    assert draw() == draw()
    assert draw() != draw(key=jax.random.key(1))
    assert draw() != greedy(model_of())


def test_with_a_key_for_each_prompt_none_depends_on_the_others():
    folded = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(3))
    together = draw(key=folded)
    assert together == draw()
    assert draw(prompts=PROMPTS[1:2], key=folded[1:2]) == together[1:2]


def test_one_token_to_draw_from_is_the_greedy_one():
    want = greedy(model_of())
    assert draw(top_k=1) == want
    assert draw(top_p=1e-6) == want
    assert draw(temperature=1e-6) == want


def kept(probabilities: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """What is drawn from, token by token from the likeliest on."""
    order = np.argsort(-probabilities)[: top_k or None]
    within, mass = np.zeros_like(probabilities), 0.0
    for token in order:
        if mass < top_p * probabilities[order].sum():
            within[token] = probabilities[token]
        mass += probabilities[token]
    return within / within.sum()


def assert_drawn(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Raises unless as many tokens of each kind were drawn as there should be (chi-square)."""
    want = len(tokens) * probabilities
    got = np.bincount(tokens, minlength=len(want))
    assert not got[want == 0].any()
    # Rare ones are counted together: the statistic is not theirs below some five.
    often = want >= 5
    assert often.sum() >= 3
    want, got = (np.array([*x[often], x[~often].sum()]) for x in (want, got))
    present = want > 0
    statistic = np.sum((got - want)[present] ** 2 / want[present])
    # One fair draw in ten thousand is further off; the seed is one of the others.
    assert statistic < scipy.stats.chi2.ppf(1 - 1e-4, present.sum() - 1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.float64(logits) - logits.max())
    return weights / weights.sum()


def test_first_tokens_are_drawn_with_their_probabilities():
    prompt, temperature = [4, 2], 0.8
    drawn = draw(prompts=[prompt] * 400, max_new_tokens=1, temperature=temperature)
    probabilities = softmax(all_logits(model_of(), prompt)[-1] / temperature)
    assert_drawn(np.ravel(drawn), probabilities)


@functools.cache
def draw_limited():
    return jax.jit(functools.partial(generation._draw, limited=True))


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.6), (7, 1.0), (20, 0.8), (0, 1.0), (3, 0.99), (61, 0.4)]
)
def test_of_the_likeliest_tokens_they_are_kept(top_k, top_p):
    logits, temperature = all_logits(model_of(), [4, 2])[-1], 0.8
    probabilities = softmax(logits / temperature)
    order = np.argsort(-probabilities)[: top_k or None]
    kept, mass = np.zeros_like(probabilities), 0.0
    for token in order:
        # Until those before have the mass; of what `top_k` leaves.
        if mass < top_p * probabilities[order].sum():
            kept[token] = probabilities[token]
        mass += probabilities[token]
    sampling = jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k)
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = draw_limited()(jnp.tile(logits, (1000, 1)), keys, sampling)
    assert_drawn(np.asarray(drawn), kept / kept.sum())


def test_of_equal_logits_no_more_than_asked_for_are_drawn_from():
    logits = jnp.zeros((1000, 61)).at[:, 3].set(-1.0)
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = draw_limited()(logits, keys, (jnp.float32(1), jnp.float32(1), jnp.int32(4)))
    assert set(drawn.tolist()) == {0, 1, 2, 4}


# ----- likelihoods


def test_likelihoods_are_sums_of_log_softmax():
    model = model_of()
    continuations = [[2, 7, 1, 8], [2], [8, 1, 8, 2, 8, 4, 5, 9]]
    want = []
    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        logits = all_logits(model, [*prompt, *continuation])[len(prompt) - 1 : -1]
        logs = np.asarray(jax.nn.log_softmax(logits))
        want.append(sum(logs[range(len(continuation)), continuation]))
    got = log_likelihoods(model, PROMPTS, continuations, compute_dtype="float32")
    # Sums of up to eight numbers of about four, each a few roundings of 6e-8 off.
    np.testing.assert_allclose(got, want, rtol=1e-5)
    alone = [
        log_likelihoods(model, [p], [c], compute_dtype="float32")[0]
        for p, c in zip(PROMPTS, continuations, strict=True)
    ]
    np.testing.assert_allclose(got, alone, rtol=1e-5)


def test_a_continuation_may_fill_all_positions():
    model, longest = model_of(), CONFIG.max_seq_len
    got = log_likelihoods(model, [[1]], [[2] * longest])
    assert np.isfinite(got).all()
    with pytest.raises(ValueError, match=r"`prompts\[0\]` has 2 tokens .*more than the 21 pos"):
        log_likelihoods(model, [[1, 1]], [[2] * longest])


# ----- weights that are more than arrays, and dtypes


def with_adapters() -> tuple[Decoder, Decoder]:
    """A decoder of weights of all kinds, and one of plain arrays that computes the same."""
    mixed, plain = decoder(CONFIG), decoder(CONFIG)
    rng = np.random.default_rng(1)
    for owner, name in (("attention", "q"), ("attention", "v"), ("mlp", "gate")):
        adapted, merged = (getattr(getattr(m.layers, owner), name) for m in (mixed, plain))
        weight = np.asarray(merged.get_value())
        count, d, n = weight.shape
        a, b = (rng.normal(0, 0.2, s).astype(np.float32) for s in ((count, d, 3), (count, 3, n)))
        dropout = jax.random.split(jax.random.key(0), count)
        adapters = jnp.asarray(a), jnp.asarray(b)
        adapted.set_value(actjax.LoRA(jnp.asarray(weight), *adapters, dropout, 2.0, 0.5))
        merged.set_value(jnp.asarray(weight + 2 * a @ b))
    quantized = jax.jit(jax.vmap(actjax.NF4Weight.quantize))(mixed.layers.mlp.up.get_value())
    mixed.layers.mlp.up.set_value(quantized)
    decoded = jax.jit(jax.vmap(lambda w: w.astype("float32")))(quantized)
    plain.layers.mlp.up.set_value(decoded)
    for weight in (mixed.layers.attention.o, mixed.embedding, mixed.output):
        weight.set_value(actjax.FrozenWeight(weight.get_value()))
    return mixed, plain


def test_adapters_and_quantized_weights_write_what_their_arrays_do():
    mixed, plain = with_adapters()
    assert greedy(mixed) == greedy(plain)
    assert greedy(plain) != greedy(model_of())
    got, want = (
        log_likelihoods(model, PROMPTS, [[1] * 8] * 3, compute_dtype="float32")
        for model in (mixed, plain)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    # Generation leaves the dropout of the model that it was given alone.
    assert mixed.layers.attention.q.get_value().dropout == 0.5


def test_the_cache_is_of_the_compute_dtype():
    model, tokens = model_of(), jnp.zeros((2, 8), jnp.int32)
    logits, cache = jax.eval_shape(
        lambda model, tokens: prefill(model, tokens, jnp.array([8, 3]), 9, "bfloat16"),
        model,
        tokens,
    )
    assert cache.k.dtype == cache.v.dtype == jnp.bfloat16
    assert cache.k.shape == (3, 2, 9, 2, 4)
    assert (logits.shape, logits.dtype) == ((2, 61), jnp.float32)


# ----- another implementation


def test_texts_are_those_of_transformers(tmp_path):
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


# ----- errors


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"`prompts\[1\]` is empty: give at least one token"),
        ([[1, 61]], {}, r"`prompts\[0\]` has the id 61, but those of the model are 0 to 60"),
        ([[-1, 2]], {}, r"`prompts\[0\]` has the id -1"),
        ([[1]], {"stop": [99]}, "`stop` has the id 99"),
        ([[1]], {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ([[1] * 30], {}, r"`prompts\[0\]` has 30 tokens, and `max_new_tokens` 12 more .* the 21 p"),
        ([[1]], {"temperature": -1}, "`temperature` must be 0, .* or above, got -1"),
        ([[1]], {"temperature": float("nan")}, "`temperature` must be 0"),
        ([[1]], {"top_p": 0.0}, r"`top_p` must be above 0 and at most 1, got 0\.0"),
        ([[1]], {"top_p": 1.5}, r"`top_p` must be above 0 and at most 1, got 1\.5"),
        ([[1]], {"top_k": -1}, "`top_k` must be at least 0, which is no limit, got -1"),
        ([[1]], {"temperature": 1.0}, "draws random numbers, but got key=None: pass `key`"),
        (
            [[1]],
            {"temperature": 1.0, "key": jax.random.split(jax.random.key(0), 2)},
            r"`key` must be one, or one for each of 1 `prompts`: got \(2,\)",
        ),
    ],
)
def test_errors_say_what_is_wrong(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        greedy(model_of(), prompts, **options)


def test_nothing_is_written_after_no_prompts():
    assert greedy(model_of(), []) == []
    assert log_likelihoods(model_of(), [], []).shape == (0,)
    with pytest.raises(ValueError, match="`continuations` are 2 for 1 `prompts`"):
        log_likelihoods(model_of(), [[1]], [[1], [2]])
    with pytest.raises(ValueError, match=r"`continuations\[0\]` is empty"):
        log_likelihoods(model_of(), [[1]], [[]])
