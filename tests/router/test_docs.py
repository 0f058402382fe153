"""The router's page names everything that there is."""

from __future__ import annotations

from pathlib import Path

import click

from kvrouting_router.command import router
from kvrouting_router.errors import HTTP_STATUS
from kvrouting_router.metrics import RouterMetrics
from tests.router.router_under_test import running_router

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "router.md").read_text(encoding="utf-8")


def test_every_option_is_described() -> None:
    options = [p for p in router.params if isinstance(p, click.Option)]
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(options)
    for option in options:
        (row,) = [r for r in rows if r.startswith(f"| `{option.opts[0]}`")]
        assert row.rstrip(" |").count("|") == 3, f"{option.opts[0]} has no explanation"
        if isinstance(option.default, (int, float)) and not isinstance(option.default, bool):
            assert f"| {option.default:g} |" in row or f"| {option.default} |" in row


def test_every_error_is_described_with_its_status() -> None:
    for error, status in HTTP_STATUS.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith("| ") and f"`{error.__name__}`" in line]
        assert f"| {status} |" in row


async def test_every_metric_is_described() -> None:
    counted = {m.name for m in RouterMetrics().registry.collect()}
    async with running_router() as under_test:
        names = counted | {m.name for m in under_test.router.metrics.registry.collect()}
    for name in names:
        assert f"`{name.removeprefix('kvrouting_router_')}`" in PAGE, name
