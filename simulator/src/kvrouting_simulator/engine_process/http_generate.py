"""SGLang's own path: /generate, and /abort_request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web

from kvrouting_simulator.engine_process.engine import AnswerEnd, Engine, Job
from kvrouting_simulator.engine_process.generation import Generation
from kvrouting_simulator.engine_process.http_answers import collected, json_reply, pieces, streamed
from kvrouting_simulator.engine_process.http_bodies import (
    BadRequestError,
    GenerateBody,
    SamplingParams,
    parse_generate,
)
from kvrouting_simulator.engine_process.rank import Rank
from kvrouting_simulator.engine_process.replies import DONE, generate_reply, sse
from kvrouting_simulator.engine_process.text_stream import TextStream
from kvrouting_simulator.engine_process.tracing import started


class _AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


_abort = msgspec.json.Decoder(_AbortBody)


class GenerateHandlers:
    """Handlers of the native paths."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> Sequence[web.RouteDef]:
        """Paths and handlers."""
        return [
            web.post("/generate", self.generate),
            web.put("/generate", self.generate),
            web.post("/abort_request", self.abort),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answers to text or token ids, one or a list."""
        body, given, is_list = parse_generate(await request.read())
        job = await self._job(body, given, is_list=is_list)
        rank, generations = await self._engine.start(job)
        started(request, generations)
        several = is_list or job.n > 1
        if body.stream:
            return await streamed(request, rank, generations, self._stream(rank, generations, several))
        await collected(rank, generations)
        replies = [self._reply(rank, generation) for generation in generations]
        return json_reply(replies if several else replies[0])

    async def _job(self, body: GenerateBody, given: Sequence[object], *, is_list: bool) -> Job:
        params = _per_prompt(body, prompts=len(given), is_list=is_list)
        namespace = self._engine.namespace(
            model=self._engine.served_model, lora_path=body.lora_path, cache_salt=body.cache_salt
        )
        if isinstance(body.rid, list) and len(body.rid) != len(given):
            raise BadRequestError(f"rid has {len(body.rid)} ids for {len(given)} prompts", param="rid")
        return Job(
            prompts=await self._engine.prompts(given, namespace),  # type: ignore[arg-type]
            n=params[0].n,
            ends=[_end(one) for one in params],
            dp_rank=body.data_parallel_rank if body.routed_dp_rank is None else body.routed_dp_rank,
            request_id=body.rid[0] if isinstance(body.rid, list) else body.rid,
        )

    async def _stream(self, rank: Rank, generations: Sequence[Generation], several: bool) -> AsyncIterator[bytes]:
        async for index, generation, _, text in pieces(generations, self._engine.tokenizer):
            reply = generate_reply(generation, text=text, dp_rank=self._told_rank(rank))
            yield sse({**reply, "index": index} if several else reply)
        yield DONE

    def _reply(self, rank: Rank, generation: Generation) -> object:
        text = TextStream(self._engine.tokenizer, length=generation.answer.text_length)
        text.extend(generation.tokens, last=True)
        return generate_reply(generation, text=text.text, dp_rank=self._told_rank(rank))

    def _told_rank(self, rank: Rank) -> int | None:
        return rank.number if len(self._engine.ranks) > 1 else None

    async def abort(self, request: web.Request) -> web.Response:
        """Aborts the requests whose id starts with `rid`, or all."""
        try:
            body = _abort.decode(await request.read())
        except msgspec.DecodeError as error:
            raise BadRequestError(f"the request body is not valid: {error}") from error
        if body.rid or body.abort_all:
            for rank in self._engine.ranks:
                rank.abort_all("" if body.abort_all else body.rid)
        return web.Response(status=200)


def _per_prompt(body: GenerateBody, *, prompts: int, is_list: bool) -> Sequence[SamplingParams]:
    """One for each prompt, or a single one for all. Raises: BadRequestError for a list that SGLang does not take."""
    params = body.sampling_params
    if not isinstance(params, list):
        return [params or SamplingParams()]
    if not is_list:
        raise BadRequestError(
            "sampling_params is a list, the prompt is not: give a list of prompts", param="sampling_params"
        )
    if len(params) != prompts:
        raise BadRequestError(
            f"sampling_params has {len(params)} entries for {prompts} prompts", param="sampling_params"
        )
    if len({one.n for one in params}) > 1:
        raise BadRequestError("n must be the same in all sampling_params", param="sampling_params")
    return params


def _end(params: SamplingParams) -> AnswerEnd:
    return AnswerEnd(
        max_tokens=None if params.max_new_tokens is None else max(1, params.max_new_tokens),
        stops=[params.stop] if isinstance(params.stop, str) else params.stop or (),
    )
