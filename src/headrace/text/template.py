"""Chat templates: Jinja from the model's files, rendered in a sandbox as Hugging Face models expect.

Contract of templates (Hugging Face's chat template documentation): blocks are trimmed, `messages`, `tools`,
`documents`, `add_generation_prompt` and the special tokens are variables, and `raise_exception`, `strftime_now`,
`tojson`, loop controls and `generation` blocks exist. Rendered text holds its special tokens, so it is tokenised with
`add_special_tokens=False`: the template owns BOS.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.hub.config import read_json
from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.source import ModelSource
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError", "load_chat_template"]

logger = logging.getLogger(__name__)

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_GGUF_KEY = "tokenizer.chat_template"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>")
_PROBE = "headrace-probe"
MAX_RENDER_S = 10.0
"""Of one chat; a worker is held for it."""


class TemplateError(ValueError):
    """A chat can't be rendered: the template's own message, or what is wrong with the template or its inputs."""


class ChatTemplate:
    """The chat templates of one model by name; usually there is one, `default`, and sometimes `tool_use`.

    A model without a template has an object whose `render` says so.
    """

    def __init__(self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str], name: str = "") -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._name = name
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def is_present(self) -> bool:
        return bool(self._sources)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special_tokens

    @property
    def source(self) -> str:
        """The default template's text, or ''."""
        return self._sources.get(_DEFAULT, next(iter(self._sources.values()), ""))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, special tokens included. `extra` are further variables of the template.

        Keys of a message that are None are left out, as if they had not been given.

        Raises:
            TemplateError: no template, the template refused the messages, it is broken, or it takes too long.
        """
        compiled = self._compile(_TOOL_USE if tools and _TOOL_USE in self._sources else _DEFAULT)
        variables = {
            **self._special_tokens,
            **_plain_dict(extra or {}),
            "messages": [_message(message) for message in messages],
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _written(compiled, variables)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except Exception as error:  # templates fail in any way on messages that they don't expect
            raise TemplateError(f"the chat template can't take these messages ({error})") from error

    @cached_property
    def takes_parts(self) -> bool:
        """Whether `content` may be a list of parts; otherwise only text is understood."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            rendered = self.render([{"role": "user", "content": parts}])
        except TemplateError:
            return False
        return _PROBE in rendered and "'text'" not in rendered and '"text"' not in rendered

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether the arguments of past calls must be JSON text; most templates want objects, which they write out."""
        as_object, as_text = ({_PROBE: 1}, f'{{"{_PROBE}": 1}}')
        try:
            rendered = self.render(_probe_call(as_object))
        except TemplateError:
            rendered = f"'{_PROBE}'"
        if f"'{_PROBE}'" not in rendered:
            return False
        try:
            return _PROBE in self.render(_probe_call(as_text))
        except TemplateError:
            return False

    def unknown_tokens(self, tokenizer: Tokenizer) -> list[str]:
        """Control tokens written in the template that the tokenizer doesn't have as one id: a sign that they don't
        belong together, though some models spell such markers as ordinary text."""
        written = sorted({token for text in self._sources.values() for token in _CONTROL_TOKEN.findall(text)})
        return [token for token in written if len(tokenizer.encode(token, add_special_tokens=False)) != 1]

    def check(self) -> None:
        """Raises TemplateError if the syntax of a template is broken."""
        for which in self._sources:
            self._compile(which)

    def _compile(self, which: str) -> jinja2.Template:
        if not self._sources:
            raise TemplateError(
                f"{self._name or 'the model'} has no chat template: give one with --chat_template of"
                " 'headrace serve', or complete plain text ('headrace generate', /v1/completions)"
            )
        compiled = self._compiled.get(which)
        if compiled is None:
            try:
                compiled = _environment().from_string(self._sources.get(which, self.source))
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
            self._compiled[which] = compiled
        return compiled


def _written(compiled: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Piece by piece, so that a template that writes without end is stopped."""
    deadline_s = time.monotonic() + MAX_RENDER_S
    pieces: list[str] = []
    for piece in compiled.generate(variables):
        if time.monotonic() > deadline_s:
            raise TemplateError(f"the chat template took longer than {MAX_RENDER_S:g} s: send shorter messages")
        pieces.append(piece)
    return "".join(pieces)


def _probe_call(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def load_chat_template(
    source: ModelSource, *, special_tokens: Mapping[str, str], override: str | None = None
) -> ChatTemplate:
    """The model's template, or `override`: a file's path, or a template itself.

    `special_tokens` are the tokenizer's. In a Hugging Face folder chat_template.jinja wins over chat_template.json and
    those over tokenizer_config.json. A model's own template that is broken is a warning.

    Raises:
        ModelError: an unreadable file.
        TemplateError: `override` is broken.
    """
    if override is not None:
        given = ChatTemplate({_DEFAULT: _read_override(override)}, special_tokens=special_tokens, name=source.name)
        given.check()
        return given
    if source.kind == "gguf":
        templates = _from_gguf(GgufFile(source.path).metadata)
    else:
        templates = _from_folder(source.path)
    found = ChatTemplate(templates, special_tokens=special_tokens, name=source.name)
    try:
        found.check()
    except TemplateError as error:  # prompts still work
        logger.warning("%s: %s: chats will be refused; give another one with --chat_template", source.path, error)
    return found


def _read_override(override: str) -> str:
    if any(mark in override for mark in ("{{", "{%", "\n")):
        return override
    return _read_text(Path(override).expanduser())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"chat template {path} can't be read ({reason}): give a Jinja file or the template") from None


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == _GGUF_KEY or key.startswith(f"{_GGUF_KEY}.")):
            found[key[len(_GGUF_KEY) + 1 :] or _DEFAULT] = value
    return found


def _from_folder(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            found |= _named_templates(read_json(folder / name).get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        found[_DEFAULT] = _read_text(folder / "chat_template.jinja")
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _named_templates(value: Any) -> dict[str, str]:
    """One template, or a list of {name, template}."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError):
        raise ModelError(
            "chat_template must be a template or a list of {name, template}: fetch the model again"
        ) from None


def _message(message: Any) -> dict[str, Any]:
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise TemplateError(f"messages: each message must be an object, not {type(message).__name__}")
    kept = {key: value for key, value in cast("dict[str, Any]", plain).items() if value is not None}
    # Templates read a message's reasoning under one name or another.
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _plain_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _plain(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """JSON values only, so that a template gets no object with methods. Anything else becomes the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum: its value
    if isinstance(value, int | float):
        return value.__int__() if isinstance(value, int) else value.__float__()
    if isinstance(value, Mapping):
        return _plain_dict(cast("Mapping[str, Any]", value))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    dump = getattr(value, "model_dump", None)
    return _plain(dump()) if callable(dump) else f"<{type(value).__name__}>"


def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must not have."""
    pair = None if separators is None else cast("tuple[str, str]", tuple(separators))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
