"""The engine's command line: what it refuses, and what it says then."""

from __future__ import annotations

import socket

import pytest
import zmq
from click.testing import CliRunner

from kvrouting_simulator.engine_process.command import engine
from kvrouting_simulator.engine_process.endpoints import ListenError, PortInUseError, PortRange, bind_http, bind_ranks


def place(host: str, base: int = 0) -> PortRange:
    return PortRange(option="--port", host_option="--host", host=host, base=base)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speed", "inf"], "'--speed': inf is not a finite number"),
        (["--speed", "nan"], "'--speed': nan is not a finite number"),
        (["--speed", "0"], "'--speed': 0.0 is not in the range x>0"),
        (["--shutdown-seconds", "nan"], "'--shutdown-seconds': nan is not a finite number"),
        (["--shutdown-seconds", "inf"], "'--shutdown-seconds': inf is not a finite number"),
        (["--served-model-name", " "], "served_model is ' ': give the name"),
        (["--host", "nobody.invalid", "--port", "0"], "give an address of this machine with --host"),
        (["--host", "x" * 70, "--port", "0"], "give an address of this machine with --host"),
    ],
)
def test_nonsense_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(engine, arguments)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here_is_no_matter_of_ports(host: str) -> None:
    with pytest.raises(ListenError, match=rf"{host}:0 \(.+\): give an address of this machine with --host"):
        bind_http(place(host))
    with (
        zmq.Context() as context,
        pytest.raises(ListenError, match=rf"{host}:0 \(.+\): give an address of this machine with --host"),
    ):
        bind_ranks(context, zmq.PUB, place(host), ranks=2, high_water_mark=0)


def test_a_port_that_is_taken_asks_for_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, zmq.Context() as context:
        there = place("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(PortInUseError, match="choose another port with --port, 0 for any"):
            bind_http(there)
        with pytest.raises(PortInUseError, match="choose another port with --port, 0 for any"):
            bind_ranks(context, zmq.PUB, there, ranks=1, high_water_mark=0)
