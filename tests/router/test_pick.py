"""The decision without the relay, over gRPC; the health service; TLS."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrouting.v1 import pick_pb2, pick_pb2_grpc, sync_pb2
from kvrouting_core.identity import WorkerId
from kvrouting_router.client_call import ApiKeys
from kvrouting_router.grpc_server import TlsFiles
from tests.fakes.fake_http_engine import running_engine
from tests.fakes.fake_sidecar import fake_sidecar
from tests.router.router_under_test import RouterUnderTest, chat, config, options, running_router, text_blocks

Event = pick_pb2.ReportRequest


@asynccontextmanager
async def picker(router: RouterUnderTest) -> AsyncIterator[Any]:
    """A client of the Picker."""
    async with grpc.aio.insecure_channel(router.grpc_target) as channel:
        yield pick_pb2_grpc.PickerStub(channel)


async def test_a_pick_reserves_until_it_is_reported() -> None:
    async with running_engine() as engine, running_router(config(policy="lbgr")) as router, picker(router) as stub:
        sidecar = await router.sidecar(engine, dp_rank=1, dp_size=2)
        await sidecar.delta(extended=[(0, text_blocks("x" * 64))])
        await sidecar.acks(2)
        pick = await stub.Pick(pick_pb2.PickRequest(model="m", text="x" * 100))
        assert (pick.worker, pick.http_endpoint, pick.dp_rank) == ("pod-a/1", engine.url, 1)
        decision = json.loads(pick.decision_json)
        assert decision["candidates"][0]["matched_tokens"] == 64
        _, page = await router.get("/debug/decisions?last=1")
        assert json.loads(page) == [decision]
        assert (await router.worker("pod-a/1"))["in_flight"] == 1
        await stub.Report(Event(request_id=pick.request_id, event=Event.EVENT_FIRST_TOKEN))
        assert (await router.worker("pod-a/1"))["in_flight"] == 1
        done = Event(request_id=pick.request_id, event=Event.EVENT_COMPLETED, output_tokens=2, cached_tokens=64)
        await stub.Report(done)
        worker = await router.worker("pod-a/1")
        assert (worker["in_flight"], worker["reported_cached_tokens"]) == (0, 64)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Report(done)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("event", [Event.EVENT_FAILED, Event.EVENT_CANCELLED])
async def test_each_final_report_releases(event: Any) -> None:
    async with running_engine() as engine, running_router() as router, picker(router) as stub:
        await router.sidecar(engine)
        pick = await stub.Pick(pick_pb2.PickRequest(token_ids=pick_pb2.TokenIds(ids=range(40))))
        await stub.Report(Event(request_id=pick.request_id, event=event))
        await router.nothing_is_left()


async def test_a_pick_without_a_report_is_released_after_its_limit() -> None:
    settings = config(options=options(times={"pick_s": 0.2}))
    async with running_engine() as engine, running_router(settings) as router, picker(router) as stub:
        await router.sidecar(engine)
        in_flight: list[int] = []
        router.router.pool.dispatcher.listen(WorkerId("pod-a/0"), in_flight.append)
        await stub.Pick(pick_pb2.PickRequest(chat_request_json=json.dumps(chat(n=2))))
        await router.until(lambda: in_flight == [1, 0])
        await router.nothing_is_left()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (pick_pb2.PickRequest(model="other", text="x"), grpc.StatusCode.NOT_FOUND),
        (pick_pb2.PickRequest(chat_request_json="{"), grpc.StatusCode.INVALID_ARGUMENT),
        (pick_pb2.PickRequest(chat_request_json='{"messages":[]}'), grpc.StatusCode.INVALID_ARGUMENT),
        (pick_pb2.PickRequest(chat_request_json=json.dumps(chat(n=5000))), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_picks(request_: Any, status: grpc.StatusCode) -> None:
    async with running_engine() as engine, running_router() as router, picker(router) as stub:
        await router.sidecar(engine)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Pick(request_)
        assert error.value.code() is status
        await router.nothing_is_left()


async def test_picks_without_workers_without_keys_and_unknown_events() -> None:
    async with running_engine() as engine, running_router(config(api_keys=ApiKeys(["k"]))) as router:
        router.session.headers["Authorization"] = "Bearer k"
        async with picker(router) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Pick(pick_pb2.PickRequest(text="x"))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            key = (("authorization", "Bearer k"),)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Pick(pick_pb2.PickRequest(text="x"), metadata=key)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            await router.sidecar(engine)
            pick = await stub.Pick(pick_pb2.PickRequest(text="x", lora_adapter="a", max_output_tokens=3), metadata=key)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Report(Event(request_id=pick.request_id), metadata=key)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await stub.Report(Event(request_id=pick.request_id, event=Event.EVENT_COMPLETED), metadata=key)
        await router.nothing_is_left()


async def test_the_health_service_answers() -> None:
    async with running_router() as router, grpc.aio.insecure_channel(router.grpc_target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvrouting.v1.WorkerSync", "kvrouting.v1.Picker"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost: files of certificate and key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_the_sync_works_over_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "router")
    worker_cert, worker_key = certificate(tmp_path, "worker")
    settings = config(tls=TlsFiles(certificate=cert, key=key, client_ca=worker_cert))
    async with running_engine() as engine, running_router(settings) as router:
        target = f"localhost:{router.router.grpc_port}"
        without = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(cert.read_bytes()))
        async with fake_sidecar(target, router.greeting(engine), token="join", channel=without) as sidecar:
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await sidecar.connect()
        credentials = grpc.ssl_channel_credentials(cert.read_bytes(), worker_key.read_bytes(), worker_cert.read_bytes())
        channel = grpc.aio.secure_channel(target, credentials)
        async with fake_sidecar(target, router.greeting(engine), token="join", channel=channel) as sidecar:
            await sidecar.connect()
            await sidecar.snapshot([1, 2])
            await router.state("pod-a/0", "live")
            assert sidecar.hello.mirror_source == sync_pb2.MIRROR_SOURCE_EXACT


async def test_a_renewed_certificate_is_shown_to_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "router")
    settings = config(tls=TlsFiles(certificate=cert, key=key))
    async with running_engine() as engine, running_router(settings) as router:
        target = f"localhost:{router.router.grpc_port}"

        def channel() -> grpc.aio.Channel:
            own = [("grpc.use_local_subchannel_pool", 1)]
            return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(cert.read_bytes()), options=own)

        async with fake_sidecar(target, router.greeting(engine), token="join", channel=channel()) as before:
            await before.connect()
            certificate(tmp_path, "router")
            other = router.greeting(engine, pod_uid="pod-b", http_endpoint="http://127.0.0.1:1")
            async with fake_sidecar(target, other, token="join", channel=channel()) as after:
                await after.connect()
            key.unlink()
            async with fake_sidecar(target, other, token="join", channel=channel()) as still:
                await still.connect()
            await before.snapshot([1, 2])
            await router.state("pod-a/0", "live")
