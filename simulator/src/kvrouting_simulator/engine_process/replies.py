"""The shapes of SGLang's answers: OpenAI's objects with SGLang's additions, its own for /generate, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrouting_simulator.engine_process.generation import Generation

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


def encode(body: Any) -> bytes:
    """JSON."""
    return _json.encode(body)


def sse(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _json.encode(body) + b"\n\n"


class PromptTokensDetails(msgspec.Struct):
    """Sent only with --enable-cache-report, as in SGLang."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's usage."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    reasoning_tokens: int = 0
    completion_tokens_details: None = None


def usage(generations: Sequence[Generation], *, n: int, cache_report: bool) -> Usage:
    """Prompt tokens count once per prompt, whose first of `n` answers speaks for it."""
    firsts = generations[::n]
    prompt = sum(g.prompt_tokens for g in firsts)
    completion = sum(len(g.tokens) for g in generations)
    details = PromptTokensDetails(cached_tokens=sum(g.cached_tokens for g in firsts)) if cache_report else None
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=details,
    )


class CompletionChoice(msgspec.Struct):
    """One choice of a completion, whole or a piece of a stream."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    matched_stop: str | None = None


class CompletionReply(msgspec.Struct):
    """A completion, or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: str = "text_completion"


class ChatMessage(msgspec.Struct):
    """The whole answer of a chat."""

    content: str
    role: str = "assistant"
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: str | None = None
    matched_stop: str | None = None


class ChatReply(msgspec.Struct):
    """A chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    """A piece of a chat answer; `reasoning_content` is always there, as in SGLang."""

    reasoning_content: str | None
    role: str | None = None
    content: str | None = None


class DeltaChoice(msgspec.Struct):
    """One choice of a chat chunk."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    matched_stop: str | None = None


class ChatChunk(msgspec.Struct, omit_defaults=True):
    """A chunk of a chat stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = None


class ErrorBody(msgspec.Struct):
    """SGLang's error on the OpenAI paths, flat."""

    message: str
    type: str
    code: int
    param: str | None = None
    object: str = "error"


def finish_reason(generation: Generation) -> dict[str, Any] | None:
    """SGLang's own form of why an answer ended; None while it goes on."""
    if generation.finish is None:
        return None
    if generation.finish == "length":
        return {"type": "length", "length": len(generation.tokens)}
    if generation.finish == "stop":
        return {"type": "stop", "matched": generation.answer.matched}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def generate_reply(generation: Generation, *, text: str, dp_rank: int | None) -> dict[str, Any]:
    """What /generate says of an answer so far. dp_rank: None where there is one rank only."""
    meta: dict[str, Any] = {
        "id": generation.request_id,
        "finish_reason": finish_reason(generation),
        "prompt_tokens": generation.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(generation.tokens),
        "cached_tokens": generation.cached_tokens,
    }
    if dp_rank is not None:
        meta["dp_rank"] = dp_rank
    if generation.ended_s is not None:
        meta["e2e_latency"] = generation.ended_s - generation.submitted_s
    return {"text": text, "output_ids": list(generation.tokens), "meta_info": meta}
