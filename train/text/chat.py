"""Chat templates of Hugging Face, in Jinja: they turn a conversation into text."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from train.text.tokenizer import Tokenizer

_TODAY = datetime.date(2024, 7, 26)
"""The date that templates get, Llama 3's default. With the present date the tokens would change
from day to day, and a run could not be resumed on the next day."""


class ChatTemplate:
    """A template that writes a conversation as text.

    Templates come with models, so they run in a sandbox and see only their arguments.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Reads the template.

        Args:
          source: the template, in Jinja.
          tokenizer: gives the names of the special tokens.

        Raises:
          ValueError: the source is not Jinja.
        """
        try:
            self._template = _chat_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the template: {error.message}") from error
        names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._tokens = {name: token for name, token in names.items() if token is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
    ) -> str:
        """Returns a conversation as text.

        Args:
          messages: each with `role` and `content`.
          add_generation_prompt: whether to end with the beginning of an answer of the assistant.
          tools: descriptions of functions that the assistant may call.

        Raises:
          ValueError: the template refuses the conversation, or fails.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # A template is a program: it may raise anything.
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template fails ({reason})") from error


def open_chat_template(
    path: pathlib.Path | None, tokenizer_path: pathlib.Path | None, tokenizer: Tokenizer
) -> ChatTemplate:
    """Reads a template from `path`, or from the folder of the tokenizer if `path` is None.

    Args:
      path: a file with the template, or a .json file with a "chat_template".
      tokenizer_path: a folder with a chat_template.jinja or a tokenizer_config.json, or a file in
        that folder.
      tokenizer: as for `ChatTemplate`.

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
            source = config.get("chat_template") if isinstance(config, dict) else None
            if isinstance(source, list):  # Several templates by name.
                source = {x["name"]: x["template"] for x in source}.get("default")
            if not isinstance(source, str):
                raise ValueError("it has no 'chat_template'")
        return ChatTemplate(source, tokenizer)
    except ValueError as error:
        raise ValueError(f"`--chat-template`: '{path}': {error}. Give another template.") from error


def _template_beside(tokenizer_path: pathlib.Path | None) -> pathlib.Path:
    if tokenizer_path is not None:
        path = tokenizer_path.expanduser()
        folder = path if path.is_dir() else path.parent
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            if (folder / name).is_file():
                return folder / name
    raise ValueError(
        f"there is no chat template in '{tokenizer_path}': neither a chat_template.jinja nor a"
        " tokenizer_config.json. Give `--chat-template FILE`."
    )


class _Generation(jinja2.ext.Extension):
    """Ignores `{% generation %}`, which marks the assistant's text in some templates."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _chat_environment() -> jinja2.Environment:
    """Returns the environment that `transformers.apply_chat_template` gives to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Without the HTML escapes of Jinja's filter.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
