"""Results at their places in a study: means, standard deviations and paired comparisons over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvrouting_simulator.study.cell import CellResult
from kvrouting_simulator.study.definition import Claim, PlacedCell, Study, StudyError
from kvrouting_simulator.study.figures import MEASURED

Labels = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """mean and sd of some values; sd of a sample, 0 for a single value."""

    mean: float
    sd: float

    def text(self, decimals: int) -> str:
        """`mean ± sd`."""
        return f"{self.mean:.{decimals}f} ± {self.sd:.{decimals}f}"


def spread(values: Sequence[float]) -> Spread:
    """Raises: ValueError if there is no value."""
    if not values:
        raise ValueError("no values: a mean needs at least one")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean=mean, sd=0.0)
    return Spread(mean=mean, sd=math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)))


class Evidence:
    """A study with the results of all its cells. Raises: KeyError if one is missing."""

    def __init__(self, study: Study, results: Mapping[str, CellResult]) -> None:
        self.study = study
        self._results = {
            (self.place(placed.labels), placed.seed): results[placed.cell.digest] for placed in study.cells()
        }

    def place(self, labels: Mapping[str, str]) -> Labels:
        """Labels in the order of the axes."""
        return tuple(labels[axis.name] for axis in self.study.axes)

    def places(self) -> Sequence[Mapping[str, str]]:
        """Labels of each place, in the order of the axes' points."""
        first = self.study.seeds[0]
        return [placed.labels for placed in self.study.cells() if placed.seed == first]

    def rows(self) -> Iterator[tuple[PlacedCell, CellResult]]:
        """Each cell with its result."""
        for placed in self.study.cells():
            yield placed, self._results[self.place(placed.labels), placed.seed]

    def value(self, labels: Mapping[str, str], seed: int, figure: str) -> float | None:
        """One figure of one run; None if it has none."""
        result = self._results[self.place(labels), seed]
        return result.measured.get(figure) if figure in MEASURED else result.figures.get(figure)

    def spread(self, labels: Mapping[str, str], figure: str) -> Spread | None:
        """Over the seeds; None if a run does not have the figure."""
        values = [self.value(labels, seed, figure) for seed in self.study.seeds]
        known = [value for value in values if value is not None]
        return spread(known) if len(known) == len(values) else None

    def judge(self, claim: Claim) -> Spread:
        """The claim's number of each seed, averaged over the axes that it does not name: mean and sd over the seeds.

        Raises: StudyError if a run lacks the figure.
        """
        return spread([self._of_seed(claim, seed) for seed in self.study.seeds])

    def _of_seed(self, claim: Claim, seed: int) -> float:
        free = {axis.name for axis in self.study.axes} - set(claim.of) - set(claim.over)
        values = []
        for labels in self.places():
            if all(labels[name] == label for name, label in claim.of.items()):
                others = {name: label for name, label in labels.items() if name in free}
                values.append(self._number(claim, {**labels, **claim.of}, {**labels, **others, **claim.over}, seed))
        return math.fsum(values) / len(values)

    def _number(self, claim: Claim, of: Mapping[str, str], over: Mapping[str, str], seed: int) -> float:
        left = self._known(claim, of, seed)
        if claim.form == "value":
            return left
        right = self._known(claim, over, seed)
        if claim.form == "difference":
            return left - right
        ratio = left / right if right else math.inf
        return ratio if claim.form == "ratio" else 100 * (ratio - 1)

    def _known(self, claim: Claim, labels: Mapping[str, str], seed: int) -> float:
        value = self.value(labels, seed, claim.figure)
        if value is None:
            raise StudyError(f"{self.study.name}: claim {claim.name!r}: no {claim.figure} at {dict(labels)}")
        return value
