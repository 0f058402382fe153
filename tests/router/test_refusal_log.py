"""A refused worker leaves a line now and then, with how often it came."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouting_router.refusal_log import RefusalLog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records]


def test_the_same_is_told_once_a_minute_with_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = RefusalLog(now_s=clock)
    for second in range(0, 125, 5):
        clock.now_s = second
        log.tell("a wrong join token", peer=f"ipv4:10.0.0.1:{50_000 + second}")
    assert lines(caplog) == [
        {"reason": "a wrong join token", "peer": "ipv4:10.0.0.1:50000"},
        {"reason": "a wrong join token", "peer": "ipv4:10.0.0.1:50060", "times_since_the_last_line": 11},
        {"reason": "a wrong join token", "peer": "ipv4:10.0.0.1:50120", "times_since_the_last_line": 11},
    ]


def test_another_host_and_another_reason_are_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(now_s=Clock())
    said = [("a", "ipv4:10.0.0.1:1"), ("b", "ipv4:10.0.0.1:1"), ("a", "ipv6:%5Bfd00::2%5D:1"), ("a", "ipv4:10.0.0.1:2")]
    for reason, peer in said:
        log.tell(reason, peer=peer)
    assert [(line["reason"], line["peer"]) for line in lines(caplog)] == said[:3]


def test_what_is_remembered_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(now_s=Clock())
    for number in range(5000):
        log.tell("a", peer=f"ipv4:10.0.{number // 250}.{number % 250}:1")
    assert len(log._told) == 1024
