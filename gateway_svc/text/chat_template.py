"""A checkpoint's chat template: where it is stored, the sandbox it runs in, and how a conversation is rendered.

Owns Jinja2 and the conventions that published templates rely on (trimmed blocks, `raise_exception`, `strftime_now`,
an unescaped `tojson`, `{% generation %}`). A template comes from the checkpoint and its inputs from a client, so it
runs in an immutable sandbox over plain JSON values. Knows nothing of tokens or media bytes. Any thread may render.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import msgspec
from jinja2.nodes import Const, Node, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest

# What a template may raise over a client's values: its own refusals, and whatever odd types provoke.
_RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Conversation:
    """What a template sees. Messages are plain dictionaries without absent keys; media parts hold no media."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class _Refused(jinja2.TemplateError):
    """The template itself called `raise_exception`: its text is meant for the client."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks a training mask in some templates; for inference its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this class attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._syntax = environment.parse(source)
        except jinja2.TemplateError as exc:
            raise ConfigError(f"the chat template is not valid Jinja: {exc.message}") from exc
        self._special_tokens = dict(special_tokens or {})
        self.source = source

    @classmethod
    def load(cls, checkpoint_dir: Path, override: Path | None = None) -> "ChatTemplate":
        """The template of a checkpoint folder, or of the file `override`."""
        config = _read_object(checkpoint_dir / "tokenizer_config.json") or {}
        if override is not None:
            source: str | None = _read_text(override)
            if source is None:
                raise ConfigError("the chat template file that was named does not exist: check the setting")
        else:
            source = _find_source(checkpoint_dir, config)
        if source is None:
            raise ConfigError(
                "the checkpoint has no chat template: it needs chat_template.jinja, chat_template.json or a "
                "chat_template in tokenizer_config.json"
            )
        return cls(source, special_tokens=_special_tokens(config))

    def literals(self) -> Iterator[str]:
        """Every piece of text that the template itself may write."""
        for node in self._syntax.find_all((TemplateData, Const)):
            text = node.data if isinstance(node, TemplateData) else node.value if isinstance(node, Const) else None
            if isinstance(text, str):
                yield text

    def render(self, conversation: Conversation, *, tag: str) -> str:
        """The prompt's text. `tag` is a character that occurs nowhere in the conversation or the template.

        Raises InvalidRequest with the template's own words when it refuses, and with ours for any other error.
        """
        messages = conversation.messages
        if conversation.continue_final_message:
            messages = [*messages[:-1], _tagged(messages[-1], tag + " ")]
        text = self._render(conversation, messages)
        return _cut_at_tag(text, tag) if conversation.continue_final_message else text

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        variables = {
            **self._special_tokens,
            **conversation.template_kwargs,
            "messages": messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _Refused as exc:
            raise InvalidRequest(f"the chat template refuses: {exc.message}", param="messages") from exc
        except _RENDERING_ERRORS as exc:
            raise InvalidRequest(
                "the chat template cannot render these messages: check roles, contents, tool calls and "
                "chat_template_kwargs",
                param="messages",
            ) from exc


def _tagged(message: dict[str, Any], tag: str) -> dict[str, Any]:
    """The final message with `tag` after its last text, where the answer is to go on."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + tag}
    parts = list(content or [])
    for index in range(len(parts) - 1, -1, -1):
        if "text" in parts[index]:
            parts[index] = {**parts[index], "text": parts[index]["text"] + tag}
            return {**message, "content": parts}
    raise InvalidRequest(
        "continue_final_message needs a final message with text to continue", param="continue_final_message"
    )


def _cut_at_tag(text: str, tag: str) -> str:
    position = text.rfind(tag)
    if position < 0:
        raise InvalidRequest(
            "the chat template does not render the final message's text, so it cannot be continued",
            param="continue_final_message",
        )
    is_spacing_kept = text.startswith(tag + " ", position)
    before = text[:position] if is_spacing_kept else text[:position].rstrip()
    return before.replace(tag + " ", "").replace(tag, "")  # a template may have shown the message earlier, too


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path.name} of the checkpoint cannot be read: it must be UTF-8 text") from exc


def _read_object(path: Path) -> dict[str, Any] | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path.name} of the checkpoint must hold a JSON object") from exc


def _find_source(checkpoint_dir: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """In the reference's order: the file of its own, the older JSON file, the tokenizer's settings."""
    source = _read_text(checkpoint_dir / "chat_template.jinja")
    if source is not None:
        return source
    for values in (_read_object(checkpoint_dir / "chat_template.json") or {}, tokenizer_config):
        template = values.get("chat_template")
        if isinstance(template, list):
            named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use, such as `bos_token`."""
    extra = tokenizer_config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **tokenizer_config}
    names = {*_SPECIAL_TOKEN_NAMES, *(extra if isinstance(extra, dict) else ())}
    tokens = {}
    for name in names:
        value = named.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
