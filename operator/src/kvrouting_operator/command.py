"""The command line of the operator."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging

import click

from kvrouting_operator.json_log import json_logging
from kvrouting_operator.pool import Images
from kvrouting_operator.settings import OperatorSettings

_SECONDS = click.FloatRange(min=0, min_open=True)
_VERSION = importlib.metadata.version("kvrouting")
# The supported version of the engine; its image has no plug-in.
_SGLANG = "lmsysorg/sglang:v0.5.23"


@click.command()
@click.option(
    "--namespace", "namespaces", multiple=True, help="Serve this namespace only; may be repeated. Default: all."
)
@click.option("--sglang-image", default=_SGLANG, show_default=True, help="Where a pool names no engine image.")
@click.option(
    "--simulated-image",
    default=f"kvrouting/engine-simulated:{_VERSION}",
    show_default=True,
    help="The same for engine.runtime simulated.",
)
@click.option(
    "--plugin-image",
    default=f"kvrouting/sglang-plugin:{_VERSION}",
    show_default=True,
    help="Carries the eviction plug-in in /opt/kvrouting-plugin.",
)
@click.option("--sidecar-image", default=f"kvrouting/sidecar:{_VERSION}", show_default=True)
@click.option("--router-image", default=f"kvrouting/router:{_VERSION}", show_default=True)
@click.option("--resync-s", type=_SECONDS, default=30.0, show_default=True, help="Between two looks at all pools.")
@click.option("--parallel", type=click.IntRange(min=1), default=4, show_default=True, help="Pools at a time.")
@click.option("--api-limit-s", type=_SECONDS, default=15.0, show_default=True, help="Of one request to the API server.")
@click.option("--router-limit-s", type=_SECONDS, default=2.0, show_default=True, help="Of one request to a router.")
@click.option(
    "--silence-limit-s",
    type=_SECONDS,
    default=60.0,
    show_default=True,
    help="How long the watch may miss what a list shows, before the liveness probe fails.",
)
@click.option(
    "--watch-s",
    type=click.IntRange(min=1),
    default=120,
    show_default=True,
    help="A watch is asked for anew after so long.",
)
@click.option("--probe-host", default="0.0.0.0", show_default=True)  # noqa: S104 - the kubelet asks from outside
@click.option("--probe-port", type=click.IntRange(0, 65535), default=8081, show_default=True, help="0: a free one.")
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False), help="Instead of the pod's ServiceAccount.")
@click.option(
    "--apply-crd/--no-apply-crd", default=True, show_default=True, help="Bring the CRD up to this version at the start."
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.help_option("-h", "--help")
def operator(
    *,
    sglang_image: str,
    simulated_image: str,
    plugin_image: str,
    sidecar_image: str,
    router_image: str,
    log_level: str,
    **options: object,
) -> None:
    """Run pools of engines, sidecars and routers on Kubernetes, from KVRoutingPool objects."""
    from kvrouting_operator.own_loop import DoesNotEndError
    from kvrouting_operator.process import run

    images = Images(
        sglang=sglang_image,
        simulated=simulated_image,
        plugin=plugin_image,
        sidecar=sidecar_image,
        router=router_image,
    )
    settings = OperatorSettings(images=images, **options)  # type: ignore[arg-type]
    with json_logging(log_level):
        # kopf tells of every event that it has handed over.
        logging.getLogger("kopf.objects").setLevel(max(logging.WARNING, logging.getLevelName(log_level.upper())))
        # It runs in a thread of its own, which gets no signals, and says so each time.
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        try:
            asyncio.run(run(settings))
        except DoesNotEndError as error:
            raise click.ClickException(f"{error}: another process may do better") from error
