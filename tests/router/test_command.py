"""The command: options, wrong options, and the process from start to SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from kvrouting_core.blocks import ChainHasher
from kvrouting_router.command import policy_parameters, read_hash_key, router
from tests.fakes.fake_http_engine import Answer, chat_chunk, running_engine
from tests.fakes.fake_sidecar import FakeSidecar, hello
from tests.router.router_under_test import PATIENCE_S, chat

COMMAND = [sys.executable, "-m", "kvrouting_router"]


@asynccontextmanager
async def running(
    options: Sequence[str], env: dict[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, int]]]:
    """The process, once it listens, with its ports."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *options, stderr=asyncio.subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    try:
        yield process, await listening(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def listening(process: asyncio.subprocess.Process) -> dict[str, int]:
    """Reads the log up to the line that says the ports."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stderr:
            entry = json.loads(line)
            if entry["event"] == "listening":
                return {"http": entry["http"], "grpc": entry["grpc"]}
    raise AssertionError("the process ended without listening")


FREE = ["--http-port", "0", "--grpc-port", "0"]


async def test_sigterm_lets_a_running_stream_end_and_exits_with_0(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running_engine() as engine:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a"), chat_chunk("b")], gates=[_set(), gate])
        options = ["--model", "m", "--worker", engine.url, "--policy", "round_robin", *FREE]
        async with running(options) as (process, ports), aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{ports['http']}"
            await ready(session, url)
            async with session.post(url + "/v1/chat/completions", json=chat(stream=True)) as response:
                assert await response.content.readany() == chat_chunk("a")
                process.send_signal(signal.SIGTERM)
                await refused(session, url)
                gate.set()
                assert await response.read() == chat_chunk("b")
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until the router has a live worker."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(url + "/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)


async def refused(session: aiohttp.ClientSession, url: str) -> None:
    """Waits until nobody accepts connections any more."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with aiohttp.ClientSession() as fresh, fresh.get(url + "/healthz"):
                    await asyncio.sleep(0.02)
            except aiohttp.ClientError:
                return


async def test_a_request_that_outlasts_the_limit_is_ended_and_the_exit_is_still_clean() -> None:
    async with running_engine() as engine:
        engine.answer = lambda _: Answer(pieces=[chat_chunk("a")], hang=True)
        options = ["--model", "m", "--worker", engine.url, "--shutdown-s", "0.3", *FREE]
        async with running(options) as (process, ports), aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{ports['http']}"
            await ready(session, url)
            async with session.post(url + "/v1/chat/completions", json=chat(stream=True)) as response:
                await response.content.readany()
                process.send_signal(signal.SIGINT)
                async with asyncio.timeout(PATIENCE_S):
                    assert await process.wait() == 0
            async with asyncio.timeout(PATIENCE_S):
                await engine.disconnected.wait()


async def test_options_come_from_the_environment_and_files(tmp_path: Path) -> None:
    key = os.urandom(32)
    (tmp_path / "key").write_text(key.hex() + "\n")
    (tmp_path / "join").write_text("secret\n")
    (tmp_path / "keys").write_text("# clients\n\nalpha\n")
    env = {
        "KVROUTING_ROUTER_MODEL": "m",
        "KVROUTING_ROUTER_POOL": "p",
        "KVROUTING_ROUTER_BLOCK_SIZE": "16",
        "KVROUTING_ROUTER_HASH_KEY_FILE": str(tmp_path / "key"),
        "KVROUTING_ROUTER_JOIN_TOKEN_FILE": str(tmp_path / "join"),
        "KVROUTING_ROUTER_API_KEYS_FILE": str(tmp_path / "keys"),
        "KVROUTING_ROUTER_TOKENIZER": "bytes",
        "KVROUTING_ROUTER_HTTP_PORT": "0",
        "KVROUTING_ROUTER_GRPC_PORT": "0",
        "KVROUTING_ROUTER_POLICY": "lbgr",
    }
    async with (
        running_engine() as engine,
        running([], env) as (_, ports),
        aiohttp.ClientSession(headers={"Authorization": "Bearer alpha"}) as session,
    ):
        greeting = hello(http_endpoint=engine.url, hash_key_id=ChainHasher(key, 16).key_id)
        sidecar = FakeSidecar(f"127.0.0.1:{ports['grpc']}", greeting, token="secret", channel=None)
        await sidecar.connect()
        await sidecar.snapshot([1])
        url = f"http://127.0.0.1:{ports['http']}"
        await ready(session, url)
        async with session.post(url + "/v1/chat/completions", json=chat()) as response:
            assert response.status == 200
        await sidecar.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "Missing option '--model'"),
        (["--model", "m", "--policy", "best"], "'best' is not one of"),
        (["--model", "m", "--block-size", "8"], "8 is not in the range 16<=x<=128"),
        (["--model", "m", "--policy-parameter", "nope=1"], "nope"),
        (["--model", "m", "--policy-parameter", "x"], "'x' must be NAME=VALUE"),
        (["--model", "m", "--worker", "localhost:1"], "worker URL 'localhost:1' must be http://host:port"),
        (["--model", "m", "--hash-key-file", "/does/not/exist"], "does not exist"),
        (["--model", "m", "--gone-s", "5", "--silence-s", "9"], "gone_s 5.0 must exceed silence_s 9.0"),
        (["--model", "m", "--total-s", "0"], "0.0 is not in the range x>0"),
        (["--model", "m", "--idle-s", "inf"], "inf is not a finite number"),
        (["--model", "m", "--max-expected-wait-ms", "nan"], "nan is not a finite number"),
        (["--model", "m", "--tokenizer", "/does/not/exist"], "tokenizer folder '/does/not/exist' does not exist"),
        (["--model", "m", "--grpc-tls-cert-file", __file__], "belong together"),
        (["--model", "m", "--hash-key-file", __file__], "the hash key has"),
        (["--model", "m", "--api-keys-file", os.devnull], "os.devnull"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(options: list[str], says: str, tmp_path: Path) -> None:
    if says == "os.devnull":
        empty = tmp_path / "keys"
        empty.write_text("# none\n")
        options, says = [*options[:-1], str(empty)], "holds no API key"
    result = CliRunner().invoke(router, options)
    assert result.exit_code == 2
    assert says in result.output


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "--model", "m", "--http-port", port, "--grpc-port", "0"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert process.returncode == 1
    assert port in process.stderr
    assert "Unclosed" not in process.stderr


def test_every_option_says_what_it_is_for() -> None:
    output = CliRunner().invoke(router, ["--help"]).output
    assert "--hash-key-file" in output
    assert "--policy" in output


def test_policy_parameters_are_plain_values() -> None:
    given = ("a=1", "b=1.5", "c=true", "d=off", "e=text", "f=null", "g= 2 ")
    expected = {"a": 1, "b": 1.5, "c": True, "d": False, "e": "text", "f": None, "g": 2}
    assert policy_parameters(given) == expected


@pytest.mark.parametrize("content", [b"ab" * 16, b"ab" * 16 + b"\n", bytes(range(100, 116)) + b"\xff"])
def test_a_hash_key_is_hexadecimal_or_raw(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert read_hash_key(file) == (content if content[-1] == 0xFF else b"\xab" * 16)
