"""The committed results are those of the committed studies; `make experiments-quick` runs them again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvrouting_simulator.study.study_file import read_study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
TABLES = [
    path
    for folder in (RESULTS, RESULTS / "quick")
    for path in sorted(folder.glob("*.csv"))
    if not path.stem.endswith("-times")
]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_line_is_a_cell_of_the_study_as_it_is_now(path: Path) -> None:
    study = read_study(ROOT / "experiments" / f"{path.stem}.toml", quick=path.parent.name == "quick")
    assert study is not None
    with path.open(encoding="utf-8", newline="") as file:
        found = [row["digest"] for row in csv.DictReader(file)]
    assert found == [placed.cell.digest for placed in study.cells()]


def test_every_study_with_a_small_form_has_its_numbers() -> None:
    quick = {
        path.stem for path in (ROOT / "experiments").glob("[!_]*.toml") if read_study(path, quick=True) is not None
    }
    assert quick == {path.stem for path in (RESULTS / "quick").glob("*.csv")}
