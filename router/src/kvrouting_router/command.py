"""The `router` command: options to configuration, and the process around it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import msgspec

from kvrouting_core.blocks import ChainHasher
from kvrouting_core.routing.policy import AdmissionLimits
from kvrouting_core.service_time import StepTimes
from kvrouting_router.api_keys_file import ApiKeysFile
from kvrouting_router.class_files import known_classes, read_class_files, unknown_class
from kvrouting_router.client_call import ApiKeys
from kvrouting_router.command_options import (
    limit_options,
    policy_options,
    pool_options,
    surface_options,
    sync_options,
    telemetry_options,
    tokenizer_options,
)
from kvrouting_router.engine_probe import StaticWorker
from kvrouting_router.grpc_server import TlsFiles
from kvrouting_router.json_log import json_logging
from kvrouting_router.options import (
    BreakerOptions,
    RouterOptions,
    RoutingOptions,
    SizeLimits,
    SyncOptions,
    TimeLimits,
)
from kvrouting_router.prompt_reading import PromptTokenizer
from kvrouting_router.router_process import Router, RouterConfig
from kvrouting_router.tracing import NoTracer, Tracer

_logger = logging.getLogger(__name__)


@click.command()
@pool_options
@surface_options
@tokenizer_options
@policy_options
@limit_options
@sync_options
@telemetry_options
def router(**given: Any) -> None:
    """Serve a pool's HTTP API and send each request to the worker that will end it first."""
    try:
        config = configuration(given)
        tracer = _tracer(tracing=given["tracing"])
        tokenizer = _tokenizer(given["tokenizer"], given["tokenizer_revision"])
        # A wrong policy parameter is the user's to know now, not after the ports are open.
        config.configured_policy(_NoCache())
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    with json_logging(given["log_level"]):
        _run(config, tokenizer, tracer)


def configuration(given: dict[str, Any]) -> RouterConfig:
    """The options as a configuration. Raises: ValueError or OSError naming what is wrong."""
    return RouterConfig(
        pool=given["pool"],
        model=given["model"],
        block_size_tokens=given["block_size"],
        hash_key=_hash_key(given["hash_key_file"], given["block_size"]),
        http_host=given["http_host"],
        http_port=given["http_port"],
        grpc_host=given["grpc_host"],
        grpc_port=given["grpc_port"],
        tls=_tls(given),
        join_token=_secret(given["join_token_file"]),
        api_keys=_api_keys(given["api_keys_file"]),
        engine_key=_secret(given["engine_api_key_file"]),
        policy=given["policy"],
        policy_parameters=policy_parameters(given["policy_parameters"]),
        limits=AdmissionLimits(
            max_waiting=given["max_waiting"],
            max_expected_wait_ms=given["max_expected_wait_ms"],
            max_in_flight_per_worker=given["max_in_flight_per_worker"],
        ),
        seed=given["seed"],
        static_workers=[
            StaticWorker(url=u, worker_class=given["worker_class"], capacity_tokens=given["worker_capacity_tokens"])
            for u in given["workers"]
        ],
        class_times=_class_times(given["class_files"], given["worker_class"]),
        health_path=given["health_path"],
        decisions_file=given["decisions_file"],
        log_decisions=given["log_decisions"],
        tokenizer_threads=given["tokenizer_threads"],
        options=_router_options(given),
    )


def _class_times(paths: tuple[Path, ...], worker_class: str) -> Mapping[str, StepTimes]:
    measured = read_class_files(paths)
    classes = known_classes(measured)
    if worker_class not in classes:
        raise ValueError(f"--worker-class: {unknown_class(worker_class, classes)}")
    return measured


