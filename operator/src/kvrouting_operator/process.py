"""The composition root of the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import random
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import kopf
from aiohttp import web
from kubernetes import client

from kvrouting_operator.handlers import build_registry, kopf_settings
from kvrouting_operator.kubernetes_cluster import KubernetesCluster, load_configuration
from kvrouting_operator.observe import Observer
from kvrouting_operator.operation import Operation
from kvrouting_operator.own_loop import in_own_loop
from kvrouting_operator.probe_pages import probe_pages
from kvrouting_operator.reconcile import Reconciler
from kvrouting_operator.report_fetcher import HttpReportFetcher
from kvrouting_operator.resources.names import FIELD_MANAGER
from kvrouting_operator.router_report import ReportFetcher
from kvrouting_operator.settings import OperatorSettings
from kvrouting_operator.watch import Watch
from kvrouting_operator.work_queue import Pace, WorkQueue

_logger = logging.getLogger(__name__)

# Between two looks at the flag that stands for a signal.
_LOOK_AT_STOP_S = 0.1
_KOPF_ENDS_S = 15.0
_CONNECTIONS_CLOSE_S = 0.25


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
        told = asyncio.Event()
        async with _serving(operation, settings) as port:
            _logger.info("listening", extra={"fields": {"http": port}})
            if on_listening is not None:
                on_listening(port)
            watch = Watch(
                lambda: run_kopf(operation, settings, configuration),
                on_begin=operation.watch_began,
                on_end=operation.watch_ended,
                pace=pace or Pace(),
                rng=random.Random(),
                now_s=time.monotonic,
            )
            await _until_told(_work(operation, watch), told=told, stop=stop)
        cluster.close()


async def _work(operation: Operation, watch: Watch) -> None:
    try:
        await operation.start()
        await watch.run()
    finally:
        await operation.stop()


async def run_kopf(operation: Operation, settings: OperatorSettings, configuration: client.Configuration) -> None:
    """Until it is cancelled. Raises: what ends kopf; DoesNotEndError.

    In a loop of its own: at its end kopf cancels all tasks of the loop, rounds and probes among them, and waits without
    limit until they are gone.
    """
    loop = asyncio.get_running_loop()

    async def work(flag: asyncio.Event, about_to_end: Callable[[], None]) -> None:
        tasks = await kopf.spawn_tasks(
            registry=build_registry(operation, configuration, hand_over=loop.call_soon_threadsafe),
            settings=kopf_settings(settings),
            # A name among peers, of whom there are none. Left out, kopf asks for the user's, and a pod's has none.
            identity=FIELD_MANAGER,  # type: ignore[arg-type]  # kopf exports no name for its kind of str
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,
            stop_flag=flag,
        )
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        about_to_end()
        try:
            await kopf.run_tasks(tasks)
        finally:
            # Its connections are closed in the loop's next turns, those with TLS once the other side has answered.
            await asyncio.sleep(_CONNECTIONS_CLOSE_S)

    await in_own_loop(work, name="kopf", ends_s=_KOPF_ENDS_S)


async def _until_told(work: Coroutine[None, None, None], *, told: asyncio.Event, stop: threading.Event | None) -> None:
    """Runs the work until it ends or the process is told to. Raises: what the work raises."""
    _set_on_signals(told)
    working, telling = asyncio.create_task(work), asyncio.create_task(_listen(told, stop))
    await asyncio.wait((working, telling), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def _set_on_signals(told: asyncio.Event) -> None:
    # Signals go to the main thread alone; in another one `stop` takes their place.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)


async def _listen(told: asyncio.Event, stop: threading.Event | None) -> None:
    """Returns when the process has been told to end, by a signal or by the flag."""
    while not (told.is_set() or (stop is not None and stop.is_set())):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AT_STOP_S if stop is not None else None):
                await told.wait()


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
