"""From a prompt to block hashes: chat template, tokenizer, chained hash; off the event loop unless it is short."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvrouting_core.blocks import ChainHasher, Namespace, Tokens
from kvrouting_router.request_forms import ChatPrompt, GenerationForm, Prompt, TextPrompt, TokenPrompt

# English text has about four bytes a token; without a tokenizer each four bytes of UTF-8 stand for one.
_BYTES_PER_TOKEN = 4
# Above these the work takes longer than the hop to a thread and back, about 150 µs.
_HASH_ON_LOOP_TOKENS = 2048
_TOKENIZE_ON_LOOP_CHARACTERS = 512
# What a template writes around a message.
_CHARACTERS_PER_MESSAGE = 16
_PLAIN_MESSAGE = {"role", "content"}
_LENGTHENING_FIELDS = ("tools", "documents", "chat_template", "chat_template_kwargs")


class PromptTokenizer(Protocol):
    """Thread-safe; called from a pool of threads."""

    @property
    def fingerprint(self) -> str:
        """Short id: equal ids give equal tokens for equal text."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Token ids of a completion prompt."""

    def encode_chat(self, body: Mapping[str, object]) -> Sequence[int]:
        """Token ids of a chat request. Raises: ValueError if the template refuses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPrompt:
    """A request's prompts as routing weighs them.

    blocks: hashes of the first prompt's full blocks. exact: they are those of the engine's own tokens; otherwise they
    are hashes of text, in a namespace of their own, and only the router's own decisions can match them.
    """

    blocks: list[int]
    prompt_tokens: int
    further_prompt_tokens: int
    exact: bool


class PromptReader:
    """Reads prompts with the model's tokenizer, or without one."""

    def __init__(self, *, hasher: ChainHasher, executor: Executor, tokenizer: PromptTokenizer | None) -> None:
        self._hasher = hasher
        self._executor = executor
        self._tokenizer = tokenizer

    @property
    def block_size_tokens(self) -> int:
        """Tokens in a routing block."""
        return self._hasher.block_size

    @property
    def fingerprint(self) -> str:
        """That of the tokenizer; empty without one."""
        return self._tokenizer.fingerprint if self._tokenizer else ""

    async def read(self, form: GenerationForm) -> ReadPrompt:
        """Tokenizes and hashes; what is surely quick is done on the spot, everything else by a thread."""
        if self._is_quick(form.prompt):
            return self.read_now(form)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.read_now, form)

    def _is_quick(self, prompt: Prompt) -> bool:
        if isinstance(prompt, TokenPrompt):
            return len(prompt.token_ids) <= _HASH_ON_LOOP_TOKENS
        # Without a tokenizer text is only hashed, and a character has four bytes at most: a token.
        most = _TOKENIZE_ON_LOOP_CHARACTERS if self._tokenizer else _HASH_ON_LOOP_TOKENS
        characters = characters_of(prompt)
        return characters is not None and characters <= most

    def read_now(self, form: GenerationForm) -> ReadPrompt:
        """The same in the calling thread."""
        exact_tokens = self._exact_tokens(form.prompt)
        exact = exact_tokens is not None
        tokens: Tokens = text_as_tokens(text_of(form.prompt)) if exact_tokens is None else exact_tokens
        namespace = form.namespace if exact else _text_namespace(form.namespace)
        blocks: list[int] = self._hasher.hash_blocks(namespace, tokens).tolist()
        prompt_tokens = max(1, len(tokens))
        return ReadPrompt(
            blocks=blocks,
            prompt_tokens=prompt_tokens,
            further_prompt_tokens=_further_tokens(form, prompt_tokens),
            exact=exact,
        )

    def _exact_tokens(self, prompt: Prompt) -> Sequence[int] | None:
        if isinstance(prompt, TokenPrompt):
            return array("I", prompt.token_ids)
        if self._tokenizer is None:
            return None
        if isinstance(prompt, TextPrompt):
            return self._tokenizer.encode_prompt(prompt.text)
        if isinstance(prompt, ChatPrompt):
            try:
                return self._tokenizer.encode_chat(prompt.body)
            except ValueError:
                # The engine has the last word on what its template takes, and its error is the better one.
                return None
        return None


def characters_of(prompt: Prompt) -> int | None:
    """About as many characters as the prompt's text has; None where that is not plain to see."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if not isinstance(prompt, ChatPrompt) or any(prompt.body.get(name) for name in _LENGTHENING_FIELDS):
        return None
    messages: list[Any] = prompt.body["messages"]  # type: ignore[assignment]  # the form was checked
    return sum(map(_message_characters, messages)) if all(map(_is_plain, messages)) else None


def _is_plain(message: Mapping[str, object]) -> bool:
    return message.keys() <= _PLAIN_MESSAGE and isinstance(message.get("content"), str)


def _message_characters(message: Mapping[str, str]) -> int:
    return len(message["content"]) + _CHARACTERS_PER_MESSAGE


def text_as_tokens(data: bytes) -> npt.NDArray[np.uint32]:
    """Four bytes as one number: texts with a common prefix give numbers with a common prefix."""
    whole = len(data) - len(data) % _BYTES_PER_TOKEN
    numbers: npt.NDArray[Any] = np.frombuffer(data[:whole], dtype="<u4")
    return numbers.astype(np.uint32, copy=False)


def text_of(prompt: Prompt) -> bytes:
    """A prompt's text such that a longer conversation begins with the bytes of the shorter one."""
    if isinstance(prompt, TextPrompt):
        return prompt.text.encode("utf-8", "replace")
    if isinstance(prompt, ChatPrompt):
        # Templates write the tools before the messages; without its closing bracket a list is a prefix of a longer one.
        tools = msgspec.json.encode(prompt.body.get("tools"))
        return tools + msgspec.json.encode(prompt.body["messages"])[:-1]
    return b""


def _text_namespace(namespace: Namespace) -> Namespace:
    return replace(namespace, model=f"{namespace.model}\0text")


def _further_tokens(form: GenerationForm, first_tokens: int) -> int:
    """Tokens of the other prompts: counted where they are ids, else by the first one's bytes per token."""
    tokens = sum(len(p.token_ids) for p in form.further if isinstance(p, TokenPrompt))
    texts = sum(len(p.text) for p in form.further if isinstance(p, TextPrompt))
    if texts:
        first = len(form.prompt.text) if isinstance(form.prompt, TextPrompt) else 0
        tokens += round(texts * first_tokens / first) if first else texts // _BYTES_PER_TOKEN
    return tokens
