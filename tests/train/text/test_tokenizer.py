"""Tokenizers: restored texts, file formats, deterministic training."""

import io
import json
import pathlib
import subprocess
import sys

import hypothesis
import pytest
import sentencepiece
import tokenizers
from hypothesis import strategies as st

from train.text import tokenizer as tokenizer_lib
from train.text.corpus import Corpus
from train.text.tokenizer import (
    END_OF_TEXT,
    SentencePieceTokenizer,
    Tokenizer,
    default_tokenizer,
    load_tokenizer,
    train_bpe,
)

SENTENCES = [f"The quick brown fox number {i} jumps over the lazy dog.\n" for i in range(50)]
AWKWARD = "Hello  world\n\tdéjà vu <|endoftext|> </s> 日本 🙂\x00 12345 it's\r\n"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(SENTENCES, 300)


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A small model like Llama 2's: falls back to bytes, without normalization."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


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


@pytest.mark.parametrize("text", ["", " ", "a", AWKWARD, *SENTENCES[:2]])
def test_text_is_restored(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_that_are_encoded_together_get_the_ids_of_each(tokenizer):
    texts = ["", AWKWARD, *SENTENCES[:3]]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_names_of_special_tokens_in_a_text_are_letters(tokenizer):
    ids = tokenizer.encode(AWKWARD)
    assert tokenizer.eos_id not in ids
    assert tokenizer.bos_id not in ids


def test_special_tokens_are_encoded_on_request(tokenizer):
    text = f"fox{tokenizer.eos_token}dog"
    ids = tokenizer.encode_with_special(text)
    assert ids == [*tokenizer.encode("fox"), tokenizer.eos_id, *tokenizer.encode("dog")]
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.encode_with_special("") == []


def test_special_tokens_have_names(bpe, pieces):
    assert (bpe.bos_token, bpe.eos_token) == (None, END_OF_TEXT)
    assert (pieces.bos_token, pieces.eos_token) == ("<s>", "</s>")


def test_special_ids_decode_to_nothing(tokenizer):
    ids = [*tokenizer.encode("fox"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == "fox"


def test_ids_are_below_vocab_size(tokenizer):
    assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
    assert max(tokenizer.encode(AWKWARD)) < tokenizer.vocab_size


def test_a_saved_tokenizer_is_loaded_unchanged(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert loaded.encode(AWKWARD) == tokenizer.encode(AWKWARD)
    for name in ("vocab_size", "bos_id", "eos_id", "bos_token", "eos_token", "fingerprint"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


# --- Byte-level BPE. ---


@hypothesis.given(st.text())
def test_bpe_round_trips_any_text(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_bpe_fills_its_vocabulary_and_ends_documents(bpe):
    assert (bpe.vocab_size, bpe.eos_id, bpe.bos_id) == (300, 0, None)


def test_smallest_vocabulary_is_the_bytes():
    tokenizer = train_bpe(SENTENCES, 257)
    assert len(tokenizer.encode(AWKWARD)) == len(AWKWARD.encode())


def test_vocabulary_is_smaller_without_pairs_to_merge():
    assert train_bpe(["ab"], 1000).vocab_size == 258


def test_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"`--vocab-size` is 256: at least 257 are needed"):
        train_bpe(SENTENCES, 256)


def test_training_is_the_same_in_another_process(bpe):
    program = (
        "from train.text.tokenizer import train_bpe; "
        f"print(train_bpe({SENTENCES!r}, 300).fingerprint, end='')"
    )
    root = pathlib.Path(tokenizer_lib.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, check=True
    )
    assert done.stdout.decode() == bpe.fingerprint


def test_fingerprint_tells_vocabularies_apart(bpe):
    assert train_bpe(SENTENCES, 301).fingerprint != bpe.fingerprint
    assert train_bpe(SENTENCES, 300).fingerprint == bpe.fingerprint


# --- The default of a corpus. ---


@pytest.fixture
def corpus() -> Corpus:
    return Corpus("fox", train=SENTENCES, validation=["held out\n"], fingerprint="f" * 64)


def test_default_is_trained_once(corpus, tmp_path, monkeypatch):
    first = default_tokenizer(corpus, 300, tmp_path)
    monkeypatch.setattr(tokenizer_lib, "train_bpe", lambda *_: pytest.fail("trained again"))
    assert default_tokenizer(corpus, 300, tmp_path).fingerprint == first.fingerprint
    assert [p.name for p in (tmp_path / "tokenizers").iterdir()] == [f"bpe-300-{'f' * 16}"]


def test_default_is_trained_on_the_train_split_only(corpus, bpe, tmp_path):
    assert default_tokenizer(corpus, 300, tmp_path).fingerprint == bpe.fingerprint


def test_default_killed_while_saving_is_trained_again(corpus, tmp_path, monkeypatch):
    def killed(self, directory):
        directory.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_lib.HuggingFaceTokenizer, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            default_tokenizer(corpus, 300, tmp_path)
    assert default_tokenizer(corpus, 300, tmp_path).vocab_size == 300


@pytest.mark.parametrize("limit", [1, 500, 10**9])
def test_sample_is_evenly_spaced_and_limited(limit, monkeypatch):
    monkeypatch.setattr(tokenizer_lib, "TRAINING_CHARS", limit)
    sample = list(tokenizer_lib._sample(SENTENCES))
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


def test_qwen_splits_digits_and_composes_accents(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_config(folder, **config, tokenizer_class="Qwen2Tokenizer")
    qwen = load_tokenizer(folder)
    assert qwen.decode(qwen.encode("e\u0301 12")) == "\u00e9 12"
    assert qwen.encode("fox\n\nfox") == qwen.encode("fox") + qwen.encode("\n\nfox")


@pytest.mark.parametrize("name", ["tokenizer.json", "renamed.json"])
def test_a_file_without_configuration_has_the_usual_special_tokens(tmp_path, name):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(tmp_path / name))
    loaded = load_tokenizer(tmp_path / name)
    assert (loaded.bos_id, loaded.eos_id) == (0, 1)


def test_configuration_names_the_special_tokens(bpe, tmp_path):
    bpe._inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token={"content": "q"}, bos_token=END_OF_TEXT)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.eos_id, loaded.bos_id) == (bpe.encode("q")[0], 0)


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`--tokenizer` is '.*none': no such path. Give a"):
        load_tokenizer(tmp_path / "none")


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match=r"it has readme.txt. Give a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_llama2c_is_refused(tmp_path):
    (tmp_path / "tok512.bin").write_bytes(bytes(8))
    with pytest.raises(ValueError, match=r"tok512\.bin': .* no longer read\. Give the sentencep"):
        load_tokenizer(tmp_path / "tok512.bin")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_damaged_file_is_an_error(folder, name):
    (folder / name).write_bytes(b'{"half')
    with pytest.raises(ValueError, match=rf"`--tokenizer` is '.*{name}': "):
        load_tokenizer(folder)


def test_a_vocabulary_without_merges_is_an_error(folder):
    (folder / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"there is no merges.txt next to it"):
        load_tokenizer(folder)


def test_a_merge_that_is_not_a_pair_is_an_error(folder):
    (folder / "merges.txt").write_text("a b\na\n")
    with pytest.raises(ValueError, match=r"merges.txt line 2 is 'a': two tokens are needed"):
        load_tokenizer(folder)


def test_a_configuration_of_another_vocabulary_is_an_error(folder):
    added = {"5000": {"content": END_OF_TEXT, "special": True}}
    write_config(folder, added_tokens_decoder=added)
    with pytest.raises(ValueError, match=r"the id 5000, but after the vocabulary it is 299"):
        load_tokenizer(folder)


def test_special_token_outside_the_vocabulary_is_an_error(folder):
    write_config(folder, eos_token="<gone>")
    with pytest.raises(ValueError, match=r"its eos_token '<gone>' is not in its vocabulary"):
        load_tokenizer(folder)


def test_a_vocabulary_without_end_token_is_an_error(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"no token ends a document: none of <\|endoftext\|>, </s>"
    ):
        load_tokenizer(folder)


def test_sentencepiece_without_end_piece_is_an_error(tmp_path):
    prefix = str(tmp_path / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=prefix,
        vocab_size=44,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match=r"m.model': its model has no end-of-sentence piece"):
        load_tokenizer(prefix + ".model")
