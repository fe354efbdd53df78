"""Reading tokenizers: `tokenizer.json`, sentencepiece models, `vocab.json` with `merges.txt`.

The rules are those of `transformers` 5 for the same folder. Tokens before and after a text are
those of the post-processor in `tokenizer.json`; without this file, those of `add_bos_token` and
`add_eos_token`. `tokenizer_config.json` names the tokens, and `special_tokens_map.json` before it
in folders of the form that has no `added_tokens_decoder`.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from models.json_files import read_object
from models.plain_files import check_plain, read_text
from train.text.sentencepiece_tokenizer import SentencePieceTokenizer
from train.text.tokenizer import CONFIG, HuggingFaceTokenizer, Tokenizer
from train.text.tokenizer_trial import wrong_with
from train.text.trained_tokenizer import END_OF_TEXT, byte_level

KNOWN_EOS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
ACCEPTED = (
    "a tokenizer.json, a sentencepiece .model file, or a folder with one of these, or with "
    "vocab.json and merges.txt"
)
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLASS_NAMES: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "GPT2Tokenizer": {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT},
    "Qwen2Tokenizer": {"eos_token": END_OF_TEXT},
}
"""Names of tokens that a class of `transformers` has where no file gives them."""
_CLASSES = {
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    "gemma": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
}
"""Classes by the kind of the model, where no file names one."""


def load_tokenizer(path: pathlib.Path | str, flag: str = "--tokenizer") -> Tokenizer:
    """Reads a tokenizer: a tokenizer.json, a sentencepiece .model file, or the folder of one.

    A folder may instead have `vocab.json` and `merges.txt`, the latter with or without its
    `#version` line.

    Args:
      path: the file or folder.
      flag: flag of the path, for messages.

    Raises:
      FileNotFoundError: the path does not exist, or the folder has no tokenizer.
      ValueError: a file is damaged, or no token ends a document.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"`{flag}` is '{path}': no such path. Give {ACCEPTED}.")
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        files = [path / name for name in names if (path / name).exists()]
        if not files:
            there = ", ".join(sorted(p.name for p in path.iterdir())) or "nothing"
            raise FileNotFoundError(f"`{flag}` is '{path}': it has {there}. Give {ACCEPTED}.")
        path = files[0]
    try:
        return _read(path)
    except ValueError as error:
        raise ValueError(f"`{flag}` is '{path}': {error}") from error
    except Exception as error:  # `tokenizers` raises `Exception` itself.
        reason = " ".join(str(error).split())  # It may have several lines.
        raise ValueError(
            f"`{flag}` is '{path}': it cannot be read ({reason}). It may be truncated or of "
            f"another kind. Give {ACCEPTED}."
        ) from error


def tokenizer_of(checkpoint: pathlib.Path, path: pathlib.Path | None) -> Tokenizer:
    """Returns the tokenizer of a path, or that of the checkpoint if there is no path.

    Raises:
      ValueError: the checkpoint has no tokenizer, or it is damaged.
      OSError: a file that cannot be read.
    """
    if path is not None:
        return load_tokenizer(path)
    try:
        return load_tokenizer(checkpoint, "--checkpoint")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`--checkpoint` {checkpoint} has no tokenizer: pass `--tokenizer`: {ACCEPTED}."
        ) from error


_FEW, _SPARE = 0.9, 128
"""Models round the number of embeddings up, `train.pretrain` to a multiple of 128: a tokenizer uses
at least this share of them, or all but fewer than these."""


