"""`kvrouting engine`: the options of the simulated engine."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from kvrouting_core.class_file import ClassFileError, MeasuredClass, parse_class
from kvrouting_core.eviction import DEFAULT_POLICY, POLICIES
from kvrouting_core.routing.events import SchedulerOptions
from kvrouting_core.service_time import WORKER_CLASSES, worker_class
from kvrouting_simulator.engine_process.endpoints import ListenError, PortRange
from kvrouting_simulator.engine_process.event_publisher import PublisherLimits
from kvrouting_simulator.engine_process.fault_injection import parse_fault
from kvrouting_simulator.engine_process.rank import RankOptions
from kvrouting_simulator.engine_process.server import EngineServer, ServerOptions
from kvrouting_simulator.engine_process.tracing import Tracer
from kvrouting_simulator.option_types import NOT_NEGATIVE, POSITIVE

_PORT = click.IntRange(0, 65535)


class _JsonLines(logging.Formatter):
    """One JSON object a line, as every process of the product logs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@click.command(context_settings={"show_default": True})
@click.option(
    "--worker-class",
    type=click.Choice(list(WORKER_CLASSES)),
    default="L40",
    help="Card and model whose step times are played.",
)
@click.option(
    "--class-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="A worker class that was measured, as `kvrouting calibrate` writes it; instead of --worker-class.",
)
@click.option(
    "--capacity-tokens", type=click.IntRange(1), default=None, help="KV cache.  [default: what the worker class holds]"
)
@click.option("--page-size", type=click.IntRange(1, 64), default=1, help="Tokens per page of the KV cache.")
@click.option(
    "--eviction",
    type=click.Choice(list(POLICIES)),
    default=DEFAULT_POLICY,
    help="Eviction policy; `lru` is SGLang's own.",
)
@click.option("--seed", type=int, default=0, help="Of the eviction's and the faults' coins; rank r takes seed + r.")
@click.option("--max-running-requests", type=click.IntRange(1), default=2048)
@click.option(
    "--chunked-prefill-size",
    type=click.IntRange(1),
    default=8192,
    help="Prompt tokens of one request in one prefill batch.",
)
@click.option("--max-prefill-tokens", type=click.IntRange(1), default=16384, help="Prompt tokens in one prefill batch.")
@click.option(
    "--prefill-decode-interval",
    type=click.IntRange(0),
    default=0,
    help="Decode steps between prefills; 0: prefill always first.",
)
@click.option("--enable-mixed-chunk", is_flag=True, help="Decode along with prefill chunks.")
@click.option(
    "--dp-size", type=click.IntRange(1), default=1, help="Data-parallel ranks, each with its own cache and ports."
)
@click.option("--context-length", type=click.IntRange(2), default=131_072)
@click.option(
    "--own-answer-tokens", type=click.IntRange(1), default=128, help="Length of an answer whose request sets no limit."
)
@click.option("--served-model-name", default="simulated-llama", help="Model name on the OpenAI paths.")
@click.option(
    "--tokenizer", default="bytes", help="Folder or hub name of the model's tokenizer; `bytes`: one token a byte."
)
@click.option(
    "--speed",
    type=POSITIVE,
    default=1.0,
    help="10: everything takes a tenth of its time, and is so reported.",
)
@click.option("--enable-cache-report/--no-cache-report", default=True, help="Whether usage tells cached tokens.")
@click.option("--host", default="127.0.0.1", help="Of HTTP.")
@click.option("--port", type=_PORT, default=30000, help="Of HTTP; 0, here and below: any free port.")
@click.option("--events-host", default="127.0.0.1", help="Of KV events, replay, load and state.")
@click.option("--kv-events-port", type=_PORT, default=5557, help="Base of the KV events; rank r takes base + r.")
@click.option("--replay-port", type=_PORT, default=5558, help="Base of the replay of KV events.")
@click.option("--load-port", type=_PORT, default=5568, help="Base of the load reports.")
@click.option("--state-port", type=_PORT, default=5579, help="Base of the state sockets.")
@click.option("--kv-events/--no-kv-events", default=True, help="Publish KV events.")
@click.option("--replay/--no-replay", default=True, help="Replay KV events.")
@click.option("--load/--no-load", default=True, help="Publish load.")
@click.option(
    "--state/--no-state", default=True, help="Answer on the state socket; without it: an engine without the plug-in."
)
@click.option("--kv-events-queue", type=click.IntRange(1), default=100_000, help="Batches; more hold the scheduler up.")
@click.option(
    "--kv-events-hwm", type=click.IntRange(1), default=100_000, help="Batches per slow subscriber; more are dropped."
)
@click.option("--kv-events-buffer", type=click.IntRange(1), default=10_000, help="Batches kept for replay.")
@click.option(
    "--misbehave",
    multiple=True,
    metavar="JSON",
    help='A fault from the start, e.g. {"action": "die", "after_tokens": 100}.',
)
@click.option("--allow-misbehave", is_flag=True, help="Take such faults at POST /misbehave too.")
@click.option("--shutdown-seconds", type=NOT_NEGATIVE, default=5.0, help="What running requests get after SIGTERM.")
@click.option(
    "--tracing/--no-tracing",
    default=False,
    help="Send spans by OTLP over gRPC, as the variables OTEL_EXPORTER_OTLP_* and OTEL_TRACES_SAMPLER say.",
)
def engine(*, tracing: bool, **given: Any) -> None:
    """Run a simulated engine: SGLang's HTTP, KV events, load and state socket, without a GPU.

    Answers are made up, and always as long as was asked for: 16 tokens for a completion and 128 for /generate
    unless the request says otherwise; times are those of the worker class.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    try:
        measured = _measured(given["class_file"])
        options = _options(measured, **given)
        uvloop.run(EngineServer(options, tracer=_tracer() if tracing else None).run())
    except (ValueError, ListenError) as error:
        raise click.ClickException(str(error)) from error


def _tracer() -> Tracer:
    from kvrouting_simulator.engine_process.tracing_otel import OtelTracer  # the SDK is heavy: only when asked for

    return OtelTracer.from_environment()


def _measured(path: Path | None) -> MeasuredClass | None:
    if path is None:
        return None
    try:
        return parse_class(path.read_text(encoding="utf-8"))
    except (ClassFileError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _options(measured: MeasuredClass | None, **given: Any) -> ServerOptions:
    def ports(name: str, enabled: str) -> PortRange | None:
        if not given[enabled]:
            return None
        option = f"--{name.replace('_', '-')}"
        return PortRange(option=option, host_option="--events-host", host=given["events_host"], base=given[name])

    return ServerOptions(
        rank=_rank_options(measured, **given),
        worker_class=measured.name if measured else given["worker_class"],
        dp_size=given["dp_size"],
        served_model=given["served_model_name"],
        tokenizer=given["tokenizer"],
        context_length=given["context_length"],
        own_answer_tokens=given["own_answer_tokens"],
        speed=given["speed"],
        cache_report=given["enable_cache_report"],
        http=PortRange(option="--port", host_option="--host", host=given["host"], base=given["port"]),
        kv_events=ports("kv_events_port", "kv_events"),
        replay=ports("replay_port", "replay"),
        load=ports("load_port", "load"),
        state=ports("state_port", "state"),
        limits=PublisherLimits(
            queue_batches=given["kv_events_queue"],
            high_water_mark=given["kv_events_hwm"],
            replay_batches=given["kv_events_buffer"],
        ),
        faults=[parse_fault(text) for text in given["misbehave"]],
        allow_misbehave=given["allow_misbehave"],
        shutdown_s=given["shutdown_seconds"],
    )


def _rank_options(measured: MeasuredClass | None, **given: Any) -> RankOptions:
    played = worker_class(given["worker_class"])
    return RankOptions(
        times=measured.times if measured else played.times,
        capacity_tokens=given["capacity_tokens"] or played.capacity_tokens,
        page_size=given["page_size"],
        eviction=given["eviction"],
        seed=given["seed"],
        scheduler=SchedulerOptions(
            max_running_requests=given["max_running_requests"],
            chunked_prefill_tokens=given["chunked_prefill_size"],
            max_prefill_tokens=given["max_prefill_tokens"],
            prefill_decode_interval=given["prefill_decode_interval"],
            mixed_chunk=given["enable_mixed_chunk"],
        ),
    )
