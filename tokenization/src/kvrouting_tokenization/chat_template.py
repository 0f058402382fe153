"""The chat template of a model: jinja2 in the sandbox and with the names that model authors rely on."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.nodes
import jinja2.sandbox

from kvrouting_tokenization.tokenizer import ChatRequestError


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    # Templates ask for the local date of the serving machine, as the engine's own rendering does.
    return dt.datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """Renders the messages of an OpenAI chat request to the text that the model was trained on.

    special_tokens: names as templates use them (`bos_token`, `eos_token`, …) → text.
    Raises: ValueError if the template has a syntax error.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = _to_json
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self._takes_parts = _iterates_over_content(syntax)
        self._special_tokens = dict(special_tokens)

    def render(self, body: Mapping[str, object]) -> str:
        """Text of the conversation in `body["messages"]` with tools and `chat_template_kwargs`.

        Raises: ChatRequestError if messages are missing or malformed, or the template refuses them.
        """
        messages = [self._message(m, i) for i, m in enumerate(_messages(body))]
        extra = body.get("chat_template_kwargs")
        # An answer that the client began is continued: no header of a new one is added.
        continues = bool(body.get("continue_final_message"))
        names: dict[str, object] = {
            **self._special_tokens,
            "messages": messages,
            "tools": body.get("tools"),
            "documents": body.get("documents"),
            "add_generation_prompt": not continues,
            **(dict(extra) if isinstance(extra, Mapping) else {}),
        }
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatRequestError(f"the model's chat template refuses these messages: {error}") from error

    def _message(self, message: object, position: int) -> Mapping[str, object]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatRequestError(f"messages[{position}] must be an object with a string 'role'")
        content = message.get("content")
        if content is None:
            return {**message, "content": ""}
        if isinstance(content, str):
            return message
        if not isinstance(content, Sequence):
            raise ChatRequestError(f"messages[{position}].content must be a string or a list of parts")
        texts = [_part_text(part, position) for part in content]
        if self._takes_parts:
            return {**message, "content": [{"type": "text", "text": t} for t in texts]}
        return {**message, "content": " ".join(texts)}


def _messages(body: Mapping[str, object]) -> Sequence[object]:
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatRequestError("'messages' must be a non-empty list")
    return messages


def _part_text(part: object, position: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatRequestError(f"messages[{position}].content holds a part of type {kind!r}; only 'text' is known")


def _iterates_over_content(syntax: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, so that it takes parts and not a plain string."""
    return any(
        isinstance(loop.iter, (jinja2.nodes.Getitem, jinja2.nodes.Getattr)) and _names_content(loop.iter)
        for loop in syntax.find_all(jinja2.nodes.For)
    )


def _names_content(node: jinja2.nodes.Getitem | jinja2.nodes.Getattr) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
