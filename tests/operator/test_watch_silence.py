"""A watch that went silent is found by what lists show; a cluster in which nothing happens is not taken for one."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouting_operator.watch_silence import WatchSilence


def listed(uid: str, version: int) -> dict[str, Any]:
    """An object of a list."""
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def test_a_quiet_cluster_is_not_a_silent_watch() -> None:
    watch = WatchSilence(limit_s=60)
    watch.seen({"uid": "a", "resourceVersion": "5"})
    for now_s in range(0, 1000, 30):
        watch.listed([listed("a", 5)], now_s=now_s)
    assert not watch.is_silent(now_s=1000)


def test_the_watch_is_silent_only_after_the_limit() -> None:
    watch = WatchSilence(limit_s=60)
    watch.listed([listed("a", 7)], now_s=0)
    watch.listed([listed("a", 9)], now_s=30)
    assert not watch.is_silent(now_s=60)
    assert watch.is_silent(now_s=60.1)
    assert watch.silent_for_s(now_s=61) == 61


def test_news_as_old_as_the_list_ends_the_silence() -> None:
    watch = WatchSilence(limit_s=60)
    watch.listed([listed("a", 7)], now_s=0)
    watch.seen({"uid": "a", "resourceVersion": "6"})
    assert watch.is_silent(now_s=61)
    watch.seen({"uid": "a", "resourceVersion": "8"})
    assert not watch.is_silent(now_s=100)


def test_an_object_that_is_gone_is_owed_no_more() -> None:
    watch = WatchSilence(limit_s=60)
    watch.listed([listed("a", 7)], now_s=0)
    watch.listed([], now_s=30)
    assert not watch.is_silent(now_s=100)


def test_the_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="got 0"):
        WatchSilence(limit_s=0)
