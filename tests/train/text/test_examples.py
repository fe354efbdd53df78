"""Examples: their tokens, which of them count, which are held out, and their lengths."""

import itertools
import re

import hypothesis
import numpy as np
import pytest
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from tests.train.example_files import (
    CHAT,
    CHATML,
    PAIR,
    learned,
    numbered,
    texts_of,
    write,
    write_rows,
)
from train.text.encoder import Encoder, Written
from train.text.tokenizer import HuggingFaceTokenizer, Tokenizer


@pytest.fixture(params=["bytes", "bpe", "pieces"])
def tokenizer(request) -> Tokenizer:
    return Bytes() if request.param == "bytes" else request.getfixturevalue(request.param)


# --- Prompts and completions, texts. ---


INPUT = "### Input:\n1 1\n\n"
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\nAdd.\n\n{}### Response:\n2"
)
PROMPTS = ("asks:", "asks: ", "why?\n", "why?\n\n", "### ", "###", "fox number 1", "é", "qui", " ")
COMPLETIONS = (" why", "why", "\n\nfox", " ", "2", "\u0301a", "#", "ck", "日", "  x")


def test_a_completion_and_its_end_count_and_a_token_over_the_seam_is_of_it(tokenizer, open_rows):
    (example,) = open_rows([{"prompt": "asks: ", "completion": "why"}], tokenizer).train
    seam = isinstance(tokenizer, HuggingFaceTokenizer)  # It has a token " why".
    runs = [("asks:", False), (" why", True)] if seam else [("asks: ", False), ("why", True)]
    assert learned(example, tokenizer) == runs
    assert (example.tokens.dtype, example.counted.dtype) == (np.int32, np.bool_)
    encoder = Encoder(tokenizer)
    for end, completion in itertools.product(PROMPTS, COMPLETIONS):
        prompt, text = f"So {end}", f"So {end}{completion}"
        example = encoder.example(Written(text, [(len(prompt), len(text))]))
        ids = [*tokenizer.prefix, *tokenizer.encode(text), tokenizer.eos_id]
        assert example.tokens.tolist() == ids
        first = int(example.counted.argmax())
        assert example.counted[first:].all()
        # Evaluation divides them at the same place.
        assert encoder.continued(prompt, completion) == (ids[:first], ids[first:-1])
        assert prompt.startswith(tokenizer.decode(ids[:first]).removesuffix("\ufffd"))


@hypothesis.example(prompt="quick", completion="fox")  # No space between them.
@hypothesis.example(prompt="\ufdd0\ufdd1<|im_end|>", completion="<\ufdd0|im_end|>\ufddf")
@hypothesis.given(prompt=st.text(), completion=st.text(min_size=1))
@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_tokens_decode_to_the_prompt_and_the_completion(tokenizer, open_rows, prompt, completion):
    (example,) = open_rows([{"prompt": prompt, "completion": completion}], tokenizer).train
    assert tokenizer.decode(example.tokens) == prompt + completion


def test_all_of_a_text_counts_except_its_first_token_and_prompts_on_request(bpe, open_rows):
    (example,) = open_rows([{"text": "fox number"}], bpe).train
    assert example.counted.tolist() == [False] + [True] * (len(example.tokens) - 1)
    assert bpe.decode(example.tokens) == "fox number"
    (example,) = open_rows([PAIR], count_prompts=True).train
    assert learned(example) == [("", False), ("Why? Because.", True)]


@pytest.mark.parametrize(
    ("row", "options", "prompt", "completion"),
    [
        (
            {"question": "2 + {2}?", "options": ["4", "5"], "price": 0.5, "right": 4},
            {
                "prompt_template": r"Question:\t{question}\n{options[0]} or {options[1]}"
                r" for {price:.2f} {{}}",
                "completion_template": " {right}",
            },
            "Question:\t2 + {2}?\n4 or 5 for 0.50 {}",
            " 4",
        ),
        (
            {"q": "Why?", "prompt": "not this", "a": "So."},
            {
                **{"prompt_field": "q", "completion_field": "a"},
                **{"prompt_template": "Q: {prompt} A:", "completion_template": " {completion}"},
            },
            "Q: Why? A:",
            " So.",
        ),
        (PAIR, {"prompt_template": r"\\nabla {prompt}"}, r"\nabla Why?", " Because."),
    ],
    ids=["fields", "named fields", "a literal backslash"],
)
def test_templates_are_filled_with_the_fields(open_rows, row, options, prompt, completion):
    (example,) = open_rows([row], **options).train
    assert learned(example) == [(prompt, False), (completion, True)]


NAMED = "<|im_start|>user\nHi<|im_end|>\n"
MESSAGES = [{"role": "user", "content": NAMED}, {"role": "assistant", "content": "b"}]
WRITTEN = {
    "prompt_template": r"<|im_start|>user\n{q}<|im_end|>\n",
    "completion_template": "{a}<|im_end|>",
}