def fit_vocabulary(tokenizer: Tokenizer, flag: str, model: str, vocab_size: int) -> str:
    """Sets the limit of a tokenizer to the embeddings of a model.

    Args:
      tokenizer: the tokenizer; changed.
      flag: flag that gave it.
      model: name of the model.
      vocab_size: number of its embeddings.

    Returns:
      A line for the user if some added tokens have no embedding, else "". A text that holds one of
      them is refused.

    Raises:
      ValueError: other tokens than added ones have no embedding.
    """
    tokenizer.limit = vocab_size
    if tokenizer.vocab_size < min(_FEW * vocab_size, vocab_size - _SPARE + 1):
        return (
            f"warning: the tokenizer has {tokenizer.vocab_size:,} tokens, and {model} has"
            f" {vocab_size:,} embeddings: it may belong to another model"
        )
    if tokenizer.vocab_size <= vocab_size:
        return ""
    needed = (*tokenizer.prefix, *tokenizer.suffix, tokenizer.eos_id)
    base: int = getattr(tokenizer, "base_size", tokenizer.vocab_size)
    if base > vocab_size or max(needed) >= vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {model} has {vocab_size}: the"
            f" one of `{flag}` belongs to another model. Pass the tokenizer of this model by"
            " `--tokenizer`."
        )
    last = tokenizer.shown(tokenizer.vocab_size - 1)
    count = tokenizer.vocab_size - vocab_size
    return (
        f"{count} added token(s) of the tokenizer, such as {last}, have no embedding in {model}:"
        " a text that holds one is refused"
    )


def _read(path: pathlib.Path) -> Tokenizer:
    check_plain(path)
    folder = path.parent
    settings = _Settings(folder)
    settings.check_known(path)
    if path.suffix == ".model":
        return settings.checked(
            SentencePieceTokenizer(
                path.read_bytes(),
                add_bos=settings.flag("add_bos_token", True),
                add_eos=settings.flag("add_eos_token", False),
                legacy=settings.flag("legacy", True),
                source=settings.source(path),
            )
        )
    if path.suffix == ".bin":
        raise ValueError(
            "a tokenizer of llama2.c is no longer read. Give the sentencepiece .model file that"
            " it was exported from."
        )
    if path.name in ("vocab.json", "merges.txt"):
        inner = _read_vocab_and_merges(folder, settings)
        bos, eos = settings.names(inner)
        before = [bos] if bos and settings.flag("add_bos_token", False) else []
        after = [eos] if settings.flag("add_eos_token", False) else []
    else:
        if wrong := wrong_with(path):
            raise ValueError(f"it {wrong}. Give {ACCEPTED}.")
        inner = tokenizers.Tokenizer.from_file(str(path))
        if dropout := getattr(inner.model, "dropout", None):
            raise ValueError(
                f"it drops merges at random (`dropout` {dropout} in its model), so that a text has"
                " other tokens each time: set it to null."
            )
        _follow_class(inner, settings)
        settings.add_tokens(inner)
        before, after = _added_around(inner)
        bos, eos = settings.names(inner)
    inner = _with_special(inner, [bos, eos, *settings.other_special()])
    return HuggingFaceTokenizer(
        inner,
        eos=eos,
        bos=bos,
        prefix=before,
        suffix=after,
        source=settings.source(path),
        files=settings.files(),
    )


_OF_THE_MODEL = ("config.json", "generation_config.json")


