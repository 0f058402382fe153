"""Writes the chart's Grafana dashboard from the table of panels below; --check compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "helm/kvrouting/dashboards/kvrouting.json"

_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_SCOPE = 'namespace=~"$namespace"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. queries: legend → PromQL. unit: a name of Grafana's. description: how to read it, and what is bad."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str


def _rate(counter: str, by: str = "") -> str:
    """Per second, summed over the processes."""
    over = f" by ({by})" if by else ""
    return f"sum{over}(rate({counter}{{{_SCOPE}}}[$__rate_interval]))"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket{{{_SCOPE}}}[$__rate_interval])))"


def _now(gauge: str, by: str, *, how: str = "max") -> str:
    return f"{how} by ({by}) ({gauge}{{{_SCOPE}}})"


_R, _S = "kvrouting_router", "kvrouting_sidecar"
_PROMPT = _rate(f"{_R}_prompt_tokens_total")

ROWS: dict[str, Sequence[Panel]] = {
    "What clients see": (
        Panel(
            "Requests by outcome",
            "reqps",
            {"{{outcome}}": _rate(f"{_R}_requests_total", "outcome")},
            "All but completed deserve a look.",
        ),
        Panel(
            "Time to first byte",
            "s",
            {f"P{int(q * 100)}": _quantile(q, f"{_R}_time_to_first_byte_seconds") for q in (0.5, 0.95, 0.99)},
            "From a request's arrival at the router to the first byte of its answer.",
        ),
        Panel(
            "Latency",
            "s",
            {f"P{int(q * 100)}": _quantile(q, f"{_R}_end_to_end_seconds") for q in (0.5, 0.95, 0.99)},
            "From a request's arrival at the router to the end of its answer.",
        ),
        Panel(
            "Refused and rejected",
            "reqps",
            {
                "refused: {{reason}}": _rate(f"{_R}_refusals_total", "reason"),
                "rejected: {{error}}": _rate(f"{_R}_rejected_requests_total", "error"),
            },
            "Refused: 429 and 503, the pool is too small or has no worker. Rejected: the request's own fault.",
        ),
        Panel(
            "Attempts after a failed one",
            "reqps",
            {"retries": _rate(f"{_R}_retries_total"), "{{reason}}": _rate(f"{_R}_failed_attempts_total", "reason")},
            "A worker that fails is tried no more until it answers a probe.",
        ),
        Panel(
            "Waiting in the router",
            "short",
            {"{{pod}}": _now(f"{_R}_waiting_requests", "pod")},
            "Requests that no worker has room for yet.",
        ),
    ),
    "Routing": (
        Panel(
            "Hit rate",
            "percentunit",
            {
                "engines report": f"{_rate(f'{_R}_cached_tokens_total')} / {_PROMPT}",
                "the index said": f"{_rate(f'{_R}_matched_tokens_total')} / {_PROMPT}",
            },
            "Share of prompt tokens that were cached. The two lines should lie close together.",
        ),
        Panel(
            "In flight by worker",
            "short",
            {"{{worker}}": _now(f"{_R}_in_flight_requests", "worker", how="sum")},
            "Of all routers together.",
        ),
        Panel(
            "Time of a decision",
            "s",
            {f"P{int(q * 100)}": _quantile(q, f"{_R}_decision_seconds") for q in (0.5, 0.99)},
            "Match, estimate, choose, reserve.",
        ),
    ),
    "Cache and sync": (
        Panel(
            "Cached tokens by worker",
            "short",
            {"{{worker}}": _now(f"{_R}_worker_cached_tokens", "worker")},
            "Near the capacity is normal: a cache is there to be full.",
        ),
        Panel(
            "Workers by state",
            "short",
            {"{{state}}": f"sum by (state) ({_R}_worker_state{{{_SCOPE}}})"},
            "Counted by each router: two routers show each worker twice.",
        ),
        Panel(
            "Lag of the stream to the routers",
            "s",
            {"{{pod}} → {{router}}": _now(f"{_S}_router_lag_seconds", "pod, router")},
            "Age of the oldest change that a router has not acknowledged. Seconds are bad.",
        ),
        Panel(
            "Differences found",
            "short",
            {
                "router: drift": f"sum(increase({_R}_drifts_total{{{_SCOPE}}}[$__range]))",
                "sidecar: failed comparisons": (
                    f'sum(increase({_S}_digest_comparisons_total{{{_SCOPE}, result="failed"}}[$__range]))'
                ),
                "sidecar: gaps": f"sum(increase({_S}_gaps_total{{{_SCOPE}}}[$__range]))",
            },
            "Each was found by its number or digest, and mended by a replay or a snapshot. They should stay flat.",
        ),
        Panel(
            "Eviction policy proven live",
            "bool_yes_no",
            {"{{pod}} rank {{rank}}": _now(f"{_S}_eviction_policy_live", "pod, rank", how="min")},
            "No: the engine runs another policy than the pool asked for, or does not say.",
        ),
        Panel(
            "Predicted and reported cache disagree",
            "bool_yes_no",
            {"{{worker}}": _now(f"{_R}_cache_mismatch", "worker")},
            "Yes for long: another tokenizer, chat template or page size than the router's.",
        ),
    ),
    "Eviction (rlt-adaptive alone)": (
        Panel(
            "Tokens loaded by the cache and by RLT",
            "short",
            {
                "own": _rate(f"{_S}_eviction_own_loaded_tokens_total"),
                "RLT would have": _rate(f"{_S}_eviction_ghost_loaded_tokens_total"),
            },
            "Prompt tokens that were not cached, and those that a cache under RLT would not have had.",
        ),
        Panel(
            "Distance to the limit of safe mode",
            "percentunit",
            {
                "{{pod}} rank {{rank}}": (
                    f"max by (pod, rank) ({_S}_eviction_phi_tokens{{{_SCOPE}}}"
                    f" / {_S}_eviction_phi_limit_tokens{{{_SCOPE}}})"
                )
            },
            "Below 0: ahead of RLT. At 1 safe mode begins.",
        ),
        Panel(
            "Safe mode",
            "bool_yes_no",
            {"{{pod}} rank {{rank}}": _now(f"{_S}_eviction_safe_mode", "pod, rank")},
            "Yes: what RLT would hold is not evicted until the debt is paid.",
        ),
    ),
    "Engines": (
        Panel(
            "Running requests",
            "short",
            {"{{pod}} rank {{rank}}": _now(f"{_S}_engine_running_requests", "pod, rank")},
            "As the engine reports them.",
        ),
        Panel(
            "Waiting requests",
            "short",
            {"{{pod}} rank {{rank}}": _now(f"{_S}_engine_waiting_requests", "pod, rank")},
            "In the engine's own queue.",
        ),
        Panel(
            "Tokens to prefill",
            "short",
            {"{{pod}} rank {{rank}}": _now(f"{_S}_engine_waiting_uncached_tokens", "pod, rank")},
            "Of waiting requests, without what is cached.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's schema (version 39), with one panel number for each row and panel."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        y += 1
        for number, panel in enumerate(row):
            x = number * _PANEL_WIDTH % _COLUMNS
            at = {"x": x, "y": y + number * _PANEL_WIDTH // _COLUMNS * _PANEL_HEIGHT}
            panels.append(_graph(panel, len(panels) + 1, at))
        y += -(-len(row) * _PANEL_WIDTH // _COLUMNS) * _PANEL_HEIGHT
    return {
        "title": "kvrouting",
        "uid": "kvrouting",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["kvrouting"],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _graph(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {**at, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    namespaces = f"label_values({_R}_known_workers, namespace)"
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "label": "Namespace",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": namespaces, "refId": "namespaces"},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def main() -> int:
    """0; 1 if --check finds another file than it would write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    content = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if parser.parse_args().check:
        if not DASHBOARD.exists() or DASHBOARD.read_text(encoding="utf-8") != content:
            print(
                f"{DASHBOARD.relative_to(ROOT)} is not what {Path(__file__).name} writes: run `make chart`",
                file=sys.stderr,
            )
            return 1
        return 0
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
