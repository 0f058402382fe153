"""`kvrouting sidecar`: options, files and environment become settings."""

from __future__ import annotations

import asyncio
import importlib
import socket
from pathlib import Path
from typing import Any

import click

from kvrouting_sidecar.grpc_channel import RouterCredentials
from kvrouting_sidecar.grpc_conversation import StreamTimes
from kvrouting_sidecar.json_log import log_to
from kvrouting_sidecar.process import ListenError, serve
from kvrouting_sidecar.rank_follower import FollowerTimes
from kvrouting_sidecar.router_names import parse_router_name
from kvrouting_sidecar.settings import DrainSettings, EndpointOverrides, Settings

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"auto_envvar_prefix": "KVROUTING_SIDECAR", "show_default": True})
@click.option("--pool", required=True, help="Name of the pool that this worker belongs to.")
@click.option("--pod-uid", default=None, help="Never used twice; default: the host's name.")
@click.option("--engine-url", default="http://127.0.0.1:30000", help="The engine's HTTP address, from here.")
@click.option(
    "--advertise-endpoint", default=None, help="The engine's HTTP address, from the routers; default: --engine-url."
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    envvar="KVROUTING_SIDECAR_ROUTER",
    help="Name and gRPC port of the routers; may be given several times.",
)
@click.option("--model", default="", help="Default: the name under which the engine serves it.")
@click.option("--block-size", default=64, help="Tokens of a routing block, 16..128; equal in the whole pool.")
@click.option(
    "--hash-key-file", type=_FILE, help="File with the pool's hash key: 32 to 128 hex digits or 16 to 64 raw bytes."
)
@click.option("--hash-key", default=None, help="The pool's hash key in hex; prefer the file or the environment.")
@click.option(
    "--gpu-class",
    default="",
    help="Selects the prior of the service time: built in (L40, L40S, H200 ...) or measured; the routers must know it.",
)
@click.option("--tokenizer-fingerprint", default="", help="Of the model's tokenizer, to be compared by the routers.")
@click.option("--events-endpoint", default=None, help="KV events of rank 0; default: as the engine says.")
@click.option("--replay-endpoint", default=None, help="Replay of rank 0; default: as the engine says.")
@click.option("--load-endpoint", default=None, help="Load reports of rank 0; default: as the engine says.")
@click.option(
    "--state-endpoint", default="tcp://127.0.0.1:5579", help="State socket of rank 0; 'none': the engine has none."
)
@click.option(
    "--require-eviction",
    default=None,
    help="Ready only while the engine reports this policy at work, e.g. rlt-adaptive.",
)
@click.option("--queue-mib", default=256, help="Memory for events that were received and not yet read, per rank.")
@click.option("--verify-interval", default=2.0, help="Seconds between two comparisons with the engine's own digest.")
@click.option("--flush-interval-ms", default=10.0, help="Milliseconds between two flushes of changes to a router.")
@click.option(
    "--lookup-interval",
    default=5.0,
    help="Seconds between two look-ups of the routers' names; at most 1 while one is lost.",
)
@click.option("--drain-timeout", default=300.0, help="Seconds that a drain waits for requests under way.")
@click.option("--drain-header", default="x-kvrouting-drain-token", help="Header that holds the drain token.")
@click.option("--drain-token-file", type=_FILE, help="File with the token that a drain must show.")
@click.option("--drain-token", default=None, help="The token itself; prefer the file or the environment.")
@click.option("--join-token-file", type=_FILE, help="File with the token that proves membership of the pool.")
@click.option("--join-token", default=None, help="The token itself; prefer the file or the environment.")
@click.option("--router-ca", type=_FILE, help="PEM of the routers' CA; without it the streams are not encrypted.")
@click.option("--router-certificate", type=_FILE, help="PEM of this worker's client certificate.")
@click.option("--router-private-key", type=_FILE, help="PEM of its private key.")
@click.option("--http-host", default="0.0.0.0", help="Address of the health, drain and metrics pages.")  # noqa: S104
@click.option("--http-port", default=9400, help="Their port; 0: any free one.")
@click.option("--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), default="INFO")
def sidecar(log_level: str, **options: Any) -> None:
    """Mirror one engine's prefix cache and stream it to the routers of its pool."""
    try:
        settings = settings_from(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    log_to(level=log_level)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(serve(settings))
        except ListenError as error:
            raise click.ClickException(str(error)) from error


def settings_from(**options: Any) -> Settings:
    """Settings from the options by their names. Raises: ValueError that says what is right."""
    if not options["routers"]:
        raise ValueError("no router is named: give --router host:port, for example --router routers.pool.svc:9090")
    state = options["state_endpoint"]
    return Settings(
        pool=options["pool"],
        pod_uid=options["pod_uid"] or socket.gethostname(),
        engine_url=options["engine_url"],
        advertise_endpoint=options["advertise_endpoint"] or options["engine_url"],
        routers=tuple(parse_router_name(name) for name in options["routers"]),
        model=options["model"],
        block_size_tokens=options["block_size"],
        hash_key=_hash_key(options["hash_key_file"], options["hash_key"]),
        gpu_class=options["gpu_class"],
        tokenizer_fingerprint=options["tokenizer_fingerprint"],
        require_eviction=options["require_eviction"] or None,
        endpoints=EndpointOverrides(
            events=options["events_endpoint"],
            replay=options["replay_endpoint"],
            load=options["load_endpoint"],
            state=None if state in ("", "none") else state,
        ),
        queue_bytes=options["queue_mib"] << 20,
        look_up_every_s=options["lookup_interval"],
        drain=DrainSettings(
            header=options["drain_header"],
            token=_secret(options["drain_token_file"], options["drain_token"]),
            limit_s=options["drain_timeout"],
        ),
        credentials=_credentials(options),
        stream_times=StreamTimes(flush_s=options["flush_interval_ms"] / 1000),
        follower_times=FollowerTimes(verify_s=options["verify_interval"]),
        http_host=options["http_host"],
        http_port=options["http_port"],
    )


def _credentials(options: dict[str, Any]) -> RouterCredentials:
    return RouterCredentials(
        join_token=_secret(options["join_token_file"], options["join_token"]),
        ca=_content(options["router_ca"]),
        certificate=_content(options["router_certificate"]),
        private_key=_content(options["router_private_key"]),
    )


def _hash_key(file: Path | None, digits: str | None) -> bytes:
    """A file holds hex digits or else the raw bytes, as at the router; an option or a variable only digits."""
    if file is not None:
        content = file.read_bytes()
        try:
            return bytes.fromhex(content.decode("ascii").strip())
        except ValueError:
            return content
    if digits is None:
        raise ValueError("the pool's hash key is missing: give --hash-key-file or KVROUTING_SIDECAR_HASH_KEY")
    try:
        return bytes.fromhex(digits)
    except ValueError as error:
        raise ValueError(
            f"the hash key of {len(digits)} characters is not hexadecimal: make one with 'openssl rand -hex 32'"
        ) from error


def _secret(file: Path | None, text: str | None) -> str | None:
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from error


def _content(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()


def _loop_factory() -> Any:
    """uvloop where it is installed; asyncio's own loop otherwise."""
    try:
        return importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
