"""The gRPC side of the sync: who may join, and messages to and from a session."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from kvrouting.v1 import sync_pb2, sync_pb2_grpc
from kvrouting_core.identity import WorkerIdentity
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_router.class_files import unknown_class
from kvrouting_router.metrics import RouterMetrics
from kvrouting_router.options import SyncOptions
from kvrouting_router.pool import Pool
from kvrouting_router.refusal_log import RefusalLog
from kvrouting_router.sync_session import Acknowledge, AskSnapshot, Reply, SyncSession, TellInFlight
from kvrouting_router.worker_registry import EngineLoad, Mirror, Vitals, WorkerFacts

_logger = logging.getLogger(__name__)

# Several messages are acknowledged at once; the sender measures its lag by it, so not much later.
_ACKNOWLEDGE_AFTER_S = 0.01
_HELLO_LIMIT_S = 10.0

Context = grpc.aio.ServicerContext[sync_pb2.WorkerMessage, sync_pb2.RouterMessage]

_MIRRORS: dict[int, Mirror] = {
    sync_pb2.MIRROR_SOURCE_EXACT: Mirror.EXACT,
    sync_pb2.MIRROR_SOURCE_PARTIAL: Mirror.PARTIAL,
    sync_pb2.MIRROR_SOURCE_APPROXIMATE: Mirror.APPROXIMATE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolTerms:
    """What a worker must agree with to join. join_token: None: everybody may. gpu_classes: those that are known."""

    pool: str
    model: str
    block_size_tokens: int
    hash_key_id: str
    tokenizer_fingerprint: str
    gpu_classes: Collection[str]
    join_token: str | None


class HandshakeRefusedError(Exception):
    """A Hello that does not fit. kind: one word for the metric."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_hello(hello: sync_pb2.Hello, terms: PoolTerms) -> WorkerFacts:
    """The worker's facts. Raises: HandshakeRefusedError naming the value and what it should be."""
    for name, theirs, ours in (
        ("pool", hello.pool, terms.pool),
        ("model", hello.model, terms.model),
        ("block_size_tokens", hello.block_size_tokens, terms.block_size_tokens),
        ("hash_key_id", hello.hash_key_id, terms.hash_key_id),
    ):
        if theirs != ours:
            raise HandshakeRefusedError(name, f"{name} differs: the worker has {theirs!r}, this router {ours!r}")
    if hello.gpu_class and hello.gpu_class not in terms.gpu_classes:
        raise HandshakeRefusedError("gpu_class", unknown_class(hello.gpu_class, terms.gpu_classes))
    try:
        identity = WorkerIdentity(pool=hello.pool, pod_uid=hello.pod_uid, dp_rank=hello.dp_rank)
        return WorkerFacts(
            worker=identity.worker_id,
            pod_uid=hello.pod_uid,
            dp_rank=hello.dp_rank,
            dp_size=max(1, hello.dp_size),
            epoch=_epoch(hello),
            endpoint=hello.http_endpoint,
            worker_class=hello.gpu_class,
            capacity_tokens=hello.capacity_tokens,
            mirror=_mirror(hello.mirror_source),
            scheduler=_scheduler(hello.scheduler),
            engine_version=hello.engine_version,
            page_size_tokens=hello.page_size_tokens,
            tokenizer_fingerprint=hello.tokenizer_fingerprint,
            tokenizer_mismatch=_mismatch(hello.tokenizer_fingerprint, terms.tokenizer_fingerprint),
            required_eviction=hello.required_eviction_policy,
            proven_eviction=hello.eviction_policy.name if hello.eviction_policy.proven_live else "",
        )
    except ValueError as error:
        raise HandshakeRefusedError("value", str(error)) from error


def _epoch(hello: sync_pb2.Hello) -> str:
    if not hello.epoch:
        raise ValueError("epoch is empty: each engine process needs one of its own")
    return hello.epoch


def _mirror(source: int) -> Mirror:
    mirror = _MIRRORS.get(source)
    if mirror is None:
        raise ValueError(f"mirror_source {source} is none of exact, partial, approximate")
    return mirror


