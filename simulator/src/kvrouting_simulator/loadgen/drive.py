"""One run against an endpoint, from the first request to the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from kvrouting_simulator.bounds import at_least, positive
from kvrouting_simulator.loadgen.apis import Api
from kvrouting_simulator.loadgen.generator import Limits, LoadGenerator
from kvrouting_simulator.loadgen.http_sender import HttpSender, flush_caches
from kvrouting_simulator.loadgen.progress import ProgressView
from kvrouting_simulator.report import RequestRecord, Summary
from kvrouting_simulator.workloads.work_item import Client

# A generator that sends this late (P99) measures itself as much as the endpoint.
LATE_MS = 50.0
_FLUSH_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where requests go and how.

    timeout_s: for one request, from sending to its last byte. max_connections: None for no limit.
    flush_urls: engines whose caches are emptied directly before the run.
    """

    url: str
    api: Api
    timeout_s: float = 600.0
    max_connections: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    flush_urls: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} must begin with http:// or https://")
        positive("timeout_s", self.timeout_s)
        if self.max_connections is not None:
            at_least(1, "max_connections", self.max_connections)


async def drive(
    target: Target,
    client: Client,
    *,
    limits: Limits,
    progress: ProgressView,
    on_start: Callable[[LoadGenerator], None],
) -> tuple[RequestRecord, ...]:
    """Records in order of arrival. on_start: gets the generator just before it sends, to stop it or read its clock.

    Raises: FlushFailedError if a cache could not be emptied.
    """
    connector = aiohttp.TCPConnector(limit=0)
    # No limit but the sender's own: a limit of the session would end long runs.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        await flush_caches(session, target.flush_urls, timeout_s=_FLUSH_TIMEOUT_S)
        sender = HttpSender(
            session=session,
            url=target.url,
            api=target.api,
            timeout_s=target.timeout_s,
            monotonic_s=time.monotonic,
            max_connections=target.max_connections,
            headers=target.headers,
        )
        generator = LoadGenerator(
            client=client, sender=sender, monotonic_s=time.monotonic, limits=limits, on_record=progress.add
        )
        on_start(generator)
        await generator.run()
    return tuple(sorted(generator.records, key=lambda record: (record.arrival_ms, record.request_id)))


def lateness_notes(summary: Summary, *, max_connections: int | None) -> tuple[str, ...]:
    """What a reader must know if requests went out late; nothing if they did not."""
    late = summary.lateness
    if late is None or late.p99 <= LATE_MS:
        return ()
    reason = (
        "the generator or its machine could not keep up"
        if max_connections is None
        else f"the generator, its machine or the limit of {max_connections} connections could not keep up"
    )
    return (
        (
            f"requests were sent late (P50 {late.p50:.0f} ms, P99 {late.p99:.0f} ms, at most {late.maximum:.0f} ms): "
            f"{reason}; latencies count from the due time and include it"
        ),
    )
