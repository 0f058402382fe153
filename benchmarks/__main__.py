"""Runs every benchmark of this folder; `--quick` takes seconds instead of minutes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs each module in order of its name, with the arguments that were given."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        print(f"\n== {path.stem}", flush=True)
        sys.argv = [str(path), *sys.argv[1:]]
        runpy.run_module(f"benchmarks.{path.stem}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
