"""The three request shapes: SGLang's `/generate`, OpenAI's completions and chat. Pure: bytes in, bytes out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvrouting_simulator.workloads.work_item import ReadyRequest

API_NAMES = ("generate", "completions", "chat")


class StreamError(Exception):
    """The stream carries an error in the API's own shape; the message is the server's."""


@dataclass(kw_only=True, slots=True)
class PartialAnswer:
    """What has been read of one answer.

    token_ids: of the answer, as far as the endpoint tells; pieces: events that carried text or tokens.
    prompt_tokens, cached_tokens, output_tokens: as the endpoint counts them; None if it does not say.
    """

    token_ids: array[int]
    pieces: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Api(Protocol):
    """One request shape. `read` adds an event of the stream to the answer.

    Raises (read): StreamError; ValueError if the event is no JSON object.
    """

    @property
    def path(self) -> str:
        """Below the endpoint's URL, with a leading slash."""

    def body(self, request: ReadyRequest) -> bytes:
        """The request as JSON."""

    def read(self, event: bytes, answer: PartialAnswer) -> None:
        """event: what stands behind `data: `, without `[DONE]`."""


def build_api(name: str, *, model: str, decode: Callable[[Sequence[int]], str] | None = None) -> Api:
    """The API of that name.

    decode: text of token ids; chat needs it, its messages are text.
    Raises: ValueError for an unknown name, or chat without `decode`.
    """
    if name == "generate":
        return GenerateApi()
    if name == "completions":
        return CompletionsApi(model=model)
    if name == "chat":
        if decode is None:
            raise ValueError("the chat API sends text: give the model's tokenizer")
        return ChatApi(model=model, decode=decode)
    raise ValueError(f"unknown API {name!r}; known: {', '.join(API_NAMES)}")


def _event(event: bytes) -> Mapping[str, object]:
    try:
        body = msgspec.json.decode(event)
    except msgspec.DecodeError as error:
        raise ValueError(f"event is no JSON ({error}): {event[:80]!r}") from error
    if not isinstance(body, dict):
        raise ValueError(f"event is no JSON object: {event[:80]!r}")  # noqa: TRY004 (what came is wrong, not a type)
    reported = body.get("error")
    if reported is not None:
        message = reported.get("message") if isinstance(reported, Mapping) else reported
        raise StreamError(str(message))
    return body


def _count(values: object, name: str) -> int | None:
    value = values.get(name) if isinstance(values, Mapping) else None
    return value if isinstance(value, int) else None


def _add_ids(answer: PartialAnswer, ids: object) -> None:
    """Ids come as what is new or as all so far: a list that begins with all that is known replaces it."""
    if not isinstance(ids, list) or not ids:
        return
    new = array("I", ids)
    known = len(answer.token_ids)
    if known and len(new) >= known and new[:known] == answer.token_ids:
        answer.token_ids = new
    else:
        answer.token_ids.extend(new)


class GenerateApi:
    """SGLang's own: token ids in, `meta_info` out."""

    path = "/generate"

    def body(self, request: ReadyRequest) -> bytes:
        """The answer's length is fixed: every policy gets the same work."""
        return msgspec.json.encode(
            {
                "input_ids": request.prompt.tolist(),
                "sampling_params": {
                    "max_new_tokens": request.output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                "stream": True,
            }
        )

    def read(self, event: bytes, answer: PartialAnswer) -> None:
        """Counts come with every event."""
        body = _event(event)
        meta = body.get("meta_info")
        output = _count(meta, "completion_tokens")
        if output or body.get("text") or body.get("output_ids"):
            answer.pieces += 1
        ids = body.get("output_ids")
        if isinstance(ids, list) and output is not None and len(ids) == output:
            answer.token_ids = array("I", ids)  # all so far
        else:
            _add_ids(answer, ids)
        answer.output_tokens = output if output is not None else answer.output_tokens
        answer.prompt_tokens = _first_known(_count(meta, "prompt_tokens"), answer.prompt_tokens)
        answer.cached_tokens = _first_known(_count(meta, "cached_tokens"), answer.cached_tokens)


def _first_known(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


def _read_usage(body: Mapping[str, object], answer: PartialAnswer) -> None:
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return
    answer.prompt_tokens = _first_known(_count(usage, "prompt_tokens"), answer.prompt_tokens)
    answer.output_tokens = _first_known(_count(usage, "completion_tokens"), answer.output_tokens)
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
    answer.cached_tokens = _first_known(cached, answer.cached_tokens)


def _openai_body(model: str, request: ReadyRequest, prompt: Mapping[str, object]) -> bytes:
    """`ignore_eos` is SGLang's and vLLM's extension: the answer's length is fixed."""
    return msgspec.json.encode(
        {
            "model": model,
            **prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class CompletionsApi:
    """OpenAI's `/v1/completions` with a prompt of token ids."""

    path = "/v1/completions"

    def __init__(self, *, model: str) -> None:
        self._model = model

    def body(self, request: ReadyRequest) -> bytes:
        """The prompt as token ids: nothing is tokenized again."""
        return _openai_body(self._model, request, {"prompt": request.prompt.tolist()})

    def read(self, event: bytes, answer: PartialAnswer) -> None:
        """Text comes in `choices`, counts in a last event."""
        body = _event(event)
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if choice.get("text"):
                answer.pieces += 1
            _add_ids(answer, choice.get("token_ids"))
        _read_usage(body, answer)


class ChatApi:
    """OpenAI's `/v1/chat/completions`: the prompt's text is one user message, whatever turns it is made of."""

    path = "/v1/chat/completions"

    def __init__(self, *, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        self._model = model
        self._decode = decode

    def body(self, request: ReadyRequest) -> bytes:
        """Prompts with a common prefix give texts with a common prefix."""
        messages = [{"role": "user", "content": self._decode(request.prompt)}]
        return _openai_body(self._model, request, {"messages": messages})

    def read(self, event: bytes, answer: PartialAnswer) -> None:
        """The first event names the role alone: it is no token."""
        body = _event(event)
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta")
            if isinstance(delta, Mapping) and (delta.get("content") or delta.get("reasoning_content")):
                answer.pieces += 1
            _add_ids(answer, choice.get("token_ids"))
        _read_usage(body, answer)