def _router_options(given: dict[str, Any]) -> RouterOptions:
    times = {f.name: given[f.name] for f in fields(TimeLimits)}
    sizes = {n: given[n] for n in ("max_body_bytes", "max_header_bytes", "max_sequences", "decision_header_bytes")}
    return RouterOptions(
        times=TimeLimits(**times),
        sizes=SizeLimits(**sizes),
        sync=SyncOptions(
            window_messages=given["sync_window"],
            heartbeat_interval_s=given["heartbeat_s"],
            silence_s=given["silence_s"],
            gone_s=given["gone_s"],
        ),
        breaker=BreakerOptions(
            failures=given["breaker_failures"],
            probe_s=given["breaker_probe_s"],
            max_probe_s=given["breaker_max_probe_s"],
        ),
        routing=RoutingOptions(
            max_attempts=given["max_attempts"],
            audit_every=given["audit_every"],
            prefix_credit_s=given["prefix_credit_s"],
            kept_decisions=given["kept_decisions"],
        ),
    )


def _hash_key(path: Path | None, block_size: int) -> bytes:
    if path is None:
        return secrets.token_bytes(32)
    key = read_hash_key(path)
    ChainHasher(key, block_size)  # refuses a key of another length
    return key


def read_hash_key(path: Path) -> bytes:
    """Hexadecimal digits with or without a line's end, or else the raw bytes."""
    content = path.read_bytes()
    try:
        return bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        return content


def _api_keys(path: Path | None) -> ApiKeys:
    return ApiKeysFile(path, now_s=time.monotonic) if path is not None else ApiKeys(())


def _secret(path: Path | None) -> str | None:
    """The file's text without surrounding white space; None without a file."""
    if path is None:
        return None
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError(f"{path} is empty; it must hold the secret")
    return secret


def _tls(given: dict[str, Any]) -> TlsFiles | None:
    certificate, key = given["grpc_tls_cert_file"], given["grpc_tls_key_file"]
    if certificate is None and key is None:
        if given["grpc_tls_client_ca_file"] is not None:
            raise ValueError("--grpc-tls-client-ca-file needs --grpc-tls-cert-file and --grpc-tls-key-file")
        return None
    if certificate is None or key is None:
        raise ValueError("--grpc-tls-cert-file and --grpc-tls-key-file belong together: give both or neither")
    return TlsFiles(certificate=certificate, key=key, client_ca=given["grpc_tls_client_ca_file"])


def policy_parameters(pairs: tuple[str, ...]) -> dict[str, object]:
    """NAME=VALUE pairs as plain values: numbers, true, false, or text. Raises: ValueError naming the pair."""
    parameters: dict[str, object] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise ValueError(f"policy parameter {pair!r} must be NAME=VALUE")
        parameters[name.strip()] = _plain_value(text.strip())
    return parameters


def _plain_value(text: str) -> object:
    if text in ("on", "off"):
        return text == "on"
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text


class _NoCache:
    """Nothing is cached."""

    def match(self, blocks: object) -> dict[Any, int]:  # noqa: ARG002
        return {}

    def count(self, worker: object) -> int:  # noqa: ARG002
        return 0


def _tracer(*, tracing: bool) -> Tracer:
    if not tracing:
        return NoTracer()
    from kvrouting_router.tracing_otel import OtelTracer  # the SDK is heavy: only when asked for

    return OtelTracer.from_environment()


def _tokenizer(name: str | None, revision: str | None) -> PromptTokenizer | None:
    if name is None:
        return None
    from kvrouting_tokenization import load_tokenizer  # needs a library that token ids do not

    return load_tokenizer(name, revision=revision)


def _run(config: RouterConfig, tokenizer: PromptTokenizer | None, tracer: Tracer) -> None:
    import uvloop  # not on every platform

    try:
        uvloop.run(serve_until_signal(config, tokenizer, tracer))
    except (OSError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error


async def serve_until_signal(config: RouterConfig, tokenizer: PromptTokenizer | None, tracer: Tracer) -> None:
    """Runs a router until SIGTERM or SIGINT. Raises: OSError, RuntimeError if a port is taken."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    router = Router(config, tokenizer=tokenizer, tracer=tracer)
    try:
        await router.start()
    except BaseException:
        await router.stop()
        raise
    stopped = asyncio.create_task(signalled.wait())
    failed = asyncio.create_task(router.failed())
    try:
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        failed.cancel()
        stopped.cancel()
        _logger.info("stopping", extra={"fields": {"in_flight": router.pool.dispatcher.dispatched}})
        await router.stop()
