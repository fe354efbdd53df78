"""The tokenizer of llama2.c, compared with a direct translation of `run.c`."""

import struct

import numpy as np
import pytest

from train.text.llama2c_tokenizer import Llama2cTokenizer
from train.text.tokenizer import load_tokenizer

SPECIAL = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]
BYTES = [b"<0x%02X>" % i for i in range(256)]
MERGED = [" t", "he", " a", " the", "aa", "aaa", "ab", "ba", "bab", "é ", "ee", " e", "  ", "<s"]
SINGLE = [" ", "e", "a", "t", "h", "b", "é", "日", "<", "s", ">"]
PIECES = [*SPECIAL, *BYTES, *(piece.encode() for piece in [*MERGED, *SINGLE])]
# Of two equal scores, the first pair in the text is merged first.
SCORES = [0.0] * 259 + [-float(min(i, 6)) for i in range(len(MERGED) + len(SINGLE))]


def file(pieces=PIECES, scores=SCORES) -> bytes:
    longest = struct.pack("<i", max(map(len, pieces)))
    records = [
        struct.pack("<fi", score, len(piece)) + piece
        for piece, score in zip(pieces, scores, strict=True)
    ]
    return longest + b"".join(records)


def slowly(text: str) -> list[int]:
    """Scans all pairs for each merge, as `run.c` does."""
    lookup = {piece: i for i, piece in enumerate(PIECES)}
    ids = [lookup[b" "]] if text else []
    for character in text:
        piece = character.encode()
        ids += [lookup[piece]] if piece in lookup else [3 + byte for byte in piece]
    while True:
        best = None
        for i in range(len(ids) - 1):
            merged = lookup.get(PIECES[ids[i]] + PIECES[ids[i + 1]])
            if merged is not None and (best is None or SCORES[merged] > SCORES[best[1]]):
                best = i, merged
        if best is None:
            return ids
        ids[best[0] : best[0] + 2] = [best[1]]


def test_pieces_are_those_of_llama2c():
    tokenizer = Llama2cTokenizer(file())
    named = {piece: i for i, piece in enumerate(PIECES)}
    assert tokenizer.encode("the") == [named[b" the"]]
    assert tokenizer.encode("日!") == [named[b" "], named["日".encode()], 3 + ord("!")]
    assert tokenizer.encode("🙂") == [named[b" "], *(3 + byte for byte in "🙂".encode())]
    assert tokenizer.encode("\0") == [named[b" "], 3]
    assert tokenizer.encode("") == []
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 5, 8, 13, 40) * 40:
        text = "".join(rng.choice(list("aaabbethé日 <s>z"), length))
        assert tokenizer.encode(text) == slowly(text), text


def test_any_text_is_restored():
    tokenizer = Llama2cTokenizer(file())
    for text in ("the bat", " the", "   ", "<0x41>\n<s>\n", "日本🙂\0é", "", "a\nb"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_give_no_text_and_none_comes_from_text():
    tokenizer = Llama2cTokenizer(file())
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.vocab_size == len(PIECES)
    ids = tokenizer.encode("the")
    assert tokenizer.decode([1, *ids, 2, 1, *ids, 0]) == "thethe"
    assert tokenizer.decode([*ids, *ids]) == "the the"
    assert min(tokenizer.encode("\n<s>\n</s><unk><0x41>")) > 2
    named = tokenizer.encode_with_special("<s>the</s><s>")
    assert named == [1, *ids, 2, 1]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    # The first two of three bytes of a character.
    assert tokenizer.decode([3 + 0xE6, 3 + 0x97]) == "\ufffd"


def test_a_saved_file_equals_the_read_one(tmp_path):
    tokenizer = Llama2cTokenizer(file())
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("the bat") == tokenizer.encode("the bat")
    other = Llama2cTokenizer(file(scores=[score - 1 for score in SCORES]))
    assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes: not a tokenizer of llama2.c"),
        (file()[:-1], f"it ends within piece {len(PIECES) - 1}, or is not a"),
        (file()[:-6], f"it ends within piece {len(PIECES) - 1}, or is not a"),
        (b"PK\3\4" + bytes(30), "not a tokenizer of llama2.c"),
        (file(PIECES[:200], SCORES[:200]), "its pieces 3 to 258 are not the 256 bytes"),
        (file(PIECES[:262], SCORES[:262]), "it has no piece for a space"),
        (struct.pack("<ifi", 3, 0.0, -5), "it ends within piece 0"),
    ],
)
def test_damaged_files_are_refused(data, message, tmp_path):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"`--tokenizer` is '.*tokenizer\.bin': .*{message}"):
        load_tokenizer(path)
