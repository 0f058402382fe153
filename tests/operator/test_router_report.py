"""What routers say of workers: ranks add up to pods, and several routers to one word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouting_operator.report_fetcher import HttpReportFetcher
from kvrouting_operator.router_report import RouterAddress, UnreadablePageError, gathered, read_page


def rank(worker: str, **fields: Any) -> dict[str, Any]:
    """One entry of a page."""
    best: dict[str, Any] = {
        "worker": worker,
        "state": "live",
        "epoch": "e",
        "mirror": "exact",
        "unique_blocks": 2,
        "cached_tokens": 100,
        "capacity_tokens": 1000,
        "in_flight": 1,
        "sync_lag_s": 0.2,
        "eviction_policy": {"name": "rlt", "live": True},
        "events_flowing": True,
        "beliefs": {"more": "than is read"},
    }
    return {**best, **fields}


def page(*ranks: dict[str, Any]) -> bytes:
    """A router's page."""
    return json.dumps({"policy": "lbgr", "workers": list(ranks)}).encode()


def test_ranks_add_up_to_their_pod() -> None:
    report = gathered(
        [read_page(page(rank("a/0"), rank("a/1", in_flight=4, sync_lag_s=3.0), rank("b/0")))], block_size_tokens=64
    )
    a = report["a"]
    assert set(report) == {"a", "b"}
    assert (a.in_flight, a.cached_tokens, a.unique_cached_tokens, a.capacity_tokens) == (5, 200, 256, 2000)
    assert (a.state, a.mirror, a.sync_lag_s, a.eviction_policy, a.eviction_live) == ("live", "exact", 3.0, "rlt", True)


def test_requests_add_up_over_routers_and_caches_do_not() -> None:
    pages = [read_page(page(rank("a/0"))), read_page(page(rank("a/0", in_flight=6)))]
    a = gathered(pages, block_size_tokens=64)["a"]
    assert (a.in_flight, a.cached_tokens, a.capacity_tokens) == (7, 100, 1000)


def test_the_worst_word_counts() -> None:
    worst = rank("a/1", state="suspect", reason="silent", mirror="partial", events_flowing=False,
                 eviction_policy={"name": "lru", "live": False})  # fmt: skip
    a = gathered([read_page(page(rank("a/0"), worst))], block_size_tokens=64)["a"]
    assert (a.state, a.reason, a.mirror, a.events_flowing) == ("suspect", "silent", "partial", False)
    assert (a.eviction_policy, a.eviction_live) == ("lru", False)


def test_before_a_heartbeat_nothing_is_claimed() -> None:
    early = rank("a/0", cached_tokens=None, eviction_policy=None, events_flowing=None)
    a = gathered([read_page(page(early))], block_size_tokens=64)["a"]
    assert (a.cached_tokens, a.eviction_policy, a.eviction_live, a.events_flowing) == (None, None, None, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"workers": 3}', b'{"workers": [{"state": "live"}]}'])
def test_an_unreadable_page_is_told(body: bytes) -> None:
    with pytest.raises(UnreadablePageError, match="unreadable"):
        read_page(body)


def test_a_router_that_does_not_answer_is_silent() -> None:
    fetch = HttpReportFetcher(limit_s=0.5)
    report = fetch([RouterAddress(pod="r-1", url="http://127.0.0.1:9")], block_size_tokens=64)
    assert (report.answered, len(report.silent)) == (0, 1)
    assert report.silent[0].startswith("r-1: ")