def _mismatch(theirs: str, ours: str) -> str:
    """Only two known fingerprints can differ; it is flagged, for the engine may still serve."""
    if theirs and ours and theirs != ours:
        return f"the worker's tokenizer is {theirs}, this router's {ours}"
    return ""


def _scheduler(scheduler: sync_pb2.Scheduler) -> SchedulerOptions:
    """Zero means that the worker does not say; then SGLang's defaults hold."""
    default = SchedulerOptions()
    return SchedulerOptions(
        max_running_requests=scheduler.max_running_requests or default.max_running_requests,
        chunked_prefill_tokens=scheduler.chunked_prefill_tokens or default.chunked_prefill_tokens,
        max_prefill_tokens=scheduler.max_prefill_tokens or default.max_prefill_tokens,
        prefill_decode_interval=scheduler.prefill_decode_interval,
        mixed_chunk=scheduler.mixed_chunk,
    )


def read_heartbeat(beat: sync_pb2.Heartbeat, facts: WorkerFacts) -> Vitals:
    """A heartbeat's content. A source it does not name is that of the Hello."""
    return Vitals(
        engine_healthy=beat.engine_healthy,
        events_flowing=beat.events_flowing,
        end_to_end_verified=beat.end_to_end_verified,
        reason=beat.reason,
        blocks=beat.blocks,
        cached_tokens=beat.cached_tokens,
        eviction_policy=beat.eviction_policy.name,
        eviction_proven_live=beat.eviction_policy.proven_live,
        mirror=_MIRRORS.get(beat.mirror_source, facts.mirror),
        load=_load(beat.load) if beat.HasField("load") else None,
    )


def _load(load: sync_pb2.Load) -> EngineLoad:
    return EngineLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        used_tokens=load.used_tokens,
        max_total_tokens=load.max_total_tokens,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        total_prefill_uncached_tokens=load.total_prefill_uncached_tokens,
        total_prefill_busy_us=load.total_prefill_busy_us,
        age_s=load.age_s,
    )


def _as_message(reply: Reply) -> sync_pb2.RouterMessage:
    if isinstance(reply, Acknowledge):
        return sync_pb2.RouterMessage(ack=sync_pb2.Ack(messages=reply.messages))
    if isinstance(reply, AskSnapshot):
        return sync_pb2.RouterMessage(snapshot_request=sync_pb2.SnapshotRequest(reason=reply.reason))
    if isinstance(reply, TellInFlight):
        return sync_pb2.RouterMessage(in_flight=sync_pb2.InFlight(requests=reply.requests))
    raise TypeError(f"no message for {reply!r}")


