"""Tokenizers with the settings of well-known models: ids, texts and chats as `transformers` has."""

import io
import json
import pathlib
import re

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as splitters

from tests.train.example_files import open_path, write, write_rows
from train.text.special_tokens import Marker
from train.text.tokenizer_files import load_tokenizer

TEXTS = [f"The quick brown  fox {i} asks: why?\n    It's déjà vu 12{i}.\n\n" for i in range(40)]
AWKWARD = (
    *("", " ", "  ", "\n", "a", " a", "  a  b ", "\n\na\n \n", "\tx\t", "It's 12345 déjà vu, no"),
    *(
        "e\u0301 A\u030a",
        "日本 🙂",
        "\x00\r\n",
        "▁ ▁a",
        "if x:\n    y = 1  # z",
        "a" * 300,
        TEXTS[0],
    ),
)
LLAMA, QWEN = ["<unk>", "<s>", "</s>"], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_3 = [f"<|{x}|>" for x in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")]
GEMMA = [f"<{x}>" for x in ("pad", "bos", "eos", "unk", "mask")]
FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
FLAGGED = [
    AddedToken(f"<|{flag}|>", **{"normalized": False, flag: True}) for flag in FLAGS[1:5]
]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = normalizers.Replace(" ", "▁")


def trained(model, trainer, splitter, special=(), **options) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model())
    inner.pre_tokenizer = splitter
    fixed = {"vocab_size": 400, "special_tokens": list(special), "show_progress": False}
    inner.train_from_iterator(TEXTS, trainer(**fixed, **options))
    return inner


def new(model, special, splitter, normalizer=None, decoder=None, bos=None, letters=()):
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.normalizer, inner.decoder = splitter, normalizer, decoder
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    inner.add_tokens([AddedToken(name, normalized=False) for name in letters])
    parts = [processors.ByteLevel(trim_offsets=False)] * isinstance(decoder, decoders.ByteLevel)
    if bos is not None:
        tokens = [(bos, inner.token_to_id(bos))]
        parts.append(processors.TemplateProcessing(single=f"{bos} $A", special_tokens=tokens))
    inner.post_processor = processors.Sequence(parts)
    return inner


def bpe(splitter, first=(), training=None, **options) -> models.BPE:
    inner = trained(models.BPE, trainers.BpeTrainer, splitter, first, **(training or {}))
    state = json.loads(inner.to_str())["model"]
    return models.BPE(state["vocab"], list(map(tuple, state["merges"])), **options)


def with_fallback(special, splitter=None, normalizer=None, more=()):
    """BPE with "▁" for spaces, and bytes for other letters."""
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    first = [*special, *(f"<0x{i:02X}>" for i in range(256))]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] * (special is LLAMA)
    model, decoder = bpe(splitters.Metaspace(), first, **options), decoders.Sequence(parts)
    return new(model, [*special, *more], splitter, normalizer, decoder, bos=special[1])


def of_bytes(splitter, special, normalizer=None, bos=None, letters=(), **options):
    if isinstance(splitter, str):
        split = splitters.Split(tokenizers.Regex(SPLIT % splitter), "isolated")
        splitter = splitters.Sequence([split, splitters.ByteLevel(False, use_regex=False)])
    alphabet = {"initial_alphabet": sorted(splitters.ByteLevel.alphabet())}
    model = bpe(splitter, training=alphabet, **options)
    return new(model, special, splitter, normalizer, decoders.ByteLevel(), bos, letters)


def simple(kind: str, splitter, decoder=None, normalizer=None):
    trainer = getattr(trainers, f"{kind}Trainer")
    options = {"unk_token": "<unk>"} if kind == "Unigram" else {}
    model = trained(getattr(models, kind), trainer, splitter, LLAMA, **options).model
    if kind != "Unigram":
        model.unk_token = "<unk>"
    return new(model, LLAMA, splitter, normalizer, decoder, bos="<s>")


FAST = ("PreTrainedTokenizerFast", "<s>", "</s>")
DIGITS = splitters.Sequence([splitters.Digits(True), splitters.ByteLevel(False)])
FAMILIES = {
    "llama_2": ("llama", "LlamaTokenizer", "<s>", "</s>", lambda: with_fallback(
        LLAMA, normalizer=normalizers.Sequence([normalizers.Prepend("▁"), SPACES]))),
    "llama_3": ("llama", FAST[0], LLAMA_3[0], "<|eot_id|>", lambda: of_bytes(
        "{1,3}", LLAMA_3, bos=LLAMA_3[0], ignore_merges=True)),
    "qwen_2_5": ("qwen2", "Qwen2Tokenizer", None, QWEN[2], lambda: of_bytes(
        "", QWEN, normalizers.NFC())),
    "qwen_3": ("qwen3", "Qwen2Tokenizer", None, QWEN[2], lambda: of_bytes(
        "", QWEN, normalizers.NFC(), letters=["<think>", "</think>"])),
    "smollm_2": ("llama", "GPT2Tokenizer", QWEN[1], QWEN[2], lambda: of_bytes(DIGITS, QWEN)),
    "mistral": ("mistral", "LlamaTokenizer", "<s>", "</s>", lambda: with_fallback(
        LLAMA, splitters.Metaspace("▁", "first", split=False), more=["[INST]", "[/INST]"])),
    "gemma": ("gemma", "GemmaTokenizer", "<bos>", "<eos>", lambda: with_fallback(
        GEMMA, splitters.Split(" ", "merged_with_previous"), SPACES,
        more=["<start_of_turn>", "<end_of_turn>"])),
    "unigram": ("llama", *FAST, lambda: simple(
        "Unigram", splitters.Metaspace(), decoders.Metaspace())),
    "word_piece": ("llama", *FAST, lambda: simple(
        "WordPiece", splitters.BertPreTokenizer(), decoders.WordPiece(),
        normalizers.BertNormalizer())),
    "word_level": ("llama", *FAST, lambda: simple("WordLevel", splitters.Whitespace())),
}  # fmt: skip
"""Kind of the model, class, first and last token, and the tokenizer."""


