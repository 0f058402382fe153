"""`kvrouting experiments`: runs studies and writes their pages."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click

from kvrouting_simulator.study.cell import CellResult
from kvrouting_simulator.study.definition import Study, StudyError
from kvrouting_simulator.study.evidence import Evidence
from kvrouting_simulator.study.number_table import measured_csv, numbers_csv
from kvrouting_simulator.study.overview import overview_page
from kvrouting_simulator.study.page import study_page
from kvrouting_simulator.study.runner import CellFailedError, missing_data, run_tasks, tasks_of
from kvrouting_simulator.study.store import ResultStore
from kvrouting_simulator.study.study_file import read_studies

_FOLDER = click.Path(path_type=Path, file_okay=False)
_COMMAND = "make experiments"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    """studies: those that can run. skipped: why, by name. whole: whether it is every study there is."""

    studies: Sequence[Study]
    skipped: Mapping[str, str]
    whole: bool


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1)
@click.option("--studies", "folder", type=_FOLDER, default=Path("experiments"), help="Where the study files are.")
@click.option("--data", type=_FOLDER, default=Path("data"), help="Where recorded traffic lies, if anywhere.")
@click.option("--out", type=_FOLDER, default=Path("docs/results"), help="Where pages, plots and numbers go.")
@click.option("--cells", type=_FOLDER, default=Path("out/experiments"), help="Results so far, kept between calls.")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Runs side by side.")
@click.option("--quick", is_flag=True, help="The small form of each study: numbers only, to OUT/quick.")
@click.option("--check", is_flag=True, help="Run everything anew and compare the numbers with those in OUT.")
@click.option("--fresh", is_flag=True, help="Run everything anew.")
@click.option("--no-run", is_flag=True, help="Run nothing: write the studies whose results are all there.")
def experiments(
    *,
    names: Sequence[str],
    folder: Path,
    data: Path,
    out: Path,
    cells: Path,
    jobs: int,
    quick: bool,
    check: bool,
    fresh: bool,
    no_run: bool,
) -> None:
    """Run the studies NAMES (all without any), each a page with plots and numbers.

    A call that was interrupted goes on where it stopped. The same study gives the same numbers, byte for byte.
    """
    try:
        selection = _selected(read_studies(folder, quick=quick, names=names), data, whole=not names)
        if no_run:
            selection = _finished(selection, ResultStore(cells))
        temporary = tempfile.TemporaryDirectory() if check or fresh else nullcontext(str(cells))
        with temporary as kept:
            results = _run(selection, ResultStore(Path(kept)), data, jobs)
    except (StudyError, CellFailedError) as error:
        raise click.ClickException(str(error)) from error
    evidence = [Evidence(study, results) for study in selection.studies]
    target = out / "quick" if quick else out
    if check:
        _compare(evidence, target)
    else:
        _write(evidence, selection, folder, target, pages=not quick)


def _selected(studies: Sequence[Study], data: Path, *, whole: bool) -> _Selection:
    skipped = {}
    for study in studies:
        absent = missing_data(study, data)
        if absent:
            skipped[study.name] = f"needs {', '.join(absent)} in the folder that --data names"
            click.echo(f"{study.name}: skipped, {skipped[study.name]}", err=True)
    ready = [study for study in studies if study.name not in skipped]
    return _Selection(studies=ready, skipped=skipped, whole=whole)


def _finished(selection: _Selection, store: ResultStore) -> _Selection:
    """Without the studies of which a result is missing."""
    missing = {
        study.name: f"{absent} of its runs have no result yet"
        for study in selection.studies
        if (absent := sum(store.read(task.cell.digest) is None for task in tasks_of([study])))
    }
    ready = [study for study in selection.studies if study.name not in missing]
    return _Selection(studies=ready, skipped={**selection.skipped, **missing}, whole=selection.whole)


def _run(selection: _Selection, store: ResultStore, data: Path, jobs: int) -> Mapping[str, CellResult]:
    tasks = tasks_of(selection.studies)
    click.echo(f"{len(selection.studies)} studies, {len(tasks)} runs", err=True)
    line = "\r\033[K{}" if sys.stderr.isatty() else "{}\n"

    def progress(done: int, total: int, where: str) -> None:
        click.echo(line.format(f"{done}/{total} {where}"), err=True, nl=False)

    results = run_tasks(tasks, store, data=data, jobs=jobs, progress=progress)
    click.echo("", err=True)
    return results


def _write(evidence: Sequence[Evidence], selection: _Selection, folder: Path, out: Path, *, pages: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for found in evidence:
        name = found.study.name
        _save(out / f"{name}.csv", numbers_csv(found))
        if pages:
            times = measured_csv(found)
            if times is not None:
                _save(out / f"{name}-times.csv", times)
            _save(out / f"{name}.md", study_page(found, command=_COMMAND, has_times=times is not None))
            _draw(found, out / f"{name}.png")
    text = folder / "_overview.md"
    if pages and selection.whole and text.is_file():
        template = text.read_text(encoding="utf-8")
        page = overview_page(template, evidence, skipped=selection.skipped, command=_COMMAND)
        _save(out / "README.md", page)
    click.echo(f"{len(evidence)} studies written to {out}")


def _draw(evidence: Evidence, path: Path) -> None:
    from kvrouting_simulator.study.charts import chart_png  # draws plots: slow to import

    path.write_bytes(chart_png(evidence))


def _save(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def _compare(evidence: Sequence[Evidence], folder: Path) -> None:
    """Raises: ClickException naming each file whose bytes differ, and its first line that does."""
    wrong = []
    for found in evidence:
        path = folder / f"{found.study.name}.csv"
        expected = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        got = numbers_csv(found).splitlines()
        for number in range(max(len(expected), len(got))):
            pair = [lines[number] if number < len(lines) else "nothing" for lines in (expected, got)]
            if pair[0] != pair[1]:
                wrong.append(f"{path}:{number + 1}: it has {pair[0]}, the run gives {pair[1]}")
                break
    if wrong:
        raise click.ClickException("numbers differ; if they should, run this without --check\n" + "\n".join(wrong))
    click.echo(f"{len(evidence)} studies give the numbers in {folder}, byte for byte")
