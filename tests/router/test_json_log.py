"""Log lines are gathered, written together, and never lost."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from kvrouting_router.json_log import json_logging

_logger = logging.getLogger(__name__)


def test_every_line_is_written_in_order_by_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)

    def many(name: str) -> None:
        for number in range(200):
            _logger.info("count", extra={"fields": {"name": name, "number": number}})

    with json_logging("info"):
        threads = [threading.Thread(target=many, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _logger.debug("too fine")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {line["event"] for line in lines} == {"count"}
    for name in "abc":
        assert [line["number"] for line in lines if line["name"] == name] == list(range(200))


def test_a_line_is_written_while_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()

    class Stream(io.StringIO):
        def flush(self) -> None:
            if self.getvalue():
                written.set()

    monkeypatch.setattr("sys.stderr", Stream())
    with json_logging("info"):
        for _ in range(3):
            _logger.info("one")
            assert written.wait(30)
            written.clear()


def test_a_record_that_cannot_be_formatted_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with json_logging("info"):
        _logger.info("odd", extra={"fields": {"terms": {("no", "key"): 1}}})
        _logger.info("next")
    assert '"event":"next"' in stream.getvalue()
    assert "odd" in stream.getvalue()  # logging's own word on a record that it cannot write
