"""The wire's messages from the sidecar's own values."""

from __future__ import annotations

from kvrouting.v1 import sync_pb2
from kvrouting_sidecar.mirror_terms import Source
from kvrouting_sidecar.rank import LoadReport, Rank
from kvrouting_sidecar.session import DeliveredView, DeltaPart, Run, SnapshotPart

_SOURCES = {
    Source.EXACT: sync_pb2.MIRROR_SOURCE_EXACT,
    Source.PARTIAL: sync_pb2.MIRROR_SOURCE_PARTIAL,
    Source.APPROXIMATE: sync_pb2.MIRROR_SOURCE_APPROXIMATE,
}


def hello(rank: Rank, *, epoch: str) -> sync_pb2.WorkerMessage:
    """The first message of a stream."""
    facts, engine, vitals = rank.facts, rank.engine, rank.vitals()
    return sync_pb2.WorkerMessage(
        hello=sync_pb2.Hello(
            pool=facts.identity.pool,
            pod_uid=facts.identity.pod_uid,
            dp_rank=facts.identity.dp_rank,
            epoch=epoch,
            model=facts.model,
            block_size_tokens=facts.block_size_tokens,
            hash_key_id=facts.hash_key_id,
            tokenizer_fingerprint=facts.tokenizer_fingerprint,
            capacity_tokens=rank.capacity_tokens,
            gpu_class=facts.gpu_class,
            http_endpoint=facts.http_endpoint,
            dp_size=engine.dp_size,
            mirror_source=_SOURCES[vitals.source],
            eviction_policy=sync_pb2.EvictionPolicy(name=vitals.eviction_policy, proven_live=vitals.eviction_live),
            scheduler=_scheduler(rank),
            page_size_tokens=engine.page_size_tokens,
            engine_version=engine.version,
            required_eviction_policy=facts.required_eviction,
        )
    )


def _scheduler(rank: Rank) -> sync_pb2.Scheduler:
    options = rank.engine.scheduler
    return sync_pb2.Scheduler(
        max_running_requests=options.max_running_requests,
        chunked_prefill_tokens=options.chunked_prefill_tokens,
        max_prefill_tokens=options.max_prefill_tokens,
        prefill_decode_interval=options.prefill_decode_interval,
        mixed_chunk=options.mixed_chunk,
    )


def view_change(part: SnapshotPart | DeltaPart, *, epoch: str) -> sync_pb2.WorkerMessage:
    """A piece of a snapshot, or a delta."""
    if isinstance(part, SnapshotPart):
        return sync_pb2.WorkerMessage(
            snapshot=sync_pb2.SnapshotChunk(
                epoch=epoch,
                first=part.first,
                last=part.last,
                next_sequence=part.next_sequence,
                runs=_runs(part.runs),
            )
        )
    return sync_pb2.WorkerMessage(
        delta=sync_pb2.Delta(
            epoch=epoch,
            sequence=part.sequence,
            clear=part.clear,
            trimmed=part.trimmed,
            extended=_runs(part.extended),
        )
    )


def _runs(runs: list[Run]) -> list[sync_pb2.BlockRun]:
    return [sync_pb2.BlockRun(parent=parent, blocks=blocks) for parent, blocks in runs]


def heartbeat(rank: Rank, view: DeliveredView, *, epoch: str) -> sync_pb2.WorkerMessage:
    """The rank's vitals, with count and digest of what this router was sent."""
    vitals = rank.vitals()
    return sync_pb2.WorkerMessage(
        heartbeat=sync_pb2.Heartbeat(
            epoch=epoch,
            next_sequence=view.next_sequence,
            blocks=view.blocks,
            digest=view.digest,
            load=None if vitals.load is None else _load(vitals.load),
            mirror_source=_SOURCES[vitals.source],
            engine_healthy=vitals.engine_healthy,
            events_flowing=vitals.events_flowing,
            eviction_policy=sync_pb2.EvictionPolicy(name=vitals.eviction_policy, proven_live=vitals.eviction_live),
            reason=vitals.reason,
            cached_tokens=vitals.cached_tokens,
            end_to_end_verified=vitals.verified,
        )
    )


def _load(report: LoadReport) -> sync_pb2.Load:
    stat = report.stat
    return sync_pb2.Load(
        running_requests=stat.running_requests,
        waiting_requests=stat.waiting_requests,
        used_tokens=stat.used_tokens,
        max_total_tokens=stat.max_total_tokens,
        waiting_uncached_tokens=stat.waiting_uncached_tokens,
        max_running_requests=stat.max_running_requests,
        total_prefill_uncached_tokens=stat.total_prefill_uncached_tokens,
        total_prefill_busy_us=stat.total_prefill_busy_us,
        age_s=report.age_s,
    )


def draining(*, epoch: str, reason: str) -> sync_pb2.WorkerMessage:
    """The worker takes no new requests."""
    return sync_pb2.WorkerMessage(draining=sync_pb2.Draining(epoch=epoch, reason=reason))