class WorkerSyncService(sync_pb2_grpc.WorkerSyncServicer):
    """One call of `Sync` per worker's stream."""

    def __init__(
        self,
        *,
        pool: Pool,
        terms: PoolTerms,
        options: SyncOptions,
        metrics: RouterMetrics,
        now_s: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._terms = terms
        self._options = options
        self._metrics = metrics
        self._now_s = now_s
        self._refusals = RefusalLog(now_s=now_s)

    async def Sync(self, _requests: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Runs until the worker, its successor on the same identity, or this router ends the stream."""
        await self._check_token(context)
        facts = await self._handshake(context)
        handshake = self._pool.hello(facts)
        if handshake.stream is None:
            await self._refuse(context, HandshakeRefusedError("gone", handshake.reason))
        _logger.info(
            "worker joined the sync",
            extra={"fields": {"worker": facts.worker, "epoch": facts.epoch, "how": handshake.reason}},
        )
        await self._run(context, facts, handshake.stream)

    async def _run(self, context: Context, facts: WorkerFacts, stream: int) -> None:
        outbox: asyncio.Queue[Reply] = asyncio.Queue()
        session = SyncSession(
            pool=self._pool,
            worker=facts.worker,
            epoch=facts.epoch,
            stream=stream,
            send=outbox.put_nowait,
            metrics=self._metrics,
            slice_blocks=self._options.slice_blocks,
            now_s=self._now_s,
        )
        self._pool.stream_opened(facts.worker, session)
        await context.write(self._welcome())
        reason = "the stream was closed"
        writer = asyncio.create_task(self._write(context, outbox))
        reader = asyncio.create_task(self._read(context, session, facts, outbox))
        try:
            await asyncio.wait((reader, session.ended), return_when=asyncio.FIRST_COMPLETED)
            if session.ended.done():
                reason = session.ended.result()
                await context.abort(grpc.StatusCode.ABORTED, reason)
            reader.result()
        except asyncio.CancelledError:
            reason = "the stream broke"
            raise
        finally:
            reader.cancel()
            writer.cancel()
            session.close(reason=reason)
            _logger.info("sync stream ended", extra={"fields": {"worker": facts.worker, "reason": reason}})

    def _welcome(self) -> sync_pb2.RouterMessage:
        return sync_pb2.RouterMessage(
            welcome=sync_pb2.Welcome(
                window_messages=self._options.window_messages,
                heartbeat_interval_s=self._options.heartbeat_interval_s,
            )
        )

    async def _check_token(self, context: Context) -> None:
        if self._terms.join_token is None:
            return
        metadata = dict(context.invocation_metadata() or ())
        given = str(metadata.get("authorization", ""))
        if not hmac.compare_digest(given.encode(), f"Bearer {self._terms.join_token}".encode()):
            self._metrics.handshakes_refused.labels("token").inc()
            self._refusals.tell("a wrong join token" if given else "no join token", peer=context.peer())
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "metadata authorization must be 'Bearer <join token of the pool>'"
            )

    async def _handshake(self, context: Context) -> WorkerFacts:
        try:
            async with asyncio.timeout(_HELLO_LIMIT_S):
                message = await context.read()
        except TimeoutError:
            message = None
        if not isinstance(message, sync_pb2.WorkerMessage) or message.WhichOneof("body") != "hello":
            await self._refuse(context, HandshakeRefusedError("order", "the first message must be a Hello"))
        try:
            return read_hello(message.hello, self._terms)
        except HandshakeRefusedError as error:
            await self._refuse(context, error)

    async def _refuse(self, context: Context, error: HandshakeRefusedError) -> NoReturn:
        self._metrics.handshakes_refused.labels(error.kind).inc()
        self._refusals.tell(str(error), peer=context.peer())
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise error  # abort has raised

    async def _read(
        self, context: Context, session: SyncSession, facts: WorkerFacts, outbox: asyncio.Queue[Reply]
    ) -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.TimerHandle | None = None

        def acknowledge() -> None:
            nonlocal due
            due = None
            outbox.put_nowait(session.acknowledgement())

        try:
            while isinstance(message := await context.read(), sync_pb2.WorkerMessage):
                if await self._take(message, session, facts, context) and due is None:
                    due = loop.call_later(_ACKNOWLEDGE_AFTER_S, acknowledge)
        finally:
            if due is not None:
                due.cancel()

    async def _take(
        self, message: sync_pb2.WorkerMessage, session: SyncSession, facts: WorkerFacts, context: Context
    ) -> bool:
        """Hands one message to the session. Returns: whether it counts for acknowledgements."""
        body = message.WhichOneof("body")
        if body == "delta":
            delta = message.delta
            await session.delta(
                epoch=delta.epoch,
                sequence=delta.sequence,
                clear=delta.clear,
                trimmed=delta.trimmed,
                extended=delta.extended,
            )
            return True
        if body == "snapshot":
            chunk = message.snapshot
            await session.snapshot(
                epoch=chunk.epoch,
                first=chunk.first,
                last=chunk.last,
                next_sequence=chunk.next_sequence,
                runs=chunk.runs,
            )
            return True
        if body == "heartbeat":
            beat = message.heartbeat
            session.heartbeat(
                epoch=beat.epoch,
                next_sequence=beat.next_sequence,
                digest=beat.digest,
                vitals=read_heartbeat(beat, facts),
            )
        elif body == "draining":
            session.draining(epoch=message.draining.epoch, reason=message.draining.reason)
        elif body == "hello":
            await self._refuse(context, HandshakeRefusedError("order", "a stream has one Hello, its first message"))
        return False

    async def _write(self, context: Context, outbox: asyncio.Queue[Reply]) -> None:
        while True:
            await context.write(_as_message(await outbox.get()))
