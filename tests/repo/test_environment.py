"""Every option of the processes of a pool is an environment variable of the same name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest

_PROCESSES = {
    "engine": "kvrouting_simulator.engine_process.command",
    "sidecar": "kvrouting_sidecar.command",
    "router": "kvrouting_router.command",
}


def _options(name: str) -> Iterator[click.Option]:
    command = getattr(importlib.import_module(_PROCESSES[name]), name)
    return (option for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("name", _PROCESSES)
def test_the_variable_bears_the_name_of_the_option(name: str) -> None:
    for option in _options(name):
        spelled = next(text for text in option.opts if text.startswith("--"))[2:].replace("-", "_")
        # click derives the variable from the parameter's name, which may be a plural.
        given = option.envvar if isinstance(option.envvar, str) else option.name
        assert given in (spelled, f"KVROUTING_{name}_{spelled}".upper()), f"--{spelled} is {given} in the environment"
