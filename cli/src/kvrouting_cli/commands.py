"""The commands by name. Each is loaded when it is used: a router's image holds no simulator."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    module: str
    attribute: str
    extra: str
    help: str


_ENTRIES: Mapping[str, _Entry] = {
    "router": _Entry(
        module="kvrouting_router.command",
        attribute="router",
        extra="router",
        help="Serve a pool's HTTP API and send each request to the worker that will end it first.",
    ),
    "sidecar": _Entry(
        module="kvrouting_sidecar.command",
        attribute="sidecar",
        extra="sidecar",
        help="Mirror one engine's radix tree and stream it to the routers.",
    ),
    "engine": _Entry(
        module="kvrouting_simulator.engine_process.command",
        attribute="engine",
        extra="simulator",
        help="Run a simulated engine that speaks SGLang's HTTP, event and load surface.",
    ),
    "operator": _Entry(
        module="kvrouting_operator.command",
        attribute="operator",
        extra="operator",
        help="Run pools on Kubernetes, from KVRoutingPool objects.",
    ),
    "bench": _Entry(
        module="kvrouting_simulator.loadgen.command",
        attribute="bench",
        extra="simulator",
        help="Drive an OpenAI or SGLang endpoint with a workload or a trace and report.",
    ),
    "simulate": _Entry(
        module="kvrouting_simulator.experiment.command",
        attribute="simulate",
        extra="simulator",
        help="Run policies and engines on a virtual clock.",
    ),
    "experiments": _Entry(
        module="kvrouting_simulator.study.command",
        attribute="experiments",
        extra="simulator",
        help="Run the studies of experiments/ and write their pages.",
    ),
    "calibrate": _Entry(
        module="kvrouting_simulator.calibration.command",
        attribute="calibrate_command",
        extra="calibrate",
        help="Fit a worker class to a router's recorded decisions.",
    ),
    "evictions": _Entry(
        module="kvrouting_simulator.eviction_study.command",
        attribute="evictions",
        extra="simulator",
        help="Compare eviction policies on one cache, request after request.",
    ),
    "judge-estimator": _Entry(
        module="kvrouting_simulator.estimator_study.command",
        attribute="judge_command",
        extra="calibrate",
        help="Hold the router's predictions against what happens, in simulations.",
    ),
    "demo": _Entry(
        module="kvrouting_simulator.demo.command",
        attribute="demo",
        extra="simulator",
        help="Run the whole path on this machine and compare two set-ups.",
    ),
}


class LazyGroup(click.Group):
    """Imports a command only when it is run or its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """All names, whether or not their extras are installed."""
        return list(_ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command; None if there is none of that name. Raises: ClickException naming a missing extra."""
        entry = _ENTRIES.get(cmd_name)
        if entry is None:
            return None
        try:
            command = getattr(importlib.import_module(entry.module), entry.attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"'{cmd_name}' needs the package {error.name!r}: pip install 'kvrouting[{entry.extra}]'"
            ) from error
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Lists names and summaries without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in _ENTRIES.items()])


def _version() -> str:
    return importlib.metadata.version("kvrouting")


@click.group(
    cls=LazyGroup,
    context_settings={"auto_envvar_prefix": "KVROUTING", "help_option_names": ["-h", "--help"]},
    epilog="Each option is also an environment variable: KVROUTING_<COMMAND>_<OPTION>.",
)
@click.version_option(_version(), prog_name="kvrouting")
def kvrouting() -> None:
    """Randomized KV cache eviction and learning-based greedy routing for pools of LLM engines."""
