"""A router that is nothing but its sync service: it checks every rule of the protocol and keeps the views.

Faults are attributes: stop to acknowledge, refuse the token, ask for snapshots, answer with requests under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvrouting.v1 import sync_pb2, sync_pb2_grpc

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SyncedWorker:
    """One stream's view. violations: rules of the protocol that the worker broke."""

    hello: sync_pb2.Hello
    replies: asyncio.Queue[sync_pb2.RouterMessage | None]
    parents: dict[int, int] = field(default_factory=dict)
    staged: dict[int, int] | None = None
    next_sequence: int | None = None
    messages: int = 0
    snapshots: int = 0
    heartbeats: list[sync_pb2.Heartbeat] = field(default_factory=list)
    comparisons: int = 0
    draining: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    open: bool = True
    in_order: bool = False

    @property
    def blocks(self) -> set[int]:
        return set(self.parents)

    def check(self, rule: str, *, holds: bool) -> None:
        if not holds:
            self.violations.append(rule)


class FakeRouter(sync_pb2_grpc.WorkerSyncServicer):
    """An asynchronous context manager; `port` after it is entered."""

    def __init__(
        self,
        *,
        window: int = 8,
        heartbeat_s: float = 0.1,
        join_token: str | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.window = window
        self.heartbeat_s = heartbeat_s
        self.join_token = join_token
        self.port = 0
        self.acknowledges = True
        self.answers_drain = True
        self.requests_under_way = 0
        self.streams: list[SyncedWorker] = []
        self.refused = 0
        self.refuses_with: tuple[grpc.StatusCode, str] | None = None
        self._credentials = credentials

    async def __aenter__(self) -> FakeRouter:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve; the first time on a free port, later on the same."""
        options = [("grpc.http2.min_ping_interval_without_data_ms", 1000), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        sync_pb2_grpc.add_WorkerSyncServicer_to_server(self, self._server)
        place = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(place)
        else:
            self.port = self._server.add_secure_port(place, self._credentials)
        await self._server.start()

    async def stop(self) -> None:
        """As a process dies; its views are gone."""
        await self._server.stop(None)
        for stream in self.streams:
            stream.open = False

    def worker(self, rank: int = 0) -> SyncedWorker | None:
        """The open stream of a rank, if there is one."""
        found = [stream for stream in self.streams if stream.open and stream.hello.dp_rank == rank]
        return found[-1] if found else None

    def blocks(self, rank: int = 0) -> set[int] | None:
        """What the router believes that a rank holds; None: no complete snapshot yet."""
        worker = self.worker(rank)
        return None if worker is None or worker.next_sequence is None else worker.blocks

    def ask_snapshot(self, rank: int = 0) -> None:
        """As a router in doubt."""
        worker = self.worker(rank)
        assert worker is not None
        message = sync_pb2.RouterMessage(snapshot_request=sync_pb2.SnapshotRequest(reason="test"))
        worker.replies.put_nowait(message)

    def acknowledge_all(self) -> None:
        """Catch up with what was not acknowledged."""
        self.acknowledges = True
        for worker in self.streams:
            self._acknowledge(worker)

    def finish_requests(self) -> None:
        """The requests under way end."""
        self.requests_under_way = 0
        for worker in self.streams:
            if worker.draining:
                self._tell_in_flight(worker)

    # --- the service ---

    async def Sync(  # noqa: N802  (the name is the service's)
        self, request_iterator: AsyncIterator[sync_pb2.WorkerMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[sync_pb2.RouterMessage]:
        metadata = dict(context.invocation_metadata() or ())
        if self.join_token is not None and metadata.get("authorization") != f"Bearer {self.join_token}":
            self.refused += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong join token")
        if self.refuses_with is not None:
            self.refused += 1
            await context.abort(*self.refuses_with)
        first = await anext(aiter(request_iterator))
        worker = SyncedWorker(first.hello, asyncio.Queue())
        worker.check("hello first", holds=first.WhichOneof("body") == "hello")
        self.streams.append(worker)
        welcome = sync_pb2.Welcome(window_messages=self.window, heartbeat_interval_s=self.heartbeat_s)
        yield sync_pb2.RouterMessage(welcome=welcome)
        reading = asyncio.create_task(self._read(request_iterator, worker))
        try:
            while (reply := await worker.replies.get()) is not None:
                yield reply
        finally:
            worker.open = False
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[sync_pb2.WorkerMessage], worker: SyncedWorker) -> None:
        async for message in messages:
            kind = message.WhichOneof("body")
            worker.check(f"no second {kind}", holds=kind != "hello")
            if kind == "snapshot":
                self._take_chunk(worker, message.snapshot)
            elif kind == "delta":
                self._take_delta(worker, message.delta)
            elif kind == "heartbeat":
                _compare(worker, message.heartbeat)
            elif kind == "draining":
                worker.draining.append(message.draining.reason)
                if self.answers_drain:
                    self._tell_in_flight(worker)
        worker.in_order = True
        worker.replies.put_nowait(None)

    def _take_chunk(self, worker: SyncedWorker, chunk: sync_pb2.SnapshotChunk) -> None:
        worker.check("epoch of the hello", holds=chunk.epoch == worker.hello.epoch)
        if chunk.first:
            worker.staged = {}
        worker.check("first chunk first", holds=worker.staged is not None)
        staged = {} if worker.staged is None else worker.staged
        _extend(worker, staged, chunk.runs)
        if chunk.last:
            worker.parents, worker.staged = staged, None
            worker.next_sequence = chunk.next_sequence
            worker.snapshots += 1
        self._count(worker)

    def _take_delta(self, worker: SyncedWorker, delta: sync_pb2.Delta) -> None:
        worker.check("epoch of the hello", holds=delta.epoch == worker.hello.epoch)
        worker.check("contiguous sequence", holds=delta.sequence == worker.next_sequence)
        worker.check("no delta inside a snapshot", holds=worker.staged is None)
        worker.next_sequence = delta.sequence + 1
        if delta.clear:
            worker.parents.clear()
        for block in delta.trimmed:
            worker.check("trimmed what is there", holds=worker.parents.pop(block, None) is not None)
        _extend(worker, worker.parents, delta.extended)
        if delta.trimmed:
            closed = worker.parents.keys() >= set(worker.parents.values()) - {0}
            worker.check("closed under prefixes", holds=closed)
        self._count(worker)

    def _count(self, worker: SyncedWorker) -> None:
        worker.messages += 1
        if self.acknowledges:
            self._acknowledge(worker)

    def _acknowledge(self, worker: SyncedWorker) -> None:
        message = sync_pb2.RouterMessage(ack=sync_pb2.Ack(messages=worker.messages))
        worker.replies.put_nowait(message)

    def _tell_in_flight(self, worker: SyncedWorker) -> None:
        answer = sync_pb2.InFlight(requests=self.requests_under_way)
        worker.replies.put_nowait(sync_pb2.RouterMessage(in_flight=answer))


def _extend(worker: SyncedWorker, parents: dict[int, int], runs: Any) -> None:
    for run in runs:
        parent = run.parent
        for block in run.blocks:
            worker.check("parent before child", holds=parent == 0 or parent in parents)
            parents[block] = parent
            parent = block


def _compare(worker: SyncedWorker, beat: sync_pb2.Heartbeat) -> None:
    worker.heartbeats.append(beat)
    worker.check("epoch of the hello", holds=beat.epoch == worker.hello.epoch)
    if worker.next_sequence is None or worker.staged is not None:
        return
    worker.comparisons += 1
    claim = (beat.next_sequence, beat.blocks, beat.digest)
    held = (worker.next_sequence, len(worker.parents), sum(worker.parents) & _MASK)
    worker.check(f"heartbeat {claim} describes the view {held}", holds=claim == held)
