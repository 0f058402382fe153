"""What a request body asks for, as far as routing must know. The body itself is handed on untouched."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvrouting_core.blocks import Namespace
from kvrouting_router.error_bodies import ErrorShape
from kvrouting_router.errors import InvalidRequestError, MalformedJsonError, UnknownModelError


class Api(enum.Enum):
    """A generation surface; the value is its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"

    @property
    def error_shape(self) -> ErrorShape:
        """Whose error object its clients expect."""
        return ErrorShape.SGLANG if self is Api.GENERATE else ErrorShape.OPENAI


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """Text to be tokenized as it stands."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPrompt:
    """Token ids, exact without a tokenizer."""

    token_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A chat request, to be rendered by the model's template."""

    body: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpaquePrompt:
    """Something that only the engine understands (embeddings): estimated by its size, never matched."""

    size_bytes: int


Prompt = TextPrompt | TokenPrompt | ChatPrompt | OpaquePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationForm:
    """A parsed request. further: the other prompts of a list. sequences: answers, prompts times `n`."""

    api: Api
    namespace: Namespace
    stream: bool
    prompt: Prompt
    further: tuple[Prompt, ...] = ()
    sequences: int = 1
    max_output_tokens: int | None = None


def decode_body(body: bytes) -> Mapping[str, object]:
    """The body as a JSON object. Raises: MalformedJsonError saying what and where."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedJsonError(f"the body is no JSON in UTF-8: {error}") from error
    except RecursionError as error:
        raise MalformedJsonError("the body's JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise MalformedJsonError(f"the body must be a JSON object, got {_kind(value)}")
    return value


def parse_form(api: Api, body: Mapping[str, object], *, model: str, max_sequences: int) -> GenerationForm:
    """Reads what routing needs. model: the name that the pool serves. max_sequences: answers that may be asked for.

    Raises: InvalidRequestError naming field and value; UnknownModelError.
    """
    adapter = _adapter_in_model(body.get("model"), model)
    if adapter is None:
        adapter = _first_text(body, "lora_path")
    prompts = _PROMPTS[api](body)
    parameters = _sampling(body) if api is Api.GENERATE else body
    return GenerationForm(
        api=api,
        namespace=_namespace(body, model, adapter),
        stream=_flag(body, "stream"),
        prompt=prompts[0],
        further=tuple(prompts[1:]),
        sequences=_sequences(parameters, len(prompts), most=max_sequences),
        max_output_tokens=_max_output_tokens(api, parameters),
    )


def _adapter_in_model(value: object, model: str) -> str | None:
    """SGLang's `model:adapter`. Absent means the pool's model; /generate has no such field."""
    if value is None or value == model or value == "default":  # SGLang's name for whatever it serves
        return None
    if not isinstance(value, str):
        raise InvalidRequestError(f"model must be a string, got {_kind(value)}")
    if value.startswith(model + ":") and len(value) > len(model) + 1:
        return value[len(model) + 1 :]
    raise UnknownModelError(f"the model {value!r} does not exist; this pool serves {model!r}")


def _namespace(body: Mapping[str, object], model: str, adapter: str | None) -> Namespace:
    """What separates equal prompts.

    An engine's events do not tell what was stored under an `extra_key`, so such a request must match nothing that
    they tell of: it gets a namespace of a model that no engine can serve.
    """
    extra_key = _first_text(body, "extra_key")
    apart = model if extra_key is None else f"{model}\0{extra_key}"
    return Namespace(model=apart, lora_adapter=adapter, cache_salt=_first_text(body, "cache_salt"))


def _first_text(body: Mapping[str, object], name: str) -> str | None:
    """A string, or the first of a list of strings (one per prompt); None or empty: absent."""
    value = body.get(name)
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, got {_kind(value)}")
    return value


def _flag(body: Mapping[str, object], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {_kind(value)}")
    return bool(value)


def _count(body: Mapping[str, object], name: str, *, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be an integer, got {_kind(value)}")
    if value < least:
        raise InvalidRequestError(f"{name} must be at least {least}, got {value}")
    return value


def _sequences(parameters: Mapping[str, object], prompts: int, *, most: int) -> int:
    n = _count(parameters, "n", least=1) or 1
    if n * prompts > most:
        of = f" for each of {prompts} prompts" if prompts > 1 else ""
        raise InvalidRequestError(f"n must ask for at most {most} answers in one request, got {n}{of}")
    return n * prompts


def _max_output_tokens(api: Api, parameters: Mapping[str, object]) -> int | None:
    if api is Api.GENERATE:
        return _count(parameters, "max_new_tokens", least=0)
    limit = _count(parameters, "max_tokens", least=1)
    if api is Api.CHAT:
        newer_name = _count(parameters, "max_completion_tokens", least=1)
        return limit if newer_name is None else newer_name
    return limit


def _sampling(body: Mapping[str, object]) -> Mapping[str, object]:
    value = body.get("sampling_params")
    if isinstance(value, list):  # one per prompt
        value = value[0] if value else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"sampling_params must be an object, got {_kind(value)}")
    return value


def _chat_prompts(body: Mapping[str, object]) -> list[Prompt]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"messages must be a non-empty list, got {_kind(messages)}")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{position}] must be an object with a role")
    return [ChatPrompt(body=body)]


def _completion_prompts(body: Mapping[str, object]) -> list[Prompt]:
    if "prompt" not in body:
        raise InvalidRequestError("prompt is missing: a string, a list of strings or token ids")
    return _prompts(body["prompt"], "prompt")


def _generate_prompts(body: Mapping[str, object]) -> list[Prompt]:
    given = [n for n in ("text", "input_ids", "input_embeds") if body.get(n) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"exactly one of text, input_ids and input_embeds must be given, got {given or 'none'}"
        )
    if given == ["input_embeds"]:
        return [OpaquePrompt(size_bytes=len(msgspec.json.encode(body["input_embeds"])))]
    return _prompts(body[given[0]], given[0])


_PROMPTS = {
    Api.CHAT: _chat_prompts,
    Api.COMPLETIONS: _completion_prompts,
    Api.GENERATE: _generate_prompts,
}


def _prompts(value: object, name: str) -> list[Prompt]:
    """One prompt or a list of them; a list of integers is one prompt."""
    if isinstance(value, str):
        return [TextPrompt(text=value)]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{name} must be a string or a non-empty list, got {_kind(value)}")
    if isinstance(value[0], int):
        return [_token_prompt(value, name)]
    return [_listed_prompt(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _listed_prompt(value: object, name: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(text=value)
    if isinstance(value, list):
        return _token_prompt(value, name)
    raise InvalidRequestError(f"{name} must be a string or a list of token ids, got {_kind(value)}")


def _token_prompt(value: list[object], name: str) -> TokenPrompt:
    for token in value:
        if type(token) is not int or not 0 <= token < 1 << 32:
            raise InvalidRequestError(f"{name} holds {token!r}: token ids are integers from 0 to 2^32-1")
    return TokenPrompt(token_ids=value)  # type: ignore[arg-type]  # checked just above


def _kind(value: object) -> str:
    """What a client sent, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "an object"
