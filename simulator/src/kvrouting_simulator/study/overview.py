"""The page of all studies: what is true, what the paper claimed, what is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouting_simulator.study.definition import StudyError
from kvrouting_simulator.study.evidence import Evidence
from kvrouting_simulator.study.page import claim_numbers
from kvrouting_simulator.study.wording import filled, places


def overview_page(text: str, evidence: Sequence[Evidence], *, skipped: Mapping[str, str], command: str) -> str:
    """text: with {study.claim} for numbers; a line that wants one of a skipped study is left out.

    skipped: reason by study. Raises: StudyError for a number that no study has.
    """
    numbers = {f"{found.study.name}.{name}": n for found in evidence for name, n in claim_numbers(found).items()}
    lines = [_line(line, numbers, set(skipped)) for line in text.strip().splitlines()]
    rows = [
        f"| [{found.study.title}]({found.study.name}.md) | {found.study.paper.strip() or '–'} | "
        f"{filled(found.study.summary.strip(), claim_numbers(found)) or '–'} |"
        for found in evidence
    ]
    left_out = [f"- {name}: {reason}" for name, reason in skipped.items()]
    parts = [
        "\n".join(line for line in lines if line is not None),
        "\n".join(["| page | the paper | here |", "| --- | --- | --- |", *rows]),
        "\n".join(["Not run:", *left_out]) if left_out else "",
        f"Made by `{command}`; [docs/experiments.md](../experiments.md) tells how.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _line(line: str, numbers: Mapping[str, str], absent: set[str]) -> str | None:
    wanted = places(line)
    if any(name.split(".")[0] in absent for name in wanted):
        return None
    unknown = sorted(wanted - set(numbers))
    if unknown:
        raise StudyError(f"_overview.md wants {unknown[0]!r}, which is the number of no claim")
    return filled(line, numbers)