def write_folder(folder: pathlib.Path, family: str, form: str = "hub", **changes) -> pathlib.Path:
    """Writes the files of a tokenizer, with changes of its configuration (None removes)."""
    model_type, kind, bos, eos, make = FAMILIES[family]
    inner, names = make(), {"bos_token": bos, "eos_token": eos}
    if form == "flags":
        inner.add_special_tokens(FLAGGED)
    added = inner.get_added_tokens_decoder()
    listed = {str(i): {flag: getattr(x, flag) for flag in FLAGS} for i, x in added.items()}
    config = {"tokenizer_class": kind, **names, "added_tokens_decoder": listed, **changes}
    if form == "old":
        config |= dict.fromkeys([*names, "added_tokens_decoder"])
        flagged = {x["content"]: x for x in listed.values()}
        roles = {name: flagged.get(token) for name, token in names.items()}
        write(folder / "special_tokens_map.json", json.dumps(roles))
        beyond = {x.content: i for i, x in added.items() if i >= inner.get_vocab_size(False)}
        write(folder / "added_tokens.json", json.dumps(beyond))
    if form == "merges":
        state = json.loads(inner.to_str())["model"]
        write(folder / "vocab.json", json.dumps(state["vocab"]))
        write(folder / "merges.txt", "".join(f"{a} {b}\n" for a, b in state["merges"]))
    else:
        write(folder / "tokenizer.json", inner.to_str())
    write(folder / "config.json", json.dumps({"model_type": model_type}))
    config = {name: value for name, value in config.items() if value is not None}
    write(folder / "tokenizer_config.json", json.dumps(config))
    if form == "saved":
        auto().from_pretrained(folder).save_pretrained(folder)
    return folder


def auto():
    return pytest.importorskip("transformers").AutoTokenizer


