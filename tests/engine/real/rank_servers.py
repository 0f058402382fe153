"""Servers of two ranks on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.engine.real.interpreters import ROOT
from tests.engine.real.rank_witness import BACKEND
from tests.engine.real.servers import TWO_RANKS_ON_A_CPU, RealServer

_SEED = ("--random-seed", "11")


def data_parallel(model: Path, *, log: Path) -> RealServer:
    """Two data-parallel ranks."""
    return RealServer(model, log=log, flags=("--dp-size", "2", *_SEED), environment=TWO_RANKS_ON_A_CPU)


def tensor_parallel(model: Path, *, folder: Path, environment: Mapping[str, str] | None = None) -> RealServer:
    """Two tensor-parallel ranks, each with the witness at the port of that name.

    folder: for its log and the witness. environment: the plug-in's settings.
    """
    return RealServer(
        model,
        log=folder / "log",
        rlt=False,
        flags=("--tp-size", "2", "--radix-cache-backend", BACKEND, *_SEED),
        environment={**TWO_RANKS_ON_A_CPU, "PYTHONPATH": _witness_on_path(folder), **(environment or {})},
    )


def _witness_on_path(folder: Path) -> str:
    """A folder that, on PYTHONPATH, makes the witness an installed plug-in of SGLang."""
    metadata = folder / "rank_witness-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-witness\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nwitness = tests.engine.real.rank_witness:register\n"
    )
    return f"{folder}{os.pathsep}{ROOT}"
