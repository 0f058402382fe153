"""Readiness after a watch has failed: only a watch that works makes the operator ready again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from kvrouting_operator.cluster import UnavailableError
from kvrouting_operator.crd import KIND
from kvrouting_operator.operation import Operation
from kvrouting_operator.reconcile import Outcome
from kvrouting_operator.settings import OperatorSettings
from kvrouting_operator.watch import Watch
from kvrouting_operator.work_queue import Pace, WorkQueue
from tests.operator.fake_cluster import FakeCluster
from tests.operator.pools import IMAGES

POOL = {"kind": KIND, "metadata": {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "1"}}
POD = {"metadata": {"name": "p", "namespace": "n", "labels": {}}}


class Settled:
    """Rounds that find nothing to do."""

    def reconcile(self, _key: object) -> Outcome:
        return Outcome(settled=True)


@pytest_asyncio.fixture
async def operation() -> AsyncIterator[Operation]:
    """It has looked once, and its watch has failed."""
    with ThreadPoolExecutor(1) as executor:
        made = Operation(
            settings=OperatorSettings(images=IMAGES),
            cluster=FakeCluster(),
            reconciler=Settled(),  # type: ignore[arg-type]
            executor=executor,
            queue=lambda work: WorkQueue(work, pace=Pace(), parallel=1, rng=random.Random(1)),
            now_s=asyncio.get_running_loop().time,
        )
        assert made.why_not_ready() == "pools have not been listed yet"
        await made._look()
        made.watch_began()
        assert made.why_not_ready() == ""
        made.watch_ended("KeyError: 'code'")
        yield made
        await made.stop()


async def test_a_watch_that_is_begun_anew_is_not_believed_before_it_works(operation: Operation) -> None:
    for _ in range(3):
        assert "KeyError: 'code'" in operation.why_not_ready()
        operation.watch_began()
        assert "KeyError: 'code'" in operation.why_not_ready()
        operation.watch_ended("KeyError: 'code'")


@pytest.mark.parametrize("show", ["pool", "owned"])
async def test_what_it_shows_proves_it(operation: Operation, show: str) -> None:
    def shown() -> None:
        if show == "pool":
            operation.pool_changed(None, POOL)
        else:
            operation.owned_changed(POD)

    shown()  # an event of the watch that has ended, late
    assert operation.why_not_ready() != ""
    operation.watch_began()
    shown()
    assert operation.why_not_ready() == ""


async def test_a_look_during_which_it_lasts_proves_it(operation: Operation) -> None:
    await operation._look()
    assert "KeyError" in operation.why_not_ready(), "no watch has begun since"
    operation.watch_began()
    await operation._look()
    assert operation.why_not_ready() == ""


async def test_a_look_that_another_failure_interrupts_proves_nothing(operation: Operation) -> None:
    operation.watch_began()
    looking = asyncio.create_task(operation._look())
    await asyncio.sleep(0)
    operation.watch_ended("OSError: again")
    operation.watch_began()
    await looking
    assert "OSError: again" in operation.why_not_ready()


async def test_a_look_that_fails_proves_nothing(operation: Operation) -> None:
    operation.watch_began()
    cluster: Any = operation._cluster
    cluster.failing["list", KIND] = UnavailableError("503: away")
    await operation._look()
    assert "pools cannot be listed" in operation.why_not_ready()
    cluster.failing.clear()
    await operation._look()
    assert operation.why_not_ready() == ""


async def test_readiness_does_not_flap_while_each_watch_fails_at_its_start(operation: Operation) -> None:
    said: set[bool] = set()
    begun = 0

    async def begin() -> None:
        nonlocal begun
        begun += 1
        said.add(operation.why_not_ready() == "")
        await asyncio.sleep(0)
        said.add(operation.why_not_ready() == "")
        if begun < 20:
            raise ConnectionResetError

    pace = Pace(gather_s=0, unsettled_s=0, first_retry_s=0.001, longest_s=0.001)
    watch = Watch(
        begin,
        on_begin=operation.watch_began,
        on_end=operation.watch_ended,
        pace=pace,
        rng=random.Random(1),
        now_s=asyncio.get_running_loop().time,
    )
    await watch.run()
    assert said == {False}
