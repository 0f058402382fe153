"""Runs the cells of studies that have no result yet, side by side, and keeps each result at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from kvrouting_simulator.study.cell import Cell, CellResult
from kvrouting_simulator.study.definition import Study
from kvrouting_simulator.study.execution import data_file, run_cell
from kvrouting_simulator.study.store import ResultStore


class CellFailedError(RuntimeError):
    """A cell could not be run; the message names study, place and reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A cell to run. where: study, labels and seed, for a reader."""

    cell: Cell
    where: str


Progress = Callable[[int, int, str], None]
"""Told after each cell: cells done, cells in all, where."""


def tasks_of(studies: Iterable[Study]) -> Sequence[Task]:
    """The cells of the studies in their order; one that several of them have comes once."""
    tasks: dict[str, Task] = {}
    for study in studies:
        for placed in study.cells():
            where = f"{study.name}: {', '.join(placed.labels.values())}, seed {placed.seed}"
            tasks.setdefault(placed.cell.digest, Task(cell=placed.cell, where=where))
    return list(tasks.values())


def missing_data(study: Study, data: Path) -> Sequence[str]:
    """The trace files that the study needs and the folder does not hold."""
    needed = {data_file(placed.cell.scenario) for placed in study.cells()}
    return sorted(name for name in needed if name is not None and not (data / name).is_file())


def run_tasks(
    tasks: Sequence[Task], store: ResultStore, *, data: Path, jobs: int, progress: Progress
) -> Mapping[str, CellResult]:
    """Results by digest, in the order of the tasks; what the store has is not run again.

    jobs: processes; with 1 everything runs in this one. Raises: CellFailedError for the first cell that fails; the
    results that are there by then are kept.
    """
    results = {task.cell.digest: found for task in tasks if (found := store.read(task.cell.digest)) is not None}
    todo = [task for task in tasks if task.cell.digest not in results]

    def done(task: Task, result: CellResult) -> None:
        store.write(result)
        results[task.cell.digest] = result
        progress(len(results), len(tasks), task.where)

    if jobs == 1:
        for task in todo:
            done(task, _run(task, data))
    else:
        _run_side_by_side(todo, data, jobs, done)
    return {task.cell.digest: results[task.cell.digest] for task in tasks}


def _run_side_by_side(todo: Sequence[Task], data: Path, jobs: int, done: Callable[[Task, CellResult], None]) -> None:
    # Fresh processes: a copy of this one may hold locks of its threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[CellResult], Task] = {}
        waiting = iter(todo)
        try:
            while True:
                for task in waiting:
                    running[pool.submit(_run, task, data)] = task
                    if len(running) >= 2 * jobs:
                        break
                if not running:
                    return
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    done(running.pop(future), future.result())
        finally:
            for future in running:
                future.cancel()


def _run(task: Task, data: Path) -> CellResult:
    try:
        return run_cell(task.cell, data=data)
    except (ValueError, OSError, RuntimeError) as error:
        raise CellFailedError(f"{task.where}: {error}") from error
