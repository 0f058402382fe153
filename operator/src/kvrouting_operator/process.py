"""The composition root of the operator's process."""

from __future__ import annotations

import datetime as dt
import logging
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import kopf
from aiohttp import web

from kvrouting_operator.handlers import build_registry, kopf_settings
from kvrouting_operator.kubernetes_cluster import KubernetesCluster, load_configuration
from kvrouting_operator.observe import Observer
from kvrouting_operator.operation import Operation
from kvrouting_operator.probe_pages import probe_pages
from kvrouting_operator.reconcile import Reconciler
from kvrouting_operator.report_fetcher import HttpReportFetcher
from kvrouting_operator.router_report import ReportFetcher
from kvrouting_operator.settings import OperatorSettings
from kvrouting_operator.work_queue import Pace, WorkQueue

_logger = logging.getLogger(__name__)


async def run(
    settings: OperatorSettings,
    *,
    fetch: ReportFetcher | None = None,
    pace: Pace | None = None,
    stop: threading.Event | None = None,
    on_listening: Callable[[int], None] | None = None,
) -> None:
    """Until SIGTERM or SIGINT, or until stop is set. fetch: how routers are asked; default: by HTTP.

    on_listening: gets the port of the probes.
    """
    configuration = load_configuration(settings.kubeconfig)
    # Lists and the look at the CRD need a thread also while all rounds run.
    with ThreadPoolExecutor(max_workers=settings.parallel + 1, thread_name_prefix="cluster") as executor:
        cluster = KubernetesCluster(configuration, limit_s=settings.api_limit_s, parallel=settings.parallel + 1)
        observer = Observer(
            cluster=cluster,
            fetch=fetch or HttpReportFetcher(limit_s=settings.router_limit_s),
            random_hex=secrets.token_hex,
        )
        operation = Operation(
            settings=settings,
            cluster=cluster,
            reconciler=Reconciler(cluster=cluster, observer=observer, images=settings.images, now=_utc_now),
            executor=executor,
            queue=lambda work: WorkQueue(work, pace=pace or Pace(), parallel=settings.parallel, rng=random.Random()),
            now_s=time.monotonic,
        )
        async with _serving(operation, settings) as port:
            _logger.info("listening", extra={"fields": {"http": port}})
            if on_listening is not None:
                on_listening(port)
            await kopf.operator(
                registry=build_registry(operation, configuration),
                settings=kopf_settings(settings),
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                standalone=True,
                stop_flag=stop,
            )
        cluster.close()


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@asynccontextmanager
async def _serving(operation: Operation, settings: OperatorSettings) -> AsyncIterator[int]:
    """The probes' pages; yields their port."""
    runner = web.AppRunner(probe_pages(operation), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.probe_host, settings.probe_port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
