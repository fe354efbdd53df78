"""Tokenizers with the settings of well-known models: ids, texts and chats as `transformers` has."""

import functools
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
LLAMA, IM = ["<unk>", "<s>", "</s>"], ["<|im_start|>", "<|im_end|>"]
FLAGGED = [
    AddedToken("<|l|>", lstrip=True, normalized=False),
    AddedToken("<|r|>", rstrip=True, normalized=False),
    AddedToken("<|w|>", single_word=True, normalized=False),
    AddedToken("<|n|>", normalized=True),
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# --- Tokenizers, each with its configuration. ---


def new(model, special, splitter, normalizer=None, decoder=None, bos=None):
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.normalizer, inner.decoder = splitter, normalizer, decoder
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    if bos is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return inner


def settings(kind: str, bos, eos, **others) -> dict:
    return {"tokenizer_class": kind, "bos_token": bos, "eos_token": eos, **others}


def pairs(splitter, first=(), **options) -> models.BPE:
    """Returns trained BPE that begins with some tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = splitter
    options_of_training = {"show_progress": False, "special_tokens": list(first)}
    if not first:
        options_of_training["initial_alphabet"] = sorted(splitters.ByteLevel.alphabet())
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, **options_of_training))
    state = json.loads(inner.to_str())["model"]
    return models.BPE(state["vocab"], list(map(tuple, state["merges"])), **options)


def with_fallback(special, splitter=None, normalizer=None, strip=True, others=()):
    first = [*special, *(f"<0x{i:02X}>" for i in range(256))]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    model = pairs(splitters.Metaspace(), first, **options)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * strip])
    return new(model, [*special, *others], splitter, normalizer, decoder, bos=special[1])


def of_bytes(splitter, special, normalizer=None, bos=None, **options):
    model = pairs(splitter, **options)
    return new(model, special, splitter, normalizer, decoders.ByteLevel(), bos)


def isolated(digits: str):
    split = splitters.Split(tokenizers.Regex(SPLIT % digits), "isolated")
    return splitters.Sequence([split, splitters.ByteLevel(False, use_regex=False)])


def llama_2():
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner = with_fallback(LLAMA, normalizer=normalizers.Sequence(parts))
    return inner, settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", legacy=True)


def llama_3():
    names = [f"<|{x}|>" for x in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")]
    inner = of_bytes(isolated("{1,3}"), names, bos=names[0], ignore_merges=True)
    places = processors.ByteLevel(trim_offsets=False)
    inner.post_processor = processors.Sequence([places, inner.post_processor])
    return inner, settings("PreTrainedTokenizerFast", names[0], "<|eot_id|>")


def qwen(*letters):
    inner = of_bytes(isolated(""), ["<|endoftext|>", *IM], normalizers.NFC())
    inner.post_processor = processors.ByteLevel()
    inner.add_tokens([AddedToken(name, normalized=False) for name in letters])
    return inner, settings("Qwen2Tokenizer", None, IM[1], pad_token="<|endoftext|>")


def smollm_2():
    splitter = splitters.Sequence([splitters.Digits(True), splitters.ByteLevel(False)])
    inner = of_bytes(splitter, ["<|endoftext|>", *IM])
    return inner, settings("GPT2Tokenizer", *IM, unk_token="<|endoftext|>")


def mistral():
    splitter = splitters.Metaspace("▁", "first", split=False)
    inner = with_fallback(LLAMA, splitter, others=["[INST]", "[/INST]"])
    return inner, settings("LlamaTokenizer", "<s>", "</s>", unk_token="<unk>", legacy=False)


def gemma():
    special = [f"<{x}>" for x in ("pad", "bos", "eos", "unk", "mask")]
    splitter, normalizer = (
        splitters.Split(" ", "merged_with_previous"),
        normalizers.Replace(" ", "▁"),
    )
    turns = ["<start_of_turn>", "<end_of_turn>"]
    inner = with_fallback(special, splitter, normalizer, strip=False, others=turns)
    return inner, settings("GemmaTokenizer", "<bos>", "<eos>", pad_token="<pad>", unk_token="<unk>")


def generic(model, trainer, splitter, decoder=None, normalizer=None, **options):
    inner = tokenizers.Tokenizer(model())
    inner.pre_tokenizer = splitter
    options = {"vocab_size": 300, "special_tokens": LLAMA, "show_progress": False, **options}
    inner.train_from_iterator(TEXTS, trainer(**options))
    if model is not models.Unigram:
        inner.model.unk_token = "<unk>"
    inner = new(inner.model, LLAMA, splitter, normalizer, decoder, bos="<s>")
    return inner, settings("PreTrainedTokenizerFast", "<s>", "</s>")


FAMILIES = {
    "llama_2": (llama_2, "llama"),
    "llama_3": (llama_3, "llama"),
    "qwen_2_5": (qwen, "qwen2"),
    "qwen_3": (functools.partial(qwen, "<think>", "</think>"), "qwen3"),
    "smollm_2": (smollm_2, "llama"),
    "mistral": (mistral, "mistral"),
    "gemma": (gemma, "gemma"),
    "unigram": (functools.partial(
        generic, models.Unigram, trainers.UnigramTrainer, splitters.Metaspace(),
        decoders.Metaspace(), unk_token="<unk>"), "llama"),
    "word_piece": (functools.partial(
        generic, models.WordPiece, trainers.WordPieceTrainer, splitters.BertPreTokenizer(),
        decoders.WordPiece(), normalizers.BertNormalizer()), "llama"),
    "word_level": (functools.partial(
        generic, models.WordLevel, trainers.WordLevelTrainer, splitters.Whitespace()), "llama"),
}  # fmt: skip


def write_folder(folder: pathlib.Path, family: str, form: str = "hub", **changes) -> pathlib.Path:
    """Writes the files of a tokenizer, with changes of its configuration (None removes)."""
    make, model_type = FAMILIES[family]
    inner, config = make()
    if form == "flags":
        inner.add_special_tokens(FLAGGED)
    added = inner.get_added_tokens_decoder()
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    listed = {i: {flag: getattr(token, flag) for flag in flags} for i, token in added.items()}
    config |= {"added_tokens_decoder": {str(i): token for i, token in listed.items()}, **changes}
    config = {name: value for name, value in config.items() if value is not None}
    if form == "old":
        del config["added_tokens_decoder"]
        names = [name for name in config if name.endswith("_token")]
        flagged = {
            x["content"]: {k: v for k, v in x.items() if k != "special"} for x in listed.values()
        }
        roles = {name: flagged.get(config.pop(name)) for name in names}
        write(folder / "special_tokens_map.json", json.dumps(roles))
        beyond = {t.content: i for i, t in added.items() if i >= inner.get_vocab_size(False)}
        write(folder / "added_tokens.json", json.dumps(beyond))
    if form == "merges":
        state = json.loads(inner.to_str())["model"]
        write(folder / "vocab.json", json.dumps(state["vocab"]))
        write(folder / "merges.txt", "".join(f"{a} {b}\n" for a, b in state["merges"]))
    else:
        write(folder / "tokenizer.json", inner.to_str())
    write(folder / "config.json", json.dumps({"model_type": model_type}))
    write(folder / "tokenizer_config.json", json.dumps(config))
    if form == "saved":
        auto().from_pretrained(folder).save_pretrained(folder)
    return folder


def auto():
    return pytest.importorskip("transformers").AutoTokenizer


def check(folder: pathlib.Path, texts) -> None:
    """Compares texts, also with the names of special tokens, and these names."""
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    names = list(ours.special.values())
    around = "".join(f"{name}fox {name} fox\n{name}{name}" for name in (*names, "<think>"))
    for text in (*texts, around, *names):
        ids = [*ours.prefix, *ours.encode_with_special(text), *ours.suffix]
        assert ids == theirs(text).input_ids, text
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        assert ours.decode(ids) == theirs.decode(ids, **options), text
    assert (ours.eos_token, ours.bos_token) == (theirs.eos_token, theirs.bos_token)
    assert set(theirs.all_special_tokens) <= set(names)


@pytest.mark.parametrize("form", ["hub", "old", "saved", "flags"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_have_the_ids_of_transformers(tmp_path, family, form):
    check(write_folder(tmp_path, family, form), AWKWARD)


@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        ("llama_2", "hub", {"legacy": False}),
        ("llama_2", "hub", {"legacy": None}),
        ("llama_2", "hub", {"add_prefix_space": False}),
        ("llama_2", "hub", {"add_bos_token": False}),  # The post-processor decides.
        ("llama_2", "hub", {"add_eos_token": True}),
        ("llama_2", "hub", {"tokenizer_class": "LlamaTokenizerFast"}),
        ("llama_2", "hub", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("llama_2", "old", {"tokenizer_class": None}),
        ("mistral", "hub", {"legacy": True}),
        ("llama_3", "hub", {"tokenizer_class": "LlamaTokenizer"}),
        ("qwen_3", "hub", {"tokenizer_class": None}),
        ("gemma", "saved", {"tokenizer_class": None}),
        ("qwen_2_5", "merges", {}),
        ("qwen_3", "merges", {"tokenizer_class": None}),
        ("qwen_3", "merges", {"bos_token": "<|endoftext|>", "add_bos_token": True}),
        ("qwen_3", "merges", {"add_eos_token": True}),
        ("smollm_2", "merges", {"add_bos_token": True}),
    ],
)
def test_settings_have_the_meaning_that_they_have_in_transformers(tmp_path, family, form, changes):
    check(write_folder(tmp_path, family, form, **changes), AWKWARD)


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
    config = settings("LlamaTokenizer", "<s>", "</s>", add_bos_token=True, legacy=legacy)
    write(tmp_path / "tokenizer_config.json", json.dumps(config))
    ours = load_tokenizer(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in AWKWARD:
        assert ours.encode(text) == ours.encode_with_special(text) == library.encode(text), text
        assert ours.decode(ours.encode(text)) == text.replace("▁", " ")
    if kind == "bpe":  # `transformers` makes BPE of both. It loses a space where two are.
        theirs, texts = auto().from_pretrained(tmp_path), [t for t in AWKWARD if "▁" not in t]
        for text in (*texts, "a</s>b</s>", "</s><s>", "<s>fox"):
            if "  " not in f" {text}":
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
"""Template expressions: the beginning, a question, what asks for an answer, its end, and the rest."""
TEMPLATE = (
    "{{{{ {} }}}}{{% for m in messages %}}{{% set c = m.content %}}{{% if m.role == 'user' %}}"
    "{{{{ {} }}}}{{% else %}}{{{{ {asks} }}}}{{% generation %}}{{{{ c + {} }}}}{{% endgeneration %}}"
    "{{{{ {} }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {asks} }}}}{{% endif %}}"
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
    *(talk("Why?", "Because."), talk("Why 12?", "  Because\n\n 12. ", " So?\n", "Yes")),
    *(
        talk("Hello", "x", "user", roles=("assistant", "user")),
        talk("yes", "yes", "yes", "yes yes"),
    ),
    *(talk("a", "b", "c"), talk("é", "日本 🙂")),
)


@pytest.mark.parametrize("family", CHATS)
def test_chats_have_the_ids_and_masks_of_transformers(tmp_path, family):
    """Without `{% generation %}` the same is learned, of what is up to the last answer."""
    folder = write_folder(tmp_path, family)
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    first, ask, asks, end, rest = CHATS[family]
    marked = TEMPLATE.format(first, ask, end, rest, asks=asks)
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
    ("row", "learned"),
    [
        ({"messages": talk("Why?", "Because.")}, ["Because."]),
        ({"messages": talk("Why?", "hi")}, ["hi"]),  # Letters of <think>.
        ({"messages": talk("Why?", "think>")}, ["think>"]),
        ({"messages": talk("Why?", "")}, [""]),
        (
            {"messages": talk("Why?", "So.", reasoning_content="hm")},
            ["<think>\nhm\n</think>\n\nSo."],
        ),
        ({"messages": talk("Why?", "So.", thinking="hm")}, ["<think>\nhm\n</think>\n\nSo."]),
        ({"messages": talk("a", "b", "c", "d")}, ["b", "d"]),  # Earlier turns have no thought.
        ({"messages": talk("a", "b", "c", "d", weight=0)}, ["b"]),
        ({"messages": talk("a", "b"), "chat_template_kwargs": {"enable_thinking": False}}, ["b"]),
    ],
)
def test_an_empty_thought_of_a_template_is_not_learned(tmp_path, row, learned):
    folder = write_folder(tmp_path, "qwen_3")
    write(folder / "chat_template.jinja", QWEN_3)
    ours, theirs = load_tokenizer(folder), auto().from_pretrained(folder)
    examples = open_path(write_rows(folder / "rows.jsonl", [row]), ours, folder=folder).train
    texts = [theirs.decode(example.tokens[example.counted]) for example in examples]
    assert texts == [f"{text}<|im_end|>" for text in learned]
    whole = theirs.apply_chat_template(row["messages"], return_dict=False)
    if "thinking" not in row["messages"][-1] and row["messages"][-1].get("weight") != 0:
        assert examples[-1].tokens.tolist() == whole