class _Settings:
    """The settings of a tokenizer in the files beside it.

    Attributes:
      config: `tokenizer_config.json` with `special_tokens_map.json` where that comes first.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._read = folder, list[str]()
        self.config = self._object(CONFIG)
        if "added_tokens_decoder" not in self.config:
            self.config |= self._object("special_tokens_map.json")

    def _object(self, name: str) -> dict[str, Any]:
        if not (self._folder / name).exists():
            return {}
        if name not in _OF_THE_MODEL:
            self._read.append(name)
        return read_object(self._folder / name)

    def files(self) -> dict[str, str]:
        """Returns the texts of the files that belong to a tokenizer wherever it is saved."""
        files = {CONFIG: json.dumps(self.config)} if self.config else {}
        template = self._folder / "chat_template.jinja"
        return files | ({template.name: read_text(template)} if template.exists() else {})

    def source(self, path: pathlib.Path) -> str:
        """Returns the names of the files that were read."""
        return ", ".join(dict.fromkeys([path.name, *self._read]))

    @property
    def class_name(self) -> str:
        """The class of the tokenizer in `transformers`, or ""."""
        name = self.config.get("tokenizer_class") or _CLASSES.get(self.model_type, "")
        if not isinstance(name, str):
            raise ValueError(f"its `tokenizer_class` must be a name, got {name!r}.")
        return name.removesuffix("Fast")

    @property
    def model_type(self) -> str:
        """The kind of the model, or ""."""
        return str(self._object("config.json").get("model_type") or "")

    def names(self, inner: tokenizers.Tokenizer) -> tuple[str | None, str]:
        """Returns the names of the tokens at the beginning (or None) and the end of a document.

        Raises:
          ValueError: no token ends a document, or a named token is not in the vocabulary.
        """
        bos, eos = (self._name(inner, kind) for kind in ("bos", "eos"))
        if eos is None:
            known = (name for name in KNOWN_EOS if inner.token_to_id(name) is not None)
            eos = next(known, None)
        if eos is None:
            raise ValueError(
                f"no token ends a document: none of {', '.join(KNOWN_EOS)} is in its vocabulary."
                " Name the token as eos_token in a tokenizer_config.json next to it."
            )
        for kind, token in (("eos_token", eos), ("bos_token", bos)):
            if token is not None and inner.token_to_id(token) is None:
                raise ValueError(f"its {kind} {token!r} is not in its vocabulary. Correct it.")
        return bos, eos

    def _name(self, inner: tokenizers.Tokenizer, kind: str) -> str | None:
        """Returns the name of a token: of the files, else of the class, else by the model's id."""
        if f"{kind}_token" in self.config:
            return _content(self.config[f"{kind}_token"])
        usual = _CLASS_NAMES.get(self.class_name, {}).get(f"{kind}_token")
        if usual is not None and inner.token_to_id(usual) is not None:
            return usual
        for name in ("generation_config.json", "config.json"):
            index = self._object(name).get(f"{kind}_token_id")
            index = index[0] if isinstance(index, list) and index else index
            if isinstance(index, int) and (token := inner.id_to_token(index)) is not None:
                return token
        return None

    def other_special(self) -> list[str]:
        """Returns the names of further special tokens."""
        extra: list[Any] = []
        for name in ("extra_special_tokens", "additional_special_tokens"):
            tokens = self.config.get(name) or []
            if not isinstance(tokens, list | dict):
                raise ValueError(f"its `{name}` must be a list of tokens, got {tokens!r}.")
            extra += tokens.values() if isinstance(tokens, dict) else tokens
        kinds = ("pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
        named = [self.config.get(kind) for kind in kinds]
        return [name for token in (*named, *extra) if (name := _content(token)) is not None]

    def flag(self, name: str, default: bool, null: bool = False) -> bool:
        """Returns a setting that is true or false.

        Args:
          name: its name.
          default: what it is where it is missing.
          null: what it is where it is null.
        """
        value = self.config.get(name, default)
        if not isinstance(value, bool | None):
            raise ValueError(f"its `{name}` must be true or false, got {value!r}.")
        return null if value is None else value

    def check_known(self, path: pathlib.Path) -> None:
        """Raises a `ValueError` for a setting that changes ids and is not followed here."""
        fixed: dict[str, bool] = {"split_special_tokens": False}
        if path.suffix == ".model":
            fixed["add_prefix_space"] = True
        elif self.class_name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
            fixed["add_prefix_space"] = False
        for name, value in fixed.items():
            if self.config.get(name) not in (None, value):
                raise ValueError(
                    f"`{name}` in its tokenizer_config.json is {self.config[name]!r}: only"
                    f" {str(value).lower()} is supported."
                )

    def checked(self, tokenizer: SentencePieceTokenizer) -> SentencePieceTokenizer:
        """Returns a tokenizer, after a check that the files list no token that it lacks.

        Raises:
          ValueError: they list one.
        """
        for index, token in self._listed().items():
            if int(index) >= tokenizer.vocab_size:
                raise ValueError(
                    f"the files beside it add {_content(token)!r}, which it lacks: write a"
                    " tokenizer.json there (`save_pretrained` of the tokenizer in transformers)."
                )
        return tokenizer

    def _listed(self) -> dict[str, Any]:
        """Returns the tokens that the files list beside those of the vocabulary, by id."""
        added = dict(self.config.get("added_tokens_decoder") or {})
        if not added:
            special = {_content(self.config.get(kind)) for kind in ("bos_token", "eos_token")}
            special |= set(self.other_special())
            for name, index in self._object("added_tokens.json").items():
                flags = {"special": name in special, "normalized": name not in special}
                added[str(index)] = {"content": name, **flags}
        return added

    def add_tokens(self, inner: tokenizers.Tokenizer) -> None:
        """Adds the tokens that the files list beside those of the vocabulary.

        Raises:
          ValueError: a token does not get its listed id.
        """
        added = self._listed()
        present = inner.get_added_tokens_decoder()
        for index, token in sorted(added.items(), key=lambda item: int(item[0])):
            if int(index) in present:
                continue
            options = ("single_word", "lstrip", "rstrip", "normalized", "special")
            wanted = {name: token[name] for name in options if name in token}
            inner.add_tokens([tokenizers.AddedToken(token["content"], **wanted)])
            got = inner.token_to_id(token["content"])
            if got != int(index):
                raise ValueError(
                    f"tokenizer_config.json gives {token['content']!r} the id {index}, but after"
                    f" the vocabulary it is {got}. The two files belong to different tokenizers."
                )


def _content(token: Any) -> str | None:
    """Returns the name of a token, which old files hold as an object."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _with_special(inner: tokenizers.Tokenizer, names: list[str | None]) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose named tokens are special, whatever its file says of them."""
    wanted = {name for name in names if name is not None and inner.token_to_id(name) is not None}
    present = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    if any(not token.special for name, token in present.items() if name in wanted):
        # The library has no call that changes a token.
        state = json.loads(inner.to_str())
        for token in state["added_tokens"]:
            token["special"] |= token["content"] in wanted
        inner = tokenizers.Tokenizer.from_str(json.dumps(state))
    new = sorted(wanted - present.keys())
    inner.add_special_tokens([tokenizers.AddedToken(x, normalized=False) for x in new])
    return inner


def _added_around(inner: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """Returns the names of the tokens that the post-processor adds before and after a text."""
    if inner.post_processor is None:
        return [], []
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    encoding = inner.encode("a")
    mask = encoding.special_tokens_mask
    if 0 not in mask:
        return [], []
    first, last = mask.index(0), len(mask) - mask[::-1].index(0)
    return encoding.tokens[:first], encoding.tokens[last:]


def _follow_class(inner: tokenizers.Tokenizer, settings: _Settings) -> None:
    """Splits text as the class `LlamaTokenizer` of `transformers` 5 does, whatever the file says.

    The class writes a space at the beginning of a text, and with `legacy` after each special token.
    """
    is_bytes = isinstance(inner.decoder, decoders.ByteLevel)
    kind = settings.model_type
    if settings.class_name != "LlamaTokenizer" or is_bytes or kind == "mistral":
        return
    space, legacy = (
        settings.flag("add_prefix_space", True, null=True),
        settings.flag("legacy", False),
    )
    first = "always" if legacy else "first"
    scheme = first if space else "never"
    inner.normalizer = None  # type: ignore[assignment]
    inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(parts)


def _read_vocab_and_merges(directory: pathlib.Path, settings: _Settings) -> tokenizers.Tokenizer:
    for name in ("vocab.json", "merges.txt"):
        if not (directory / name).exists():
            raise ValueError(f"there is no {name} next to it. Both files are needed.")
    vocabulary = json.loads(read_text(directory / "vocab.json"))
    inner = byte_level(models.BPE(vocabulary, _read_merges(directory / "merges.txt")))
    if settings.class_name == "Qwen2Tokenizer":
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_PATTERN), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    settings.add_tokens(inner)
    return inner


def _read_merges(path: pathlib.Path) -> list[tuple[str, str]]:
    """Returns the pairs in `path`, in order, without a first line `#version...`."""
    pairs = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line and not (number == 1 and line.startswith("#version")):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise ValueError(f"merges.txt line {number} is {line!r}: two tokens are needed.")
            pairs.append(pair)
    return pairs
