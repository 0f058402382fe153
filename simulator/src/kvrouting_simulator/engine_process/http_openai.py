"""OpenAI's paths as SGLang serves them: completions, chat completions, models."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from kvrouting_simulator.engine_process.engine import AnswerEnd, Engine, Job
from kvrouting_simulator.engine_process.generation import Generation, Prompt
from kvrouting_simulator.engine_process.http_answers import collected, json_reply, pieces, streamed
from kvrouting_simulator.engine_process.http_bodies import (
    BadRequestError,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)
from kvrouting_simulator.engine_process.replies import (
    DONE,
    ChatChoice,
    ChatChunk,
    ChatMessage,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    Delta,
    DeltaChoice,
    sse,
    usage,
)
from kvrouting_simulator.engine_process.text_stream import TextStream
from kvrouting_simulator.engine_process.tracing import started

DP_RANK_HEADER = "X-Data-Parallel-Rank"


class OpenAIHandlers:
    """Handlers of the OpenAI paths. cache_report: usage tells cached tokens (--enable-cache-report)."""

    def __init__(self, engine: Engine, *, cache_report: bool) -> None:
        self._engine = engine
        self._cache_report = cache_report
        self._started = int(time.time())

    def routes(self) -> Sequence[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers to one or several prompts."""
        body, given = parse_completion(await request.read())
        namespace = self._engine.namespace(model=body.model, lora_path=body.lora_path, cache_salt=body.cache_salt)
        job = _job(request, body, await self._engine.prompts(given, namespace), max_tokens=body.max_tokens)
        rank, generations = await self._engine.start(job)
        started(request, generations)
        frame = _Frame(generations[0].request_id, body.model)
        if body.stream:
            return await streamed(request, rank, generations, self._completion_stream(body, frame, generations))
        await collected(rank, generations)
        choices = [
            CompletionChoice(index=index, text=self._text(g), finish_reason=g.finish, matched_stop=g.answer.matched)
            for index, g in enumerate(generations)
        ]
        return json_reply(frame.completion(choices, usage(generations, n=body.n, cache_report=self._cache_report)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answers to a conversation."""
        data = await request.read()
        body, whole = parse_chat(data)
        namespace = self._engine.namespace(model=body.model, lora_path=body.lora_path, cache_salt=body.cache_salt)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        prompt = await self._engine.chat_prompt(whole, len(data), namespace)
        job = _job(request, body, [prompt], max_tokens=limit)
        rank, generations = await self._engine.start(job)
        started(request, generations)
        frame = _Frame(generations[0].request_id, body.model)
        if body.stream:
            return await streamed(request, rank, generations, self._chat_stream(body, frame, generations))
        await collected(rank, generations)
        choices = [
            ChatChoice(
                index=index,
                message=ChatMessage(content=self._text(g)),
                finish_reason=g.finish,
                matched_stop=g.answer.matched,
            )
            for index, g in enumerate(generations)
        ]
        return json_reply(frame.chat(choices, usage(generations, n=body.n, cache_report=self._cache_report)))

    def _text(self, generation: Generation) -> str:
        return TextStream(self._engine.tokenizer, length=generation.answer.text_length).extend(
            generation.tokens, last=True
        )

    async def _completion_stream(
        self, body: CompletionBody, frame: _Frame, generations: Sequence[Generation]
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        async for index, generation, delta, _ in pieces(generations, self._engine.tokenizer):
            ended = generation.finish
            choice = CompletionChoice(
                index=index,
                text=delta,
                finish_reason=ended,
                matched_stop=generation.answer.matched if ended else None,
            )
            chunk = frame.completion([choice], None)
            if options is not None and options.continuous_usage_stats:
                chunk.usage = usage([generation], n=1, cache_report=False)
            yield sse(chunk)
        if options is not None and options.include_usage:
            yield sse(frame.completion([], usage(generations, n=body.n, cache_report=self._cache_report)))
        yield DONE

    async def _chat_stream(
        self, body: ChatBody, frame: _Frame, generations: Sequence[Generation]
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        greeted: set[int] = set()
        ended: list[int] = []
        async for index, generation, delta, _ in pieces(generations, self._engine.tokenizer):
            if index not in greeted:
                greeted.add(index)
                yield sse(frame.chunk(index, Delta(reasoning_content=None, role="assistant", content="")))
            if delta:
                chunk = frame.chunk(index, Delta(reasoning_content=None, content=delta))
                if options is not None and options.continuous_usage_stats:
                    chunk.usage = usage([generation], n=1, cache_report=False)
                yield sse(chunk)
            if generation.finish is not None:
                ended.append(index)
        for index in ended:
            end = frame.chunk(index, Delta(reasoning_content=None))
            end.choices[0].finish_reason = generations[index].finish
            end.choices[0].matched_stop = generations[index].answer.matched
            yield sse(end)
        if options is not None and options.include_usage:
            last = frame.chunk(0, Delta(reasoning_content=None))
            last.choices = []
            last.usage = usage(generations, n=body.n, cache_report=self._cache_report)
            yield sse(last)
        yield DONE

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the handler's signature
        """The one model that is served."""
        return json_reply({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        """The served model; 404 for another."""
        name = request.match_info["model"]
        if name == self._engine.served_model:
            return json_reply(self._card())
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_reply({"error": error}, status=404)

    def _card(self) -> object:
        name = self._engine.served_model
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.context_length,
        }


class _Frame:
    """What all chunks of one answer have in common."""

    def __init__(self, request_id: str, model: str) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())

    def completion(self, choices: list[CompletionChoice], used: object) -> CompletionReply:
        return CompletionReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=used,  # type: ignore[arg-type]
        )

    def chat(self, choices: list[ChatChoice], used: object) -> ChatReply:
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=used,  # type: ignore[arg-type]
        )

    def chunk(self, index: int, delta: Delta) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=[DeltaChoice(index=index, delta=delta)],
        )


def _job(
    request: web.Request, body: CompletionBody | ChatBody, prompts: Sequence[Prompt], *, max_tokens: int | None
) -> Job:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    return Job(
        prompts=prompts,
        n=body.n,
        ends=[AnswerEnd(max_tokens=max_tokens, stops=stops)],
        dp_rank=_dp_rank(request, body),
        request_id=body.rid or uuid.uuid4().hex,
    )


def _dp_rank(request: web.Request, body: CompletionBody | ChatBody) -> int | None:
    """The rank asked for: the header goes before the body."""
    header = request.headers.get(DP_RANK_HEADER)
    if header is None:
        return body.data_parallel_rank if body.routed_dp_rank is None else body.routed_dp_rank
    try:
        return int(header)
    except ValueError as error:
        raise BadRequestError(f"Invalid {DP_RANK_HEADER} header: must be an integer, got '{header}'") from error