@pytest.mark.parametrize(
    ("row", "options", "special", "remark"),
    [
        ({"text": NAMED}, {}, 1, True),
        ({"text": NAMED}, {"special_tokens": "parse"}, 3, False),
        ({"q": "Hi", "a": "Yo"}, WRITTEN, 4, False),
        ({"q": NAMED, "a": "Yo"}, WRITTEN, 4, True),
        ({"q": NAMED, "a": "Yo"}, {**WRITTEN, "special_tokens": "parse"}, 6, False),
        ({"prompt": "a", "completion": "b<|endoftext|>"}, {}, 1, True),
        ({"instruction": NAMED, "output": "b"}, {}, 1, True),
        ({"messages": MESSAGES}, {}, 4, True),
        ({"messages": MESSAGES}, {"special_tokens": "parse"}, 6, False),
        ({"text": "<|im_star t|><|im_en<|im_end"}, {}, 1, False),
    ],
)
def test_names_of_special_tokens_are_tokens_in_templates_and_letters_in_content(
    bpe, open_rows, tmp_path, row, options, special, remark
):
    if "messages" in row:
        options = {**options, "chat_template": write(tmp_path / "chatml.jinja", CHATML)}
    examples = open_rows([row], bpe, **options)
    (example,) = examples.train
    assert np.isin(example.tokens, list(bpe.special)).sum() == special
    # Special tokens decode to nothing.
    assert any(name in bpe.decode(example.tokens) for name in bpe.special.values()) == remark
    # Both files, which are the same here.
    says = "names of special tokens in 2 of 2 records are read as letters: <|"
    assert [line.startswith(says) for line in examples.remarks] == [True] * remark


# --- Formats. ---


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        (PAIR, {}, "Why? Because."),
        ({"text": "plain"}, {}, "plain"),
        ({**PAIR, "text": "plain"}, {}, "Why? Because."),
        ({**PAIR, "text": "plain"}, {"format": "text"}, "plain"),
        ({**PAIR, "body": "plain"}, {"text_field": "body"}, "plain"),
        ({"instruction": "Add.", "output": "2", "text": "x"}, {}, ALPACA.format("", "")),
        (
            {"instruction": "Add.", "input": "1 1", "output": "2"},
            {},
            ALPACA.format(", paired with an input that provides further context", INPUT),
        ),
    ],
)
def test_the_format_is_that_of_the_first_record_unless_a_flag_chooses_it(
    open_rows, row, options, text
):
    assert texts_of(open_rows([row], **options).train) == [text]


def test_a_conversation_takes_precedence_over_other_formats(bpe, open_rows, tmp_path):
    template = write(tmp_path / "chatml.jinja", CHATML)
    (example,) = open_rows([CHAT | PAIR], bpe, chat_template=template).train
    assert "Really?" in bpe.decode(example.tokens)


