"""Streams to several routers: each has its own pace, and none holds up another or the mirror."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvrouting.v1 import sync_pb2
from kvrouting_sidecar.grpc_channel import RouterCredentials
from kvrouting_sidecar.grpc_conversation import Announcement, Conversation, StreamTimes
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.running_sidecar import NameServer, eventually, in_step, running_sidecar


def _prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


async def test_a_restarted_router_is_warm_after_one_snapshot() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        for seed in range(10):
            engine.ranks[0].store(_prompt(seed))
        await in_step(engine, router)
        await router.stop()
        engine.ranks[0].store(_prompt(11))
        await asyncio.sleep(0.1)
        await router.start()
        await in_step(engine, router)
        assert len(router.streams) == 2
        assert router.streams[1].snapshots == 1
        assert router.streams[0].hello.epoch == router.streams[1].hello.epoch


async def test_a_router_that_stops_acknowledging_costs_bounded_memory_and_catches_up() -> None:
    async with FakeEngine() as engine, FakeRouter(window=3) as router, running_sidecar(engine, router) as sidecar:
        await eventually(lambda: router.blocks() is not None)
        router.acknowledges = False
        rank = engine.ranks[0]
        most_pending = most_unacknowledged = 0
        for turn in range(60):
            rank.store(_prompt(turn, 320))
            if turn >= 4:
                rank.trim(_prompt(turn - 4, 320), keep_pages=0)
            await asyncio.sleep(0.02)
            status = sidecar.streams.statuses()[0]
            most_pending = max(most_pending, status.pending_blocks)
            most_unacknowledged = max(most_unacknowledged, status.unacknowledged_messages)
        assert most_unacknowledged == 3
        # The two views together: some 5 prompts of 20 blocks each.
        assert most_pending <= 2 * 6 * 20
        status = sidecar.streams.statuses()[0]
        assert status.lag_s > 0
        router.acknowledge_all()
        await in_step(engine, router)
        await eventually(lambda: sidecar.streams.statuses()[0].lag_s == 0)


async def test_a_slow_router_holds_up_neither_the_other_nor_the_mirror() -> None:
    async with (
        FakeEngine() as engine,
        FakeRouter(window=2) as slow,
        FakeRouter() as quick,
        running_sidecar(engine, slow, quick) as sidecar,
    ):
        await eventually(lambda: slow.blocks() is not None and quick.blocks() is not None)
        slow.acknowledges = False
        for seed in range(20):
            engine.ranks[0].store(_prompt(seed))
            await in_step(engine, quick)
        assert sidecar.ranks[0].mirror.blocks == len(quick.blocks() or ())
        assert len(slow.blocks() or ()) < len(quick.blocks() or ())
        slow.acknowledge_all()
        await in_step(engine, slow, quick)


class _StuckCall:
    """A transport that takes the Hello and then nothing: its buffers are full."""

    def __init__(self) -> None:
        self.written: list[sync_pb2.WorkerMessage] = []

    async def write(self, request: sync_pb2.WorkerMessage) -> None:
        if self.written:
            await asyncio.Event().wait()
        self.written.append(request)

    async def done_writing(self) -> None:
        await asyncio.Event().wait()

    async def __aiter__(self) -> AsyncIterator[sync_pb2.RouterMessage]:
        yield sync_pb2.RouterMessage(welcome=sync_pb2.Welcome(window_messages=4, heartbeat_interval_s=1))
        await asyncio.Event().wait()


async def test_a_router_that_takes_nothing_more_is_given_up() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router) as sidecar:
        await in_step(engine, router)
        rank = sidecar.ranks[0]
        talk = Conversation(
            _StuckCall(),
            rank=rank,
            epoch=rank.mirror.epoch or "",
            announcement=Announcement(),
            clock_s=time.monotonic,
            times=StreamTimes(stall_s=0.05),
            on_welcome=lambda: None,
            on_in_flight=lambda: None,
        )
        with pytest.raises(TimeoutError):
            await talk.run()
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)


async def test_streams_follow_the_names() -> None:
    async with FakeEngine() as engine, FakeRouter() as first, FakeRouter() as second:
        names = NameServer([first, second])
        names.addresses[names.names[1]] = frozenset()
        async with running_sidecar(engine, name_server=names) as sidecar:
            engine.ranks[0].store(_prompt(1))
            await in_step(engine, first)
            assert second.worker() is None
            names.addresses[names.names[1]] = frozenset({"127.0.0.1"})
            await in_step(engine, first, second)
            names.addresses[names.names[0]] = frozenset()
            await eventually(lambda: first.worker() is None)
            engine.ranks[0].store(_prompt(2))
            await in_step(engine, second)
            assert [status.router for status in sidecar.streams.statuses()] == [f"127.0.0.1:{second.port}"]


async def test_a_lost_router_is_looked_for_at_once_and_not_at_the_next_look_up() -> None:
    async with FakeEngine() as engine, FakeRouter() as first, FakeRouter() as second:
        names = NameServer([first, second])
        names.addresses[names.names[1]] = frozenset()
        async with running_sidecar(engine, name_server=names, look_up_every_s=3600.0):
            engine.ranks[0].store(_prompt(1))
            await in_step(engine, first)
            names.addresses[names.names[1]] = frozenset({"127.0.0.1"})
            names.addresses[names.names[0]] = frozenset()
            await first.stop()
            await in_step(engine, second)


async def test_a_router_is_looked_for_until_there_is_one() -> None:
    async with FakeEngine() as engine, FakeRouter() as router:
        names = NameServer([router])
        names.addresses[names.names[0]] = frozenset()
        async with running_sidecar(engine, name_server=names, look_up_every_s=3600.0):
            await asyncio.sleep(0.2)
            names.addresses[names.names[0]] = frozenset({"127.0.0.1"})
            await in_step(engine, router)


async def test_two_names_of_one_router_are_one_stream() -> None:
    async with FakeEngine() as engine, FakeRouter() as router:
        names = NameServer([router, router])
        async with running_sidecar(engine, name_server=names) as sidecar:
            await in_step(engine, router)
            assert len(sidecar.streams.statuses()) == 1


async def test_a_requested_snapshot_is_given() -> None:
    async with FakeEngine() as engine, FakeRouter() as router, running_sidecar(engine, router):
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)
        worker = router.worker()
        assert worker is not None
        worker.parents.clear()
        router.ask_snapshot()
        await eventually(lambda: worker.snapshots == 2)
        await in_step(engine, router)


async def test_heartbeats_describe_the_view_that_the_router_has() -> None:
    async with FakeEngine() as engine, FakeRouter(heartbeat_s=0.05) as router, running_sidecar(engine, router):
        worker_rank = engine.ranks[0]
        for turn in range(60):
            worker_rank.store(_prompt(turn))
            if turn > 10:
                worker_rank.trim(_prompt(turn - 10), keep_pages=turn % 50)
            await asyncio.sleep(0.01)
        await in_step(engine, router)
        worker = router.worker()
        assert worker is not None
        await eventually(lambda: worker.comparisons >= 5)
        assert worker.violations == []


async def test_a_wrong_token_is_refused_and_said() -> None:
    async with (
        FakeEngine() as engine,
        FakeRouter(join_token="right") as router,
        running_sidecar(engine, router, credentials=RouterCredentials(join_token="wrong")) as sidecar,
    ):
        await eventually(lambda: router.refused >= 2)
        await eventually(lambda: "UNAUTHENTICATED" in sidecar.streams.statuses()[0].last_error)
        check = next(check for check in sidecar.readiness() if check.name == "router_connected")
        assert "wrong join token" in check.reason
        assert router.streams == []


async def test_the_join_token_is_shown() -> None:
    async with (
        FakeEngine() as engine,
        FakeRouter(join_token="right") as router,
        running_sidecar(engine, router, credentials=RouterCredentials(join_token="right")),
    ):
        engine.ranks[0].store(_prompt(1))
        await in_step(engine, router)


async def test_streams_are_encrypted_when_a_ca_is_given(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test and is not installed")
    certificate, key = _certificate(tmp_path, "router-0")
    tls = grpc.ssl_server_credentials([(key, certificate)])
    async with FakeEngine() as engine, FakeRouter(credentials=tls) as router:
        async with running_sidecar(engine, router, credentials=RouterCredentials(ca=certificate)):
            engine.ranks[0].store(_prompt(1))
            await in_step(engine, router)
        stranger, _ = _certificate(tmp_path, "stranger")
        async with running_sidecar(engine, router, credentials=RouterCredentials(ca=stranger)) as sidecar:
            await eventually(lambda: sidecar.streams.statuses() and sidecar.streams.statuses()[0].last_error)
            assert not sidecar.streams.statuses()[0].connected


def _certificate(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate for a name, and its private key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate.read_bytes(), key.read_bytes()


async def test_a_stopped_sidecar_says_draining_and_ends_its_streams_in_order() -> None:
    async with FakeEngine() as engine, FakeRouter() as first, FakeRouter() as second:
        async with running_sidecar(engine, first, second):
            await in_step(engine, first, second)
        for router in (first, second):
            assert router.streams[-1].draining == ["the worker's sidecar stops"]
            assert router.streams[-1].in_order
