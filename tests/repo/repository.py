"""What tests about the repository itself share."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("core", "tokenization", "sidecar", "router", "simulator", "cli", "operator", "engine")
PRODUCT_FOLDERS = tuple(f"{part}/" for part in (*PARTS, "protos", "helm", "images"))


def tracked_files() -> list[str]:
    """Paths relative to the root: those that git tracks, or, in an unpacked archive, all outside hidden folders."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    paths = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return [str(p) for p in paths if not any(part.startswith(".") for part in p.parts)]