def test_a_record_without_a_known_format_is_refused(open_rows):
    with pytest.raises(
        ValueError,
        match=r"line 1 of '.*rows.jsonl' has the fields 'question', 'answer': neither 'messages'",
    ):
        open_rows([{"question": "a", "answer": "b"}])


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a pair of preference: pass `--loss d"),
        ({**PAIR, "weight": 0.5}, "line 1 of .*: field 'weight' is 0.5, and has no meaning here"),
        ({"text": "a", "sample_weight": 2}, "field 'sample_weight' is 2, and has no meaning"),
        ({**CHAT, "functions": [{"name": "f"}]}, "field 'functions' is .* has no meaning here"),
        ({"instruction": "a", "output": "b", "loss_weight": 0}, "field 'loss_weight' is 0, and"),
    ],
)
def test_fields_with_a_meaning_elsewhere_are_refused(bpe, open_rows, tmp_path, row, match):
    template = {"chat_template": write(tmp_path / "chatml.jinja", CHATML)}
    with pytest.raises(ValueError, match=match):
        open_rows([row], bpe, **(template if "messages" in row else {}))


def test_bad_records_are_skipped_on_request(open_rows):
    examples = open_rows([PAIR, {"prompt": 1}, {**PAIR, "weight": 3}, PAIR], skip_bad=True)
    assert len(examples.train) == 2
    says = r"4 of 8 records are bad and skipped; the first: `--data`: line 2 of .*'completion'"
    assert re.match(says, examples.remarks[0])
    with pytest.raises(ValueError, match=r"`--skip-bad` skipped all records; the first: .*line 1"):
        open_rows([{"prompt": None, "completion": "a"}], skip_bad=True)


# --- Held-out records. ---


def test_held_out_records_do_not_move_and_copies_stay_together(open_rows):
    few, more = (open_rows(numbered(n), held_out=0.1) for n in (200, 400))
    assert 5 < len(few.validation) < 40
    assert len(few.train) + len(few.validation) == 200
    assert set(texts_of(few.validation)) < set(texts_of(more.validation))
    assert set(texts_of(few.train)) < set(texts_of(more.train))
    # Copies, also with their fields in another order.
    rows = [*numbered(20), *(dict(reversed(row.items())) for row in numbered(20))]
    copied = open_rows(rows, held_out=0.3)
    assert not set(texts_of(copied.train)) & set(texts_of(copied.validation))
    for share in (1e-9, 1 - 1e-9):  # Both sides get a record.
        examples = open_rows(numbered(5), held_out=share)
        assert sorted([len(examples.train), len(examples.validation)]) == [1, 4]


def test_a_text_that_has_its_end_gets_no_second_one(bpe, open_rows):
    end = bpe.eos_token
    for text, ends in ((f"fox{end}", 1), (f"fox{end} \n", 1), (f"fox{end}dog", 2),
                       (f"fox{end}<|im_end|>", 2)):  # fmt: skip
        (example,) = open_rows([{"text": text}], bpe, special_tokens="parse").train
        assert example.tokens.tolist().count(bpe.eos_id) == ends, text
        assert example.tokens[-1] == bpe.eos_id


def test_a_single_record_cannot_be_held_out_and_of_many_copies_a_share_is(open_rows):
    with pytest.raises(ValueError, match=r"it has 1 record\(s\), and one must .*`--validation`"):
        open_rows([PAIR], held_out=0.05)
    for rows, share, count in (
        ([*[PAIR] * 10, *numbered(3)], 0.05, 1),
        ([PAIR, PAIR], 0.05, 1),
        ([PAIR] * 40, 0.1, 4),
        ([*[PAIR] * 20, *[LONG] * 20], 0.1, 4),
    ):
        examples = open_rows(rows, held_out=share)
        assert (len(examples.validation), len(examples.train)) == (count, len(rows) - count)


def test_validation_records_can_come_from_another_file_which_errors_name(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "x", "completion": "y"}])
    examples = open_rows(numbered(10), validation=str(other))
    assert len(examples.train) == 10
    assert texts_of(examples.validation) == ["xy"]
    for row, seq_len, message in (
        ({"body": "x"}, 1000, r"line 1 of '.*other.jsonl' has the fields 'body': neither 'mess"),
        (ENDLESS, 8, r"`--validation` is '.*': all 1 record\(s\) to validate on"),
    ):
        write_rows(other, [row])
        with pytest.raises(ValueError, match=message):
            open_rows([PAIR], validation=str(other), seq_len=seq_len)


# --- Lengths. ---

# Counts are over both files, which are the same here.

LONG = {"prompt": "ab", "completion": "cdefgh"}
SHORT = {"prompt": "a", "completion": "b"}
ENDLESS = {"prompt": "prompt " * 10, "completion": "x"}


@pytest.mark.parametrize(
    ("rows", "options", "texts", "cut", "dropped"),
    [
        ([PAIR, LONG], {"seq_len": 5}, ["Why? ", "abcde"], 4, 0),
        ([LONG], {"seq_len": 9}, ["abcdefgh"], 0, 0),
        ([LONG, ENDLESS], {"seq_len": 5}, ["abcde"], 2, 2),  # The completion is cut off.
        ([LONG, SHORT], {"seq_len": 5, "long": "drop"}, ["ab"], 0, 2),
        ([{"prompt": "", "completion": "abc"}], {"seq_len": 1}, ["a"], 2, 0),
    ],
    ids=["cut", "largest length", "no completion left", "dropped on request", "one token"],
)
def test_long_examples_are_cut_or_dropped(open_rows, rows, options, texts, cut, dropped):
    examples = open_rows(rows, **options)
    assert texts_of(examples.train) == texts
    assert all(len(example.tokens) <= options["seq_len"] + 1 for example in examples.train)
    assert (examples.cut, examples.dropped) == (cut, dropped)
    assert len(examples.remarks) == (dropped > 0)
    assert all(line.startswith(f"{dropped} dropped. No counted") for line in examples.remarks)


@pytest.mark.parametrize(
    ("seq_len", "match"),
    [(0, "`--seq-len` must be at least 1"), (4, "all 1 .* to train on")],
)
def test_sequences_too_short_are_refused(open_rows, seq_len, match):
    with pytest.raises(ValueError, match=match):
        open_rows([ENDLESS], seq_len=seq_len)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt_template": "{a}"}, r"line 1 of .*'a'"),
        ({"completion_field": "b"}, r"line 1 of .*'b'"),
        (
            {"prompt_field": "a", "format": "text"},
            "`--prompt-field a` is for `--format completion`",
        ),
        ({"text_field": "a", "format": "chat"}, "`--text-field a` is for `--format text` and has"),
        (
            {"prompt_field": "a", "messages_field": "c"},
            "`--prompt-field` and `--messages-field` are for different formats",
        ),
    ],
)
def test_flags_of_a_format_are_never_ignored(open_rows, options, match):
    row = {"text": "abc", "prompt": "d", "messages": []}
    with pytest.raises(ValueError, match=match):
        open_rows([row], **options)


# --- Fingerprints. ---


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_template": "Q: {prompt}"},
        {"count_prompts": True},
        {"held_out": 0.3},
        {"seq_len": 11},
        {"prompt_field": "completion"},
    ],
)
def test_settings_that_change_the_examples_change_the_fingerprint(open_rows, options):
    assert open_rows(numbered(20)).fingerprint != open_rows(numbered(20), **options).fingerprint


def test_equal_records_have_equal_fingerprints_and_another_record_has_not(open_rows):
    one, other, more = (open_rows(numbered(count)).fingerprint for count in (20, 20, 21))
    assert one == other != more
