"""Whichever process wrote a line, its common fields have the same names and forms."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from kvrouting_operator.json_log import JsonFormatter as OperatorLines
from kvrouting_router.json_log import JsonFormatter as RouterLines
from kvrouting_sidecar.json_log import JsonLines as SidecarLines
from kvrouting_simulator.engine_process.command import _JsonLines as EngineLines


def failed() -> logging.LogRecord:
    """Of a number that is none."""
    try:
        int("broken")
    except ValueError:
        return logging.LogRecord("m", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    raise AssertionError("it is a number")


@pytest.mark.parametrize("formatter", [RouterLines(), SidecarLines(), OperatorLines(), EngineLines()])
def test_all_processes_write_the_same_fields(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("part.module", logging.WARNING, __file__, 1, "constant %s", ("text",), None)
    record.created = 1700000000.1234567
    line = json.loads(formatter.format(record))
    assert line == {"ts": 1700000000.123457, "level": "warning", "logger": "part.module", "event": "constant text"}


@pytest.mark.parametrize("formatter", [RouterLines(), SidecarLines(), OperatorLines(), EngineLines()])
def test_an_exception_stands_under_its_own_name(formatter: logging.Formatter) -> None:
    record = failed()
    line = json.loads(formatter.format(record))
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("'broken'")


def test_fields_of_the_sidecar_lie_beside_and_none_replaces_the_exception() -> None:
    record = failed()
    record.error = "UNAVAILABLE: away"
    line = json.loads(SidecarLines().format(record))
    assert (line["error"], "exception" in line) == ("UNAVAILABLE: away", True)