CASES = [(family, form, {}) for family in FAMILIES for form in ("hub", "old", "saved", "flags")]
CASES += [
    ("llama_2", "hub", {"legacy": True}),
    ("llama_2", "hub", {"add_prefix_space": False}),
    # The post-processor decides.
    ("llama_2", "hub", {"add_bos_token": False, "add_eos_token": True}),
    ("llama_2", "hub", {"tokenizer_class": "LlamaTokenizerFast"}),
    ("llama_2", "hub", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ("llama_2", "old", {"tokenizer_class": None}),
    ("mistral", "hub", {"legacy": True}),
    ("llama_3", "hub", {"tokenizer_class": "LlamaTokenizer"}),
    ("gemma", "saved", {"tokenizer_class": None}),
    ("qwen_2_5", "merges", {}),
    ("qwen_3", "merges", {"tokenizer_class": None}),
    ("qwen_3", "merges", {"bos_token": "<|endoftext|>", "add_bos_token": True}),
    ("smollm_2", "merges", {"add_bos_token": True, "add_eos_token": True}),
]


@pytest.mark.parametrize(("family", "form", "changes"), CASES)
def test_ids_texts_and_names_are_those_of_transformers(tmp_path, family, form, changes):
    folder = write_folder(tmp_path, family, form, **changes)
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    names = list(ours.special.values())
    around = "".join(f"{name}fox {name} fox\n{name}{name}" for name in (*names, "<think>"))
    for text in (*AWKWARD, around, *names):
        ids = [*ours.prefix, *ours.encode_with_special(text), *ours.suffix]
        assert ids == theirs(text).input_ids, text
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        assert ours.decode(ids) == theirs.decode(ids, **options), text
        # A text with a name that is content takes another way.
        content = f"{text} {names[-1]}"
        assert ours.encode_marked(Marker(names).mark(content)).ids == ours.encode(content)
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token)
    assert set(theirs.all_special_tokens) <= set(names)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_sentencepiece_model_has_the_ids_of_its_library(tmp_path, kind, legacy):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type=kind, vocab_size=310,
        byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    write(tmp_path / "tokenizer.model", model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": legacy}
    write(tmp_path / "tokenizer_config.json", json.dumps(config))
    ours = load_tokenizer(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in AWKWARD:
        assert ours.encode(text) == ours.encode_with_special(text) == library.encode(text), text
        assert ours.decode(ours.encode(text)) == text.replace("▁", " ")
    if kind == "bpe":  # `transformers` makes BPE of both, and one space of several.
        theirs = auto().from_pretrained(tmp_path)
        for text in (*AWKWARD, "a</s>b</s>", "</s><s>", "<s>fox"):
            if "  " not in f" {text}" and "▁" not in text:
                ids = [*ours.prefix, *ours.encode_with_special(text)]
                assert ids == theirs(text).input_ids, text


# --- Chats. ---

CHATML = (
    *("'<|im_start|>system\\nYou.<|im_end|>\\n'", "'<|im_start|>user\\n' + c + '<|im_end|>\\n'"),
    *("'<|im_start|>assistant\\n'", "'<|im_end|>'", "'\\n'"),
)
HEADER = "'<|start_header_id|>{}<|end_header_id|>\\n\\n'"
CHATS = {
    "llama_2": ("bos_token", "'[INST] ' + c + ' [/INST]'", "' '", "' ' + eos_token", "''"),
    "llama_3": ("bos_token", HEADER.format("user") + " + c | trim + '<|eot_id|>'",
                HEADER.format("assistant"), "'<|eot_id|>'", "''"),
    "qwen_2_5": CHATML,
    "smollm_2": CHATML,
    "mistral": ("bos_token", "'[INST] ' + c + '[/INST]'", "' '", "eos_token", "''"),
    "gemma": ("bos_token", "'<start_of_turn>user\\n' + c | trim + '<end_of_turn>\\n'",
              "'<start_of_turn>model\\n'", "'<end_of_turn>'", "'\\n'"),
}  # fmt: skip
"""Expressions: the beginning, a question, what asks for an answer, the end of it, what follows."""
TEMPLATE = (
    "{{ 1st }}{% for m in messages %}{% set c = m.content %}{% if m.role == 'user' %}{{ 2nd }}"
    "{% else %}{{ 3rd }}{% generation %}{{ c + 4th }}{% endgeneration %}{{ 5th }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 3rd }}{% endif %}"
)
QWEN_3 = (
    "{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>assistant\\n' }}{% if loop.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


def talk(*contents: str, roles=("user", "assistant"), **fields) -> list[dict]:
    """Returns messages of both roles in turn; fields are of the last."""
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return [*turns[:-1], {**turns[-1], **fields}]


TALKS = (
    talk("Why 12?", "  Because\n\n 12. ", " So?\n", "日本 🙂"),
    talk("Hello", "x", "user", roles=("assistant", "user")),
    talk("yes", "yes", "yes", "yes yes"),
    talk("a", "b", "c"),
)


@pytest.mark.parametrize("family", CHATS)
def test_chats_have_the_ids_and_masks_of_transformers(tmp_path, family):
    """Without `{% generation %}` the same is learned, of what is up to the last answer."""
    folder = write_folder(tmp_path, family)
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    parts = dict(zip(("1st", "2nd", "3rd", "4th", "5th"), CHATS[family], strict=True))
    marked = re.sub(r"\d\w\w", lambda place: parts[place[0]], TEMPLATE)
    rows = write_rows(folder / "rows.jsonl", [{"messages": messages} for messages in TALKS])
    for template in (marked, re.sub("{% (end)?generation %}", "", marked)):
        write(folder / "chat_template.jinja", template)
        examples = open_path(rows, ours, folder=folder).train
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        for example, messages in zip(examples, TALKS, strict=True):
            want = theirs.apply_chat_template(messages, chat_template=marked, **options)
            ids, mask = want["input_ids"], want["assistant_masks"]
            count = len(example.tokens)
            assert example.tokens.tolist() == ids[:count]
            assert example.counted.tolist() == list(map(bool, mask[:count]))
            assert not any(mask[count:])
            assert count == len(ids) or template != marked


@pytest.mark.parametrize(
    ("messages", "arguments", "learned"),
    [
        (talk("Why?", "Because."), {}, ["Because."]),
        (talk("Why?", "hi"), {}, ["hi"]),  # Letters of <think>.
        (talk("Why?", ""), {}, [""]),
        (talk("Why?", "So.", reasoning_content="hm"), {}, ["<think>\nhm\n</think>\n\nSo."]),
        (talk("a", "b", "c", "d"), {}, ["b", "d"]),  # Earlier turns have no thought.
        (talk("a", "b", "c", "d", weight=0), {}, ["b"]),
        (talk("a", "b"), {"enable_thinking": False}, ["b"]),
    ],
)
def test_an_empty_thought_of_a_template_is_not_learned(tmp_path, messages, arguments, learned):
    folder = write_folder(tmp_path, "qwen_3")
    write(folder / "chat_template.jinja", QWEN_3)
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    row = {"messages": messages, "chat_template_kwargs": arguments}
    examples = open_path(write_rows(folder / "rows.jsonl", [row]), ours, folder=folder).train
    texts = [theirs.decode(example.tokens[example.counted]) for example in examples]
    assert texts == [f"{text}<|im_end|>" for text in learned]
    last = messages[: 2 * len(learned)]
    assert examples[-1].tokens.tolist() == theirs.apply_chat_template(last, return_dict=False)
