"""Chat templates of Hugging Face, in Jinja: they turn a conversation into text."""

import datetime
import functools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from models.json_files import read_object
from train.text.tokenizer import CONFIG, Tokenizer

_TODAY = datetime.date(2024, 7, 26)
"""The date that templates get, Llama 3's default. With the present date the tokens would change
from day to day, and a run could not be resumed on the next day."""
_BEGIN, _END = "\ufdd2", "\ufdd3"
"""Enclose the text of `{% generation %}` blocks until their places are known."""
_DEFAULT = "default"


class ChatTemplate:
    """A template that writes a conversation as text.

    Templates come with models, so they run in a sandbox and see only their arguments.

    Attributes:
      source: the template.
      marks_answers: whether `{% generation %}` encloses the answers of the assistant.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Reads the template.

        Args:
          source: the template, in Jinja.
          tokenizer: gives the names of the special tokens.
          arguments: further arguments of the template, such as `enable_thinking`.

        Raises:
          ValueError: the source is not Jinja.
        """
        try:
            self._template = _chat_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the template: {error.message}") from error
        except RecursionError as error:
            raise ValueError("the template is nested too deeply") from error
        self.source = source
        self.marks_answers = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        tokens = {name: token for name, token in names.items() if token is not None}
        self._arguments = {**tokens, **(arguments or {})}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns a conversation as text; see `render_answers`."""
        return self.render_answers(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, arguments=arguments
        )[0]

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns a conversation as text, and the places of its `{% generation %}` blocks.

        Args:
          messages: each with `role` and `content`.
          add_generation_prompt: whether to end with the beginning of an answer of the assistant.
          tools: descriptions of functions that the assistant may call.
          arguments: further arguments, before those of the template.

        Raises:
          ValueError: the template refuses the conversation, or fails.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._arguments, **(arguments or {})},
            )
        except Exception as error:  # A template is a program: it may raise anything.
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the chat template (`--chat-template`) fails on it ({reason})"
            ) from error
        places, letters, length = list[int](), [], 0
        for part in re.split(f"[{_BEGIN}{_END}]", text):
            letters.append(part)
            length += len(part)
            places.append(length)
        inner = places[:-1]
        return "".join(letters), list(zip(inner[::2], inner[1::2], strict=False))


def open_chat_template(
    path: pathlib.Path | None,
    tokenizer_path: pathlib.Path | None,
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Reads a template from `path`, or from the folder of the tokenizer if `path` is None.

    In the folder, `chat_template.jinja` comes before the "chat_template" of
    `tokenizer_config.json`, which is one template, a list of named ones, or an object of them; of
    several, the one named "default".

    Args:
      path: a file with the template, or a .json file with a "chat_template".
      tokenizer_path: a folder with the files of a tokenizer, or a file in that folder.
      tokenizer: as for `ChatTemplate`.
      arguments: as for `ChatTemplate`.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: there is no template, or it is not Jinja.
    """
    if path is None:
        path = _template_beside(tokenizer_path)
    elif not path.expanduser().is_file():
        raise FileNotFoundError(f"`--chat-template` is '{path}': there is no such file.")
    try:
        source = path.expanduser().read_text(encoding="utf-8")
        if path.suffix == ".json":
            config = json.loads(source)
            source = _default_of(config.get("chat_template") if isinstance(config, dict) else None)
        return ChatTemplate(source, tokenizer, arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`--chat-template`: '{path}': {error}. Give another template.") from error


def _default_of(templates: Any) -> str:
    """Returns the template of a "chat_template": a text, a list of named ones, or an object."""
    if isinstance(templates, list) and all(isinstance(x, Mapping) for x in templates):
        templates = {x.get("name"): x.get("template") for x in templates}
    if isinstance(templates, Mapping):
        named = ", ".join(map(repr, templates)) or "none"
        if _DEFAULT not in templates:
            raise ValueError(f"its 'chat_template' has {named}, and none is named 'default'")
        templates = templates[_DEFAULT]
    if not isinstance(templates, str):
        raise ValueError("it has no 'chat_template' that is a text, or has one by name")
    return templates


def _template_beside(tokenizer_path: pathlib.Path | None) -> pathlib.Path:
    if tokenizer_path is not None:
        path = tokenizer_path.expanduser()
        folder = path if path.is_dir() else path.parent
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
            file = folder / name
            if file.is_file() and (name != CONFIG or "chat_template" in read_object(file)):
                return file
        others = sorted(folder.glob("additional_chat_templates/*.jinja"))
        if others:
            raise ValueError(
                f"'{folder}' has no default chat template, only {', '.join(x.stem for x in others)}"
                f": choose one, such as `--chat-template {others[0]}`."
            )
    raise ValueError(
        f"there is no chat template in '{tokenizer_path}', as beside a model that learned no chats:"
        " neither a chat_template.jinja nor a 'chat_template' in its tokenizer_config.json. Give"
        " `--chat-template FILE`, or records with prompts and completions."
    )


def template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the values of `--template-argument name=value`: JSON, or else text.

    Raises:
      ValueError: an argument without name or value.
    """
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(
                f"`--template-argument` must be name=value, such as enable_thinking=false, got"
                f" {text!r}."
            )
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


class _Generation(jinja2.ext.Extension):
    """Encloses the text of `{% generation %}`, which marks the assistant's text, in `_BEGIN`."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [jinja2.nodes.Output([jinja2.nodes.TemplateData(x)], lineno=line) for x in _ENDS]
        return [ends[0], *body, ends[1]]


_ENDS = (_BEGIN, _END)


class _Objects:
    """`dict(...)` in templates, without the methods of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[str, Any]:
        return dict(*args, **values)


@functools.cache
def _chat_environment() -> jinja2.Environment:
    """Returns the environment that `transformers.apply_chat_template` gives to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    environment.globals["dict"] = _Objects()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    **options: Any,
) -> str:
    """Returns JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **options
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
