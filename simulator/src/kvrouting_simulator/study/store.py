"""Results of cells in a folder, one file each: what is there need not be run again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvrouting_simulator.study.cell import RESULT_FORMAT, CellResult


class ResultStore:
    """A file is whole or it is not there, so a run may be killed at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Where a cell's result lies."""
        return self._folder / f"{digest}.json"

    def read(self, digest: str) -> CellResult | None:
        """The result; None if there is none, or only one of another version."""
        try:
            found = msgspec.json.decode(self.path(digest).read_bytes(), type=CellResult)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if found.format == RESULT_FORMAT and found.digest == digest else None

    def write(self, result: CellResult) -> None:
        """Keeps a result; the folder is made if it is missing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        whole = self.path(result.digest)
        part = whole.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(result) + b"\n")
        part.replace(whole)
