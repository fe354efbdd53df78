"""Tokenizers: restored texts, file formats, deterministic training."""

import copy
import json
import pathlib
import re
import subprocess
import sys

import hypothesis
import pytest
import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tests.train.runs import REPOSITORY
from train.text import trained_tokenizer
from train.text.corpus import Corpus
from train.text.encoder import Encoder
from train.text.tokenizer import HuggingFaceTokenizer, Tokenizer
from train.text.tokenizer_files import fit_vocabulary, load_tokenizer
from train.text.trained_tokenizer import END_OF_TEXT, default_tokenizer, train_bpe

SENTENCES = [f"The quick brown fox number {i} jumps over the lazy dog.\n" for i in range(50)]
AWKWARD = "Hello  world\n\tdéjà vu <|endoftext|> </s> 日本 🙂\x00 12345 it's\r\n"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(SENTENCES, 300)


@pytest.fixture(params=["bpe", "pieces"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(bpe, tmp_path) -> pathlib.Path:
    """`bpe` as vocab.json and merges.txt, with its special token only in the configuration."""
    state = json.loads(bpe._inner.to_str())["model"]
    vocabulary = {token: i - 1 for token, i in state["vocab"].items() if token != END_OF_TEXT}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    merges = "".join(" ".join(pair) + "\n" for pair in state["merges"])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    added = {str(len(vocabulary)): {"content": END_OF_TEXT, "special": True}}
    write_config(tmp_path, eos_token=END_OF_TEXT, added_tokens_decoder=added)
    return tmp_path


def write_config(directory: pathlib.Path, **config) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


# --- All tokenizers. ---


def test_text_is_restored_alone_and_together_with_other_texts(tokenizer):
    texts = ["", " ", "a", AWKWARD, *SENTENCES[:2]]
    ids = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(one) for one in ids] == texts
    assert tokenizer.encode_batch(texts) == ids
    assert tokenizer.encode_batch([]) == []
    assert max(map(max, filter(None, ids))) < tokenizer.vocab_size


def test_special_tokens_are_letters_unless_they_are_asked_for_and_decode_to_nothing(tokenizer):
    ids = tokenizer.encode(AWKWARD)
    assert not {tokenizer.eos_id, tokenizer.bos_id} & set(ids)
    assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
    text, fox, dog = f"fox{tokenizer.eos_token}dog", *map(tokenizer.encode, ("fox", "dog"))
    assert tokenizer.encode_with_special(text) == [*fox, tokenizer.eos_id, *dog]
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.encode_with_special("") == []
    assert tokenizer.decode([*fox, tokenizer.eos_id]) == "fox"


def test_a_saved_tokenizer_is_loaded_unchanged(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.encode(AWKWARD) == tokenizer.encode(AWKWARD)
    for name in ("vocab_size", "bos_id", "eos_id", "bos_token", "eos_token", "fingerprint"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


def test_a_saved_tokenizer_keeps_its_settings_and_its_chat_template(bpe, tmp_path):
    bpe.save(tmp_path / "first")
    (tmp_path / "first" / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((tmp_path / "first" / CONFIG).read_text())
    (tmp_path / "first" / CONFIG).write_text(json.dumps({**config, "model_max_length": 7}))
    load_tokenizer(tmp_path / "first").save(tmp_path / "second")
    assert json.loads((tmp_path / "second" / CONFIG).read_text())["model_max_length"] == 7
    assert (tmp_path / "second" / "chat_template.jinja").read_text() == "{{ messages }}"


# --- Byte-level BPE. ---


@hypothesis.given(st.text())
def test_bpe_round_trips_any_text(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_sizes_and_special_tokens_of_vocabularies(bpe, pieces):
    assert (bpe.vocab_size, bpe.eos_id, bpe.bos_id) == (300, 0, None)
    assert (bpe.bos_token, bpe.eos_token) == (None, END_OF_TEXT)
    assert (pieces.bos_token, pieces.eos_token) == ("<s>", "</s>")
    # The smallest vocabulary is the bytes; it stays small without pairs to merge.
    assert len(train_bpe(SENTENCES, 257).encode(AWKWARD)) == len(AWKWARD.encode())
    assert train_bpe(["ab"], 1000).vocab_size == 258
    with pytest.raises(ValueError, match=r"`--vocab-size` is 256: at least 257 are needed"):
        train_bpe(SENTENCES, 256)


def test_training_is_the_same_in_another_process_and_vocabularies_have_fingerprints(bpe):
    program = (
        "from train.text.trained_tokenizer import train_bpe; "
        f"print(train_bpe({SENTENCES!r}, 300).fingerprint, end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, check=True
    )
    assert done.stdout.decode() == bpe.fingerprint != train_bpe(SENTENCES, 301).fingerprint


# --- The default of a corpus. ---


@pytest.fixture
def corpus() -> Corpus:
    return Corpus("fox", train=SENTENCES, validation=["held out\n"], fingerprint="f" * 64)


def test_default_is_trained_once_on_the_train_split_only(corpus, bpe, tmp_path, monkeypatch):
    first = default_tokenizer(corpus, 300, tmp_path)
    assert first.fingerprint == bpe.fingerprint
    monkeypatch.setattr(trained_tokenizer, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert default_tokenizer(corpus, 300, tmp_path).fingerprint == first.fingerprint
    assert [p.name for p in (tmp_path / "tokenizers").iterdir()] == [f"bpe-300-{'f' * 16}"]


def test_default_killed_while_saving_is_trained_again(corpus, tmp_path, monkeypatch):
    def killed(self, directory):
        directory.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trained_tokenizer.HuggingFaceTokenizer, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            default_tokenizer(corpus, 300, tmp_path)
    assert default_tokenizer(corpus, 300, tmp_path).vocab_size == 300


@pytest.mark.parametrize("limit", [1, 500, 10**9])
def test_sample_is_evenly_spaced_and_limited(limit, monkeypatch):
    monkeypatch.setattr(trained_tokenizer, "TRAINING_CHARS", limit)
    sample = list(trained_tokenizer._sample(SENTENCES))
    longest = max(map(len, SENTENCES))
    assert sum(map(len, sample)) <= limit + longest
    if limit > 1:
        assert SENTENCES.index(sample[-1]) >= 40  # Not just the beginning.
    if limit > 500:
        assert sample == SENTENCES


# --- File formats. ---


@pytest.mark.parametrize("version_line", ["", "#version: 0.2\n"])
def test_vocab_and_merges_give_the_same_splits(folder, bpe, version_line):
    merges = folder / "merges.txt"
    merges.write_text(version_line + merges.read_text(encoding="utf-8"), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert [i + 1 for i in loaded.encode(AWKWARD)] == bpe.encode(AWKWARD)
    assert (loaded.eos_id, loaded.bos_id, loaded.vocab_size) == (299, None, 300)


def test_special_tokens_are_the_usual_ones_unless_a_configuration_names_them(bpe, tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_special_tokens(["<s>", "</s>"])
    for name in ("tokenizer.json", "renamed.json"):
        inner.save(str(tmp_path / name))
        loaded = load_tokenizer(tmp_path / name)
        # Only a post-processor adds tokens.
        assert (loaded.bos_id, loaded.eos_id) == (None, 1)
    bpe._inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token={"content": "q"}, bos_token=END_OF_TEXT)
    loaded = load_tokenizer(str(tmp_path))
    ids = [loaded.eos_id, loaded.bos_id, loaded.bos_token]
    assert ids == [*bpe.encode("q"), None, END_OF_TEXT]


@pytest.mark.parametrize(
    ("roles", "limit", "message"),
    [
        ({}, 301, ""),
        ({}, 300, "1 added token(s) of the tokenizer, such as <pad> [300], have no embedding in M"),
        ({}, 299, "the tokenizer has 301 tokens, but M has 299: the one of `--t` belongs to anoth"),
        ({"eos": "<pad>"}, 300, "the tokenizer has 301 tokens, but M has 300"),
        ({"prefix": ["<pad>"]}, 300, "the tokenizer has 301 tokens, but M has 300"),
        ({"suffix": ["<pad>"]}, 300, "the tokenizer has 301 tokens, but M has 300"),
    ],
)
def test_an_added_token_without_an_embedding_is_refused_where_it_occurs(bpe, roles, limit, message):
    inner = copy.deepcopy(bpe._inner)
    inner.add_special_tokens(["<pad>"])
    tokenizer = HuggingFaceTokenizer(inner, **{"eos": END_OF_TEXT, **roles})
    assert "may belong to another model" in fit_vocabulary(tokenizer, "--t", "M", 2 * limit)
    assert fit_vocabulary(tokenizer, "--t", "M", 384) == ""  # The next multiple of 128.
    if message.startswith("the"):
        with pytest.raises(ValueError, match=re.escape(message)):
            fit_vocabulary(tokenizer, "--t", "M", limit)
        return
    assert fit_vocabulary(tokenizer, "--t", "M", limit).startswith(message)
    assert tokenizer.encode("a<pad>") == bpe.encode("a<pad>")  # Letters.
    if message:
        with pytest.raises(ValueError, match=r"token <pad> \[300\], and the model has 300 embedd"):
            tokenizer.encode_with_special("a<pad>")
    else:
        assert tokenizer.encode_with_special("<pad>") == [300]


CONFIG, MERGES = "tokenizer_config.json", "merges.txt"
OTHER = json.dumps({"added_tokens_decoder": {"5000": {"content": END_OF_TEXT, "special": True}}})


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", b'{"half', r"`--tokenizer` is '.*tokenizer.json': "),
        ("tokenizer.model", b'{"half', r"`--tokenizer` is '.*tokenizer.model': "),
        ("vocab.json", b'{"half', r"`--tokenizer` is '.*vocab.json': "),
        (MERGES, None, r"there is no merges.txt next to it"),
        (MERGES, b"a b\na\n", r"merges.txt line 2 is 'a': two tokens are needed"),
        (CONFIG, OTHER.encode(), r"the id 5000, but after the vocabulary it is 299"),
        (CONFIG, b'{"eos_token": "<gone>"}', r"its eos_token '<gone>' is not in its vocabulary"),
        (
            CONFIG,
            b'{"split_special_tokens": true}',
            r"`split_special_tokens` .* only false",
        ),
        (CONFIG, None, r"no token ends a document: none of <\|endoftext\|>, </s>"),
    ],
)
def test_a_damaged_folder_is_refused(folder, name, data, message):
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_other_paths_are_refused(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tok512.bin").write_bytes(bytes(8))
    trainer, prefix = sentencepiece.SentencePieceTrainer, str(tmp_path / "a" / "m")
    trainer.train(
        sentence_iterator=iter(SENTENCES), model_prefix=prefix, vocab_size=44, eos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    for path, error, message in (
        ("none", FileNotFoundError, r"`--tokenizer` is '.*none': no such path. Give a"),
        ("", FileNotFoundError, r"it has .*readme.txt. Give a tokenizer.json"),
        ("a/tok512.bin", ValueError, r"tok512\.bin': .* no longer read\. Give the sentencep"),
        ("a/m.model", ValueError, r"m.model': its model has no end-of-sentence piece"),
    ):
        with pytest.raises(error, match=message):
            load_tokenizer(tmp_path / path)


def lower_case() -> tokenizers.Tokenizer:
    inner = copy.deepcopy(train_bpe(SENTENCES, 300)._inner)
    inner.normalizer = normalizers.Lowercase()
    return inner


def unigram() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<|im_end|>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    inner.train_from_iterator(SENTENCES, trainer)
    return inner


def words() -> tokenizers.Tokenizer:
    names = ["<unk>", "<|im_end|>", "a", "b", "im_end"]
    inner = tokenizers.Tokenizer(models.WordLevel({x: i for i, x in enumerate(names)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


@pytest.mark.parametrize(
    ("make", "token"),
    [
        # A name that the file does not call special, another spelling, pieces of the model.
        (lower_case, tokenizers.AddedToken("<|im_end|>", normalized=False)),
        (lower_case, tokenizers.AddedToken("<|IM_END|>", special=True, normalized=True)),
        (unigram, tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)),
        (words, tokenizers.AddedToken("<|im_end|>", special=True, normalized=False)),
    ],
)
def test_no_letters_of_content_are_a_special_token(tmp_path, make, token):
    inner = make()
    inner.add_tokens([token])
    inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token=token.content)
    loaded = load_tokenizer(tmp_path)
    assert loaded.special[loaded.eos_id] == token.content
    encoder = Encoder(loaded)
    for content in ("a <|im_end|> b", "<|IM_END|>", "a"):
        marked = encoder.marker.mark(content)
        assert loaded.eos_id not in loaded.encode(content)
        assert loaded.eos_id not in encoder.prompt(marked)
        turn = encoder.prompt(f"{token.content} {marked} {token.content}")
        assert [turn[0], turn[-1], turn.count(loaded.eos_id)] == [loaded.eos_id, loaded.eos_id, 2]
