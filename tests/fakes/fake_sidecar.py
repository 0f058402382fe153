"""A sidecar that is nothing but its stream: tests say each message themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from kvrouting.v1 import sync_pb2, sync_pb2_grpc

MASK = (1 << 64) - 1
# Only a test that fails ever waits so long.
_PATIENCE_S = 30.0


def hello(**changes: Any) -> sync_pb2.Hello:
    """A Hello that fits `pool p, model m, block size 16`, with changes."""
    values: dict[str, Any] = {
        "pool": "p",
        "pod_uid": "pod-a",
        "dp_rank": 0,
        "epoch": "e1",
        "model": "m",
        "block_size_tokens": 16,
        "hash_key_id": "",
        "capacity_tokens": 16_000,
        "gpu_class": "L40",
        "http_endpoint": "http://127.0.0.1:1",
        "dp_size": 1,
        "mirror_source": sync_pb2.MIRROR_SOURCE_EXACT,
        "eviction_policy": sync_pb2.EvictionPolicy(name="rlt", proven_live=True),
        "page_size_tokens": 1,
        "engine_version": "0.5.23",
    }
    return sync_pb2.Hello(**values | changes)


class FakeSidecar:
    """One stream of one worker. It keeps the view that the router should have."""

    def __init__(self, target: str, greeting: sync_pb2.Hello, *, token: str | None, channel: grpc.aio.Channel | None):
        self.hello = greeting
        self._channel = channel or grpc.aio.insecure_channel(target)
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
        stub: Any = sync_pb2_grpc.WorkerSyncStub(self._channel)
        self.call = stub.Sync(metadata=metadata)
        self.replies: list[sync_pb2.RouterMessage] = []
        self._changed = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self.blocks: set[int] = set()
        self.next_sequence = 0
        self.acknowledged = 0
        self.closed = False

    async def connect(self) -> sync_pb2.Welcome:
        """Says Hello. Returns: the Welcome. Raises: AioRpcError if the router refuses."""
        await self.call.write(sync_pb2.WorkerMessage(hello=self.hello))
        message = await self.call.read()
        if not isinstance(message, sync_pb2.RouterMessage):
            await self.call  # raises the status
        self._reader = asyncio.create_task(self._read())
        welcome: sync_pb2.Welcome = message.welcome
        return welcome

    async def _read(self) -> None:
        try:
            while isinstance(message := await self.call.read(), sync_pb2.RouterMessage):
                async with self._changed:
                    self.replies.append(message)
                    if message.HasField("ack"):
                        self.acknowledged = message.ack.messages
                    self._changed.notify_all()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        async with self._changed:
            self.closed = True
            self._changed.notify_all()

    async def reply(self, kind: str, count: int = 1) -> Any:
        """The count-th reply of a kind, waited for."""
        async with asyncio.timeout(_PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self._of(kind)) >= count)
        return self._of(kind)[count - 1]

    def _of(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.replies if m.WhichOneof("body") == kind]

    def count(self, kind: str) -> int:
        """Replies of a kind so far."""
        return len(self._of(kind))

    async def acks(self, messages: int) -> None:
        """Waits until so many messages are acknowledged."""
        async with asyncio.timeout(_PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.acknowledged >= messages)

    async def ended(self) -> None:
        """Waits until the router has ended the stream."""
        async with asyncio.timeout(_PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.closed)

    async def snapshot(self, *chains: Sequence[int], chunk: int = 1 << 20, epoch: str | None = None) -> None:
        """Chains of blocks, each from a prompt's start."""
        self.blocks = {b for c in chains for b in c}
        runs = [(0, list(c)) for c in chains] or [(0, [])]
        pieces = [(parent, c[i : i + chunk], i) for parent, c in runs for i in range(0, max(1, len(c)), chunk)]
        for number, (_, piece, start) in enumerate(pieces):
            chain = pieces[number][1]
            parent = 0 if start == 0 else pieces[number - 1][1][-1]
            await self.send(
                snapshot=sync_pb2.SnapshotChunk(
                    epoch=epoch or self.hello.epoch,
                    first=number == 0,
                    last=number == len(pieces) - 1,
                    next_sequence=self.next_sequence,
                    runs=[sync_pb2.BlockRun(parent=parent, blocks=chain)] if piece else [],
                )
            )

    async def delta(
        self,
        *,
        extended: Sequence[tuple[int, Sequence[int]]] = (),
        trimmed: Sequence[int] = (),
        clear: bool = False,
        sequence: int | None = None,
        epoch: str | None = None,
    ) -> None:
        """The next change; a given sequence breaks the order on purpose."""
        if sequence is None:
            sequence = self.next_sequence
            self.next_sequence += 1
            self.blocks = (set() if clear else self.blocks) - set(trimmed) | {b for _, c in extended for b in c}
        await self.send(
            delta=sync_pb2.Delta(
                epoch=epoch or self.hello.epoch,
                sequence=sequence,
                clear=clear,
                trimmed=trimmed,
                extended=[sync_pb2.BlockRun(parent=p, blocks=c) for p, c in extended],
            )
        )

    async def heartbeat(self, **changes: Any) -> None:
        """A healthy heartbeat with the view's count and digest, with changes."""
        values: dict[str, Any] = {
            "epoch": self.hello.epoch,
            "next_sequence": self.next_sequence,
            "blocks": len(self.blocks),
            "digest": sum(self.blocks) & MASK,
            "mirror_source": self.hello.mirror_source,
            "engine_healthy": True,
            "events_flowing": True,
            "eviction_policy": self.hello.eviction_policy,
            "cached_tokens": 16 * len(self.blocks),
            "end_to_end_verified": True,
        }
        await self.send(heartbeat=sync_pb2.Heartbeat(**values | changes))

    async def draining(self, reason: str = "scale down") -> None:
        """The worker leaves."""
        await self.send(draining=sync_pb2.Draining(epoch=self.hello.epoch, reason=reason))

    async def send(self, **body: Any) -> None:
        """Any message."""
        await self.call.write(sync_pb2.WorkerMessage(**body))

    async def close(self) -> None:
        """Breaks the stream off, as a process that dies."""
        self.call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)


@contextlib.asynccontextmanager
async def fake_sidecar(
    target: str, greeting: sync_pb2.Hello, *, token: str | None = None, channel: grpc.aio.Channel | None = None
) -> AsyncIterator[FakeSidecar]:
    """A stream that is closed at the end; it has said nothing yet."""
    sidecar = FakeSidecar(target, greeting, token=token, channel=channel)
    try:
        yield sidecar
    finally:
        await sidecar.close()
