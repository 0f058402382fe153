"""Output and cached tokens as the engine reports them, read from the end of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvrouting_router.request_forms import Api


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """None: the engine does not say."""

    output_tokens: int | None = None
    cached_tokens: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAiUsage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _OpenAiAnswer(msgspec.Struct):
    usage: _OpenAiUsage | None = None


class _MetaInfo(msgspec.Struct):
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _SglangAnswer(msgspec.Struct):
    meta_info: _MetaInfo | None = None


# A field of a delta that carries text. Within a JSON string its last quote would be escaped: texts cannot look like it.
_DELTA = re.compile(rb'"(?:content|reasoning_content|text|arguments)": ?"(?!")')

# Only the named fields are decoded, everything else is skipped.
_OPENAI = msgspec.json.Decoder(_OpenAiAnswer)
_SGLANG = msgspec.json.Decoder(_SglangAnswer | list[_SglangAnswer])
_UNKNOWN = Usage()


def usage_of_body(api: Api, body: bytes) -> Usage:
    """Usage of a complete JSON answer; unknown fields and foreign shapes give nothing."""
    try:
        if api is not Api.GENERATE:
            return _openai(_OPENAI.decode(body))
        answer = _SGLANG.decode(body)
    except msgspec.MsgspecError:
        return _UNKNOWN
    answers = answer if isinstance(answer, list) else [answer]
    infos = [a.meta_info for a in answers if a.meta_info is not None]
    return Usage(
        output_tokens=_sum([i.completion_tokens for i in infos]),
        cached_tokens=_sum([i.cached_tokens for i in infos]),
    )


class StreamedTokens:
    """Output tokens of one stream: by its usage, else by its events, of which an engine sends one per token and answer.

    The count is too low where an engine joins several tokens in one event (SGLang's `--stream-interval`).
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._deltas = 0

    def take(self, events: bytes) -> None:
        """Whole events that were passed on."""
        if self._api is not Api.GENERATE:  # SGLang's own events carry their usage
            self._deltas += len(_DELTA.findall(events))

    def usage(self, last_payloads: Sequence[bytes]) -> Usage:
        """last_payloads: of the stream's last events, newest first."""
        usage = usage_of_stream(self._api, last_payloads)
        if usage.output_tokens is None and self._deltas:
            return replace(usage, output_tokens=self._deltas)
        return usage


def usage_of_stream(api: Api, payloads: Sequence[bytes]) -> Usage:
    """Usage from the last events of a stream, newest first: OpenAI's last chunk, SGLang's every one."""
    for payload in payloads:
        usage = usage_of_body(api, payload)
        if usage != _UNKNOWN:
            return usage
    return _UNKNOWN


def _openai(answer: _OpenAiAnswer) -> Usage:
    usage = answer.usage
    if usage is None:
        return _UNKNOWN
    details = usage.prompt_tokens_details
    return Usage(output_tokens=usage.completion_tokens, cached_tokens=details.cached_tokens if details else None)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
