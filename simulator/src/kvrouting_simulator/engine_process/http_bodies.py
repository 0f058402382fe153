"""Request bodies of SGLang's HTTP API as far as the simulated engine knows them, checked field by field.

Unknown fields are ignored, as SGLang does. Fields that would change the answer in a way that cannot be simulated
are refused by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class BadRequestError(ValueError):
    """The request's own fault: answered with 400 and this message. param: the field, None if none is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct):
    """OpenAI's stream options."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingParams(msgspec.Struct):
    """Those of SGLang's sampling parameters that the simulated engine obeys."""

    max_new_tokens: int | None = 128
    n: int = 1
    stop: str | list[str] | None = None
    ignore_eos: bool = False


class _Placed(msgspec.Struct):
    """Where a request runs and which cached prefixes it may share."""

    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: msgspec.Raw = msgspec.Raw()


class _OpenAIBody(_Placed):
    """What both of OpenAI's paths take."""

    model: str = "default"
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    rid: str | None = None


class GenerateBody(_Placed):
    """Body of /generate."""

    text: str | list[str] | None = None
    input_ids: msgspec.Raw = msgspec.Raw()
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool = False
    input_embeds: msgspec.Raw = msgspec.Raw()
    image_data: msgspec.Raw = msgspec.Raw()
    return_hidden_states: bool = False


class CompletionBody(_OpenAIBody):
    """Body of /v1/completions."""

    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(_OpenAIBody):
    """Body of /v1/chat/completions, without messages and tools: those go to the chat template as they are."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False


_generate = msgspec.json.Decoder(GenerateBody)
_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_json = msgspec.json.Decoder()
_ids = msgspec.json.Decoder(list[int])
_id_lists = msgspec.json.Decoder(list[list[int]])
_texts = msgspec.json.Decoder(str | list[str])


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"the request body is not valid: {error}") from error


def parse_generate(data: bytes) -> tuple[GenerateBody, Sequence[str] | Sequence[array[int]], bool]:
    """Body, prompts (texts or token ids) and whether they came as a list. Raises: BadRequestError."""
    body: GenerateBody = _decoded(_generate, data)
    for name in ("return_logprob", "return_hidden_states"):
        if getattr(body, name):
            raise _unsupported(name)
    for name in ("input_embeds", "image_data"):
        if bytes(getattr(body, name)) not in (b"", b"null"):
            raise _unsupported(name)
    _refuse_extra_key(body.extra_key)
    ids = bytes(body.input_ids)
    has_ids = ids not in (b"", b"null")
    if (body.text is None) != has_ids:
        raise BadRequestError("Either text or input_ids should be provided, and not both.", param="text")
    if has_ids:
        prompts, is_list = _token_prompts(ids, "input_ids")
        return body, prompts, is_list
    assert body.text is not None  # noqa: S101 - one of the two was given
    return body, [body.text] if isinstance(body.text, str) else body.text, isinstance(body.text, list)


def parse_completion(data: bytes) -> tuple[CompletionBody, Sequence[str] | Sequence[array[int]]]:
    """Body and prompts, texts or token ids, at least one. Raises: BadRequestError."""
    body: CompletionBody = _decoded(_completion, data)
    if body.echo:
        raise _unsupported("echo")
    if body.logprobs is not None:
        raise _unsupported("logprobs")
    if body.suffix:
        raise _unsupported("suffix")
    if body.best_of not in (None, body.n):
        raise _unsupported("best_of")
    _refuse_extra_key(body.extra_key)
    raw = bytes(body.prompt)
    if raw in (b"", b"null", b'""', b"[]"):
        raise BadRequestError("Prompt cannot be empty", param="prompt")
    if _holds_text(raw):
        texts = _field(_texts, raw, "prompt")
        return body, [texts] if isinstance(texts, str) else texts
    prompts, _ = _token_prompts(raw, "prompt")
    return body, prompts


def parse_chat(data: bytes) -> tuple[ChatBody, Mapping[str, Any]]:
    """Body, and the whole of it as the chat template wants it. Raises: BadRequestError."""
    body: ChatBody = _decoded(_chat, data)
    if body.logprobs:
        raise _unsupported("logprobs")
    _refuse_extra_key(body.extra_key)
    whole: Mapping[str, Any] = _json.decode(data)
    if not whole.get("messages"):
        raise BadRequestError("Messages cannot be empty.", param="messages")
    return body, whole


def _refuse_extra_key(value: msgspec.Raw) -> None:
    """KV events do not tell of this namespace, and without it an answer would share what it is to separate."""
    if bytes(value) not in (b"", b"null", b'""'):
        raise _unsupported("extra_key")


def _unsupported(name: str) -> BadRequestError:
    return BadRequestError(f"the simulated engine does not support {name!r}: leave it out", param=name)


def _holds_text(raw: bytes) -> bool:
    """Whether a JSON value is a string or a list of strings, by its first characters."""
    return raw.lstrip()[:1] == b'"' or raw.lstrip().lstrip(b"[ \t\r\n")[:1] == b'"'


def _token_prompts(raw: bytes, name: str) -> tuple[Sequence[array[int]], bool]:
    nested = raw.lstrip()[1:].lstrip()[:1] == b"["
    ids = _field(_id_lists, raw, name) if nested else [_field(_ids, raw, name)]
    try:
        return [array("I", one) for one in ids], nested
    except OverflowError as error:
        raise BadRequestError(f"{name} holds a token id outside 0..4294967295", param=name) from error


def _field(decoder: msgspec.json.Decoder[Any], raw: bytes, name: str) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{name}: {error}", param=name) from error
