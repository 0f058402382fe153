"""The Grafana dashboard against the pages that Prometheus reads: a renamed metric must not leave an empty panel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvrouting_sidecar.metrics import build_registry
from kvrouting_sidecar.process import pages_of
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_router import FakeRouter
from tests.fakes.fake_sidecar import fake_sidecar, hello
from tests.fakes.running_sidecar import eventually, running_sidecar
from tests.router.router_under_test import HASHER, running_router
from tools.generate_dashboard import dashboard

_METRIC = re.compile(r"\b(kvrouting_(?:router|sidecar)_[a-z0-9_]+)(\{[^}]*\})?")
_LABEL = re.compile(r'([a-z_]+)(?:=~|=)"')
# Prometheus adds these to whatever it scrapes.
_ADDED = {"namespace", "pod", "le"}


def _queries() -> Iterator[tuple[str, str, str]]:
    """Panel, expression, legend."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def _exposed(page: str) -> dict[str, set[str]]:
    """Metric → its labels, as a metrics page shows them."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        if family.type in ("counter", "histogram") and not family.samples:
            # Nothing counted under any label yet: the name alone is known.
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[family.type]
            for suffix in suffixes:
                labels.setdefault(family.name + suffix, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


async def _router_page() -> str:
    greeting = hello(hash_key_id=HASHER.key_id)
    async with running_router() as router, fake_sidecar(router.grpc_target, greeting, token="join") as sidecar:
        await sidecar.connect()
        await sidecar.snapshot([1])
        await router.post("/v1/completions", {"model": "m", "prompt": [1, 2, 3]})
        return (await router.get("/metrics"))[1]


async def _sidecar_page() -> str:
    async with (
        FakeEngine() as engine,
        FakeRouter() as router,
        running_sidecar(engine, router) as sidecar,
        pages_of(sidecar, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession() as client,
    ):
        await eventually(lambda: router.blocks() is not None)
        engine.eviction_figures = {
            "policy": "rlt-adaptive", "evicted_tokens": 1, "phi_tokens": 1, "phi_limit_tokens": 1,
            "phi_bound_tokens": 1, "safe_mode": False, "safe_entries": 0, "own_loaded_tokens": 1,
            "ghost_loaded_tokens": 1,
        }  # fmt: skip

        def last_seen() -> bool:
            engine.ranks[0].report_load()
            return sidecar.ranks[0].vitals().load is not None

        await eventually(last_seen)
        await eventually(lambda: "phi_tokens" in generate_latest(build_registry(sidecar)).decode())
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return await answer.text()


async def test_every_metric_of_the_dashboard_exists_with_the_labels_that_its_queries_use() -> None:
    exposed = _exposed(await _router_page()) | _exposed(await _sidecar_page())
    seen = 0
    for panel, expression, legend in _queries():
        for name, selector in _METRIC.findall(expression):
            seen += 1
            assert name in exposed, f"panel {panel!r} asks for {name}, which nobody exposes"
            if exposed[name]:
                wanted = set(_LABEL.findall(selector)) - _ADDED
                assert wanted <= exposed[name], f"panel {panel!r} selects {name} by {wanted - exposed[name]}"
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, f"panel {panel!r}: the legend {legend!r}"
    assert seen >= 20


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
