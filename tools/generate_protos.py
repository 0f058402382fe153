"""Generates the protobuf stubs into protos/gen, or with --check compares them with what is checked in."""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = PROTOS / "gen"


def generate(target: Path) -> None:
    """Writes the stubs of every proto below protos/kvrouting into `target`."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "kvrouting").rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{well_known}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ]
    )
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")
    for package in (target / "kvrouting", target / "kvrouting" / "v1"):
        (package / "__init__.py").write_text("")
        (package / "py.typed").write_text("")


def differences(expected: Path, actual: Path) -> list[str]:
    """Returns the relative paths that differ or exist on one side only, sorted."""
    names = {
        p.relative_to(side)
        for side in (expected, actual)
        for p in side.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    same = {
        name
        for name in names
        if (expected / name).is_file()
        and (actual / name).is_file()
        and filecmp.cmp(expected / name, actual / name, shallow=False)
    }
    return sorted(str(name) for name in names - same)


def main() -> int:
    """Generates, or checks and returns 1 with the list of stale files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a stub is stale")
    if not parser.parse_args().check:
        GENERATED.mkdir(parents=True, exist_ok=True)
        generate(GENERATED)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differences(Path(folder), GENERATED)
    if stale:
        print("stale protobuf stubs, run `make protos`:", *stale, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
