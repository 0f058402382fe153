"""The options of the `router` command, in groups; each is also an environment variable."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrouting_core.routing.registry import POLICY_NAMES

_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


class _FinitePositive(click.FloatRange):
    """A number above 0. Infinity and NaN, which float() takes, are refused: no timer can wait for them."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_SECONDS = _FinitePositive()
_COUNT = click.IntRange(min=1)

Command = TypeVar("Command", bound=Callable[..., Any])


def _group(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in the order in which they stand."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


pool_options = _group(
    click.option("--model", required=True, help="Name under which the pool serves its model."),
    click.option("--pool", default="default", show_default=True, help="Name of the pool; workers must say the same."),
    click.option("--block-size", type=click.IntRange(16, 128), default=64, show_default=True,
                 help="Tokens in a routing block; workers must say the same."),
    click.option("--hash-key-file", type=_FILE,
                 help="The pool's secret: 32 to 128 hex digits or 16 to 64 raw bytes. No worker joins without it."),
    click.option("--join-token-file", type=_FILE, help="Sidecars must present its content; without it all may join."),
    click.option("--worker", "workers", multiple=True, metavar="URL", envvar="KVROUTING_ROUTER_WORKER",
                 help="An engine without a sidecar, http://host:port; may be repeated. Its cache is guessed."),
    click.option("--worker-class", default="L40", show_default=True,
                 help="GPU class of the --worker engines: built in, or of a --class-file."),
    click.option("--class-file", "class_files", multiple=True, type=_FILE, envvar="KVROUTING_ROUTER_CLASS_FILE",
                 help="A GPU class that was measured, as `kvrouting calibrate` writes it; may be repeated."),
    click.option("--worker-capacity-tokens", type=_COUNT, default=197_000, show_default=True,
                 help="KV cache of a --worker engine that does not state it."),
    click.option("--health-path", default="/health", show_default=True, help="An engine's health page."),
)  # fmt: skip

surface_options = _group(
    click.option("--http-host", default="127.0.0.1", show_default=True),
    click.option("--http-port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: a free one."),
    click.option("--grpc-host", default="127.0.0.1", show_default=True),
    click.option("--grpc-port", type=click.IntRange(0, 65535), default=9090, show_default=True, help="0: a free one."),
    click.option("--grpc-tls-cert-file", type=_FILE, help="PEM certificate of the gRPC port."),
    click.option("--grpc-tls-key-file", type=_FILE, help="Its PEM key."),
    click.option("--grpc-tls-client-ca-file", type=_FILE, help="Workers must show a certificate of this CA."),
    click.option("--api-keys-file", type=_FILE, help="Keys that clients must present, one a line."),
    click.option("--engine-api-key-file", type=_FILE, help="The key that the engines ask for."),
)  # fmt: skip

tokenizer_options = _group(
    click.option("--tokenizer", metavar="FOLDER|NAME",
                 help="The model's tokenizer: a folder, a name on the hub or 'bytes'. Text is guessed without."),
    click.option("--tokenizer-revision", help="Revision on the hub."),
    click.option("--tokenizer-threads", type=_COUNT, default=2, show_default=True),
)  # fmt: skip

policy_options = _group(
    click.option("--policy", type=click.Choice(POLICY_NAMES), default="lbgr", show_default=True),
    click.option("--policy-parameter", "policy_parameters", multiple=True, metavar="NAME=VALUE",
                 envvar="KVROUTING_ROUTER_POLICY_PARAMETER",
                 help="A parameter of the policy; may be repeated."),
    click.option("--seed", type=int, help="Of the policy's random choices; without it they differ from run to run."),
    click.option("--max-waiting", type=click.IntRange(min=0), default=1024, show_default=True,
                 help="Requests in the router's own queue, beyond which new ones get 429."),
    click.option("--max-expected-wait-ms", type=_SECONDS, default=120_000.0, show_default=True,
                 help="Wait on the best worker, beyond which new requests get 429."),
    click.option("--max-in-flight-per-worker", type=_COUNT, default=4096, show_default=True),
    click.option("--max-attempts", type=_COUNT, default=3, show_default=True, help="Workers tried for one request."),
    click.option("--audit-every", type=click.IntRange(min=0), default=100, show_default=True,
                 help="One decision in so many is checked against the plain walk; 0: none."),
    click.option("--prefix-credit-s", type=_SECONDS, default=1.0, show_default=True,
                 help="After the first token the index gets so long to show a prefix."),
)  # fmt: skip

limit_options = _group(
    click.option("--connect-s", type=_SECONDS, default=2.0, show_default=True),
    click.option("--first-byte-s", type=_SECONDS, default=300.0, show_default=True, help="Of a stream, per attempt."),
    click.option("--idle-s", type=_SECONDS, default=120.0, show_default=True, help="Between two events of a stream."),
    click.option("--total-s", type=_SECONDS, default=1800.0, show_default=True, help="Of a request, waiting included."),
    click.option("--client-read-s", type=_SECONDS, default=30.0, show_default=True,
                 help="For a client to send its headers, and again its body."),
    click.option("--client-write-s", type=_SECONDS, default=60.0, show_default=True,
                 help="For a client to take one piece of an answer."),
    click.option("--shutdown-s", type=_SECONDS, default=30.0, show_default=True,
                 help="For running requests to end after SIGTERM."),
    click.option("--pick-s", type=_SECONDS, default=600.0, show_default=True, help="For the final report of a Pick."),
    click.option("--max-body-bytes", type=_COUNT, default=32 * 1024 * 1024, show_default=True),
    click.option("--max-header-bytes", type=click.IntRange(min=1024), default=16 * 1024, show_default=True),
    click.option("--max-sequences", type=_COUNT, default=4096, show_default=True,
                 help="Answers that one request may ask for, prompts times n; more get 400."),
    click.option("--decision-header-bytes", type=click.IntRange(min=256), default=4096, show_default=True,
                 help="Above this the header x-kvrouting-decision holds the choice alone."),
)  # fmt: skip

sync_options = _group(
    click.option("--sync-window", type=_COUNT, default=64, show_default=True,
                 help="Messages that a sidecar may send without an acknowledgement."),
    click.option("--heartbeat-s", type=_SECONDS, default=1.0, show_default=True),
    click.option("--silence-s", type=_SECONDS, default=10.0, show_default=True, help="Then a worker is suspect."),
    click.option("--gone-s", type=_SECONDS, default=60.0, show_default=True, help="Then it is gone."),
    click.option("--breaker-failures", type=_COUNT, default=3, show_default=True,
                 help="Failed attempts in a row that make a worker suspect; 4xx never counts."),
    click.option("--breaker-probe-s", type=_SECONDS, default=1.0, show_default=True,
                 help="Pause before the first probe."),
    click.option("--breaker-max-probe-s", type=_SECONDS, default=30.0, show_default=True, help="Longest pause."),
)  # fmt: skip

telemetry_options = _group(
    click.option("--tracing/--no-tracing", default=False, show_default=True,
                 help="Send spans by OTLP, as the OTEL_EXPORTER_OTLP_* variables say."),
    click.option("--decisions-file", type=click.Path(dir_okay=False, writable=True, path_type=Path),
                 help="Append each decision with its outcome as a JSON line."),
    click.option("--log-decisions/--no-log-decisions", default=True, show_default=True),
    click.option("--kept-decisions", type=_COUNT, default=200, show_default=True, help="Shown by /debug/decisions."),
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
                 show_default=True),
)  # fmt: skip
