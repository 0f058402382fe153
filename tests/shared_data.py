"""Published data that lies beside the repository, where it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def shared_data(name: str) -> Path:
    """The file of that name. Skips the test where it is absent; fails it in CI where other data is present."""
    path = _SHARED / name
    if not path.exists():
        if _SHARED.parent.exists() and os.environ.get("CI") == "true":
            pytest.fail(f"{path} is missing")
        pytest.skip(f"{name} is not at hand: it is looked for in {_SHARED}")
    return path
